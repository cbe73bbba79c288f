"""Rules of the torch functions and tensor methods that people write in ``forward``."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.bound import Bound, Shape, Transfer, times
from lipdp.bounds.registry import Call, ParameterRef, rule_for_function

__all__: list[str] = []


def _norm(tensor: torch.Tensor, repeat: float = 1.0) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double())) * math.sqrt(repeat)


def _repeats(small: Shape, large: Shape) -> int:
    """How often broadcasting uses each element of ``small`` within one example of shape ``large``."""
    return math.prod(large) // max(1, math.prod(small))


def _same_rank(call: Call) -> None:
    """Broadcasting aligns last dimensions: activations of different rank would meet with their batch dimensions apart."""
    if any(len(bound.shape) != len(call.output_shape) for bound in call.inputs):
        shapes = " and ".join(str(("batch", *bound.shape)) for bound in call.inputs)
        raise call.refuse(f"it combines activations of shapes {shapes}, whose batch dimensions do not meet. Unsqueeze first.")


def _per_example_shape(tensor: torch.Tensor, call: Call) -> Shape:
    """Shape of a constant as seen by one example; refuses one with a batch dimension of its own."""
    shape = tuple(tensor.shape)
    if len(shape) > len(call.output_shape):
        if len(shape) != len(call.output_shape) + 1 or shape[0] != 1:
            raise call.refuse(f"a tensor of shape {shape} has a batch dimension of its own")
        shape = shape[1:]
    return shape


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


@rule_for_function(torch.add, operator.add, operator.iadd, "add", torch.sub, operator.sub, "sub", "add_", operator.isub)
def _add(call: Call) -> Transfer:
    """‖a ± b‖ ≤ X_a + X_b, and each summand receives the cotangent, √r times where it is broadcast r times."""
    _same_rank(call)
    alpha = abs(float(call.kwargs.get("alpha", 1.0)))
    out = call.output_shape
    norm, gains = 0.0, []
    parameters: dict[str, float] = {}
    for position, value in enumerate(_operands(call)):
        scale = alpha if position == 1 else 1.0
        if isinstance(value, Bound):
            repeat = math.sqrt(_repeats(value.shape, out)) * scale
            norm += times(repeat, value.norm)
            gains.append(repeat)
        elif isinstance(value, ParameterRef):
            # A parameter added to the activations: nothing keeps its norm, so what follows is unbounded.
            repeat = math.sqrt(_repeats(_per_example_shape(value.tensor, call), out)) * scale
            norm, parameters[value.name] = math.inf, parameters.get(value.name, 0.0) + repeat
        elif isinstance(value, torch.Tensor):
            norm += _norm(value, _repeats(_per_example_shape(value, call), out)) * scale
        else:
            norm += abs(float(value)) * math.sqrt(math.prod(out)) * scale
    return Transfer(Bound(norm, out), gains, parameters, why_infinite="it adds a trainable parameter without a bound")


@rule_for_function(torch.mul, operator.mul, operator.imul, "mul")
def _multiply(call: Call) -> Transfer:
    _same_rank(call)
    first, second = _operands(call)
    if isinstance(first, Bound) and isinstance(second, Bound):
        # ‖a⊙b‖ ≤ ‖a‖‖b‖∞ ≤ X_a·X_b, and so for the cotangents a⊙g, b⊙g; broadcasting r times costs √r.
        ra, rb = (math.sqrt(_repeats(value.shape, call.output_shape)) for value in (first, second))
        norm = min(times(ra, first.norm, second.norm), times(rb, first.norm, second.norm))
        return Transfer(Bound(norm, call.output_shape), (times(ra, second.norm), times(rb, first.norm)), exact=False)
    x, factor = (first, second) if isinstance(first, Bound) else (second, first)
    return _scale(call, x, factor, invert=False)


@rule_for_function(torch.div, operator.truediv, operator.itruediv, "div")
def _divide(call: Call) -> Transfer:
    x, divisor = _operands(call)
    if not isinstance(x, Bound) or isinstance(divisor, Bound) or call.kwargs.get("rounding_mode"):
        raise call.refuse("division by an activation has no bound. Use lipdp.nn.BoundedInput or a normalisation layer.")
    return _scale(call, x, divisor, invert=True)


def _scale(call: Call, x: Bound, factor: Any, invert: bool) -> Transfer:
    """Multiplication by a constant c (number or tensor): a diagonal map of norm max|c|."""
    if isinstance(factor, ParameterRef):
        raise call.refuse(
            "a trainable parameter multiplies the activations, and nothing keeps it bounded. Put it into a layer with a rule."
        )
    repeat = 1
    if isinstance(factor, torch.Tensor):
        repeat = _repeats(x.shape, call.output_shape)
        _per_example_shape(factor, call)
        values = factor.detach().double()
        gain = float((1 / values if invert else values).abs().max())
    elif invert and float(factor) == 0:
        gain = math.inf
    else:
        gain = abs(1 / float(factor) if invert else float(factor))
    gain *= math.sqrt(repeat)
    return Transfer(Bound(times(gain, x.norm), call.output_shape), (gain,))


@rule_for_function(operator.neg)
def _negate(call: Call) -> Transfer:
    return Transfer(call.inputs[0])


@rule_for_function(
    torch.flatten, torch.reshape, torch.unsqueeze, torch.unflatten,
    "flatten", "reshape", "view", "unsqueeze", "contiguous", "clone", "unflatten",
    F.pixel_shuffle, F.pixel_unshuffle,
)  # fmt: skip
def _rearrange(call: Call) -> Transfer:
    """Entries of each example rearranged: a reshape whose first dimension is the batch keeps examples apart."""
    if any(isinstance(value, torch.dtype) for value in (*call.args, *call.kwargs.values())):
        raise call.refuse("a view as another dtype reads the same bits as other numbers")
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


@rule_for_function(torch.squeeze, "squeeze")
def _squeeze(call: Call) -> Transfer:
    """Dimensions of size 1 dropped. The batch may have size 1 too, so the dimensions must be named."""
    call.dims(call.argument(1, "dim"))
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


@rule_for_function(torch.permute, "permute")
def _permute(call: Call) -> Transfer:
    dims = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], tuple | list) else call.args[1:]
    dims = dims or call.kwargs.get("dims", ())
    if int(dims[0]) % call.rank != 0:
        raise call.refuse("it moves the batch dimension away from dimension 0")
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


@rule_for_function(torch.transpose, torch.swapaxes, "transpose")
def _transpose(call: Call) -> Transfer:
    call.dims((call.argument(1, "dim0", call.kwargs.get("axis0")), call.argument(2, "dim1", call.kwargs.get("axis1"))))
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


@rule_for_function(torch.cat, torch.concat, torch.stack)
def _concatenate(call: Call) -> Transfer:
    """‖[a, b]‖² = ‖a‖² + ‖b‖²; each part receives its part of the cotangent."""
    call.dims(call.argument(1, "dim", 0), rank=len(call.output_shape) + 1)
    parts = call.argument(0, "tensors")
    if not all(isinstance(part, Bound) for part in parts):
        raise call.refuse("it joins activations with constants or parameters; only activations are supported")
    norm = math.sqrt(sum(part.norm**2 for part in parts))
    return Transfer(Bound(norm, call.output_shape), (1.0,) * len(call.inputs))


@rule_for_function(torch.chunk, torch.split, "chunk", "split")
def _split(call: Call) -> Transfer:
    """Disjoint parts: each at most X, and their cotangents combine to √(ΣG_i²)."""
    call.dims(call.argument(2, "dim", 0))
    return Transfer(tuple(Bound(call.inputs[0].norm, shape) for shape in call.output_shapes))


@rule_for_function(torch.unbind, "unbind")
def _unbind(call: Call) -> Transfer:
    """A split into slices of size 1."""
    call.dims(call.argument(1, "dim", 0))
    return Transfer(tuple(Bound(call.inputs[0].norm, shape) for shape in call.output_shapes))


@rule_for_function(operator.getitem)
def _slice(call: Call) -> Transfer:
    """Basic indexing of each example: a selection of distinct entries."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    everything = slice(None)
    basic = all(part is None or part is Ellipsis or type(part) in (int, slice) for part in index)
    if basic and (not index or (index[0] is not Ellipsis and index[0] != everything)):
        raise call.refuse("it selects among the examples of the batch. Index from dimension 1 on: x[:, …].")
    if basic and index[0] is Ellipsis and sum(type(part) in (int, slice) for part in index) > call.rank - 1:
        raise call.refuse("its index may reach the batch dimension. Write x[:, …].")
    if not basic:
        raise call.refuse("indexing by a tensor or list is not supported: the same entry could be taken twice")
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


