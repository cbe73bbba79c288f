"""CIFAR-10: six pickled batches, in a folder or still in the publisher's archive."""

from __future__ import annotations

import math
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import TensorDataset

from lipdp.data.batches import read_batch
from lipdp.data.files import RemoteFile, ensure
from lipdp.data.info import Availability, DatasetInfo, Loaded, images_dataset
from lipdp.errors import DataError

__all__ = ["CIFAR10", "CifarBatches"]

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
