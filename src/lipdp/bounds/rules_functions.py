"""Rules of the arithmetic that people write in ``forward``: sums, products, quotients, reductions, choices by a mask.

And of torch's layers that only move entries, and of embeddings. Affine layers: rules_weighted; pools: rules_pools.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.calculus import Bound, Call, ParameterRef, Shape, Transfer, rule, rule_for_function, times
from lipdp.bounds.operator_norm import as_tuple
from lipdp.bounds.rules_elementwise import reshaped
from lipdp.bounds.rules_weighted import bias_norm, channels_and_spatial, conv_multiplicity, weighted_transfer

__all__ = [
    "as_tuple",
    "bias_norm",
    "channels_and_spatial",
    "conv_multiplicity",
    "per_example_shape",
    "refuse_rewriting",
    "repeats",
    "weighted_transfer",
]


def _norm(tensor: torch.Tensor, repeat: float = 1.0) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double())) * math.sqrt(repeat)


def repeats(small: Shape, large: Shape) -> int:
    """How often broadcasting uses each element of ``small`` within one example of shape ``large``."""
    return math.prod(large) // max(1, math.prod(small))


def _same_rank(call: Call) -> None:
    """Broadcasting aligns last dimensions: activations of different rank would meet with their batch dimensions apart."""
    if any(len(bound.shape) != len(call.output_shape) for bound in call.inputs):
        shapes = " and ".join(str(("batch", *bound.shape)) for bound in call.inputs)
        raise call.refuse(f"it combines activations of shapes {shapes}, whose batch dimensions do not meet. Unsqueeze first.")


def per_example_shape(tensor: torch.Tensor, call: Call) -> Shape:
    """Shape of a constant as seen by one example; refuses one with a batch dimension of its own."""
    shape = tuple(tensor.shape)
    if len(shape) > len(call.output_shape):
        if len(shape) != len(call.output_shape) + 1 or shape[0] != 1:
            raise call.refuse(f"a tensor of shape {shape} has a batch dimension of its own")
        shape = shape[1:]
    return shape


def _last(shape: Shape) -> int:
    return shape[-1] if shape else 1


def _copies(small: Shape, large: Shape) -> float:
    """√ of how often broadcasting repeats an element within one row."""
    return math.sqrt(_last(large) / max(1, _last(small)))


def _operands(call: Call) -> tuple[Any, Any]:
    """The two operands of a binary operation, by position or by name, in the order in which the graph lists them."""
    named = [name for name in call.kwargs if name in ("input", "other")]
    values = (*call.args, *(call.kwargs[name] for name in named))
    unknown = set(call.kwargs) - {"input", "other", "alpha", "rounding_mode"}
    if len(values) != 2 or named not in ([], ["other"], ["input", "other"]) or unknown:
        raise call.refuse(
            "only two operands, in the order (input, other), are supported"
            + (f", without {', '.join(sorted(unknown))}=" if unknown else "")
        )
    return values[0], values[1]


@rule_for_function(
    torch.add, operator.add, operator.iadd, "add", torch.sub, operator.sub, "sub", "add_", operator.isub, rounds="arithmetic"
)
def _add(call: Call) -> Transfer:
    """‖a ± b‖ ≤ X_a + X_b, and each summand receives the cotangent, √r times where it is broadcast r times."""
    _same_rank(call)
    alpha = abs(float(call.kwargs.get("alpha", 1.0)))
    out = call.output_shape
    norm, row, peak, gains = 0.0, 0.0, 0.0, []
    parameters: dict[str, float] = {}
    for position, value in enumerate(_operands(call)):
        scale = alpha if position == 1 else 1.0
        if isinstance(value, Bound):
            repeat = math.sqrt(repeats(value.shape, out)) * scale
            norm += times(repeat, value.norm)
            row += times(_copies(value.shape, out) * scale, value.row)
            peak += times(scale, value.peak)
            gains.append(repeat)
        elif isinstance(value, ParameterRef):
            # A parameter added to the activations: nothing keeps its norm, so what follows is unbounded.
            repeat = math.sqrt(repeats(per_example_shape(value.tensor, call), out)) * scale
            norm = row = peak = math.inf
            parameters[value.name] = parameters.get(value.name, 0.0) + repeat
        elif isinstance(value, torch.Tensor):
            shape, wide = per_example_shape(value, call), value.detach().double()
            norm += _norm(value, repeats(shape, out)) * scale
            rows = torch.linalg.vector_norm(wide, dim=-1) if wide.ndim else wide.abs()
            row += float(rows.max()) * _copies(shape, out) * scale
            peak += float(wide.abs().max()) * scale
        else:
            norm += abs(float(value)) * math.sqrt(math.prod(out)) * scale
            row += abs(float(value)) * math.sqrt(_last(out)) * scale
            peak += abs(float(value)) * scale
    if all(math.isinf(x.row_norm) for x in call.inputs):
        row = math.inf
    if all(math.isinf(x.max_abs) for x in call.inputs):
        peak = math.inf
    return Transfer(Bound(norm, out, row, peak), gains, parameters, why_infinite="it adds a trainable parameter without a bound")


@rule_for_function(torch.mul, operator.mul, operator.imul, "mul", rounds="arithmetic")
def _multiply(call: Call) -> Transfer:
    _same_rank(call)
    first, second = _operands(call)
    if isinstance(first, Bound) and isinstance(second, Bound):
        return _gate(call, first, second)
    x, factor = (first, second) if isinstance(first, Bound) else (second, first)
    return _scale(call, x, factor, invert=False)


def _gate(call: Call, a: Bound, b: Bound) -> Transfer:
    """‖a⊙b‖ ≤ min(X_a·b∞, a∞·X_b), and so for the cotangents a⊙g, b⊙g; broadcasting r times costs √r."""
    ra, rb = (math.sqrt(repeats(value.shape, call.output_shape)) for value in (a, b))
    norm = min(times(ra, a.norm, b.peak), times(rb, a.peak, b.norm))
    peak = times(a.peak, b.peak) if math.isfinite(a.max_abs) and math.isfinite(b.max_abs) else math.inf
    return Transfer(Bound(norm, call.output_shape, max_abs=peak), (times(ra, b.peak), times(rb, a.peak)), exact=False)


@rule_for_function(torch.div, operator.truediv, operator.itruediv, "div", rounds="arithmetic")
def _divide(call: Call) -> Transfer:
    x, divisor = _operands(call)
    if not isinstance(x, Bound) or isinstance(divisor, Bound) or call.kwargs.get("rounding_mode"):
        raise call.refuse("division by an activation has no bound. Use lipdp.nn.BoundedInput or a normalisation layer.")
    if isinstance(divisor, ParameterRef):
        raise call.refuse("a trainable parameter divides the activations: near 0 nothing bounds it. Multiply by one instead.")
    return _scale(call, x, divisor, invert=True)


def _scale(call: Call, x: Bound, factor: Any, invert: bool) -> Transfer:
    """Multiplication by a constant c (number or tensor): a diagonal map of norm max|c|.

    By a trainable one: for each of its entries |Σ_t g_t·x_t| ≤ ‖g‖‖x‖ over the places it multiplies (where x is broadcast
    the parameter is not, so each x_t is met once), so Δ = G·X; ℓ = ∞.
    """
    repeat, parameters = 1, {}
    if isinstance(factor, torch.Tensor | ParameterRef):
        tensor = factor.tensor if isinstance(factor, ParameterRef) else factor
        repeat = repeats(x.shape, call.output_shape)
        per_example_shape(tensor, call)
    if isinstance(factor, ParameterRef):
        gain = math.inf
        parameters[factor.name] = x.norm
    elif isinstance(factor, torch.Tensor):
        values = factor.detach().double()
        gain = float((1 / values if invert else values).abs().max())
    elif invert and float(factor) == 0:
        gain = math.inf
    else:
        gain = abs(1 / float(factor) if invert else float(factor))
    total = times(gain, math.sqrt(repeat))
    row = times(gain, _copies(x.shape, call.output_shape), x.row_norm)
    return Transfer(
        Bound(times(total, x.norm), call.output_shape, row, times(gain, x.max_abs)),
        (total,),
        parameters,
        why_infinite="a trainable parameter multiplies the activations, and nothing keeps it bounded; use lipdp.nn.LayerScale",
    )


@rule_for_function(operator.neg, rounds="arithmetic")
def _negate(call: Call) -> Transfer:
    return Transfer(call.inputs[0])


@rule_for_function(torch.maximum, torch.minimum, "maximum", "minimum", rounds="arithmetic")
def _extremum(call: Call) -> Transfer:
    """|max(a, b)| ≤ √(a²+b²) entry by entry; the cotangent goes to one of the two, or half to each."""
    if len(call.inputs) != 2 or any(x.shape != call.output_shape for x in call.inputs):
        raise call.refuse("only two activations of the same shape are supported")
    a, b = call.inputs
    peak = max(a.max_abs, b.max_abs)
    return Transfer(Bound(math.hypot(a.norm, b.norm), call.output_shape, max_abs=peak), (1.0, 1.0), exact=False)


@rule_for_function(torch.where, rounds="arithmetic")
def _where(call: Call) -> Transfer:
    """A constant mask takes disjoint entries of a and of b: ‖y‖² ≤ ‖a‖² + ‖b‖²; each cotangent is masked."""
    mask, *values = call.args
    if not isinstance(mask, torch.Tensor) or len(values) != 2 or call.kwargs:
        raise call.refuse("only torch.where(mask, a, b) with a constant mask is supported: a choice made by activations jumps")
    per_example_shape(mask, call)
    mask = mask.expand(1, *call.output_shape)
    squares, gains, peak = 0.0, [], 0.0
    for value, chosen in zip(values, (mask, ~mask), strict=True):
        if isinstance(value, Bound):
            if value.shape != call.output_shape:
                raise call.refuse("broadcasting an activation is not supported here: expand it explicitly")
            squares += value.norm**2
            gains.append(1.0)
            peak = max(peak, value.max_abs)
        elif isinstance(value, ParameterRef):
            raise call.refuse("it mixes in a trainable parameter; add it instead, or use a layer with a rule")
        else:
            constant = torch.as_tensor(value, dtype=torch.float64)
            per_example_shape(constant, call)
            kept = torch.where(chosen, constant, torch.zeros((), dtype=torch.float64))
            if not bool(torch.isfinite(kept).all()):
                raise call.refuse("it fills in values that are not finite. Give F.scaled_dot_product_attention the mask instead.")
            kept = kept.expand(1, *call.output_shape)
            squares += float(kept.square().sum())
            peak = max(peak, float(kept.abs().max()))
    return Transfer(Bound(math.sqrt(squares), call.output_shape, max_abs=peak), gains)


@rule_for_function(torch.masked_fill, "masked_fill", rounds="arithmetic")
def _masked_fill(call: Call) -> Transfer:
    """A constant mask: kept entries are x's, the others a constant; ‖y‖² ≤ ‖x‖² + count·value²."""
    mask, value = call.argument(1, "mask"), call.argument(2, "value")
    if not isinstance(mask, torch.Tensor) or not isinstance(value, int | float) or call.inputs[0].shape != call.output_shape:
        raise call.refuse("only a constant mask and a number are supported")
    if not math.isfinite(value):
        raise call.refuse("it fills in values that are not finite. Give F.scaled_dot_product_attention the mask instead.")
    per_example_shape(mask, call)
    count = int(mask.expand(1, *call.output_shape).sum())
    x = call.inputs[0]
    peak = max(x.max_abs, abs(float(value)))
    return Transfer(Bound(math.sqrt(x.norm**2 + count * value**2), call.output_shape, max_abs=peak))


