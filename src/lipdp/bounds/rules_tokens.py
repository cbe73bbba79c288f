"""Rules of what works on tokens: embedding bags, softmax, log-softmax and scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.calculus import Bound, Call, ParameterRef, Transfer, rule, rule_for_function, times
from lipdp.bounds.rules_functions import refuse_rewriting

__all__ = ["attention_gains"]


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


def _rows_along(call: Call, dim: Any) -> tuple[Bound, int, int, bool]:
    (axis,) = call.dims(dim)
    x = call.inputs[0]
    length = x.shape[axis - 1]
    return x, length, x.size // max(1, length), axis == call.rank - 1


def _softmax(call: Call, dim: Any) -> Transfer:
    """Each row is a distribution, of norm ≤ 1; the Jacobian diag(p) − ppᵀ has the norm ½ at most (two classes)."""
    x, _, rows, last = _rows_along(call, dim)
    return Transfer(Bound(math.sqrt(rows), x.shape, 1.0 if last else math.inf, 1.0), (0.5,), exact=False)


@rule(torch.nn.Softmax, torch.nn.Softmin)
def _softmax_module(module: torch.nn.Softmax, call: Call) -> Transfer:
    return _softmax(call, module.dim)


@rule(torch.nn.Softmax2d)
def _softmax_2d(module: torch.nn.Softmax2d, call: Call) -> Transfer:
    if len(call.inputs[0].shape) != 3:
        raise call.refuse("examples need the shape (channels, H, W)")
    return _softmax(call, 1)


@rule_for_function(torch.softmax, F.softmax, "softmax", F.softmin)
def _softmax_function(call: Call) -> Transfer:
    return _softmax(call, call.argument(1, "dim"))


def _log_softmax(call: Call, dim: Any) -> Transfer:
    """y = x − lse(x)·1 in each of R rows of K: |lse(x)| ≤ max|x| + ln K, so ‖y‖ ≤ X + √K(X + √R·ln K).

    The Jacobian I − 1pᵀ is a projection (not orthogonal), of norm ‖1‖‖p‖ ≤ √K.
    """
    x, length, rows, _ = _rows_along(call, dim)
    root = math.sqrt(length)
    norm = x.norm + root * (x.norm + math.sqrt(rows) * math.log(max(1, length)))
    peak = 2 * x.max_abs + math.log(max(1, length))
    return Transfer(Bound(norm, x.shape, max_abs=peak), (root,), exact=False)


@rule(torch.nn.LogSoftmax)
def _log_softmax_module(module: torch.nn.LogSoftmax, call: Call) -> Transfer:
    return _log_softmax(call, module.dim)


@rule_for_function(torch.log_softmax, F.log_softmax, "log_softmax")
def _log_softmax_function(call: Call) -> Transfer:
    return _log_softmax(call, call.argument(1, "dim"))


def attention_gains(q: Bound, k: Bound, v: Bound, scale: float) -> tuple[float, float, float]:
    """Gains of the cotangent for queries, keys and values, o_t = Σ_j p_tj·v_j with p_t = softmax(s·K·q_t).

    Queries: s·Cov_p(k, v)·g_t, and a covariance is at most r_k·r_v. Values: Pᵀg, and ‖P‖₂ ≤ √T_q for rows that sum to 1.
    Keys: s·Σ_t a_t⊗q_t with a_t = (diag p − ppᵀ)V·g_t, of norm ≤ min(r_v/√2, X_v/2)‖g_t‖; then Σ‖a_t‖‖q_t‖ ≤ …·G·X_q.
    """
    queries = q.shape[-2]
    first = times(scale, k.row, v.row)
    second = times(scale, q.norm, min(v.row / math.sqrt(2), v.norm / 2))
    return first, second, math.sqrt(queries)


def _check_mask(call: Call, mask: Any, shape: tuple[int, ...]) -> None:
    if isinstance(mask, Bound | ParameterRef) or not isinstance(mask, torch.Tensor):
        raise call.refuse("only a constant mask is supported")
    if mask.ndim > len(shape) and (mask.ndim != len(shape) + 1 or mask.shape[0] != 1):
        raise call.refuse(f"a mask of shape {tuple(mask.shape)} has a batch dimension of its own")
    mask = mask.expand(1, *shape)
    if mask.dtype == torch.bool:
        open_rows = mask.any(dim=-1)
    else:
        if bool(torch.isnan(mask).any()) or bool((mask == math.inf).any()):
            raise call.refuse("its mask has entries that are NaN or +inf")
        open_rows = (mask > -math.inf).any(dim=-1)
    if not bool(open_rows.all()):
        raise call.refuse("its mask leaves some query without any key: the answer is 0/0. Let every query see at least one key.")


@rule_for_function(F.scaled_dot_product_attention)
def _attention(call: Call) -> Transfer:
    """Each output is a mean of values: ‖o_t‖ ≤ r_v. Heads (leading dimensions) have disjoint inputs and outputs.

    Over H heads also ‖o_t‖² ≤ Σ_h max_j‖v_j^h‖² ≤ X_v², hence X_out ≤ √T_q·min(√H·r_v, X_v). Gains: ``attention_gains``.
    """
    names = ("query", "key", "value")
    q, k, v = (call.argument(position, name) for position, name in enumerate(names))
    if not all(isinstance(part, Bound) for part in (q, k, v)) or len(call.inputs) != 3:
        raise call.refuse("query, key and value must be activations")
    given = [name for name in call.kwargs if name in names]
    if given != list(names[3 - len(given) :]):
        raise call.refuse("give query, key and value in this order")
    if any(len(part.shape) < 2 or part.shape[:-2] != q.shape[:-2] for part in (q, k, v)):
        raise call.refuse("query, key and value need the shape (…, tokens, features), with the same leading dimensions")
    if call.argument(4, "dropout_p", 0.0):
        raise call.refuse("dropout inside attention is not supported; put torch.nn.Dropout behind it")
    if call.kwargs.get("enable_gqa"):
        raise call.refuse("enable_gqa is not supported: repeat the keys and values explicitly")
    scale = call.kwargs.get("scale")
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else abs(float(scale))
    mask = call.argument(3, "attn_mask")
    if mask is not None:
        _check_mask(call, mask, (*q.shape[:-1], k.shape[-2]))
    heads, queries = math.prod(q.shape[:-2]), q.shape[-2]
    norm = math.sqrt(queries) * min(times(math.sqrt(heads), v.row), v.norm)
    gains = attention_gains(q, k, v, scale)
    return Transfer(Bound(norm, call.output_shape, v.row_norm, v.max_abs), gains, exact=False)
