"""What a diagnosis says: a row for each parameter, as numbers, table, JSON and figure."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipdp.data.norms import NOT_PRIVATE
from lipdp.errors import ConfigurationError

__all__ = ["Diagnosis", "ParameterDiagnosis"]


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
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"there is no parameter {name!r}; there are {', '.join(row.name for row in self.rows)}")

    @property
    def privacy(self) -> str:
        """Whether this may be published."""
        return "public data" if self.public else NOT_PRIVATE

    @property
    def violations(self) -> tuple[str, ...]:
        """Parameters with an example above its bound. There should be none: a bound that fails is a bug; please report it."""
        return tuple(row.name for row in self.rows if row.largest > row.bound * self.slack)

    def __str__(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        planned = self.whole.snr is not None
        table = Table(box=SIMPLE_HEAD, show_footer=True, pad_edge=False)
        headers = ["Δ", "mean ‖g‖", "max ‖g‖", "mean/Δ", "max/Δ", "‖x‖/X", "‖δ‖/G", *(["SNR"] if planned else []), "parameters"]
        footer = _cells(self.whole, planned)
        table.add_column("parameter", footer="whole gradient", no_wrap=True)
        for header, value in zip(headers, footer, strict=True):
            table.add_column(header, footer=value, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(row.name, *_cells(row, planned))
        text = io.StringIO()
        console = Console(file=text, width=140, highlight=False, color_system=None)
        console.print(f"True per-example gradients of {self.examples} examples against their bounds")
        console.print(f"*** {self.privacy} ***" if not self.public else self.privacy)
        console.print(table)
        if self.violations:
            console.print(f"ABOVE THE BOUND: {', '.join(self.violations)}. The guarantee does not hold; please report this.")
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

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
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError("Diagnosis.plot needs matplotlib: pip install 'lipdp[plots]'") from error
        columns = min(3, len(self.rows))
        lines = math.ceil(len(self.rows) / columns)
        figure = Figure(figsize=(4.2 * columns, 2.6 * lines), layout="constrained")
        for number, row in enumerate(self.rows):
            axes = figure.add_subplot(lines, columns, number + 1)
            axes.stairs(row.counts, row.edges, fill=True, alpha=0.6)
            if math.isfinite(row.bound):
                axes.axvline(row.bound, color="black", linestyle="--")
            axes.set_title(f"{row.name}: {100 * row.tightness:.3g}% of Δ = {row.bound:.3g}", fontsize=9)
            axes.set_xlabel("gradient norm of an example", fontsize=8)
        figure.suptitle("public data" if self.public else "NOT PRIVATE: true gradients of private examples", fontsize=10)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _cells(row: ParameterDiagnosis, planned: bool) -> list[str]:
    numbers = [_number(value) for value in (row.bound, row.mean, row.largest)]
    shares = [_percent(value) for value in (row.tightness, row.peak, row.input_share, row.cotangent_share)]
    return [*numbers, *shares, *([_number(row.snr)] if planned else []), f"{row.size:,}"]


def _number(value: float | None) -> str:
    return "–" if value is None or math.isinf(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}%"


def _fields(row: ParameterDiagnosis) -> dict[str, Any]:
    return {
        "name": row.name,
        "size": row.size,
        "bound": None if math.isinf(row.bound) else row.bound,
        "mean": row.mean,
        "largest": row.largest,
        "tightness": row.tightness,
        "peak": None if math.isinf(row.peak) else row.peak,
        "input_share": row.input_share,
        "cotangent_share": row.cotangent_share,
        "mean_gradient": row.mean_gradient,
        "noise_std": row.noise_std,
        "snr": row.snr,
        "quantiles": {f"{share:g}": value for share, value in row.quantiles.items()},
        "edges": list(row.edges),
        "counts": list(row.counts),
    }
