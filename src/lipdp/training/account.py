"""How a run pays the budget of its data: all of it before its first release, and what was never released comes back at its end.

Beside it, a help and no account: what this process has released about which data, told apart by a few of their records, so that a
second run over the same data does not go unsaid.
"""

from __future__ import annotations

import copy
import hashlib
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import torch

from lipdp._files import when_free
from lipdp._numerics import Undrawn
from lipdp._texts import brief, upwards
from lipdp.errors import BudgetError, CheckpointError, LipdpError, RepeatedRunWarning
from lipdp.inputs import leaves, rows_of
from lipdp.privacy.budget import Budget, Reservation
from lipdp.privacy.composition import Composition, Totals
from lipdp.privacy.costs import parts, to_key
from lipdp.privacy.ledger import Ledger
from lipdp.training.batches import gather, slices
from lipdp.training.book import BookFile
from lipdp.training.known import stored_tensors


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
        self._ledger: Ledger | None = None  # of what is reserved
        self._book: BookFile | None = None
        self._engines = 0
        self._lock = threading.RLock()  # closed by one thread while another one releases, it has to know of that release

    def belong_to(self, engine: object) -> None:
        """Be given back when this engine, and all others that it belongs to, are gone."""
        self._engines += 1
        weakref.finalize(engine, self._abandon)

    @property
    def is_reserved(self) -> bool:
        """Whether the run is paid for now, or needs not be."""
        return self.budget is None or self._reserved is not None

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

    def reserve(self, ledger: Ledger, key: object, book: BookFile | None = None) -> None:
        """Pay for the whole run, if it is not paid for; BudgetError where that is too much.

        ``key`` is the secret of the run; ``book`` its book, if it keeps one: the budget remembers how far that has come.
        """
        if self.budget is None:
            return
        # A run that goes on with another key makes other releases: it is another run.
        name = hashlib.sha256(f"{self.nonce}|{key!r}".encode()).hexdigest()[:32]
        with self._lock:
            if self._reserved is not None and (self._reserved.run != name or self._process != os.getpid()):
                self.close()
            if self._reserved is None:
                self._reserved = self.budget.reserve(name, ledger.run, "a training run", book=book)
                self._process, self._ledger, self._book = os.getpid(), copy.copy(ledger), book

    def note_book(self) -> None:
        """How far the book has come, once all of it is on disk; CheckpointError where another process went on from a copy of it."""
        with self._lock:
            if self._reserved is not None and self._book is not None and self._process == os.getpid():
                self._reserved.note_book(self._book)

    def check_paid(self) -> None:
        """BudgetError where the run is not paid for any more. Ask once a release is charged: who closes then knows of it."""
        with self._lock:
            if not self.is_reserved:
                raise BudgetError(
                    f"this run was closed while a release was under way (by another thread, a signal handler or another engine of "
                    f"the run), and the budget {self.name} has what it reserved back. Nothing was released. Call engine.step again "
                    "to go on: the run is then paid for anew."
                )

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
        if self._process not in (0, os.getpid()):  # a forked process that ends must not close what its parent goes on with
            self._reserved = None
            return
        with self._lock:
            held, self._reserved = self._reserved, None
            book, self._book = self._book, None
            if held is not None and self._ledger is not None:
                held.close(self._ledger.charged, self._ledger.charged_one_off, keep=keep, book=book)

    def _abandon(self) -> None:
        """:meth:`close` for a run that nobody holds any longer; where that fails, all of it stays reserved."""
        self._engines -= 1
        if not self._engines and self.budget is not None:
            when_free(self.budget.path, self._close_quietly)  # engines may be found to be gone anywhere, in a charge, too

    def _close_quietly(self) -> None:
        with suppress(LipdpError):
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> RunAccount:
        return self


_LOOKED_AT = 16  # records of a dataset
_SKETCH, _SHARED = 64, 4  # hashes of records that are remembered, and how many in common are no accident
_NUMBERS, _READ = 2**26, 4096  # entries of stored inputs that are hashed; other records that are read for it
_RECORD = "record "
_FEW = 4  # kinds of events up to which they are composed tightly


@dataclass(frozen=True)
class RunRecord:
    """One run: its secret's digest (a run that is repeated under one secret releases nothing new), its ledger, who paid."""

    key: str
    ledger: Ledger
    budget: str | None


_runs: dict[str, list[RunRecord]] = {}
_objects: dict[int, weakref.ref[Any]] = {}
_told: set[str] = set()
_expected = 0


