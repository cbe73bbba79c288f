"""Rules of normalisations that stay within one example: layer, group, instance, RMS, and frozen batch normalisation.

With ε > 0 they are Lipschitz: x̂ = Px/√(v+ε), where P centres and v is the mean square of Px, has ‖x̂‖ ≤ min(√d, ‖x‖/√ε) and a
Jacobian of norm ≤ 1/√ε (P less a rank-one part, both of norm ≤ 1, over √(v+ε)).

And of what works on tokens: embedding bags, softmax, log-softmax and scaled dot-product attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.calculus import Bound, Call, ParameterRef, Transfer, rule, rule_for_both, rule_for_function, times
from lipdp.bounds.rules_functions import refuse_rewriting
from lipdp.errors import UnsupportedError

_FREE = "its scale and shift are trained freely; use lipdp.nn.LayerNorm, RMSNorm or GroupNorm, which keep them bounded"


Vector = torch.Tensor | ParameterRef | None


@dataclass(frozen=True)
class Affine:
    """γ and β of a normalisation: bounds on ‖γ‖∞ and ‖β‖₂ (∞: trained freely), and their names if they are parameters."""

    scale: float = 1.0
    shift: float = 0.0
    weight: str | None = None
    bias: str | None = None

    @classmethod
    def of(cls, weight: Any, bias: Any, names: tuple[str, str] = ("weight", "bias")) -> Affine:
        """From a module's parameters or a function's arguments."""

        def look(value: Any, name: str, order: float) -> tuple[float | None, str | None]:
            if value is None:
                return None, None
            if isinstance(value, ParameterRef):
                return math.inf, value.name
            if value.requires_grad:
                return math.inf, name
            return float(torch.linalg.vector_norm(value.detach().double(), ord=order)), None

        (scale, weight_name), (shift, bias_name) = look(weight, names[0], math.inf), look(bias, names[1], 2)
        return cls(1.0 if scale is None else scale, 0.0 if shift is None else shift, weight_name, bias_name)


@dataclass(frozen=True)
class Normalised:
    """What is known of x̂: its norm, each of its rows, and the factor of G in the gradient of γ."""

    norm: float
    gain: float
    row: float
    gradient: float
    positions: int


def _checked(call: Call, eps: float | None) -> float:
    if eps is None or not eps > 0:
        raise call.refuse(f"with eps={eps} it is not Lipschitz where the input is constant; give eps a positive value")
    return float(eps)


def centred_rows(call: Call, dims: int, eps: float | None) -> Normalised:
    """LayerNorm over the last ``dims`` dimensions, d features at T positions; one entry of x̂ is at most √(d−1)."""
    return _rows(call, dims, _checked(call, eps), centred=True)


def plain_rows(call: Call, dims: int, eps: float | None) -> Normalised:
    """RMSNorm: as LayerNorm without centring; one entry of x̂ may be √d."""
    return _rows(call, dims, _checked(call, eps), centred=False)


def _rows(call: Call, dims: int, eps: float, centred: bool) -> Normalised:
    x = call.inputs[0]
    if not 1 <= dims <= len(x.shape):
        raise call.refuse(f"it normalises over {dims} dimensions, and examples of shape {x.shape} have {len(x.shape)}: the batch?")
    d = math.prod(x.shape[len(x.shape) - dims :])
    positions = x.size // max(1, d)
    norm = min(math.sqrt(x.size), times(1 / math.sqrt(eps), x.norm))
    gradient = min(norm, math.sqrt(positions * max(0, d - 1)) if centred else math.inf)
    row = min(math.sqrt(d), times(1 / math.sqrt(eps), x.row_norm)) if dims == 1 else math.inf
    return Normalised(norm, 1 / math.sqrt(eps), row, gradient, positions)


def channel_groups(call: Call, groups: int, eps: float | None) -> Normalised:
    """GroupNorm: for one channel |Σδx̂| ≤ ‖δ_c‖‖x̂_c‖, and ‖x̂_c‖ is at most that of its group of d_g entries, √d_g."""
    x, eps = call.inputs[0], _checked(call, eps)
    norm = min(math.sqrt(x.size), times(1 / math.sqrt(eps), x.norm))
    positions = math.prod(x.shape[1:])
    return Normalised(norm, 1 / math.sqrt(eps), math.inf, min(norm, math.sqrt(x.size // groups)), positions)


def normalised_transfer(call: Call, hat: Normalised, affine: Affine) -> Transfer:
    """y = γ⊙x̂ + β at T positions: ‖γ‖∞X̂ + √T‖β‖; G_in = ‖γ‖∞·G·gain; Δ_γ as ``hat`` says, Δ_β = √T·G."""
    root = math.sqrt(hat.positions)
    norm = times(affine.scale, hat.norm) + (root * affine.shift if affine.shift else 0.0)
    row = times(affine.scale, hat.row) + affine.shift
    parameters: dict[str, float] = {}
    if affine.weight is not None:
        parameters[affine.weight] = hat.gradient
    if affine.bias is not None:
        parameters[affine.bias] = parameters.get(affine.bias, 0.0) + root
    return Transfer(
        Bound(norm, call.output_shape, row), (times(affine.scale, hat.gain),), parameters, exact=False, why_infinite=_FREE
    )


@rule_for_both(
    [torch.nn.LayerNorm], [F.layer_norm], ("normalized_shape", 1, None), ("weight", 2, None), ("bias", 3, None), ("eps", 4, 1e-5)
)
def _layer_norm(call: Call, shape: Sequence[int], weight: Vector, bias: Vector, eps: float) -> Transfer:
    return normalised_transfer(call, centred_rows(call, len(shape), eps), Affine.of(weight, bias))


@rule_for_both([torch.nn.RMSNorm], [F.rms_norm], ("normalized_shape", 1, None), ("weight", 2, None), ("eps", 3, None))
def _rms_norm(call: Call, shape: Sequence[int], weight: Vector, eps: float | None) -> Transfer:
    return normalised_transfer(call, plain_rows(call, len(shape), eps), Affine.of(weight, None))


@rule_for_both(
    [torch.nn.GroupNorm], [F.group_norm], ("num_groups", 1, None), ("weight", 2, None), ("bias", 3, None), ("eps", 4, 1e-5)
)
def _group_norm(call: Call, groups: int, weight: Vector, bias: Vector, eps: float) -> Transfer:
    return normalised_transfer(call, channel_groups(call, int(groups), eps), Affine.of(weight, bias))


def _instance(call: Call, eps: float, affine: Affine, axes: int | None) -> Transfer:
    x = call.inputs[0]
    if len(x.shape) < 2 or (axes is not None and len(x.shape) != axes + 1):
        raise call.refuse(f"examples of shape {x.shape} have no channel dimension, so torch takes the batch for channels")
    return normalised_transfer(call, channel_groups(call, x.shape[0], eps), affine)


@rule(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
def _instance_norm(module: torch.nn.InstanceNorm2d, call: Call) -> Transfer:
    """GroupNorm with one group for each channel."""
    if module.track_running_stats:
        raise call.refuse("track_running_stats=True keeps statistics of the data in buffers; leave it off")
    names = {torch.nn.InstanceNorm1d: 1, torch.nn.InstanceNorm2d: 2, torch.nn.InstanceNorm3d: 3}
    axes = next(count for cls, count in names.items() if isinstance(module, cls))
    return _instance(call, module.eps, Affine.of(module.weight, module.bias), axes)


@rule_for_function(F.instance_norm)
def _instance_norm_function(call: Call) -> Transfer:
    if call.argument(1, "running_mean") is not None or not call.argument(5, "use_input_stats", True):
        raise call.refuse("running statistics are kept from the data; leave them out")
    affine = Affine.of(call.argument(3, "weight"), call.argument(4, "bias"))
    return _instance(call, call.argument(7, "eps", 1e-5), affine, None)


@rule_for_function(F.normalize)
def _normalize(call: Call) -> Transfer:
    """x/max(‖x‖, c) per row: of norm ≤ min(1, ‖x‖/c); its Jacobian is I/c, or a projection over ‖x‖ ≥ c: gain 1/c."""
    power, floor = call.argument(1, "p", 2.0), float(call.argument(3, "eps", 1e-12))
    (dim,) = call.dims(call.argument(2, "dim", 1))
    if power != 2 or not floor > 0:
        raise call.refuse("only p=2 and a positive eps are supported")
    x = call.inputs[0]
    rows = x.size // max(1, x.shape[dim - 1])
    norm = min(math.sqrt(rows), times(1 / floor, x.norm))
    row = min(1.0, times(1 / floor, x.row_norm)) if dim == call.rank - 1 else math.inf
    return Transfer(Bound(norm, x.shape, row, 1.0), (1 / floor,))


def _frozen_batch_norm(
    call: Call, mean: torch.Tensor, variance: torch.Tensor, gamma: Vector, beta: Vector, eps: float, names: tuple[str, str]
) -> Transfer:
    """Public statistics: y_c = γ_c(x_c − μ_c)/√(v_c+ε) + β_c, a diagonal affine map."""
    x = call.inputs[0]
    positions = max(1, math.prod(x.shape[1:]))
    mean, std = mean.detach().double(), (variance.detach().double() + eps).sqrt()
    free = [isinstance(value, ParameterRef) or (value is not None and value.requires_grad) for value in (gamma, beta)]
    gain = norm = math.inf
    if not any(free):
        assert not isinstance(gamma, ParameterRef)
        assert not isinstance(beta, ParameterRef)
        scale = (torch.ones_like(mean) if gamma is None else gamma.detach().double()) / std
        shift = (torch.zeros_like(mean) if beta is None else beta.detach().double()) - scale * mean
        gain = float(scale.abs().max())
        norm = times(gain, x.norm) + math.sqrt(positions) * float(shift.norm())
    worst = float(((x.norm + math.sqrt(positions) * mean.abs()) / std).max())
    factors = (worst, math.sqrt(positions))
    parameters = {name: factor for name, factor, trained in zip(names, factors, free, strict=True) if trained}
    return Transfer(Bound(norm, call.output_shape), (gain,), parameters, exact=False, why_infinite="its scale is trained freely")


def _mixes(call: Call) -> UnsupportedError:
    return UnsupportedError(
        f"{call.where} normalises by the statistics of the batch: it mixes examples, so one example's influence can't be "
        "bounded. Use lipdp.nn.LayerCentering or a GroupNorm, or freeze it: .eval() with public statistics."
    )


@rule(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
def _batch_norm(module: torch.nn.BatchNorm2d, call: Call) -> Transfer:
    if module.training or module.running_mean is None or module.running_var is None:
        raise _mixes(call)
    affine = (module.weight, module.bias)
    return _frozen_batch_norm(call, module.running_mean, module.running_var, *affine, module.eps, ("weight", "bias"))


@rule_for_function(F.batch_norm)
def _batch_norm_function(call: Call) -> Transfer:
    mean, variance = call.argument(1, "running_mean"), call.argument(2, "running_var")
    gamma, beta = call.argument(3, "weight"), call.argument(4, "bias")
    if call.argument(5, "training", False) or mean is None or variance is None:
        raise _mixes(call)
    if (
        any(not isinstance(value, torch.Tensor) for value in (mean, variance))
        or isinstance(gamma, Bound)
        or isinstance(beta, Bound)
    ):
        raise call.refuse("its statistics must be constants, its scale and shift parameters or constants")
    first, second = (value.name if isinstance(value, ParameterRef) else "" for value in (gamma, beta))
    return _frozen_batch_norm(call, mean, variance, gamma, beta, call.argument(7, "eps", 1e-5), (first, second))


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


@rule_for_both([torch.nn.Softmax, torch.nn.Softmin], [torch.softmax, F.softmax, "softmax", F.softmin], ("dim", 1, None))
def _softmax(call: Call, dim: Any) -> Transfer:
    """Each row is a distribution, of norm ≤ 1; the Jacobian diag(p) − ppᵀ has the norm ½ at most (two classes)."""
    x, _, rows, last = _rows_along(call, dim)
    return Transfer(Bound(math.sqrt(rows), x.shape, 1.0 if last else math.inf, 1.0), (0.5,), exact=False)


@rule(torch.nn.Softmax2d)
def _softmax_2d(module: torch.nn.Softmax2d, call: Call) -> Transfer:
    if len(call.inputs[0].shape) != 3:
        raise call.refuse("examples need the shape (channels, H, W)")
    return _softmax(call, 1)


@rule_for_both([torch.nn.LogSoftmax], [torch.log_softmax, F.log_softmax, "log_softmax"], ("dim", 1, None))
def _log_softmax(call: Call, dim: Any) -> Transfer:
    """y = x − lse(x)·1 in each of R rows of K: |lse(x)| ≤ max|x| + ln K, so ‖y‖ ≤ X + √K(X + √R·ln K).

    The Jacobian I − 1pᵀ is a projection (not orthogonal), of norm ‖1‖‖p‖ ≤ √K.
    """
    x, length, rows, _ = _rows_along(call, dim)
    root = math.sqrt(length)
    norm = x.norm + root * (x.norm + math.sqrt(rows) * math.log(max(1, length)))
    peak = 2 * x.max_abs + math.log(max(1, length))
    return Transfer(Bound(norm, x.shape, max_abs=peak), (root,), exact=False)


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
