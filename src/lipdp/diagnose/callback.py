"""Diagnoses over a run; and the true gradients of every example behind them: norms by parameter, sums, and what went into them."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipdp import nn
from lipdp.clipping import clip_batch
from lipdp.data.norms import NOT_PRIVATE
from lipdp.diagnose.diagnosis import Diagnosis, diagnose, first_examples
from lipdp.errors import ConfigurationError, DataError, LipdpWarning
from lipdp.parametrize import effective_leaves
from lipdp.training.callbacks import Callback, Run

__all__ = ["DiagnosisCallback", "Measured", "measure_gradients"]


PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
# Clipped to this, nothing is clipped.
_NO_CLIP = 1e30


@dataclass
class Measured:
    """What was measured on a batch; all of it private.

    Attributes:
        norms: parameter → ‖g_i‖ of each example, (batch,).
        sums: parameter → Σ_i g_i.
        inputs: module → norm of the activation that entered it, (batch,) (the largest of its uses).
        cotangents: module → norm of the cotangent that came back to its output, (batch,) (the largest of its uses).
    """

    norms: dict[str, Tensor]
    sums: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)

    def joined(self, other: Measured) -> Measured:
        """Two batches as one."""

        def both(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: torch.cat([a[name], b[name]]) for name in a if name in b}

        return Measured(
            both(self.norms, other.norms),
            {name: total + other.sums[name] for name, total in self.sums.items()},
            both(self.inputs, other.inputs),
            both(self.cotangents, other.cotangents),
        )


def measure_gradients(model: torch.nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, *, one_by_one: bool = False) -> Measured:
    """Per-example gradient norms of every trainable parameter.

    They are those of what the calculus bounds and the engine noises: of the *effective* weight W = π(θ) in reparametrised layers.

    Args:
        model: in the mode it is in.
        loss: one value per example.
        x: inputs, batch first.
        y: targets.
        one_by_one: one backward pass for each example: slow, and the plain definition. By default the norms come from
            :mod:`lipdp.clipping`, which needs one pass for all (and is used wherever no layer is reparametrised).
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), effective_leaves(model) as leaves:
        wanted = {**parameters, **leaves}
        with _watched(model, len(x)) as measured:
            found = _gradients(model, loss, x, y, wanted)
        measured.sums = found
        if one_by_one or leaves:
            rows = [_gradients(model, loss, x[i : i + 1], y[i : i + 1], wanted) for i in range(len(x))]
            measured.norms = {name: torch.stack([row[name].norm() for row in rows]).double() for name in wanted}
    if not measured.norms:
        clipped = clip_batch(model, loss, x, y, dict.fromkeys(parameters, _NO_CLIP), style="per_group")
        names = [group.name for group in clipped.groups]
        measured.norms = {name: clipped.norms[:, names.index(name)].detach().double() for name in parameters}
    return measured


def _gradients(model: torch.nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    values = loss(model(x), y)
    if values.shape != (len(x),):
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(x)} examples; it must give one value per example "
            "(reduction='none')"
        )
    found = torch.autograd.grad(values.sum(), list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient.detach()
        for (name, tensor), gradient in zip(wanted.items(), found, strict=True)
    }


@contextmanager
def _watched(model: torch.nn.Module, batch: int) -> Iterator[Measured]:
    """Notes the norms of what enters the layers that have parameters, and of the cotangents that come back to them."""
    measured = Measured({}, {})

    def note(into: dict[str, Tensor], name: str, value: object) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0 and len(value) == batch:
            norms = torch.linalg.vector_norm(value.detach().double().reshape(batch, -1), dim=1)
            into[name] = torch.maximum(into[name], norms) if name in into else norms

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[object, ...], object], None]:
        def hook(module: torch.nn.Module, arguments: tuple[object, ...], output: object) -> None:
            for argument in arguments[:1]:
                note(measured.inputs, name, argument)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda cotangent: note(measured.cotangents, name, cotangent))  # type: ignore[no-untyped-call]

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    try:
        yield measured
    finally:
        for handle in handles:
            handle.remove()


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
        found = diagnose(
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
        self.records.append((engine.steps, found))

    def series(self, name: str, figure: str = "tightness") -> list[float]:
        """One figure of one parameter over the records: "tightness", "peak", "snr", "mean", "mean_gradient" …"""
        return [getattr(record[name], figure) for _, record in self.records]

    @property
    def privacy(self) -> str:
        """Whether the records may be published."""
        return "public data" if self.public else NOT_PRIVATE

    def __str__(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        text = io.StringIO()
        console = Console(file=text, width=160, highlight=False, color_system=None)
        console.print("Mean gradient norm / bound (and signal-to-noise of a step) over training")
        console.print(self.privacy if self.public else f"*** {self.privacy} ***")
        if self.records:
            table = Table(box=SIMPLE_HEAD, pad_edge=False)
            table.add_column("parameter", no_wrap=True)
            for step, _ in self.records:
                table.add_column(f"step {step}", justify="right", no_wrap=True)
            for row in self.records[0][1].rows:
                found = [record[row.name] for _, record in self.records]
                table.add_row(row.name, *(_cell(one.tightness, one.snr) for one in found))
            console.print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def to_json(self) -> str:
        """All records as JSON; the first field says whether they may be published."""
        records = [{"step": step, **json.loads(record.to_json())} for step, record in self.records]
        return json.dumps({"privacy": self.privacy, "public": self.public, "records": records}, indent=2, allow_nan=False)

    def plot(self, path: str | Path | None = None) -> Any:
        """Tightness and signal-to-noise ratio of every parameter against steps: a matplotlib figure. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError("DiagnosisCallback.plot needs matplotlib: pip install 'lipdp[plots]'") from error
        figure = Figure(figsize=(10, 3.5), layout="constrained")
        steps = [step for step, _ in self.records]
        for number, (key, label) in enumerate((("tightness", "mean gradient norm / bound"), ("snr", "signal-to-noise of a step"))):
            axes = figure.add_subplot(1, 2, number + 1)
            for row in self.records[0][1].rows if self.records else ():
                values = self.series(row.name, key)
                if all(value is not None and value > 0 for value in values):
                    axes.plot(steps, values, marker="o", markersize=3, label=row.name)
            axes.set_yscale("log")
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        if figure.axes[0].lines:
            figure.axes[0].legend(fontsize=7)
        figure.suptitle("public data" if self.public else "NOT PRIVATE: true gradients of private examples", fontsize=10)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _cell(tightness: float, snr: float | None) -> str:
    return f"{100 * tightness:.2f}%" if snr is None else f"{100 * tightness:.2f}% ({snr:.2g})"
