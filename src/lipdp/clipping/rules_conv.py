"""Norm rules of convolutions: a dense layer over patches, without holding the patches of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.clipping.arithmetic import accumulating, squared
from lipdp.clipping.contribution import Contribution, Form, PositionSum, zeroed
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.registry import Contributions, norm_rule
from lipdp.errors import UnsupportedError
from lipdp.nn import SpectralConv1d, SpectralConv2d, SpectralConv3d

__all__ = ["ConvSum", "patches"]

# Numbers that the patches of one chunk of examples may hold: 128 MiB in float32.
_PATCHES = 2**25

ConvNd = torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d


def patches(x: torch.Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> torch.Tensor:
    """(B, C, *spatial), already padded → (B, T, C·taps): what each output position reads, any number of axes."""
    batch, channels = x.shape[:2]
    axes = len(kernel)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        # unfold gives windows of d·(k−1)+1 neighbours; every d-th of them is a tap.
        x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
    # (B, C, *outputs, *taps) -> (B, C, *taps, *outputs): neighbouring outputs read neighbouring inputs, so the copy is fast.
    order = (0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))
    return x.permute(order).reshape(batch, channels * _product(kernel), -1).transpose(1, 2)


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


@dataclass(frozen=True)
class ConvSum(Contribution):
    """``g_i = scale·Σ_t δ_it ⊗ patch_it`` of a convolution with groups. x: padded input (B, in, …), δ: (B, out, …)."""

    cotangents: torch.Tensor
    inputs: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    scale: float = 1.0

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.cotangents.shape[0]

    def _chunks(self) -> list[slice]:
        positions = self.cotangents[0, 0].numel()
        rows = max(1, _PATCHES // max(1, positions * self.inputs.shape[1] * _product(self.shape[2:])))
        return [slice(i, i + rows) for i in range(0, self.batch, rows)]

    def _outer(self, rows: slice) -> OuterSum:
        """The chunk as outer products, groups laid side by side as further examples: (B·groups, T, …)."""
        x, delta = self.inputs[rows], self.cotangents[rows]
        count, g = x.shape[0], self.groups
        grouped = x.reshape(count * g, x.shape[1] // g, *x.shape[2:])
        cotangents = delta.reshape(count * g, delta.shape[1] // g, -1).transpose(1, 2)
        shape = (self.shape[0] // g, *self.shape[1:])
        windows = patches(grouped, self.shape[2:], self.stride, self.dilation)
        return OuterSum(cotangents, windows, shape, convolution=True, at_most=self._at_most(grouped))

    def _at_most(self, x: torch.Tensor) -> torch.Tensor | None:
        """‖patches‖² ≤ reads·‖x‖², if every number is read by a window, by ``reads`` of them at most."""
        axes = list(zip(self.shape[2:], self.stride, self.dilation, strict=True))
        if any(d > 1 or s > k for k, s, d in axes):
            return None
        return _product(tuple(-(-k // s) for k, s, _ in axes)) * squared(accumulating(x)[0].flatten(1), (1,))

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Chunk by chunk, in the cheaper form."""
        parts = [self._outer(rows).squared_norms(form).reshape(-1, self.groups).sum(1) for rows in self._chunks()]
        return torch.cat(parts) * self.scale**2

    def materialise(self) -> torch.Tensor:
        """(B, out, in/groups, …)."""
        parts = [self._outer(rows).materialise().reshape(-1, *self.shape) for rows in self._chunks()]
        return torch.cat(parts) * self.scale

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """The ordinary kernel gradient, of reweighted cotangents: as fast as without privacy."""
        delta, x = accumulating(self.cotangents, self.inputs)
        delta = delta * weights.to(delta.dtype).reshape(-1, *([1] * (delta.ndim - 1)))
        axes = len(self.stride)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            delta,
            x,
            x.new_empty(1).expand(self.shape),
            None,
            list(self.stride),
            [0] * axes,
            list(self.dilation),
            False,
            [0] * axes,
            self.groups,
            [False, True, False],
        )
        result: torch.Tensor = gradient * self.scale if self.scale != 1.0 else gradient
        return result

    def rounding(self) -> torch.Tensor:
        """Of the outer products, chunk by chunk."""
        parts = [self._outer(rows).rounding().reshape(-1, self.groups).sum(1) for rows in self._chunks()]
        return torch.cat(parts) * abs(self.scale)

    def without(self, dropped: torch.Tensor) -> ConvSum:
        """Zeros in both factors."""
        return replace(self, cotangents=zeroed(self.cotangents, dropped), inputs=zeroed(self.inputs, dropped))


def _padded(layer: ConvNd, x: torch.Tensor) -> torch.Tensor:
    pads = layer._reversed_padding_repeated_twice
    if not any(pads):
        return x
    return F.pad(x, pads, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)


def _batched(layer: torch.nn.Module, x: torch.Tensor, axes: int) -> torch.Tensor:
    if x.ndim != axes + 2:
        raise UnsupportedError(
            f"{type(layer).__name__} is given a single input of shape {tuple(x.shape)}, without a batch dimension. Add one: "
            "(batch, channels, …)."
        )
    return x.detach()


def _convolution(layer: ConvNd, inputs: tuple[Any, ...], scale: float = 1.0) -> Contributions:
    x = _batched(layer, inputs[0], len(layer.kernel_size)) if layer.weight.requires_grad else None

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        result: dict[str, Contribution] = {}
        if layer.weight.requires_grad and x is not None:
            padded = _padded(layer, x)
            # Windows may not reach the end of the padded input; what they never read would change the kernel's gradient shape.
            reach = [
                (n - 1) * s + d * (k - 1) + 1
                for n, s, d, k in zip(cotangent.shape[2:], layer.stride, layer.dilation, layer.kernel_size, strict=True)
            ]
            for axis, length in enumerate(reach):
                padded = padded.narrow(2 + axis, 0, length)
            shape = tuple(layer.weight.shape)
            result["weight"] = ConvSum(cotangent, padded, shape, layer.stride, layer.dilation, layer.groups, scale)
        if layer.bias is not None and layer.bias.requires_grad:
            result["bias"] = PositionSum(cotangent.flatten(2).transpose(1, 2), tuple(layer.bias.shape))
        return result

    return contributions


@norm_rule(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
def _conv(layer: ConvNd, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    return _convolution(layer, inputs)


@norm_rule(SpectralConv1d, SpectralConv2d, SpectralConv3d)
def _spectral_conv(layer: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """The stored parameter is Θ = √m·K, so its gradient is the kernel's over √m."""
    return _convolution(layer, inputs, layer.scale(*inputs[0].shape[2:]))


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
