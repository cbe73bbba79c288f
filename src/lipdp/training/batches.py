"""From records to fixed-shape microbatches: gathering a Poisson sample, cutting it up, padding what is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lipdp.errors import ConfigurationError, DataError

__all__ = ["Batch", "check_dataset", "check_finite", "gather", "microbatches"]

Batch = tuple[torch.Tensor, torch.Tensor]


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
    """The records at ``indices`` as two tensors (inputs, targets), also when there are none of them."""
    # The short ways are for torch's own classes: a subclass with a __getitem__ of its own gives other records.
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return gather(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.long)[indices])
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        tensors = [tensor[indices.to(tensor.device)] for tensor in dataset.tensors]
    else:
        # An empty sample still needs a shape: any record has it.
        chosen = indices.tolist() or [0]
        records = [dataset[i] for i in chosen]
        if not all(isinstance(record, tuple | list) for record in records):
            raise DataError(f"a record must be a pair (input, target); this dataset gives a {type(records[0]).__name__}")
        tensors = [part[: len(indices)] for part in default_collate(records)]
    if len(tensors) != 2 or not all(isinstance(part, torch.Tensor) for part in tensors):
        raise DataError(f"a record must be a pair (input, target) of tensors; this dataset gives {len(tensors)} parts")
    return tensors[0], tensors[1]


def check_finite(dataset: Dataset[Any], chunk: int = 4096) -> None:
    """Refuses a dataset with a NaN or an infinity in some record: no bound on a gradient holds for it."""
    size = check_dataset(dataset)
    for start in range(0, size, chunk):
        finite = torch.ones(min(chunk, size - start), dtype=torch.bool)
        for part in gather(dataset, torch.arange(start, start + len(finite))):
            if part.is_floating_point() or part.is_complex():
                finite &= torch.isfinite(part).reshape(len(finite), -1).all(1).cpu()
        if not bool(finite.all()):
            raise DataError(
                f"record {start + int((~finite).nonzero()[0])} of {size} contains a NaN or an infinity, and there may be more: no "
                "sensitivity bound holds for it. Remove or repair such records first."
            )


def microbatches(
    inputs: torch.Tensor, targets: torch.Tensor, size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(inputs, targets, mask) of exactly ``size`` rows each: memory is capped and shapes never change.

    The last one is filled up with copies of its first row under mask 0, rather than zeros: a real record is something the
    model can evaluate without surprises. Records that are not finite get mask 0 too, and zeros in their place, since
    0·NaN is NaN. An empty batch has no microbatch.
    """
    count = inputs.shape[0]
    for number in range(math.ceil(count / size)):
        x = inputs[number * size : (number + 1) * size].to(device, non_blocking=True)
        y = targets[number * size : (number + 1) * size].to(device, non_blocking=True)
        present = x.shape[0]
        if present < size:
            x = torch.cat([x, x[:1].expand(size - present, *x.shape[1:])])
            y = torch.cat([y, y[:1].expand(size - present, *y.shape[1:])])
        mask = torch.arange(size, device=device) < present
        for part in (x, y):
            if part.is_floating_point():
                mask = mask & torch.isfinite(part).flatten(1).all(1) if part.ndim > 1 else mask & torch.isfinite(part)
        x, y = (_zero_where_dropped(part, mask) for part in (x, y))
        yield x, y, mask


def _zero_where_dropped(part: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if not part.is_floating_point():
        return part
    return torch.where(torch.isfinite(part) | mask.reshape(-1, *([1] * (part.ndim - 1))), part, torch.zeros_like(part))
