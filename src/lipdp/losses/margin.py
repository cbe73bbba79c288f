"""Losses of Lipschitz classifiers: Kantorovich–Rubinstein, hinge, both together, and the floored cosine."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lipdp._checks import one_of, positive
from lipdp.errors import ConfigurationError, DataError
from lipdp.losses.base import Loss, classes, one_hot, promote, reduce, rows, single, unit, vectors


def _check(loss: Loss, outputs: int, positions: int | None, *, one: bool = False, many: bool = False) -> None:
    name = type(loss).__name__
    if positions not in (None, 1):
        raise ConfigurationError(f"{name} takes outputs (batch, K), and there are {positions} positions: pool them first.")
    if one and outputs != 1:
        raise ConfigurationError(f"{name} is for one output and the network has {outputs}: use Multiclass{name}.")
    if many and outputs < 2:
        raise ConfigurationError(
            f"{name} is for at least 2 outputs and the network has {outputs}: use {name.removeprefix('Multiclass')}."
        )


def _kr(z: Tensor, truth: Tensor) -> Tensor:
    """−ŷ_true + mean of the other outputs."""
    others = (1 - truth) / (z.shape[1] - 1)
    return ((others - truth) * z).sum(1)


class _OneOutput(Loss):
    """A loss of one output whose slope is at most 1."""

    @property
    def lipschitz(self) -> float:
        """1."""
        return 1.0

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        _check(self, outputs, positions, one=True)
        return 1.0


class KR(_OneOutput):
    """Kantorovich–Rubinstein loss of one output, −yŷ with y = ±1. L = 1.

    Derivation: the derivative is −y. There is no division by the number of examples of each class in the batch: that
    would give one example an unbounded influence.

    Targets: y > 0 is +1, anything else is −1, so 0/1 and −1/+1 labels work alike.
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−yŷ of each example, (batch,)."""
        z, y = single(self, outputs, targets)
        return -y * z


class MulticlassKR(Loss):
    """Kantorovich–Rubinstein loss of K outputs: −ŷ_true + mean of the others. L = √(1 + 1/(K−1)) ≤ √2.

    Derivation: the gradient is −1 at the true class and 1/(K−1) at the K−1 others, always: 1 + (K−1)/(K−1)².
    The weights are fixed, not in-batch class counts, and the constant falls with K, so K = 2 is the worst case.

    Targets: class numbers (batch,).
    """

    @property
    def lipschitz(self) -> float:
        """√2, for K = 2."""
        return math.sqrt(2)

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        _check(self, outputs, positions, many=True)
        return math.sqrt(1 + 1 / (outputs - 1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−ŷ_true + mean of the others, (batch,)."""
        z = vectors(self, outputs)
        return _kr(z, one_hot(z, classes(self, z, targets)))


class Hinge(_OneOutput):
    """Hinge loss of one output, max(0, margin/2 − yŷ) with y = ±1. L = 1.

    Derivation: the derivative is −y where the margin is violated and 0 elsewhere.

    Targets: y > 0 is +1, anything else is −1, so 0/1 and −1/+1 labels work alike.

    Args:
        margin: > 0; the loss is 0 where yŷ is at least half of it. L does not depend on it.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("margin",)

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = positive("margin", margin)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Hinge loss of each example, (batch,)."""
        z, y = single(self, outputs, targets)
        return torch.relu(self.margin / 2 - y * z)


class MulticlassHinge(Loss):
    """One-versus-rest hinge: max(0, margin/2 − y_kŷ_k), y_k = +1 for the true class, else −1. L = √K sum, 1/√K mean.

    Derivation: each of the K entries of the gradient is 0 or ±1 (divided by K in the mean): √K, or √K/K.

    Targets: class numbers (batch,). For one output use `Hinge`.

    Args:
        margin: > 0; an output costs nothing where y_kŷ_k is at least half of it. L does not depend on it.
        reduction: over the K outputs, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("margin", "reduction")

    def __init__(self, margin: float = 1.0, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        self.margin = positive("margin", margin)
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))

    @property
    def lipschitz(self) -> float:
        """1/√2, for K = 2, of the mean; infinite for a sum over an unknown number of outputs."""
        return math.inf if self.reduction == "sum" else math.sqrt(0.5)

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        _check(self, outputs, positions, many=True)
        return math.sqrt(outputs if self.reduction == "sum" else 1 / outputs)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Hinge loss of each example, (batch,)."""
        z = vectors(self, outputs)
        signs = 2 * one_hot(z, classes(self, z, targets)) - 1
        return reduce(torch.relu(self.margin / 2 - signs * z), self.reduction)