@rule_for_function(torch.mean, "mean", rounds="arithmetic")
def _mean(call: Call) -> Transfer:
    """The mean over T entries has the norm X/√T at most, and spreads its cotangent evenly: G/√T."""
    return _reduce(call, power=-0.5)


@rule_for_function(torch.sum, "sum", rounds="arithmetic")
def _sum(call: Call) -> Transfer:
    """The sum over T entries: √T·X by Cauchy–Schwarz, and the cotangent is copied T times: √T·G."""
    return _reduce(call, power=0.5)


def _reduce(call: Call, power: float) -> Transfer:
    """Along whole rows' places (not the last dimension) the mean of rows of norm ≤ r has norm ≤ r, their sum ≤ T·r."""
    x = call.inputs[0]
    dims = call.dims(call.argument(1, "dim"))
    count = math.prod(x.shape[d - 1] for d in dims)
    factor, each = count**power, count ** (power + 0.5)
    row = times(each, x.row_norm) if call.rank - 1 not in dims else math.inf
    return Transfer(Bound(times(factor, x.norm), call.output_shape, row, times(each, x.max_abs)), (factor,))


@rule_for_function(torch.amax, torch.amin, "amax", "amin", rounds="arithmetic")
def _largest(call: Call) -> Transfer:
    """One entry of each of disjoint groups: at most X, and the cotangent goes back to it (spread evenly over ties)."""
    call.dims(call.argument(1, "dim"))
    x = call.inputs[0]
    return Transfer(Bound(x.norm, call.output_shape, max_abs=x.max_abs))


@rule_for_function(torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm", rounds="arithmetic")
def _matmul(call: Call) -> Transfer:
    """Two activations: ‖AB‖_F ≤ ‖A‖_F‖B‖_F, ∂A = G·Bᵀ, ∂B = Aᵀ·G, so gains X_B and X_A."""
    if len(call.inputs) != 2 or any(len(bound.shape) < 2 for bound in call.inputs):
        raise call.refuse("only products of two activations of two or more dimensions per example are supported")
    a, b = call.inputs
    if a.shape[:-2] != b.shape[:-2]:
        raise call.refuse(f"broadcasting {a.shape} against {b.shape} is not supported: expand explicitly")
    return Transfer(Bound(times(a.norm, b.norm), call.output_shape), (b.norm, a.norm), exact=False)


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
