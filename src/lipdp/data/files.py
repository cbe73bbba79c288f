"""Where files are, how missing ones are fetched, and whether they are the published ones."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lipdp.errors import ConfigurationError, DataError

__all__ = ["ENVIRONMENT_VARIABLE", "RemoteFile", "data_root", "download_bar", "ensure", "verify"]


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
        f"{dataset}: the file {path.name} is not at {path}{note and ' ' + note}, {why}. {place} the file at {path}, or "
        f"pass root= or set the environment variable {ENVIRONMENT_VARIABLE} to a folder that holds "
        f"{path.parent.name}/{path.name}."
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


# The progress bar of a download, shown on a terminal only.

if TYPE_CHECKING:
    from rich.progress import Progress


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
