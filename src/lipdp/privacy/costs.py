"""What a release costs, as data: dp-accounting's events, and two kinds of its own for guarantees that are no noise distribution.

A budget stores these, not an ε: an ε can't be composed tightly with others once it is all that is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, get_args

from lipdp._checks import is_number, one_of
from lipdp.errors import ConfigurationError
from lipdp.privacy.accounting import Adjacency, step_event
from lipdp.privacy.runs import PrivateRun, Release

_NEIGHBOURS = (*get_args(Adjacency), None)


@dataclass(frozen=True)
class Pure:
    """Any ε-DP release (δ = 0), by whatever mechanism.

    Attributes:
        epsilon: ε, exactly: 0.1 is a tenth.
        adjacency: which neighbours it is proved for; ``None``: those of the budget that pays, whichever they are.
    """

    epsilon: Fraction
    adjacency: Adjacency | None = None

    def __init__(self, epsilon: float | Fraction, adjacency: Adjacency | None = None) -> None:
        object.__setattr__(self, "epsilon", exact("epsilon", epsilon))
        object.__setattr__(self, "adjacency", one_of("adjacency", adjacency, _NEIGHBOURS))


@dataclass(frozen=True)
class Approximate:
    """Any (ε, δ)-DP release that has been analysed elsewhere (private tuning, say), by whatever mechanism.

    Attributes:
        epsilon: ε, 0 or more.
        delta: δ, below 1. It is part of the budget's δ.
        adjacency: as in :class:`Pure`.
    """

    epsilon: Fraction
    delta: Fraction
    adjacency: Adjacency | None = None

    def __init__(self, epsilon: float | Fraction, delta: float | Fraction, adjacency: Adjacency | None = None) -> None:
        object.__setattr__(self, "epsilon", exact("epsilon", epsilon, zero=True))
        object.__setattr__(self, "delta", exact("delta", delta))
        object.__setattr__(self, "adjacency", one_of("adjacency", adjacency, _NEIGHBOURS))
        if self.delta >= 1:
            raise ConfigurationError(f"delta is {float(self.delta)!r}: a probability below 1.")


Cost = Any
"""A number (pure ε), a :class:`Pure`, an :class:`Approximate`, a dp-accounting ``DpEvent``, a :class:`~lipdp.privacy.PrivateRun`, a
:class:`~lipdp.privacy.Release`, or an iterable of these."""


def exact(name: str, value: float | Fraction, *, zero: bool = False) -> Fraction:
    """The decimal that a person wrote: ten times 0.1 makes 1."""
    if isinstance(value, Fraction):
        number = value
    elif is_number(value):
        number = Fraction(repr(float(value)))
    else:
        raise ConfigurationError(f"{name} is {value!r}: it has to be a finite number.")
    if number < 0 or (number == 0 and not zero):
        raise ConfigurationError(f"{name} is {value!r}: it has to be a number above 0.")
    return number


def parts(cost: Cost) -> Iterator[tuple[Any, int]]:
    """(event, how often): the cost taken apart into what is composed."""
    if isinstance(cost, Pure | Approximate):
        yield cost, 1
    elif isinstance(cost, PrivateRun):
        steps, one_off = run_costs(cost)
        yield from steps
        yield from ((event, 1) for event in one_off.values())
    elif isinstance(cost, Release):
        yield _release(cost), 1
    elif _is_event(cost):
        yield from _flat(cost, 1)
    elif is_number(cost):
        yield Pure(cost), 1
    elif isinstance(cost, Iterable) and not isinstance(cost, str | bytes):
        for part in cost:
            yield from parts(part)
    else:
        raise ConfigurationError(
            f"a cost is {cost!r}: give a pure epsilon, lipdp.privacy.Pure or Approximate, a dp-accounting event, a PrivateRun, or "
            "a list of these."
        )


def run_costs(run: PrivateRun) -> tuple[list[tuple[Any, int]], dict[str, Any]]:
    """Of a run: (event, number of steps) of its segments in order, and the event of each one-off release by its name."""
    steps = [(step_event(run, sigma), count) for sigma, count in run.segments if count]
    return steps, {release.name: _release(release) for release in run.releases}


def _release(release: Release) -> Any:
    if release.kind == "pure":
        return Pure(release.amount)
    dp = _dp_event()
    return dp.PoissonSampledDpEvent(1.0, dp.GaussianDpEvent(release.amount))


def _flat(event: Any, count: int) -> Iterator[tuple[Any, int]]:
    dp = _dp_event()
    if isinstance(event, dp.NoOpDpEvent) or count == 0:
        return
    if isinstance(event, dp.SelfComposedDpEvent):
        yield from _flat(event.event, count * event.count)
    elif isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            yield from _flat(part, count)
    else:
        yield event, count


# --- as text ----------------------------------------------------------------------------------------------------------


def to_key(event: Any) -> str:
    """One line of JSON that stands for the event: equal events have equal texts."""
    return _line(to_data(event))


def data_key(data: Any) -> str:
    """The :func:`to_key` of what :func:`to_data` made; ValueError where that is no event."""
    key = _line(data)
    from_key(key)
    return key


def _line(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_data(event: Any) -> dict[str, Any]:
    """The event as plain values."""
    if isinstance(event, Pure):
        return {"type": "pure", "epsilon": str(event.epsilon), "adjacency": event.adjacency}
    if isinstance(event, Approximate):
        return {
            "type": "approximate",
            "epsilon": str(event.epsilon),
            "delta": str(event.delta),
            "adjacency": event.adjacency,
        }
    if not _is_event(event):
        raise ConfigurationError(f"{event!r} is no event of dp-accounting")
    fields = {name: _plain(getattr(event, name)) for name in _names(type(event))}
    return {"type": type(event).__name__, **({"of": fields} if fields else {})}


def from_data(data: Any) -> Any:
    """The event of :func:`to_data`; ValueError where it is none."""
    try:
        kind = data["type"]
        if kind == "pure":
            return Pure(Fraction(data["epsilon"]), data["adjacency"])
        if kind == "approximate":
            return Approximate(Fraction(data["epsilon"]), Fraction(data["delta"]), data["adjacency"])
        event = getattr(_dp_event(), kind)
        if not issubclass(event, _dp_event().DpEvent):
            raise ValueError(kind)
        return event(**{name: _unplain(value) for name, value in data.get("of", {}).items()})
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"no event: {data!r}") from error


@lru_cache(maxsize=4096)
def from_key(key: str) -> Any:
    """The event of :func:`to_key`."""
    return from_data(json.loads(key))


def _plain(value: Any) -> Any:
    if _is_event(value):
        return to_data(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = value.item() if hasattr(value, "item") else value  # numpy's numbers
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"an event holds {value!r}: its parameters have to be finite numbers.")
    return value


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        return from_data(value)
    return [_unplain(item) for item in value] if isinstance(value, list) else value


def _names(kind: type) -> list[str]:
    import attr

    return [field.name for field in attr.fields(kind)]


def _is_event(value: Any) -> bool:
    return isinstance(value, _dp_event().DpEvent)


def _dp_event() -> Any:
    from dp_accounting import dp_event

    return dp_event
