"""Seats: where in a step's microbatches a record is computed, chosen at random and independently of all other records.

Floating-point sums depend on their order, and what a library computes for a row may depend on the row's place. If records were
taken in their order, one record less would move all those behind it by a place, and the whole sum would be another one: by more
than the record's own gradient. So every step has a fixed number of seats, more than it usually needs, and the records of its batch
take some of them at random (a secret draw, like the sample itself).

*Why that helps.* A random choice of n+1 different seats for the records of D ∪ {x} is, for the records of D alone, a random choice
of n seats. So runs on D and on D ∪ {x} can be paired such that all records of D sit where they sat: for each such pair everything
is the same to the bit, but for the microbatch with x in it, and there but for the sums that x enters. The two outputs are mixtures
over the pairs, and differential privacy of each pair is that of the mixtures.

*When there are more records than seats*, all seats of the first bank (then of the second …) are taken, and the rest sit in the next
one. A random order of n+1 records is one of n with x in a random record's place, and that record behind the last. So one record
moves at most, to a seat of the next bank: its gradient is then computed at another place of a microbatch of the same shape.

*Copies* (augmentation multiplicity): an example's gradient is the mean of its copies' gradients, which changes no bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lipdp.data.augment import Augmentation, copies_of
from lipdp.errors import DataError
from lipdp.privacy.randomness import Stream


def random_order(count: int, draw: Stream) -> torch.Tensor:
    """0, …, count − 1 in a random order: that of as many random words of 64 bits (two are equal once in 2⁶⁵/count²)."""
    return torch.from_numpy(np.argsort(draw.words(2 * count).view(np.uint64)))


def _ranks(seats: int, draw: Stream) -> npt.NDArray[np.int64]:
    """By seat, its place in a random order of them."""
    ranks = np.empty(seats, dtype=np.int64)
    ranks[random_order(seats, draw).numpy()] = np.arange(seats)
    return ranks


class Seating:
    """Random orders of one number of seats. That of the next step may be drawn ahead, while a device computes this one."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self._ahead: tuple[bytes, npt.NDArray[np.int64]] | None = None

    def draw_ahead(self, draw: Stream) -> None:
        """Keep the order that ``draw`` begins with."""
        self._ahead = draw.key, _ranks(self.seats, draw)

    def __call__(self, count: int, draw: Stream, *, shuffled: bool) -> torch.Tensor:
        """:func:`choose_seats`; for records that lie in a random order already, :func:`seats_in_order`."""
        ahead, self._ahead = self._ahead, None
        ranks = ahead[1] if ahead is not None and ahead[0] == draw.key else None
        return (seats_in_order if shuffled else choose_seats)(count, self.seats, draw, ranks)


def choose_seats(count: int, seats: int, draw: Stream, ranks: npt.NDArray[np.int64] | None = None) -> torch.Tensor:
    """By seat, which of ``count`` records sits there, −1 for nobody: banks of ``seats`` seats each, as many as are needed.

    ``ranks``: by seat of one bank, its place in an order that was drawn from a stream of the same key already.
    """
    full = (count - 1) // seats if count else 0  # banks without an empty seat, before the last
    if not full:
        ranks = _ranks(seats, draw) if ranks is None else ranks
        return torch.from_numpy(np.where(ranks < count, ranks, -1))
    records = random_order(count, draw).numpy()
    ranks, rest = _ranks(seats, draw), records[full * seats :]
    last = np.where(ranks < len(rest), rest[np.minimum(ranks, len(rest) - 1)], -1)
    return torch.from_numpy(np.concatenate([records[: full * seats], last]))


def seats_in_order(count: int, seats: int, draw: Stream, ranks: npt.NDArray[np.int64] | None = None) -> torch.Tensor:
    """The same for records that lie in a random order already: they keep it, and only the empty seats are drawn."""
    full = (count - 1) // seats * seats if count else 0  # seats of banks without an empty one
    taken = (_ranks(seats, draw) if ranks is None else ranks) < count - full
    last = np.full(seats, -1)
    last[taken] = np.arange(full, count)
    return torch.from_numpy(np.concatenate([np.arange(full), last]))


class Shuffled(TensorDataset):
    """Records that lie in a secret random order."""


# Numbers that are moved at a time.
_COLUMNS = 2**24


def shuffle(dataset: TensorDataset, draw: Stream) -> Shuffled:
    """The same records in a random order, in the same memory: batches of all of them can then be read as they lie."""
    order = random_order(len(dataset), draw)
    for tensor in dataset.tensors:
        rows, here = tensor.reshape(len(tensor), -1), order.to(tensor.device)
        columns = max(1, _COLUMNS // max(1, len(tensor)))
        for start in range(0, rows.shape[1], columns):
            part = rows[:, start : start + columns]
            part.copy_(part[here])
        if rows.data_ptr() != tensor.data_ptr():
            tensor.copy_(rows.reshape(tensor.shape))
    return Shuffled(*dataset.tensors)


@dataclass(frozen=True)
class Copies:
    """Turns a microbatch of examples into one of rows: the K copies of each example, one after another.

    ‖(1/K)Σ_k g_ik‖ ≤ (1/K)Σ_k‖g_ik‖ ≤ Δ: the copies of one example count as one. All rows share one forward pass.

    Attributes:
        augmentation: what makes the copies; ``None`` for the example itself.
        generator: for its random draws.
        shape: shape of one row, where the model says it.
    """

    augmentation: Augmentation | None = None
    generator: torch.Generator | None = None
    shape: tuple[int, ...] | None = None

    @cached_property
    def count(self) -> int:
        """K, for all of a step: an augmentation is asked once."""
        return 1 if self.augmentation is None else self.augmentation.copies

    def rows(self, x: Any) -> Any:
        """(batch, …) to (batch·K, …), example-major."""
        if self.augmentation is None:
            return x
        if not isinstance(x, torch.Tensor):
            raise DataError(
                f"{self.augmentation!r} makes copies of one tensor, and these records have several inputs. Leave augmentation out."
            )
        rows = copies_of(self.augmentation, x, self.generator)
        if rows.ndim < 2 or rows.shape[:2] != (len(x), self.count):
            raise DataError(
                f"{self.augmentation!r} made {tuple(rows.shape)} out of {tuple(x.shape)}: it has to give {self.count} copies of "
                "each example, as (batch, copies, …)"
            )
        if self.shape is not None and tuple(rows.shape[2:]) != self.shape:
            raise DataError(f"the plan is for examples of shape {self.shape}; {self.augmentation!r} makes {tuple(rows.shape[2:])}")
        return rows.flatten(0, 1)

    def repeat(self, per_example: torch.Tensor) -> torch.Tensor:
        """What belongs to the example, for each of its rows: targets, the mask."""
        return per_example if self.count == 1 else per_example.repeat_interleave(self.count, dim=0)
