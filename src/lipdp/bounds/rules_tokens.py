"""Rules of torch's layers that reduce tokens: embedding bags."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.bound import Bound, Transfer
from lipdp.bounds.registry import Call, ParameterRef, rule, rule_for_function
from lipdp.bounds.rules_modules import refuse_rewriting

__all__: list[str] = []


def _bag(call: Call, weight: torch.Tensor | ParameterRef, name: str, mode: str) -> Transfer:
    """One bag of T tokens for each example. The gradient of the table is largest where all T tokens are the same row.

    mean: that row gets Σ_t δ/T = δ, so Δ = G. sum: T·δ, so Δ = T·G. max: each feature's cotangent goes to one row, so Δ = G.
    Going forward, with rows of norm ≤ R: R for the mean, T·R for the sum, the norm of the features' largest entries for the max.
    """
    x = call.inputs[0]
    if len(x.shape) != 1:
        raise call.refuse("it needs (batch, tokens) ids: each example is one bag. Bags by offsets may mix examples")
    tokens = x.shape[0]
    free = isinstance(weight, ParameterRef) or weight.requires_grad
    tensor = (weight.tensor if isinstance(weight, ParameterRef) else weight).detach().double()
    if free:
        norm = math.inf
    elif mode == "max":
        norm = float(torch.linalg.vector_norm(tensor.abs().amax(dim=0)))
    else:
        norm = float(torch.linalg.vector_norm(tensor, dim=1).max()) * (tokens if mode == "sum" else 1)
    why = "tokens are not a vector space, and its rows are trained freely; use lipdp.nn.BoundedEmbedding and TokenMean"
    factor = float(tokens) if mode == "sum" else 1.0
    return Transfer(Bound(norm, call.output_shape), (math.inf,), {name: factor} if free else {}, why_infinite=why)


def _refuse_bags(call: Call, offsets: Any, weights: Any) -> None:
    if offsets is not None or weights is not None:
        raise call.refuse("offsets and per_sample_weights are not supported: give (batch, tokens) ids, one bag for each example")


@rule(torch.nn.EmbeddingBag)
def _embedding_bag(module: torch.nn.EmbeddingBag, call: Call) -> Transfer:
    _refuse_bags(call, call.argument(1, "offsets"), call.argument(2, "per_sample_weights"))
    refuse_rewriting(call, module.max_norm, module.scale_grad_by_freq, module.sparse)
    return _bag(call, module.weight, "weight", module.mode)


@rule_for_function(F.embedding_bag)
def _embedding_bag_function(call: Call) -> Transfer:
    weight = call.argument(1, "weight")
    if isinstance(weight, Bound):
        raise call.refuse("the table of an embedding must be a parameter or a constant")
    _refuse_bags(call, call.argument(2, "offsets"), call.argument(8, "per_sample_weights"))
    refuse_rewriting(call, call.argument(3, "max_norm"), call.argument(5, "scale_grad_by_freq"), call.argument(7, "sparse"))
    return _bag(call, weight, weight.name if isinstance(weight, ParameterRef) else "", call.argument(6, "mode", "mean"))
