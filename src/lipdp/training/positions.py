"""The book of what this process has released: each position of a run once, with the inputs that it was released for.

Engines can be copied, rewound, or made twice from one state; the book can't, for it is no part of them. A position is taken here
before its noise is handed out. Taken again for the same inputs, it is the same release to the last bit, and costs nothing; for
other inputs it would be a second release that nobody paid for, and is refused.

Those inputs are known by digests of data under the run's key, which its samples and its noise are bound to; what is drawn there by
a tag that the very sums are mixed into (:attr:`lipdp.privacy.Stream.claim`). A device keeps its own: nobody waits for it at a
position that was never taken.

What earlier processes of a run have released is known by its book on disk, where it keeps one (:mod:`lipdp.training.book`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence

import torch

from lipdp.errors import BudgetError, CheckpointError, ConfigurationError, RepeatedStepError
from lipdp.privacy.ledger import Furthest
from lipdp.privacy.randomness import Claim
from lipdp.training.book import BookFile, Draw

_SIZE = 16  # bytes of a trail that are kept
_COLUMNS = 16  # words of a position that are kept on a device: of weights by type, of inputs and targets
_TAG = 4  # those of a draw
_LEFT_OUT = "batches"  # under which name a book notes a batch that has not the number of its step
_WAITING = 64  # tags on a device that are not written to a book yet: those of steps that a killed run has to give up
_OTHER_SUMS = (
    "with other sums from the same inputs (another microbatch_size, machine or number of threads? does something draw random "
    "numbers past torch's generators? do a GPU's kernels add in any order? torch.use_deterministic_algorithms(True) makes them "
    "repeat)"
)
Claims = Sequence[tuple[int, Claim]]
"""Draws of a position, by number, and what stands for each."""


class _Run:
    """Trails by position: of steps one after another, of named releases by name. Zeros: not taken."""

    def __init__(self) -> None:
        self.steps = bytearray()
        self.named: dict[str, bytes] = {}
        self.furthest = Furthest()
        self.draws: dict[Draw, Claim] = {}
        self.words, self.tags = _Rows(_COLUMNS), _Rows(_TAG)
        self.is_open = False  # its book, here or in the process that writes it
        self.is_kept = False  # in a file that this process has written
        self.batches = 0  # the number behind the last batch that has not the number of its step: some were left out before it
        self.waiting: list[int] = []  # positions whose tags are on a device, and not in the file yet
        self._file: weakref.ref[BookFile] | None = None

    @property
    def file(self) -> BookFile | None:
        """Its book, where this process writes it: as long as somebody has it."""
        return None if self._file is None else self._file()

    def keep_in(self, file: BookFile) -> None:
        """Write what is drawn to this file from here on, and what was drawn here before, without it."""
        known = {draw: _read(tag) for draw, tag in self.draws.items() if draw not in file.draws}
        waiting = [position for position in self.tags.noted() if not file.draws.get((position, 0))]
        file.write(known | {(position, 0): b"" for position in waiting if (position, 0) not in file.draws})
        self._file, self.waiting, self.is_kept = weakref.ref(file), waiting, True

    def forget_file(self) -> None:
        """Nothing is written to it any more."""
        self._file, self.waiting = None, []

    @property
    def end(self) -> int:
        """The number behind the last step that was made, here or by an earlier process."""
        drawn = max((position for position, _ in self.draws if isinstance(position, int)), default=-1)
        return max(len(self.steps) // _SIZE, drawn + 1)

    def check_file(self) -> None:
        """Refuse to release what its file would not know of: it was closed, the engine that kept it is gone, or it was replaced."""
        if self.file is not None:
            self.file.check()
        else:
            raise CheckpointError(
                "this run keeps a book, in which each of its releases is noted, and that was closed (by another engine of the run, "
                "or while this step was under way). Nothing was released. Go on with an engine that has book=FILE."
            )

    def knows(self, position: int) -> bool:
        """Whether a step was made there, here or by an earlier process."""
        return self.before(position) is not None or (position, 0) in self.draws or self.tags.has(position)

    def refuse_batch(self, position: int, batch: int) -> None:
        """Refuse, for a step that was not made yet, a batch whose sample may be that of another step."""
        if (batch < self.batches or (batch != position and self.knows(batch))) and not self.knows(position):
            raise ConfigurationError(
                f"this batch, number {batch} of this run, was passed over: a step was made with it or with a later one, or step "
                f"{batch} with a copy or one of your own; by this engine (before it was rewound?), a copy of it, or another "
                "iterator. Two steps on one sample are not what is accounted for. Take the next one of engine.batches(train)."
            )

    def write_batch(self, batch: int) -> None:
        """Note that a step was made with this one, which has not its number."""
        if self.file is not None:
            self.file.write({(_LEFT_OUT, batch): b""})
        self.know_draw((_LEFT_OUT, batch), b"")

    def know_draw(self, draw: Draw, tag: Claim) -> None:
        """What was drawn, or what the file says of it."""
        self.draws.setdefault(draw, tag)
        if draw[0] == _LEFT_OUT:
            self.batches = max(self.batches, draw[1] + 1)
        elif isinstance(draw[0], int):
            self.furthest.note(draw[0] + 1)
        else:
            self.furthest.note(0, [draw[0]])

    def before(self, position: int | str) -> bytes | None:
        """The trail of an earlier release here."""
        if isinstance(position, str):
            return self.named.get(position)
        kept = bytes(self.steps[_SIZE * position : _SIZE * (position + 1)])
        return kept if any(kept) else None

    def write(self, position: int | str, trail: bytes, words: torch.Tensor) -> None:
        """Take it."""
        if isinstance(position, str):
            self.named[position] = trail
            return
        self.steps.extend(bytes(max(0, _SIZE * (position + 1) - len(self.steps))))
        self.steps[_SIZE * position : _SIZE * (position + 1)] = trail
        self.words.write(position, words)

    def same_words(self, position: int | str, words: torch.Tensor) -> bool:
        """Whether what was seen on the device is what was seen there before, if that was noted; waits for it."""
        before = None if isinstance(position, str) else self.words.at(position, words.numel())
        return before is None or not words.numel() or torch.equal(before, words.reshape(-1).cpu())

    def same_draw(self, position: int | str, number: int, tag: Claim) -> bool:
        """Whether the draw there, if one was made, is this one; one on a device is waited for."""
        before = self.draws.get((position, number))
        if before is None and number == 0 and isinstance(position, int):
            before = self.tags.at(position, _TAG)
        return before is None or _read(before) == _read(tag)

    def write_draw(self, position: int | str, number: int, tag: Claim) -> None:
        """Note it, where none was made: in the file first."""
        if self.is_kept:
            self.check_file()
        if (position, number) in self.draws:
            return
        if isinstance(tag, torch.Tensor) and number == 0 and isinstance(position, int):
            if self.file is not None and not self.tags.has(position):
                self.file.write({(position, 0): b""})
                self.waiting.append(position)
                if len(self.waiting) > _WAITING:
                    self.tell_file(self.waiting[:-1])
            self.tags.write(position, tag)
            return
        if self.file is not None or isinstance(tag, bytes):
            kept = _read(tag)
            if self.file is not None:
                self.file.write({(position, number): kept})
            self.draws[position, number] = kept
        else:
            self.draws[position, number] = tag.clone()  # the next draw overwrites it

    def tell_file(self, positions: Sequence[int]) -> None:
        """Write the tags of these, the first that wait; their device is waited for."""
        if self.file is not None and positions:
            tags = [(position, self.tags.at(position, _TAG)) for position in positions]
            self.file.write({(position, 0): _read(tag) for position, tag in tags if tag is not None})
        del self.waiting[: len(positions)]


def _read(tag: Claim) -> bytes:
    """The bytes of it that are kept; one on a device is waited for."""
    return (tag if isinstance(tag, bytes) else tag.cpu().numpy().tobytes())[:_SIZE]


class _Rows:
    """Words of positions, one row each, on the device that they come from; which rows there are, the host knows by itself."""

    def __init__(self, width: int) -> None:
        self._rows = torch.zeros(0, width, dtype=torch.int64)
        self._noted = bytearray()

    def write(self, position: int, words: torch.Tensor) -> None:
        """Note them, where none were; nobody waits."""
        if not words.numel() or self.has(position):
            return
        self._noted.extend(b"0" * (position + 1 - len(self._noted)))
        self._noted[position] = ord("1")
        have, wide = self._rows.shape
        if self._rows.device != words.device or position >= have or words.numel() > wide:
            more = torch.zeros(max(2 * have, position + 1, 64), max(wide, words.numel()), dtype=torch.int64, device=words.device)
            more[:have, :wide] = self._rows.to(words.device)
            self._rows = more
        self._rows[position].narrow(0, 0, words.numel()).copy_(words.reshape(-1))

    def at(self, position: int, count: int) -> torch.Tensor | None:
        """The first words of a position, on the processor; ``None`` where none were noted."""
        return self._rows[position, :count].cpu() if self.has(position) else None

    def has(self, position: int) -> bool:
        """Whether some were noted."""
        return self._noted[position : position + 1] == b"1"

    def noted(self) -> list[int]:
        """All positions where some were."""
        return [position for position, is_there in enumerate(self._noted) if is_there == ord("1")]


_runs: dict[bytes, _Run] = {}
_foreign: set[bytes] = set()
_writing = threading.RLock()  # of two threads that ask for one position, one is the first


def _forked() -> None:
    """Both sides of a fork have the keys; only the one that they were made in goes on with them."""
    global _writing
    _foreign.update(_runs)
    _writing = threading.RLock()  # another thread may have held it
    for run in _runs.values():
        if run.file is not None:
            run.file.close_copy()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def know_run(run: bytes) -> None:
    """A run (named by a digest of its key) exists in this process."""
    _book(run)


def _book(run: bytes) -> _Run:
    return _runs[run] if run in _runs else _runs.setdefault(run, _Run())


def open_book(run: bytes, path: str | os.PathLike[str], since: str | None = None) -> BookFile:
    """Keep this run's book in a file from here on, as long as somebody has it. Arguments as of :class:`BookFile`."""
    with _writing:
        book = _book(run)
        if book.file is not None:
            return book.file
        file = BookFile(path, run, since)
        book.keep_in(file)
        return file


