"""The lowerings of lipdp's own layers. Each computes what the layer's forward does, in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.export.registry import Site, lowering
from lipdp.parametrize import ConvParametrisation

__all__ = ["used_weight"]

P = TypeVar("P", bound=torch.nn.Module)


def used_weight(layer: torch.nn.Module, name: str = "weight") -> torch.Tensor:
    """The weight that ``layer`` computes with: W = π(θ) where it is reparametrised, the parameter itself elsewhere."""
    effective: Callable[[str], torch.Tensor] | None = getattr(layer, "effective", None)
    value: torch.Tensor = getattr(layer, name) if effective is None else effective(name)
    return value


def _place(plain: P, layer: torch.nn.Module, scale: float | None = None) -> P:
    """``plain`` with the layer's weight, times ``scale``, and bias. What is not changed is the same object: ties stay tied."""
    stored: torch.nn.Parameter | None = getattr(layer, "weight", None)
    if stored is not None:
        weight = used_weight(layer)
        if scale is not None:
            weight = weight.detach() * scale
        if weight is not stored:
            weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=stored.requires_grad)
        plain.register_parameter("weight", weight)
    if hasattr(layer, "bias"):
        plain.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
    return plain


@lowering(nn.SpectralLinear, nn.L1Linear)
def _linear(layer: nn.SpectralLinear | nn.L1Linear, site: Site) -> torch.nn.Module:
    plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    return _place(plain, layer)


_CONVOLUTIONS: dict[int, type[torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d]] = {
    1: torch.nn.Conv1d,
    2: torch.nn.Conv2d,
    3: torch.nn.Conv3d,
}
_SPECTRAL = (nn.SpectralConv1d, nn.SpectralConv2d, nn.SpectralConv3d)


def _plain_conv(layer: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d) -> torch.nn.Module:
    kernel, padding = layer.kernel_size, layer.padding
    if isinstance(layer, _SPECTRAL) and isinstance(layer.constraint, ConvParametrisation):
        kernel, sides = layer.constraint.window(layer.geometry), layer.constraint.pads(layer.geometry)
        even = all(left == right for left, right in sides)
        padding = tuple(left for left, _ in sides) if even else "same"
    return _CONVOLUTIONS[len(kernel)](
        layer.in_channels,
        layer.out_channels,
        kernel,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        layer.bias is not None,
        layer.padding_mode,
        device="meta",
    )


@lowering(*_SPECTRAL)
def _conv(layer: nn.SpectralConv1d | nn.SpectralConv2d | nn.SpectralConv3d, site: Site) -> torch.nn.Module:
    """The kernel that convolves: K = Θ/√m with the m of this input size, or the orthogonal convolution's own."""
    stored = isinstance(layer.constraint, ConvParametrisation) and not layer.constraint.scaled
    scale = None if stored else layer.scale(*site.shape[-len(layer.kernel_size) :])
    return _place(_plain_conv(layer), layer, scale)


@lowering(nn.FourierConv2d)
def _fourier_conv(layer: nn.FourierConv2d, site: Site) -> torch.nn.Module:
    """The stored kernel convolves as it is."""
    return _place(_plain_conv(layer), layer)


@lowering(nn.SpectralConvTranspose2d)
def _conv_transpose(layer: nn.SpectralConvTranspose2d, site: Site) -> torch.nn.Module:
    plain = torch.nn.ConvTranspose2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,
        layer.output_padding,  # type: ignore[arg-type]
        layer.groups,
        layer.bias is not None,
        layer.dilation,  # type: ignore[arg-type]
        device="meta",
    )
    return _place(plain, layer, layer.scale(site.shape[-2], site.shape[-1]))


@lowering(nn.LayerNorm)
def _layer_norm(layer: nn.LayerNorm, site: Site) -> torch.nn.Module:
    shape, affine = list(layer.normalized_shape), layer.elementwise_affine
    return _place(torch.nn.LayerNorm(shape, layer.eps, affine, layer.bias is not None, device="meta"), layer)


@lowering(nn.RMSNorm)
def _rms_norm(layer: nn.RMSNorm, site: Site) -> torch.nn.Module:
    return _place(torch.nn.RMSNorm(list(layer.normalized_shape), layer.eps, layer.elementwise_affine, device="meta"), layer)


@lowering(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, site: Site) -> torch.nn.Module:
    return _place(torch.nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, layer.affine, device="meta"), layer)


@lowering(nn.BoundedPReLU)
def _prelu(layer: nn.BoundedPReLU, site: Site) -> torch.nn.Module:
    return _place(torch.nn.PReLU(layer.num_parameters, device="meta"), layer)


