"""The batches of a run, read ahead by worker processes: while one step is computed, the next ones are fetched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lipdp._checks import whole
from lipdp.data.records import Stored
from lipdp.training.batches import Batch, LazyBatch, gather, gather_lazily
from lipdp.training.known import stored_tensors

__all__ = ["read_ahead"]

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