def know_draws(run: bytes, draws: Mapping[Draw, bytes]) -> None:
    """What the book of this run says, which is open from here on: here, or in the process that writes it."""
    with _writing:
        book = _book(run)
        book.is_open = True
        for draw, tag in draws.items():
            book.know_draw(draw, tag)


def is_book_open(run: bytes) -> bool:
    """Whether its book is open: no copy of the engine has closed it."""
    return run in _runs and _runs[run].is_open


def sync_book(run: bytes) -> str | None:
    """All of its book has reached the disk, when this returns; the mark of how far it has come, where it is written here."""
    with _writing:
        book = _runs.get(run)
        file = None if book is None else book.file
        if book is None or file is None:
            return None
        book.tell_file(list(book.waiting))
        file.sync()
        return file.mark


def close_book(run: bytes) -> str | None:
    """Let its file go, for another process to go on with; the mark of how far it has come."""
    with _writing:
        book = _runs.get(run)
        if book is None:
            return None
        book.is_open, file = False, book.file
        if file is None:
            return None
        try:
            book.tell_file(list(book.waiting))
        finally:
            book.forget_file()
            file.close()
        return file.mark


def end_of(run: bytes) -> int:
    """The number behind the last step of a run that is known to have been made."""
    return _runs.setdefault(run, _Run()).end


