"""Records as people keep them: named columns (Hugging Face's datasets, tokenized texts), and arrays on disk, however large."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lipdp._checks import discreet, whole
from lipdp.errors import ConfigurationError, DataError

_IGNORED = -100  # what torch's losses leave out among token labels


class Columns(Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """A dataset whose records are dicts, or pairs of a dict and a target, as (dict of tensors, target).

    With ``length``, sequences are cut or padded to that many positions, and a mask says which of them are real. The length is a
    public constant and not that of the longest record of a batch: else a long record would change what the model computes for the
    others, and with it the sensitivity.

    Args:
        dataset: records with names: a Hugging Face ``Dataset``, a list of dicts.
        inputs: the columns that the model gets, by name; by default all but the target.
        target: the column with the targets; unused where records are pairs.
        length: positions that every sequence (a column of one dimension) gets; ``None``: they have one length already.
        pad: what fills the rest, one number or one for each column. Token labels are filled with −100, which losses leave out.
        mask: name of a column to make, 1 for real positions and 0 for the rest, unless there is one; ``None`` for none.

    Example:
        >>> texts = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}]
        >>> Columns(texts, length=2)[1]
        ({'input_ids': tensor([8, 0]), 'attention_mask': tensor([1, 0])}, tensor(0))
    """

    def __init__(
        self,
        dataset: Any,
        inputs: Sequence[str] | None = None,
        target: str = "label",
        *,
        length: int | None = None,
        pad: float | Mapping[str, float] = 0,
        mask: str | None = "attention_mask",
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(dataset, Mapping):
            raise ConfigurationError(f"{type(dataset).__name__} has no records by number: pass a dataset, e.g. dataset['train']")
        if hasattr(dataset, "iloc"):
            raise ConfigurationError(
                f"a {type(dataset).__name__} is a table: frame.to_dict('records') are its records. PrivateClassifier takes tables"
            )
        if inputs is not None and (isinstance(inputs, str) or not inputs):
            raise ConfigurationError(f"inputs are names of columns, e.g. ('input_ids', 'attention_mask'), not {inputs!r}")
        self.dataset, self.target, self.mask = dataset, target, mask
        self.inputs = None if inputs is None else tuple(inputs)
        self.length = None if length is None else whole("length", length, least=1)
        self.pad = pad

    def __len__(self) -> int:
        return len(self.dataset)

    @discreet
    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        columns, target = self._divided(self.dataset[number])
        names = [name for name in columns if name != self.target] if self.inputs is None else self.inputs
        missing = [name for name in names if name not in columns]
        if missing and missing != [self.mask]:
            raise DataError(f"a record has no column {missing[0]!r}; it has {', '.join(map(str, columns))}")
        values = {name: _tensor(name, columns[name]) for name in names if name in columns}
        if self.length is None:
            return values, _tensor(self.target, target)
        return self._fitted(values), self._filled(_tensor(self.target, target), _IGNORED)

    def _divided(self, record: Any) -> tuple[Mapping[str, Any], Any]:
        if isinstance(record, tuple | list) and len(record) == 2 and isinstance(record[0], Mapping):
            return record[0], record[1]
        if not isinstance(record, Mapping):
            raise DataError(f"a record of Columns is a dict, or a pair of a dict and a target, not a {type(record).__name__}")
        if self.target not in record:
            raise DataError(f"a record has no column {self.target!r} for its target; it has {', '.join(map(str, record))}")
        return record, record[self.target]

    def _fitted(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sequences of one length, with a mask."""
        assert self.length is not None
        sizes = {len(value) for value in values.values() if value.ndim == 1}
        fitted = {name: self._filled(value, self._pad_of(name)) for name, value in values.items()}
        wanted = self.mask is not None and (self.inputs is None or self.mask in self.inputs)
        if wanted and self.mask not in fitted and sizes:
            if len(sizes) > 1:
                raise DataError("the sequences of a record have several lengths, so no mask can be made: give one")
            fitted[str(self.mask)] = (torch.arange(self.length) < sizes.pop()).long()
        return fitted

    def _pad_of(self, name: str) -> float:
        return self.pad.get(name, 0) if isinstance(self.pad, Mapping) else 0 if name == self.mask else self.pad

    def _filled(self, value: torch.Tensor, pad: float) -> torch.Tensor:
        if value.ndim != 1:
            return value
        assert self.length is not None
        kept = value[: self.length]
        return torch.cat([kept, kept.new_full((self.length - len(kept),), pad)])


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # without torch's text, which may show the value
        raise DataError(
            f"column {name!r} holds a {type(value).__name__}, which is no array of numbers. Choose other columns (inputs=…), or "
            "make numbers of it first (a tokenizer)."
        ) from None


