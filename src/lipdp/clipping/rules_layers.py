"""Norm rules of torch's layers that look at one position at a time: dense layers, embeddings, normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.clipping.arithmetic import Squares
from lipdp.clipping.contribution import Contribution, Contributions, PositionSum, Scatter, norm_rule, refuse, summed
from lipdp.clipping.outer import OuterSum
from lipdp.errors import UnsupportedError


def positions(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, …, features) as (batch, positions, features)."""
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:-1]), tensor.shape[-1])


def affine(
    cotangent: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    names: tuple[str, str] = ("weight", "bias"),
) -> dict[str, Contribution]:
    """Gradients of y = Wx + b at any number of positions: Σ_t δ_t⊗x_t and Σ_t δ_t. x may be None where W is frozen."""
    delta = positions(cotangent)
    squares = Squares(delta)
    result: dict[str, Contribution] = {}
    if weight.requires_grad and x is not None:
        result[names[0]] = OuterSum(delta, positions(x), tuple(weight.shape), squares=squares)
    if bias is not None and bias.requires_grad:
        result[names[1]] = PositionSum(delta, tuple(bias.shape), squares)
    return result


@norm_rule(torch.nn.Linear)
def linear(layer: torch.nn.Linear, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Σ_t δ_t⊗x_t and Σ_t δ_t."""
    x = inputs[0].detach() if layer.weight.requires_grad else None
    return lambda cotangent: affine(cotangent, x, layer.weight, layer.bias)


@norm_rule(torch.nn.Bilinear)
def _bilinear(layer: torch.nn.Bilinear, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """y_k = aᵀW_k b: the gradient is Σ_t δ_t ⊗ (a_t ⊗ b_t)."""
    a, b = (positions(part.detach()) for part in inputs[:2])

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        products = (a[..., :, None] * b[..., None, :]).flatten(2) if layer.weight.requires_grad else None
        return affine(cotangent, products, layer.weight, layer.bias)

    return contributions


@norm_rule(torch.nn.PReLU, at_once=True)
def _prelu(layer: torch.nn.PReLU, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """∂y/∂a = min(x, 0), summed over the positions (and channels, for a single a) that share it."""
    x = inputs[0].detach()

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        product = (cotangent * x.clamp_max(0)).flatten(1)
        channels = layer.num_parameters
        terms = product.reshape(x.shape[0], channels, product.shape[1] // channels).transpose(1, 2)
        return {"weight": summed(terms, (channels,))}

    return contributions


@refuse(torch.nn.Embedding, torch.nn.EmbeddingBag)
def _embedding_refusal(layer: torch.nn.Embedding | torch.nn.EmbeddingBag) -> str | None:
    if layer.max_norm is not None:
        return "max_norm renormalises rows in the forward pass, from the data. Use max_norm=None."
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts over the batch: it mixes examples. Use scale_grad_by_freq=False."
    if layer.sparse:
        return "sparse=True gradients can't be noised: every row receives noise. Use sparse=False."
    if isinstance(layer, torch.nn.EmbeddingBag) and layer.mode == "max" and layer.weight.requires_grad:
        return 'mode="max" is not supported. Use mode="sum" or "mean", or an Embedding followed by .amax(1).'
    return None


@norm_rule(torch.nn.Embedding)
def _embedding(layer: torch.nn.Embedding, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Rows that a text uses receive the sum of their positions' cotangents; the padding row receives none."""
    tokens = inputs[0].flatten(1) if inputs[0].ndim > 1 else inputs[0][:, None]

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        delta = cotangent.reshape(*tokens.shape, layer.embedding_dim)
        if layer.padding_idx is not None:
            delta = delta.masked_fill((tokens == layer.padding_idx)[..., None], 0)
        return {"weight": Scatter(tokens, delta, layer.num_embeddings)}

    return contributions


@norm_rule(torch.nn.EmbeddingBag)
def _embedding_bag(layer: torch.nn.EmbeddingBag, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Bags as rows of a (batch, length) tensor: each token receives the bag's cotangent (÷ length for the mean)."""
    tokens, offsets, weights = (*inputs, None, None)[:3]
    if tokens.ndim == 1:
        tokens, used, weights = _bags(layer, tokens, offsets, weights)
    else:
        used = torch.ones_like(tokens, dtype=torch.bool)
    if layer.padding_idx is not None:
        used = used & (tokens != layer.padding_idx)
    weights = None if weights is None else weights.detach()

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        scale = used.to(cotangent.dtype) if weights is None else weights.to(cotangent.dtype) * used
        if layer.mode == "mean":
            scale = scale / used.sum(1, keepdim=True).clamp_min(1)
        delta = (cotangent[:, None, :] * scale[..., None]).masked_fill(~used[..., None], 0)
        return {"weight": Scatter(tokens, delta, layer.num_embeddings)}

    return contributions


def _bags(
    layer: torch.nn.EmbeddingBag, tokens: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The (tokens, offsets) form as rows of equal length, with which entries are used."""
    if offsets is None:
        raise UnsupportedError("EmbeddingBag is given one-dimensional tokens without offsets")
    end = torch.tensor([len(tokens)], device=tokens.device, dtype=offsets.dtype)
    starts, ends = (offsets[:-1], offsets[1:]) if layer.include_last_offset else (offsets, torch.cat([offsets[1:], end]))
    lengths = ends - starts
    longest = max(1, int(lengths.max()))
    places = torch.arange(longest, device=tokens.device)
    used = places[None, :] < lengths[:, None]
    index = (starts[:, None] + places[None, :]).clamp_max(max(0, len(tokens) - 1)).long()
    padded = tokens[index] if len(tokens) else torch.zeros_like(index)
    return padded, used, None if weights is None else weights[index]


def normalised(
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

    return normalised(inputs[0].detach(), normalise, layer.weight, layer.bias, len(layer.normalized_shape))


@norm_rule(torch.nn.RMSNorm, at_once=True)
def _rms_norm(layer: torch.nn.RMSNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)

    return normalised(inputs[0].detach(), normalise, layer.weight, None, len(layer.normalized_shape))


@norm_rule(torch.nn.GroupNorm, at_once=True)
def _group_norm(layer: torch.nn.GroupNorm, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, layer.num_groups, eps=layer.eps)

    return normalised(inputs[0].detach(), normalise, layer.weight, layer.bias)


@norm_rule(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d, at_once=True)
def _instance_norm(layer: torch.nn.InstanceNorm2d, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    def normalise(x: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, eps=layer.eps)

    return normalised(inputs[0].detach(), normalise, layer.weight, layer.bias)


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

    return normalised(inputs[0].detach(), normalise, layer.weight, layer.bias)


@refuse(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
def _batch_norm_refusal(layer: torch.nn.BatchNorm2d) -> str | None:
    if layer.training or layer.running_mean is None:
        return (
            "it normalises by the statistics of the batch, so an example's gradient depends on the others. Use GroupNorm or "
            "LayerNorm in its place (lipdp.convert.per_example_norms(model)), or freeze it: .eval() with public statistics."
        )
    return None
