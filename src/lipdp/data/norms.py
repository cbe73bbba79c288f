"""How long the inputs are, which bound to choose for them, and how they are brought within it.

The bound X₀ is a public number. Looking at the private data to choose it is a query: either the data are public, or it is
paid for. The histogram is for public data, or for eyes that may see the private ones; it says which.

Preprocessing of whole datasets runs once, before training: each example by itself, by fixed public functions, so for free. The same
functions are layers (:class:`lipdp.nn.BoundedInput`, :mod:`lipdp.data.colour`). As layers they are part of the model: they are
exported with it and certificates are in the units of the raw input. As preprocessing they run once, not in every step; the model
still has to start with a BoundedInput, for that is where the bound is proved.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp._checks import discreet, kind_of, known_device, whole
from lipdp._texts import figure, saved, source
from lipdp.clipping.past import NotApartError
from lipdp.clipping.restored import Before
from lipdp.data.alone import kept_apart
from lipdp.errors import ConfigurationError, DataError, LipdpNotice
from lipdp.nn.boundary import BoundedInput
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.quantile import PrivateQuantile, private_quantile
from lipdp.privacy.randomness import Stream

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
        return text if self.public else f"{text}\n{source(False)}"

    def to_json(self) -> str:
        """As JSON; its first field says whether it may be published."""
        content = {
            "privacy": source(self.public),
            "mean": self.mean,
            "std": self.std,
            "quantiles": {f"{share:g}": norm for share, norm in self.quantiles.items()},
            "edges": list(self.edges),
            "counts": list(self.counts),
        }
        return json.dumps(content, indent=2)

    def plot(self, path: str | Path | None = None, *, bound: float | None = None) -> Any:
        """A matplotlib figure (saved to ``path`` if given), with the chosen bound as a line. Needs matplotlib."""
        drawn = figure("NormHistogram.plot", 5, 3.2)
        axes = drawn.add_subplot()
        axes.stairs(self.counts, self.edges, fill=True, alpha=0.6)
        if bound is not None:
            axes.axvline(bound, color="black", linestyle="--", label=f"bound {bound:.3g}")
            axes.legend()
        axes.set_xlabel("norm of the input")
        axes.set_ylabel("examples")
        axes.set_title("public data" if self.public else "NOT PRIVATE", fontsize=9)
        return saved(drawn, path)


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


Mode = Literal["ball", "sphere"]


def project_inputs(x: Tensor, norm: float = 1.0, mode: Mode = "ball") -> Tensor:
    """Each example of a batch (batch, *shape) brought into the ball of radius ``norm``, or onto its sphere (0 stays 0).

    Args:
        x: examples along the first dimension; an example's norm is taken over all its entries.
        norm: the radius, above 0.
        mode: "ball" only shortens what is longer than ``norm``; "sphere" gives every example but 0 that length.
    """
    if mode not in ("ball", "sphere"):
        raise ConfigurationError(f"mode is {mode!r}: choose ball or sphere.")
    if x.ndim < 2:
        raise DataError(
            f"a batch of examples has the shape (batch, *shape), not {tuple(x.shape)}; one example: Projection(norm)(x)"
        )
    projected: Tensor = BoundedInput(tuple(x.shape[1:]), norm=norm, mode=mode)(x)
    return projected


class Projection:
    """The same for one example at a time: a transform for datasets that take one, as torchvision's do.

    Args:
        norm: the radius, above 0.
        mode: "ball" only shortens what is longer than ``norm``; "sphere" gives every example but 0 that length.
    """

    def __init__(self, norm: float = 1.0, mode: Mode = "ball") -> None:
        self.norm, self.mode = norm, mode
        project_inputs(torch.zeros(1, 1), norm, mode)  # refuse wrong arguments now, not at the first example

    def __call__(self, example: Tensor) -> Tensor:
        """Project."""
        return project_inputs(example.reshape(1, -1), self.norm, self.mode).reshape(example.shape)

    def __repr__(self) -> str:
        return f"Projection(norm={self.norm:g}, mode={self.mode!r})"


@discreet
def map_inputs(
    dataset: TensorDataset,
    function: Callable[[Tensor], Tensor],
    *,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
) -> TensorDataset:
    """A new dataset whose inputs are ``function`` of the old ones', computed in batches; targets are shared.

    ``function`` takes (batch, *shape) and must treat each example by itself. That is followed through all of its operations;
    where it can't be (values that Python reads), each example is taken by itself, more slowly. What mixes examples (a mean over the
    dataset, say) is a statistic of the data, and has to be paid for.

    Args:
        dataset: its first tensor holds the inputs; the other tensors stay as they are.
        function: from (batch, *shape) to (batch, *another shape), fixed and public.
        batch_size: examples that are computed together.
        device: where to compute, by default where the inputs are; outputs end up with the inputs.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from lipdp.data import map_inputs, rgb_to_yuv
        >>> images = TensorDataset(torch.rand(10, 3, 4, 4), torch.zeros(10))
        >>> map_inputs(images, rgb_to_yuv).tensors[0].shape
        torch.Size([10, 3, 4, 4])
    """
    if not isinstance(dataset, TensorDataset) or not dataset.tensors:
        raise ConfigurationError(f"map_inputs takes a TensorDataset of inputs and targets, not {type(dataset).__name__}")
    if not callable(function):
        raise ConfigurationError(f"map_inputs takes a function of a batch of inputs, not {kind_of(function)}")
    inputs, *rest = dataset.tensors
    apart, device = one_by_one(function), None if device is None else known_device(device)
    with torch.no_grad():
        parts = [_rows(function, apart(part.to(device))) for part in torch.split(inputs, whole("batch_size", batch_size))]
    outputs = _joined(function, [part.to(inputs.device) for part in parts])
    if len(outputs) != len(inputs):
        raise DataError(f"the function made {len(outputs)} examples of {len(inputs)}; it has to keep their number and order")
    _refuse_mixing(inputs, outputs, function, device)
    return TensorDataset(outputs, *rest)


def one_by_one(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function; one that is not ours is followed, and where it may mix examples, called for each of them."""
    parts = function.modules() if isinstance(function, torch.nn.Module) else [function]
    homes = [part.__module__ if isinstance(part, FunctionType) else type(part).__module__ for part in parts]
    if all(home.startswith(("lipdp.", "torch.nn.modules.container")) for home in homes):
        return function

    def run(x: Tensor) -> Tensor:
        try:
            return _rows(function, kept_apart(function, x))
        except NotApartError as error:
            reason = error.reason
        before = Before(function)

        def by_itself(part: Tensor) -> Tensor:
            found = _rows(function, function(part.detach().clone()))
            before.put_back_all()  # what it has kept of these reaches no others
            return found

        together, alone = by_itself(x), _joined(function, [by_itself(row) for row in torch.split(x, 1)])
        if len(alone) == len(x) != len(together):
            raise DataError(f"the function made {len(together)} examples of {len(x)}; it has to keep their number and order")
        if not _same(alone, together):
            raise _mixing()
        what = f"{_name(function)} may let examples meet: {reason}. So each is taken by itself: the same, more slowly."
        warnings.warn(what, LipdpNotice, stacklevel=3)
        return alone

    return run


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _rows(function: Any, made: Any) -> Tensor:
    """What the function gives of a batch: a tensor with a row for each example."""
    if isinstance(made, Tensor) and made.layout == torch.strided and not made.is_nested and not made.is_meta and made.ndim:
        return made
    what = f"a tensor of shape {tuple(made.shape)}" if type(made) is Tensor and made.layout == torch.strided else kind_of(made)
    how = " Turn it into one: torch.from_numpy(...)." if isinstance(made, np.ndarray) else ""
    raise DataError(f"the function {_name(function)} gives {what}, not a dense tensor with a row for each example.{how}")


