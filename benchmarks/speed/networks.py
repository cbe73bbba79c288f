"""The networks that speed is measured on: the two CNNs of our reference table, and those of the ReweightGP paper."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Network(NamedTuple):
    """A constructor, inputs of so many rows on a device, and the number of classes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.device], Tensor]
    classes: int


def cnn(channels: tuple[int, int, int], hidden: int) -> nn.Module:
    a, b, c = channels
    return nn.Sequential(
        nn.Conv2d(3, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(c * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def paper_cnn() -> nn.Module:
    """20 and 50 kernels of 5×5, each followed by pooling, then 128 units."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    before = 784
    for width in widths:
        layers += [nn.Linear(before, width), nn.Sigmoid()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 10))


class Recurrent(nn.Module):
    """Rows of an image as a sequence, as in the paper."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 128) -> None:
        super().__init__()
        self.recurrent = kind(28, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x.squeeze(1))[0][:, -1])


class Encoder(nn.Module):
    """A transformer encoder on embedded tokens, T=256 and d=512 by default."""

    def __init__(self, width: int = 512, layers: int = 2, heads: int = 8, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


def _frozen_norm(channels: int) -> nn.Module:
    """Batch normalisation as the paper trains it: with statistics, scale and shift that stay as they are."""
    return nn.BatchNorm2d(channels).eval().requires_grad_(False)


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), _frozen_norm(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), _frozen_norm(outside),
        )  # fmt: skip
        same = inside == outside and stride == 1
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), _frozen_norm(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet18() -> nn.Module:
    """Eighteen layers, 7×7 at the entrance, as published for large images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), _frozen_norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [_Block(before, width, 1 if width == 64 else 2), _Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), _frozen_norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), _frozen_norm(width), nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False), _frozen_norm(outside),
        )  # fmt: skip
        same = inside == outside and stride == 1
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), _frozen_norm(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet101() -> nn.Module:
    """The network whose largest batch the paper reports."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), _frozen_norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, depth in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for number in range(depth):
            layers.append(_Bottleneck(before, width, 2 if number == 0 and width > 64 else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def vgg11() -> nn.Module:
    """Eight convolutions and a classifier of three layers, on features pooled to 1×1 (any image size)."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), _frozen_norm(width), nn.ReLU()]
        before = width
    head = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def _image(channels: int, side: int) -> Callable[[int, torch.device], Tensor]:
    return lambda batch, device: torch.randn(batch, channels, side, side, device=device)


def _tokens(length: int) -> Callable[[int, torch.device], Tensor]:
    return lambda batch, device: torch.randint(0, 10_000, (batch, length), device=device)


NETWORKS = {
    "cnn-small": Network(lambda: cnn((32, 64, 64), 64), _image(3, 32), 10),
    "cnn-large": Network(lambda: cnn((64, 128, 256), 256), _image(3, 32), 10),
    "transformer": Network(Encoder, _tokens(256), 2),
    "mlp": Network(lambda: mlp(128, 256), _image(1, 28), 10),
    "paper-cnn": Network(paper_cnn, _image(1, 28), 10),
    "rnn": Network(lambda: Recurrent(nn.RNN), _image(1, 28), 10),
    "lstm": Network(lambda: Recurrent(nn.LSTM), _image(1, 28), 10),
    "paper-transformer": Network(lambda: Encoder(200, 1), _tokens(256), 2),
}
NETWORKS["resnet101-256"] = Network(resnet101, _image(3, 256), 10)
NETWORKS |= {f"mlp-{depth}": Network(lambda depth=depth: mlp(*[128] * depth), _image(1, 28), 10) for depth in (2, 4, 6, 8)}
for side in (32, 64, 128, 256):
    NETWORKS[f"resnet18-{side}"] = Network(resnet18, _image(3, side), 10)
    NETWORKS[f"vgg11-{side}"] = Network(vgg11, _image(3, side), 10)
