"""Networks of Lipschitz layers: MLP, LeNet, VGG, ResNet, MLP-Mixer, transformer. Constraints on the weights prove every bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from lipdp import nn
from lipdp._checks import one_of, whole
from lipdp.errors import ConfigurationError
from lipdp.models.by_name import Builder, image, register

InputMode = Literal["ball", "sphere"]


def stem(input_shape: tuple[int, ...], input_norm: float, input_mode: InputMode, centre: bool) -> list[torch.nn.Module]:
    """What every model starts with: optionally each example minus its own mean, then the bounded input."""
    return [*([nn.LayerCentering()] if centre else []), nn.BoundedInput(input_shape, norm=input_norm, mode=input_mode)]


def _even(what: str, *sizes: int) -> None:
    if any(size < 2 or size % 2 for size in sizes):
        raise ConfigurationError(f"{what} must be even (GroupSort sorts pairs), not {', '.join(map(str, sizes))}")


def head(features: int, classes: int, clip: float | None, hidden: int | None = None) -> list[torch.nn.Module]:
    """What every model ends with: optionally a hidden layer, the logits, and optionally a clip on their gradient."""
    layers: list[torch.nn.Module] = []
    if hidden is not None:
        _even("the hidden width", hidden)
        layers += [nn.SpectralLinear(features, hidden, bias=False), nn.GroupSort(2)]
        features = hidden
    layers.append(nn.SpectralLinear(features, classes, bias=False))
    return layers if clip is None else [*layers, nn.ClipGradient(clip)]


# How images have to be, where a network of a given depth says it.
_VGG_IMAGES = "at least 2 pixels a side; stages pool only while there are pixels left"
_RESNET_IMAGES = "of any size; sides are multiples of ``patch`` where that is given"


def _of_depth(builder: Builder, depth: int, what: str, images: str) -> Builder:
    """The builder at one depth, as a model of its own."""

    def build(input_shape: tuple[int, ...], classes: int, **options: object) -> torch.nn.Module:
        if "depth" in options:  # Python 3.11 has another error for it where one is being handled already
            raise TypeError(f"{build.__name__}() got multiple values for argument 'depth'")
        return builder(input_shape, classes, depth=depth, **options)

    build.__name__ = build.__qualname__ = f"{builder.__name__}{depth}"
    build.__doc__ = f""":func:`{builder.__name__}` {what}.

    Args:
        input_shape: (channels, height, width), {images}.
        classes: number of outputs.
        options: the other arguments of :func:`{builder.__name__}`, all but ``depth``.
    """
    return register(build.__name__)(build)


@register("mlp")
def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (256, 256),
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """Orthogonal dense layers with GroupSort between them: every layer has Δ = G·X, with G and X preserved.

    Args:
        input_shape: shape of one example.
        classes: number of outputs.
        hidden: widths of the hidden layers (even, for GroupSort).
        input_norm: norm of the inputs.
        input_mode: "sphere" puts every input on the sphere, "ball" only shortens long ones.
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    _even("hidden widths", *hidden)
    layers, width = [*stem(input_shape, input_norm, input_mode, centre), nn.Flatten()], math.prod(input_shape)
    for size in hidden:
        layers += [nn.SpectralLinear(width, size, bias=False), nn.GroupSort(2)]
        width = size
    return nn.Sequential(*layers, *head(width, classes, clip))


