"""What is said of a dataset: its description, whether it is on disk, and what every source of one offers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lipdp.errors import DataError

__all__ = ["Availability", "Bytes", "DatasetInfo", "Loaded", "Source", "images_dataset"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class DatasetInfo:
    """What is public about a dataset, known without reading a record of it."""

    name: str
    classes: int
    shape: tuple[int, ...]  # of one example
    train_size: int
    test_size: int
    class_names: tuple[str, ...]
    licence: str
    citation: str
    source: str


@dataclass(frozen=True)
class Availability:
    """Whether a dataset can be loaded without the network, and where it is or would be put."""

    name: str
    on_disk: bool
    path: Path | None  # None: it comes with an installed package


Loaded = tuple[TensorDataset, TensorDataset, DatasetInfo]


class Source(Protocol):
    """One dataset: how it is described, found and read. `registry.SOURCES` lists them."""

    @property
    def info(self) -> DatasetInfo:
        """The description; its name is the one given to `load`."""

    def availability(self, root: Path) -> Availability:
        """Whether every file is there; looks at names only, reads nothing."""

    def load(self, root: Path, *, download: bool) -> Loaded:
        """Read it, after fetching what is missing if `download`."""


def images_dataset(images: Bytes, labels: Bytes, *, largest: int, size: int, info: DatasetInfo) -> TensorDataset:
    """Grey levels 0…`largest` to float32 in [0, 1], labels to int64; refuses what contradicts `info`."""
    if images.shape != (size, *info.shape) or labels.shape != (size,):
        raise DataError(
            f"{info.name}: got images of shape {images.shape} and labels of shape {labels.shape}, but {size} examples "
            f"of shape {info.shape} should be there. Delete the files of this dataset and load it again."
        )
    if size and (int(labels.max()) >= info.classes or int(images.max()) > largest):
        raise DataError(
            f"{info.name}: a label reaches {labels.max()} and a pixel {images.max()}, but labels end at "
            f"{info.classes - 1} and pixels at {largest}. Delete the files of this dataset and load it again."
        )
    # div_ in place: the float images are four times the file, one copy of them is enough.
    pixels = torch.from_numpy(images).to(torch.float32).div_(largest)
    return TensorDataset(pixels, torch.from_numpy(labels).to(torch.int64))
