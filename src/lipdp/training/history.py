"""What a run has to show: a row of figures for each evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lipdp._texts import REPRODUCIBLE, brief, figure, saved, text_table, upwards
from lipdp.errors import CheckpointError, LipdpError
from lipdp.fields import Probability, Range, read
from lipdp.privacy.ledger import Ledger

__all__ = ["History"]


@dataclass(frozen=True)
class _Figures:
    """What a saved history holds beside its rows."""

    delta: Probability
    epsilon: Annotated[float, Range(least=0)] = 0.0
    seconds: Annotated[float, Range(least=0)] = 0.0
    private: bool = True


class History:
    """Figures of a run, by name, one entry per evaluation: ``step``, ``epoch``, ``epsilon``, and the validation metrics.

    Nothing here was computed from the training data: only the plan's accounting, and metrics of the validation set, whose
    records are not protected by the training's guarantee.

    Attributes:
        delta: δ.
        seconds: of training, evaluation included.
        metrics: the rows, by column.
        private: False for a reproducible run: its noise follows from a seed that somebody chose.
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
        """Append one row. A figure that this row or earlier ones lack is NaN there: a resumed run may evaluate other things."""
        rows = max(map(len, self.metrics.values()), default=0)
        for name in row:
            self.metrics.setdefault(name, [math.nan] * rows)
        for name, column in self.metrics.items():
            column.append(row.get(name, math.nan))

    @property
    def last(self) -> dict[str, float]:
        """The latest row."""
        return {name: values[-1] for name, values in self.metrics.items() if values}

    def __str__(self) -> str:
        rows = [
            [upwards(value) if name == "epsilon" else f"{value:.4g}" for name, value in zip(self.metrics, row, strict=True)]
            for row in zip(*self.metrics.values(), strict=True)
        ]
        headers = [name.replace("_", " ") for name in self.metrics]
        text = text_table(headers, rows, right=headers)
        return text if self.private else f"{text}\n{REPRODUCIBLE}"

    def plot(self, path: str | Path | None = None) -> Any:
        """Validation metrics against ε, as a matplotlib figure (saved to ``path`` if given). Needs matplotlib."""
        names = [name for name in self.metrics if name not in ("step", "epoch", "epsilon")] or ["step"]
        drawn = figure("History.plot", 4.5 * len(names), 3.5)
        for number, name in enumerate(names):
            axes = drawn.add_subplot(1, len(names), number + 1)
            axes.plot(self.metrics["epsilon"], self.metrics[name], marker="o", markersize=3)
            axes.set_xlabel(f"ε spent (δ = {brief(self.delta)})")
            axes.set_ylabel(name.replace("_", " "))
            axes.grid(alpha=0.3)
        return saved(drawn, path)

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
        """From :meth:`state_dict`; :class:`~lipdp.errors.CheckpointError` for what is none."""
        try:
            figures = read(dict[str, Any], state, "the history")
            metrics = read(dict[str, list[Any]], figures.pop("metrics", None), "the history's metrics")
            known: _Figures = read(_Figures, figures, "the history")
        except LipdpError as error:
            raise CheckpointError(f"this is no history of a run: {error}") from error
        history = cls(known.delta, known.epsilon, known.seconds, private=known.private)
        for name, column in metrics.items():
            # A metric that is undefined is NaN; what counts the privacy never is.
            counted = name in ("step", "epoch", "epsilon")
            strange = [v for v in column if type(v) not in (int, float) or (counted and not 0 <= v < math.inf)]
            if strange or len(column) != len(metrics.get("step", ())):
                what = f"holds {strange[0]!r}" if strange else "has not as many rows as the steps"
                raise CheckpointError(f"this is no history of a run: its column {name!r} {what}")
            history.metrics[name] = [float(value) for value in column]
        return history
