"""What has been released so far, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from lipdp.errors import BudgetError
from lipdp.privacy.accounting import Accountant, Adjacency, epsilon

__all__ = ["Ledger"]


@dataclass
class Ledger:
    """Counts the releases of one Poisson-subsampled Gaussian mechanism against the number that was planned.

    The mechanism charges it *before* it adds noise, so an interrupted step counts as spent; nothing else writes to it.

    Attributes:
        noise_multiplier: σ of each release.
        sampling_rate: q of each release.
        limit: number of releases that the plan pays for.
        delta: δ of the guarantee.
        planned_epsilon: ε of all ``limit`` releases.
        accountant: which analysis of dp-accounting.
        adjacency: which datasets are neighbours.
        releases: how many have been charged.
    """

    noise_multiplier: float
    sampling_rate: float
    limit: int
    delta: float
    planned_epsilon: float
    accountant: Accountant = "pld"
    adjacency: Adjacency = "add_remove"
    releases: int = 0

    def charge(self) -> None:
        """Pay for one release, or refuse it."""
        if self.releases >= self.limit:
            raise BudgetError(
                f"the plan's {self.limit} steps (epsilon {self.planned_epsilon:.4g} at delta {self.delta:g}) are spent: another "
                "step would exceed the budget. Make a new plan with more steps; its noise will be larger."
            )
        self.releases += 1

    @property
    def remaining(self) -> int:
        """Releases left."""
        return self.limit - self.releases

    @property
    def epsilon(self) -> float:
        """ε spent so far, at the plan's δ."""
        if self.releases == 0:
            return 0.0
        if self.releases == self.limit:
            return self.planned_epsilon
        return epsilon(
            noise_multiplier=self.noise_multiplier,
            sampling_rate=self.sampling_rate,
            steps=self.releases,
            delta=self.delta,
            accountant=self.accountant,
            adjacency=self.adjacency,
        )