@rule_for_function(torch.mean, "mean")
def _mean(call: Call) -> Transfer:
    """The mean over T entries has the norm X/√T at most, and spreads its cotangent evenly: G/√T."""
    return _reduce(call, power=-0.5)


@rule_for_function(torch.sum, "sum")
def _sum(call: Call) -> Transfer:
    """The sum over T entries: √T·X by Cauchy–Schwarz, and the cotangent is copied T times: √T·G."""
    return _reduce(call, power=0.5)


def _reduce(call: Call, power: float) -> Transfer:
    dims = call.dims(call.argument(1, "dim"))
    factor = math.prod(call.inputs[0].shape[d - 1] for d in dims) ** power
    return Transfer(Bound(times(factor, call.inputs[0].norm), call.output_shape), (factor,))


@rule_for_function(F.pad)
def _pad(call: Call) -> Transfer:
    mode, value = call.argument(2, "mode", "constant"), call.argument(3, "value", None)
    if mode != "constant" or value not in (None, 0, 0.0):
        raise call.refuse(f"padding with mode={mode!r}, value={value!r} copies entries or adds some; pad with zeros")
    pads = call.argument(1, "pad")
    if len(pads) >= 2 * call.rank and (pads[2 * call.rank - 2] or pads[2 * call.rank - 1]):
        raise call.refuse("it pads the batch dimension")
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


@rule_for_function(torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm")
def _matmul(call: Call) -> Transfer:
    """Two activations: ‖AB‖_F ≤ ‖A‖_F‖B‖_F, ∂A = G·Bᵀ, ∂B = Aᵀ·G, so gains X_B and X_A."""
    if len(call.inputs) != 2 or any(len(bound.shape) < 2 for bound in call.inputs):
        raise call.refuse("only products of two activations of two or more dimensions per example are supported")
    a, b = call.inputs
    if a.shape[:-2] != b.shape[:-2]:
        raise call.refuse(f"broadcasting {a.shape} against {b.shape} is not supported: expand explicitly")
    return Transfer(Bound(times(a.norm, b.norm), call.output_shape), (b.norm, a.norm), exact=False)


@rule_for_function(torch.softmax, F.softmax, "softmax")
def _softmax(call: Call) -> Transfer:
    """Each row is a distribution, of norm ≤ 1; the Jacobian diag(p) − ppᵀ has the norm ½ at most (two classes)."""
    (dim,) = call.dims(call.argument(1, "dim"))
    x = call.inputs[0]
    return Transfer(Bound(math.sqrt(x.size // max(1, x.shape[dim - 1])), x.shape), (0.5,), exact=False)
