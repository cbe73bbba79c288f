"""Rules of elementwise activations, as modules, functions and tensor methods alike; and of what only moves entries.

For y = f(x) elementwise: the Jacobian is diag(f'(x_i)), so its norm is at most sup|f'|; and |f(t)| ≤ c|t| + a for all t
gives ‖y‖ ≤ c‖x‖ + a√n (triangle inequality). Where |f| ≤ M, also ‖y‖ ≤ M√n.

Entries are moved by reshape, permute, join, split, select, pad, repeat.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.calculus import Bound, Call, ParameterRef, Transfer, rule, rule_for_both, rule_for_function, times


@dataclass(frozen=True)
class Elementwise:
    """|f(t)| ≤ min(slope·|t| + offset, ceiling) and |f'(t)| ≤ gain for all t."""

    gain: float = 1.0
    slope: float = 1.0
    offset: float = 0.0
    ceiling: float = math.inf


def elementwise_transfer(f: Elementwise, x: Bound) -> Transfer:
    """The bounds of y = f(x)."""
    root = math.sqrt(x.size)
    norm = min(times(f.slope, x.norm) + f.offset * root, times(f.ceiling, root))
    row = times(f.slope, x.row_norm) + f.offset * math.sqrt(x.shape[-1] if x.shape else 1)
    peak = min(times(f.slope, x.max_abs) + f.offset, f.ceiling)
    return Transfer(Bound(norm, x.shape, row, peak), gains=(f.gain,))


# sup|f'| rounded up: GELU 1.12890 (tanh form 1.12903), SiLU 1.09984, Mish 1.08850, SELU 1.0507·1.67326 = 1.75810;
# hardsigmoid 1/6 (torch's backward multiplies by the float32 nearest to 1/6, which is above it, also in float64).
_FIXED: list[tuple[Elementwise, tuple[Any, ...], tuple[type[torch.nn.Module], ...]]] = [
    (Elementwise(), (torch.relu, F.relu, "relu"), (torch.nn.ReLU,)),
    (Elementwise(ceiling=6.0), (F.relu6,), (torch.nn.ReLU6,)),
    (Elementwise(ceiling=1.0), (F.softsign,), (torch.nn.Softsign,)),
    (Elementwise(), (F.tanhshrink,), (torch.nn.Tanhshrink,)),
    (Elementwise(), (torch.abs, "abs"), ()),
    (Elementwise(ceiling=1.0), (torch.tanh, F.tanh, "tanh"), (torch.nn.Tanh,)),
    (Elementwise(0.25, 0.25, 0.5, 1.0), (torch.sigmoid, F.sigmoid, "sigmoid"), (torch.nn.Sigmoid,)),
    (Elementwise(0.16667, 0.16667, 0.5, 1.0), (F.hardsigmoid,), (torch.nn.Hardsigmoid,)),
    (Elementwise(1.0, 1.0, math.log(2)), (F.logsigmoid,), (torch.nn.LogSigmoid,)),
    (Elementwise(1.13), (F.gelu,), (torch.nn.GELU,)),
    (Elementwise(1.10), (F.silu,), (torch.nn.SiLU,)),
    (Elementwise(1.09), (F.mish,), (torch.nn.Mish,)),
    (Elementwise(1.5), (F.hardswish,), (torch.nn.Hardswish,)),
    (Elementwise(1.7581, 1.7581), (F.selu, torch.selu), (torch.nn.SELU,)),
    (Elementwise(ceiling=1.0), (torch.sin, "sin"), ()),
    (Elementwise(), (F.softshrink,), (torch.nn.Softshrink,)),
    (Elementwise(1.0, 1.0, 0.0), (torch.neg, "neg"), ()),
]


def _register(f: Elementwise, targets: tuple[Any, ...], classes: tuple[type[torch.nn.Module], ...]) -> None:
    @rule_for_both(classes, targets, rounds="each")
    def _fixed(call: Call) -> Transfer:
        return elementwise_transfer(f, call.inputs[0])


for _entry in _FIXED:
    _register(*_entry)


@rule_for_both([torch.nn.LeakyReLU], [F.leaky_relu], ("negative_slope", 1, 0.01), rounds="each")
@rule_for_both([torch.nn.ELU], [F.elu], ("alpha", 1, 1.0), rounds="each")
def _leaky(call: Call, slope: float) -> Transfer:
    steepest = max(1.0, abs(slope))
    return elementwise_transfer(Elementwise(steepest, steepest), call.inputs[0])


