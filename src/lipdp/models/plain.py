"""Conventional networks, to be trained by per-example clipping: "plain-…" of the clipping paper, "tanh-cnn", and "resized".

No layer mixes examples: where the originals have batch normalisation, these have group normalisation.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from lipdp._checks import one_of, whole
from lipdp.errors import ConfigurationError
from lipdp.models.by_name import create, image, register
from lipdp.nn.embedding import SinusoidalPositions

T = torch.nn


Activation = Literal["tanh", "relu"]


def nonlinear(activation: str) -> torch.nn.Module:
    """The layer of an :data:`Activation`."""
    return T.Tanh() if one_of("activation", activation, get_args(Activation)) == "tanh" else T.ReLU()


def group_norm(channels: int, groups: int) -> torch.nn.GroupNorm:
    """Group normalisation; where ``groups`` does not divide the channels, the greatest common divisor of both does."""
    return T.GroupNorm(math.gcd(groups, channels), channels)


@register("plain-mlp")
def plain_mlp(input_shape: tuple[int, ...], classes: int, *, hidden: tuple[int, int] = (128, 256)) -> torch.nn.Sequential:
    """Two hidden layers of 128 and 256 units with sigmoids, as in the clipping paper.

    Args:
        input_shape: shape of one example, any; it is flattened.
        classes: number of outputs.
        hidden: widths of the two hidden layers.
    """
    first, second = hidden
    layers = (T.Linear(math.prod(input_shape), first), T.Sigmoid(), T.Linear(first, second), T.Sigmoid())
    return T.Sequential(T.Flatten(), *layers, T.Linear(second, classes))


@register("plain-cnn")
def plain_cnn(input_shape: tuple[int, ...], classes: int, *, hidden: int = 128) -> torch.nn.Sequential:
    """Two 5×5 convolutions of 20 and 50 channels, each with a 2×2 max pool, and a dense layer.

    Args:
        input_shape: (channels, height, width), at least 16 pixels a side.
        classes: number of outputs.
        hidden: width of the dense layer before the logits.
    """
    channels, height, width = image(input_shape, "plain-cnn", 16)
    rows, columns = (((n - 4) // 2 - 4) // 2 for n in (height, width))
    return T.Sequential(
        T.Conv2d(channels, 20, 5),
        T.ReLU(),
        T.MaxPool2d(2),
        T.Conv2d(20, 50, 5),
        T.ReLU(),
        T.MaxPool2d(2),
        T.Flatten(),
        T.Linear(50 * rows * columns, hidden),
        T.ReLU(),
        T.Linear(hidden, classes),
    )


class _Rows(torch.nn.Module):
    """An image as a sequence of its rows: (batch, channels, height, width) to (batch, height, channels·width)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)


class _Last(torch.nn.Module):
    """A recurrent layer, and of its outputs the last."""

    def __init__(self, recurrent: torch.nn.RNN | torch.nn.LSTM) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.recurrent(x)[0]
        return outputs[:, -1]


def _sequence(input_shape: tuple[int, ...], name: str) -> tuple[int, int, list[torch.nn.Module]]:
    """Length, size of each element, and what brings the input there."""
    if len(input_shape) == 2:
        return input_shape[0], input_shape[1], []
    channels, height, width = image(input_shape, name)
    return height, channels * width, [_Rows()]


@register("plain-rnn")
def plain_rnn(input_shape: tuple[int, ...], classes: int, *, hidden: int = 128) -> torch.nn.Sequential:
    """A recurrent network of 128 units over the rows of an image, or over a sequence (length, size).

    Args:
        input_shape: (channels, height, width), read row by row as sequences of channels·width numbers; or (length, size).
        classes: number of outputs.
        hidden: units of the recurrent layer, whose last output goes into the logits.
    """
    _, size, front = _sequence(input_shape, "plain-rnn")
    return T.Sequential(*front, _Last(T.RNN(size, hidden, batch_first=True)), T.Linear(hidden, classes))


@register("plain-lstm")
def plain_lstm(input_shape: tuple[int, ...], classes: int, *, hidden: int = 128) -> torch.nn.Sequential:
    """An LSTM of 128 units over the rows of an image, or over a sequence (length, size).

    Args:
        input_shape: (channels, height, width), read row by row as sequences of channels·width numbers; or (length, size).
        classes: number of outputs.
        hidden: units of the LSTM, whose last output goes into the logits.
    """
    _, size, front = _sequence(input_shape, "plain-lstm")
    return T.Sequential(*front, _Last(T.LSTM(size, hidden, batch_first=True)), T.Linear(hidden, classes))


