"""From records to fixed-shape microbatches: gathering a Poisson sample, cutting it up, padding what is left."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lipdp._checks import discreet, kind_of
from lipdp._sums import MOST_ROWS
from lipdp.data.records import Stored
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.graphs import is_large, is_recording
from lipdp.inputs import Inputs, leaves, mapped, per_row, plain, rows_of
from lipdp.planning.settings import usual_seats
from lipdp.program.dtypes import Types
from lipdp.training.query import Turn
from lipdp.training.seats import Shuffled

Batch = tuple[Inputs, torch.Tensor]


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
        return self.stored.index_select(0, self.numbers(numbers.to(self._chosen.device, non_blocking=True)))

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """By which numbers the stored tensor has these rows."""
        return self._chosen.index_select(0, rows)


LazyBatch = tuple[Any, torch.Tensor]
"""Inputs whose leaves are tensors or :class:`Rows`, and targets."""

# What Hugging Face's datasets call the targets.
_TARGETS = ("label", "labels")

_MOST_ROWS = 2048
# On a processor activations should stay in its cache (256 rows were 1.5 times as fast as 2048 on a small convolutional network; up
# to 640 one microbatch is as fast as two, or faster: 110 ms a step instead of 130 in three, clipped, of Opacus' MNIST example),
# but microbatches of small rows cost more in calls than in arithmetic (2048 rows were 1.5 to 2.5 times as fast as 256 on tables).
_ROWS_ON_CPU = 32, 640, MOST_ROWS  # at least, where nothing is known, at most
_ENTRIES_ON_CPU = 2**20
_PRODUCTS_ON_CPU = 2**26
# For passes over a whole dataset, some of them in float64.
_ENTRIES_AT_ONCE, _ENTRIES_AT_ONCE_ELSEWHERE = 2**19, 2**26


def check_dataset(dataset: Any) -> int:
    """The number of records of a map-style dataset; refuses what would bring sampling of its own."""
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "a DataLoader brings its own sampling (shuffled, weighted …), and the guarantee is for Poisson sampling. Pass its "
            "dataset: loader.dataset."
        )
    kind = _what_is_no_dataset(dataset)
    if kind:
        raise ConfigurationError(
            f"the dataset is {kind}, and records are pairs (input, target): torch.utils.data.TensorDataset(inputs, targets) makes "
            "a dataset of two tensors (torch.as_tensor makes them). lipdp.PrivateClassifier takes arrays, DataFrames and folders"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigurationError(
            f"{type(dataset).__name__} can't be sampled record by record: pass a dataset with __len__ and __getitem__, e.g. a "
            "torch.utils.data.TensorDataset."
        )
    if isinstance(dataset, Mapping):
        raise ConfigurationError(
            f"{type(dataset).__name__} is a dict of {', '.join(map(str, list(dataset)[:4]))}, not a dataset: pass one of its "
            "parts, e.g. dataset['train']."
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty: it has no records")
    _check_numbers(dataset)
    return len(dataset)


def _check_numbers(dataset: Any) -> None:
    """Of a Subset: they are whole numbers of records that are there. Another class may number its records as it likes."""
    if not isinstance(dataset, Subset) or type(dataset).__getitem__ is not Subset.__getitem__:
        return
    try:
        numbers = torch.as_tensor(dataset.indices)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.zeros(1)
    if numbers.numel() and (numbers.ndim != 1 or numbers.dtype not in _WHOLE):
        raise DataError(
            f"the indices of a Subset are {kind_of(dataset.indices)}, not whole numbers in one dimension: of a mask take "
            "mask.nonzero().flatten(), else range(...), a list of ints or a tensor of int64."
        )
    if numbers.numel() and int(numbers.min()) < 0:
        raise DataError("a Subset has negative indices: count records from 0 (the last one is len(dataset) - 1)")
    if numbers.numel() and hasattr(dataset.dataset, "__len__") and int(numbers.max()) >= (held := len(dataset.dataset)):
        raise DataError(f"a Subset has numbers of records beyond the {held} of its dataset")
    _check_numbers(dataset.dataset)


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _what_is_no_dataset(given: Any) -> str:
    """What people have in the place of a dataset: arrays, a pair of them, a table, a path. Nothing, where it may be one."""
    if isinstance(given, torch.Tensor | np.ndarray | str | os.PathLike) or hasattr(given, "iloc"):
        return kind_of(given)
    if isinstance(given, tuple | list) and len(given) == 2 and all(getattr(part, "ndim", 0) > 0 for part in given):
        return f"a {type(given).__name__} of two arrays"
    return ""


def gather(dataset: Dataset[Any], indices: torch.Tensor) -> Batch:
    """The records at ``indices`` as (inputs, targets) of the types that they have, also when there are none of them.

    A record is a pair (input, target), its input a tensor, array or number, or a tuple or dict of such; or a dict with a column
    "label" or "labels". Of a TensorDataset of more than two tensors the last is the target, the others are inputs.
    """
    # The short ways are for torch's own classes: a subclass with a __getitem__ of its own gives other records.
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return gather(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.long)[indices])
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        # index_select copies whole rows: several times as fast as tensor[indices] on a processor.
        batch: Batch = as_batch([tensor.index_select(0, indices.to(tensor.device)) for tensor in dataset.tensors])
        return batch
    if type(dataset) is Stored:
        return dataset.rows(indices.numpy())
    # An empty sample still needs a shape: any record has it.
    return stack_records(records_of(dataset, indices.tolist() or [0]), len(indices))


@discreet
def records_of(dataset: Any, numbers: list[int]) -> Sequence[Any]:
    """Some records, fetched at once where the dataset can do that (Hugging Face's can, from Arrow).

    ``__getitems__`` counts only where it is defined beside ``__getitem__`` or later: one that was inherited gives other records
    than a ``__getitem__`` that a subclass has replaced.
    """
    defining = {
        name: next((place for place, kind in enumerate(type(dataset).__mro__) if name in vars(kind)), None)
        for name in ("__getitem__", "__getitems__")
    }
    one, many = defining["__getitem__"], defining["__getitems__"]
    if many is not None and one is not None and many <= one:
        items: Sequence[Any] = dataset.__getitems__(numbers)
        return items
    return [dataset[number] for number in numbers]


def gather_tensors(dataset: Dataset[Any], indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`gather`, for what works on one input tensor: proofs, certificates, statistics."""
    inputs, targets = gather(dataset, indices)
    if not isinstance(inputs, torch.Tensor):
        raise UnsupportedError(
            "these records have several inputs, and this works on one input tensor only: proofs, fixed layers that are applied "
            "once, certificates and audits are of models of one input. Clipping methods train on several."
        )
    return inputs, targets


def as_batch(columns: Sequence[Any]) -> Any:
    """Columns of a TensorDataset as (inputs, targets): the last one are the targets."""
    if len(columns) < 2:
        raise DataError(f"a record must be a pair (input, target) of tensors; this dataset gives {len(columns)} parts")
    return columns[0] if len(columns) == 2 else tuple(columns[:-1]), columns[-1]


@discreet
def stack_records(records: Sequence[Any], count: int | None = None) -> Batch:
    """Some records, at least one, as a batch of the first ``count`` of them."""
    pairs = [_pair(record) for record in records]
    inputs, targets = (_stacked(what, [pair[k] for pair in pairs]) for k, what in enumerate(("input", "target")))
    if not isinstance(targets, torch.Tensor):
        raise DataError(f"a record's target must be one tensor, array or number; this dataset gives a {type(pairs[0][1]).__name__}")
    return mapped(lambda leaf: leaf[:count], inputs), targets[:count]


def _pair(record: Any) -> tuple[Any, Any]:
    """A record's input and target."""
    if isinstance(record, Mapping):
        targets = [name for name in _TARGETS if name in record]
        if len(targets) != 1 or len(record) < 2:
            raise DataError(
                "a record must be a pair (input, target), or a dict of inputs with one column 'label' or 'labels'; this has "
                f"{', '.join(map(str, record))}. Choose with lipdp.data.Columns(dataset, inputs=(…), target=…)."
            )
        return {name: value for name, value in record.items() if name != targets[0]}, record[targets[0]]
    if not isinstance(record, tuple | list):
        raise DataError(f"a record must be a pair (input, target); this dataset gives a {type(record).__name__}")
    if len(record) != 2:
        raise DataError(
            f"a record must be a pair (input, target); this dataset gives {len(record)} parts. Several inputs are one tuple or "
            "dict: ((ids, mask), target)."
        )
    return record[0], record[1]


def _stacked(what: str, values: list[Any]) -> Any:
    """The inputs, or the targets, of some records: tensors, arrays or numbers, each of one shape in all records."""
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(value, Mapping) or value.keys() != first.keys() for value in values):
            raise DataError(f"the {what}s of these records are dicts, and not all of the same keys")
        return plain({key: _stacked(f"{what} '{key}'", [value[key] for value in values]) for key in first})
    if _is_sequence_of_inputs(first):
        if any(not isinstance(value, tuple | list) or len(value) != len(first) for value in values):
            raise DataError(f"the {what}s of these records are tuples, and not all of the same length")
        return tuple(_stacked(f"{what} {k}", [value[k] for value in values]) for k in range(len(first)))
    if isinstance(first, np.ndarray) and all(type(v) is type(first) and v.dtype == first.dtype for v in values):
        alike = first.dtype.kind in "biuf" and all(value.shape == first.shape for value in values)
        if alike:  # several times as fast as one tensor for each record
            return torch.from_numpy(np.stack(values))
    try:
        stacked = default_collate([np.asarray(value) if isinstance(value, tuple | list) else value for value in values])
    except (TypeError, RuntimeError, ValueError):  # without torch's text: it shows sizes of a record, and which one it is
        shapes = {np.shape(value) for value in values if isinstance(value, torch.Tensor | np.ndarray | list | tuple)}
        ragged = " Records of different lengths: lipdp.data.Columns(dataset, length=…) pads them to one." if len(shapes) > 1 else ""
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DataError(
            f"the {what}s of these records can't be put into one tensor: they are of type {kinds}"
            f"{', in several shapes' if len(shapes) > 1 else ''}. Give tensors, arrays or numbers, all of one shape.{ragged}"
        ) from None
    if not isinstance(stacked, torch.Tensor):
        kind = type(values[0]).__name__
        hint = "number the classes from 0" if isinstance(values[0], str) and what == "target" else "make tensors of them"
        if isinstance(values[0], str) and what != "target":
            hint = "tokenize it, and choose the columns with lipdp.data.Columns"
        raise DataError(f"a record's {what} must be a tensor, an array or a number; this dataset gives a {kind}: {hint}")
    return stacked


