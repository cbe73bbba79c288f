"""The one account of a dataset: what may be known about it in all, what was charged so far, and a refusal of the rest.

A budget is a file. Whatever is released about the data, by whichever process and by whatever means, is charged to it first: a
training run, its statistics, a private choice of settings, a learned mechanism's answer. See docs/budget.md for what is
promised, and :mod:`lipdp.privacy._journal` for how the file keeps it.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, get_args

from lipdp._checks import is_number, one_of, shown
from lipdp._texts import brief, downwards
from lipdp.errors import BudgetError, CheckpointError, ConfigurationError
from lipdp.privacy._budget_state import FORMAT, Run, State, minus, plus
from lipdp.privacy._journal import Journal, Session
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.composition import check_event
from lipdp.privacy.costs import Cost, exact, from_key, parts, run_costs, to_data, to_key
from lipdp.privacy.runs import PrivateRun


class Budget:
    """The privacy budget of one dataset, kept in a file that every process charging it shares::

        budget = lipdp.privacy.Budget("survey.budget", epsilon=3, delta=1e-6, dataset="survey")   # begins it, once
        lipdp.fit(model, loss, optimizer, plan, train, budget=budget)
        mechanism.release(x, budget="survey.budget")
        budget.spent, budget.remaining

    A charge is granted when it is on the disk, and only if everything charged so far and it, composed by dp-accounting, cost at
    most (ε, δ). Nothing is ever taken out again, but for the part of a reserved training run that was never released.

    Args:
        path: the file. One that is there is opened; a new one is begun with the other arguments, which all have to be given.
        epsilon: total ε, for all time. For an existing file it may be left out, and has to agree if given; the others too.
        delta: total δ. 0: for pure ε-DP releases only.
        dataset: a name for the data. It is *you* who says which file belongs to which data.
        adjacency: which datasets are neighbours: "add_remove" (the default) or "replace_one".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        epsilon: float | None = None,
        delta: float | None = None,
        dataset: str | None = None,
        adjacency: Adjacency | None = None,
    ) -> None:
        self._journal = Journal(path, "budget")
        self._lock = threading.RLock()
        self._state: State | None = None
        given = _given(epsilon, delta, dataset, adjacency)
        if not self.path.exists():
            self._begin(given)
        elif not self.path.is_file():
            raise ConfigurationError(f"{self.path} is no file: choose another name for the budget.")
        elif not self._journal.head_path.exists():
            self._refuse_ledger()
        with self._lock, self._journal.reading() as session:
            header = self._read(session).header
        self.dataset: str = header["dataset"]
        self.adjacency: Adjacency = header["adjacency"]
        self._epsilon, self._delta = Fraction(header["epsilon"]), Fraction(header["delta"])
        if given.get("dataset", self.dataset) != self.dataset:
            raise ConfigurationError(
                f"the budget {self.path} belongs to dataset {self.dataset!r}, not {dataset!r}: use one file for each dataset."
            )
        for name, value in given.items():
            if value != header[name]:
                raise ConfigurationError(
                    f"the budget {self.path} has {name} {_shown(header[name])}, not {_shown(value)}: a budget is not changed once "
                    f"something may have been released. Leave {name} out, or use a new file for other data."
                )

    @property
    def path(self) -> Path:
        """The file."""
        return self._journal.path

    @property
    def epsilon(self) -> float:
        """The total ε."""
        return float(self._epsilon)

    @property
    def delta(self) -> float:
        """The total δ."""
        return float(self._delta)

    @property
    def spent(self) -> float:
        """ε of all that was charged so far by all processes, at the budget's δ. Reserved runs count whole."""
        with self._lock:
            state = self._now()
            return state.composition.epsilon(state.totals, self._epsilon)

    @property
    def remaining(self) -> float:
        """ε − :attr:`spent`. Charges do not add up, they compose: it is :meth:`epsilon_with` that says what a charge would cost."""
        with self._lock:
            state = self._now()
            if self._delta == 0:
                return float(self._epsilon - state.totals.stated)
            return max(0.0, float(self._epsilon) - state.composition.epsilon(state.totals, self._epsilon))

    def epsilon_with(self, cost: Cost) -> float:
        """What :attr:`spent` would be if ``cost`` were charged too. Nothing is charged."""
        with self._lock:
            state, more = self._now(), self._counted(cost)
            return state.composition.epsilon(state.totals.plus(more), self._epsilon)

    def charge(self, cost: Cost, what: str = "") -> None:
        """Pay for one release before it is made, or refuse it and leave the file as it is.

        Args:
            cost: a number is a pure ε (for the budget's own neighbours); else :class:`~lipdp.privacy.Pure`,
                :class:`~lipdp.privacy.Approximate`, an event of dp-accounting, a :class:`~lipdp.privacy.PrivateRun`, or a list.
            what: what is released, for whoever reads the file.
        """
        more = self._counted(cost)
        entry = {"kind": "charge", "what": str(what), "events": [[to_data(event), count] for event, count in parts(cost)]}
        with self._lock, self._journal.writing() as session:
            state = self._read(session)
            self._afford(state, more, what)
            self._write(session, state, entry)

    def reserve(self, run: str, plan: PrivateRun, what: str = "", *, book: RunBook | None = None) -> Reservation:
        """Pay for a whole training run before its first release, or refuse it.

        A run is paid for once, however often it is interrupted and resumed: ``run`` is its name for all time, a secret drawn for it
        alone. Where a part of it was given back (:meth:`Reservation.close`), that part is paid for again.

        ``book``: what the run notes its releases in, if it keeps one. One that lacks what was known of it before is refused: it was
        put back from a backup, or copied and gone on with twice, so that releases that it says nothing of would be made again.
        """
        steps, one_off = run_costs(plan)
        for event, _ in parts(plan):
            check_event(event, self.adjacency, self._delta)
        holder = secrets.token_hex(8)
        entry = {
            "kind": "run",
            "run": run,
            "holder": holder,
            "what": str(what),
            "book": None if book is None else book.mark,
            "steps": (planned_steps := [[to_data(event), count] for event, count in steps]),
            "one_off": (planned_one_off := {name: to_data(event) for name, event in one_off.items()}),
        }
        with self._lock, self._journal.writing() as session:
            state = self._read(session)
            known = state.runs.get(run)
            if known is not None and known.plan != (planned_steps, planned_one_off):
                raise ConfigurationError(f"the run {run} is in the budget {self.path} with another plan: it is not the same run.")
            self._check_book(known, book)
            planned = known or Run(planned_steps, planned_one_off)
            self._afford(state, minus(planned.whole(), {} if known is None else known.counted()), what)
            self._write(session, state, entry)
        return Reservation(self, run, holder)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first."""
        with Journal(self.path, "budget").reading() as session:
            return [{name: value for name, value in line.items() if name != "previous"} for line in session.new_lines()[1:]]

    def events(self) -> list[tuple[Any, int]]:
        """What all of it amounts to: (event, how often), for dp-accounting or an auditor."""
        with self._lock:
            return [(from_key(key), count) for key, count in self._now().totals.counts.items()]

    def runs(self) -> dict[str, dict[str, Any]]:
        """The training runs by name: steps planned, steps known to be released, and whether all of it is still reserved."""
        with self._lock:
            return {name: run.summary() for name, run in self._now().runs.items()}

    def check(self) -> None:
        """Read the file from its beginning and refuse it if it is not what was written."""
        with self._lock:
            self._state = None
            self._now()

    def __repr__(self) -> str:
        return f"Budget({str(self.path)!r}, epsilon={brief(self.epsilon)}, delta={brief(self.delta)}, dataset={self.dataset!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        return self  # an account is not doubled by copying what charges it

    def __reduce__(self) -> Any:
        return Budget, (str(self.path),)

    # ------------------------------------------------------------------ inside

    def _begin(self, given: Mapping[str, str]) -> None:
        missing = [name for name in ("epsilon", "delta", "dataset") if name not in given]
        if missing:
            raise ConfigurationError(
                f"there is no budget at {self.path}: give {', '.join(missing)} to begin one (epsilon and delta: the most that may "
                "ever be spent on this dataset; dataset: a name for it)."
            )
        self._journal.create({"budget": FORMAT, "adjacency": "add_remove", **given, "created": _now()})

    def _refuse_ledger(self) -> None:
        if b'"ledger": 1' in self.path.read_bytes().partition(b"\n")[0]:
            raise ConfigurationError(
                f"{self.path} is a ledger of an older lipdp, which noticed less. Begin a budget in another file with what is left."
            )

    def _now(self) -> State:
        with self._journal.reading() as session:
            return self._read(session)

    def _read(self, session: Session) -> State:
        """The state of the file, which this process may know in part."""
        if self._state is None:
            self._journal.rewind()
        state, self._state = self._state, None  # what is half read does not stay
        for line in session.new_lines():
            try:
                state = State(line) if state is None else state
                if line is not state.header:
                    state.add(line)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self._journal.damaged(f"an entry makes no sense ({type(error).__name__}: {error})") from error
        if state is None:
            raise self._journal.damaged("it is empty")
        self._state = state
        return state

    def _counted(self, cost: Cost) -> dict[str, int]:
        counted: dict[str, int] = {}
        for event, count in parts(cost):
            check_event(event, self.adjacency, self._delta)
            if count < 1:
                raise ConfigurationError(f"an event is charged {count!r} times: a whole number of at least 1.")
            counted = plus(counted, {to_key(event): count})
        if not counted:
            raise ConfigurationError("there is nothing to charge: the cost holds no event.")
        return counted

    def _afford(self, state: State, more: Mapping[str, int], what: str) -> None:
        if not more or state.composition.fits(state.totals, more, self._epsilon):
            return
        spent = state.composition.epsilon(state.totals, self._epsilon)
        then = state.composition.epsilon(state.totals.plus(more))
        raise BudgetError(
            f"dataset {self.dataset!r} has {downwards(max(0.0, self.epsilon - spent), 6)} of its epsilon {brief(self.epsilon)} "
            f"left (at delta {brief(self.delta)}), and {what or 'this release'} would bring what is spent from {brief(spent)} to "
            f"{brief(then)}. Nothing was charged, nothing was released. Ask for less (more noise, fewer steps), or stop here."
        )

    def _check_book(self, run: Run | None, book: RunBook | None) -> None:
        """Refuse a book that lacks what was known of it."""
        if run is None or run.book is None or (book is not None and book.leads_to(run.book)):
            return
        what = "keeps a book, and this engine has none (book=FILE)" if book is None else "has a book that says more than this one"
        raise CheckpointError(
            f"by the budget {self.path}, this run {what}: that was put back from a backup behind a run that went on, or two "
            "processes go on from copies of one run. Steps that were made would be made again, as releases that nobody pays for. "
            "Nothing was released. Go on with the newest checkpoint and its own book; if they are lost, make a new run, which is "
            "charged on top."
        )

    def _write(self, session: Session, state: State, entry: dict[str, Any]) -> None:
        entry = {**entry, "time": _now(), "by": f"{socket.gethostname()}:{os.getpid()}"}
        self._state = None  # until it is written and known
        session.append(entry)
        state.add(entry)
        self._state = state


class RunBook(Protocol):
    """What a run notes its releases in, as the account of its data sees it."""

    @property
    def mark(self) -> str:
        """How far it has come."""

    def leads_to(self, mark: str) -> bool:
        """Whether it says all that it said when this was its mark."""


@dataclass(frozen=True)
class Reservation:
    """A training run that is paid for, held by one process.

    Attributes:
        budget: what it is paid from.
        run: its name in the budget for all time, a secret drawn for it alone.
        holder: a random name for this hold of it; a run that is resumed gets another one.
    """

    budget: Budget
    run: str
    holder: str

    def note_book(self, book: RunBook) -> None:
        """Remember how far the run's book has come; refused as by :meth:`Budget.reserve` where it lacks what was known of it."""
        budget = self.budget
        with budget._lock, budget._journal.writing() as session:
            state = budget._read(session)
            known = state.runs.get(self.run)
            budget._check_book(known, book)
            mark = book.mark
            if known is not None and known.book != mark:
                budget._write(session, state, {"kind": "book", "run": self.run, "holder": self.holder, "book": mark})
            book.leads_to(mark)  # it need not be read for it again

    def close(self, steps: int, one_off: Iterable[str] = (), *, keep: bool = False, book: RunBook | None = None) -> None:
        """Say how far the run has come, and give back what was never released.

        It is given back only if nobody else may have released it: every holder that this run ever had has to have closed. So a run
        whose process was killed keeps what it reserved, also after it was resumed.

        Args:
            steps: how many of its steps were released, by this holder or before it.
            one_off: names of the one-off releases that were made.
            keep: keep all of it reserved, for the run is to go on later.
            book: what its releases are noted in, to remember how far that has come.
        """
        budget, one_off = self.budget, sorted(set(one_off))
        entry: dict[str, Any] = {"kind": "end", "run": self.run, "holder": self.holder, "steps": int(steps)}
        entry |= {"one_off": one_off, "keep": bool(keep)}
        with budget._lock, budget._journal.writing() as session:
            state = budget._read(session)
            known = state.runs.get(self.run)
            if known is None or self.holder not in known.holders:
                raise ConfigurationError(f"the run {self.run} is not held by {self.holder} in the budget {budget.path}")
            known.check_position(int(steps), one_off)
            if book is not None and (known.book is None or book.leads_to(known.book)):
                entry["book"] = book.mark
            budget._write(session, state, entry)


