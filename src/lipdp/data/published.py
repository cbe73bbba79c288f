"""Images as they were published; files are read without trusting them.

MNIST and Fashion-MNIST: four gzipped idx files each. CIFAR-10: six pickled batches, in a folder or still in the publisher's
archive. And the 8×8 digits that come with scikit-learn: the dataset for a first try, without network.
"""

from __future__ import annotations

import gzip
import math
import pickle
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lipdp.data.files import Availability, Bytes, DatasetInfo, Loaded, RemoteFile, ensure, images_dataset, stratified
from lipdp.errors import DataError

_FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True)
class IdxImages:
    """Grey images in the four files of MNIST, in this order: train images, train labels, test images, test labels."""

    info: DatasetInfo
    files: tuple[RemoteFile, RemoteFile, RemoteFile, RemoteFile]

    def availability(self, root: Path) -> Availability:
        """On disk when the four files are."""
        folder = root / self.info.name
        return Availability(self.info.name, all((folder / file.name).is_file() for file in self.files), folder)

    def load(self, root: Path, *, download: bool) -> Loaded:
        """Fetch what is missing, check the sha256 of all, read."""
        paths = [root / self.info.name / file.name for file in self.files]
        for file, path in zip(self.files, paths, strict=True):
            ensure(self.info.name, file, path, download=download)
        size = {0: self.info.train_size, 2: self.info.test_size}
        train, test = (
            images_dataset(read_idx(paths[at], 3)[:, None], read_idx(paths[at + 1], 1), largest=255, size=size[at], info=self.info)
            for at in size
        )
        return train, test, self.info


def _files(mirrors: tuple[str, ...], hashes: tuple[str, str, str, str]) -> tuple[RemoteFile, RemoteFile, RemoteFile, RemoteFile]:
    one, two, three, four = (RemoteFile(name, sha256, mirrors) for name, sha256 in zip(_FILES, hashes, strict=True))
    return one, two, three, four


# The sha256 are those of the files whose md5 the publishers and torchvision give.
MNIST = IdxImages(
    DatasetInfo(
        name="mnist",
        classes=10,
        shape=(1, 28, 28),
        train_size=60_000,
        test_size=10_000,
        class_names=tuple("0123456789"),
        licence="CC BY-SA 3.0, as commonly stated",
        citation="Y. LeCun, C. Cortes and C. J. C. Burges. The MNIST database of handwritten digits. 1998.",
        source="http://yann.lecun.com/exdb/mnist/",
    ),
    _files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
)

