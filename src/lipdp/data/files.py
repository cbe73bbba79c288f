"""What every dataset needs: its description, where its files are, how missing ones are fetched, whether they are the published
ones, and how records are split.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp._checks import whole
from lipdp.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from rich.progress import Progress

ENVIRONMENT_VARIABLE = "LIPDP_DATA"

# Seconds to connect, and between two chunks. The first is short so that a machine without network is told soon.
_TIMEOUT = (3.0, 20.0)


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its name, its sha256, and the addresses (ending in /) of the folders that offer it."""

    name: str
    sha256: str
    mirrors: tuple[str, ...]


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds one folder per dataset: `root`, else $LIPDP_DATA, else the user's cache folder."""
    chosen = root if root is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if chosen is not None:
        path = Path(chosen).expanduser()
        if path.exists() and not path.is_dir():
            origin = "root" if root is not None else f"the environment variable {ENVIRONMENT_VARIABLE}"
            raise ConfigurationError(f"{origin} is {path}, which is a file: give the folder that holds the datasets.")
        return path
    try:
        import platformdirs
    except ImportError as error:
        raise DataError(
            "there is no data folder: neither root nor the environment variable "
            f"{ENVIRONMENT_VARIABLE} is given, and the package platformdirs, which knows the user's cache folder, is "
            f"not installed. Pass root=, set {ENVIRONMENT_VARIABLE}, or pip install platformdirs."
        ) from error
    return Path(platformdirs.user_cache_dir("lipdp"))


def ensure(dataset: str, remote: RemoteFile, path: Path, *, download: bool, note: str = "") -> None:
    """Make sure that `path` is the published file: fetch it if it is missing, check it if it is there.

    `note` is added to what is said of a missing file.
    """
    if path.exists():
        verify(dataset, remote, path)
    elif download:
        _fetch(dataset, remote, path, note)
    else:
        raise _missing(dataset, path, note, "and download=False", "Load with download=True, or place")


def verify(dataset: str, remote: RemoteFile, path: Path) -> None:
    """Compare the sha256 of a file on disk with the published one."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{dataset}: {path} cannot be read ({error}). Check its permissions.") from error
    if digest != remote.sha256:
        raise DataError(
            f"{dataset}: {path} is corrupt: its sha256 is {digest}, but that of the published file is {remote.sha256}. "
            "Delete it and load again."
        )


def _missing(dataset: str, path: Path, note: str, why: str, place: str = "Place") -> DataError:
    return DataError(
        f"{dataset}: the file {path.name} is not at {path}{note and ' ' + note}, {why}. {place} the file at {path}, or pass root= "
        f"or set the environment variable {ENVIRONMENT_VARIABLE} to a folder that holds {path.parent.name}/{path.name}."
    )


def _fetch(dataset: str, remote: RemoteFile, path: Path, note: str) -> None:
    """Try the mirrors in turn. A file appears under its name only once complete and checked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _missing(dataset, path, note, f"and the folder {path.parent} cannot be made ({error})") from error
    failures = []
    for mirror in remote.mirrors:
        url = mirror + remote.name
        try:
            _retrieve(url, remote.sha256, path)
        except DataError:  # no pooch: another mirror does not help
            raise
        # requests' errors are OSErrors; pooch tells a wrong checksum by a ValueError.
        except (OSError, ValueError) as error:
            failures.append(f"{url} ({_reason(error)})")
        else:
            return
    raise _missing(dataset, path, note, "and it could not be downloaded from " + " nor from ".join(failures))


def _reason(error: Exception) -> str:
    """One short line: the texts of requests nest three causes and a memory address."""
    text = str(error).splitlines()[0] if str(error) else ""
    if "NameResolution" in text or "getaddrinfo" in text:
        text = "the host name was not resolved: is there a network?"
    elif "hash" in text:
        text = "what came does not have the published sha256"
    return f"{type(error).__name__}: {text[:160]}"


def _retrieve(url: str, sha256: str, path: Path) -> None:
    """Download to a temporary name beside `path`, check, rename: what pooch does."""
    try:
        import pooch
    except ImportError as error:
        raise DataError(
            f"{path} is missing, and downloading it needs the package pooch, which is not installed. pip install "
            f"pooch, or fetch {url} yourself and place it at {path}."
        ) from error
    with download_bar(path.name) as bar, _quiet(pooch.get_logger()):
        # identity: a server that says "Content-Encoding: gzip" of a .gz would have it unpacked on the way.
        downloader = pooch.HTTPDownloader(
            progressbar=bar, chunk_size=1 << 16, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"}
        )
        pooch.retrieve(url, f"sha256:{sha256}", fname=path.name, path=path.parent, downloader=downloader)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Pooch tells stderr of every download; a library should not. The level is given back."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Bar:
    """The four names that pooch asks of a progress bar, in terms of rich."""

    def __init__(self, progress: Progress, description: str) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=None, start=False)
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        # Pooch sets it once the server has answered: a failed connection shows no bar.
        self._total = value
        self._progress.update(self._task, total=value or None)
        self._progress.start_task(self._task)
        self._progress.start()

    def update(self, n: int) -> None:
        self._progress.update(self._task, advance=n)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.stop()


