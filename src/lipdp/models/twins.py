"""Conventional twins of the Lipschitz networks: the same widths and depths, in torch's own layers, to be trained by clipping.

What the Lipschitz networks need for their proofs is what these do without: weights have no constraint, GroupSort is ReLU or tanh,
an L2-norm pool is a max pool, a residual average is a residual sum, and deeper networks normalise groups of channels (or tokens)
as their originals normalise batches. Every example enters as in the Lipschitz networks, centred and at a fixed norm.

The "boundary-…" networks are these through :func:`lipdp.convert.between_boundaries`: what a layer gets is scaled to norm 1, and the
cotangent of what it gives is clipped, so sensitivities are proved and no weight has a constraint. The logits start at zero.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from lipdp import nn
from lipdp._checks import one_of, whole
from lipdp.models.by_name import Builder, image, register
from lipdp.models.lipschitz import BLOCKS, DENSE, STAGES, Tokens
from lipdp.models.plain import Activation, TokenMean, group_norm, nonlinear

T = torch.nn


def _stem(input_shape: tuple[int, ...]) -> torch.nn.Module:
    """Each example minus its own mean, by its own deviation: the Lipschitz networks' centring and sphere, of radius √size."""
    return T.LayerNorm(input_shape, elementwise_affine=False)


def _head(features: int, classes: int, hidden: int | None, activation: str) -> list[torch.nn.Module]:
    """Optionally a hidden layer, then the logits."""
    if hidden is None:
        return [T.Linear(features, classes)]
    return [T.Linear(features, hidden), nonlinear(activation), T.Linear(hidden, classes)]


@register("plain-dense")
def plain_dense(
    input_shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (256, 256), activation: Activation = "relu"
) -> torch.nn.Sequential:
    """The twin of `mlp`: dense layers of any widths.

    Args:
        input_shape: shape of one example.
        classes: number of outputs.
        hidden: widths of the hidden layers.
        activation: "relu" or "tanh".
    """
    layers: list[torch.nn.Module] = [_stem(input_shape), T.Flatten()]
    width = math.prod(input_shape)
    for size in hidden:
        layers += [T.Linear(width, size), nonlinear(activation)]
        width = size
    return T.Sequential(*layers, T.Linear(width, classes))


