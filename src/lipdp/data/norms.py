"""How long the inputs are, and which bound to choose for them.

The bound X₀ is a public number. Looking at the private data to choose it is a query: either the data are public, or it is
paid for. The histogram is for public data, or for eyes that may see the private ones; it says which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.quantile import PrivateQuantile, private_quantile
from lipdp.privacy.randomness import Stream

__all__ = ["NOT_PRIVATE", "NormHistogram", "choose_input_bound", "input_norms", "norm_histogram"]

NOT_PRIVATE = "NOT PRIVATE: computed from the records without noise. Do not publish it, unless the data are public."
_CHUNK = 4096  # examples looked at together: the masks of a whole CIFAR-10 would need twice its memory
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


def input_norms(data: TensorDataset | Tensor) -> Tensor:
    """‖x_i‖₂ of every example, (examples,) in float64 on the CPU. Not private.

    Args:
        data: a dataset, whose first tensor holds the inputs, or the inputs themselves, (examples, *shape).
    """
    inputs = data.tensors[0] if isinstance(data, TensorDataset) else data
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        raise DataError("norms are those of a TensorDataset's inputs or of a tensor (examples, *shape)")
    parts = [torch.linalg.vector_norm(part.double().flatten(1), dim=1).cpu() for part in torch.split(inputs, _CHUNK)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class NormHistogram:
    """The distribution of the inputs' norms.

    Attributes:
        edges: of the bins, one more than counts.
        counts: examples in each bin.
        mean: of the norms.
        std: of the norms.
        quantiles: share → norm.
        public: whether the data are public; if not, none of this may be published.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float
    std: float
    quantiles: dict[float, float]
    public: bool

    @property
    def spread(self) -> float:
        """std/mean: the narrower, the closer gradients come to a bound that is set at the largest norm."""
        return self.std / self.mean if self.mean > 0 else 0.0

    def tightness(self, bound: float) -> float:
        """mean/bound: how much of the bound X₀ = ``bound`` an average example uses (longer ones are shortened to it)."""
        centres = [(low + high) / 2 for low, high in zip(self.edges, self.edges[1:], strict=False)]
        total = sum(self.counts)
        return sum(count * min(centre / bound, 1.0) for count, centre in zip(self.counts, centres, strict=True)) / max(total, 1)

    def __str__(self) -> str:
        figures = ", ".join(f"{100 * share:g}% {norm:.4g}" for share, norm in self.quantiles.items())
        text = f"norms of {sum(self.counts)} examples: mean {self.mean:.4g}, std {self.std:.4g}; quantiles: {figures}"
        return text if self.public else f"{text}\n{NOT_PRIVATE}"

    def to_json(self) -> str:
        """As JSON; its first field says whether it may be published."""
        content = {
            "privacy": "public data" if self.public else NOT_PRIVATE,
            "mean": self.mean,
            "std": self.std,
            "quantiles": {f"{share:g}": norm for share, norm in self.quantiles.items()},
            "edges": list(self.edges),
            "counts": list(self.counts),
        }
        return json.dumps(content, indent=2)

    def plot(self, path: str | Path | None = None, *, bound: float | None = None) -> Any:
        """A matplotlib figure (saved to ``path`` if given), with the chosen bound as a line. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError("NormHistogram.plot needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.stairs(self.counts, self.edges, fill=True, alpha=0.6)
        if bound is not None:
            axes.axvline(bound, color="black", linestyle="--", label=f"bound {bound:.3g}")
            axes.legend()
        axes.set_xlabel("norm of the input")
        axes.set_ylabel("examples")
        axes.set_title("public data" if self.public else "NOT PRIVATE", fontsize=9)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def norm_histogram(data: TensorDataset | Tensor, *, bins: int = 50, public: bool = False) -> NormHistogram:
    """The histogram of the inputs' norms. It is *not* private: say ``public=True`` where the data are public.

    For another colour space: ``norm_histogram(map_inputs(train, YUV()))``.

    Args:
        data: a dataset, whose first tensor holds the inputs, or the inputs themselves; norms that are not finite are left out.
        bins: how many, of equal width from the smallest norm to the largest.
        public: that the data are; else the histogram says wherever it is shown that it may not be published.
    """
    norms = input_norms(data)
    finite = norms[torch.isfinite(norms)]
    if not len(finite):
        raise DataError("there is no example with a finite norm to make a histogram of")
    low, high = float(finite.min()), float(finite.max())
    if high <= low:  # all on one sphere: a bin around it
        low, high = low - 0.5 * max(low, 1e-6) * 1e-3, high + 0.5 * max(high, 1e-6) * 1e-3
    counts, edges = torch.histogram(finite, bins=bins, range=(low, high))
    shares = torch.tensor(_QUANTILES, dtype=torch.float64)
    ordered = finite.sort().values
    values = ordered[(shares * (len(ordered) - 1)).round().long()]
    return NormHistogram(
        edges=tuple(edges.tolist()),
        counts=tuple(int(count) for count in counts.tolist()),
        mean=float(finite.mean()),
        std=float(finite.std(correction=0)),
        quantiles=dict(zip(_QUANTILES, values.tolist(), strict=True)),
        public=public,
    )


def choose_input_bound(
    data: TensorDataset | Tensor,
    quantile: float = 0.9,
    *,
    public: bool = False,
    largest: float | None = None,
    epsilon: float | None = None,
    adjacency: Adjacency = "add_remove",
    generator: Stream | None = None,
) -> PrivateQuantile:
    """A bound X₀ that a share ``quantile`` of the inputs keep (the others are shortened to it), and what it cost.

    Args:
        data: the training inputs.
        quantile: the share. Below 1 the bound is tighter for the rest: 0.5 to 0.9 is usual.
        public: the data are public: the exact quantile, for nothing.
        largest: otherwise: a public number that norms are cut at, e.g. √(number of pixels) for pixels in [0, 1].
        epsilon: otherwise: the pure ε that the choice may cost, by :func:`lipdp.privacy.private_quantile`.
        adjacency: which datasets are neighbours.
        generator: see :func:`lipdp.privacy.private_quantile`.

    Returns:
        ``.value`` and ``.epsilon``, 0 for public data. The caller adds that ε to training's.
    """
    norms = input_norms(data)
    if public:
        if largest is not None or epsilon is not None:
            raise ConfigurationError("public=True reads the exact quantile for nothing; largest= and epsilon= are for private data")
        if not 0 <= quantile <= 1:
            raise ConfigurationError(f"quantile is {quantile!r}: a share between 0 and 1, e.g. 0.9.")
        return PrivateQuantile(float(norms.quantile(quantile)), 0.0)
    if largest is None or epsilon is None:
        raise ConfigurationError(
            "choosing the input bound from private data is a release: give largest= (a public bound on the norms) and epsilon= "
            "(what it may cost), or public=True where the data are public. A number that you fix yourself needs neither."
        )
    return private_quantile(norms, quantile, (0.0, largest), epsilon=epsilon, adjacency=adjacency, generator=generator)