@rule_for_both([torch.nn.CELU], [F.celu, torch.celu], ("alpha", 1, 1.0), rounds="each")
def _celu(call: Call, alpha: float) -> Transfer:
    if not alpha > 0:
        raise call.refuse(f"CELU with alpha={alpha}: below 0 it grows like exp(|t|/|alpha|); the rule needs alpha > 0")
    return elementwise_transfer(Elementwise(), call.inputs[0])


@rule_for_both([torch.nn.Softplus], [F.softplus], ("beta", 1, 1.0), rounds="each")
def _softplus(call: Call, beta: float) -> Transfer:
    if beta <= 0:
        raise call.refuse(f"softplus with beta={beta}: the rule needs beta > 0")
    # 0 ≤ softplus(t) ≤ max(t, 0) + ln2/β; torch switches to the identity beyond a threshold, a jump the offset covers.
    return elementwise_transfer(Elementwise(1.0, 1.0, math.log(2) / beta), call.inputs[0])


@rule_for_both([torch.nn.Hardtanh], [F.hardtanh], ("min_val", 1, -1.0), ("max_val", 2, 1.0), rounds="each")
def _hardtanh(call: Call, low: float, high: float) -> Transfer:
    if not low <= 0 <= high:
        raise call.refuse(f"hardtanh to [{low}, {high}]: the rule needs 0 inside, so that |f(t)| ≤ |t|")
    return elementwise_transfer(Elementwise(ceiling=max(-low, high)), call.inputs[0])


def _clamp(low: float | None, high: float | None, call: Call) -> Elementwise:
    """|clamp(t)| ≤ |t| + the distance from 0 to the interval; slopes are 0 or 1."""
    if any(isinstance(limit, torch.Tensor | Bound | ParameterRef) for limit in (low, high)):
        raise call.refuse("only numbers are supported as limits")
    if low is not None and high is not None and low > high:
        raise call.refuse(f"clamp to the empty interval [{low}, {high}]")
    below, above = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    return Elementwise(offset=max(below, -above, 0.0), ceiling=max(abs(below), abs(above)))


@rule_for_function(torch.clamp, torch.clip, "clamp", "clip", rounds="each")
def _clamp_function(call: Call) -> Transfer:
    return elementwise_transfer(_clamp(call.argument(1, "min"), call.argument(2, "max"), call), call.inputs[0])


@rule_for_function(torch.clamp_min, "clamp_min", rounds="each")
def _clamp_min_function(call: Call) -> Transfer:
    return elementwise_transfer(_clamp(call.argument(1, "min"), None, call), call.inputs[0])


@rule_for_function(torch.clamp_max, "clamp_max", rounds="each")
def _clamp_max_function(call: Call) -> Transfer:
    return elementwise_transfer(_clamp(None, call.argument(1, "max"), call), call.inputs[0])


def _prelu(x: Bound, name: str, weight: torch.Tensor | ParameterRef) -> Transfer:
    """∂/∂a = Σ_t δ_t·min(x_t, 0), at most G·X; with a frozen, slopes are 1 and a. A trained a is unbounded: ℓ = ∞."""
    if isinstance(weight, ParameterRef) or weight.requires_grad:
        norm = Bound(math.inf, x.shape)
        return Transfer(norm, (math.inf,), {name: x.norm}, why_infinite="its slope is trained freely; use lipdp.nn.BoundedPReLU")
    steepest = max(1.0, float(weight.detach().abs().max()))
    return elementwise_transfer(Elementwise(steepest, steepest), x)


@rule(torch.nn.PReLU, rounds="each")
def _prelu_module(module: torch.nn.PReLU, call: Call) -> Transfer:
    return _prelu(call.inputs[0], "weight", module.weight)


@rule_for_function(F.prelu, torch.prelu, "prelu", rounds="each")
def _prelu_function(call: Call) -> Transfer:
    weight = call.argument(1, "weight")
    return _prelu(call.inputs[0], weight.name if isinstance(weight, ParameterRef) else "", weight)


@rule_for_both([torch.nn.GLU], [F.glu], ("dim", 1, -1), rounds="each")
def _glu(call: Call, dim: int) -> Transfer:
    """y = a⊙σ(b): ‖y‖ ≤ X; output i reads a_i and b_i alone, with slopes σ ≤ 1 and a_i·σ' ≤ a∞/4: √(1 + a∞²/16)."""
    call.dims(dim)
    x = call.inputs[0]
    return Transfer(Bound(x.norm, call.output_shape, max_abs=x.max_abs), (math.hypot(1.0, x.peak / 4),), exact=False)


