"""How a run reads its records: what they are known by, and batches read ahead.

Digests under the run's key tell its records and batches from other ones.

The records are read once; their tensors, where they are rows of some, are known from then on as long as nobody writes to them.
Worker processes read ahead: while one step is computed, the next batches are fetched.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lipdp._checks import whole
from lipdp.data.records import Stored
from lipdp.digest import Tag, content_digest
from lipdp.errors import LipdpWarning
from lipdp.inputs import leaves, named_leaves
from lipdp.privacy.randomness import derive_key
from lipdp.training.batches import Batch, LazyBatch, Rows, check_dataset, gather, gather_lazily, slices

Progress = Callable[[int, int], None]
"""Called with the number of records read so far, and of all."""

_ENTRIES = 2**22  # read at a time
_LOOKED_AT = 4  # records that are read twice


def digest_records(dataset: Any, key: bytes, progress: Progress | None = None) -> bytes:
    """32 bytes that stand for all records in their order, their types and shapes: each is read once.

    Where records change from one reading to the next (a dataset that augments), they can't be told from others: that is said, and
    the digest is that of their number alone.
    """
    size = check_dataset(dataset)
    first = gather(dataset, torch.arange(min(size, _LOOKED_AT)))
    again = gather(dataset, torch.arange(min(size, _LOOKED_AT)))
    if not _same(first, again):
        warnings.warn(
            f"the records of this {type(dataset).__name__} change from one reading to the next, so the run can't be bound to them, "
            "and steps that are done again after an interruption will be other releases. Let the dataset give records as they are, "
            "and pass augmentation= to lipdp.",
            LipdpWarning,
            stacklevel=4,
        )
        return unsteady_digest(dataset, key)
    tags = [Tag(derive_key(key, "tag", number)) for number in range(len(leaves(first)))]
    done = 0
    entries = sum(math.prod(part.shape[1:]) for part in leaves(first[0]))
    for batch in slices(dataset, max(1, _ENTRIES // max(1, entries))):
        for tag, part in zip(tags, leaves(batch), strict=True):
            tag.update(part)
        done += len(batch[1])
        if progress is not None:
            progress(done, size)
    kinds = [(str(part.dtype), tuple(part.shape[1:])) for part in leaves(first)]
    names = [name for name, _ in named_leaves(first[0])]
    told = (size, kinds) if names == [""] else (size, kinds, names)
    return derive_key(key, "records", *told, [tag.finish() for tag in tags])


def unsteady_digest(dataset: Any, key: bytes) -> bytes:
    """What stands for records that change."""
    return derive_key(key, "records that change", len(dataset))


def _same(a: Any, b: Any) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs
    )


def stored_tensors(dataset: Any) -> list[torch.Tensor]:
    """The tensors that a dataset's records are rows of; none where it is not known to be made of such."""
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return stored_tensors(dataset.dataset)
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return list(dataset.tensors)
    return []


def copied_sample(inputs: Any, targets: torch.Tensor, dataset: Any, samples: Iterable[tuple[int, torch.Tensor]]) -> int | None:
    """Which of these samples of the dataset the records are, by their values: a batch that was copied, moved or converted.

    ``None``: none of them. Of several that are alike, the first.
    """
    given = [part[slice(0, len(part))] if isinstance(part, Rows) else part for part in (targets, *leaves(inputs))]
    for number, chosen in samples:
        if len(chosen) == len(targets) and all(_are_records(given, dataset, chosen[:count]) for count in sorted({1, len(chosen)})):
            return number
    return None


def _are_records(given: list[torch.Tensor], dataset: Any, chosen: torch.Tensor) -> bool:
    """Whether the first rows are these records. Most others are told by one of them; all of a batch may take long to read."""
    drawn_inputs, drawn_targets = gather(dataset, chosen)
    drawn = [drawn_targets, *leaves(drawn_inputs)]
    return len(drawn) == len(given) and all(_are_equal(part[: len(chosen)], own) for part, own in zip(given, drawn, strict=True))


