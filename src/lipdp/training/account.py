"""How a run pays the budget of its data: all of it before its first release, and what was never released comes back at its end."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from typing import Any

from lipdp.errors import CheckpointError, LipdpError
from lipdp.privacy.budget import Budget, Reservation
from lipdp.privacy.ledger import Ledger

__all__ = ["RunAccount"]


class RunAccount:
    """What a run has reserved and how far it has come. Copies of an engine share it, for they are the same run.

    Attributes:
        budget: who pays; ``None``: nobody does.
        nonce: drawn for this run alone and kept with its state, so that the resumed run is the same one and no other is.
    """

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget
        self.nonce = secrets.token_hex(16)
        self._reserved: Reservation | None = None
        self._process, self._adopted = 0, False
        self._steps = 0
        self._one_off: set[str] = set()

    @property
    def name(self) -> str | None:
        """The budget's file."""
        return None if self.budget is None else str(self.budget.path)

    def check_resumed(self, paid_by: str | None) -> None:
        """Refuse to go on without a budget with a run that had one: what it gave back when it ended would be released unpaid."""
        if paid_by is not None and self.budget is None:
            raise CheckpointError(
                f"this run is paid for by the budget {paid_by}: resume it with budget='{paid_by}' (or the path that it has now)."
            )

    def reserve(self, ledger: Ledger, key: object) -> None:
        """Pay for the whole run, if it is not paid for; BudgetError where that is too much. ``key`` is the secret of the run."""
        if self.budget is None:
            return
        # A run that goes on with another key makes other releases: it is another run.
        name = hashlib.sha256(f"{self.nonce}|{key!r}".encode()).hexdigest()[:32]
        if self._reserved is not None and (self._reserved.run != name or self._process != os.getpid()):
            self.close()
        if self._reserved is None:
            self._reserved, self._process = self.budget.reserve(name, ledger.run, "a training run"), os.getpid()
            self._steps, self._one_off = 0, set()

    def note(self, ledger: Ledger) -> None:
        """Remember how far the run has come, once a release is charged."""
        self._steps = max(self._steps, ledger.releases)
        self._one_off.update(ledger.one_off)

    def adopt(self, nonce: str) -> None:
        """Be the run that a state was saved of."""
        if nonce != self.nonce:
            self.close()
            self.nonce, self._adopted = nonce, True

    def begin_anew(self) -> None:
        """Be another run than the one that was adopted: what it does again are other releases, and those made stay paid for."""
        if self._adopted:
            self.close(keep=True)
            self.nonce, self._adopted = secrets.token_hex(16), False

    def close(self, *, keep: bool = False) -> None:
        """Give back what was never released; or keep it reserved, for the run is to go on."""
        held, self._reserved = self._reserved, None
        # A forked process that ends must not close what its parent goes on with.
        if held is not None and self._process == os.getpid():
            held.close(self._steps, self._one_off, keep=keep)

    def abandon(self) -> None:
        """:meth:`close` for a run that nobody holds any longer; where that fails, all of it stays reserved."""
        with suppress(LipdpError):
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> RunAccount:
        return self
