"""Norm rules of normalisation layers, y = γ⊙x̂ + β: the gradients are Σ_t δ⊙x̂ and Σ_t δ, as small as γ itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.clipping.contribution import Contribution, summed
from lipdp.clipping.registry import Contributions, norm_rule, refuse

__all__: list[str] = []


def _normalised(
    x: torch.Tensor,
    normalise: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    trailing: int | None = None,
) -> Contributions:
    """Parameters shaped like the last ``trailing`` dimensions, or (None) like dimension 1, the channels.

    x̂ is computed from x when it is needed, in the backward pass: x is held anyway, x̂ would be another tensor of its size.
    """

    def terms(tensor: torch.Tensor) -> torch.Tensor:
        if trailing is None:
            return tensor.reshape(tensor.shape[0], tensor.shape[1], math.prod(tensor.shape[2:])).transpose(1, 2)
        places = tensor.shape[1 : tensor.ndim - trailing]
        return tensor.reshape(tensor.shape[0], math.prod(places), math.prod(tensor.shape[tensor.ndim - trailing :]))

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        result: dict[str, Contribution] = {}
        delta = cotangent.to(torch.promote_types(cotangent.dtype, torch.float32))
        if weight is not None and weight.requires_grad:
            result["weight"] = summed(terms(delta * normalise(x)), tuple(weight.shape))
        if bias is not None and bias.requires_grad:
            result["bias"] = summed(terms(delta), tuple(bias.shape))
        return result

    return contributions


@norm_rule(torch.nn.LayerNorm, at_once=True)
def _layer_norm(layer: torch.nn.LayerNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)

    return _normalised(inputs[0].detach(), normalise, layer.weight, layer.bias, len(layer.normalized_shape))


@norm_rule(torch.nn.RMSNorm, at_once=True)
def _rms_norm(layer: torch.nn.RMSNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)

    return _normalised(inputs[0].detach(), normalise, layer.weight, None, len(layer.normalized_shape))


@norm_rule(torch.nn.GroupNorm, at_once=True)
def _group_norm(layer: torch.nn.GroupNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, layer.num_groups, eps=layer.eps)

    return _normalised(inputs[0].detach(), normalise, layer.weight, layer.bias)


@norm_rule(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d, at_once=True)
def _instance_norm(layer: torch.nn.InstanceNorm2d, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, eps=layer.eps)

    return _normalised(inputs[0].detach(), normalise, layer.weight, layer.bias)


@refuse(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
def _instance_norm_refusal(layer: torch.nn.InstanceNorm2d) -> str | None:
    if layer.track_running_stats:
        return "track_running_stats=True keeps statistics of the data. Use track_running_stats=False."
    return None


@norm_rule(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm, at_once=True)
def _batch_norm(layer: torch.nn.BatchNorm2d, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Evaluation mode, with frozen statistics: an affine map of each channel."""

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, layer.running_mean, layer.running_var, training=False, eps=layer.eps)

    return _normalised(inputs[0].detach(), normalise, layer.weight, layer.bias)


@refuse(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
def _batch_norm_refusal(layer: torch.nn.BatchNorm2d) -> str | None:
    if layer.training or layer.running_mean is None:
        return (
            "it normalises by the statistics of the batch, so an example's gradient depends on the others. Use GroupNorm or "
            "LayerNorm in its place, or freeze it: .eval() with public statistics."
        )
    return None