@register("plain-lenet")
def plain_lenet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    channels: Sequence[int] = (16, 32),
    kernel_size: int = 5,
    hidden: int | None = 128,
    activation: Activation = "relu",
) -> torch.nn.Sequential:
    """The twin of `lenet`: convolutions, each with a 2×2 max pool, then dense layers.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        channels: output channels of the convolutions.
        kernel_size: of the convolutions, an odd number.
        hidden: width of the hidden dense layer, ``None`` for none.
        activation: "relu" or "tanh".
    """
    depth, rows, columns = image(input_shape, "plain-lenet", 2 ** len(channels))
    layers: list[torch.nn.Module] = [_stem(input_shape)]
    for size in channels:
        layers += [T.Conv2d(depth, size, kernel_size, padding=kernel_size // 2), nonlinear(activation), T.MaxPool2d(2)]
        depth, rows, columns = size, rows // 2, columns // 2
    return T.Sequential(*layers, T.Flatten(), *_head(depth * rows * columns, classes, hidden, activation))


@register("plain-vgg")
def plain_vgg(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 5,
    width: int = 64,
    hidden: int = 128,
    groups: int = 8,
    activation: Activation = "relu",
) -> torch.nn.Sequential:
    """The twin of `vgg`: 3×3 convolutions with group normalisation, a max pool behind each stage, dense layers.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 5, 8 or 11 layers with weights.
        width: channels of the first stage.
        hidden: width of the hidden dense layers.
        groups: of channels that are normalised together.
        activation: "relu" or "tanh".
    """
    one_of("depth", depth, STAGES)
    channels, rows, columns = image(input_shape, "plain-vgg", 2)
    layers: list[torch.nn.Module] = [_stem(input_shape)]
    for stage in STAGES[depth]:
        for size in (factor * width // 64 for factor in stage):
            layers += [T.Conv2d(channels, size, 3, padding=1), group_norm(size, groups), nonlinear(activation)]
            channels = size
        if min(rows, columns) >= 2:
            layers.append(T.MaxPool2d(2))
            rows, columns = rows // 2, columns // 2
    layers.append(T.Flatten())
    features = channels * rows * columns
    for _ in range(DENSE[depth]):
        layers += [T.Linear(features, hidden), nonlinear(activation)]
        features = hidden
    return T.Sequential(*layers, T.Linear(features, classes))


class _Residual(torch.nn.Module):
    """``x + f(x)``."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = T.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.layers(x)
        return y


@register("plain-resnet")
def plain_resnet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 6,
    width: int = 32,
    patch: int = 1,
    pooled: bool = True,
    hidden: int | None = None,
    groups: int = 8,
    activation: Activation = "relu",
) -> torch.nn.Sequential:
    """The twin of `resnet`: residual sums with group normalisation, 2×2 convolutions of stride 2 between stages, logits.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 6, 10 or 18.
        width: channels of the first stage.
        patch: side of the squares of pixels that become channels before the first convolution.
        pooled: average over the image before the logits.
        hidden: width of a dense layer before the logits, ``None`` for none.
        groups: of channels that are normalised together.
        activation: "relu" or "tanh".
    """
    one_of("depth", depth, BLOCKS)
    channels, rows, columns = image(input_shape, "plain-resnet", 2, patch)
    layers: list[torch.nn.Module] = [_stem(input_shape)]
    if patch > 1:
        layers.append(T.PixelUnshuffle(patch))
    layers += [T.Conv2d(channels * patch**2, width, 3, padding=1), group_norm(width, groups), nonlinear(activation)]
    channels = width
    for stage, blocks in enumerate(BLOCKS[depth]):
        if stage and min(rows, columns) >= 2:
            # The Lipschitz network's unshuffled pixels and 1×1 convolution are this convolution, written otherwise.
            layers.append(T.Conv2d(channels, 2 * channels, 2, stride=2))
            channels, rows, columns = 2 * channels, rows // 2, columns // 2
        for _ in range(blocks):
            halves = [(T.Conv2d(channels, channels, 3, padding=1), group_norm(channels, groups)) for _ in range(2)]
            layers += [_Residual(*halves[0], nonlinear(activation), *halves[1]), nonlinear(activation)]
    if pooled:
        layers.append(T.AdaptiveAvgPool2d(1))
        rows = columns = 1
    return T.Sequential(*layers, T.Flatten(), *_head(channels * rows * columns, classes, hidden, activation))


class _MixerBlock(torch.nn.Module):
    """``x ← x + mix(norm(x))`` twice: along the tokens, along the channels."""

    def __init__(self, tokens: int, dim: int, activation: Activation) -> None:
        super().__init__()
        self.norm1, self.norm2 = T.LayerNorm(dim), T.LayerNorm(dim)
        self.along_tokens, self.along_channels = (
            T.Sequential(T.Linear(size, size), nonlinear(activation), T.Linear(size, size)) for size in (tokens, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.along_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = x + self.along_channels(self.norm2(x))
        return y


@register("plain-mixer")
def plain_mixer(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    patch: int = 4,
    dim: int = 64,
    depth: int = 1,
    pooled: bool = True,
    hidden: int | None = None,
    activation: Activation = "relu",
) -> torch.nn.Sequential:
    """The twin of `mixer`: patches to tokens, residual mixer blocks with layer norms, logits of their mean or of all.

    Args:
        input_shape: (channels, height, width), sides multiples of ``patch``.
        classes: number of outputs.
        patch: side of a patch.
        dim: channels of a token.
        depth: number of blocks.
        pooled: logits of the tokens' mean.
        hidden: width of a dense layer before the logits, ``None`` for none.
        activation: "relu" or "tanh".
    """
    channels, rows, columns = image(input_shape, "plain-mixer", patch=patch)
    tokens = rows * columns
    blocks = [_MixerBlock(tokens, dim, activation) for _ in range(whole("depth", depth, least=0))]
    front = (_stem(input_shape), T.Conv2d(channels, dim, patch, stride=patch), Tokens())
    end = TokenMean() if pooled else T.Flatten()
    features = dim if pooled else tokens * dim
    return T.Sequential(*front, *blocks, T.LayerNorm(dim), end, *_head(features, classes, hidden, activation))


# Conventional networks between boundaries: sensitivities are proved, and no weight has a constraint.

TWINS: dict[str, Builder] = {
    "dense": plain_dense,
    "lenet": plain_lenet,
    "vgg": plain_vgg,
    "resnet": plain_resnet,
    "mixer": plain_mixer,
}
_CLIP, _CONV_CLIP = 0.2, 0.05


def boundary_twin(
    plain: Builder,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    clip: float = _CLIP,
    conv_clip: float = _CONV_CLIP,
    **options: Any,
) -> nn.Sequential:
    """A conventional network between boundaries.

    Args:
        plain: makes it.
        input_shape: shape of one example.
        classes: number of outputs.
        clip: bound on the norm of cotangents where they reach a dense layer's output: its Δ.
        conv_clip: the same for convolutions, whose Δ is √m times as large, m being the number of windows an entry lies in.
        options: of the network.
    """
    from lipdp.convert import between_boundaries  # it knows the layers and the models that they make

    network = plain(input_shape, classes, **options)
    logits = [module for module in network.modules() if isinstance(module, torch.nn.Linear)][-1]
    torch.nn.init.zeros_(logits.weight)
    return between_boundaries(network, input_shape, clip=clip, conv_clip=conv_clip)


def _register(name: str, plain: Builder) -> None:
    def build(input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Sequential:
        return boundary_twin(plain, input_shape, classes, **options)

    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation="float")
        for name, value in (("clip", _CLIP), ("conv_clip", _CONV_CLIP))
    ]
    signature = inspect.signature(plain)
    build.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])  # type: ignore[attr-defined]
    build.__doc__ = f"`plain-{name}` with every layer between boundaries: inputs of norm 1, cotangents clipped; Δ is proved."
    register(f"boundary-{name}")(build)


for _name, _plain in TWINS.items():
    _register(_name, _plain)
