"""Tokens: embeddings with bounded rows, positions, the mean over tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from lipdp._checks import positive
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering, narrowed, placed, widened
from lipdp.nn.container import Sequential
from lipdp.parametrize import Constrained
from lipdp.parametrize.constraint import project_ball, project_rows
from lipdp.twins import Decision, Where, twin


class BoundedEmbedding(Constrained, torch.nn.Embedding):
    """Token ids to vectors of norm ≤ ``norm``, rows kept by projection: ``X = √T·norm``, ``Δ = √T·G`` for T tokens.

    With ``length`` it also declares the model's input: ``length`` token ids for each example, of type torch.long.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: size of the vectors.
        padding_idx: as in torch: that row starts at 0 and gets no gradient.
        norm: radius of the ball that each row is kept in.
        length: number of tokens of one example, where this layer reads the model's input.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    input_dtype = torch.long

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        norm: float = 1.0,
        length: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.norm = positive("BoundedEmbedding norm", norm)
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.input_shape = None if length is None else (int(length),)
        self.project_()

    def project_(self) -> None:
        """Back to ‖row‖₂ ≤ norm, each row."""
        with torch.no_grad():
            self.weight.copy_(project_rows(self.weight, self.norm))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look the rows up."""
        if self.input_shape is not None and isinstance(input, torch.Tensor) and tuple(input.shape[1:]) != self.input_shape:
            raise DataError(f"BoundedEmbedding expects {self.input_shape[0]} tokens, got a tensor of shape {tuple(input.shape)}")
        return super().forward(input)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        length = "" if self.input_shape is None else f", length={self.input_shape[0]}"
        return f"{super().extra_repr()}, norm={self.norm:g}{length}"


@rule(BoundedEmbedding)
def _bounded_embedding(layer: BoundedEmbedding, call: Call) -> Transfer:
    """T rows of norm ≤ R: √T·R. All T tokens may be the same, whose gradient is then Σ_t δ_t, at most √T·G."""
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise call.refuse("max_norm, scale_grad_by_freq and sparse are not supported")
    root = math.sqrt(call.inputs[0].size)
    bound = Bound(root * layer.norm, call.output_shape, layer.norm)
    return Transfer(bound, (math.inf,), {"weight": root}, why_infinite="token ids are not a vector space")


class LearnedPositions(Constrained, torch.nn.Module):
    """``x + P`` with a learned table P of positions, ‖P‖_F ≤ ``norm`` kept by projection: ``X + norm``, ``Δ_P = G``.

    Args:
        length: number of tokens.
        dim: size of each.
        norm: radius of the ball of P, over all positions together; √length by default: 1 for each on average.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self, length: int, dim: int, norm: float | None = None, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.norm = positive("LearnedPositions norm", math.sqrt(length) if norm is None else norm)
        self.weight = torch.nn.Parameter(torch.zeros(length, dim, device=device, dtype=dtype))
        torch.nn.init.normal_(self.weight, std=0.02)
        self.project_()

    def project_(self) -> None:
        """Back to ‖P‖_F ≤ norm."""
        with torch.no_grad():
            self.weight.copy_(project_ball(self.weight, self.norm))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the table."""
        if isinstance(x, torch.Tensor) and x.shape[1:] != self.weight.shape:
            raise DataError(f"positions of shape {tuple(self.weight.shape)} can't be added to a tensor of shape {tuple(x.shape)}")
        return x + self.weight

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, norm={self.norm:g}"


@rule(LearnedPositions)
def _learned_positions(layer: LearnedPositions, call: Call) -> Transfer:
    """‖x + P‖ ≤ X + ‖P‖_F, and so for each row; P receives the cotangent itself."""
    x = call.inputs[0]
    return Transfer(Bound(x.norm + layer.norm, x.shape, x.row_norm + layer.norm), parameters={"weight": 1.0})


class SinusoidalPositions(torch.nn.Module):
    """``x + scale·P`` with fixed sines and cosines of the position: ``X + scale·√(T·dim/2)``; each row is at most √(dim/2) longer.

    Args:
        length: number of tokens.
        dim: size of each, even.
        scale: factor of the table.
    """

    table: torch.Tensor

    def __init__(self, length: int, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        if length < 1 or dim < 2 or dim % 2 or not math.isfinite(scale):
            raise ConfigurationError(f"SinusoidalPositions needs a positive length and an even dim, not {length} and {dim}")
        self.scale = float(scale)
        frequencies = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10_000.0) / dim))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
        self.register_buffer("table", (self.scale * table).to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the table; the calculus traces through this sum."""
        return x + self.table

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.table.shape[0]}, {self.table.shape[1]}, scale={self.scale:g}"