def data_marks(dataset: Any) -> tuple[str, ...]:
    """What a dataset is known by: the object, a digest of some of its records, and the smallest hashes of all inputs."""
    marks = []
    try:
        _objects[id(dataset)] = weakref.ref(dataset, partial(_forget_object, id(dataset)))
        marks.append(f"object {id(dataset)}")
    except TypeError:  # lists, say: known by their content alone
        pass
    try:
        count = len(dataset)
        chosen = torch.linspace(0, count - 1, min(count, _LOOKED_AT), dtype=torch.float64).round().long()
        digest = hashlib.sha256(str(count).encode())
        with Undrawn():  # records may be drawn: looking at some changes no others
            looked_at = gather(dataset, chosen)
        for part in leaves(looked_at):
            held = part.detach().cpu().contiguous()
            digest.update(f"{held.dtype} {tuple(held.shape)}".encode())
            digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
        marks.append(f"content {digest.hexdigest()}")
        marks.extend(f"{_RECORD}{number}" for number in _sketch(dataset, looked_at[0]))
    except (LipdpError, RuntimeError, TypeError, ValueError):  # what can't be read now is refused where it is used
        pass
    return tuple(marks)


def _sketch(dataset: Any, some: Any) -> list[int]:
    """The smallest hashes of the records' inputs: two datasets that share a part of their records share about that part of these.

    So records in another order, with other targets, or some of them, are recognised. None of large datasets, and of inputs that
    are mostly alike: those are in other people's data too.
    """
    entries = sum(part[0].numel() for part in leaves(some))
    if len(dataset) * entries > _NUMBERS or not (stored_tensors(dataset) or len(dataset) <= _READ):
        return []
    with Undrawn():
        hashes = [_hashes(inputs) for inputs, _ in slices(dataset, max(1, 2**22 // max(1, entries)))]
    different = torch.unique(torch.cat(hashes))
    return different[:_SKETCH].tolist() if 2 * len(different) >= len(dataset) else []


def _hashes(inputs: Any) -> torch.Tensor:
    """One number for each record: the words of its inputs times odd numbers that this process drew."""
    total = torch.zeros(rows_of(inputs), dtype=torch.int64)
    for place, part in enumerate(leaves(inputs)):
        flat = part.detach().cpu().reshape(len(part), -1)
        words = flat.float().view(torch.int32).long() if flat.is_floating_point() else flat.long()
        total += (words * _factors(place, words.shape[1])).sum(1)
    mixed = (total ^ (total >> 29)) * -7046029254386353131
    return mixed ^ (mixed >> 32)


@lru_cache(maxsize=16)
def _factors(place: int, width: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(secrets.token_bytes(8 * width)), dtype=torch.int64) | 1


def _forget_object(number: int, gone: object) -> None:
    """The object is gone, and its number may be another's soon."""
    _objects.pop(number, None)
    _runs.pop(f"object {number}", None)


def record_run(marks: tuple[str, ...], run: RunRecord) -> None:
    """Before a run's first release about some data: warn if others have released something about them, and remember this one."""
    before: dict[str, RunRecord] = {}
    shared: dict[str, set[str]] = {}
    for mark, other in [(known, other) for known in marks for other in _runs.get(known, ())]:
        paid = run.budget is not None and other.budget == run.budget
        if other.key != run.key and not paid and (other.ledger.charged or other.ledger.charged_one_off):
            shared.setdefault(other.key, set()).add(mark)
            if not mark.startswith(_RECORD) or len(shared[other.key]) >= _SHARED:
                before[other.key] = other
    if before and not _expected and run.key not in _told:
        _warn(list(before.values()), run)
        _told.add(run.key)
    for mark in marks:
        _runs.setdefault(mark, []).append(run)


def _warn(before: list[RunRecord], run: RunRecord) -> None:
    ledger = run.ledger
    together = _composed([other.ledger for other in before], ledger)
    alone = f"epsilon {upwards(ledger.planned_epsilon)} alone"
    unpaid = "no budget adds them up" if run.budget is None else f"the budget {run.budget} was not charged for all of them"
    warnings.warn(
        f"this is run {len(before) + 1} over the same data (or some of them) in this process, and {unpaid}: together they spend "
        f"epsilon {upwards(together)} at delta {brief(ledger.delta)} ({alone}). Charge them all to one account, "
        "budget=lipdp.privacy.Budget(…), which refuses what is too much; or report the composed epsilon.",
        RepeatedRunWarning,
        stacklevel=5,
    )


def _composed(before: list[Ledger], ledger: Ledger) -> float:
    """ε of what was released before and of all of this run, at its δ and for its neighbours."""
    totals = Totals(ledger.adjacency)
    for run in (*(other.spent for other in before), ledger.run):
        for event, count in parts(run):
            totals.add({to_key(event): count})
    delta = Fraction(repr(ledger.delta))
    quick = totals.quick({}, delta)
    return quick if len(totals.counts) > _FEW else min(quick, Composition(delta, ledger.adjacency).epsilon(totals))


@contextmanager
def several_runs() -> Iterator[None]:
    """Within the block nothing is said of runs over the same data: they are accounted for together, or declared otherwise."""
    global _expected
    _expected += 1
    try:
        yield
    finally:
        _expected -= 1


def are_expected() -> bool:
    """Whether this is inside :func:`several_runs`."""
    return _expected > 0


def forget_runs() -> None:
    """Forget all runs of this process (for tests, and for data that are public)."""
    _runs.clear()
    _told.clear()
