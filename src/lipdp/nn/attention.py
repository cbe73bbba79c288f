"""Attention on tokens of bounded norm, and a transformer block on top. The calculus traces through both."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds import Bound
from lipdp.bounds.rules_norms import attention_gains
from lipdp.errors import ConfigurationError, DataError
from lipdp.nn.activation import GroupSort
from lipdp.nn.container import Residual, Sequential
from lipdp.nn.embedding import TokenBall
from lipdp.nn.linear import SpectralLinear
from lipdp.parametrize import Constraint, Parametrisation
from lipdp.twins import Decision, Where, twin


class LipschitzAttention(torch.nn.Module):
    """Multi-head self-attention with a proved Lipschitz constant: tokens in a ball, spectral projections, softmax(s·QKᵀ)V.

    Dot-product attention is not Lipschitz on unbounded tokens. On T tokens of norm ≤ r, with scale s, it is, with
    ℓ = √T + s·r² + s·√T·r·min(r/√2, √T·r/2) (values, queries, keys; all three read x). With ``tokens`` given, outputs are
    divided by that public constant: the layer is then 1-Lipschitz. :class:`~lipdp.nn.TokenBall` brings tokens into the ball.

    Args:
        embed_dim: size of each token, a multiple of num_heads.
        num_heads: number of heads.
        token_norm: r.
        scale: s, 1/√(embed_dim/num_heads) by default.
        causal: each token sees itself and those before it.
        tokens: T; outputs are divided by ℓ. Without it they are not, and any number of tokens is accepted.
        bias: whether the four projections have biases (they lengthen tokens, which ℓ then counts).
        bias_norm: as in SpectralLinear.
        constraint: as in SpectralLinear.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        token_norm: float = 1.0,
        scale: float | None = None,
        causal: bool = False,
        tokens: int | None = None,
        bias: bool = False,
        bias_norm: float = 0.1,
        constraint: Constraint | Parametrisation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ConfigurationError(f"embed_dim must be a multiple of num_heads, not {embed_dim} and {num_heads}")
        self.embed_dim, self.num_heads, self.causal, self.tokens = embed_dim, num_heads, causal, tokens
        self.scale = 1 / math.sqrt(embed_dim // num_heads) if scale is None else float(scale)
        if not 0 < self.scale < math.inf:
            raise ConfigurationError(f"scale must be a positive finite number, not {scale!r}")
        self.ball = TokenBall(token_norm)
        options: dict[str, Any] = {"bias": bias, "bias_norm": bias_norm, "constraint": constraint, "device": device, "dtype": dtype}
        self.query = SpectralLinear(embed_dim, embed_dim, **options)
        self.key = SpectralLinear(embed_dim, embed_dim, **options)
        self.value = SpectralLinear(embed_dim, embed_dim, **options)
        self.output = SpectralLinear(embed_dim, embed_dim, **options)

    def lipschitz(self, tokens: int) -> float:
        """ℓ for this many tokens, before outputs are divided by it."""
        radius = self.ball.norm + (self.query.bias_norm if self.query.bias is not None else 0.0)
        one = Bound(math.inf, (tokens, self.embed_dim), radius)
        return sum(attention_gains(one, one, one, self.scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend; x is (batch, tokens, embed_dim)."""
        if isinstance(x, torch.Tensor) and (x.ndim != 3 or self.tokens not in (None, x.shape[1]) or x.shape[2] != self.embed_dim):
            expected = f"(batch, {self.tokens or 'tokens'}, {self.embed_dim})"
            raise DataError(f"LipschitzAttention needs {expected}, got a tensor of shape {tuple(x.shape)}")
        x = self.ball(x)
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        y: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y if self.tokens is None else y * (1 / self.lipschitz(self.tokens))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x, -1, (self.num_heads, self.embed_dim // self.num_heads)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        tokens = "" if self.tokens is None else f", tokens={self.tokens}"
        return f"{self.embed_dim}, num_heads={self.num_heads}, scale={self.scale:g}, causal={self.causal}{tokens}"


class TransformerBlock(torch.nn.Module):
    """A transformer encoder block: ``x ← (x + attention(x))/2``, then ``x ← (x + f(x))/2`` with f two dense layers and GroupSort.

    1-Lipschitz where ``tokens`` is given and there are no biases: both branches are, and averages keep that.

    Args:
        embed_dim: size of each token, a multiple of num_heads.
        num_heads: number of heads.
        hidden: width of the dense layers, even; 2·embed_dim by default.
        tokens: number of tokens, as in :class:`LipschitzAttention`.
        token_norm: radius of the tokens' ball inside attention.
        causal: as in :class:`LipschitzAttention`.
        bias: whether dense layers have biases.
        constraint: as in SpectralLinear.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        hidden: int | None = None,
        *,
        tokens: int | None = None,
        token_norm: float = 1.0,
        causal: bool = False,
        bias: bool = False,
        constraint: Constraint | Parametrisation | None = None,
    ) -> None:
        super().__init__()
        hidden = 2 * embed_dim if hidden is None else hidden
        if hidden < 2 or hidden % 2:
            raise ConfigurationError(f"hidden must be even (GroupSort sorts pairs), not {hidden}")
        self.attention = Residual(
            LipschitzAttention(
                embed_dim, num_heads, tokens=tokens, token_norm=token_norm, causal=causal, bias=bias, constraint=constraint
            )
        )
        self.dense = Residual(
            Sequential(
                SpectralLinear(embed_dim, hidden, bias, constraint=constraint),
                GroupSort(2, dim=-1),
                SpectralLinear(hidden, embed_dim, bias, constraint=constraint),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the dense layers, each averaged with its input."""
        y: torch.Tensor = self.dense(self.attention(x))
        return y


_NOT_FIRST = "batch_first=False puts tokens before the batch, which mixes examples: build it with batch_first=True"


def _no_twin(module: torch.nn.MultiheadAttention, where: Where) -> str:
    """Why this attention has no twin, if it has none."""
    if not module.batch_first:
        return _NOT_FIRST
    if not where.alone:
        return "only self-attention without masks has a twin: write the block with lipdp.nn.LipschitzAttention (it has causal=True)"
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        return "add_bias_kv, add_zero_attn, kdim and vdim have no twin"
    return ""


def _copy_attention(new: LipschitzAttention, module: torch.nn.MultiheadAttention) -> None:
    layers = (new.query, new.key, new.value, new.output)
    weights = (*module.in_proj_weight.detach().chunk(3), module.out_proj.weight.detach())
    biases = (None,) * 4 if module.in_proj_bias is None else (*module.in_proj_bias.detach().chunk(3), module.out_proj.bias.detach())
    with torch.no_grad():
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
            layer.project_()


@twin(torch.nn.MultiheadAttention)
def _twin_of_attention(module: torch.nn.MultiheadAttention, where: Where) -> Decision:
    """Lipschitz self-attention of as many heads, divided by its constant for this number of tokens."""
    why = _no_twin(module, where)
    if why:
        return Decision("not converted", module, why)
    weight = module.in_proj_weight
    new = LipschitzAttention(
        module.embed_dim,
        module.num_heads,
        tokens=where.shape[0],
        bias=module.in_proj_bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    note = "tokens are brought into the unit ball, outputs divided by ℓ"
    if where.copy_weights:
        note += "; weights copied and projected"
        _copy_attention(new, module)
    new.requires_grad_(weight.requires_grad)
    return Decision("replaced", new, note)


@twin(torch.nn.TransformerEncoderLayer)
def _twin_of_encoder_layer(module: torch.nn.TransformerEncoderLayer, where: Where) -> Decision:
    """A 1-Lipschitz block: attention and dense layers, each averaged with its input; without normalisation and dropout."""
    why = _no_twin(module.self_attn, where)
    hidden = module.linear1.out_features
    if not why and hidden % 2:
        why = f"dim_feedforward={hidden} is odd: GroupSort sorts pairs"
    if why:
        return Decision("not converted", module, why)
    bias = module.linear1.bias is not None
    new = TransformerBlock(module.linear1.in_features, module.self_attn.num_heads, hidden, tokens=where.shape[0], bias=bias)
    new.to(device=module.linear1.weight.device, dtype=module.linear1.weight.dtype)
    note = "residuals are averages; normalisation and dropout are left out"
    if where.copy_weights:
        note += "; weights copied and projected"
        _copy_attention(new.attention.module, module.self_attn)  # type: ignore[arg-type]
        inside = new.dense.module
        assert isinstance(inside, torch.nn.Sequential)
        with torch.no_grad():
            for layer, plain in ((inside[0], module.linear1), (inside[2], module.linear2)):
                assert isinstance(layer, SpectralLinear)
                layer.weight.copy_(plain.weight)
                if bias:
                    layer.bias.copy_(plain.bias)
                layer.project_()
    new.requires_grad_(module.linear1.weight.requires_grad)
    return Decision("replaced", new, note)


@twin(torch.nn.TransformerEncoder)
def _twin_of_encoder(module: torch.nn.TransformerEncoder, where: Where) -> Decision:
    """Its layers, one after the other."""
    blocks = []
    for layer in module.layers:
        assert isinstance(layer, torch.nn.TransformerEncoderLayer)
        decision = _twin_of_encoder_layer(layer, where)
        if decision.module is None or decision.outcome != "replaced":
            return Decision("not converted", module, decision.note)
        blocks.append(decision.module)
    return Decision("replaced", Sequential(*blocks), "residuals are averages; normalisation and dropout are left out")
