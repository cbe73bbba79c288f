"""What a step asks of the data: a sum of bounded per-example gradients, and where the bound comes from.

The engine is the same for every method; a query says how the sum is computed and proves (or enforces) its sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lipdp.errors import ConfigurationError
from lipdp.graphs import Watched
from lipdp.planning.plan import PrivacyPlan
from lipdp.training.seats import Copies
from lipdp.training.totals import Turn

__all__ = ["SAME", "Answer", "Beside", "Query", "Sample", "check_names", "check_slack"]

# Bounds of the same model come out of the same arithmetic; anything above this is another model.
SAME = 1 + 1e-9


Beside = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Digests of a microbatch (inputs, targets, mask), and of the weights that it meets."""


@dataclass(frozen=True)
class Sample:
    """One Poisson sample and how it goes through the model; ``dtypes`` are what the model and the loss take."""

    inputs: Any  # a tensor or Rows, or a tuple or dict of them
    targets: torch.Tensor
    microbatch_size: int
    device: torch.device
    copies: Copies = field(default_factory=Copies)
    dtypes: tuple[Any, torch.dtype] | None = None
    seats: torch.Tensor | None = None  # by seat, which record sits there
    settings: int | None = None  # the number that the query's ``watched`` gives the model's settings, where it has just looked
    beside: Beside | None = None  # digests that a recording computes with the sums
    turn: Turn = field(default_factory=Turn)  # which microbatches are computed here, and how they are added up


@dataclass(frozen=True)
class Answer:
    """What the data say, not yet noised: private.

    Attributes:
        sums: the gradient sum by parameter; as whole numbers, where :attr:`Sample.turn` has units.
        counts: Σ(b_i − ½) by adaptive clipping norm.
        clipped: how many examples were clipped, of how many; where examples are clipped.
        fine: whether the sums are finite; it may still be computed on a device, as they are.
        again: the answer without the records that make it infinite, for where it is not fine.
        seen: the digests of :attr:`Sample.beside` for each microbatch.
    """

    sums: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    clipped: tuple[torch.Tensor, int] | None = None
    fine: torch.Tensor | bool = True
    again: Callable[[], Answer] | None = None
    seen: Sequence[torch.Tensor] = ()


class Query(Protocol):
    """A bounded sum over the sampled examples."""

    @property
    def loss(self) -> Callable[..., torch.Tensor]:
        """One value per example."""
        ...

    @property
    def watched(self) -> Watched:
        """Who numbers the states of the model and the loss."""
        ...

    @property
    def entries(self) -> int | None:
        """Size of the largest activation of one example, where it is known."""
        ...

    @property
    def products(self) -> int | None:
        """Multiplications that a forward pass takes for one example, where every weight is used once."""
        ...

    @property
    def most_rows(self) -> int:
        """Records of a microbatch at most: the plan's slack covers the rounding of so many."""
        ...

    def prove(self) -> None:
        """Bound the model as it is now; raises if the plan promises less."""
        ...

    def rehearse(self, rows: int) -> None:
        """Try a microbatch of this many rows; raises if what would run there is not what was proved."""
        ...

    @property
    def stands(self) -> bool:
        """Whether what was proved still is what would run, as far as classes are concerned."""
        ...

    @property
    def apart(self) -> str:
        """How it is known that records don't meet, see :attr:`PrivacyEngine.apart`."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether :meth:`ask` runs the proved program and nothing of the user's, so that it may begin before it is looked at."""
        ...

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Group name → sensitivity, with clipping norms at these values."""
        ...

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """The query's answer for these parameters, with clipping norms at these values."""
        ...

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of the parameters from the noised answer; sees no data."""
        ...


def check_names(plan: PrivacyPlan, sizes: Mapping[str, int]) -> None:
    """Refuse a plan whose groups are not these parameters, of these sizes."""
    planned = {name for group in plan.groups for name in group.parameters}
    if planned != set(sizes):
        different = sorted(planned ^ set(sizes))
        raise ConfigurationError(
            f"the plan was made for another model: the trainable parameters differ in {', '.join(different[:5])}. Make a new plan."
        )
    for group in plan.groups:
        size = sum(sizes[name] for name in group.parameters)
        if size != group.size:
            raise ConfigurationError(
                f"the plan was made for another model: '{group.name}' has {size} entries here, {group.size} in the plan. Make a "
                "new plan."
            )


def check_slack(plan: PrivacyPlan, needed: float) -> None:
    """Refuse a plan that allows for less rounding than the model needs."""
    if needed > plan.slack * SAME:
        raise ConfigurationError(
            "the model computes more coarsely than the plan's rounding slack covers. Make a new plan for the model as it is."
        )
