"""A residual network with BatchNorm, and how it is trained privately.

BatchNorm mixes examples: one record's gradient depends on the others of its batch, so neither a proof nor clipping bounds what
one record does. It is refused by name; `lipdp.convert.per_example_norms` puts GroupNorm in its place.

    python examples/batchnorm_resnet.py
"""

from __future__ import annotations

import argparse

import torch

import lipdp
from lipdp.errors import LipdpError


class Block(torch.nn.Module):
    """x + f(x), two convolutions with BatchNorm in f."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        nn = torch.nn
        self.first, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.second, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        hidden = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(hidden)))


def network(channels: int = 16, classes: int = 10) -> torch.nn.Module:
    """A small ResNet for images of one channel."""
    nn = torch.nn
    stem = [nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(
        *stem, Block(channels), nn.AvgPool2d(2), Block(channels), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes)
    )


def main(steps: int, epsilon: float) -> float:
    """Train on the digits, and return the accuracy on the test set."""
    train, test, info = lipdp.data.load("digits")
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    sizes = {"dataset_size": len(train), "batch_size": 720, "steps": steps, "input_shape": info.shape}
    decided = {"epsilon": epsilon, "delta": 1e-4, "method": "bookkeeping", "max_grad_norm": 1.0, **sizes}
    model = network()
    try:
        lipdp.plan(model, loss, **decided)
    except LipdpError as error:
        print(f"as it is: {error}")
    model, changes = lipdp.convert.per_example_norms(model)
    print(changes)
    plan = lipdp.plan(model, loss, **decided)
    optimizer, scheduler = lipdp.suggest_optimizer(model, plan)
    history = lipdp.fit(model, loss, optimizer, plan, train, scheduler=scheduler)
    accuracy = lipdp.evaluate(model, loss, test)["accuracy"]
    print(f"test accuracy {100 * accuracy:.1f} %, {lipdp.privacy.guarantee(history.epsilon, plan.delta)}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--epsilon", type=float, default=3.0)
    main(**vars(parser.parse_args()))