FASHION_MNIST = IdxImages(
    DatasetInfo(
        name="fashion_mnist",
        classes=10,
        shape=(1, 28, 28),
        train_size=60_000,
        test_size=10_000,
        class_names=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        licence="MIT (Zalando SE)",
        citation="H. Xiao, K. Rasul and R. Vollgraf. Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine "
        "Learning Algorithms. arXiv:1708.07747, 2017.",
        source="https://github.com/zalandoresearch/fashion-mnist",
    ),
    _files(
        (
            # Plain http: this kind of S3 site offers no other. The sha256 is what makes it safe.
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
)


# The idx format of MNIST: two zero bytes, a type, the number of dimensions, big-endian sizes, then the values.

_UNSIGNED_BYTE = 8


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read a gzipped idx file of bytes that has `dimensions` dimensions, e.g. 3 for images and 1 for labels."""
    try:
        with gzip.open(path, "rb") as file:
            magic = file.read(4)
            expected = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
            if magic != expected:
                raise _bad(path, "idx file", f"it begins with {magic.hex()} where an idx file of this kind has {expected.hex()}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise _bad(path, "idx file", "it is truncated: it ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
            count = math.prod(shape)
            # One byte more than announced, so that too long is seen, and so that gzip reaches its own checksum.
            content = file.read(count + 1)
    except (OSError, EOFError, zlib.error, OverflowError, MemoryError) as error:
        raise _bad(path, "idx file", f"it cannot be unpacked ({type(error).__name__}: {error})") from error
    if len(content) != count:
        held = "holds more" if len(content) > count else f"is truncated after {len(content)}"
        raise _bad(path, "idx file", f"it announces {'×'.join(map(str, shape))} = {count} bytes and {held}")
    # A copy: what frombuffer gives is read-only, and torch warns of that.
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


def _bad(path: Path, kind: str, why: str) -> DataError:
    return DataError(f"{path} is not a sound {kind}: {why}. Delete it and load again.")


# The publisher gives no split with this copy. Ours is public and fixed: a fifth of each class, by this seed.
SPLIT_SEED = 0
_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Digits:
    """The embedded copy: the UCI test part, 1797 images of grey levels 0…16."""

    info: DatasetInfo

    def availability(self, root: Path) -> Availability:
        """Always there: it is a part of scikit-learn."""
        return Availability(self.info.name, on_disk=True, path=None)

    def load(self, root: Path, *, download: bool) -> Loaded:
        """The images divided by 16, split by `SPLIT_SEED`, stratified."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError(
                "digits: the images come with scikit-learn, which is not installed. pip install scikit-learn."
            ) from error
        bunch = load_digits()
        images = bunch.images.astype(np.uint8).reshape(-1, *self.info.shape)
        labels = bunch.target.astype(np.uint8)
        train, test = stratified(torch.from_numpy(labels), _TEST_FRACTION, SPLIT_SEED)
        parts = [
            images_dataset(images[chosen.numpy()], labels[chosen.numpy()], largest=16, size=size, info=self.info)
            for chosen, size in ((train, self.info.train_size), (test, self.info.test_size))
        ]
        return parts[0], parts[1], self.info


DIGITS = Digits(
    DatasetInfo(
        name="digits",
        classes=10,
        shape=(1, 8, 8),
        train_size=1438,
        test_size=359,
        class_names=tuple("0123456789"),
        licence="CC BY 4.0 (UCI Machine Learning Repository)",
        citation="E. Alpaydin and C. Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning "
        "Repository, 1998. doi:10.24432/C50P49",
        source="sklearn.datasets.load_digits",
    )
)


_FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = ("test_batch",)


@dataclass(frozen=True)
class CifarBatches:
    """Colour images in `cifar-10-batches-py`, or in the archive that it comes in."""

    info: DatasetInfo
    archive: RemoteFile
    batch_rows: int = 10_000

    def availability(self, root: Path) -> Availability:
        """On disk when the six batches are, or the archive is."""
        folder = root / self.info.name
        on_disk = not self._absent(folder / _FOLDER) or (folder / self.archive.name).is_file()
        return Availability(self.info.name, on_disk, folder)

    def load(self, root: Path, *, download: bool) -> Loaded:
        """Fetch and unpack if need be, then read. Batches have no published checksum: their content is checked."""
        folder = root / self.info.name / _FOLDER
        if absent := self._absent(folder):
            archive = folder.parent / self.archive.name
            note = f"(unpacked, it would be {folder}, which lacks {', '.join(absent)})"
            ensure(self.info.name, self.archive, archive, download=download, note=note)
            _extract(archive, folder, absent)
        return self._read(folder, _TRAIN), self._read(folder, _TEST), self.info

    @staticmethod
    def _absent(folder: Path) -> list[str]:
        return [name for name in (*_TRAIN, *_TEST) if not (folder / name).is_file()]

    def _read(self, folder: Path, names: tuple[str, ...]) -> TensorDataset:
        info = self.info
        batches = [
            read_batch(folder / name, rows=self.batch_rows, row_size=math.prod(info.shape), classes=info.classes) for name in names
        ]
        images = np.concatenate([rows for rows, _ in batches]).reshape(-1, *info.shape)
        labels = np.concatenate([labels for _, labels in batches])
        counts = np.bincount(labels, minlength=info.classes)
        if counts.min() != counts.max():
            raise DataError(
                f"{info.name}: the classes of {', '.join(names)} under {folder} have {counts.tolist()} examples, but "
                "all have as many in the published files. Delete the folder and load again."
            )
        return images_dataset(images, labels, largest=255, size=len(names) * self.batch_rows, info=info)


def _extract(archive: Path, folder: Path, names: list[str]) -> None:
    """Unpack the named batches beside their place, then rename each: an interrupted run leaves no half of a file."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpacking-") as temporary:
            with tarfile.open(archive, "r:gz") as tar:
                for name in names:
                    tar.extract(f"{_FOLDER}/{name}", temporary, filter="data")
            for name in names:
                Path(temporary, _FOLDER, name).replace(folder / name)
    except KeyError as error:
        raise DataError(f"{archive} lacks a batch: {error.args[0]}. Delete it and load again.") from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is corrupt ({error}). Delete it and load again.") from error
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked in {folder.parent} ({error}). Make that folder writable and see that the "
            "disk has 200 MB free, or unpack it in another data folder and pass that as root=."
        ) from error


CIFAR10 = CifarBatches(
    DatasetInfo(
        name="cifar10",
        classes=10,
        shape=(3, 32, 32),
        train_size=50_000,
        test_size=10_000,
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        licence="none stated by the authors, who ask to be cited",
        citation="A. Krizhevsky. Learning Multiple Layers of Features from Tiny Images. University of Toronto, 2009.",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    RemoteFile(
        "cifar-10-python.tar.gz",
        # The publisher gives the md5 of the same file, c58f30108f718f92721af3b95e74349a; this is the one Keras checks.
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ("https://www.cs.toronto.edu/~kriz/",),
    ),
)


# The pickled batches are read without trusting them. A pickle may call anything that it can name. These files need to name
# five things of numpy, and here even those are stand-ins of our own: numpy itself is called once, on bytes and a shape checked.


class _DType:
    """In place of numpy.dtype: bytes are the only type such a file holds."""

    def __init__(self, kind: object, *_: object) -> None:
        if kind not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of {kind!r}, where the images are u1")

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: nothing that concerns single bytes."""


class _Array:
    """In place of numpy.ndarray: an array of bytes, empty until its state is set."""

    # Of the class, because a pickle can make an instance without calling __init__.
    value: Bytes = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[object, Any, object, object, object]) -> None:
        _version, shape, dtype, fortran, content = state
        self.value = _bytes_array(content, dtype, shape, "F" if fortran else "C")


