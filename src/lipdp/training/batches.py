"""From records to fixed-shape microbatches: gathering a Poisson sample, cutting it up, padding what is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lipdp._sums import MOST_ROWS
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.graphs import is_large, is_recording
from lipdp.program.dtypes import Types
from lipdp.training.seats import Shuffled, usual_seats
from lipdp.training.totals import Turn

__all__ = [
    "Batch",
    "LazyBatch",
    "Rows",
    "check_batch",
    "check_dataset",
    "check_finite",
    "even_rows",
    "gather",
    "gather_lazily",
    "microbatches",
    "only_finite",
    "rows_at_once",
    "slices",
]

Batch = tuple[torch.Tensor, torch.Tensor]


class Rows:
    """Some rows of a stored tensor, gathered a slice at a time: a batch of wide rows need not lie in memory as a whole."""

    def __init__(self, stored: torch.Tensor, chosen: torch.Tensor, *, shuffled: bool = False) -> None:
        # All of them in their order, as at sampling rate 1, are slices of the tensor itself.
        self.whole = len(chosen) == len(stored) and bool((chosen == torch.arange(len(chosen), device=chosen.device)).all())
        self.stored, self.chosen = stored, chosen
        self._chosen = chosen.to(stored.device)
        self.shape = torch.Size((len(chosen), *stored.shape[1:]))
        self.ndim, self.dtype, self.layout = stored.ndim, stored.dtype, stored.layout
        self.shuffled = shuffled and self.whole  # they lie in a secret random order

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self.stored[part] if self.whole else self.stored.index_select(0, self._chosen[part])

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers; a slice of the stored tensor itself, where that is what they are."""
        first, count = int(numbers[0]), len(numbers)
        if self.whole and int(numbers[-1]) == first + count - 1 and bool((numbers.diff() == 1).all()):
            return self.stored[first : first + count]
        return self.stored.index_select(0, self._chosen[numbers.to(self._chosen.device, non_blocking=True)])


LazyBatch = tuple[torch.Tensor | Rows, torch.Tensor]

_MOST_ROWS = 2048
# On a processor activations should stay in its cache (256 rows were 1.5 times as fast as 2048 on a small convolutional network),
# but microbatches of small rows cost more in calls than in arithmetic (2048 rows were 1.5 to 2.5 times as fast as 256 on tables).
_ROWS_ON_CPU = 32, 256, MOST_ROWS  # at least, where nothing is known, at most
_ENTRIES_ON_CPU = 2**20
# For passes over a whole dataset, some of them in float64.
_ENTRIES_AT_ONCE, _ENTRIES_AT_ONCE_ELSEWHERE = 2**19, 2**26


def check_dataset(dataset: Any) -> int:
    """The number of records of a map-style dataset; refuses what would bring sampling of its own."""
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "a DataLoader brings its own sampling (shuffled, weighted …), and the guarantee is for Poisson sampling. Pass its "
            "dataset: loader.dataset."
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigurationError(
            f"{type(dataset).__name__} can't be sampled record by record: pass a dataset with __len__ and __getitem__, e.g. a "
            "torch.utils.data.TensorDataset."
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty: there is nothing to train on")
    return len(dataset)


def gather(dataset: Dataset[Any], indices: torch.Tensor) -> Batch:
    """The records at ``indices`` as two tensors (inputs, targets) of the types that they have, also when there are none of them."""
    # The short ways are for torch's own classes: a subclass with a __getitem__ of its own gives other records.
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return gather(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.long)[indices])
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        # index_select copies whole rows: several times as fast as tensor[indices] on a processor.
        tensors = [tensor.index_select(0, indices.to(tensor.device)) for tensor in dataset.tensors]
    else:
        # An empty sample still needs a shape: any record has it.
        chosen = indices.tolist() or [0]
        records = [dataset[i] for i in chosen]
        if not all(isinstance(record, tuple | list) for record in records):
            raise DataError(f"a record must be a pair (input, target); this dataset gives a {type(records[0]).__name__}")
        if any(len(record) != 2 for record in records):
            raise DataError(f"a record must be a pair (input, target); this dataset gives {len(records[0])} parts")
        tensors = [_stacked(what, [r[k] for r in records])[: len(indices)] for k, what in enumerate(("input", "target"))]
    if len(tensors) != 2:
        raise DataError(f"a record must be a pair (input, target) of tensors; this dataset gives {len(tensors)} parts")
    return tensors[0], tensors[1]