def _is_sequence_of_inputs(value: Any) -> bool:
    """A tuple or list of tensors, arrays or further structure; of numbers (or lists of them), it is an array itself."""
    return isinstance(value, tuple | list) and any(isinstance(part, torch.Tensor | np.ndarray | Mapping | tuple) for part in value)


def gather_lazily(dataset: Dataset[Any], indices: torch.Tensor) -> LazyBatch:
    """As :func:`gather`; inputs that are stored as one tensor are only gathered where they are sliced."""
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return gather_lazily(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.long)[indices])
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        inputs, targets = as_batch(dataset.tensors)
        rows = mapped(lambda stored: Rows(stored, indices, shuffled=isinstance(dataset, Shuffled)), inputs)
        return rows, targets.index_select(0, indices.to(targets.device))
    return gather(dataset, indices)


def slices(dataset: Dataset[Any], rows: int) -> Iterator[Batch]:
    """All records in their order, ``rows`` at once; of stored tensors they are views."""
    stored = isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__
    size = check_dataset(dataset)
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        if type(dataset) is Stored:
            yield dataset.rows(slice(start, stop))
        elif stored:
            yield as_batch([tensor[start:stop] for tensor in dataset.tensors])  # type: ignore[attr-defined]
        else:
            yield gather(dataset, torch.arange(start, stop))


