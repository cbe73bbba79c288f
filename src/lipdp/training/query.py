"""What a step asks of the data: a sum of bounded per-example gradients, and where the bound comes from.

The engine is the same for every method; a query says how the sum is computed and proves (or enforces) its sensitivity.

Its sums over microbatches do not depend on the order, nor on which process has computed which: they are added in whole numbers.
Floating-point sums depend on their order; ranks that add up other microbatches, or as many ranks more, get sums that differ in the
last bits. Noise depends on all bits of what it is added to (:mod:`lipdp.training.streams`), so those would be other releases. Here
the sum P of one microbatch, in float64, is written as (a + l·2⁻⁴⁸)·u with whole numbers a and l, |l| ≤ 2⁴⁷, and u the power of two
2²⁴·g, g the grid of the release (:mod:`lipdp.privacy.noise`). Whole numbers are added without any rounding, by whoever and in
whatever order.

*What it costs in sensitivity.* P is rounded to a multiple of 2⁻²⁴·g, by g·2⁻²⁵ at most. One record more changes two microbatches at
most (:mod:`lipdp.training.seats`), so the distance of two neighbours' sums grows by 2·2·g·2⁻²⁵ = g·2⁻²³ per coordinate;
:func:`lipdp.privacy.noise.grid_factor` has room for it.

*That nothing overflows.* A coordinate of P is at most Δ·rows, and Δ ≤ s/σ, s < 2⁴²·g: |a| ≤ 2¹⁸·rows/σ, and over all records of a
sample of n, |Σa| ≤ 2¹⁸·n/σ. :func:`check_range` refuses what could leave 63 bits, by public numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lipdp.errors import ConfigurationError
from lipdp.graphs import Watched
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy.noise import grid
from lipdp.training.seats import Copies

_COARSE, _FINE = 24, 48  # bits: of u above the grid, and of l below u
_SUMMED = 14  # log2 of the microbatches of one rank in a step, and of the ranks, at most
_MOST = 2.0**43  # records of a sample over σ, see above


@dataclass(frozen=True)
class Turn:
    """Which microbatches of a step are this process's, and how it adds them up.

    Attributes:
        rank: of this process: microbatch number n is its own if n leaves this remainder.
        ranks: how many processes there are.
        begin: called with the number of each microbatch before it is computed: its random draws start at a place of their own.
        units: by parameter, u; sums are then whole numbers. ``None``: they are floating point.
    """

    rank: int = 0
    ranks: int = 1
    begin: Callable[[int], None] = field(default=lambda number: None)
    units: Mapping[str, float] | None = None

    def starts(self, number: int) -> bool:
        """Whether this microbatch is to be computed here; if so, it begins."""
        if number % self.ranks != self.rank:
            return False
        self.begin(number)
        return True

    def summand(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sums of one microbatch, as they are added up."""
        return sums if self.units is None else {name: exact(value, self.units[name]) for name, value in sums.items()}


def unit_of(std: float) -> float:
    """u for a sum that gets noise of this standard deviation; 1 for one that gets none, which is zero."""
    return math.ldexp(grid(std), _COARSE) if std > 0 else 1.0


def exact(value: torch.Tensor, unit: float) -> torch.Tensor:
    """(a, l) of a sum in float64: whole numbers, of shape (2, …). What is not finite has no meaning here."""
    scaled = value.detach().to(torch.float64) * (1 / unit)
    whole = torch.round(scaled)
    rest = torch.round((scaled - whole).mul_(2.0**_FINE))
    return torch.stack([whole.to(torch.int64), rest.to(torch.int64)])


def carried(pair: torch.Tensor) -> torch.Tensor:
    """The same sum with |l| ≤ 2⁴⁷, so that as many again can be added; in its place."""
    over = (pair[1] + (1 << (_FINE - 1))) >> _FINE
    pair[0] += over
    pair[1] -= over.bitwise_left_shift_(_FINE)
    return pair


def floating(pair: torch.Tensor, unit: float) -> torch.Tensor:
    """The float64 next to (a + l·2⁻⁴⁸)·u: a function of the exact sum alone, however it is split into a and l."""
    whole, rest = carried(pair)
    total: torch.Tensor = whole.to(torch.float64) + rest.to(torch.float64) * 2.0**-_FINE
    return total * unit


def check_range(records: int, microbatches: int, ranks: int, multiplier: float) -> None:
    """Refuse runs whose exact sums might not fit into 64 bits: public numbers, so that it says nothing about the data."""
    if records / multiplier > _MOST:
        raise ConfigurationError(
            f"a noise multiplier of {multiplier:g} with {records:,} records is too small for several processes: their sums are "
            f"added up in 64-bit whole numbers, which have room for {_MOST:g} times the noise. Train in one process."
        )
    if microbatches > 2**_SUMMED or ranks > 2**_SUMMED:
        raise ConfigurationError(
            f"{microbatches:,} microbatches a step on each of {ranks:,} ranks: at most {2**_SUMMED:,} of each can be added up "
            "exactly. Pass a larger microbatch_size."
        )


# Bounds of the same model come out of the same arithmetic; anything above this is another model.
SAME = 1 + 1e-9


Microbatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs, targets, mask."""
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
    begun: Microbatch | None = None  # all of it, where its sums are computed already
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

    @property
    def pulls_back(self) -> bool:
        """Whether :meth:`gradients` makes others of what it is given."""
        ...

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Group name → sensitivity, with clipping norms at these values."""
        ...

    def begin(self, batch: Sample) -> Microbatch | None:
        """Begin with what :meth:`ask` will be asked, before anybody has looked at anything, where that is :attr:`recorded`.

        What it gives is :attr:`Sample.begun`; it counts if the recording that runs still is the one that is to run then.
        """
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
