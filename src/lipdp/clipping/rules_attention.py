"""The twin of nn.MultiheadAttention: four linear maps that can be watched, around scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from lipdp.clipping.combine import Rows
from lipdp.clipping.contribution import Contribution
from lipdp.clipping.record import watched_forward
from lipdp.clipping.registry import refuse
from lipdp.clipping.rules_dense import affine
from lipdp.errors import UnsupportedError

if TYPE_CHECKING:
    from lipdp.clipping.record import Recording

__all__: list[str] = []


@refuse(torch.nn.MultiheadAttention)
def _attention_refusal(layer: torch.nn.MultiheadAttention) -> str | None:
    trained = any(p.requires_grad for p in layer.parameters())
    if trained and (layer.bias_k is not None or layer.add_zero_attn):
        return "add_bias_kv and add_zero_attn are not supported. Use the defaults (False)."
    return None


@refuse(torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
def _transformer_refusal(layer: torch.nn.TransformerEncoderLayer) -> str | None:
    if not layer.self_attn.batch_first and any(p.requires_grad for p in layer.parameters()):
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
    inputs = x.detach() if stored.requires_grad else None

    def contributions(cotangent: torch.Tensor) -> dict[str, Contribution]:
        made_parts = affine(cotangent, inputs, weight, bias, (name, "in_proj_bias"))
        return {
            key: part if key == name and not packed else Rows(part, which * size, parts * size, 3 * size)
            for key, part in made_parts.items()
        }

    made.add(module, owner, output, contributions, (x,))
    return output


def _merged_mask(scores_shape: tuple[int, ...], like: torch.Tensor, key_padding_mask: Any, attn_mask: Any) -> torch.Tensor | None:
    """What is added to the scores (batch, heads, query, key): −∞ where attention is not allowed, or the given numbers."""
    merged: torch.Tensor | None = None
    if attn_mask is not None:
        mask = _additive(attn_mask, like)
        merged = mask if mask.dim() == 2 else mask.reshape(scores_shape[0], scores_shape[1], *mask.shape[1:])
    if key_padding_mask is not None:
        padded = _additive(key_padding_mask, like)[:, None, None, :]
        merged = padded if merged is None else merged + padded
    return None if merged is None else merged.expand(scores_shape)


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


@watched_forward(torch.nn.MultiheadAttention)
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
        if query.dim() != 3:
            raise UnsupportedError(f"layer '{owner}' (MultiheadAttention) is given one sequence without a batch dimension")
        if is_causal and attn_mask is None:
            raise UnsupportedError(f"layer '{owner}' (MultiheadAttention): is_causal=True is only a hint; pass attn_mask too")
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
        mask = _merged_mask((q.shape[0], heads, q.shape[2], k.shape[2]), q, key_padding_mask, attn_mask)
        if need_weights:
            scores = (q / math.sqrt(width)) @ k.transpose(-1, -2)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p)
        output = module.out_proj(mixed.transpose(1, 2).flatten(2))
        if not module.batch_first:
            output = output.transpose(0, 1)
        if weights is None:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights

    return forward
