"""What a run has to show, a row of figures for each evaluation, and hooks that see it: never the private data.

Some hand the figures to TensorBoard, MLflow or Weights & Biases. What leaves is what may: steps, epochs, ε, released clipping
norms, and metrics of validation records, which are outside the guarantee. Figures that were computed from training records (the
exact share of clipped examples, for data that were declared public) stay here unless ``everything`` is asked for. Each service is
imported when the run starts, and only then.
"""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lipdp._texts import REPRODUCIBLE, brief, figure, saved, text_table, upwards
from lipdp.errors import CheckpointError, ConfigurationError, LipdpError
from lipdp.fields import Probability, Range, read
from lipdp.privacy.ledger import Ledger
from lipdp.training.engine import PrivacyEngine


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


_SAFE = ("step", "epoch", "epsilon", "clip")
_SAFE_PREFIXES = ("validation_", "clip ", "certified ")


def safe_figures(row: dict[str, float]) -> dict[str, float]:
    """Of a history's row, what may be published."""
    return {name: value for name, value in row.items() if name in _SAFE or name.startswith(_SAFE_PREFIXES)}


class Logger(Callback):
    """The base of loggers: override :meth:`log`, and :meth:`open` and :meth:`close` where there is something to do.

    Args:
        everything: hand on all figures of the history, those of training records too. Not private.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything

    def open(self, settings: dict[str, Any]) -> None:
        """Before the first figure; ``settings`` describe the plan."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """One row of figures."""
        raise NotImplementedError

    def close(self) -> None:
        """After the last one."""

    def on_start(self, run: Run) -> None:
        """Open, with what the plan says."""
        plan = run.engine.plan
        names = ("method", "epsilon", "delta", "noise_multiplier", "steps", "batch_size", "dataset_size", "adjacency", "accountant")
        self.open({**{name: getattr(plan, name) for name in names}, "private": run.engine.private})

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """Hand on a row."""
        shown = row if self.everything else safe_figures(row)
        self.log(int(row["step"]), {name: float(value) for name, value in shown.items() if math.isfinite(value)})

    def on_end(self, run: Run) -> None:
        """Close."""
        self.close()


class TensorBoardLogger(Logger):
    """Scalars for TensorBoard (``tensorboard --logdir FOLDER``).

    Args:
        folder: where to write.
        everything: see :class:`Logger`.
    """

    def __init__(self, folder: str | Path, *, everything: bool = False) -> None:
        super().__init__(everything=everything)
        self.folder = Path(folder)
        self._writer: Any = None

    def open(self, settings: dict[str, Any]) -> None:
        """Begin a file of events."""
        self._writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(self.folder))
        self._writer.add_text("plan", "\n".join(f"- {name}: {value}" for name, value in settings.items()))

    def log(self, step: int, figures: dict[str, float]) -> None:
        """One scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name.replace(" ", "/"), value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


class MLflowLogger(Logger):
    """Parameters and metrics for MLflow, in the run that is active, or in one of its own.

    Args:
        everything: see :class:`Logger`.
    """

    def __init__(self, *, everything: bool = False) -> None:
        super().__init__(everything=everything)
        self._service: Any = None
        self._begun = False

    def open(self, settings: dict[str, Any]) -> None:
        """Begin a run, unless one is active."""
        self._service = _imported("mlflow", "mlflow")
        if self._service.active_run() is None:
            self._service.start_run()
            self._begun = True
        self._service.log_params(settings)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """All figures of a step."""
        self._service.log_metrics({name.replace(" ", "_"): value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        """End the run that was begun here."""
        if self._begun:
            self._service.end_run()


class WandbLogger(Logger):
    """Figures for Weights & Biases, in the run that is active, or in one of its own.

    Args:
        project: name of the project, for a run of its own.
        everything: see :class:`Logger`.
    """

    def __init__(self, project: str | None = None, *, everything: bool = False) -> None:
        super().__init__(everything=everything)
        self.project = project
        self._service: Any = None
        self._begun = False

    def open(self, settings: dict[str, Any]) -> None:
        """Begin a run, unless one is active."""
        self._service = _imported("wandb", "wandb")
        if self._service.run is None:
            self._service.init(project=self.project)
            self._begun = True
        self._service.config.update(settings)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """All figures of a step."""
        self._service.log(figures, step=step)

    def close(self) -> None:
        """End the run that was begun here."""
        if self._begun:
            self._service.finish()


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"this logger needs {package}, which is not installed: pip install {package}") from error
