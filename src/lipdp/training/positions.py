"""The book of what this process has released: each position of a run once, with the inputs that it was released for.

Engines can be copied, rewound, or made twice from one state; the book can't, for it is no part of them. A position is taken here
before its noise is drawn. Taken again for the same inputs, it is the same release to the last bit, and costs nothing; for other
inputs it would be a second release that nobody paid for, and is refused.
"""

from __future__ import annotations

import os

import torch

from lipdp.errors import BudgetError

__all__ = ["know_run", "take_position"]

_SIZE = 16  # bytes of a trail that are kept
_COLUMNS = 16  # words of a position that are kept on a device: of weights by type, of inputs and targets


class _Run:
    """Trails by position: of steps one after another, of named releases by name. Zeros: not taken."""

    def __init__(self) -> None:
        self.steps = bytearray()
        self.named: dict[str, bytes] = {}
        self.words: torch.Tensor | None = None

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
        if words.numel():
            self._room(position, words)[position, : words.numel()] = words.reshape(-1)

    def same_words(self, position: int | str, words: torch.Tensor) -> bool:
        """Whether what was seen on the device is what was seen there before; waits for it."""
        if isinstance(position, str) or not words.numel():
            return True
        return bool((self._room(position, words)[position, : words.numel()] == words.reshape(-1)).all())

    def _room(self, position: int, words: torch.Tensor) -> torch.Tensor:
        have = 0 if self.words is None else len(self.words)
        wide = _COLUMNS if self.words is None else self.words.shape[1]
        if self.words is None or self.words.device != words.device or position >= have or words.numel() > wide:
            more = torch.zeros(max(2 * have, position + 1, 64), max(wide, words.numel()), dtype=torch.int64, device=words.device)
            if self.words is not None:
                more[:have, :wide] = self.words.to(words.device)
            self.words = more
        return self.words


_runs: dict[bytes, _Run] = {}
_foreign: set[bytes] = set()


def _forked() -> None:
    """Both sides of a fork have the keys; only the one that they were made in goes on with them."""
    _foreign.update(_runs)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def know_run(run: bytes) -> None:
    """A run (named by a digest of its key) exists in this process."""
    _runs.setdefault(run, _Run())


def take_position(run: bytes, position: int | str, trail: bytes, words: torch.Tensor) -> None:
    """Take a position (a step's number, or a release's name) for what ``trail`` and ``words`` stand for."""
    if run in _foreign:
        raise BudgetError(
            "this engine was made in another process, of which this one is a copy (os.fork): both would make the same releases, or "
            "other ones that nobody pays for. Make the engine in the process that trains with it."
        )
    book, kept = _runs.setdefault(run, _Run()), trail[:_SIZE]
    before = book.before(position)
    if before is None:
        book.write(position, kept, words)
    elif before != kept or not book.same_words(position, words):
        what = f"step {position}" if isinstance(position, int) else f"the release of {position}"
        raise BudgetError(
            f"{what} of this run was made before, from other inputs: by this engine before it was rewound, by a copy of it, or by "
            "another one from the same state. A second release there is one that nobody has paid for. Go on with the engine that "
            "made the first one, or give it the same data, weights and settings; or make a new PrivacyEngine, which has a key of "
            "its own and is charged from the start."
        )
