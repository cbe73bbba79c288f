"""Diagnosing a model on some examples: a row for each parameter, as numbers, table, JSON and figure. Once, or over a run."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipdp import nn
from lipdp._checks import named_one, whole
from lipdp._numerics import Undrawn
from lipdp._texts import figure, number, percent, saved, source, text_table
from lipdp.bounds import Analysis, analyse
from lipdp.diagnose.norms import Measured, measure_gradients
from lipdp.errors import ConfigurationError, DataError, LipdpWarning
from lipdp.losses import as_loss
from lipdp.planning.plan import PrivacyPlan
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, gather_tensors
from lipdp.training.callbacks import Callback, Run


@dataclass(frozen=True)
class ParameterDiagnosis:
    """One parameter's true per-example gradient norms against its bound.

    Attributes:
        name: qualified name.
        size: number of entries that are noised, p.
        bound: Δ (∞ where nothing is proved).
        mean: of the examples' gradient norms.
        largest: the largest of them.
        quantiles: share → norm.
        counts: histogram of the norms,
        edges: over these bins.
        mean_gradient: ‖mean of the examples' gradients‖: the signal.
        input_share: mean of ‖x_i‖/X, how much of the activation's bound is used (None where it is not known).
        cotangent_share: mean of ‖δ_i‖/G, how much of the cotangent's bound is used (None where it is not known).
        noise_std: noise on each entry of the gradient sum, if a plan was given.
        snr: ‖mean gradient‖·b/(noise_std·√p), if a plan was given: the signal against the noise of one step.
    """

    name: str
    size: int
    bound: float
    mean: float
    largest: float
    quantiles: dict[float, float]
    counts: tuple[int, ...]
    edges: tuple[float, ...]
    mean_gradient: float
    input_share: float | None = None
    cotangent_share: float | None = None
    noise_std: float | None = None
    snr: float | None = None

    @property
    def tightness(self) -> float:
        """mean/Δ: the share of the bound, and so of the noise, that an average example makes use of."""
        return _share(self.mean, self.bound)

    @property
    def peak(self) -> float:
        """largest/Δ: at most 1, or the bound is wrong."""
        return _share(self.largest, self.bound)

    @property
    def alignment(self) -> float | None:
        """What is left of the tightness once ‖x‖/X and ‖δ‖/G are taken out: 1 if every position's contribution adds up."""
        if not self.input_share or not self.cotangent_share:
            return None
        return self.tightness / (self.input_share * self.cotangent_share)


def _share(value: float, bound: float) -> float:
    if bound == 0:
        return 0.0 if value == 0 else math.inf
    return value / bound


