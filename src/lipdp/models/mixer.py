"""MLP-Mixer of Lipschitz layers, with square (so orthogonal) weights; and the transformer on the same patches."""

from __future__ import annotations

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.models.by_name import register
from lipdp.models.lipschitz import InputMode, head, stem

__all__ = ["MixerBlock", "Tokens", "mixer", "transformer"]


class MixerBlock(torch.nn.Module):
    """``x ← (x + mix(x))/2`` twice: once along the tokens, once along the channels; each mix is dense, GroupSort, dense.

    Without ``residual`` ``x ← mix(x)``, which keeps norms exactly; an average is as long as its two terms only where they agree.
    """

    def __init__(self, tokens: int, dim: int, residual: bool = True) -> None:
        super().__init__()
        self.along_tokens: torch.nn.Module = self._mix(tokens)
        self.along_channels: torch.nn.Module = self._mix(dim)
        if residual:
            self.along_tokens, self.along_channels = nn.Residual(self.along_tokens), nn.Residual(self.along_channels)

    @staticmethod
    def _mix(size: int) -> nn.Sequential:
        sort = nn.GroupSort(2 if size % 2 == 0 else None, dim=-1)
        return nn.Sequential(nn.SpectralLinear(size, size, bias=False), sort, nn.SpectralLinear(size, size, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix; x is (batch, tokens, dim)."""
        x = self.along_tokens(x.transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = self.along_channels(x)
        return y


class Tokens(torch.nn.Module):
    """(batch, dim, rows, columns) to (batch, rows·columns, dim)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each place's channels are a token."""
        return x.flatten(2).transpose(1, 2)


def _patches(input_shape: tuple[int, ...], patch: int, dim: int, name: str) -> tuple[int, list[torch.nn.Module]]:
    if len(input_shape) != 3 or patch < 1 or input_shape[1] % patch or input_shape[2] % patch:
        raise ConfigurationError(
            f"{name} needs images (channels, height, width) whose sides are multiples of the patch, not {input_shape} and {patch}"
        )
    if dim < 2 or dim % 2:
        raise ConfigurationError(f"dim must be even (GroupSort sorts pairs), not {dim}")
    tokens = (input_shape[1] // patch) * (input_shape[2] // patch)
    return tokens, [nn.SpectralConv2d(input_shape[0], dim, patch, stride=patch, bias=False), Tokens()]


@register("mixer")
def mixer(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    patch: int = 4,
    dim: int = 64,
    depth: int = 1,
    residual: bool = True,
    pooled: bool = True,
    hidden: int | None = None,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """Patches to tokens (an exact, non-overlapping convolution), mixer blocks with square weights, logits of their mean or of all.

    Args:
        input_shape: (channels, height, width), sides multiples of ``patch``.
        classes: number of outputs.
        patch: side of a patch.
        dim: channels of a token (even).
        depth: number of blocks.
        residual: blocks average what they mix with what they got.
        pooled: logits of the tokens' mean. The mean of 1-Lipschitz features is short, and so are its margins; without it the
            features keep their norm, and the logits have more weights.
        hidden: width of a dense layer before the logits (even), ``None`` for none.
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    tokens, cut = _patches(input_shape, patch, dim, "mixer")
    if depth < 0:
        raise ConfigurationError(f"depth must be 0 or more, not {depth}")
    blocks: list[torch.nn.Module] = [MixerBlock(tokens, dim, residual) for _ in range(depth)]
    front = [*stem(input_shape, input_norm, input_mode, centre), *cut]
    end = nn.TokenMean(tokens) if pooled else nn.Flatten()
    return nn.Sequential(*front, *blocks, end, *head(dim if pooled else tokens * dim, classes, clip, hidden))


@register("transformer")
def transformer(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    patch: int = 4,
    dim: int = 64,
    heads: int = 2,
    depth: int = 1,
    vocabulary: int | None = None,
    token_norm: float = 1.0,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """Lipschitz attention blocks over patches of an image, or (with ``vocabulary``) over token ids.

    Args:
        input_shape: (channels, height, width), sides multiples of ``patch``; or (length,) with ``vocabulary``.
        classes: number of outputs.
        patch: side of a patch.
        dim: channels of a token (even, a multiple of heads).
        heads: number of attention heads.
        depth: number of blocks.
        vocabulary: number of token ids; the model then reads integers.
        token_norm: radius of the tokens' ball (of the embedding's rows too).
        input_norm: norm of the inputs, for images.
        input_mode: "sphere" or "ball", for images.
        centre: subtract each example's own mean first, for images.
        clip: bound on the norm of the logits' gradient.
    """
    if depth < 0 or dim < 2 or dim % 2:
        raise ConfigurationError(f"depth must be 0 or more and dim even, not {depth} and {dim}")
    if vocabulary is None:
        tokens, cut = _patches(input_shape, patch, dim, "transformer")
        front = [*stem(input_shape, input_norm, input_mode, centre), *cut]
    else:
        if len(input_shape) != 1 or vocabulary < 1:
            raise ConfigurationError(f"with a vocabulary the input is (length,), not {input_shape}")
        tokens = input_shape[0]
        front = [nn.BoundedEmbedding(vocabulary, dim, norm=token_norm, length=tokens)]
    blocks = [nn.TransformerBlock(dim, heads, tokens=tokens, token_norm=token_norm) for _ in range(depth)]
    positions = nn.SinusoidalPositions(tokens, dim, scale=0.1)
    return nn.Sequential(*front, positions, *blocks, nn.TokenMean(tokens), *head(dim, classes, clip))
