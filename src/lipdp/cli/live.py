"""What a run shows while it goes on. Imports the library, so commands import it when they run."""

from __future__ import annotations

from rich.console import Console

from lipdp.cli.output import print_plan
from lipdp.training import Callback
from lipdp.training.callbacks import Run

__all__ = ["ShowPlan"]


class ShowPlan(Callback):
    """Prints the plan before the first step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_start(self, run: Run) -> None:
        """Print it, and where the run continues if it does."""
        print_plan(self._console, run.engine.plan)
        if run.engine.steps:
            self._console.print(f"resumed after {run.engine.steps:,} of {run.engine.plan.steps:,} steps")
