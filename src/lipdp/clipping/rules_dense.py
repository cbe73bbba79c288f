"""Norm rules of layers that multiply by a matrix, scale, or look up rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.clipping.contribution import Contribution, Dense, OuterSum, PositionSum, Scatter
from lipdp.clipping.registry import Contributions, norm_rule, refuse

__all__ = ["affine", "positions"]


def positions(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, …, features) as (batch, positions, features)."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def affine(
    cotangent: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    names: tuple[str, str] = ("weight", "bias"),
) -> dict[str, Contribution]:
    """Gradients of y = Wx + b at any number of positions: Σ_t δ_t⊗x_t and Σ_t δ_t."""
    delta = positions(cotangent)
    result: dict[str, Contribution] = {}
    if weight.requires_grad:
        result[names[0]] = OuterSum(delta, positions(x), tuple(weight.shape))
    if bias is not None and bias.requires_grad:
        result[names[1]] = PositionSum(delta, tuple(bias.shape))
    return result


@norm_rule(torch.nn.Linear)
def _linear(layer: torch.nn.Linear, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    x = inputs[0].detach()
    return lambda cotangent: affine(cotangent, x, layer.weight, layer.bias)


@norm_rule(torch.nn.Bilinear)
def _bilinear(layer: torch.nn.Bilinear, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """y_k = aᵀW_k b: the gradient is Σ_t δ_t ⊗ (a_t ⊗ b_t)."""
    a, b = (positions(part.detach()) for part in inputs[:2])
    products = (a[..., :, None] * b[..., None, :]).flatten(2)
    return lambda cotangent: affine(cotangent, products, layer.weight, layer.bias)


@norm_rule(torch.nn.Embedding)
def _embedding(layer: torch.nn.Embedding, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Rows that a text uses receive the sum of their positions' cotangents; the padding row receives none."""
    tokens = inputs[0].reshape(inputs[0].shape[0], -1)

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        delta = cotangent.reshape(*tokens.shape, -1)
        if layer.padding_idx is not None:
            delta = delta * (tokens != layer.padding_idx)[..., None]
        return {"weight": Scatter(tokens, delta, layer.num_embeddings)}

    return contributions


@refuse(torch.nn.Embedding, torch.nn.EmbeddingBag)
def _embedding_refusal(layer: torch.nn.Embedding) -> str | None:
    if layer.max_norm is not None:
        return "max_norm renormalises rows in the forward pass, from the data. Use max_norm=None."
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts over the batch: it mixes examples. Use scale_grad_by_freq=False."
    return "sparse=True gradients can't be noised. Use sparse=False." if layer.sparse else None


@norm_rule(torch.nn.EmbeddingBag)
def _embedding_bag(layer: torch.nn.EmbeddingBag, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Bags as the rows of a (batch, length) tensor: each token receives the bag's cotangent (÷ length for the mean)."""
    tokens = inputs[0]
    weights = inputs[2] if len(inputs) > 2 else None

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        delta = cotangent[:, None, :].expand(-1, tokens.shape[1], -1)
        used = torch.ones_like(tokens, dtype=cotangent.dtype)
        if layer.padding_idx is not None:
            used = (tokens != layer.padding_idx).to(cotangent.dtype)
        scale = used if weights is None else used * weights
        if layer.mode == "mean":
            scale = scale / used.sum(1, keepdim=True).clamp_min(1)
        return {"weight": Scatter(tokens, delta * scale[..., None], layer.num_embeddings)}

    return contributions


def _normalised(
    layer: torch.nn.Module, x_hat: torch.Tensor, reduce: tuple[int, ...], weight: torch.Tensor | None, bias: torch.Tensor | None
) -> Contributions:
    """y = γ⊙x̂ + β: the gradients Σδ⊙x̂ and Σδ over the positions that share γ and β; they are as small as γ itself."""

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        result: dict[str, Contribution] = {}
        delta, normal = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (cotangent, x_hat))
        if weight is not None and weight.requires_grad:
            product = delta * normal
            result["weight"] = Dense((product.sum(reduce) if reduce else product).reshape(-1, *weight.shape))
        if bias is not None and bias.requires_grad:
            result["bias"] = Dense((delta.sum(reduce) if reduce else delta).reshape(-1, *bias.shape))
        return result

    return contributions


@norm_rule(torch.nn.LayerNorm)
def _layer_norm(layer: torch.nn.LayerNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    x = inputs[0].detach()
    x_hat = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    reduce = tuple(range(1, x.ndim - len(layer.normalized_shape)))
    return _normalised(layer, x_hat, reduce, layer.weight, layer.bias)


@norm_rule(torch.nn.RMSNorm)
def _rms_norm(layer: torch.nn.RMSNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    x = inputs[0].detach()
    x_hat = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    return _normalised(layer, x_hat, tuple(range(1, x.ndim - len(layer.normalized_shape))), layer.weight, None)


@norm_rule(torch.nn.GroupNorm)
def _group_norm(layer: torch.nn.GroupNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    x = inputs[0].detach()
    x_hat = F.group_norm(x, layer.num_groups, eps=layer.eps)
    return _normalised(layer, x_hat, tuple(range(2, x.ndim)), layer.weight, layer.bias)


@norm_rule(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
def _instance_norm(layer: torch.nn.InstanceNorm2d, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    x = inputs[0].detach()
    x_hat = F.instance_norm(x, eps=layer.eps)
    return _normalised(layer, x_hat, tuple(range(2, x.ndim)), layer.weight, layer.bias)


@refuse(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
def _instance_norm_refusal(layer: torch.nn.InstanceNorm2d) -> str | None:
    if layer.track_running_stats:
        return "track_running_stats=True keeps statistics of the data. Use track_running_stats=False."
    return None


@norm_rule(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
def _batch_norm(layer: torch.nn.BatchNorm2d, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Evaluation mode, with frozen statistics: an affine map of each channel."""
    x = inputs[0].detach()
    x_hat = F.batch_norm(x, layer.running_mean, layer.running_var, training=False, eps=layer.eps)
    return _normalised(layer, x_hat, tuple(range(2, x.ndim)), layer.weight, layer.bias)


@refuse(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
def _batch_norm_refusal(layer: torch.nn.BatchNorm2d) -> str | None:
    if layer.training or layer.running_mean is None:
        return (
            "it normalises by the statistics of the batch, so an example's gradient depends on the others. Use GroupNorm or "
            "LayerNorm in its place, or freeze it: .eval() with public statistics."
        )
    return None


@norm_rule(torch.nn.PReLU)
def _prelu(layer: torch.nn.PReLU, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """∂y/∂a = min(x, 0), summed over the positions (and channels, for a single a) that share it."""
    x = inputs[0].detach()

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        product = cotangent * x.clamp_max(0)
        if layer.num_parameters == 1:
            return {"weight": Dense(product.flatten(1).sum(1, keepdim=True))}
        channels = x.shape[1]
        return {"weight": Dense(product.reshape(x.shape[0], channels, math.prod(x.shape[2:])).sum(2))}

    return contributions
