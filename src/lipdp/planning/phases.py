"""How gradients are clipped, and what changes during a run: schedules of clipping and noise, layers frozen on the way.

A run is cut into phases in which nothing changes. Within a phase each step is the same Gaussian mechanism, so a schedule costs
what its phases cost, composed; the plan knows it all before a record is read.

How much noise each group gets in a step follows from the bounds that hold in it (:class:`NoiseSettings`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipdp._checks import is_number, positive
from lipdp.clipping.batch import Clip, Style
from lipdp.errors import ConfigurationError
from lipdp.fields import Scale, Size, check_fields
from lipdp.privacy import AdaptiveClip, Allocation, allocate, effective_multiplier, gradient_multiplier
from lipdp.privacy.noise import GRID_LOSS, grid_factor
from lipdp.privacy.quantile import COUNT_SENSITIVITY

Factors = Iterable[tuple[float, float]]
"""(from this fraction of the run on, this factor), in order; it starts with (0.0, 1.0)."""


@dataclass(frozen=True)
class Phase:
    """A part of the run, from step ``start`` to the next phase's start.

    Attributes:
        start: its first step, counted from 0.
        noise: factor on the noise multiplier.
        clip: factor on every clipping norm.
        frozen: parameters that are no longer trained: no gradient is released for them and no noise is drawn.
    """

    start: Size
    noise: Scale = 1.0
    clip: Scale = 1.0
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f"the phase from step {self.start!r} on")


def linear_schedule(last: float, levels: int = 8) -> tuple[tuple[float, float], ...]:
    """A factor that goes from 1 to ``last`` in ``levels`` equal steps over the run.

    Example:
        >>> linear_schedule(0.5, levels=3)
        ((0.0, 1.0), (0.3333333333333333, 0.75), (0.6666666666666666, 0.5))
    """
    return _levels(levels, lambda t: 1 + (last - 1) * t)


def cosine_schedule(last: float, levels: int = 8) -> tuple[tuple[float, float], ...]:
    """A factor that goes from 1 to ``last`` along half a cosine, in ``levels`` steps."""
    return _levels(levels, lambda t: last + (1 - last) * 0.5 * (1 + math.cos(math.pi * t)))


def _levels(levels: int, value: Callable[[float], float]) -> tuple[tuple[float, float], ...]:
    if not isinstance(levels, int) or levels < 2:
        raise ConfigurationError(f"a schedule needs at least 2 levels, not {levels!r}")
    return tuple((k / levels, float(value(k / (levels - 1)))) for k in range(levels))


def make_phases(
    steps: int,
    names: Iterable[str],
    *,
    clip: Factors | None = None,
    noise: Factors | None = None,
    freeze: Mapping[str, float] | None = None,
) -> tuple[Phase, ...]:
    """The phases of a run of ``steps`` steps.

    Args:
        steps: T.
        names: of the trained parameters.
        clip: schedule of the factor on clipping norms.
        noise: schedule of the factor on the noise multiplier.
        freeze: prefix of parameter names → fraction of the run after which they are no longer trained.

    A change takes place at the nearest step, but not at the first: that one is as planned, with all factors 1 and nothing frozen,
    and the noise of a plan's groups is its noise. Of changes that fall on one step the last holds; what falls behind the last step
    is left out.
    """
    if clip is None and noise is None and freeze is None:
        return (Phase(0),)
    trained = list(names)
    clips, noises = (_factors(read_factors(n, s), steps) for n, s in (("the clip schedule", clip), ("the noise schedule", noise)))
    if not isinstance(freeze, Mapping | None):
        raise ConfigurationError(f"freeze gives prefixes of parameter names fractions of the run, as a mapping, not {freeze!r}")
    frozen_from: dict[str, int] = {}
    for prefix, fraction in (freeze or {}).items():
        if not (is_number(fraction) and 0 < fraction < 1):
            raise ConfigurationError(f"freeze={{{prefix!r}: {fraction!r}}}: a fraction of the run, between 0 and 1")
        members = [name for name in trained if matches(name, prefix)]
        if not members:
            raise ConfigurationError(
                f"freeze names {prefix!r}, and no trained parameter is called that; they are {', '.join(trained)}"
            )
        for name in members:
            frozen_from[name] = min(_start(float(fraction), steps), frozen_from.get(name, steps))
    if trained and len(frozen_from) == len(trained) and max(frozen_from.values()) < steps:
        raise ConfigurationError("freeze leaves nothing to train at the end of the run; leave one layer out of it")
    starts = sorted({0, *clips, *noises, *(start for start in frozen_from.values() if start < steps)})
    return tuple(
        Phase(
            start=start,
            noise=noises[max(s for s in noises if s <= start)],
            clip=clips[max(s for s in clips if s <= start)],
            frozen=tuple(name for name in trained if frozen_from.get(name, steps) <= start),
        )
        for start in starts
    )


def matches(name: str, prefix: str) -> bool:
    """Whether ``prefix`` is the parameter's name, or that of a module it is in."""
    return name == prefix or name.startswith(prefix + ".")


