"""The twin of nn.MultiheadAttention: four linear maps that can be watched, around scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from lipdp.clipping.contribution import Contribution, Rows
from lipdp.clipping.registry import refuse
from lipdp.clipping.rules_dense import affine
from lipdp.clipping.twins import twin_of

if TYPE_CHECKING:
    from lipdp.clipping.capture import Recording

__all__: list[str] = []


@refuse(torch.nn.MultiheadAttention)
def _attention_refusal(layer: torch.nn.MultiheadAttention) -> str | None:
    if layer.bias_k is not None or layer.add_zero_attn:
        return "add_bias_kv and add_zero_attn are not supported. Use the defaults (False)."
    return None


@refuse(torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
def _transformer_refusal(layer: torch.nn.TransformerEncoderLayer) -> str | None:
    if not layer.self_attn.batch_first:
        return "its layers see (length, batch, features), where examples are not the first dimension. Use batch_first=True."
    return None


def _project(
    made: Recording, owner: str, module: torch.nn.MultiheadAttention, x: torch.Tensor, which: int, parts: int = 1
) -> torch.Tensor:
    """Rows ``which`` (0: query, 1: key, 2: value; ``parts`` of them) of the packed projection, or the separate one."""
    size = module.embed_dim
    rows = slice(which * size, (which + parts) * size)
    bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
    packed = module.in_proj_weight is not None
    name = "in_proj_weight" if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")[which]
    stored = getattr(module, name)
    weight = stored[rows] if packed else stored
    output = F.linear(x, weight, bias)
    inputs = x.detach()

    def contributions(cotangent: torch.Tensor) -> dict[str, Contribution]:
        made_parts = affine(cotangent, inputs, weight, bias, (name, "in_proj_bias"))
        return {key: part if key == name and not packed else Rows(part, rows.start, 3 * size) for key, part in made_parts.items()}

    made.add(module, owner, output, contributions, (x,))
    return output


def _mask(module: torch.nn.MultiheadAttention, scores: torch.Tensor, key_padding_mask: Any, attn_mask: Any) -> torch.Tensor:
    """Scores with −∞ (or the given number) where attention is not allowed."""
    if attn_mask is not None:
        allowed = attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(scores.shape[0], -1, *attn_mask.shape[1:])
        scores = scores.masked_fill(allowed, -math.inf) if allowed.dtype == torch.bool else scores + allowed
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, None, :]
        scores = scores.masked_fill(padded, -math.inf) if padded.dtype == torch.bool else scores + padded
    return scores


@twin_of(torch.nn.MultiheadAttention)
def _attention(made: Recording, owner: str) -> Callable[..., Any]:
    def forward(
        module: torch.nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        same = query is key and key is value
        if not module.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        if same and module.in_proj_weight is not None:
            q, k, v = _project(made, owner, module, query, 0, 3).chunk(3, -1)
        else:
            q, k, v = (_project(made, owner, module, part, number) for number, part in enumerate((query, key, value)))
        heads, width = module.num_heads, module.head_dim
        q, k, v = (part.reshape(part.shape[0], part.shape[1], heads, width).transpose(1, 2) for part in (q, k, v))
        weights: torch.Tensor | None = None
        p = module.dropout if module.training else 0.0
        if not need_weights and attn_mask is None and key_padding_mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        else:
            scores = _mask(module, q @ k.transpose(-1, -2) / math.sqrt(width), key_padding_mask, attn_mask)
            weights = F.dropout(torch.softmax(scores, -1), p)
            mixed = weights @ v
        output = module.out_proj(mixed.transpose(1, 2).flatten(2))
        if not module.batch_first:
            output = output.transpose(0, 1)
        if not need_weights or weights is None:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights

    return forward
