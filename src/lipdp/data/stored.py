"""Records that do not fit into memory: rows of arrays on disk, read a batch at a time."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lipdp.errors import DataError

__all__ = ["Stored"]

_HELD = 1 << 30  # bytes that may stay mapped after they were read
_AROUND = 1 << 16  # bytes that a system maps around a row that was asked for


class Stored(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of two arrays on disk, inputs and targets, as (input, target): memory stays flat, whatever their size.

    Batches are copies: what was read is handed back to the operating system, so that the process does not seem to grow by all that
    it has ever looked at. Nothing is written to the files.

    Args:
        inputs: a file of :func:`numpy.save`, or an array (a :class:`numpy.memmap`), with a row for each record.
        targets: the same for targets.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/x.npy", np.arange(6.0).reshape(3, 2))
        ...     data = Stored(f"{folder}/x.npy", np.array([0, 1, 0]))
        ...     len(data), data[1]
        (3, (tensor([2., 3.], dtype=torch.float64), tensor(1)))
    """

    def __init__(
        self, inputs: str | os.PathLike[str] | npt.NDArray[Any], targets: str | os.PathLike[str] | npt.NDArray[Any]
    ) -> None:
        self.arrays = tuple(_opened(what, given) for what, given in (("inputs", inputs), ("targets", targets)))
        if len(self.arrays[0]) != len(self.arrays[1]):
            raise DataError(
                f"there are {len(self.arrays[0])} inputs and {len(self.arrays[1])} targets: each record has one of both"
            )
        self._read = 0

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        inputs, targets = self.rows(np.array([number % len(self)]))
        return inputs[0], targets[0]

    def rows(self, numbers: npt.NDArray[np.int64] | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The records of these numbers as two tensors, copied."""
        copied = isinstance(numbers, np.ndarray)  # numpy's own indexing by numbers has copied them
        parts = (np.asarray(array[numbers]) if copied else np.array(array[numbers]) for array in self.arrays)
        inputs, targets = (torch.from_numpy(part) for part in parts)
        self._read += inputs.nbytes + targets.nbytes + (len(targets) * _AROUND if copied else 0)
        if self._read > _HELD:
            self.let_go()
        return inputs, targets

    def let_go(self) -> None:
        """Hand what was mapped back to the operating system, which keeps it in its own cache as long as it likes."""
        self._read = 0
        for array in self.arrays:
            base: Any = array.base
            while isinstance(base, np.ndarray):
                base = base.base
            if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and array.flags.writeable is False:
                base.madvise(mmap.MADV_DONTNEED)


def _opened(what: str, given: Any) -> npt.NDArray[Any]:
    array = np.load(given, mmap_mode="r", allow_pickle=False) if isinstance(given, str | os.PathLike) else given
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise DataError(f"{what} must be a file of numpy.save, or an array with a row for each record, not {type(given).__name__}")
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} are of type {array.dtype}: they must be numbers")
    return array
