"""A budget's file added up: the runs that it knows and everything that counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, get_args

from lipdp.errors import ConfigurationError
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.composition import Composition, Totals
from lipdp.privacy.costs import data_key

FORMAT = 1


@dataclass
class Run:
    """What is known of a training run."""

    steps: list[Any]
    one_off: dict[str, Any]
    holders: set[str] = field(default_factory=set)
    released: int = 0
    made: set[str] = field(default_factory=set)
    kept: bool = False
    book: str | None = None  # how far its book had come, when it was last seen

    @property
    def plan(self) -> tuple[list[Any], dict[str, Any]]:
        return self.steps, self.one_off

    @property
    def planned(self) -> int:
        return sum(count for _, count in self.steps)

    def whole(self) -> dict[str, int]:
        """The cost of all of it."""
        return self._cost(self.planned, set(self.one_off))

    def counted(self) -> dict[str, int]:
        """What it costs the budget now: all of it, unless everybody who held it has said what was released."""
        return self.whole() if self.holders or self.kept else self._cost(self.released, self.made)

    def check_position(self, steps: int, one_off: Iterable[str]) -> None:
        if not 0 <= steps <= self.planned or not set(one_off) <= set(self.one_off):
            raise ConfigurationError(f"a run of {self.planned} steps can't have released {steps} and {sorted(one_off)}")

    def summary(self) -> dict[str, Any]:
        return {"steps": self.planned, "released": self.released, "reserved": bool(self.holders or self.kept)}

    def _cost(self, steps: int, one_off: set[str]) -> dict[str, int]:
        cost: dict[str, int] = {}
        for data, count in self.steps:
            taken = min(count, steps)
            steps -= taken
            if taken:
                cost = plus(cost, {data_key(data): taken})
        for name in sorted(one_off):
            cost = plus(cost, {data_key(self.one_off[name]): 1})
        return cost


class State:
    """A budget's file, added up."""

    def __init__(self, header: dict[str, Any]) -> None:
        if header["budget"] != FORMAT:
            raise ValueError(f"it is of format {header['budget']!r}, this lipdp reads {FORMAT}")
        if not isinstance(header["dataset"], str) or header["adjacency"] not in get_args(Adjacency):
            raise ValueError("its first line is no budget's")
        delta = Fraction(header["delta"])
        if not (Fraction(header["epsilon"]) > 0 and 0 <= delta < 1):
            raise ValueError("its first line holds no budget")
        self.header = header
        self.composition = Composition(delta, header["adjacency"])
        self.totals = Totals(header["adjacency"])
        self.runs: dict[str, Run] = {}

    def add(self, entry: dict[str, Any]) -> None:
        """One more entry."""
        kind = entry["kind"]
        if kind == "charge":
            for data, count in entry["events"]:
                self.totals.add({data_key(data): _whole(count)})
            return
        if kind == "run":
            run = self.runs.get(entry["run"]) or Run(entry["steps"], entry["one_off"])
        elif kind in ("end", "book"):
            run = self.runs[entry["run"]]
        else:
            raise ValueError(f"unknown kind {kind!r}")
        before = run.counted() if entry["run"] in self.runs else {}
        if kind == "run":
            run.holders.add(entry["holder"])
        elif kind == "end":
            run.holders.remove(entry["holder"])
            run.released = max(run.released, _whole(entry["steps"], least=0))
            run.made |= set(entry["one_off"])
            run.check_position(run.released, run.made)
            run.kept = bool(entry["keep"])
        run.book = entry.get("book") or run.book
        self.runs[entry["run"]] = run
        self.totals.add(minus(run.counted(), before))


def plus(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {**counts, **{key: counts.get(key, 0) + count for key, count in more.items()}}


def minus(counts: Mapping[str, int], less: Mapping[str, int]) -> dict[str, int]:
    left = {key: counts.get(key, 0) - less.get(key, 0) for key in {**counts, **less}}
    return {key: count for key, count in left.items() if count}


def _whole(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is no count")
    return value