@contextmanager
def download_bar(description: str) -> Iterator[_Bar | Literal[False]]:
    """A bar for `pooch.HTTPDownloader(progressbar=…)`, closed however the download ends; False where none is seen."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:  # a bar is not worth refusing a download
        yield False
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield False
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = _Bar(Progress(*columns, console=console, transient=True), description)
    try:
        yield bar
    finally:
        bar.close()


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class DatasetInfo:
    """What is public about a dataset, known without reading a record of it.

    Attributes:
        name: what :func:`lipdp.data.load` calls it.
        classes: how many there are; labels are 0 … classes−1.
        shape: of one example, e.g. (channels, rows, columns).
        train_size: examples of the training part.
        test_size: examples of the test part.
        class_names: in the order of the labels.
        licence: as its publishers state it, if they do.
        citation: the publication to cite.
        source: where it comes from, mostly an address.
    """

    name: str
    classes: int
    shape: tuple[int, ...]
    train_size: int
    test_size: int
    class_names: tuple[str, ...]
    licence: str
    citation: str
    source: str


@dataclass(frozen=True)
class Availability:
    """Whether a dataset can be loaded without the network, and where it is or would be put.

    Attributes:
        name: of the dataset.
        on_disk: whether its files are there; what is in them is not looked at.
        path: the folder or file, there or to come; ``None``: it comes with an installed package.
    """

    name: str
    on_disk: bool
    path: Path | None


Loaded = tuple[TensorDataset, TensorDataset, DatasetInfo]


class Source(Protocol):
    """One dataset: how it is described, found and read. `datasets.SOURCES` lists them."""

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


# Set a part of the training data aside, to choose hyper-parameters without looking at the test set.


def split(dataset: TensorDataset, fraction: float, seed: int = 0, stratify: bool = True) -> tuple[TensorDataset, TensorDataset]:
    """Split into `train, validation`; `fraction` is the share of the validation part.

    The choice depends on `seed` alone (and on the labels if `stratify`, which keeps the classes' shares; the labels
    are the last tensor). The seed is public: it is no source of privacy. Examples keep their order.

    A privacy guarantee speaks of the examples trained on: neighbouring datasets are two *training parts* that differ
    in one example. What is chosen by looking at the validation part has no guarantee towards its examples.

    Args:
        dataset: its last tensor holds the labels, one class per example, if `stratify`.
        fraction: the share of the validation part, between 0 and 1; each part gets at least one example, or it is an error.
        seed: a whole number, 0 or more.
        stratify: keep the shares of the classes in both parts, as far as whole examples allow.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> train, validation = split(TensorDataset(torch.rand(100, 3), torch.arange(100) % 2), 0.2)
    >>> len(train), len(validation)
    (80, 20)
    """
    if not isinstance(dataset, TensorDataset):
        raise ConfigurationError(
            f"split takes a torch.utils.data.TensorDataset, not a {type(dataset).__name__}: put the examples in tensors."
        )
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigurationError(
            f"fraction={fraction!r} is not the share of a validation part: give a number between 0 and 1, e.g. 0.1."
        )
    whole("seed", seed, least=0)
    size = len(dataset)
    if not 0 < round(fraction * size) < size:
        raise ConfigurationError(
            f"fraction={fraction!r} of {size} examples leaves {round(fraction * size)} for validation: both parts need "
            "at least one example. Choose another fraction or bring more data."
        )
    labels = dataset.tensors[-1]
    if not stratify:
        labels = torch.zeros(size, dtype=torch.int64)
    elif labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise ConfigurationError(
            f"the last tensor of the dataset, {labels.dtype} of shape {tuple(labels.shape)}, does not hold one class "
            "per example, so the split cannot be stratified by it. Pass stratify=False."
        )
    train, validation = stratified(labels, float(fraction), seed)
    return (
        TensorDataset(*(tensor[train] for tensor in dataset.tensors)),
        TensorDataset(*(tensor[validation] for tensor in dataset.tensors)),
    )


def stratified(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the two parts, each ascending; the second has round(fraction × size) of them.

    Each class gives the floor of its share, and those with the largest remainders one more (ties: the smaller class
    index), so that the shares of the classes are as even as whole examples allow.
    """
    values = labels.detach().cpu().numpy()
    _, classes = np.unique(values, return_inverse=True)
    shares = np.bincount(classes) * fraction
    # A share of 1.9999999998 is a 2 spoilt by rounding.
    taken = np.floor(shares + 1e-9).astype(np.int64)
    left = round(fraction * len(values)) - int(taken.sum())
    taken[np.argsort(-(shares - taken), kind="stable")[:left]] += 1
    # Numpy keeps the raw stream of a bit generator forever, but not that of shuffle or permutation: a published
    # split must not move when numpy is updated.
    order = np.argsort(np.random.PCG64(seed).random_raw(len(values)), kind="stable")
    chosen = np.zeros(len(values), dtype=np.bool_)
    for index, count in enumerate(taken):
        chosen[order[classes[order] == index][:count]] = True
    return torch.from_numpy(np.flatnonzero(~chosen)), torch.from_numpy(np.flatnonzero(chosen))