_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)


@rule_for_both(_DROPOUTS, [F.dropout], ("p", 1, 0.5), ("training", 2, True), rounds="each")
def _dropout(call: Call, p: float, training: bool) -> Transfer:
    """Scaling by 1/(1−p) where kept: diagonal, entries 0 or 1/(1−p), drawn per example and independent of the data."""
    if not training or p == 0:
        return elementwise_transfer(Elementwise(), call.inputs[0])
    scale = 1 / (1 - p) if p < 1 else 0.0
    return elementwise_transfer(Elementwise(scale, scale), call.inputs[0])


def reshaped(x: Bound, shape: tuple[int, ...]) -> Bound:
    """The same entries in the same order: new rows are pieces of old ones, or made of whole old ones, or neither."""
    old, new = (x.shape[-1] if x.shape else 1), (shape[-1] if shape else 1)
    row = math.inf
    if new and old % new == 0:
        row = x.row_norm
    elif old and new % old == 0:
        row = times(math.sqrt(new // old), x.row_norm)
    return Bound(x.norm, shape, row, x.max_abs)


def _moved(x: Bound, shape: tuple[int, ...], rows_kept: bool = False) -> Bound:
    """Entries of x somewhere else, perhaps not all of them."""
    return Bound(x.norm, shape, x.row_norm if rows_kept else math.inf, x.max_abs)


@rule_for_function(
    torch.flatten, torch.reshape, torch.unsqueeze, torch.unflatten,
    "flatten", "reshape", "view", "unsqueeze", "contiguous", "clone", "unflatten", rounds="moves",)  # fmt: skip
def _rearrange(call: Call) -> Transfer:
    """Entries of each example rearranged: a reshape whose first dimension is the batch keeps examples apart."""
    if any(isinstance(value, torch.dtype) for value in (*call.args, *call.kwargs.values())):
        raise call.refuse("a view as another dtype reads the same bits as other numbers")
    return Transfer(reshaped(call.inputs[0], call.output_shape))


@rule_for_function(
    F.pixel_shuffle,
    F.pixel_unshuffle,
    torch.pixel_shuffle,
    torch.pixel_unshuffle,
    F.channel_shuffle,
    torch.channel_shuffle,
    rounds="moves",
)
def _pixels(call: Call) -> Transfer:
    """A permutation of the entries of each example."""
    return Transfer(_moved(call.inputs[0], call.output_shape))


@rule_for_function(torch.squeeze, "squeeze", rounds="moves")
def _squeeze(call: Call) -> Transfer:
    """Dimensions of size 1 dropped. The batch may have size 1 too, so the dimensions must be named."""
    call.dims(call.argument(1, "dim"))
    return Transfer(reshaped(call.inputs[0], call.output_shape))


def _several(call: Call, name: str) -> tuple[Any, ...]:
    """Dimensions given one by one, as a tuple, or by name."""
    if len(call.args) == 2 and isinstance(call.args[1], tuple | list):
        return tuple(call.args[1])
    return tuple(call.args[1:]) or tuple(call.kwargs.get(name, ()))


@rule_for_function(torch.permute, "permute", rounds="moves")
def _permute(call: Call) -> Transfer:
    dims = [int(d) % call.rank for d in _several(call, "dims")]
    if dims[0] != 0:
        raise call.refuse("it moves the batch dimension away from dimension 0")
    return Transfer(_moved(call.inputs[0], call.output_shape, dims[-1] == call.rank - 1))


@rule_for_function(torch.transpose, torch.swapaxes, "transpose", "swapaxes", rounds="moves")
def _transpose(call: Call) -> Transfer:
    dims = call.dims((call.argument(1, "dim0", call.kwargs.get("axis0")), call.argument(2, "dim1", call.kwargs.get("axis1"))))
    return Transfer(_moved(call.inputs[0], call.output_shape, call.rank - 1 not in dims))


@rule_for_function(torch.flip, "flip", rounds="moves")
def _flip(call: Call) -> Transfer:
    """Entries of each example in another order."""
    call.dims(_several(call, "dims"))
    return Transfer(_moved(call.inputs[0], call.output_shape))


@rule_for_function(torch.roll, "roll", rounds="moves")
def _roll(call: Call) -> Transfer:
    """Entries of each example in another order. Without dims torch rolls the flattened batch."""
    call.dims(call.argument(2, "dims") or None)
    return Transfer(_moved(call.inputs[0], call.output_shape))


@rule_for_function(torch.cat, torch.concat, torch.stack, rounds="moves")
def _concatenate(call: Call) -> Transfer:
    """‖[a, b]‖² = ‖a‖² + ‖b‖²; each part receives its part of the cotangent."""
    rank = len(call.output_shape) + 1
    (dim,) = call.dims(call.argument(1, "dim", 0), rank=rank)
    parts = call.argument(0, "tensors")
    if not all(isinstance(part, Bound) for part in parts):
        raise call.refuse("it joins activations with constants or parameters; only activations are supported")
    norm = math.sqrt(sum(part.norm**2 for part in parts))
    row = max(part.row_norm for part in parts) if dim != rank - 1 else math.inf
    peak = max(part.max_abs for part in parts)
    return Transfer(Bound(norm, call.output_shape, row, peak), (1.0,) * len(call.inputs))


@rule_for_function(torch.chunk, torch.split, "chunk", "split", torch.tensor_split, "tensor_split", rounds="moves")
def _split(call: Call) -> Transfer:
    """Disjoint parts: each at most X, and their cotangents combine to √(ΣG_i²).

    Parts from a_{i−1} to a_i have max(0, a_i − a_{i−1}) entries: together as many as there are only if no two overlap.
    """
    (dim,) = call.dims(call.argument(2, "dim", 0))
    if sum(shape[dim - 1] for shape in call.output_shapes) != call.inputs[0].shape[dim - 1]:
        raise call.refuse("its parts overlap: indices that do not increase take entries twice. Give them in order.")
    return Transfer(tuple(_moved(call.inputs[0], shape, True) for shape in call.output_shapes))


@rule_for_function(torch.unbind, "unbind", rounds="moves")
def _unbind(call: Call) -> Transfer:
    """A split into slices of size 1."""
    (dim,) = call.dims(call.argument(1, "dim", 0))
    return Transfer(tuple(_moved(call.inputs[0], shape, dim != call.rank - 1) for shape in call.output_shapes))


@rule_for_function(operator.getitem, rounds="moves")
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
    # Rows stay rows if the last dimension is not reached: fewer indices than dimensions, none of them new or skipping.
    rows_kept = len(index) < call.rank and all(type(part) in (int, slice) for part in index)
    return Transfer(_moved(call.inputs[0], call.output_shape, rows_kept))


@rule_for_function(torch.narrow, "narrow", torch.select, "select", rounds="moves")
def _take(call: Call) -> Transfer:
    """A range, or one place, along a dimension: distinct entries."""
    (dim,) = call.dims(call.argument(1, "dim"))
    return Transfer(_moved(call.inputs[0], call.output_shape, dim != call.rank - 1))


@rule_for_function(F.pad, rounds="moves")
def _pad(call: Call) -> Transfer:
    mode, value = call.argument(2, "mode", "constant"), call.argument(3, "value", None)
    if mode != "constant" or value not in (None, 0, 0.0):
        raise call.refuse(f"padding with mode={mode!r}, value={value!r} copies entries or adds some; pad with zeros")
    pads = call.argument(1, "pad")
    if len(pads) >= 2 * call.rank and (pads[2 * call.rank - 2] or pads[2 * call.rank - 1]):
        raise call.refuse("it pads the batch dimension")
    return Transfer(_moved(call.inputs[0], call.output_shape, True))


@rule_for_function(
    "expand", "repeat", torch.tile, "tile", torch.repeat_interleave, "repeat_interleave", torch.broadcast_to, rounds="moves"
)
def _repeat(call: Call) -> Transfer:
    """Each entry copied r times: √r·X, and the r cotangents of a copy add up: √r·G."""
    x = call.inputs[0]
    if len(x.shape) != len(call.output_shape):
        raise call.refuse("it changes the number of dimensions, so the batch dimension moves. Unsqueeze first.")
    if any(isinstance(value, torch.Tensor) for value in (*call.args[1:], *call.kwargs.values())):
        raise call.refuse("it repeats entries unequally often; only one number of repeats is supported")
    if "repeat_interleave" in call.where:
        call.dims(call.argument(2, "dim"))
    factor = math.sqrt(math.prod(call.output_shape) / max(1, x.size))
    wider = math.sqrt(call.output_shape[-1] / max(1, x.shape[-1])) if x.shape else 1.0
    return Transfer(Bound(times(factor, x.norm), call.output_shape, times(wider, x.row_norm), x.max_abs), (factor,))
