"""The progress bar of a download, shown on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["download_bar"]


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