def _stacked(what: str, values: list[Any]) -> torch.Tensor:
    """The inputs, or the targets, of some records as one tensor: tensors, arrays or numbers, all of one shape."""
    try:
        stacked = default_collate(values)
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"the {what}s of these records can't be put into one tensor ({error}). Give tensors, arrays or numbers, all of one "
            "shape."
        ) from error
    if not isinstance(stacked, torch.Tensor):
        kind = type(values[0]).__name__
        hint = "number the classes from 0" if isinstance(values[0], str) and what == "target" else "make tensors of them"
        raise DataError(f"a record's {what} must be a tensor, an array or a number; this dataset gives a {kind}: {hint}")
    return stacked


def gather_lazily(dataset: Dataset[Any], indices: torch.Tensor) -> LazyBatch:
    """As :func:`gather`; inputs that are stored as one tensor are only gathered where they are sliced."""
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return gather_lazily(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.long)[indices])
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__ and len(dataset.tensors) == 2:
        inputs, targets = dataset.tensors
        return Rows(inputs, indices, shuffled=isinstance(dataset, Shuffled)), targets.index_select(0, indices.to(targets.device))
    return gather(dataset, indices)


def slices(dataset: Dataset[Any], rows: int) -> Iterator[Batch]:
    """All records in their order, ``rows`` at once; of stored tensors they are views."""
    stored = isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__
    size = check_dataset(dataset)
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        if stored and len(dataset.tensors) == 2:  # type: ignore[attr-defined]
            yield tuple(tensor[start:stop] for tensor in dataset.tensors)  # type: ignore[attr-defined]
        else:
            yield gather(dataset, torch.arange(start, stop))


def check_batch(inputs: Any, targets: Any, shape: tuple[int, ...] | None) -> None:
    """Refuses what is no batch of examples of ``shape``; ``None``: of any."""
    if not isinstance(inputs, torch.Tensor | Rows) or not isinstance(targets, torch.Tensor):
        raise DataError(f"a batch is two tensors, not {type(inputs).__name__} and {type(targets).__name__}")
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise DataError(
            f"inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}: both need one row for each example"
        )
    # Bounds are those of examples of one shape: on larger images a bias, say, has a larger gradient.
    if shape is not None and tuple(inputs.shape[1:]) != shape:
        raise DataError(f"the plan is for examples of shape {shape}, not {tuple(inputs.shape[1:])}")


def check_finite(dataset: Dataset[Any], chunk: int | None = None, types: Types | None = None) -> None:
    """Refuses a dataset with a NaN or an infinity in some record: no bound on a gradient holds for it.

    With ``types``, records are looked at as the model and the loss will get them: 1e300 is finite, and infinite in float32.
    """
    size, start = check_dataset(dataset), 0
    entries = gather(dataset, torch.arange(1))[0].numel()
    for inputs, targets in slices(dataset, chunk or rows_at_once(entries, torch.device("cpu"))):
        for number, given in enumerate((inputs, targets)):
            part = given if types is None else types.targets(given) if number else types.inputs(given)
            finite = _finite_rows(part)
            if finite is not None and not bool(finite.all()):
                beyond = "" if part.dtype == given.dtype else f", as {str(part.dtype).removeprefix('torch.')}"
                raise DataError(
                    f"record {start + int((~finite).nonzero()[0])} of {size} contains a NaN or an infinity{beyond}, and there may "
                    "be more: no sensitivity bound holds for it. Remove or repair such records first."
                )
        start += len(inputs)