def furthest_of(run: bytes) -> Furthest:
    """What is known to have been charged by this run, here or by earlier processes. All of its engines have this object."""
    return _book(run).furthest


def batches_end(run: bytes) -> int:
    """The number behind the last batch that a step of this run is known to have been made with."""
    return max(end_of(run), _book(run).batches)


def refuse_forked(run: bytes) -> None:
    """Refuse a run that another process has begun, of which this one is a copy."""
    if run in _foreign:
        raise BudgetError(
            "this engine was made in another process, of which this one is a copy (os.fork): both would make the same releases, or "
            "other ones that nobody pays for. Make the engine in the process that trains with it."
        )


def refuse_taken(
    run: bytes, position: int | str, trail: bytes, words: torch.Tensor, claims: Claims = (), batch: int | None = None
) -> None:
    """Refuse a position that was taken for something else; nothing is taken. Arguments as of :func:`take_position`."""
    refuse_forked(run)
    with _writing:
        book = _book(run)
        if book.is_kept:
            book.check_file()
        if batch is not None and isinstance(position, int) and (batch != position or book.batches):
            book.refuse_batch(position, batch)
        before = book.before(position)
        if before is not None and (before != trail[:_SIZE] or not book.same_words(position, words)):
            raise _taken(position, "from other inputs")
        for number, tag in claims:
            if not book.same_draw(position, number, tag):
                raise _taken(position, _OTHER_SUMS)


def take_position(
    run: bytes, position: int | str, trail: bytes, words: torch.Tensor, claims: Claims = (), batch: int | None = None
) -> None:
    """Take a position (a step's number, or a release's name) for what ``trail`` and ``words`` stand for.

    ``claims``: draws that were made ahead, and are handed out from here on. Their tags stand for the words too.
    ``batch``: the number of the batch that a step is made with, where the run has drawn it: no other step gets its sample.
    """
    with _writing:
        refuse_taken(run, position, trail, words, claims, batch)
        book = _runs[run]
        if batch is not None and batch != position and batch >= book.batches:
            book.write_batch(batch)
        if book.before(position) is None:
            book.write(position, trail[:_SIZE], words[:0] if claims else words)
        for number, tag in claims:
            book.write_draw(position, number, tag)


def claim_draw(run: bytes, position: int | str, number: int, tag: Claim) -> None:
    """A draw of noise at a position that was taken: of a second one, ``tag`` shows whether it is for the same sums.

    Equal inputs give equal sums, unless the model or the data draw random numbers past torch's generators, or are written to past
    torch's bookkeeping; or threads (or a GPU's kernels) add in another order. Whatever it was, other sums are another release.
    """
    with _writing:
        book = _book(run)
        if book.same_draw(position, number, tag):
            book.write_draw(position, number, tag)
            return
    raise _taken(position, _OTHER_SUMS)


def _taken(position: int | str, how: str) -> BudgetError:
    what = f"step {position}" if isinstance(position, int) else f"the release of {position}"
    leave_out = " engine.give_up() goes on behind the steps that were made." if isinstance(position, int) else ""
    return RepeatedStepError(
        f"{what} of this run was made before, {how}: by this engine before it was rewound, by a copy of it, or by another one from "
        "the same state, in a process that was ended perhaps. A second release there is one that nobody has paid for. Go on with "
        f"the engine that made the first one, or give it the same data, weights and settings (a scheduler that "
        f"starts anew has another rate).{leave_out} Or make a new PrivacyEngine, which has a key of its own and is "
        "charged from the start."
    )
