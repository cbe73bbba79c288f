"""Fixed views of an example: shifts, mirrors, one of its stored copies. They bring their bounds, so certificates see them."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError

__all__ = ["Copy", "Padding", "Shift", "check_shift", "source_index"]

Padding = Literal["reflect", "zeros"]


def source_index(size: int, shift: Tensor, mirrored: Tensor | None, mode: Padding) -> tuple[Tensor, Tensor | None]:
    """Where each of ``size`` places reads after a shift, then (where ``mirrored``) a mirror: indices shaped (*shift.shape, size).

    Mode "reflect" folds places beyond the border back (without repeating the border itself); "zeros" also returns
    which places read inside.
    """
    place = torch.arange(size, device=shift.device).expand(*shift.shape, size)
    if mirrored is not None:
        place = torch.where(mirrored[..., None], size - 1 - place, place)
    source = place - shift[..., None]
    if mode == "zeros":
        return source.clamp(0, size - 1), (source >= 0) & (source < size)
    last = size - 1
    return last - (last - source.abs()).abs(), None


def check_shift(x: Tensor, down: int, right: int, mode: Padding) -> None:
    """Refuse tensors that are no images, and reflections of more than there is."""
    if x.ndim < 3:
        raise DataError(f"moving pixels needs a batch of images (batch, …, rows, columns), not a tensor of shape {tuple(x.shape)}")
    for size, shift, what in ((x.shape[-2], down, "rows"), (x.shape[-1], right, "columns")):
        if mode == "reflect" and abs(shift) >= size:
            raise DataError(f"a shift by {shift} of images with {size} {what} can't be filled by reflection; use mode='zeros'")


class Shift(torch.nn.Module):
    """Each image moved ``down`` and ``right`` (negative: up, left), then mirrored if ``flip``.

    What moves in from outside is the image's reflection, or zeros.
    """

    def __init__(self, down: int, right: int, *, flip: bool = False, mode: Padding = "reflect") -> None:
        super().__init__()
        for name, value in (("down", down), ("right", right)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigurationError(f"Shift {name} is a number of pixels, a whole number, not {value!r}")
        if mode not in get_args(Padding):
            raise ConfigurationError(f"Shift mode is {mode!r}: choose one of {', '.join(get_args(Padding))}.")
        self.down, self.right, self.flip = down, right, bool(flip)
        self.mode: Padding = mode

    def forward(self, x: Tensor) -> Tensor:
        """Move."""
        if isinstance(x, Tensor):  # torch.fx traces with stand-ins that have no shape yet
            check_shift(x, self.down, self.right, self.mode)
        if self.down:
            x = _moved(x.transpose(-1, -2), self.down, self.mode).transpose(-1, -2)
        if self.right:
            x = _moved(x, self.right, self.mode)
        return torch.flip(x, (-1,)) if self.flip else x

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.down}, {self.right}, flip={self.flip}, mode={self.mode!r}"


def _moved(x: Tensor, shift: int, mode: Padding) -> Tensor:
    """Along the last dimension; slices and joins only, so that the layer can be exported."""
    if shift > 0:
        come = x[..., 1 : shift + 1].flip(-1) if mode == "reflect" else torch.zeros_like(x[..., :shift])
        return torch.cat([come, x[..., :-shift]], -1)
    come = x[..., shift - 1 : -1].flip(-1) if mode == "reflect" else torch.zeros_like(x[..., :-shift])
    return torch.cat([x[..., -shift:], come], -1)


@rule(Shift, rounds="each")
def _shift(layer: Shift, call: Call) -> Transfer:
    """A selection of pixels, each read at most m = m_rows·m_columns times: ‖y‖² ≤ m·‖x‖², reached by a pixel that is read so often.

    Zeros are read from nowhere, so there m = 1. A reflection reads a few pixels twice along each axis that it moves.
    """
    x = call.inputs[0]
    rows, columns = (_most_reads(layer, x.shape[dim], shift) for dim, shift in ((-2, layer.down), (-1, layer.right)))
    gain = math.sqrt(rows * columns)
    row_norm = times(math.sqrt(columns), x.row_norm)
    return Transfer(Bound(times(gain, x.norm), x.shape, row_norm, x.max_abs), (gain,))


def _most_reads(layer: Shift, size: int, shift: int) -> int:
    index, inside = source_index(size, torch.tensor(shift), None, layer.mode)
    return max(1, int(torch.bincount(index if inside is None else index[inside], minlength=1).max()))


class Copy(torch.nn.Module):
    """The stored copy number ``number`` of examples (K, *shape)."""

    def __init__(self, number: int, copies: int) -> None:
        super().__init__()
        self.number, self.copies = number, copies

    def forward(self, x: Tensor) -> Tensor:
        """One copy of each example."""
        if isinstance(x, Tensor) and (x.ndim < 2 or x.shape[1] != self.copies):
            raise DataError(f"examples should hold {self.copies} copies along their first dimension; got shape {tuple(x.shape)}")
        return x[:, self.number]

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.number} of {self.copies}"


@rule(Copy, rounds="each")
def _copy(layer: Copy, call: Call) -> Transfer:
    """A slice: norms can only fall."""
    x = call.inputs[0]
    return Transfer(Bound(x.norm, call.output_shape, x.row_norm, x.max_abs))