@dataclass(frozen=True)
class Diagnosis:
    """A row for each trainable parameter, and one for the whole gradient.

    Attributes:
        rows: by parameter, in the model's order.
        whole: the gradient of all parameters together against √(ΣΔ²).
        examples: how many were looked at.
        public: whether they are public. If not, nothing of this may be published.
        slack: what rounding may add to the bounds.
    """

    rows: tuple[ParameterDiagnosis, ...]
    whole: ParameterDiagnosis
    examples: int
    public: bool
    slack: float = 1.0

    def __getitem__(self, name: str) -> ParameterDiagnosis:
        return named_one("parameter", name, self.rows)

    @property
    def privacy(self) -> str:
        """Whether this may be published."""
        return source(self.public)

    @property
    def violations(self) -> tuple[str, ...]:
        """Parameters with an example above its bound. There should be none: a bound that fails is a bug; please report it."""
        return tuple(row.name for row in self.rows if row.largest > row.bound * self.slack)

    def __str__(self) -> str:
        planned = self.whole.snr is not None
        names = ("Δ", "mean ‖g‖", "max ‖g‖", "mean/Δ", "max/Δ", "‖x‖/X", "‖δ‖/G", *(["SNR"] if planned else []), "parameters")
        headers = ("parameter", *names)
        rows = [[row.name, *_cells(row, planned)] for row in self.rows]
        lines = [
            f"True per-example gradients of {self.examples} examples against their bounds",
            self.privacy if self.public else f"*** {self.privacy} ***",
            text_table(headers, rows, right=names, whole=headers, footer=["whole gradient", *_cells(self.whole, planned)]),
        ]
        if self.violations:
            lines.append(f"ABOVE THE BOUND: {', '.join(self.violations)}. The guarantee does not hold; please report this.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """As JSON; the first field says whether it may be published."""
        content = {
            "privacy": self.privacy,
            "public": self.public,
            "examples": self.examples,
            "violations": list(self.violations),
            "rows": [_fields(row) for row in self.rows],
            "whole": _fields(self.whole),
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def plot(self, path: str | Path | None = None) -> Any:
        """Histograms of the norms, parameter by parameter, with the bound as a line: a matplotlib figure. Needs matplotlib."""
        columns = min(3, len(self.rows))
        lines = math.ceil(len(self.rows) / columns)
        drawn = figure("Diagnosis.plot", 4.2 * columns, 2.6 * lines)
        for place, row in enumerate(self.rows, 1):
            axes = drawn.add_subplot(lines, columns, place)
            axes.stairs(row.counts, row.edges, fill=True, alpha=0.6)
            if math.isfinite(row.bound):
                axes.axvline(row.bound, color="black", linestyle="--")
            axes.set_title(f"{row.name}: {100 * row.tightness:.3g}% of Δ = {row.bound:.3g}", fontsize=9)
            axes.set_xlabel("gradient norm of an example", fontsize=8)
        drawn.suptitle("public data" if self.public else "NOT PRIVATE: true gradients of private examples", fontsize=10)
        return saved(drawn, path)


def _cells(row: ParameterDiagnosis, planned: bool) -> list[str]:
    numbers = [number(value, 3) for value in (row.bound, row.mean, row.largest)]
    shares = [percent(value, 2) for value in (row.tightness, row.peak, row.input_share, row.cotangent_share)]
    return [*numbers, *shares, *([number(row.snr, 3)] if planned else []), f"{row.size:,}"]


def _fields(row: ParameterDiagnosis) -> dict[str, Any]:
    own = {**dataclasses.asdict(row), "tightness": row.tightness, "peak": row.peak}
    own |= {name: None for name in ("bound", "peak") if math.isinf(own[name])}
    return {**own, "quantiles": {f"{share:g}": value for share, value in row.quantiles.items()}}


_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_CHUNK = 256
_WHOLE = "whole gradient"


def first_examples(data: Any, examples: int) -> tuple[Tensor, Tensor]:
    """The first examples of a map-style dataset, or of a batch (inputs, targets)."""
    count = whole("examples", examples)
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) != len(y) or len(x) == 0:
            raise DataError(
                f"a batch of {len(x)} inputs and {len(y)} targets can't be diagnosed: it needs as many of both, and some"
            )
        return x[:count], y[:count]
    return gather_tensors(data, torch.arange(min(count, check_dataset(data))))


def diagnose(
    model: torch.nn.Module,
    loss: Any,
    data: Any,
    *,
    public: bool = False,
    plan: PrivacyPlan | None = None,
    noise_stds: Mapping[str, float] | None = None,
    examples: int = 512,
    float64: bool = False,
    input_shape: tuple[int, ...] | None = None,
    bins: int = 40,
    one_by_one: bool = False,
) -> Diagnosis:
    """True per-example gradient norms of every parameter against the bound Δ that is proved for it.

    The result is **not private**: it is made of the examples' own gradients, without noise. Say ``public=True`` where they are
    public; otherwise the diagnosis carries a warning wherever it is printed, saved or plotted.

    Args:
        model: the model as it is now. It is copied, not touched.
        loss: a loss of :mod:`lipdp.losses` (or of torch, translated).
        data: a dataset of (input, target), whose first ``examples`` are used, or a batch (inputs, targets).
        public: whether the data are public.
        plan: for the signal-to-noise ratio of each parameter in one step of this plan.
        noise_stds: noise on the gradient sum by parameter, where it is no longer the plan's (adaptive clipping).
        examples: how many to look at.
        float64: compute in double precision.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        bins: of the histograms.
        one_by_one: one backward pass per example (:func:`lipdp.diagnose.measure_gradients`).
    """
    if noise_stds is not None and plan is None:
        raise ConfigurationError("noise_stds need the plan that they belong to: pass plan= too (its batch size makes the ratio)")
    proved_loss = as_loss(loss)
    x, y = first_examples(data, examples)
    own = copy.deepcopy(model)
    if float64:
        own = own.double()
    like = next((p for p in own.parameters() if p.is_floating_point()), x)
    types = Types(own, proved_loss)
    x, y = types.inputs(x.to(like.device)), types.targets(y.to(like.device))
    with Undrawn(like.device):
        analysis = analyse(own, proved_loss, input_shape=input_shape, check=False)
        measured: Measured | None = None
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            norms = measure_gradients(own, proved_loss, x[part], y[part], one_by_one=one_by_one)
            measured = norms if measured is None else measured.joined(norms)
    assert measured is not None
    stds = {} if plan is None else plan.noise_stds if noise_stds is None else noise_stds
    return _assemble(analysis, measured, stds, 0 if plan is None else plan.batch_size, len(x), public, whole("bins", bins))


def _assemble(
    analysis: Analysis, measured: Measured, stds: Mapping[str, float], batch: int, examples: int, public: bool, bins: int
) -> Diagnosis:
    """``stds``: the noise on sums over batches of ``batch`` examples, by parameter; none where there is no plan."""
    rows = []
    for bounds in analysis.parameters:
        name = bounds.name
        module = name.rpartition(".")[0]
        signal = float(measured.sums[name].double().norm()) / examples
        std = stds.get(name)
        rows.append(
            _row(
                name,
                bounds.size,
                bounds.sensitivity,
                measured.norms[name].cpu(),
                signal,
                bins,
                input_share=_used(measured.inputs.get(module), bounds.input_norm),
                cotangent_share=_used(measured.cotangents.get(module), bounds.cotangent_norm),
                noise_std=std,
                snr=signal * batch / (std * math.sqrt(bounds.size)) if std else None,
            )
        )
    norms = torch.stack([measured.norms[row.name].cpu() for row in rows]).square().sum(0).sqrt()
    signal = math.hypot(*(row.mean_gradient for row in rows))
    energy = math.hypot(*((row.noise_std or 0.0) * math.sqrt(row.size) for row in rows))
    entire = _row(
        _WHOLE,
        sum(row.size for row in rows),
        math.hypot(*(row.bound for row in rows)),
        norms,
        signal,
        bins,
        snr=signal * batch / energy if energy else None,
    )
    return Diagnosis(tuple(rows), entire, examples, public, analysis.slack())


def _used(norms: Tensor | None, bound: float) -> float | None:
    if norms is None or not 0 < bound < math.inf:
        return None
    return float(norms.mean()) / bound


def _row(name: str, size: int, bound: float, norms: Tensor, signal: float, bins: int, **more: float | None) -> ParameterDiagnosis:
    largest = float(norms.max())
    top = max(bound if math.isfinite(bound) else 0.0, largest, torch.finfo(torch.float64).tiny)
    counts, edges = torch.histogram(norms.double(), bins=bins, range=(0.0, top))
    shares = torch.tensor(_QUANTILES, dtype=torch.float64)
    return ParameterDiagnosis(
        name=name,
        size=size,
        bound=bound,
        mean=float(norms.mean()),
        largest=largest,
        quantiles=dict(zip(_QUANTILES, torch.quantile(norms.double(), shares).tolist(), strict=True)),
        counts=tuple(int(count) for count in counts.tolist()),
        edges=tuple(edges.tolist()),
        mean_gradient=signal,
        **more,
    )


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
        for place, (key, label) in enumerate((("tightness", "mean gradient norm / bound"), ("snr", "signal-to-noise of a step"))):
            axes = drawn.add_subplot(1, 2, place + 1)
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