class HKR(Loss):
    """Hinge-regularised KR: α·hinge + KR. K ≥ 2 outputs: `MulticlassHinge`, `MulticlassKR`; 1 output: `Hinge`, `KR`.

    L = √((a+1)² + (K−1)(a+1/(K−1))²) with a = α (sum) or α/K (mean) for K ≥ 2; L = 1 + α for one output.
    Derivation: where every margin is violated the hinge's gradient, −a·y_k, has the signs of KR's, −1 and 1/(K−1),
    so the entries add up. The mean's constant is √(α²/K + 4α/K + 1 + 1/(K−1)): it falls with K, K = 2 is its worst.

    Targets: class numbers (batch,) for K ≥ 2; for one output y > 0 is +1 and anything else −1.

    Args:
        alpha: weight of the hinge, ≥ 0.
        margin: the hinge's margin, > 0.
        reduction: of the hinge over the K outputs, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("alpha", "margin", "reduction")

    def __init__(self, alpha: float, margin: float = 1.0, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        self.alpha = positive("alpha", alpha, zero=True)
        self.margin = positive("margin", margin)
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))

    @property
    def lipschitz(self) -> float:
        """The larger of the constants for 1 and 2 outputs; infinite for a sum over an unknown number of outputs."""
        if self.reduction == "sum" and self.alpha > 0:
            return math.inf
        return max(self._constant(1, math.inf, 1), self._constant(2, math.inf, 1))

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        _check(self, outputs, positions)
        if outputs == 1:
            return 1 + self.alpha
        a = self.alpha if self.reduction == "sum" else self.alpha / outputs
        return math.hypot(a + 1, math.sqrt(outputs - 1) * (a + 1 / (outputs - 1)))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """α·hinge + KR of each example, (batch,)."""
        if outputs.ndim == 1 or (outputs.ndim == 2 and outputs.shape[1] == 1):
            z, y = single(self, outputs, targets)
            return self.alpha * torch.relu(self.margin / 2 - y * z) - y * z
        z = vectors(self, outputs)
        truth = one_hot(z, classes(self, z, targets))
        hinge = torch.relu(self.margin / 2 - (2 * truth - 1) * z)
        return self.alpha * reduce(hinge, self.reduction) + _kr(z, truth)


class CosineSimilarity(Loss):
    """Minus the cosine of outputs and target, with a floor c: −ŷ·y/max(c, ‖ŷ‖), ‖y‖ = 1. L = 1/c.

    Derivation: inside the ball of radius c the gradient is −y/c; outside it is −(I − uuᵀ)y/‖ŷ‖ with u = ŷ/‖ŷ‖, the
    projection of a unit vector divided by more than c. Without the floor it is unbounded near 0.

    Targets: class numbers (batch,), or vectors shaped as the outputs, divided by their norm here (0 stays 0).

    Args:
        floor: c > 0, in units of the outputs' norm. A larger one makes L smaller; inside its ball the loss is linear.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("floor",)

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = positive("floor", floor)

    @property
    def lipschitz(self) -> float:
        """1/floor."""
        return 1 / self.floor

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−ŷ·y/max(c, ‖ŷ‖) of each example, (batch,)."""
        if targets.is_floating_point():
            z, y = rows(self, outputs, targets)
            y, _ = unit(y)
        else:
            z = promote(outputs)
            if z.ndim != 2:
                raise DataError(
                    f"CosineSimilarity with class numbers needs outputs (batch, K), not {tuple(z.shape)}: flatten them."
                )
            y = one_hot(z, classes(self, z, targets))
        norm: Tensor = torch.linalg.vector_norm(z, dim=1)
        return -(z * y).sum(1) / norm.clamp(min=self.floor)