@register("lenet")
def lenet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    channels: Sequence[int] = (16, 32),
    kernel_size: int = 5,
    hidden: int | None = 128,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """Convolution, GroupSort and L2-norm pooling for each entry of ``channels``, then dense layers.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        channels: output channels of the convolutions (even), each followed by a 2×2 pool.
        kernel_size: of the convolutions, an odd number; images keep their size.
        hidden: width of the hidden dense layer, ``None`` for none.
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    depth, height, width = image(input_shape, "lenet", 2 ** len(channels))
    _even("channels", *channels)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ConfigurationError(f"lenet needs an odd kernel, not {kernel_size}")
    layers: list[torch.nn.Module] = stem(input_shape, input_norm, input_mode, centre)
    for size in channels:
        layers += [
            nn.SpectralConv2d(depth, size, kernel_size, padding=kernel_size // 2, bias=False),
            nn.GroupSort(2),
            nn.L2NormPool2d(2),
        ]
        depth, height, width = size, height // 2, width // 2
    layers.append(nn.Flatten())
    return nn.Sequential(*layers, *head(depth * height * width, classes, clip, hidden))


# Output channels of the convolutions of each stage, at width 64; a 2×2 pool behind each stage. Dense layers follow.
STAGES: dict[int, tuple[tuple[int, ...], ...]] = {
    5: ((64,), (128,), (256,)),
    8: ((64,), (128, 128), (256, 256)),
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
}
DENSE = {5: 1, 8: 2, 11: 2}  # hidden dense layers


@register("vgg")
def vgg(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 5,
    width: int = 64,
    hidden: int = 128,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """3×3 convolutions with GroupSort, an L2-norm pool behind each stage, dense layers: every Δ is G·X.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 5, 8 or 11 layers with weights.
        width: channels of the first stage (even); later ones are wider as in VGG.
        hidden: width of the hidden dense layers (even).
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    one_of("depth", depth, STAGES)
    channels, rows, columns = image(input_shape, "vgg", 2)
    _even("width and hidden", width, hidden)
    layers: list[torch.nn.Module] = stem(input_shape, input_norm, input_mode, centre)
    for stage in STAGES[depth]:
        for size in stage:
            layers += [nn.SpectralConv2d(channels, size * width // 64, 3, padding=1, bias=False), nn.GroupSort(2)]
            channels = size * width // 64
        if min(rows, columns) >= 2:  # small images run out of pixels before the deep networks run out of stages
            layers.append(nn.L2NormPool2d(2))
            rows, columns = rows // 2, columns // 2
    layers.append(nn.Flatten())
    features = channels * rows * columns
    for _ in range(DENSE[depth]):
        layers += [nn.SpectralLinear(features, hidden, bias=False), nn.GroupSort(2)]
        features = hidden
    return nn.Sequential(*layers, *head(features, classes, clip))


vgg5 = _of_depth(vgg, 5, "with 3 convolutions and 2 dense layers", _VGG_IMAGES)
""":func:`vgg` with 3 convolutions and 2 dense layers."""
vgg8 = _of_depth(vgg, 8, "with 5 convolutions and 3 dense layers", _VGG_IMAGES)
""":func:`vgg` with 5 convolutions and 3 dense layers."""
vgg11 = _of_depth(vgg, 11, "with 8 convolutions and 3 dense layers", _VGG_IMAGES)
""":func:`vgg` with 8 convolutions and 3 dense layers."""


BLOCKS = {6: (1, 1), 10: (1, 1, 1, 1), 18: (2, 2, 2, 2)}  # blocks of two convolutions, by stage


def _block(channels: int) -> nn.Residual:
    return nn.Residual(
        nn.Sequential(
            nn.SpectralConv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupSort(2),
            nn.SpectralConv2d(channels, channels, 3, padding=1, bias=False),
        )
    )


@register("resnet")
def resnet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 6,
    width: int = 32,
    patch: int = 1,
    pooled: bool = True,
    hidden: int | None = None,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """A convolution, stages of residual averages ``(x + f(x))/2``, a scaled average over the image (or all of it), logits.

    Between stages the image is halved without loss (pixel-unshuffle where sides are even, an L2-norm pool where not) and a
    1×1 convolution doubles the channels. Every Δ is at most G·X.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 6, 10 or 18: the convolutions of stem and blocks, and the logits.
        width: channels of the first stage (even).
        patch: side of the squares of pixels that become channels before the first convolution. A convolution's gradient is a sum
            over positions, and its bound allows for all of them to add up: fewer positions make it tighter.
        pooled: average over the image before the logits. The average of 1-Lipschitz features is short, and so are its margins;
            without it the features keep their norm, and the logits have more weights.
        hidden: width of a dense layer before the logits (even), ``None`` for none.
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    one_of("depth", depth, BLOCKS)
    _even("width", width)
    channels, rows, columns = image(input_shape, "resnet", patch=patch)
    layers: list[torch.nn.Module] = stem(input_shape, input_norm, input_mode, centre)
    if patch > 1:
        layers.append(nn.InvertibleDownsampling(patch))
    layers += [nn.SpectralConv2d(channels * patch**2, width, 3, padding=1, bias=False), nn.GroupSort(2)]
    channels = width
    for stage, blocks in enumerate(BLOCKS[depth]):
        if stage and min(rows, columns) >= 2:
            even = rows % 2 == 0 and columns % 2 == 0
            layers.append(nn.InvertibleDownsampling(2) if even else nn.L2NormPool2d(2))
            rows, columns = rows // 2, columns // 2
            layers.append(nn.SpectralConv2d(4 * channels if even else channels, 2 * channels, 1, bias=False))
            channels = 2 * channels
        for _ in range(blocks):
            layers += [_block(channels), nn.GroupSort(2)]
    if pooled:
        layers.append(nn.ScaledAdaptiveAvgPool2d(1))
    layers.append(nn.Flatten())
    return nn.Sequential(*layers, *head(channels if pooled else channels * rows * columns, classes, clip, hidden))


resnet6 = _of_depth(resnet, 6, "with two blocks", _RESNET_IMAGES)
""":func:`resnet` with two blocks."""
resnet10 = _of_depth(resnet, 10, "with four blocks", _RESNET_IMAGES)
""":func:`resnet` with four blocks."""
resnet18 = _of_depth(resnet, 18, "with eight blocks", _RESNET_IMAGES)
""":func:`resnet` with eight blocks."""


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
    channels, rows, columns = image(input_shape, name, patch=patch)
    _even("dim", dim)
    return rows * columns, [nn.SpectralConv2d(channels, dim, patch, stride=patch, bias=False), Tokens()]


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
    blocks: list[torch.nn.Module] = [MixerBlock(tokens, dim, residual) for _ in range(whole("depth", depth, least=0))]
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
    whole("depth", depth, least=0)
    _even("dim", dim)
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
