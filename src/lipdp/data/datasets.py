"""The datasets by name: which there are, what is public about them, and how they are loaded."""

from __future__ import annotations

import os
from types import MappingProxyType

from lipdp._checks import choose
from lipdp.data.adbench import ADBENCH
from lipdp.data.cifar10 import CIFAR10
from lipdp.data.files import data_root
from lipdp.data.info import Availability, DatasetInfo, Loaded, Source
from lipdp.data.mnist import DIGITS, FASHION_MNIST, MNIST
from lipdp.data.text import IMDB

__all__ = ["SOURCES", "available", "info", "load", "names"]

_ALL: tuple[Source, ...] = (DIGITS, MNIST, FASHION_MNIST, CIFAR10, IMDB, *ADBENCH)
SOURCES = MappingProxyType({source.info.name: source for source in _ALL})


def names() -> tuple[str, ...]:
    """The names that `load` knows."""
    return tuple(SOURCES)


def available(root: str | os.PathLike[str] | None = None) -> dict[str, Availability]:
    """For each name, whether it can be loaded without the network, and where it is or would be put.

    Only looks whether the files are there; `load` checks what is in them.

    Args:
        root: the folder that holds one folder per dataset; by default as for `load`.
    """
    folder = data_root(root)
    return {name: source.availability(folder) for name, source in SOURCES.items()}


def _source(name: str) -> Source:
    # Publishers write Fashion-MNIST; Python and folders here fashion_mnist.
    return SOURCES[choose("dataset", name, SOURCES)]


def info(name: str) -> DatasetInfo:
    """What is public about a dataset: its shape, classes and sizes. Reads none of it.

    Args:
        name: one of `names()`; case, dashes and underscores do not matter.

    >>> import lipdp.data
    >>> lipdp.data.info("mnist").train_size
    60000
    """
    return _source(name).info


def load(name: str, *, root: str | os.PathLike[str] | None = None, download: bool = True) -> Loaded:
    """Load a dataset: `train, test, metadata`. Case, dashes and underscores of its name do not matter.

    `train` and `test` are `TensorDataset`s of float32 images in [0, 1], shape (N, C, H, W), and int64 labels;
    `metadata` is a `DatasetInfo`. The pixels are as published, only divided by the largest grey level: no
    normalisation by statistics of the data, which would have to be paid for in privacy. Tables are float32 rows in
    their own units; reviews ("imdb") are int64 numbers of hashed words (`lipdp.data.text.hashed_words`).

    Files are looked for under `root`, else under $LIPDP_DATA, else in the user's cache folder, in a folder of the
    dataset's name. Missing ones are downloaded there, unless `download` is False. All are checked when read.

    Args:
        name: one of `names()`.
        root: the folder that holds one folder per dataset.
        download: whether missing files may be fetched; without it they are an error.

    >>> import lipdp.data
    >>> train, test, metadata = lipdp.data.load("digits")
    >>> len(train), len(test), metadata.classes, metadata.shape
    (1438, 359, 10, (1, 8, 8))
    """
    return _source(name).load(data_root(root), download=download)
