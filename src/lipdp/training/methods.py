"""Which query a plan's method stands for; both at once, where parts of a model are proved and others clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lipdp.graphs import Watched
from lipdp.losses import as_loss
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import (
    per_example_loss,
)
from lipdp.training.clipped import ClippedQuery
from lipdp.training.proved import ProvedQuery
from lipdp.training.query import Answer, Query, Sample

__all__ = ["MixedQuery", "query_of"]


def query_of(
    model: torch.nn.Module, loss: Any, plan: PrivacyPlan, input_shape: tuple[int, ...] | None, watched: Watched | None = None
) -> Query:
    """The query that the plan's method stands for. ``watched``: whoever numbers the states of the model and the loss already."""
    if plan.method in ("clipless", "mixed"):
        proved = ProvedQuery(model, as_loss(loss), plan, input_shape, watched)
        return proved if plan.method == "clipless" else MixedQuery(proved, ClippedQuery(model, proved.loss, plan))
    return ClippedQuery(model, per_example_loss(loss), plan, watched)


class MixedQuery:
    """Proved where there is a proof, clipped elsewhere: both are one Gaussian mechanism."""

    def __init__(self, proved: ProvedQuery, clipped: ClippedQuery) -> None:
        self.loss, self.watched = proved.loss, proved.watched
        self._proved, self._clipped = proved, clipped

    @property
    def entries(self) -> int | None:
        """As the calculus says."""
        return self._proved.entries

    @property
    def products(self) -> int | None:
        """Clipping takes more."""
        return None

    @property
    def apart(self) -> str:
        """Of the clipped part."""
        return self._clipped.apart

    @property
    def recorded(self) -> bool:
        """The module itself runs."""
        return False

    def rehearse(self, rows: int) -> None:
        """The proved part."""
        self._proved.rehearse(rows)

    @property
    def stands(self) -> bool:
        """Of the proved part."""
        return self._proved.stands

    @property
    def most_rows(self) -> int:
        """Of both parts."""
        return min(self._proved.most_rows, self._clipped.most_rows)

    def prove(self) -> None:
        """Both parts."""
        self._proved.prove()
        self._clipped.prove()

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Of both parts."""
        return {**self._proved.bounds(clips), **self._clipped.bounds(clips)}

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """One pass for each part."""
        enforced = {name for group in self._clipped.groups for name in group.parameters}
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, torch.Tensor] = {}
        share = None
        for query, names in ((self._proved, parameters.keys() - enforced), (self._clipped, parameters.keys() & enforced)):
            if names:
                part = query.ask({name: p for name, p in parameters.items() if name in names}, batch, clips)
                if part.again is not None and not bool(part.fine):
                    part = part.again()
                sums |= part.sums
                counts |= part.counts
                share = part.clipped or share
        return Answer(sums, counts, share)

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The proved part is pulled back through parametrisations; clipped gradients already are the parameters' own."""
        proved = {group.name for group in self._proved.groups}
        return {**noised, **self._proved.gradients({name: g for name, g in noised.items() if name in proved})}
