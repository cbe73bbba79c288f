"""Callbacks that hand a run's figures to TensorBoard, MLflow or Weights & Biases.

What leaves is what may: steps, epochs, ε, released clipping norms, and metrics of validation records, which are outside the
guarantee. Figures that were computed from training records (the exact share of clipped examples, for data that were declared
public) stay here unless ``everything`` is asked for. Each service is imported when the run starts, and only then.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from lipdp.errors import ConfigurationError
from lipdp.training.callbacks import Callback, Run

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger", "safe_figures"]

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