def _are_equal(given: torch.Tensor, drawn: torch.Tensor) -> bool:
    if len(given) != len(drawn) or given.numel() != drawn.numel():
        return False
    rows = given.detach().to(drawn.device).reshape(drawn.shape)  # flattened ones, or with one dimension more, are copies too
    return torch.equal(rows, drawn.to(given.dtype))


def layout(dataset: Any) -> str:
    """How records are kept, as far as :func:`batch_digest` makes a difference: rows of tensors (which of them on a device), some
    rows of such, or otherwise."""
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        chosen = torch.as_tensor(dataset.indices, dtype=torch.long)
        return f"subset {content_digest(chosen).hex()[:16]} of {layout(dataset.dataset)}"
    stored = stored_tensors(dataset)
    there = [str(number) for number, tensor in enumerate(stored) if tensor.device.type != "cpu"]
    return ("rows" if stored else "records") + (f", on a device {' '.join(there)}" if there else "")


def versions(tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Where they are and how often they were written to; two equal answers mean the same content, as far as torch knows."""
    return [(id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]


def batch_digest(inputs: Any, targets: torch.Tensor, key: bytes, known: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
    """What stands for a batch: parts known to the host, and tensors on a device, whose digest nobody should wait for.

    Rows of a ``known`` tensor, whose content a digest stands for already, are told by their numbers.
    """
    host: list[Any] = []
    on_device: list[torch.Tensor] = []
    for number, part in enumerate((*leaves(inputs), targets)):
        if isinstance(part, Rows) and any(part.stored is tensor for tensor in known):
            place = next(n for n, tensor in enumerate(known) if part.stored is tensor)
            host.append(("rows", place, Tag(derive_key(key, number)).update(part.chosen).finish(), len(part)))
            continue
        whole = part[slice(0, len(part))] if isinstance(part, Rows) else part
        host.append((str(whole.dtype), tuple(whole.shape)))
        if whole.device.type == "cuda":
            on_device.append(whole)
        else:
            host.append(Tag(derive_key(key, number)).update(whole).finish())
    return host, on_device


_AHEAD = 2  # batches that each worker has ready
_TOGETHER, _HELD = (
    8,
    1 << 25,
)  # batches of a file that are read in one pass, and bytes that they take, at most: the C library keeps so much


def read_ahead(dataset: Any, samples: Iterator[torch.Tensor], workers: int, device: torch.device) -> Iterator[LazyBatch]:
    """(inputs, targets) of each sample, in order.

    Args:
        dataset: a map-style dataset.
        samples: numbers of records, drawn by the engine: workers choose nothing, they only read.
        workers: processes that read; 0: this one does, when a batch is asked for, of files with the next ones. Rows of tensors in
            memory need none.
        device: where the batches go; for a GPU they are put into pinned memory.
    """
    if whole("workers", workers, least=0) == 0 and type(dataset) is Stored:
        yield from _in_sweeps(dataset, samples)
        return
    if workers == 0 or stored_tensors(dataset):
        for chosen in samples:
            yield gather_lazily(dataset, chosen)
        return
    yield from DataLoader(
        _Samples(dataset),
        batch_size=None,  # an item is a whole batch
        sampler=samples,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # of its workers' seeds: nobody else's draws move
    )


def _in_sweeps(dataset: Stored, samples: Iterator[torch.Tensor]) -> Iterator[LazyBatch]:
    """Several samples in one pass over the files."""
    for first in samples:
        together = min(_TOGETHER, _HELD // max(1, len(first) * dataset.record_bytes))
        chosen = [first, *itertools.islice(samples, max(0, together - 1))]
        yield from dataset.several([numbers.numpy() for numbers in chosen])


class _Samples(Dataset[Batch]):
    """Batches by the numbers of their records."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, chosen: torch.Tensor) -> Batch:
        return gather(self.dataset, chosen)