def read_factors(name: str, schedule: Factors | None) -> tuple[tuple[float, float], ...] | None:
    """The schedule as plain pairs of numbers: it is read more than once, and a generator can be read once only."""
    if schedule is None:
        return None
    if not isinstance(schedule, Iterable):
        raise ConfigurationError(f"{name} is a sequence of pairs (fraction of the run, factor), not {schedule!r}")
    pairs: list[tuple[float, float]] = []
    for point in schedule:
        if not (isinstance(point, tuple | list) and len(point) == 2):
            raise ConfigurationError(f"{name} is a sequence of pairs (fraction of the run, factor), not {point!r}")
        fraction, factor = point
        last = pairs[-1][0] if pairs else -1.0
        if not (is_number(fraction) and is_number(factor) and last < fraction < 1 and factor > 0):
            raise ConfigurationError(
                f"{name} has the pair ({fraction!r}, {factor!r}): fractions rise from 0 to below 1, factors are positive"
            )
        if not pairs and (fraction, factor) != (0, 1):
            raise ConfigurationError(
                f"{name} starts with (0.0, 1.0), the value that the plan is given, not ({fraction!r}, {factor!r})"
            )
        pairs.append((float(fraction), float(factor)))
    return tuple(pairs)


def _factors(schedule: Sequence[tuple[float, float]] | None, steps: int) -> dict[int, float]:
    """First step → factor."""
    factors = {0: 1.0}
    for fraction, factor in schedule or ():
        start = _start(fraction, steps) if fraction > 0 else 0
        if start < steps:
            factors[start] = factor
    return factors


def _start(fraction: float, steps: int) -> int:
    """The step from which on a change at this fraction of the run holds; the first one is as planned."""
    return max(1, round(fraction * steps))


def segments(phases: Sequence[Phase], steps: int, multiplier: float) -> tuple[tuple[float, int], ...]:
    """(σ, steps) of each stretch of the run with the same noise multiplier: what the accountant needs of the phases."""
    ends = [phase.start for phase in phases[1:]] + [steps]
    merged: list[tuple[float, int]] = []
    for phase, end in zip(phases, ends, strict=True):
        sigma, count = multiplier * phase.noise, end - phase.start
        if merged and merged[-1][0] == sigma:  # phases that differ in other things are the same mechanism
            merged[-1] = sigma, merged[-1][1] + count
        else:
            merged.append((sigma, count))
    return tuple(merged)


@dataclass(frozen=True)
class NoiseSettings:
    """What turns bounds into noise: the same for planning and for every step.

    Attributes:
        multiplier: σ of the whole step, at factor 1.
        slack: factor on the noise for rounding.
        allocation: how it is divided.
        weights: for ``allocation="weights"``.
        adaptive: of clipping norms that follow a quantile: their counts take a part of the step's budget.
        counts: how many such counts there are.
    """

    multiplier: float
    slack: float
    allocation: Allocation
    weights: Mapping[str, float] | None = None
    adaptive: AdaptiveClip | None = None
    counts: int = 0

    @property
    def count_noise(self) -> float:
        """σ_b at factor 1; 0 where nothing is counted."""
        return self.adaptive.count_noise or 0.0 if self.adaptive is not None and self.counts else 0.0

    def stds(self, bounds: Mapping[str, float], sizes: Mapping[str, int], factor: float = 1.0) -> dict[str, float]:
        """Noise of each group in a step with the multiplier ``factor``·σ, whose groups have these bounds."""
        sigma = self.multiplier
        if self.count_noise:
            sigma = gradient_multiplier(sigma, self.count_noise, self.counts)
        weights = None if self.weights is None else {name: self.weights[name] for name in bounds}
        allocated = allocate(bounds, sizes, sigma * factor, self.allocation, weights)
        for_grid = grid_factor(sigma * factor, _noised(bounds, sizes))
        if math.isinf(for_grid):
            raise ConfigurationError(
                f"a noise multiplier of {sigma * factor:.3g} on {_noised(bounds, sizes):,} numbers is more than the noise's grid "
                "is fine enough for. Use less noise."
            )
        return {name: std * self.slack * for_grid for name, std in allocated.items()}

    def real_multiplier(
        self, bounds: Mapping[str, float], sizes: Mapping[str, int], stds: Mapping[str, float], factor: float = 1.0
    ) -> float:
        """The multiplier that a step with these bounds and this noise has, its counts and the rounding of sums to the noise's grid
        included: what the accountant must be told. (Counts are whole halves: they lie on the grid.)
        """
        grown = effective_multiplier({name: bound * self.slack for name, bound in bounds.items()}, stds)
        if 0 < grown < math.inf:
            grown = 1 / (1 / grown + GRID_LOSS * math.sqrt(_noised(bounds, sizes)))
        if not self.count_noise:
            return grown
        return 1 / math.sqrt(grown**-2 + self.counts * (COUNT_SENSITIVITY / (self.count_noise * factor)) ** 2)


