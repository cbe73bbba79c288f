"""Loading by name: the embedded digits, the folders, and the real files where they are at hand."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.data import files
from lipdp.errors import ConfigurationError, DataError


def test_digits_end_to_end(tmp_path: Path) -> None:
    train, test, info = data.load("digits", root=tmp_path, download=False)
    assert isinstance(train, TensorDataset)
    assert (len(train), len(test)) == (info.train_size, info.test_size) == (1438, 359)
    for part in (train, test):
        images, labels = part.tensors
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert images.shape[1:] == info.shape == (1, 8, 8)
        assert images.min() == 0
        assert images.max() == 1
        assert set(labels.tolist()) == set(range(info.classes))
    assert len(info.class_names) == info.classes == 10
    data.require_finite(train)


def test_digits_split_is_fixed_disjoint_and_complete() -> None:
    from sklearn.datasets import load_digits

    (train, test, _), (again, _, _) = data.load("digits"), data.load("digits")
    assert torch.equal(train.tensors[0], again.tensors[0])
    rows = torch.cat([train.tensors[0], test.tensors[0]]).reshape(-1, 64).numpy() * 16
    assert sorted(map(bytes, rows.astype(np.uint8))) == sorted(map(bytes, load_digits().data.astype(np.uint8)))
    whole, held = np.bincount(load_digits().target), np.bincount(test.tensors[1].numpy())
    assert np.abs(held - 0.2 * whole).max() < 1
    # The published split: if this changes, results stop being comparable.
    fingerprint = hashlib.sha256(test.tensors[0].mul(16).to(torch.uint8).numpy().tobytes()).hexdigest()
    assert fingerprint == "11b00c7eba4e9139ce18a73bc68891a6ae2d1ea79455ca8c3fb2d8ccdff69e50"


def test_info_is_frozen() -> None:
    info = data.load("digits")[2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["imagenet", "", 3, None])
def test_unknown_name_lists_the_known(name: object) -> None:
    with pytest.raises(ConfigurationError, match=r"'digits', 'mnist', 'fashion_mnist', 'cifar10'"):
        data.load(name)  # type: ignore[arg-type]


def test_names_and_available(tmp_path: Path) -> None:
    assert data.names()[:5] == ("digits", "mnist", "fashion_mnist", "cifar10", "imdb")
    assert all(name.startswith("adbench/") for name in data.names()[5:])
    found = data.available(tmp_path)
    assert tuple(found) == data.names()
    assert found["digits"] == data.Availability("digits", on_disk=True, path=None)
    assert found["mnist"] == data.Availability("mnist", on_disk=False, path=tmp_path / "mnist")
    assert list(tmp_path.iterdir()) == []


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIPDP_DATA", str(tmp_path / "environment"))
    assert files.data_root() == tmp_path / "environment"
    assert files.data_root(tmp_path) == tmp_path
    assert files.data_root("~/x") == Path.home() / "x"
    monkeypatch.setenv("LIPDP_DATA", "")
    assert "lipdp" in files.data_root().parts
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file"):
        data.available(tmp_path / "file")


def test_without_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIPDP_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(DataError, match="LIPDP_DATA"):
        files.data_root()


REAL = os.environ.get("LIPDP_DATA")


def real(name: str) -> tuple[TensorDataset, TensorDataset, data.DatasetInfo]:
    if not REAL or not data.available(REAL)[name].on_disk:
        pytest.skip(f"LIPDP_DATA does not name a folder that holds {name}")
    return data.load(name, root=REAL, download=False)


MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("name", "train_counts"), [("mnist", MNIST_COUNTS), ("fashion_mnist", [6000] * 10), ("cifar10", [5000] * 10)]
)
def test_real(name: str, train_counts: list[int]) -> None:
    train, test, info = real(name)
    assert info.name == name
    assert (len(train), len(test)) == (info.train_size, info.test_size)
    assert train.tensors[1].bincount().tolist() == train_counts
    for part in (train, test):
        images, labels = part.tensors
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert images.shape == (len(part), *info.shape)
        assert (images.min(), images.max()) == (0, 1)


def test_real_cifar10_pixels() -> None:
    """Against the sha256 of the decoded test images (N, 32, 32, 3), taken from another copy."""
    _, test, _ = real("cifar10")
    pixels = (test.tensors[0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    expected = "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert hashlib.sha256(pixels.numpy().tobytes()).hexdigest() == expected
