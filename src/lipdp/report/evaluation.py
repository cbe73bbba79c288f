"""What a trained model does on records that are not protected: where it errs, and how far its decisions are certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from lipdp.certify import certified_accuracy, certify
from lipdp.errors import LipdpError
from lipdp.fields import Range, Size, check_fields
from lipdp.losses import predict
from lipdp.training.batches import gather

__all__ = ["Evaluation", "evaluate_run"]

_RADII = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
_CERTIFIED = 1000  # examples at most: certificates of whole test sets take their time
_MOST_CLASSES = 30
Share = Annotated[float, Range(least=0, most=1)]


@dataclass(frozen=True)
class Evaluation:
    """Figures on records outside the guarantee.

    Attributes:
        records: on which part: "test" or "validation".
        classes: names of the classes.
        confusion: counts by true class (rows) and predicted class; empty where there are too many classes to show.
        certified: (L2 radius in the units of the inputs, share of examples that stay right within it); empty where nothing is
            certified.
        examples: how many the certificates are of.
    """

    records: str
    classes: tuple[str, ...]
    confusion: tuple[tuple[Size, ...], ...]
    certified: tuple[tuple[Annotated[float, Range(least=0)], Share], ...] = ()
    examples: Size = 0

    def __post_init__(self) -> None:
        check_fields(self, "an evaluation")


def evaluate_run(model: torch.nn.Module, records: Any, classes: Sequence[str], *, part: str = "test") -> Evaluation:
    """A confusion matrix and, where the model has a Lipschitz constant, certified accuracies.

    Args:
        model: the trained one.
        records: a dataset of (input, class number) pairs, not protected by the guarantee.
        classes: names of the classes.
        part: what the records are: "test" or "validation".
    """
    x, y = gather(records, torch.arange(len(records)))
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            predicted = torch.cat([predict(model(rows.to(place))).cpu() for rows in torch.split(x, 1024)]).long()
        confusion: tuple[tuple[int, ...], ...] = ()
        if len(classes) <= _MOST_CLASSES:
            counts = torch.zeros(len(classes), len(classes), dtype=torch.long)
            counts.index_put_((y.cpu().long(), predicted), torch.ones_like(predicted), accumulate=True)
            confusion = tuple(map(tuple, counts.tolist()))
        try:
            radii = certify(model, x[:_CERTIFIED].to(place), y[:_CERTIFIED].to(place))
            certified = tuple(certified_accuracy(radii, _RADII).items())
        except LipdpError:  # a network without a Lipschitz constant certifies nothing
            certified = ()
    finally:
        model.train(was)
    return Evaluation(part, tuple(map(str, classes)), confusion, certified, min(len(y), _CERTIFIED) if certified else 0)
