"""Least squares for classification: what a linear head under noise fits soonest."""

from __future__ import annotations

import math

from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.losses.base import Loss, classes, one_hot, vectors


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