def check_batch(inputs: Any, targets: Any, shape: tuple[int, ...] | None) -> None:
    """Refuses what is no batch of examples of ``shape``; ``None``: of any."""
    parts = leaves(inputs)
    usual = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if usual and inputs.ndim and targets.ndim and len(inputs) == len(targets) and shape in (None, inputs.shape[1:]):
        return
    if not parts or not all(isinstance(part, torch.Tensor | Rows) for part in parts) or not isinstance(targets, torch.Tensor):
        kinds = " and ".join(dict.fromkeys(type(part).__name__ for part in (*parts, targets)))
        raise DataError(f"a batch is a tensor, or a tuple or dict of tensors, and a tensor of targets, not {kinds}")
    if any(part.ndim == 0 or len(part) != len(targets) for part in parts if targets.ndim) or targets.ndim == 0:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise DataError(f"inputs of shape {shapes} and targets of shape {tuple(targets.shape)}: all need one row for each example")
    # Bounds are those of examples of one shape: on larger images a bias, say, has a larger gradient.
    if shape is not None and (len(parts) > 1 or tuple(parts[0].shape[1:]) != shape):
        given = ", ".join(str(tuple(part.shape[1:])) for part in parts)
        raise DataError(f"the plan is for examples of shape {shape}, not {given}")