def even_rows(batch_size: int, device: torch.device, entries: int | None = None, *, whole: bool = False, ranks: int = 1) -> int:
    """Rows of a microbatch such that a Poisson batch, at four deviations above its mean, fills a few of them evenly on each rank.

    ``entries`` is the size of the largest activation of one example, where it is known; ``whole``: all records are in every batch,
    so its size does not vary.
    """
    most = usual_seats(batch_size, whole=whole)
    limit = _MOST_ROWS
    if device.type == "cpu":
        least, usual, largest = _ROWS_ON_CPU
        limit = usual if entries is None else min(max(least, _ENTRIES_ON_CPU // max(1, entries)), largest)
    return math.ceil(most / (ranks * math.ceil(most / (ranks * limit))))


def rows_at_once(entries: int, device: torch.device) -> int:
    """How many examples to work on at once, of ``entries`` numbers each: what stays in a processor's cache, or fills a GPU."""
    return max(1, (_ENTRIES_AT_ONCE if device.type == "cpu" else _ENTRIES_AT_ONCE_ELSEWHERE) // max(1, entries))


def microbatches(
    inputs: torch.Tensor | Rows,
    targets: torch.Tensor,
    size: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    seats: torch.Tensor | None = None,
    *,
    check: bool = True,
    turn: Turn | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(inputs, targets, mask) of exactly ``size`` rows each, converted to ``dtypes``: memory is capped and shapes never change.

    ``seats`` says by seat which record sits there (:mod:`lipdp.training.seats`); without it they sit in their order. Empty seats,
    and those that fill up the last microbatch, have copies of a record that sits in it, under mask 0, rather than zeros: a real
    record is something the model can evaluate without surprises. Records that are not finite get mask 0 too, and zeros in their
    place, since 0·NaN is NaN (``check=False``: that is left to whoever asked, see :func:`only_finite`). A microbatch in which
    nobody sits is left out, and so is one whose ``turn`` is another process's.
    """
    of_inputs, of_targets = dtypes or (inputs.dtype, targets.dtype)
    views = isinstance(inputs, Rows) and inputs.whole and of_inputs == inputs.dtype
    numbers = torch.arange(len(inputs)) if seats is None else seats
    for number, start in enumerate(range(0, len(numbers), size)):
        part = numbers[start : start + size].numpy()
        taken = part >= 0
        if not taken.any() or not (turn is None or turn.starts(number)):
            continue
        # The numbers of the records, and whether somebody sits there: one small transfer.
        places = np.zeros((2, size), dtype=np.int64)
        places[0] = part[taken][0]
        places[0, : len(part)] = np.where(taken, part, places[0, 0])
        places[1, : len(part)] = taken
        here = torch.from_numpy(places)
        there = here if device.type == "cpu" else here.to(device, non_blocking=True)
        x = inputs.take(here[0]) if isinstance(inputs, Rows) else _rows(inputs, there[0] if inputs.device == device else here[0])
        y = _rows(targets, there[0] if targets.device == device else here[0])
        x, y = x.to(device, non_blocking=True).to(of_inputs), y.to(device, non_blocking=True).to(of_targets)  # bytes travel faster
        mask = there[1] != 0
        if check:
            x, y, mask = only_finite(x, y, mask)
        version = _version(x)
        yield x, y, mask
        if views and _version(x) != version:
            raise UnsupportedError(
                "the model changes its input in place, and at sampling rate 1 that is the dataset itself, now changed. No "
                "step was taken. Let the first layer work on a copy (inplace=False), and load the data again."
            )


def only_finite(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with zeros, and mask 0, for the records that are not finite."""
    (x, finite_x), (y, finite_y) = _zero_where_not_finite(x), _zero_where_not_finite(y)
    for finite in (finite_x, finite_y):
        mask = mask if finite is None else mask & finite
    return x, y, mask


def _rows(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, numbers.to(tensor.device, non_blocking=True))


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor, or what it is a view of, has been written to; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _finite_rows(part: torch.Tensor) -> torch.Tensor | None:
    """Which rows hold finite numbers only; ``None`` where all of them are known to."""
    if not (part.is_floating_point() or part.is_complex()) or part.numel() == 0:
        return None
    real = torch.view_as_real(part) if part.is_complex() else part
    # One NaN or infinity makes the sum of all entries one; a sum of finite ones may overflow. Elsewhere than on a processor,
    # asking waits for the device: for large parts that is still cheaper than copying them.
    ask = part.device.type == "cpu" or (is_large(part) and not is_recording())
    if ask and math.isfinite(real.detach().sum(dtype=torch.promote_types(real.dtype, torch.float32))):
        return None
    return torch.isfinite(real.reshape(len(part), -1).abs().amax(1))  # ten times as fast as asking each entry


def _zero_where_not_finite(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows with zeros in place of those that are not finite, and which are; ``None`` where all of them are known to be."""
    finite = _finite_rows(part)
    if finite is None:
        return part, None
    return torch.where(finite.reshape(-1, *([1] * (part.ndim - 1))), part, torch.zeros_like(part)), finite
