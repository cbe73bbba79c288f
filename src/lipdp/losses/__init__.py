"""Losses that know their Lipschitz constant: one value per example, and a bound on its gradient in the outputs.

Every constant holds whatever the targets are: labels are private too, so an out-of-range target is brought back into
the set the proof assumes (see each loss) and can't buy a larger gradient. Nothing couples the examples of a batch.
"""

from __future__ import annotations

from lipdp.losses.base import Loss, predict
from lipdp.losses.margin import HKR, KR, CosineSimilarity, Hinge, MulticlassHinge, MulticlassKR
from lipdp.losses.ordinary import BCE, MAE, MSE, CrossEntropy, Huber, SmoothL1, Squares, as_loss

__all__ = [
    "BCE",
    "HKR",
    "KR",
    "MAE",
    "MSE",
    "CosineSimilarity",
    "CrossEntropy",
    "Hinge",
    "Huber",
    "Loss",
    "MulticlassHinge",
    "MulticlassKR",
    "SmoothL1",
    "Squares",
    "as_loss",
    "predict",
]
