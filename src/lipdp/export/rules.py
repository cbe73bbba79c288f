"""The lowerings of lipdp's own layers. Each computes what the layer's forward does, in the same order."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.export.registry import Site, lowering

__all__: list[str] = []


@lowering(nn.SpectralLinear)
def _linear(layer: nn.SpectralLinear, site: Site) -> torch.nn.Module:
    plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias  # the same objects, so that tied weights stay tied
    return plain


@lowering(nn.SpectralConv2d)
def _conv(layer: nn.SpectralConv2d, site: Site) -> torch.nn.Module:
    """K = Θ/√m with the m of this input size: the exported kernel is the one that convolves."""
    plain = torch.nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        layer.bias is not None,
        layer.padding_mode,
        device="meta",
    )
    kernel = layer.weight.detach() * layer.scale(site.shape[-2], site.shape[-1])
    plain.weight = torch.nn.Parameter(kernel, requires_grad=layer.weight.requires_grad)
    plain.bias = layer.bias
    return plain


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


def _ball(site: Site, radius: float) -> torch.Tensor:
    factor = radius / torch.clamp_min(_norms(_wide(site), len(site.shape) + 1), radius)
    return _narrow(site.x * factor, site)


@lowering(nn.BoundedInput)
def _bounded_input(layer: nn.BoundedInput, site: Site) -> torch.Tensor:
    if layer.mode == "ball":
        return _ball(site, layer.norm)
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
    return site.x if layer.norm is None else _ball(site, layer.norm)


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