def _joined(function: Any, parts: list[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise DataError(
            f"the function {_name(function)} gives examples of several shapes, {' and '.join(map(str, sorted(shapes)[:2]))}: all "
            "need the same one."
        )
    return torch.cat(parts)


def _refuse_mixing(
    inputs: Tensor, outputs: Tensor, function: Callable[[Tensor], Tensor], device: torch.device | str | None
) -> None:
    for index in range(min(3, len(inputs))):
        with torch.no_grad():
            alone = function(inputs[index : index + 1].to(device, copy=True)).to(outputs.device)
        if not _same(alone, outputs[index : index + 1]):
            raise _mixing()


def _same(alone: Tensor, together: Tensor) -> bool:
    """Matrix products round differently in batches of another size."""
    if not together.is_floating_point() or alone.shape != together.shape:
        return torch.equal(alone, together)
    scale = float(together.abs().max()) if together.numel() else 0.0
    return torch.allclose(alone, together, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _mixing() -> DataError:
    return DataError(
        "an example comes out differently alone than with the others: the function mixes examples (or is random), so its result is "
        "a statistic of the data. Use a function of each example, or pay for the statistic (lipdp.privacy.private_moments)."
    )


def require_finite(dataset: TensorDataset) -> None:
    """Raise a `DataError` if a floating tensor of the dataset holds a NaN or an infinity.

    No bound on a gradient holds for such an example, so it has to be refused rather than trained on.

    Args:
        dataset: all of its floating tensors are looked at, targets too.
    """
    if not isinstance(dataset, TensorDataset):
        raise ConfigurationError(
            f"require_finite takes a torch.utils.data.TensorDataset, not a {type(dataset).__name__}: put the examples in tensors."
        )
    bad = torch.zeros(len(dataset), dtype=torch.bool)
    for tensor in dataset.tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            for start in range(0, len(tensor), _CHUNK):
                part = tensor[start : start + _CHUNK]
                finite = torch.isfinite(part).reshape(len(part), -1).all(dim=1)
                bad[start : start + _CHUNK] |= ~finite.cpu()
    if bool(bad.any()):
        raise DataError(
            "an example contains a NaN or an infinity, and there may be more: no sensitivity bound holds for it. Remove or repair "
            "such examples first; torch.isfinite(x) tells which they are, to you alone."
        )