def _bytes_array(content: object, dtype: object, shape: Any, order: Any) -> Bytes:
    if not isinstance(content, bytes | bytearray) or not isinstance(dtype, _DType) or order not in ("C", "F"):
        raise pickle.UnpicklingError("an array that is not made of bytes")
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) != len(content):
        raise pickle.UnpicklingError(f"an array of shape {shape} with {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order=order)


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError("an array of an unknown class")
    return _Array()


def _frombuffer(content: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.value = _bytes_array(content, dtype, shape, order)
    return array


def _encode(text: str, encoding: object) -> bytes:
    """In place of codecs.encode, by which Python 3 writes bytes in an old protocol: always latin1."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"a text in {encoding!r}")
    return text.encode("latin1")


# Old numpy (the official files, written by Python 2) says numpy.core, numpy 2 says numpy._core.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _DType,
    ("numpy", "ndarray"): _Array,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}


class _Forbidden(pickle.UnpicklingError):
    """The file names something that no batch of images needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Forbidden(f"{module}.{name}") from None


def read_batch(path: Path, *, rows: int, row_size: int, classes: int) -> tuple[Bytes, Bytes]:
    """The images, shape (rows, row_size), and the labels of one batch file, checked."""
    try:
        with path.open("rb") as file:
            # encoding: the official files are Python 2's, whose strings are bytes.
            content = _Unpickler(file, encoding="bytes").load()
    except _Forbidden as error:
        raise DataError(
            f"{path} is refused: it is a pickle that would call {error}, which no batch of images needs, so it may be "
            "malicious. Delete it and take the dataset from its publisher."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}). Check that it is there and its permissions.") from error
    except Exception as error:  # a broken pickle raises nearly anything, as the pickle module warns
        raise _bad(path, "batch of images", f"it cannot be unpickled ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise _bad(path, "batch of images", f"it holds a {type(content).__name__}, not a dictionary")
    array = content.get(b"data", content.get("data"))
    labels = content.get(b"labels", content.get("labels"))
    if not isinstance(array, _Array) or array.value.shape != (rows, row_size):
        what = array.value.shape if isinstance(array, _Array) else type(array).__name__
        raise _bad(path, "batch of images", f"its data should be an array of shape {(rows, row_size)}, and is {what}")
    if not isinstance(labels, list) or len(labels) != rows:
        what = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise _bad(path, "batch of images", f"its labels should be a list of {rows}, and are {what}")
    for label in labels:
        if type(label) is not int or not 0 <= label < classes:
            raise _bad(path, "batch of images", f"it has the label {label!r}, and labels are 0 to {classes - 1}")
    return array.value, np.array(labels, dtype=np.uint8)
