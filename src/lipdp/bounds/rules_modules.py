"""Rules of torch's layers that only move entries, and of embeddings. Affine layers: rules_weighted; pools: rules_pools."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from lipdp.bounds.bound import Bound, Transfer
from lipdp.bounds.registry import Call, ParameterRef, rule, rule_for_function
from lipdp.bounds.rules_shapes import reshaped
from lipdp.bounds.rules_weighted import bias_norm, channels_and_spatial, conv_multiplicity, weighted_transfer
from lipdp.bounds.windows import as_tuple

__all__ = ["as_tuple", "bias_norm", "channels_and_spatial", "conv_multiplicity", "refuse_rewriting", "weighted_transfer"]


@rule(torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten)
def _rearrange(module: torch.nn.Module, call: Call) -> Transfer:
    """The entries of each example in the same order (the trace has checked that the batch dimension stays)."""
    if isinstance(module, torch.nn.Flatten):
        call.dims(module.start_dim)
    if isinstance(module, torch.nn.Unflatten):
        call.dims(module.dim)
    return Transfer(reshaped(call.inputs[0], call.output_shape))


@rule(torch.nn.PixelShuffle, torch.nn.PixelUnshuffle, torch.nn.ChannelShuffle)
def _shuffle(module: torch.nn.Module, call: Call) -> Transfer:
    """A permutation of the entries of each example."""
    return Transfer(Bound(call.inputs[0].norm, call.output_shape, max_abs=call.inputs[0].max_abs))


@rule(torch.nn.ZeroPad1d, torch.nn.ZeroPad2d, torch.nn.ZeroPad3d)
def _zero_pad(module: torch.nn.ZeroPad2d, call: Call) -> Transfer:
    x = call.inputs[0]
    if any(module.padding[2 * len(x.shape) :]):
        raise call.refuse("it pads the batch dimension")
    if module.value != 0:
        raise call.refuse(f"it pads with {module.value}, not with zeros")
    return Transfer(Bound(x.norm, call.output_shape, x.row_norm, x.max_abs))


def _embedding(call: Call, weight: torch.Tensor | ParameterRef, name: str) -> Transfer:
    """T tokens take T rows: the gradient of one row may be the sum of all T cotangents, at most √T·G by Cauchy–Schwarz."""
    tokens = call.inputs[0].size
    free = isinstance(weight, ParameterRef) or weight.requires_grad
    tensor = weight.tensor if isinstance(weight, ParameterRef) else weight
    longest = math.inf if free else float(torch.linalg.vector_norm(tensor.detach().double(), dim=-1).max())
    bound = Bound(math.inf, call.output_shape, longest)
    why = "tokens are not a vector space, and its rows are trained freely; use lipdp.nn.BoundedEmbedding"
    return Transfer(bound, (math.inf,), {name: math.sqrt(tokens)} if free else {}, why_infinite=why)


def refuse_rewriting(call: Call, max_norm: object, by_frequency: object, sparse: object) -> None:
    """Options of an embedding that have no private form."""
    if max_norm is not None or by_frequency or sparse:
        raise call.refuse(
            "max_norm rewrites weights while data pass, scale_grad_by_freq mixes examples, and sparse gradients can't be noised; "
            "leave them off"
        )


@rule(torch.nn.Embedding)
def _embedding_module(module: torch.nn.Embedding, call: Call) -> Transfer:
    refuse_rewriting(call, module.max_norm, module.scale_grad_by_freq, module.sparse)
    return _embedding(call, module.weight, "weight")


@rule_for_function(F.embedding)
def _embedding_function(call: Call) -> Transfer:
    refuse_rewriting(call, call.argument(3, "max_norm"), call.argument(5, "scale_grad_by_freq"), call.argument(6, "sparse"))
    weight = call.argument(1, "weight")
    if isinstance(weight, Bound):
        raise call.refuse("the table of an embedding must be a parameter or a constant")
    return _embedding(call, weight, weight.name if isinstance(weight, ParameterRef) else "")
