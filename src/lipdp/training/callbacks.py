"""Hooks into a run. They see the engine and the history, never the private data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lipdp.training.engine import PrivacyEngine
from lipdp.training.history import History

__all__ = ["Callback", "ProgressBar", "Run"]


@dataclass
class Run:
    """What callbacks are given. Setting ``stop`` ends the run after the present step; what is unspent stays unspent."""

    engine: PrivacyEngine
    history: History
    stop: bool = False


class Callback:
    """Override what you need."""

    def on_reading(self, done: int, total: int) -> None:
        """While all records are read once, before anything else: how many were, and of how many."""

    def on_start(self, run: Run) -> None:
        """Before the first step of this call (also when resuming)."""

    def on_step(self, run: Run) -> None:
        """After each step."""

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """After each row of the history."""

    def on_end(self, run: Run) -> None:
        """After the last step, also when an error ended the run."""


class ProgressBar(Callback):
    """A rich progress bar: steps, time left, the ε of the last evaluation and its metrics."""

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._progress: Any = None
        self._task: Any = None

    def on_start(self, run: Run) -> None:
        """Open the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
        )
        self._progress.start()
        plan = run.engine.plan
        self._task = self._progress.add_task("", total=plan.steps, completed=run.engine.steps, figures=self._figures(run))

    def on_step(self, run: Run) -> None:
        """Advance."""
        self._progress.update(self._task, completed=run.engine.steps)

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """Show the latest figures."""
        self._progress.update(self._task, figures=self._figures(run))

    def on_end(self, run: Run) -> None:
        """Close the bar."""
        self._progress.update(self._task, figures=self._figures(run))
        self._progress.stop()

    @staticmethod
    def _figures(run: Run) -> str:
        last = run.history.last
        parts = [f"ε = {last.get('epsilon', 0.0):.3f} of {run.engine.plan.epsilon:.3f}"]
        if "validation_accuracy" in last:
            parts.append(f"validation {100 * last['validation_accuracy']:.2f}%")
        return ", ".join(parts)
