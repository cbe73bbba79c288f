"""Norm rules of convolutions: a dense layer over patches, without holding the patches of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from lipdp._numerics import HALF, gamma, wide
from lipdp._sums import convolution_sums
from lipdp.clipping import kernels
from lipdp.clipping.arithmetic import Squares, accumulating, input_roundoff, squared
from lipdp.clipping.contribution import Contribution, Contributions, Form, PositionSum, norm_rule, runs, weighted, zeroed
from lipdp.clipping.outer import OuterSum, kernel_margin, sum_rounding
from lipdp.errors import UnsupportedError

# Numbers that the patches of one chunk of examples may hold: 128 MiB in float32; on a processor, what its cache holds.
_PATCHES, _PATCHES_IN_CACHE = 2**25, 2**20
# Numbers that the gradients of all examples may hold to be held: 64 MiB in float32. And those that are computed at once then: in a
# large block of new memory they would take up to four times as long.
_HELD, _AT_ONCE = 2**24, 2**21
# Numbers that a window reads from which on products over windows that lie apart are quicker than the groups of a convolution.
_LONG_WINDOW = 256
# How much faster than other arithmetic tensor cores are, in the kernel for norms.
_TENSOR_CORES = 4.0

ConvNd = torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d


def patches(
    x: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int = 1,
    copies: int = 1,
) -> torch.Tensor:
    """(B·copies, groups·C, *spatial), already padded → (B·groups, copies·T, C·taps): what each output position reads.

    Any number of axes. Groups are laid side by side as further examples, the positions of an example's copies one after another.
    """
    axes = len(kernel)
    examples, channels = x.shape[0] // copies, x.shape[1] // groups
    x = x.reshape(examples, copies, groups, channels, *x.shape[2:])
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        # unfold gives windows of d·(k−1)+1 neighbours; every d-th of them is a tap.
        x = x.unfold(4 + axis, d * (k - 1) + 1, s)[..., ::d]
    # (B, copies, groups, C, *outputs, *taps) -> (B, groups, C, *taps, copies, *outputs): neighbouring outputs read neighbouring
    # inputs, so the copy is fast.
    order = (0, 2, 3, *range(4 + axes, 4 + 2 * axes), 1, *range(4, 4 + axes))
    places = copies * _product(tuple(x.shape[4 : 4 + axes]))
    return x.permute(order).reshape(examples * groups, channels * _product(kernel), places).transpose(1, 2)


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


@dataclass(frozen=True)
class ConvSum(Contribution):
    """``g_i = scale·Σ_t δ_it ⊗ patch_it`` of a convolution with groups. x: input (B, in, …), δ: (B, out, …)."""

    cotangents: torch.Tensor
    inputs: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    scale: float = 1.0
    padding: tuple[int, ...] = ()  # zeros that each axis still gets, at both ends; none where the input is already padded
    copies: int = 1  # rows that make up one example
    squares: Squares | None = None  # of the cotangents as (B, positions, out), if others need them too

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.cotangents.shape[0] // self.copies

    def _chunks(self) -> list[slice]:
        positions = self.copies * self.cotangents[0, 0].numel()
        most = _PATCHES_IN_CACHE if self.cotangents.device.type == "cpu" else _PATCHES
        count = max(1, most // max(1, positions * self.inputs.shape[1] * _product(self.shape[2:])))
        return [slice(i * self.copies, (i + count) * self.copies) for i in range(0, self.batch, count)]

    def _outer(self, rows: slice) -> OuterSum:
        """The chunk as outer products, groups laid side by side as further examples: (B·groups, copies·T, …)."""
        x, delta = self.inputs[rows], self.cotangents[rows]
        k, g = self.copies, self.groups
        count, outputs = x.shape[0] // k, delta.shape[1] // g
        of_groups = delta.reshape(count, k, g, outputs, -1).permute(0, 2, 3, 1, 4)
        cotangents = of_groups.reshape(count * g, outputs, -1).transpose(1, 2)
        windows = patches(self._in_reach(x), self.shape[2:], self.stride, self.dilation, g, k)
        return OuterSum(cotangents, windows, (self.shape[0] // g, *self.shape[1:]), convolution=True)

    def _in_reach(self, x: torch.Tensor) -> torch.Tensor:
        """Padded, and without what no window reaches."""
        if any(self.padding):
            x = F.pad(x, [size for size in reversed(self.padding) for _ in range(2)])
        return _within(x, self._reach)

    @property
    def _reach(self) -> list[int]:
        return reach(self.cotangents.shape[2:], self.shape[2:], self.stride, self.dilation)

    @cached_property
    def _of_patches(self) -> torch.Tensor:
        """‖patches‖² or more (B,): reads·‖x‖² where every number is read, by ``reads`` windows at most."""
        axes = list(zip(self.shape[2:], self.stride, self.dilation, strict=True))
        if any(d > 1 or s > k for k, s, d in axes):
            found = [squared(accumulating(self._outer(rows).inputs)[0], (1, 2)) for rows in self._chunks()]
            return torch.cat(found).reshape(-1, self.groups).sum(1)
        x = accumulating(self.inputs)[0].reshape(self.batch, -1)
        return _product(tuple(-(-k // s) for k, s, _ in axes)) * squared(x, (1,))

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """In one kernel where there is one for it; else chunk by chunk, in the cheaper form. The rounding is that of the whole."""
        if form != "gram" and self._has_kernel(form):
            return self._by_kernel()
        return (self.by_torch(form).sqrt() * abs(self.scale) + self.rounding()).square()

    def by_torch(self, form: Form = "auto") -> torch.Tensor:
        """‖g_i‖² without scale and rounding, by torch's own operations."""
        parts = [self._outer(rows).measured(form) for rows in self._chunks()]
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found.reshape(-1, self.groups).sum(1) if self.groups > 1 else found

    def _has_kernel(self, form: Form) -> bool:
        """One or two axes on a GPU, and enough positions to sum over: else the Gram form is cheaper."""
        if len(self.stride) > 2 or not kernels.available(self.cotangents, self.inputs):
            return False
        positions, p, d = self.copies * self.cotangents[0, 0].numel(), self.shape[0] // self.groups, _product(self.shape[1:])
        in_kernel = 2.0 * max(32, positions) * p * d / _TENSOR_CORES
        gram = 2.0 * positions**2 * (p + d) + 32.0 * positions * (d + 2 * positions)
        return form == "materialise" or in_kernel < gram

    def _by_kernel(self) -> torch.Tensor:
        x, delta = self.inputs, self.cotangents
        more = 2 - len(self.stride)
        ones, none = (1,) * more, (0,) * more
        exact, coarse = x.dtype in HALF and delta.dtype in HALF, input_roundoff(delta, convolution=True)
        found = kernels.convolution_norms(
            x.reshape(*x.shape[:2], *ones, *x.shape[2:]),
            delta.reshape(*delta.shape[:2], *ones, *delta.shape[2:]),
            (*ones, *self.shape[2:]),
            (*ones, *self.stride),
            (*none, *(self.padding or (0,) * len(self.stride))),
            (*ones, *self.dilation),
            self.groups,
            self.copies,
            "tf32" if exact or coarse else "tf32x3",
        )
        of_tensor_cores = kernel_margin(self._positions, delta.dtype) * (self._of_cotangents.total * self._of_patches).sqrt()
        measured = (found.to(wide(found)).sum(1) * (1 + gamma(kernels.TILE_ROUNDINGS, torch.float32))).sqrt()
        return ((measured + of_tensor_cores) * abs(self.scale) + self.rounding()).square()

    def materialise(self) -> torch.Tensor:
        """(B, out, in/groups, …)."""
        parts = [self._outer(rows).materialise().reshape(-1, *self.shape) for rows in self._chunks()]
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found if self.scale == 1.0 else found * self.scale

    @property
    def _positions(self) -> int:
        return self.copies * self.cotangents[0, 0].numel()

    @cached_property
    def _each(self) -> list[torch.Tensor] | None:
        """All gradients, some records after others, where they are not too many: on a processor the quickest way to their norms."""
        size = _product(self.shape)
        if self.cotangents.device.type != "cpu" or self.batch * size > _HELD:
            return None
        count = self.copies * max(1, _AT_ONCE // max(1, size))
        return [self._gradients(slice(start, start + count)) for start in range(0, max(1, len(self.inputs)), count)]

    def _gradients(self, rows: slice) -> torch.Tensor:
        """By the groups of one convolution; where windows are long and lie apart (a picture's patches), by products over these."""
        delta, x = accumulating(self.cotangents[rows], self.inputs[rows])
        if all(s >= k for s, k in zip(self.stride, self.shape[2:], strict=True)) and _product(self.shape[1:]) >= _LONG_WINDOW:
            return replace(self, cotangents=delta, inputs=x, squares=None).materialise()
        copies, sets = self.copies, len(x) // self.copies
        delta, x = (
            part.reshape(sets, copies, *part.shape[1:]).transpose(0, 1).reshape(copies, -1, *part.shape[2:]) for part in (delta, x)
        )
        axes = len(self.stride)
        _, gradients, _ = torch.ops.aten.convolution_backward(
            delta,
            x,
            x.new_empty(1).expand(sets * self.shape[0], *self.shape[1:]),
            None,
            list(self.stride),
            list(self.padding or [0] * axes),
            list(self.dilation),
            False,
            [0] * axes,
            sets * self.groups,
            [False, True, False],
        )
        result: torch.Tensor = gradients.reshape(sets, *self.shape)
        return result if self.scale == 1.0 else result * self.scale

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """Of the gradients themselves, where they are held: then those are what is weighted.

        That is the cheaper way even where the Gram form is for norms alone: their sum is an ordinary backward pass more.
        """
        if form == "gram" or self._each is None:
            return self.squared_norms(form)
        return torch.cat([squared(part.flatten(1), (1,)) for part in self._each])

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Of the gradients, where they are held; else by the ordinary kernel gradient, with the smaller factor reweighted."""
        held: list[torch.Tensor] | None = vars(self).get("_each")
        if held is not None:
            sums = map(weighted, torch.split(weights, [len(part) for part in held]), held)
            return functools.reduce(torch.Tensor.add_, sums)
        delta, x = accumulating(self.cotangents, self.inputs)
        weights = weights.to(delta.dtype) if self.scale == 1.0 else weights.to(delta.dtype) * self.scale
        weights = weights.repeat_interleave(self.copies) if self.copies > 1 else weights
        scale = weights.reshape(-1, *([1] * (delta.ndim - 1)))
        delta, x = (delta * scale, x) if delta.numel() <= x.numel() else (delta, x * scale)
        padding = self.padding or (0,) * len(self.stride)
        return convolution_sums(delta, x, self.shape, self.stride, padding, self.dilation, self.groups, apart=self.copies)

    def rounding(self) -> torch.Tensor:
        """That of all groups together: their errors lie in different entries, so it is at most that of one sum over everything."""
        coarse = input_roundoff(self.cotangents, convolution=True)
        dtype = self.cotangents.dtype
        return sum_rounding(self._of_cotangents.total, self._of_patches, self._positions, dtype, coarse) * abs(self.scale)

    @cached_property
    def _of_cotangents(self) -> Squares:
        if self.squares is not None:
            return self.squares
        return Squares(runs(self.cotangents.flatten(2).transpose(1, 2), self.copies))

    def without(self, dropped: torch.Tensor) -> ConvSum:
        """Zeros in both factors."""
        dropped = dropped.repeat_interleave(self.copies)
        cotangents, inputs = zeroed(self.cotangents, dropped), zeroed(self.inputs, dropped)
        return replace(self, cotangents=cotangents, inputs=inputs, squares=None)

    def merged(self, copies: int) -> ConvSum:
        """Each example has the windows of all its copies."""
        return replace(self, copies=self.copies * copies, squares=None)


def reach(outputs: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """How far into the padded input windows read, axis by axis."""
    return [(n - 1) * s + d * (k - 1) + 1 for n, k, s, d in zip(outputs, kernel, stride, dilation, strict=True)]


def _within(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    for axis, length in enumerate(lengths):
        x = x.narrow(2 + axis, 0, length)
    return x


def _padded(layer: ConvNd, x: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The input as windows read it, and the zeros still to be put around it: padding is left to torch where it can do it.

    What no window reads must go: it may not be finite, and would count in norms.
    """
    pads = layer._reversed_padding_repeated_twice
    before, after = tuple(reversed(pads[::2])), tuple(reversed(pads[1::2]))
    all_read = all(length >= n + size for length, n, size in zip(lengths, x.shape[2:], before, strict=True))
    if layer.padding_mode == "zeros" and before == after and all_read:
        return x, before
    padded = F.pad(x, pads, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    return _within(padded, lengths), ()


def _batched(layer: torch.nn.Module, x: torch.Tensor, axes: int) -> torch.Tensor:
    if x.ndim != axes + 2:
        raise UnsupportedError(
            f"{type(layer).__name__} is given a single input of shape {tuple(x.shape)}, without a batch dimension. Add one: "
            "(batch, channels, …)."
        )
    return x.detach()


def convolution(layer: ConvNd, inputs: tuple[Any, ...], scale: float = 1.0) -> Contributions:
    """Per-example gradients of a convolution by ``scale`` times the stored kernel."""
    x = _batched(layer, inputs[0], len(layer.kernel_size)) if layer.weight.requires_grad else None

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        result: dict[str, Contribution] = {}
        planes = cotangent.flatten(2)
        view = planes.transpose(1, 2)
        squares = Squares(view, planes)
        if layer.weight.requires_grad and x is not None:
            padded, padding = _padded(layer, x, reach(cotangent.shape[2:], layer.kernel_size, layer.stride, layer.dilation))
            shape = tuple(layer.weight.shape)
            result["weight"] = ConvSum(
                cotangent, padded, shape, layer.stride, layer.dilation, layer.groups, scale, padding, squares=squares
            )
        if layer.bias is not None and layer.bias.requires_grad:
            result["bias"] = PositionSum(view, tuple(layer.bias.shape), squares)
        return result

    return contributions


@norm_rule(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
def _conv(layer: ConvNd, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    return convolution(layer, inputs)


@norm_rule(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
def _conv_transpose(layer: torch.nn.ConvTranspose2d, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """A transposed convolution is the adjoint of a convolution: input and cotangent change roles in the kernel's gradient."""
    x = _batched(layer, inputs[0], len(layer.kernel_size))

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        result: dict[str, Contribution] = {}
        if layer.weight.requires_grad:
            pads = layer._reversed_padding_repeated_twice
            padded = F.pad(cotangent, pads)
            for axis, (n, s, d, k) in enumerate(zip(x.shape[2:], layer.stride, layer.dilation, layer.kernel_size, strict=True)):
                length = (n - 1) * s + d * (k - 1) + 1
                missing = length - padded.shape[2 + axis]
                if missing > 0:
                    padded = F.pad(padded, [0, 0] * (x.ndim - 3 - axis) + [0, missing])
                padded = padded.narrow(2 + axis, 0, length)
            shape = tuple(layer.weight.shape)
            result["weight"] = ConvSum(x, padded, shape, layer.stride, layer.dilation, layer.groups)
        if layer.bias is not None and layer.bias.requires_grad:
            result["bias"] = PositionSum(cotangent.flatten(2).transpose(1, 2), tuple(layer.bias.shape))
        return result

    return contributions
