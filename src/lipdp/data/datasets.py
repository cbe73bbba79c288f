"""The datasets by name: which there are, what is public about them, and how they are loaded.

Those of ADBench (tables for anomaly detection, two classes, and a substitute for its census table) are read here.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lipdp._checks import choose
from lipdp.data.files import Availability, DatasetInfo, Loaded, RemoteFile, Source, data_root, ensure, stratified
from lipdp.data.published import CIFAR10, DIGITS, FASHION_MNIST, MNIST
from lipdp.data.text import IMDB
from lipdp.errors import DataError

# ADBench gives no split. Ours is public and fixed: a fifth of each class for the test, by this seed.
SPLIT_SEED = 0
_TEST_FRACTION = 0.2
_MIRRORS = ("https://github.com/Minqi824/ADBench/raw/main/adbench/datasets/Classical/",)


@dataclass(frozen=True)
class AnomalyTable:
    """One .npz file with X (rows × features) and y (1: anomaly). Features are as published, in their own units."""

    info: DatasetInfo
    file: RemoteFile
    one_hot: bool = False

    def availability(self, root: Path) -> Availability:
        """On disk when its file is."""
        path = root / "adbench" / self.file.name
        return Availability(self.info.name, path.is_file(), path)

    def load(self, root: Path, *, download: bool) -> Loaded:
        """Read, check the shape, split 80/20 stratified by `SPLIT_SEED`."""
        path = root / "adbench" / self.file.name
        if not self.file.mirrors and not path.exists():
            raise DataError(
                f"{self.info.name}: {self.file.name} is not at {path}, and it is not published in this form: it is a recoding of "
                f"{self.info.source}. Place the file there, or set LIPDP_DATA to a folder that holds adbench/{self.file.name}."
            )
        ensure(self.info.name, self.file, path, download=download)
        features, labels = self._read(path)
        train, test = stratified(labels, _TEST_FRACTION, SPLIT_SEED)
        parts = [TensorDataset(features[chosen], labels[chosen]) for chosen in (train, test)]
        return parts[0], parts[1], self.info

    def _read(self, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            with np.load(path, allow_pickle=False) as content:
                table, labels = content["X"], content["y"]
                if self.one_hot:
                    table = _one_hot(table, content["cardinality"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"{self.info.name}: {path} can't be read ({error}). Delete it and load again.") from error
        rows = self.info.train_size + self.info.test_size
        if table.shape != (rows, *self.info.shape) or labels.shape != (rows,):
            raise DataError(
                f"{self.info.name}: {path} holds a table of shape {table.shape} with labels of shape {labels.shape}, but "
                f"{(rows, *self.info.shape)} should be there. Delete it and load again."
            )
        return torch.from_numpy(table.astype(np.float32)), torch.from_numpy(labels.astype(np.int64))


def _one_hot(codes: Any, cardinality: Any) -> Any:
    """A block of indicator columns for each attribute; a missing value (255) gives a block of zeros."""
    return np.concatenate([codes[:, [j]] == np.arange(c) for j, c in enumerate(cardinality)], axis=1).astype(np.float32)


def _table(name: str, file: str, sha256: str, rows: int, features: int) -> AnomalyTable:
    test = round(rows * _TEST_FRACTION)
    return AnomalyTable(
        DatasetInfo(
            name=f"adbench/{name}",
            classes=2,
            shape=(features,),
            train_size=rows - test,
            test_size=test,
            class_names=("normal", "anomaly"),
            licence="ADBench: BSD-2-Clause; the source table has terms of its own",
            citation="S. Han, X. Hu, H. Huang, M. Jiang and Y. Zhao. ADBench: Anomaly Detection Benchmark. NeurIPS 2022.",
            source="https://github.com/Minqi824/ADBench",
        ),
        RemoteFile(file, sha256, _MIRRORS),
    )


_CENSUS_ROWS = 299_285
_CENSUS = AnomalyTable(
    DatasetInfo(
        name="adbench/census",
        classes=2,
        shape=(495,),
        train_size=_CENSUS_ROWS - round(_CENSUS_ROWS * _TEST_FRACTION),
        test_size=round(_CENSUS_ROWS * _TEST_FRACTION),
        class_names=("income up to 50,000", "income above 50,000"),
        licence="CC BY 4.0 (UCI Census-Income)",
        citation="UCI Census-Income (KDD). A substitute for ADBench's 9_census: all rows, the 33 nominal attributes one-hot, "
        "without the 7 numeric ones. Results are not comparable with published figures for 9_census.",
        source="UCI Census-Income (KDD)",
    ),
    RemoteFile("census_nominal33.npz", "0ebfff892f7153feb46f9d2789afe8c844ba30dd79d4b09e88dafdbfd3b641e9", ()),
    one_hot=True,
)

ADBENCH = (
    _table("aloi", "1_ALOI.npz", "792d0b5bd1147bfc9574a1974f157b39fbd4cbed8ecd04cf983fd554498ed477", 49_534, 27),
    _table("campaign", "5_campaign.npz", "74dd4d0072d6c6f1aabab63bc102f9633454f32bb936fa9bcfbd38f9f2386bcd", 41_188, 62),
    _table("celeba", "8_celeba.npz", "1cadfdea14cd8d240eca715a70c09c88af8621d086a7478c63f602d97adef0b5", 202_599, 39),
    _table("donors", "11_donors.npz", "5824ec854465f2763b4bfe3da1ae9f25ed5433b5c6e265d42e37da4f82a58679", 619_326, 10),
    _table("magic", "22_magic.gamma.npz", "0be375984d7af9ea7a63b12206c240840d8b7daa3607021c5fb8756407dd86f1", 19_020, 10),
    _table("shuttle", "32_shuttle.npz", "26900b0f6be45d9ddb7a402c9b2f956ceda42d23a8ca4cf4406b8bc1352823d1", 49_097, 9),
    _table("skin", "33_skin.npz", "d02aa01ffc1b6bf2b8b1ac250c90e8a8eacd0cefc962940ed5cc4bf5deac9c95", 245_057, 3),
    _table("yeast", "47_yeast.npz", "bbb15c873d78a4f6a589f46d0f75814595e2282d2ae7ce7779c750f276c3770d", 1_484, 8),
    _CENSUS,
)


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
