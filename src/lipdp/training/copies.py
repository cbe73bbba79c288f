"""Augmentation multiplicity: an example's gradient is the mean of its copies' gradients, which changes no bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lipdp.data.augment import Augmentation
from lipdp.errors import DataError

__all__ = ["Copies"]


@dataclass(frozen=True)
class Copies:
    """Turns a microbatch of examples into one of rows: the K copies of each example, one after another.

    ‖(1/K)Σ_k g_ik‖ ≤ (1/K)Σ_k‖g_ik‖ ≤ Δ: the copies of one example count as one. All rows share one forward pass.

    Attributes:
        augmentation: what makes the copies; ``None`` for the example itself.
        generator: for its random draws.
        shape: shape of one row, where the model says it.
    """

    augmentation: Augmentation | None = None
    generator: torch.Generator | None = None
    shape: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """K."""
        return 1 if self.augmentation is None else self.augmentation.copies

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, …) to (batch·K, …), example-major."""
        if self.augmentation is None:
            return x
        made = self.augmentation(x, self.generator)
        if made.ndim < 2 or made.shape[:2] != (len(x), self.count):
            raise DataError(
                f"{self.augmentation!r} made {tuple(made.shape)} out of {tuple(x.shape)}: it has to give {self.count} copies of "
                "each example, as (batch, copies, …)"
            )
        if self.shape is not None and tuple(made.shape[2:]) != self.shape:
            raise DataError(f"the plan is for examples of shape {self.shape}; {self.augmentation!r} makes {tuple(made.shape[2:])}")
        return made.flatten(0, 1)

    def repeat(self, per_example: torch.Tensor) -> torch.Tensor:
        """What belongs to the example, for each of its rows: targets, the mask."""
        return per_example if self.count == 1 else per_example.repeat_interleave(self.count, dim=0)
