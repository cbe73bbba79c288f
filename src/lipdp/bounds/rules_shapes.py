"""Rules of functions that only move entries: reshape, permute, join, split, select, pad, repeat."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.calculus import Bound, Call, Transfer, rule_for_function, times

__all__ = ["reshaped"]


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
