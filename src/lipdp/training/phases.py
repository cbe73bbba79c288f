"""What changes during a run and is decided beforehand: clipping and noise schedules, and layers that are frozen on the way.

A run is cut into phases in which nothing changes. Within a phase each step is the same Gaussian mechanism, so a schedule costs
what its phases cost, composed; the plan knows it all before a record is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lipdp.errors import ConfigurationError
from lipdp.privacy._checks import is_number

__all__ = ["Phase", "Schedule", "cosine_schedule", "linear_schedule", "make_phases", "segments"]

Schedule = Iterable[tuple[float, float]]
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

    start: int
    noise: float = 1.0
    clip: float = 1.0
    frozen: tuple[str, ...] = ()


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
    clip: Schedule | None = None,
    noise: Schedule | None = None,
    freeze: Mapping[str, float] | None = None,
) -> tuple[Phase, ...]:
    """The phases of a run of ``steps`` steps.

    Args:
        steps: T.
        names: of the trained parameters.
        clip: schedule of the factor on clipping norms.
        noise: schedule of the factor on the noise multiplier.
        freeze: prefix of parameter names → fraction of the run after which they are no longer trained.
    """
    trained = list(names)
    clips, noises = _steps_of("clip_schedule", clip, steps), _steps_of("noise_schedule", noise, steps)
    frozen_from: dict[str, int] = {}
    for prefix, fraction in (freeze or {}).items():
        if not (is_number(fraction) and 0 < fraction < 1):
            raise ConfigurationError(f"freeze={{{prefix!r}: {fraction!r}}}: a fraction of the run, between 0 and 1")
        members = [name for name in trained if name == prefix or name.startswith(prefix + ".")]
        if not members:
            raise ConfigurationError(
                f"freeze names {prefix!r}, and no trained parameter is called that; they are {', '.join(trained)}"
            )
        for name in members:
            frozen_from[name] = min(max(1, round(fraction * steps)), frozen_from.get(name, steps))
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


def _steps_of(name: str, schedule: Schedule | None, steps: int) -> dict[int, float]:
    """First step → factor."""
    found: dict[int, float] = {}
    last = -1.0
    for point in ((0.0, 1.0),) if schedule is None else tuple(schedule):
        if not (isinstance(point, tuple | list) and len(point) == 2):
            raise ConfigurationError(f"{name} is a sequence of pairs (fraction of the run, factor), not {point!r}")
        fraction, factor = point
        if not (is_number(fraction) and is_number(factor) and last < fraction < 1 and factor > 0):
            raise ConfigurationError(
                f"{name} has the pair ({fraction!r}, {factor!r}): fractions rise from 0 to below 1, factors are positive"
            )
        if last < 0 and (fraction, factor) != (0, 1):
            raise ConfigurationError(
                f"{name} starts with (0.0, 1.0), the value that the plan is given, not ({fraction!r}, {factor!r})"
            )
        found[round(fraction * steps)] = float(factor)
        last = fraction
    return {start: factor for start, factor in found.items() if start < steps} or {0: 1.0}


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
