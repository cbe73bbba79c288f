"""The pickled batches of CIFAR-10, the archive, and the pickles that must be refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lipdp.data.files import DatasetInfo, RemoteFile
from lipdp.data.published import CIFAR10, CifarBatches, read_batch
from lipdp.errors import DataError

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
ROWS, SIZE, CLASSES = 6, 3 * 4 * 4, 3


def content(seed: int = 0) -> dict[bytes, Any]:
    pixels = np.random.default_rng(seed).integers(0, 256, (ROWS, SIZE), dtype=np.uint8)
    return {b"batch_label": b"one", b"labels": [0, 1, 2, 0, 1, 2], b"data": pixels}


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    return read_batch(path, rows=ROWS, row_size=SIZE, classes=CLASSES)


def python2_pickle(batch: dict[bytes, Any]) -> bytes:
    """What Python 2 and the numpy of 2009 wrote, opcode by opcode: strings are not text, and numpy.core is named."""

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    rows, size = batch[b"data"].shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + string(b"b") + b"\x87R"
        b"(K\x01" + b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", size) + b"\x86"
        b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + string(batch[b"data"].tobytes()) + b"tb"
    )
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in batch[b"labels"]) + b"e"
    names = b"](" + string(b"a.png") + string(b"b.png") + b"e"
    pairs = string(b"batch_label") + string(b"training batch 1 of 5") + string(b"labels") + labels
    return b"\x80\x02}(" + pairs + string(b"data") + array + string(b"filenames") + names + b"u."


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("core", ["core", "_core"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_protocol_and_numpy(tmp_path: Path, protocol: int, core: str, order: str) -> None:
    batch = content()
    batch[b"data"] = np.asarray(batch[b"data"], order=order)  # type: ignore[call-overload]
    written = pickle.dumps(batch, protocol=protocol)
    if core == "core" and protocol < 4:  # later protocols have lengths in front of names
        written = written.replace(b"numpy._core.", b"numpy.core.")
    (tmp_path / "b").write_bytes(written)
    images, labels = read(tmp_path / "b")
    assert np.array_equal(images, batch[b"data"])
    assert labels.tolist() == batch[b"labels"]


def test_as_python2_wrote_it(tmp_path: Path) -> None:
    written = python2_pickle(content())
    # The hand-written pickle is a true one: plain pickle reads it the same way.
    assert np.array_equal(pickle.loads(written, encoding="bytes")[b"data"], content()[b"data"])
    (tmp_path / "b").write_bytes(written)
    images, labels = read(tmp_path / "b")
    assert np.array_equal(images, content()[b"data"])
    assert labels.tolist() == content()[b"labels"]


class Malicious:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.reduced = (call, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_malicious_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    for call in (Malicious(os.system, f"touch {trace}"), Malicious(eval, f"open({str(trace)!r}, 'w')")):
        (tmp_path / "b").write_bytes(pickle.dumps({**content(), b"more": call}, protocol=protocol))
        with pytest.raises(DataError, match=r"refused: .* would call .*(system|eval).* malicious"):
            read(tmp_path / "b")
    assert not trace.exists()


@pytest.mark.parametrize(
    "written",
    [
        b"cnumpy\nload\n.",
        b"cbuiltins\ngetattr\n.",
        b"cnumpy.core.multiarray\nfromfile\n.",
        # Protocol 4 can name by attribute path: it must not lead anywhere from what is allowed.
        b"\x80\x04\x8c\x05numpy\x8c\x14ndarray.tofile.__doc__\x93.",
    ],
)
def test_other_globals_are_refused(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "b").write_bytes(written)
    with pytest.raises(DataError, match=str(tmp_path / "b")):
        read(tmp_path / "b")


GOOD = content()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([1, 2], "not a dictionary"),
        ({**GOOD, b"data": GOOD[b"data"][:-1]}, "shape"),
        ({**GOOD, b"data": GOOD[b"data"].astype(np.float64)}, "u1"),
        ({**GOOD, b"data": np.array([object()])}, "refused|unpickled"),
        ({**GOOD, b"data": b"bytes"}, "and is bytes"),
        ({b"labels": GOOD[b"labels"]}, "NoneType"),
        ({b"data": GOOD[b"data"]}, "NoneType"),
        ({**GOOD, b"labels": [0]}, "a list of 6, and are 1"),
        ({**GOOD, b"labels": [0, 1, 2, 3, 1, 2]}, "label 3"),
        ({**GOOD, b"labels": [0, 1, 2, -1, 1, 2]}, "label -1"),
        ({**GOOD, b"labels": [0, 1, 2, 0.5, 1, 2]}, "label 0.5"),
    ],
)
def test_wrong_content(tmp_path: Path, wrong: object, why: str) -> None:
    (tmp_path / "b").write_bytes(pickle.dumps(wrong, protocol=4))
    with pytest.raises(DataError, match=why) as raised:
        read(tmp_path / "b")
    assert str(tmp_path / "b") in str(raised.value)


def test_broken_pickles_are_data_errors(tmp_path: Path) -> None:
    whole = python2_pickle(content())
    rng = np.random.default_rng(0)
    harmed = [whole[:length] for length in range(0, len(whole), 7)]
    for _ in range(300):
        copy = bytearray(whole)
        copy[rng.integers(len(copy))] = rng.integers(256)
        harmed.append(bytes(copy))
    refused = 0
    for written in harmed:
        (tmp_path / "b").write_bytes(written)
        try:
            images, labels = read(tmp_path / "b")
        except DataError:
            refused += 1
        else:  # only a pixel, a label or a name that nobody reads was changed
            assert images.shape == (ROWS, SIZE)
            assert labels.max() < CLASSES
    assert refused > len(whole) // 7


def test_array_made_without_init(tmp_path: Path) -> None:
    """NEWOBJ makes an instance without its __init__: that must not escape as an AttributeError."""
    (tmp_path / "b").write_bytes(b"\x80\x02}(C\x04datacnumpy\nndarray\n)\x81C\x06labels]u.")
    with pytest.raises(DataError, match="shape"):
        read(tmp_path / "b")


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "absent")


def write_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate(NAMES):
        (folder / name).write_bytes(pickle.dumps(content(seed), protocol=4))


def toy(archive_sha256: str = "0" * 64) -> CifarBatches:
    info = DatasetInfo("toy", CLASSES, (3, 4, 4), 5 * ROWS, ROWS, ("a", "b", "c"), "none", "none", "none")
    return CifarBatches(info, RemoteFile("toy.tar.gz", archive_sha256, ()), batch_rows=ROWS)


def write_archive(root: Path, names: list[str] = NAMES) -> CifarBatches:
    write_folder(root / "made" / "cifar-10-batches-py")
    (root / "toy").mkdir()
    path = root / "toy" / "toy.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            tar.add(root / "made" / "cifar-10-batches-py" / name, f"cifar-10-batches-py/{name}")
    return toy(hashlib.sha256(path.read_bytes()).hexdigest())


def test_folder(tmp_path: Path) -> None:
    assert not toy().availability(tmp_path).on_disk
    write_folder(tmp_path / "toy" / "cifar-10-batches-py")
    assert toy().availability(tmp_path).on_disk
    train, test, _ = toy().load(tmp_path, download=False)
    images, labels = train.tensors
    assert images.shape == (5 * ROWS, 3, 4, 4)
    assert images.dtype == torch.float32
    assert labels.tolist() == content()[b"labels"] * 5
    # The rows are channel by channel, and the batches in order.
    expected = content(1)[b"data"].reshape(ROWS, 3, 4, 4)
    assert np.array_equal((images[ROWS : 2 * ROWS] * 255).round().numpy(), expected)
    assert np.array_equal((test.tensors[0] * 255).round().numpy().reshape(ROWS, -1), content(5)[b"data"])


def test_archive_is_unpacked_once(tmp_path: Path) -> None:
    source = write_archive(tmp_path)
    assert source.availability(tmp_path).on_disk
    train, test, _ = source.load(tmp_path, download=False)
    assert (len(train), len(test)) == (5 * ROWS, ROWS)
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["cifar-10-batches-py", "toy.tar.gz"]
    (tmp_path / "toy" / "toy.tar.gz").unlink()
    assert len(source.load(tmp_path, download=False)[0]) == 5 * ROWS


def test_archive_completes_a_folder(tmp_path: Path) -> None:
    source = write_archive(tmp_path)
    source.load(tmp_path, download=False)
    (tmp_path / "toy" / "cifar-10-batches-py" / "data_batch_3").unlink()
    assert len(source.load(tmp_path, download=False)[0]) == 5 * ROWS


def test_archive_with_wrong_checksum_is_not_opened(tmp_path: Path) -> None:
    write_archive(tmp_path)
    with pytest.raises(DataError, match="corrupt"):
        toy("1" * 64).load(tmp_path, download=False)
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["toy.tar.gz"]


def test_archive_that_lacks_a_batch(tmp_path: Path) -> None:
    source = write_archive(tmp_path, NAMES[:-1])
    with pytest.raises(DataError, match=r"lacks a batch.*test_batch"):
        source.load(tmp_path, download=False)
    folder = tmp_path / "toy" / "cifar-10-batches-py"
    assert list(folder.iterdir()) == [], "all or nothing"


def test_archive_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"toy\.tar\.gz is corrupt"):
        toy(hashlib.sha256(b"not an archive").hexdigest()).load(tmp_path, download=False)


def test_unbalanced_classes(tmp_path: Path) -> None:
    folder = tmp_path / "toy" / "cifar-10-batches-py"
    write_folder(folder)
    (folder / "test_batch").write_bytes(pickle.dumps({**content(), b"labels": [0] * 6}))
    with pytest.raises(DataError, match=r"test_batch.*\[6, 0, 0\]"):
        toy().load(tmp_path, download=False)


def test_missing_names_the_batches(tmp_path: Path) -> None:
    write_folder(tmp_path / "cifar10" / "cifar-10-batches-py")
    (tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_2").unlink()
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz.* lacks data_batch_2\)"):
        CIFAR10.load(tmp_path, download=False)
