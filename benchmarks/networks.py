"""The networks that speed is measured on: the two CNNs of our reference table, and those of the ReweightGP paper."""

import torch
from torch import nn


def cnn(channels: tuple[int, int, int], hidden: int) -> nn.Module:
    a, b, c = channels
    return nn.Sequential(
        nn.Conv2d(3, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(c * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Rows of an image as a sequence, as in the paper."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 128) -> None:
        super().__init__()
        self.recurrent = kind(28, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x.squeeze(1))[0][:, -1])


class Encoder(nn.Module):
    """A transformer encoder block on embedded tokens, T=256 and d=512 by default."""

    def __init__(self, length: int = 256, width: int = 512, layers: int = 2, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


def _image(channels: int, side: int):
    return lambda batch, device: torch.randn(batch, channels, side, side, device=device)


def _tokens(length: int):
    return lambda batch, device: torch.randint(0, 10_000, (batch, length), device=device)


# name -> (constructor, inputs, classes)
NETWORKS = {
    "cnn-small": (lambda: cnn((32, 64, 64), 64), _image(3, 32), 10),
    "cnn-large": (lambda: cnn((64, 128, 256), 256), _image(3, 32), 10),
    "mlp": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 128), nn.Sigmoid(), nn.Linear(128, 256), nn.Sigmoid(), nn.Linear(256, 10)
        ),
        _image(1, 28),
        10,
    ),
    "paper-cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
        ),
        _image(1, 28),
        10,
    ),
    "rnn": (lambda: Recurrent(nn.RNN), _image(1, 28), 10),
    "lstm": (lambda: Recurrent(nn.LSTM), _image(1, 28), 10),
    "transformer": (Encoder, _tokens(256), 2),
}  # fmt: skip
