"""What has been released so far, and what it costs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from lipdp._texts import brief, upwards
from lipdp.errors import BudgetError
from lipdp.privacy.accounting import Accountant, Adjacency, run_epsilon
from lipdp.privacy.runs import PrivateRun

_noting = threading.RLock()  # engines of one run may be in several threads


def _forked() -> None:
    """Another thread of the parent's may have held it: that one is not here to let it go."""
    global _noting
    _noting = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@dataclass
class Furthest:
    """How far a run is known to have come, whichever of its engines and processes came that far: what was charged stays spent.

    One object for all engines of a run in this process: those that were copied, rewound, or made from one state share it.

    Attributes:
        steps: the number behind the last step that was charged.
        one_off: names of the one-off releases that were charged.
    """

    steps: int = 0
    one_off: set[str] = field(default_factory=set)

    def note(self, steps: int, one_off: Iterable[str] = ()) -> None:
        """It came as far as this."""
        with _noting:
            self.steps = max(self.steps, steps)
            self.one_off.update(one_off)

    def __deepcopy__(self, memo: dict[int, Any]) -> Furthest:
        return self


@dataclass
class Ledger:
    """Counts what has been released against what the plan pays for.

    The mechanism charges it *before* it adds noise, so an interrupted step counts as spent; nothing else writes to it.

    Attributes:
        run: all that the plan pays for: its steps, in order, and the one-off releases.
        delta: δ of the guarantee.
        planned_epsilon: ε of all of it.
        accountant: which analysis of dp-accounting.
        adjacency: which datasets are neighbours.
        steps: how many steps lead to the present weights. All of them were charged.
        one_off: names of the one-off releases that led there.
        furthest: what is known to have been charged in all: more, where the run was rewound. That is what ε is of.
    """

    run: PrivateRun
    delta: float
    planned_epsilon: float
    accountant: Accountant = "pld"
    adjacency: Adjacency = "add_remove"
    steps: int = 0
    one_off: list[str] = field(default_factory=list)
    furthest: Furthest = field(default_factory=Furthest)

    def charge(self) -> None:
        """Pay for one step, or refuse it."""
        if self.remaining <= 0:
            raise BudgetError(
                f"the plan's {self.run.steps} steps (epsilon {upwards(self.planned_epsilon)} at delta {brief(self.delta)}) are "
                "spent: another step would exceed the budget. Make a new plan with more steps; its noise will be larger."
            )
        self.steps += 1
        self.furthest.note(self.steps)

    def charge_release(self, name: str) -> None:
        """Pay for a one-off release, once, or refuse it."""
        planned = [release.name for release in self.run.releases]
        if name not in planned:
            raise BudgetError(
                f"the plan does not pay for releasing {name!r}; it pays for {', '.join(planned) or 'nothing beside its steps'}. "
                "Make a plan that does."
            )
        if name in self.one_off:
            raise BudgetError(f"{name!r} was released already: the plan pays for it once. Use what was released.")
        self.one_off.append(name)
        self.furthest.note(0, [name])

    @property
    def remaining(self) -> int:
        """Steps left."""
        return self.run.steps - self.steps

    @property
    def charged(self) -> int:
        """The number behind the last step that is known to have been charged, the steps behind a rewound state included."""
        return min(max(self.steps, self.furthest.steps), self.run.steps)

    @property
    def charged_one_off(self) -> list[str]:
        """Names of the one-off releases that are known to have been charged, as planned."""
        return [release.name for release in self.run.releases if release.name in {*self.one_off, *self.furthest.one_off}]

    @property
    def spent(self) -> PrivateRun:
        """What has been charged, as a run of its own."""
        return self._until(self.charged)

    @property
    def epsilon(self) -> float:
        """ε spent so far, at the plan's δ: of all that is known to have been charged."""
        return self.epsilon_at(self.steps)

    def epsilon_at(self, steps: int) -> float:
        """ε once the run is at so many steps, with all that was charged by now."""
        steps = max(steps, self.charged)
        if steps >= self.run.steps and len(self.charged_one_off) == len(self.run.releases):
            return self.planned_epsilon
        return run_epsilon(self._until(min(steps, self.run.steps)), self.delta, self.accountant, self.adjacency)

    def _until(self, steps: int) -> PrivateRun:
        left, segments = steps, []
        for sigma, count in self.run.segments:
            segments.append((sigma, min(count, left)))
            left -= segments[-1][1]
        charged = self.charged_one_off
        released = tuple(release for release in self.run.releases if release.name in charged)
        return replace(self.run, segments=tuple(part for part in segments if part[1]), releases=released)
