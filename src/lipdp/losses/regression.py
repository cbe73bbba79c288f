"""Losses of regression, element by element: K is the number of scalars an example's output has.

And least squares for classification: what a linear head under noise fits soonest.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lipdp.errors import ConfigurationError
from lipdp.losses.base import Loss, choice, classes, number, one_hot, reduce, rows, unit, vectors


class _Elementwise(Loss):
    """A sum or mean over K outputs of functions whose derivative is at most `slope`: √K·slope, or slope/√K."""

    hyperparameters: ClassVar[tuple[str, ...]] = ("reduction",)

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = choice("reduction", reduction, ("mean", "sum"))

    @property
    def _slope(self) -> float:
        return 1.0

    @property
    def lipschitz(self) -> float:
        """The constant for K = 1 of the mean; infinite for a sum over an unknown number of outputs."""
        return math.inf if self.reduction == "sum" else self._slope

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        K = outputs * (positions or 1)
        return self._slope * math.sqrt(K if self.reduction == "sum" else 1 / K)


class MAE(_Elementwise):
    """Mean absolute error |ŷ − y|. L = 1/√K averaged over the K outputs, √K summed.

    Derivation: each entry of the gradient is in [−1, 1] (divided by K in the mean), whatever the target.

    Args:
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    def __init__(self, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__(reduction)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Absolute error of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        return reduce((z - y).abs(), self.reduction)


class Huber(_Elementwise):
    """Huber loss: d²/2 where |d| = |ŷ − y| ≤ δ, δ(|d| − δ/2) beyond. L = δ√K summed over the K outputs, δ/√K averaged.

    Derivation: each entry of the gradient is d clamped to [−δ, δ] (divided by K in the mean), whatever the target.

    Args:
        delta: δ > 0, in units of the outputs: where the square turns into a line, and the line's slope.
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("delta", "reduction")

    def __init__(self, delta: float = 1.0, reduction: Literal["mean", "sum"] = "sum") -> None:
        super().__init__(reduction)
        self.delta = number("delta", delta)

    @property
    def _slope(self) -> float:
        return self.delta

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Huber loss of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        return reduce(F.huber_loss(z, y, reduction="none", delta=self.delta), self.reduction)


class SmoothL1(_Elementwise):
    """Smooth L1: d²/(2β) where |d| = |ŷ − y| < β, |d| − β/2 beyond. L = √K summed over the K outputs, 1/√K averaged.

    Derivation: it is the Huber loss of δ = β divided by β: each entry of the gradient is d/β clamped to [−1, 1].

    Args:
        beta: β ≥ 0, in units of the outputs: where the square turns into a line of slope 1; 0 is the absolute error.
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("beta", "reduction")

    def __init__(self, beta: float = 1.0, reduction: Literal["mean", "sum"] = "sum") -> None:
        super().__init__(reduction)
        self.beta = number("beta", beta, zero=True)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Smooth L1 loss of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        return reduce(F.smooth_l1_loss(z, y, reduction="none", beta=self.beta), self.reduction)


class MSE(Loss):
    """Squared error ‖ŷ − y‖², with ‖y‖ ≤ Y enforced. L = 2(X + Y) for a network with ‖ŷ‖ ≤ X; mean: divided by K.

    Derivation: the gradient is 2(ŷ − y), of norm at most 2(‖ŷ‖ + ‖y‖). There is no constant for an unbounded network.

    Targets: shaped as the outputs. A target outside the ball of radius `target_norm` is projected on it, per example,
    so the constant can't be broken by one large target; it changes what is learned from that example.

    Args:
        target_norm: public bound Y on the norm of an example's target; `math.inf` for no bound and no constant
            (enough for the clipping methods).
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("target_norm", "reduction")

    def __init__(self, target_norm: float, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        self.target_norm = number("target_norm", target_norm, zero=True, infinite=True)
        self.reduction = choice("reduction", reduction, ("mean", "sum"))

    @property
    def lipschitz(self) -> float:
        """Infinite: it takes a bound on the outputs, see `lipschitz_for`."""
        return math.inf

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        total = 2 * (norm + self.target_norm)
        return total / (outputs * (positions or 1)) if self.reduction == "mean" else total

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared error of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        if math.isfinite(self.target_norm):
            direction, norm = unit(y)
            y = torch.where(norm <= self.target_norm, y, self.target_norm * direction)
        return reduce((z - y).square(), self.reduction)


class Squares(Loss):
    """Half the squared distance to the centred indicator of the class, ½‖ŷ − (e_y − 1/K)‖². L = X + √(1 − 1/K) for ‖ŷ‖ ≤ X.

    Derivation: the gradient is ŷ − (e_y − 1/K), and ‖e_y − 1/K‖² = 1 − 2/K + K/K² = 1 − 1/K. There is no constant for an
    unbounded network: put `lipdp.nn.ClipGradient` behind its last layer.

    Where each step brings noise of one size into the outputs, it matters how large they have to become. A fit of squares ends at
    outputs of size 1, where residuals are small and a small clip, with its little noise, no longer binds; that of a cross-entropy
    at some ten times that, after as many times the steps (or learning rate), each with its noise.

    Targets: class numbers (batch,).
    """

    @property
    def lipschitz(self) -> float:
        """Infinite: it takes a bound on the outputs, see `lipschitz_for`."""
        return math.inf

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        if outputs < 2 or (positions or 1) != 1:
            raise ConfigurationError(
                f"Squares needs outputs of shape (batch, K) with K ≥ 2 classes, and the network has {outputs} outputs at "
                f"{positions or 1} positions: change the last layer"
            )
        return norm + math.sqrt(1 - 1 / outputs)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared distance of each example, (batch,)."""
        z = vectors(self, outputs)
        wanted = one_hot(z, classes(self, z, targets)) - 1 / z.shape[1]
        return (z - wanted).square().sum(1) / 2