class _Encoder(torch.nn.Module):
    """One encoder block as in "Attention is all you need": attention and dense layers, sums and layer norms behind."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = T.MultiheadAttention(dim, heads, batch_first=True)
        self.norm1, self.norm2 = T.LayerNorm(dim), T.LayerNorm(dim)
        self.dense = T.Sequential(T.Linear(dim, hidden), T.ReLU(), T.Linear(hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        y: torch.Tensor = self.norm2(x + self.dense(x))
        return y


class TokenMean(torch.nn.Module):
    """(batch, tokens, dim) to (batch, dim)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of each example's tokens."""
        return x.mean(dim=1)


@register("plain-transformer")
def plain_transformer(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    dim: int = 64,
    heads: int = 4,
    depth: int = 1,
    hidden: int = 128,
    vocabulary: int | None = None,
) -> torch.nn.Sequential:
    """A transformer encoder over the rows of an image, over a sequence (length, size), or (length,) token ids.

    Args:
        input_shape: (channels, height, width), read row by row as sequences of channels·width numbers; or (length, size),
            or (length,) with ``vocabulary``.
        classes: number of outputs.
        dim: size of each token inside, even and a multiple of ``heads``.
        heads: parts of each token that attend by themselves.
        depth: encoder blocks, one after the other.
        hidden: width inside each block's dense layers.
        vocabulary: number of token ids (0 to vocabulary − 1), for inputs that are ids; ``None`` for inputs that are numbers.
    """
    for option, value in (("dim", dim), ("heads", heads), ("depth", depth), ("hidden", hidden)):
        whole(option, value)
    if dim % heads or dim % 2:
        raise ConfigurationError(
            f"plain-transformer has dim={dim} and heads={heads}: dim is even (sines and cosines of positions) and a multiple of "
            f"heads, e.g. dim={2 * heads * max(1, round(dim / (2 * heads)))}"
        )
    if vocabulary is None:
        length, size, front = _sequence(input_shape, "plain-transformer")
        front = [*front, T.Linear(size, dim)]
    else:
        if len(input_shape) != 1:
            raise ConfigurationError(f"with a vocabulary the input is (length,), not {input_shape}")
        length, front = input_shape[0], [T.Embedding(vocabulary, dim)]
    blocks = [_Encoder(dim, heads, hidden) for _ in range(depth)]
    return T.Sequential(*front, SinusoidalPositions(length, dim), *blocks, TokenMean(), T.Linear(dim, classes))


