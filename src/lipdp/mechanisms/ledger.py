"""The older name of the account that mechanisms charge: :class:`lipdp.privacy.Budget` has taken its place."""

from __future__ import annotations

import os
from pathlib import Path

from lipdp.errors import ConfigurationError
from lipdp.privacy.budget import AnyBudget, Budget, open_budget

__all__ = ["BudgetLedger", "payer"]


class BudgetLedger(Budget):
    """A :class:`lipdp.privacy.Budget` for pure releases (δ = 0, replace-one neighbours), by the arguments of an older lipdp.

    It is the same file and the same account: one begun here is opened by ``Budget(path)``, and the other way round.

    Args:
        path: the file.
        budget: total ε, for a new one.
        dataset: a name for the data, for a new one.
    """

    def __init__(self, path: str | os.PathLike[str], budget: float | None = None, dataset: str | None = None) -> None:
        if Path(path).exists():
            super().__init__(path, epsilon=budget, dataset=dataset)
            return
        if budget is None or dataset is None:
            raise ConfigurationError(
                f"there is no ledger at {path}: give budget (the total epsilon for this dataset, for all time) and dataset, its "
                "name, to begin one."
            )
        super().__init__(path, epsilon=budget, delta=0.0, dataset=dataset, adjacency="replace_one")

    @property
    def budget(self) -> float:
        """The total ε."""
        return self.epsilon


def payer(budget: AnyBudget, ledger: Budget | None) -> Budget | None:
    """Who pays for a release: ``budget``, or ``ledger``, which is the older name of the argument."""
    if budget is not None and ledger is not None:
        raise ConfigurationError("budget and ledger are two names of one argument: give budget alone.")
    return open_budget(ledger if budget is None else budget)
