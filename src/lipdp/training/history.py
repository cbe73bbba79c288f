"""What a run has to show: a row of figures for each evaluation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from lipdp.errors import ConfigurationError
from lipdp.privacy.ledger import Ledger

__all__ = ["NOT_PRIVATE", "History"]

NOT_PRIVATE = "NOT PRIVATE: a reproducible run. Whoever knows its seed can subtract the noise; the epsilon is that of a run with a secret key."


class History:
    """Figures of a run, by name, one entry per evaluation: ``step``, ``epoch``, ``epsilon``, and the validation metrics.

    Nothing here was computed from the training data: only the plan's accounting, and metrics of the validation set, whose
    records are not protected by the training's guarantee.

    Attributes:
        delta: δ.
        seconds: of training, evaluation included.
        metrics: the rows, by column.
        private: False for a reproducible run: its noise follows from a seed that somebody chose, and hides nothing from who knows it.
    """

    def __init__(
        self,
        delta: float,
        epsilon: float = 0.0,
        seconds: float = 0.0,
        metrics: dict[str, list[float]] | None = None,
        private: bool = True,
    ) -> None:
        self.delta, self.seconds, self.private = delta, seconds, private
        self.metrics: dict[str, list[float]] = {} if metrics is None else metrics
        self._epsilon = epsilon
        self._ledger: Ledger | None = None

    @property
    def epsilon(self) -> float:
        """ε spent: at this moment while the run goes on, in the end afterwards."""
        return self._epsilon if self._ledger is None else self._ledger.epsilon

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self._epsilon, self._ledger = value, None

    def follow(self, ledger: Ledger) -> None:
        """Until ε is set, it is what this ledger has charged."""
        self._ledger = ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self.state_dict() == other.state_dict()

    __hash__ = None  # type: ignore[assignment]  # it changes as the run goes on

    def __repr__(self) -> str:
        return f"History({', '.join(f'{name}={value!r}' for name, value in self.state_dict().items())})"

    def add(self, row: dict[str, float]) -> None:
        """Append one row."""
        for name, value in row.items():
            self.metrics.setdefault(name, []).append(value)

    @property
    def last(self) -> dict[str, float]:
        """The latest row."""
        return {name: values[-1] for name, values in self.metrics.items() if values}

    def __str__(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in self.metrics:
            table.add_column(name.replace("_", " "), justify="right")
        for row in zip(*self.metrics.values(), strict=True):
            table.add_row(*(f"{value:.4g}" for value in row))
        text = io.StringIO()
        Console(file=text, width=110, color_system=None).print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join(lines if self.private else [*lines, NOT_PRIVATE])

    def plot(self, path: str | Path | None = None) -> Any:
        """Validation metrics against ε, as a matplotlib figure (saved to ``path`` if given). Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError("History.plot needs matplotlib: pip install matplotlib") from error
        names = [name for name in self.metrics if name not in ("step", "epoch", "epsilon")] or ["step"]
        figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
        for number, name in enumerate(names):
            axes = figure.add_subplot(1, len(names), number + 1)
            axes.plot(self.metrics["epsilon"], self.metrics[name], marker="o", markersize=3)
            axes.set_xlabel(f"ε spent (δ = {self.delta:g})")
            axes.set_ylabel(name.replace("_", " "))
            axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "delta": self.delta,
            "epsilon": self.epsilon,
            "seconds": self.seconds,
            "metrics": self.metrics,
            "private": self.private,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """From :meth:`state_dict`."""
        return cls(**{"private": True, **state})