class _Block(torch.nn.Module):
    """ResNet's basic block, with group normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = T.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = group_norm(outputs, groups)
        self.conv2 = T.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = group_norm(outputs, groups)
        self.shortcut = T.Identity() if inputs == outputs and stride == 1 else T.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


@register("plain-resnet18")
def plain_resnet18(input_shape: tuple[int, ...], classes: int, *, width: int = 64, groups: int = 16) -> torch.nn.Sequential:
    """ResNet-18 for small images (a 3×3 stem, no first pool), with group normalisation.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        width: channels of the first of four stages; each next one has twice as many.
        groups: of channels in each normalisation; where it does not divide their number, the greatest common divisor of both.
    """
    channels, _, _ = image(input_shape, "plain-resnet18")
    layers: list[torch.nn.Module] = [T.Conv2d(channels, width, 3, padding=1, bias=False), group_norm(width, groups), T.ReLU()]
    size = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [_Block(size, outputs, 1 if stage == 0 else 2, groups), _Block(outputs, outputs, 1, groups)]
        size = outputs
    return T.Sequential(*layers, T.AdaptiveAvgPool2d(1), T.Flatten(), T.Linear(size, classes))


@register("plain-vgg11")
def plain_vgg11(
    input_shape: tuple[int, ...], classes: int, *, width: int = 64, hidden: int = 512, groups: int = 16
) -> torch.nn.Sequential:
    """VGG-11 with group normalisation; pools only while there are pixels left.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        width: channels of the first convolution; later ones have 2, 4 and 8 times as many.
        hidden: width of the two dense layers before the logits.
        groups: of channels in each normalisation; where it does not divide their number, the greatest common divisor of both.
    """
    channels, rows, columns = image(input_shape, "plain-vgg11")
    layers: list[torch.nn.Module] = []
    for stage in ((1,), (2,), (4, 4), (8, 8), (8, 8)):
        for factor in stage:
            layers += [T.Conv2d(channels, factor * width, 3, padding=1), group_norm(factor * width, groups), T.ReLU()]
            channels = factor * width
        if min(rows, columns) >= 2:
            layers.append(T.MaxPool2d(2))
            rows, columns = rows // 2, columns // 2
    dense = (T.Linear(channels * rows * columns, hidden), T.ReLU(), T.Linear(hidden, hidden), T.ReLU())
    return T.Sequential(*layers, T.Flatten(), *dense, T.Linear(hidden, classes))


# The small tanh network of "Tempered sigmoid activations" (Papernot et al., 2021): the usual reference for clipped DP-SGD.


class _Standardised(torch.nn.Module):
    """(x − centre)/spread with public constants."""

    def __init__(self, centre: float, spread: float) -> None:
        super().__init__()
        self.centre, self.spread = centre, spread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.centre) / self.spread

    def extra_repr(self) -> str:
        return f"centre={self.centre}, spread={self.spread}"


@register("tanh-cnn")
def tanh_cnn(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 16,
    hidden: int = 32,
    activation: Activation = "tanh",
    groups: int = 0,
    centre: float = 0.0,
    spread: float = 1.0,
) -> torch.nn.Sequential:
    """Two strided convolutions with tanh and 2×2 max pooling of stride 1, then two dense layers; unconstrained.

    Args:
        input_shape: (channels, height, width), 20 pixels a side or more.
        classes: number of outputs.
        width: channels of the first convolution; the second has twice as many.
        hidden: width of the hidden dense layer; 0 for none.
        activation: "tanh", or "relu".
        groups: of a group normalisation after each convolution; 0 for none.
        centre: the network reads (x − centre)/spread: public constants, not taken from private data.
        spread: see ``centre``.
    """
    channels, _, _ = image(input_shape, "tanh-cnn", 20)
    if groups < 0 or (groups and width % groups):
        raise ConfigurationError(f"groups={groups!r} does not divide the {width} channels of tanh-cnn; 0 means no normalisation")
    if not (math.isfinite(centre) and math.isfinite(spread) and spread > 0):
        raise ConfigurationError(f"centre={centre!r} and spread={spread!r} must be finite, and the spread positive")

    def block(inside: int, outside: int, kernel: int, padding: int) -> list[torch.nn.Module]:
        normalised = [torch.nn.GroupNorm(groups, outside)] if groups else []
        return [
            torch.nn.Conv2d(inside, outside, kernel, stride=2, padding=padding),
            *normalised,
            nonlinear(activation),
            torch.nn.MaxPool2d(2, 1),
        ]

    front = [] if (centre, spread) == (0.0, 1.0) else [_Standardised(centre, spread)]
    features = [*front, *block(channels, width, 8, 3), *block(width, 2 * width, 4, 0), torch.nn.Flatten()]
    with torch.no_grad():
        size = torch.nn.Sequential(*features)(torch.zeros(1, *input_shape)).shape[1]
    if hidden == 0:
        return torch.nn.Sequential(*features, torch.nn.Linear(size, classes))
    head = [torch.nn.Linear(size, hidden), nonlinear(activation), torch.nn.Linear(hidden, classes)]
    return torch.nn.Sequential(*features, *head)


# Any image model at another resolution: the input is resized first.


@register("resized")
def resized(input_shape: tuple[int, ...], classes: int, *, side: int, model: str, **options: Any) -> torch.nn.Sequential:
    """The named model on images brought to ``side`` × ``side`` pixels, bilinearly: any dataset at any resolution.

    Args:
        input_shape: (channels, height, width) of the images as they are; sides may differ.
        classes: number of outputs.
        side: height and width, in pixels, of what the named model sees.
        model: its name, one of :func:`names`; it is built for (channels, side, side).
        options: the named model's own.
    """
    channels, _, _ = image(input_shape, "resized")
    whole("side", side)
    inner = create(model, input_shape=(channels, side, side), classes=classes, **options)
    return torch.nn.Sequential(torch.nn.Upsample(size=(side, side), mode="bilinear", align_corners=False), inner)
