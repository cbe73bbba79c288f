"""Diagnoses over a run."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

from lipdp import nn
from lipdp._texts import figure, saved, source, text_table
from lipdp.diagnose.diagnosis import Diagnosis, diagnose, first_examples
from lipdp.errors import LipdpWarning
from lipdp.training.callbacks import Callback, Run

__all__ = ["DiagnosisCallback"]


class DiagnosisCallback(Callback):
    """Diagnoses the model on the same examples at the start and at each evaluation: tightness and signal-to-noise over training.

    The examples are those it is given, *not* the training set's: callbacks see no private data. With ``public=False`` it warns,
    and everything that it shows says that it is not private.

    Args:
        data: a dataset, whose first ``examples`` are used, or a batch (inputs, targets).
        public: whether these examples are public.
        examples: how many.
        float64: compute in double precision.

    Attributes:
        records: (step, diagnosis), in order.
    """

    def __init__(self, data: Any, *, public: bool = False, examples: int = 256, float64: bool = False) -> None:
        self._batch = first_examples(data, examples)
        self.public, self.float64 = bool(public), float64
        self.records: list[tuple[int, Diagnosis]] = []
        if not self.public:
            warnings.warn(
                "DiagnosisCallback will record true gradients of the examples it was given, and the run's guarantee does not cover "
                "them. Say public=True if they are public; otherwise keep the records to yourself.",
                LipdpWarning,
                stacklevel=2,
            )

    def on_start(self, run: Run) -> None:
        """Before the first step."""
        self._record(run)

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """With each row of the history."""
        self._record(run)

    def _record(self, run: Run) -> None:
        engine = run.engine
        if self.records and self.records[-1][0] == engine.steps:
            return
        model = copy.deepcopy(engine.model)
        present = getattr(engine, "clipping", None) or {}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.ClipGradient) and name in present:
                layer.max_norm = float(present[name])  # an adaptive one has moved
        diagnosis = diagnose(
            model,
            engine.loss,
            self._batch,
            public=self.public,
            plan=engine.plan,
            noise_stds=getattr(engine, "noise_stds", None),
            examples=len(self._batch[0]),
            float64=self.float64,
            input_shape=tuple(self._batch[0].shape[1:]),
        )
        self.records.append((engine.steps, diagnosis))

    def series(self, name: str, figure: str = "tightness") -> list[float]:
        """One figure of one parameter over the records: "tightness", "peak", "snr", "mean", "mean_gradient" …"""
        return [getattr(record[name], figure) for _, record in self.records]

    @property
    def privacy(self) -> str:
        """Whether the records may be published."""
        return source(self.public)

    def __str__(self) -> str:
        lines = [
            "Mean gradient norm / bound (and signal-to-noise of a step) over training",
            self.privacy if self.public else f"*** {self.privacy} ***",
        ]
        if self.records:
            headers = ["parameter", *(f"step {step}" for step, _ in self.records)]
            rows = []
            for row in self.records[0][1].rows:
                values = [record[row.name] for _, record in self.records]
                rows.append([row.name, *(_cell(one.tightness, one.snr) for one in values)])
            lines.append(text_table(headers, rows, right=headers[1:], whole=headers))
        return "\n".join(lines)

    def to_json(self) -> str:
        """All records as JSON; the first field says whether they may be published."""
        records = [{"step": step, **json.loads(record.to_json())} for step, record in self.records]
        return json.dumps({"privacy": self.privacy, "public": self.public, "records": records}, indent=2, allow_nan=False)

    def plot(self, path: str | Path | None = None) -> Any:
        """Tightness and signal-to-noise ratio of every parameter against steps: a matplotlib figure. Needs matplotlib."""
        drawn = figure("DiagnosisCallback.plot", 10, 3.5)
        steps = [step for step, _ in self.records]
        for number, (key, label) in enumerate((("tightness", "mean gradient norm / bound"), ("snr", "signal-to-noise of a step"))):
            axes = drawn.add_subplot(1, 2, number + 1)
            for row in self.records[0][1].rows if self.records else ():
                values = self.series(row.name, key)
                if all(value is not None and value > 0 for value in values):
                    axes.plot(steps, values, marker="o", markersize=3, label=row.name)
            axes.set_yscale("log")
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        if drawn.axes[0].lines:
            drawn.axes[0].legend(fontsize=7)
        drawn.suptitle("public data" if self.public else "NOT PRIVATE: true gradients of private examples", fontsize=10)
        return saved(drawn, path)


def _cell(tightness: float, snr: float | None) -> str:
    return f"{100 * tightness:.2f}%" if snr is None else f"{100 * tightness:.2f}% ({snr:.2g})"
