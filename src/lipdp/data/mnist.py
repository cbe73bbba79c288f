"""MNIST and Fashion-MNIST: four gzipped idx files each.

And the 8×8 digits that come with scikit-learn: the dataset for a first try, without network.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lipdp.data.files import Availability, Bytes, DatasetInfo, Loaded, RemoteFile, ensure, images_dataset, stratified
from lipdp.errors import DataError

__all__ = ["DIGITS", "FASHION_MNIST", "MNIST", "SPLIT_SEED", "Digits", "IdxImages", "read_idx"]

_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


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
        train, test = (
            images_dataset(
                read_idx(images, 3)[:, None],  # the channel
                read_idx(labels, 1),
                largest=255,
                size=size,
                info=self.info,
            )
            for images, labels, size in (
                (paths[0], paths[1], self.info.train_size),
                (paths[2], paths[3], self.info.test_size),
            )
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
        class_names=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
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
                raise _bad(path, f"it begins with {magic.hex()} where an idx file of this kind has {expected.hex()}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise _bad(path, "it is truncated: it ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
            count = math.prod(shape)
            # One byte more than announced, so that too long is seen, and so that gzip reaches its own checksum.
            content = file.read(count + 1)
    except (OSError, EOFError, zlib.error, OverflowError, MemoryError) as error:
        raise _bad(path, f"it cannot be unpacked ({type(error).__name__}: {error})") from error
    if len(content) != count:
        held = "holds more" if len(content) > count else f"is truncated after {len(content)}"
        raise _bad(path, f"it announces {'×'.join(map(str, shape))} = {count} bytes and {held}")
    # A copy: what frombuffer gives is read-only, and torch warns of that.
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


def _bad(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a sound idx file: {why}. Delete it and load again.")


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