class TokenMean(torch.nn.Module):
    """The mean over tokens, (batch, T, dim) to (batch, dim): ``X/√T``, at most the longest token; ``G/√T``.

    With ``tokens`` given it is multiplied by √tokens: an operator of norm 1, which keeps more of the gradient.
    """

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        if tokens is not None and tokens < 1:
            raise ConfigurationError(f"TokenMean tokens must be at least 1, not {tokens}")
        self.tokens = tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average over dimension 1; the calculus traces through it."""
        mean = x.mean(dim=1)
        return mean if self.tokens is None else mean * math.sqrt(self.tokens)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return "" if self.tokens is None else f"tokens={self.tokens}"


class MaskedTokenMean(torch.nn.Module):
    """The mean over the tokens of an example that are not padding: ``layer(x, ids)`` with the ids (batch, T) that x came from.

    ``X`` and ``G`` stay: c ≥ 1 kept tokens give X/√c and G/√c, and c may be 1. The longest token bounds it too. An example of
    padding only gives 0.

    Args:
        padding_idx: the id of padding.
    """

    def __init__(self, padding_idx: int = 0) -> None:
        super().__init__()
        self.padding_idx = int(padding_idx)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Average the tokens over dimension 1 whose id is not padding."""
        if x.ndim != 3 or x.shape[:2] != ids.shape:
            raise DataError(
                f"MaskedTokenMean needs (batch, tokens, dim) and the ids (batch, tokens), not {tuple(x.shape)} and "
                f"{tuple(ids.shape)}"
            )
        kept = (ids != self.padding_idx).to(x.dtype)[..., None]
        return (x * kept).sum(dim=1) / kept.sum(dim=1).clamp_min(1.0)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"padding_idx={self.padding_idx}"


@rule(MaskedTokenMean)
def _masked_token_mean(layer: MaskedTokenMean, call: Call) -> Transfer:
    """‖Σ_kept x_t/c‖ ≤ √c·X/c ≤ X and ≤ the longest token; each kept token gets δ/c: √c·G/c ≤ G.

    Which tokens are kept is decided by ids, which get no gradient; it jumps with them, so there is no constant with respect to
    them.
    """
    x = call.inputs[0]
    if len(call.inputs) != 2 or len(x.shape) != 2 or call.inputs[1].shape != x.shape[:1]:
        raise call.refuse("it takes activations (tokens, dim) and their ids (tokens), in this order")
    bound = Bound(min(x.norm, x.row), call.output_shape, max_abs=x.max_abs)
    return Transfer(bound, (1.0, math.inf), why_infinite="a mask jumps with the ids")


class TokenBall(torch.nn.Module):
    """Each token, a vector along the last dimension, scaled into the ball of radius ``norm``: what attention needs."""

    def __init__(self, norm: float = 1.0) -> None:
        super().__init__()
        self.norm = positive("TokenBall norm", norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project each row; norms in float32 or better."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        y: torch.Tensor = wide * (self.norm / norms.clamp_min(self.norm))
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"norm={self.norm:g}"


@rule(TokenBall)
def _token_ball(layer: TokenBall, call: Call) -> Transfer:
    """A projection on a product of balls: 1-Lipschitz, no row longer than before nor than the radius."""
    x = call.inputs[0]
    if not x.shape:
        raise call.refuse("examples without a dimension would be taken for rows of the batch")
    return Transfer(Bound(x.norm, x.shape, min(x.row_norm, layer.norm), x.max_abs))


@lowering(BoundedEmbedding)
def _plain_embedding(layer: BoundedEmbedding, site: Site) -> torch.nn.Module:
    return placed(torch.nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta"), layer)


@lowering(MaskedTokenMean)
def _plain_masked_token_mean(layer: MaskedTokenMean, site: Site) -> torch.Tensor:
    kept = torch.unsqueeze(torch.ne(site.inputs[1], layer.padding_idx).to(site.dtype), -1)
    return torch.sum(site.x * kept, dim=1) / torch.clamp_min(torch.sum(kept, dim=1), 1.0)


@lowering(TokenBall)
def _plain_token_ball(layer: TokenBall, site: Site) -> torch.Tensor:
    wide = widened(site)
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return narrowed(wide * (layer.norm / torch.clamp_min(norms, layer.norm)), site)


@twin(torch.nn.Embedding)
def _twin_of_embedding(module: torch.nn.Embedding, where: Where) -> Decision:
    """The same table with rows kept in the unit ball."""
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return Decision("not converted", module, "max_norm, scale_grad_by_freq and sparse have no private form: leave them off")
    length = where.shape[0] if where.input and len(where.shape) == 1 else None
    new = BoundedEmbedding(
        module.num_embeddings,
        module.embedding_dim,
        module.padding_idx,
        length=length,
        device=module.weight.device,
        dtype=module.weight.dtype,
    )
    note = "rows are kept in the unit ball"
    if where.copy_weights:
        note += "; weights copied and projected"
        with torch.no_grad():
            new.weight.copy_(module.weight)
        new.project_()
    new.weight.requires_grad_(module.weight.requires_grad)
    return Decision("replaced", new, note)


@twin(torch.nn.EmbeddingBag)
def _twin_of_embedding_bag(module: torch.nn.EmbeddingBag, where: Where) -> Decision:
    """A table, then the mean over tokens."""
    if module.mode != "mean" or module.padding_idx is not None or not where.alone or len(where.shape) != 1:
        note = (
            "only bags of mode 'mean', without padding_idx, offsets and weights have a twin: use BoundedEmbedding and a TokenMean"
        )
        return Decision("not converted", module, note)
    table = torch.nn.Embedding(module.num_embeddings, module.embedding_dim, sparse=module.sparse, _weight=module.weight.detach())
    table.max_norm, table.scale_grad_by_freq = module.max_norm, module.scale_grad_by_freq
    table.weight.requires_grad_(module.weight.requires_grad)
    decision = _twin_of_embedding(table, where)
    if decision.module is None or decision.outcome != "replaced":
        return Decision("not converted", module, decision.note)
    return Decision("replaced", Sequential(decision.module, TokenMean()), decision.note)