def check_finite(
    dataset: Dataset[Any],
    chunk: int | None = None,
    types: Types | None = None,
    progress: Callable[[int, int], None] | None = None,
    check_targets: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Refuses a dataset with a NaN or an infinity in some record: no bound on a gradient holds for it.

    With ``types``, records are looked at as the model and the loss will get them: 1e300 is finite, and infinite in float32.
    ``progress(done, total)`` is told as it goes; ``check_targets`` gets targets.
    """
    size, start = check_dataset(dataset), 0
    for inputs, targets in slices(dataset, chunk or rows_at_once(entries_of(dataset), torch.device("cpu"))):
        converted = (inputs, targets) if types is None else (types.inputs(inputs), types.targets(targets))
        for given, part in zip(leaves((inputs, targets)), leaves(converted), strict=True):
            finite = _finite_rows(part)
            if finite is not None and not bool(finite.all()):
                beyond = "" if part.dtype == given.dtype else f", as {str(part.dtype).removeprefix('torch.')}"
                raise DataError(
                    f"a record contains a NaN or an infinity{beyond}, and there may be more: no sensitivity bound holds for it. "
                    "Remove or repair such records first; torch.isfinite tells which they are, to you alone."
                )
        if check_targets is not None:
            check_targets(targets)
        start += len(targets)
        if progress is not None:
            progress(start, size)


def entries_of(dataset: Dataset[Any]) -> int:
    """Numbers that make up the input of one record."""
    return sum(leaf.numel() for leaf in leaves(gather(dataset, torch.arange(1))[0]))


def even_rows(
    batch_size: int,
    device: torch.device,
    entries: int | None = None,
    products: int | None = None,
    *,
    whole: bool = False,
    ranks: int = 1,
) -> int:
    """Rows of a microbatch such that a step's seats fill a few of them evenly on each rank.

    On a processor the activations of a microbatch stay in its cache, but a microbatch is never so little work that starting it
    would take longer: the head of wide features is.

    Args:
        batch_size: records on average.
        device: where they are computed.
        entries: size of the largest activation of one example, where it is known.
        products: multiplications for one example, where they are known.
        whole: all records are in every batch, so its size does not vary.
        ranks: processes that share the seats.
    """
    limit = _MOST_ROWS
    if device.type == "cpu":
        least, usual, largest = _ROWS_ON_CPU
        least = least if products is None else max(least, _PRODUCTS_ON_CPU // max(1, products))
        limit = usual if entries is None else min(max(least, _ENTRIES_ON_CPU // max(1, entries)), largest)
    return divided(usual_seats(batch_size, whole=whole), limit, ranks)


def divided(seats: int, limit: int, ranks: int = 1) -> int:
    """Rows of a microbatch, at most ``limit``, such that as few as possible hold all seats, and none is computed nearly empty."""
    return math.ceil(seats / (ranks * math.ceil(seats / (ranks * limit))))


def rows_at_once(entries: int, device: torch.device) -> int:
    """How many examples to work on at once, of ``entries`` numbers each: what stays in a processor's cache, or fills a GPU."""
    return max(1, (_ENTRIES_AT_ONCE if device.type == "cpu" else _ENTRIES_AT_ONCE_ELSEWHERE) // max(1, entries))


def microbatches(
    inputs: Any,
    targets: torch.Tensor,
    size: int,
    device: torch.device,
    dtypes: tuple[Any, torch.dtype] | None = None,
    seats: torch.Tensor | None = None,
    *,
    check: bool = True,
    turn: Turn | None = None,
) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """(inputs, targets, mask) of exactly ``size`` rows each, converted to ``dtypes``: memory is capped and shapes never change.

    ``seats`` says by seat which record sits there (:mod:`lipdp.training.seats`); without it they sit in their order. Empty seats,
    and those that fill up the last microbatch, have copies of a record that sits in it, under mask 0, rather than zeros: a real
    record is something the model can evaluate without surprises. Records that are not finite get mask 0 too, and zeros in their
    place, since 0·NaN is NaN (``check=False``: that is left to whoever asked, see :func:`only_finite`). A microbatch in which
    nobody sits is left out, and so is one whose ``turn`` is another process's.
    """
    of_inputs, of_targets = dtypes or (mapped(lambda leaf: leaf.dtype, inputs), targets.dtype)
    kinds = zip(leaves(inputs), leaves(of_inputs), strict=True)
    views = [isinstance(leaf, Rows) and leaf.whole and leaf.dtype == dtype for leaf, dtype in kinds]
    places, taken = _places(rows_of(inputs) if seats is None else seats, size)
    for number, here in enumerate(places):
        if not taken[number] or not (turn is None or turn.starts(number)):
            continue
        there = here if device.type == "cpu" else here.to(device, non_blocking=True)  # one small transfer

        def taken_rows(
            stored: torch.Tensor | Rows, dtype: torch.dtype, here: torch.Tensor = here, there: torch.Tensor = there
        ) -> torch.Tensor:
            if isinstance(stored, Rows):
                rows = stored.take(here[0])
            else:
                rows = _rows(stored, there[0] if stored.device == device else here[0])
            return rows.to(device, non_blocking=True).to(dtype)  # bytes travel faster

        x, y = mapped(taken_rows, inputs, of_inputs), taken_rows(targets, of_targets)
        mask = there[1] != 0
        if check:
            x, y, mask = only_finite(x, y, mask)
        lent = [leaf for leaf, view in zip(leaves(x), views, strict=True) if view] if any(views) else []  # the dataset itself
        versions = list(map(_version, lent))
        yield x, y, mask
        if list(map(_version, lent)) != versions:
            raise UnsupportedError(
                "the model changes its input in place, and at sampling rate 1 that is the dataset itself, now changed. No "
                "step was taken. Let the first layer work on a copy (inplace=False), and load the data again."
            )


def _places(seats: int | torch.Tensor, size: int) -> tuple[torch.Tensor, list[bool]]:
    """By microbatch, (2, size): the number of the record on each seat, and whether it is its own; and whether somebody sits there.

    ``seats``: by seat, which record sits there; or how many records there are, one after another.
    """
    numbers = np.arange(seats) if isinstance(seats, int) else seats.numpy()
    by_seat = np.full((-(-len(numbers) // size), size), -1, dtype=np.int64)
    by_seat.reshape(-1)[: len(numbers)] = numbers
    taken = by_seat >= 0
    first = by_seat[np.arange(len(by_seat)), taken.argmax(1)]
    places = np.stack([np.where(taken, by_seat, first[:, None]), taken], 1)
    return torch.from_numpy(places), [bool(row.any()) for row in taken]


def gather_into(buffers: Sequence[torch.Tensor], inputs: torch.Tensor | Rows, targets: torch.Tensor, seats: torch.Tensor) -> bool:
    """Put the one microbatch of ``seats`` into ``buffers`` (for inputs, targets and mask), on the device where the inputs are.

    ``False``: nothing was done; they are not there, or not in one microbatch.
    """
    x, y, mask = buffers
    rows = inputs.stored if isinstance(inputs, Rows) else inputs
    there = rows.device == x.device and not (isinstance(inputs, Rows) and inputs.whole)
    if not there or (rows.shape[1:], targets.shape[1:], len(seats)) != (x.shape[1:], y.shape[1:], len(mask)):
        return False
    numbers = seats.numpy()
    taken = numbers >= 0
    first = taken.argmax()
    if not taken[first]:
        return False
    here = torch.empty(2, len(numbers), dtype=torch.int64, pin_memory=mask.is_cuda)  # a transfer that nobody waits for
    places = here.numpy()
    places[0], places[1] = np.where(taken, numbers, numbers[first]), taken
    chosen, sitting = here.to(mask.device, non_blocking=True).unbind()
    _gather(rows, inputs.numbers(chosen) if isinstance(inputs, Rows) else chosen, x)
    _gather(targets, chosen if targets.device == y.device else here[0], y)
    mask.copy_(sitting)
    return True


def _gather(stored: torch.Tensor, numbers: torch.Tensor, buffer: torch.Tensor) -> None:
    """Rows into a buffer of any device and type."""
    if (stored.device, stored.dtype) == (buffer.device, buffer.dtype):
        torch.index_select(stored.detach(), 0, numbers, out=buffer)
    else:
        buffer.copy_(stored.detach().index_select(0, numbers), non_blocking=True)


def only_finite(x: Any, y: torch.Tensor, mask: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The same with zeros, and mask 0, for the records that are not finite."""
    parts, known = leaves((x, y)), True
    rows = list(map(_finite_rows, parts))
    for finite in rows:
        if finite is not None:
            mask, known = mask & finite, False
    if known:
        return x, y, mask
    clean = map(_zero_where_not_finite, parts, rows)
    return mapped(lambda leaf: next(clean), x), next(clean), mask


def _rows(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return tensor.detach().index_select(0, numbers.to(tensor.device, non_blocking=True))


def _version(tensor: torch.Tensor) -> int:
    """How often it, or what it is a view of, has been written to; one of inference mode does not count."""
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
    # Ten times as fast as asking each entry, and without a copy of them.
    return torch.isfinite(torch.linalg.vector_norm(real.detach().reshape(len(part), -1), math.inf, 1))


def _zero_where_not_finite(part: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
    """The rows with zeros in place of those that are not finite."""
    return part if finite is None else torch.where(per_row(finite, part), part, 0.0)
