"""What has been released so far, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lipdp._texts import upwards
from lipdp.errors import BudgetError
from lipdp.privacy.accounting import Accountant, Adjacency, run_epsilon
from lipdp.privacy.runs import PrivateRun

__all__ = ["Ledger"]


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
        steps: how many steps have been charged.
        one_off: names of the one-off releases that have been charged.
    """

    run: PrivateRun
    delta: float
    planned_epsilon: float
    accountant: Accountant = "pld"
    adjacency: Adjacency = "add_remove"
    steps: int = 0
    one_off: list[str] = field(default_factory=list)

    def charge(self) -> None:
        """Pay for one step, or refuse it."""
        if self.remaining <= 0:
            raise BudgetError(
                f"the plan's {self.run.steps} steps (epsilon {upwards(self.planned_epsilon)} at delta {self.delta:g}) are spent: "
                "another step would exceed the budget. Make a new plan with more steps; its noise will be larger."
            )
        self.steps += 1

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

    @property
    def remaining(self) -> int:
        """Steps left."""
        return self.run.steps - self.steps

    @property
    def spent(self) -> PrivateRun:
        """What has been released, as a run of its own."""
        return self._until(self.steps)

    @property
    def epsilon(self) -> float:
        """ε spent so far, at the plan's δ."""
        return self.epsilon_at(self.steps)

    def epsilon_at(self, steps: int) -> float:
        """ε once so many steps are charged, with the one-off releases made so far."""
        if steps >= self.run.steps and len(self.one_off) == len(self.run.releases):
            return self.planned_epsilon
        return run_epsilon(self._until(min(steps, self.run.steps)), self.delta, self.accountant, self.adjacency)

    def _until(self, steps: int) -> PrivateRun:
        left, segments = steps, []
        for sigma, count in self.run.segments:
            segments.append((sigma, min(count, left)))
            left -= segments[-1][1]
        released = tuple(release for release in self.run.releases if release.name in self.one_off)
        return replace(self.run, segments=tuple(part for part in segments if part[1]), releases=released)