AnyBudget = Budget | str | os.PathLike[str] | None
"""A budget, the path of its file, or none: what everything takes that releases something."""


def charge(budget: AnyBudget, cost: Cost, what: str) -> None:
    """Pay for a release before it is made, where there is a budget."""
    if (account := open_budget(budget)) is not None:
        account.charge(cost, what)


def open_budget(budget: AnyBudget) -> Budget | None:
    """A budget, or the one in this file, which has to be there."""
    if budget is None or isinstance(budget, Budget):
        return budget
    if not isinstance(budget, str | os.PathLike):
        raise ConfigurationError(f"budget is {shown(budget)}: a lipdp.privacy.Budget, or the path of its file.")
    if not Path(budget).exists():
        raise ConfigurationError(
            f"there is no budget at {budget}: begin it with lipdp.privacy.Budget(path, epsilon=…, delta=…, dataset=…) or with "
            f"`lipdp budget create {budget} --epsilon … --delta … --dataset …`."
        )
    return Budget(budget)


def _given(epsilon: float | None, delta: float | None, dataset: str | None, adjacency: Adjacency | None) -> dict[str, str]:
    """The arguments that were given, as the file has them."""
    given: dict[str, str] = {}
    if epsilon is not None:
        given["epsilon"] = str(exact("epsilon", epsilon))
    if delta is not None:
        if not (is_number(delta) and 0 <= delta < 1):
            raise ConfigurationError(
                f"delta is {delta!r}: a probability below 1, best well below 1 / dataset size; 0 for pure releases."
            )
        given["delta"] = str(exact("delta", delta, zero=True))
    if dataset is not None:
        if not isinstance(dataset, str) or not dataset.strip():
            raise ConfigurationError(f"dataset is {dataset!r}: a name for the data, which people will read.")
        given["dataset"] = dataset
    if adjacency is not None:
        given["adjacency"] = one_of("adjacency", adjacency, get_args(Adjacency))
    return given


def _shown(value: str) -> str:
    try:
        return brief(float(Fraction(value)))
    except ValueError:
        return repr(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