def _noised(bounds: Mapping[str, float], sizes: Mapping[str, int]) -> int:
    """How many numbers get noise."""
    return sum(size for name, size in sizes.items() if bounds[name] > 0)


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped, beside their norm, which is :func:`lipdp.plan`'s ``max_grad_norm``.

    Attributes:
        style: "flat", "per_layer" or "per_group", see :func:`lipdp.clipping.clipping_groups`.
        groups: for "per_group": prefixes of parameter names.
        clip: "clip" scales long gradients down, "automatic" normalises all of them: ν = C/(‖g‖ + γ).
        stability: γ of "automatic".
        clipped: for ``method="mixed"``: prefixes of parameters to clip even where there is a proof.
        adaptive: let clipping norms follow a private quantile: ``max_grad_norm`` for clipping methods, every
            ``nn.ClipGradient(…, adaptive=True)`` for the others. Its cost is inside the step's own mechanism: the same ε.

    Example:
        >>> Clipping(style="per_layer").style
        'per_layer'
    """

    style: Style = "flat"
    groups: Sequence[str] | None = None
    clip: Clip = "clip"
    stability: float = 0.01
    clipped: Sequence[str] = ()
    adaptive: AdaptiveClip | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stability", positive("stability", self.stability))


@dataclass(frozen=True)
class Schedule:
    """What changes during a run, decided before it begins; see :func:`lipdp.training.cosine_schedule` for factors.

    Attributes:
        clip: factor on all clipping norms over the run, e.g. ``((0.0, 1.0), (0.5, 0.5))``: halved from half-time on. The noise
            follows.
        noise: factor on σ over the run; its phases are accounted for one by one.
        freeze: prefix of parameter names → fraction of the run after which they are no longer trained. They get no noise from then
            on and leave the sensitivity.

    Example:
        >>> Schedule(noise=((0, 1), (0.5, 2))).noise
        ((0.0, 1.0), (0.5, 2.0))
    """

    clip: Factors | None = None
    noise: Factors | None = None
    freeze: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            object.__setattr__(self, name, read_factors(f"the {name} schedule", getattr(self, name)))


# As they were called when they were arguments of plan() by themselves.
_OF_CLIPPING = {"clipping_style": "style", "clipping_groups": "groups"} | {
    name: name for name in ("clip", "stability", "clipped", "adaptive")
}
_OF_SCHEDULE = {"clip_schedule": "clip", "noise_schedule": "noise", "freeze": "freeze"}


def with_earlier_names(
    clipping: Clipping | None, schedule: Schedule | None, earlier: Mapping[str, Any]
) -> tuple[Clipping, Schedule]:
    """Both groups, with arguments under the names that they had before there were groups; those are said to be old."""
    unknown = earlier.keys() - _OF_CLIPPING.keys() - _OF_SCHEDULE.keys()
    if unknown:
        raise TypeError(f"plan() got an unexpected keyword argument {min(unknown)!r}")
    for kind, given in ((Clipping, clipping), (Schedule, schedule)):
        if given is not None and not isinstance(given, kind):
            name = kind.__name__
            raise ConfigurationError(f"{name.lower()}={given!r} is no lipdp.{name}: write {name.lower()}=lipdp.{name}(…)")
    ours, theirs = clipping or Clipping(), schedule or Schedule()
    if not earlier:
        return ours, theirs
    said = ", ".join(
        f"{name}= is {'clipping=lipdp.Clipping' if name in _OF_CLIPPING else 'schedule=lipdp.Schedule'}"
        f"({(_OF_CLIPPING | _OF_SCHEDULE)[name]}=…)"
        for name in earlier
    )
    warnings.warn(f"arguments of plan() are in groups now: {said}", DeprecationWarning, stacklevel=3)
    for name, value in earlier.items():
        if name in _OF_CLIPPING:
            ours = replace(ours, **{_OF_CLIPPING[name]: value})
        else:
            theirs = replace(theirs, **{_OF_SCHEDULE[name]: value})
    return ours, theirs
