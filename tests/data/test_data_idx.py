"""The idx format and the datasets made of it, on small files."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from lipdp.data.files import DatasetInfo, RemoteFile
from lipdp.data.published import FASHION_MNIST, MNIST, IdxImages, read_idx
from lipdp.errors import DataError


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0))
    return path


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_round_trip(tmp_path: Path) -> None:
    read = read_idx(write(tmp_path / "a.gz", idx(IMAGES)), 3)
    assert read.dtype == np.uint8
    assert np.array_equal(read, IMAGES)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (idx(IMAGES[0]), "begins with 00000802"),
        (b"\x00\x00\x0d\x03" + idx(IMAGES)[4:], "begins with 00000d03"),
        (b"<html>captive portal</html>", "begins with"),
        (b"", "begins with"),
        (idx(IMAGES)[:10], "inside its header"),
        (idx(IMAGES)[:-1], "2×3×4 = 24 bytes and is truncated after 23"),
        (idx(IMAGES) + b"\x00", "holds more"),
    ],
)
def test_wrong_content(tmp_path: Path, content: bytes, why: str) -> None:
    path = write(tmp_path / "a.gz", content)
    with pytest.raises(DataError, match=why) as raised:
        read_idx(path, 3)
    assert str(path) in str(raised.value)
    assert "Delete it and load again" in str(raised.value)


@pytest.mark.parametrize("harm", ["cut", "flip", "plain", "empty"])
def test_corrupt_gzip(tmp_path: Path, harm: str) -> None:
    packed = bytearray(gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (9, 9, 9)))))
    if harm == "cut":
        packed = packed[:-20]
    elif harm == "flip":
        packed[len(packed) // 2] ^= 0xFF
    elif harm == "plain":
        packed = bytearray(idx(IMAGES))
    else:
        packed = bytearray()
    path = tmp_path / "a.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError, match="not a sound idx file"):
        read_idx(path, 3)


def toy(root: Path, *, test_labels: np.ndarray | None = None, train_images: np.ndarray | None = None) -> IdxImages:
    """A dataset like MNIST of 4 + 2 images, written under `root`, with the right checksums."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images.gz": rng.integers(0, 256, (4, 5, 6)) if train_images is None else train_images,
        "train-labels.gz": np.array([0, 1, 2, 0]),
        "t10k-images.gz": rng.integers(0, 256, (2, 5, 6)),
        "t10k-labels.gz": np.array([1, 2]) if test_labels is None else test_labels,
    }
    remotes = []
    for name, array in arrays.items():
        path = write(root / "toy" / name, idx(array))
        remotes.append(RemoteFile(name, hashlib.sha256(path.read_bytes()).hexdigest(), ()))
    info = DatasetInfo("toy", 3, (1, 5, 6), 4, 2, ("a", "b", "c"), "none", "none", "none")
    return IdxImages(info, (remotes[0], remotes[1], remotes[2], remotes[3]))


def test_dataset(tmp_path: Path) -> None:
    source = toy(tmp_path)
    assert source.availability(tmp_path).on_disk
    train, test, info = source.load(tmp_path, download=False)
    assert train.tensors[0].shape == (4, 1, 5, 6)
    assert test.tensors[1].tolist() == [1, 2]
    assert info is source.info
    assert torch.equal((train.tensors[0] * 255).round()[:, 0], torch.from_numpy(read_idx(tmp_path / "toy/train-images.gz", 3)))


def test_wrong_checksum(tmp_path: Path) -> None:
    source = toy(tmp_path)
    path = write(tmp_path / "toy" / "t10k-labels.gz", idx(np.array([2, 2])))
    with pytest.raises(DataError, match=r"corrupt: its sha256 is .* Delete it and load again") as raised:
        source.load(tmp_path, download=True)
    assert str(path) in str(raised.value)
    assert path.exists(), "the user's file is for the user to delete"


@pytest.mark.parametrize(
    "wrong", [{"test_labels": np.array([1, 3])}, {"test_labels": np.array([1])}, {"train_images": np.zeros((4, 6, 6))}]
)
def test_contradicts_its_description(tmp_path: Path, wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(DataError, match=r"toy: .* load it again"):
        toy(tmp_path, **wrong).load(tmp_path, download=False)


def test_missing_without_download(tmp_path: Path) -> None:
    source = toy(tmp_path)
    path = tmp_path / "toy" / "train-labels.gz"
    path.unlink()
    assert not source.availability(tmp_path).on_disk
    with pytest.raises(DataError, match="download=False") as raised:
        source.load(tmp_path, download=False)
    for part in (str(path), "LIPDP_DATA", "root="):
        assert part in str(raised.value)


@pytest.mark.parametrize("source", [MNIST, FASHION_MNIST])
def test_published_files_have_checksums_and_mirrors(source: IdxImages) -> None:
    for file in source.files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert len(file.mirrors) >= 2
        assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in file.mirrors)
