"""Hooks into a run. They see the engine and the history, never the private data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from lipdp._texts import upwards
from lipdp.training.engine import PrivacyEngine
from lipdp.training.history import History

__all__ = ["Callback", "ProgressBar", "Run"]


@dataclass
class Run:
    """What callbacks are given. Setting ``stop`` ends the run after the present step; what is unspent stays unspent.

    Attributes:
        engine: what makes the steps: its model, its plan, the steps made and the ε spent.
        history: the rows so far.
        stop: as above.
    """

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
    """A rich progress bar: steps, time left, the ε spent and the metrics of the last evaluation.

    The ε is that of all that was charged: of a resumed run also of the steps that were made before and are made again.
    It takes its time to compute. So it is computed now and then, for a step a little ahead: what is shown is never below what is
    spent, and "≤" says that it may be above.

    Args:
        console: a ``rich.console.Console`` to draw on; by default rich's own.
    """

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._progress: Any = None
        self._task: Any = None
        self._epsilon, self._shown_until = "", 0  # the ε on show, and the step that it is of
        self._looked, self._looked_at, self._cost = 0.0, 0, 0.0  # when it was computed, at which step, how long it took

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
        self._look(run, ahead=0)
        self._progress.start()
        plan = run.engine.plan
        self._task = self._progress.add_task("", total=plan.steps, completed=run.engine.steps, figures=self._figures(run))

    def on_step(self, run: Run) -> None:
        """Advance."""
        if run.engine.ledger.charged > self._shown_until:
            self._look(run, ahead=self._ahead(run.engine.ledger.charged))
        self._progress.update(self._task, completed=run.engine.steps, figures=self._figures(run))

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """Show the latest figures."""
        self._look(run, ahead=0)
        self._progress.update(self._task, figures=self._figures(run))

    def on_end(self, run: Run) -> None:
        """Close the bar."""
        self._look(run, ahead=0)
        self._progress.update(self._task, completed=run.engine.steps, figures=self._figures(run))
        self._progress.stop()

    def _ahead(self, step: int) -> int:
        """Steps until the next look: so many that looking takes a fiftieth of the time, but half a second's worth at least."""
        pace = (time.monotonic() - self._looked) / max(1, step - self._looked_at)
        return int(max(0.5, 50 * self._cost) / max(pace, 1e-4)) if self._looked_at else 0

    def _look(self, run: Run, ahead: int) -> None:
        """Compute the ε of the step that is ``ahead`` of the present one."""
        step, started = run.engine.ledger.charged, time.monotonic()
        self._shown_until = min(step + ahead, run.engine.plan.steps)
        relation = "=" if self._shown_until == step else "≤"
        self._epsilon = f"ε {relation} {upwards(run.engine.ledger.epsilon_at(self._shown_until))}"
        self._looked, self._looked_at = time.monotonic(), step
        self._cost = self._looked - started

    def _figures(self, run: Run) -> str:
        parts = [f"{self._epsilon} of {upwards(run.engine.plan.epsilon)}"]
        if "validation_accuracy" in run.history.last:
            parts.append(f"validation {100 * run.history.last['validation_accuracy']:.2f}%")
        return ", ".join(parts)
