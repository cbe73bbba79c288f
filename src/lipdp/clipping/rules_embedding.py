"""Norm rules of layers that look up rows: Embedding, EmbeddingBag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lipdp.clipping.contribution import Contribution, Scatter
from lipdp.clipping.registry import Contributions, norm_rule, refuse
from lipdp.errors import UnsupportedError

__all__: list[str] = []


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