_MAPPED = 1 << 27  # bytes that may stay mapped after they were read
_AROUND = 1 << 16  # bytes that a system maps around a row that was asked for


class Stored(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of two arrays on disk, inputs and targets, as (input, target): memory stays flat, whatever their size.

    Batches are copies: what was read is handed back to the operating system, so that the process does not seem to grow by all that
    it has ever looked at. Large samples are read in the order of the file, part by part, several at once where they are known
    (:meth:`several`): what the system maps for a row of one serves its neighbours in the others. Nothing is written to the files.

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
        if isinstance(numbers, np.ndarray):
            return self.several([numbers])[0]
        inputs, targets = (torch.from_numpy(np.array(array[numbers])) for array in self.arrays)
        self._note_read(inputs.nbytes + targets.nbytes)
        return inputs, targets

    def several(self, samples: Sequence[npt.NDArray[np.int64]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The records of several samples, each as two tensors, in one pass over the files."""
        if any(len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self) for numbers in samples):
            raise IndexError(f"a number of a record that is not among these {len(self)}")
        orders = [None if bool((numbers[1:] >= numbers[:-1]).all()) else np.argsort(numbers, kind="stable") for numbers in samples]
        ascending = [numbers if order is None else numbers[order] for numbers, order in zip(samples, orders, strict=True)]
        inputs, targets = (
            [torch.from_numpy(_back(rows, order)) for rows, order in zip(self._swept(array, ascending), orders, strict=True)]
            for array in self.arrays
        )
        return list(zip(inputs, targets, strict=True))

    @property
    def record_bytes(self) -> int:
        """What one record takes."""
        return sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in self.arrays)

    def _swept(self, array: npt.NDArray[Any], samples: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[Any]]:
        """The rows of these ascending numbers, read from the first part of the array to the last; of many little stays mapped."""
        rows = [np.empty((len(numbers), *array.shape[1:]), dtype=array.dtype) for numbers in samples]
        width = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
        mapped = min(array.nbytes, sum(map(len, samples)) * (_AROUND + width))
        part = len(array) if mapped <= _MAPPED else max(1, _MAPPED // width)
        plain = np.asarray(array)
        for start in range(0, len(array), max(1, part)):
            for numbers, into in zip(samples, rows, strict=True):
                first, last = np.searchsorted(numbers, (start, start + part))
                if first == last:
                    continue
                if plain.flags.c_contiguous:  # any other array would be copied as a whole
                    np.take(plain, numbers[first:last], axis=0, out=into[first:last], mode="clip")  # which writes without a copy
                else:
                    into[first:last] = plain[numbers[first:last]]
            if part < len(array):
                _unmap(array, start, start + part)
        if part == len(array):
            self._note_read(mapped)
        return rows

    def _note_read(self, size: int) -> None:
        self._read += size
        if self._read > _MAPPED:
            self.let_go()

    def let_go(self) -> None:
        """Hand what was mapped back to the operating system, which keeps it in its own cache as long as it likes."""
        self._read = 0
        for array in self.arrays:
            _unmap(array, 0, len(array))


def _unmap(array: npt.NDArray[Any], start: int, stop: int) -> None:
    """Hand back the pages of these rows of an array in a file, as far as they are theirs alone; to the end, all of them."""
    base: Any = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED") or array.flags.writeable is not False:
        return
    if (start, stop) == (0, len(array)) or not array.flags.c_contiguous:
        base.madvise(mmap.MADV_DONTNEED)
        return
    begin = array.ctypes.data - np.frombuffer(base, dtype=np.uint8).ctypes.data
    width = array.nbytes // len(array)
    pages = ((begin + row * width) // mmap.PAGESIZE * mmap.PAGESIZE for row in (start, min(stop, len(array))))
    first, last = pages
    if first < last:
        base.madvise(mmap.MADV_DONTNEED, first, last - first)


def _back(rows: npt.NDArray[Any], order: npt.NDArray[np.int64] | None) -> npt.NDArray[Any]:
    """Sorted rows in the order that was asked for; ``None``: that is theirs."""
    if order is None:
        return rows
    found = np.empty_like(rows)
    found[order] = rows
    return found


def _opened(what: str, given: Any) -> npt.NDArray[Any]:
    array = np.load(given, mmap_mode="r", allow_pickle=False) if isinstance(given, str | os.PathLike) else given
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise DataError(f"{what} must be a file of numpy.save, or an array with a row for each record, not {type(given).__name__}")
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} are of type {array.dtype}: they must be numbers")
    return array