@lowering(nn.BoundedEmbedding)
def _embedding(layer: nn.BoundedEmbedding, site: Site) -> torch.nn.Module:
    return _place(torch.nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta"), layer)


@lowering(nn.MaskedTokenMean)
def _masked_token_mean(layer: nn.MaskedTokenMean, site: Site) -> torch.Tensor:
    kept = torch.unsqueeze(torch.ne(site.inputs[1], layer.padding_idx).to(site.dtype), -1)
    return torch.sum(site.x * kept, dim=1) / torch.clamp_min(torch.sum(kept, dim=1), 1.0)


@lowering(nn.TokenBall)
def _token_ball(layer: nn.TokenBall, site: Site) -> torch.Tensor:
    wide = _wide(site)
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return _narrow(wide * (layer.norm / torch.clamp_min(norms, layer.norm)), site)


@lowering(nn.Normalize)
def _normalize(layer: nn.Normalize, site: Site) -> torch.Tensor:
    mean, std = layer.mean.to(site.dtype), layer.std.to(site.dtype)
    return torch.movedim((torch.movedim(site.x, 1, -1) - mean) / std, -1, 1)


@lowering(nn.Standardize)
def _standardize(layer: nn.Standardize, site: Site) -> torch.Tensor:
    mean, std = layer.mean.to(site.dtype), layer.std.to(site.dtype)
    return torch.movedim((torch.movedim(site.x, 1, -1) - mean) / std, -1, 1)


@lowering(nn.Flatten)
def _flatten(layer: nn.Flatten, site: Site) -> torch.nn.Module:
    return torch.nn.Flatten(layer.start_dim, layer.end_dim)


@lowering(nn.GroupSort)
def _group_sort(layer: nn.GroupSort, site: Site) -> torch.Tensor:
    rank = len(site.shape) + 1
    dim = layer.dim % rank
    channels = site.shape[dim - 1]
    size = channels if layer.group_size is None else layer.group_size
    grouped = torch.unflatten(site.x, dim, (channels // size, size))
    if size == 2:
        first, second = torch.select(grouped, dim + 1, 0), torch.select(grouped, dim + 1, 1)
        result = torch.stack((torch.maximum(first, second), torch.minimum(first, second)), dim + 1)
    else:
        result = torch.sort(grouped, dim=dim + 1, descending=True)[0]
    return torch.flatten(result, dim, dim + 1)


def _wide(site: Site) -> torch.Tensor:
    """The input in float32 or better."""
    wide = torch.promote_types(site.dtype, torch.float32)
    return site.x if wide == site.dtype else site.x.to(wide)


def _narrow(y: torch.Tensor, site: Site) -> torch.Tensor:
    return y if torch.promote_types(site.dtype, torch.float32) == site.dtype else y.to(site.dtype)


def _norms(x: torch.Tensor, rank: int) -> torch.Tensor:
    """‖x_i‖ of each example, shaped to broadcast against a tensor of ``rank`` dimensions."""
    norms = torch.linalg.vector_norm(torch.flatten(x, 1), dim=1)
    return torch.reshape(norms, (-1, *([1] * (rank - 1))))


def _ball(site: Site, radius: float, floor: float | None = None) -> torch.Tensor:
    """x·radius/max(‖x‖, floor), where the ball's floor is its radius."""
    factor = radius / torch.clamp_min(_norms(_wide(site), len(site.shape) + 1), radius if floor is None else floor)
    return _narrow(site.x * factor, site)


@lowering(nn.BoundedInput)
def _bounded_input(layer: nn.BoundedInput, site: Site) -> torch.Tensor:
    if layer.mode != "sphere":
        return _ball(site, layer.norm, layer.floor)
    rank = len(site.shape) + 1
    wide = _wide(site)
    largest = torch.amax(torch.abs(wide), dim=tuple(range(1, rank)), keepdim=True)
    scaled = wide / torch.where(largest > 0, largest, 1.0)
    return _narrow(scaled * (layer.norm / torch.clamp_min(_norms(scaled, rank), 1.0)), site)


@lowering(nn.ClipGradient)
def _clip_gradient(layer: nn.ClipGradient, site: Site) -> torch.Tensor:
    """Going forward it is the identity."""
    return site.x


@lowering(nn.Boundary)
def _boundary(layer: nn.Boundary, site: Site) -> torch.Tensor:
    return site.x if layer.norm is None else _ball(site, layer.norm, layer.floor)


@lowering(nn.LayerCentering)
def _layer_centering(layer: nn.LayerCentering, site: Site) -> torch.Tensor:
    dims = tuple(range(1, len(site.shape) + 1)) if layer.dim is None else layer.dim
    return site.x - torch.mean(site.x, dim=dims, keepdim=True)


@lowering(nn.L2NormPool2d)
def _l2_norm_pool(layer: nn.L2NormPool2d, site: Site) -> torch.Tensor:
    squares = F.avg_pool2d(torch.square(site.x), layer.kernel_size, layer.stride, layer.padding, divisor_override=1)
    return torch.sqrt(squares + layer.eps)


@lowering(nn.ScaledAvgPool2d)
def _scaled_avg_pool(layer: nn.ScaledAvgPool2d, site: Site) -> torch.Tensor:
    return F.avg_pool2d(site.x, layer.kernel_size, layer.stride) * math.sqrt(math.prod(layer.kernel_size))
