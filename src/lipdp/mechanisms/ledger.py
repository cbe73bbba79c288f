"""A budget ledger in a file: what has been released about a dataset, and a refusal once its budget is spent.

Pure ε-DP releases about one dataset add up. The ledger is a text file of JSON lines that only grows: a header with the
dataset's name and budget, then one line for each release, each with the hash of the line before (an edit is noticed). Charging
happens under an exclusive lock (fcntl), so that two processes can't both take the last of the budget, and before the noise is
drawn, so that an interrupted release counts as spent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

from lipdp.errors import BudgetError, ConfigurationError, DataError
from lipdp.privacy._checks import positive

__all__ = ["BudgetLedger"]


class BudgetLedger:
    """The budget of one dataset, kept in a file that every process charging it shares.

    Args:
        path: the file; made where it is missing (its folder has to be there).
        budget: total ε. Needed for a new file; for an existing one it may be left out, and has to agree if given.
        dataset: a name for the data, needed for a new file. It is *you* who says which file belongs to which data: the
            ledger can't tell two copies of a dataset apart from two datasets.
    """

    def __init__(self, path: str | os.PathLike[str], budget: float | None = None, dataset: str | None = None) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ConfigurationError(f"the ledger's folder {self.path.parent} does not exist: make it first.")
        if not self.path.exists() and (budget is None or dataset is None):
            raise ConfigurationError(
                f"there is no ledger at {self.path}: give budget (the total epsilon for this dataset, for all time) and dataset (a "
                "name for it) to begin one."
            )
        given = None if budget is None else _number(positive("budget", budget))
        with self._locked() as file:
            lines = self._read(file)
            if not lines:
                if given is None or dataset is None:
                    raise DataError(f"the ledger {self.path} is empty: give budget and dataset to begin it.")
                header = {"ledger": 1, "dataset": dataset, "budget": str(given), "created": _now(), "previous": ""}
                self._append(file, header)
                lines = [header]
        self.dataset = str(lines[0]["dataset"])
        self._budget = Fraction(lines[0]["budget"])
        if given is not None and given != self._budget:
            raise ConfigurationError(
                f"the ledger {self.path} was begun with budget {float(self._budget):g}, not {float(given):g}: a budget is not "
                "changed once something may have been released. Leave budget out, or use a new file for new data."
            )
        if dataset is not None and dataset != self.dataset:
            raise ConfigurationError(
                f"the ledger {self.path} belongs to dataset {self.dataset!r}, not {dataset!r}: use one file for each dataset."
            )

    @property
    def budget(self) -> float:
        """The total ε."""
        return float(self._budget)

    @property
    def spent(self) -> float:
        """ε charged so far, by all processes."""
        return float(self._spent(self.entries()))

    @property
    def remaining(self) -> float:
        """ε left."""
        return float(self._budget - self._spent(self.entries()))

    def entries(self) -> list[dict[str, Any]]:
        """The releases so far, oldest first."""
        with self._locked() as file:
            return self._read(file)[1:]

    def charge(self, epsilon: float, what: str = "") -> None:
        """Pay ε for one release, or refuse and leave the file as it is."""
        cost = _number(positive("epsilon", epsilon))
        with self._locked() as file:
            lines = self._read(file)
            spent = self._spent(lines[1:])
            if spent + cost > self._budget:
                left = float(self._budget - spent)
                raise BudgetError(
                    f"dataset {self.dataset!r} has {left:g} of its epsilon {self.budget:g} left, and this release costs "
                    f"{float(cost):g}: nothing was released. Ask for less, with a mechanism of smaller epsilon, or stop here."
                )
            previous = hashlib.sha256(json.dumps(lines[-1], sort_keys=True).encode()).hexdigest()
            self._append(file, {"epsilon": str(cost), "what": what, "time": _now(), "previous": previous})

    @staticmethod
    def _spent(entries: list[dict[str, Any]]) -> Fraction:
        return sum((Fraction(entry["epsilon"]) for entry in entries), Fraction(0))

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        try:
            import fcntl
        except ImportError:  # Windows: no lock, so no promise
            raise ConfigurationError(
                "the budget ledger needs fcntl file locks, which this system lacks: use Linux or macOS."
            ) from None
        # Append mode: whatever happens, existing bytes are not overwritten.
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _read(self, file: IO[bytes]) -> list[dict[str, Any]]:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            raise DataError(self._broken("its last line is cut off"))
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(content.splitlines(), 1):
            try:
                line = json.loads(text)
                amount = Fraction(line["budget" if number == 1 else "epsilon"])
                linked = line["previous"]
            except (ValueError, KeyError, TypeError, ZeroDivisionError):
                raise DataError(self._broken(f"line {number} can't be read")) from None
            before = hashlib.sha256(json.dumps(lines[-1], sort_keys=True).encode()).hexdigest() if lines else ""
            if linked != before or amount <= 0:
                raise DataError(self._broken(f"line {number} does not follow from the one before"))
            lines.append(line)
        return lines

    def _broken(self, why: str) -> str:
        return (
            f"the ledger {self.path} is damaged: {why}. What was spent is not known, so nothing more is released. Restore it from "
            "a backup that is up to date, or count its budget as spent."
        )

    @staticmethod
    def _append(file: IO[bytes], line: dict[str, Any]) -> None:
        file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _number(value: float) -> Fraction:
    """The decimal that a person wrote: ten charges of 0.1 make 1."""
    return Fraction(repr(value))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
