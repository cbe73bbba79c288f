"""Networks for tables of numbers: fixed features of public make, and a head of plain weights between boundaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from lipdp import nn
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering
from lipdp.models.landmarks import Landmarks
from lipdp.models.registry import register

__all__ = ["Asinh", "Constant", "RandomFourier", "tabular"]


class Asinh(torch.nn.Module):
    """``y = asinh(x/a)``, entry by entry: linear up to about a, logarithmic beyond, odd. For columns of very different sizes.

    Args:
        level: a, a public constant.
    """

    def __init__(self, level: float) -> None:
        super().__init__()
        if not (isinstance(level, int | float) and math.isfinite(level) and level > 0):
            raise ConfigurationError(f"Asinh needs a positive finite level, not {level!r}")
        self.level = float(level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Draw large entries in."""
        return torch.asinh(x / self.level)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"level={self.level:g}"


@rule(Asinh)
def _asinh(layer: Asinh, call: Call) -> Transfer:
    """The derivative 1/√(a² + x²) is at most 1/a, reached at 0, and |asinh(x/a)| ≤ |x|/a entry by entry."""
    x, gain = call.inputs[0], 1 / layer.level
    peak = x.max_abs if math.isinf(x.max_abs) else math.asinh(x.max_abs * gain)
    return Transfer(Bound(times(gain, x.norm), x.shape, max_abs=peak), (gain,))


@lowering(Asinh)
def _plain_asinh(layer: Asinh, site: Site) -> torch.Tensor:
    return torch.asinh(site.x / layer.level)


class Constant(torch.nn.Module):
    """Appends a column of one fixed value: the bias of the layer behind it, inside that layer's bound.

    Args:
        features: columns that come in.
        value: of the new one.
    """

    def __init__(self, features: int, value: float = 1.0) -> None:
        super().__init__()
        if features < 1 or not (math.isfinite(value) and value > 0):
            raise ConfigurationError(f"Constant needs a number of columns and a positive value, not {features!r} and {value!r}")
        self.features, self.value = int(features), float(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, features + 1)."""
        if x.ndim != 2 or x.shape[1] != self.features:
            raise DataError(f"Constant expects (batch, {self.features}), not a tensor of shape {tuple(x.shape)}")
        return torch.nn.functional.pad(x, (0, 1), value=self.value)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.features}, value={self.value:g}"


@rule(Constant)
def _constant(layer: Constant, call: Call) -> Transfer:
    """‖(x, c)‖ = √(‖x‖² + c²); the derivative is that of the identity."""
    return Transfer(Bound(math.hypot(call.inputs[0].norm, layer.value), call.output_shape))


@lowering(Constant)
def _plain_constant(layer: Constant, site: Site) -> torch.Tensor:
    return torch.nn.functional.pad(site.x, (0, 1), value=layer.value)


class RandomFourier(torch.nn.Module):
    """``y = √(2/D)·cos(Wx + b)``, W ~ N(0, 1/s²), b ~ U[0, 2π]: fixed, so nothing of it has to be private.

    ⟨y(x), y(x')⟩ estimates the Gaussian kernel exp(−‖x − x'‖²/2s²) (Rahimi & Recht, 2007), so a linear layer behind it is a kernel
    machine: curved boundaries for the price, in noise, of a linear model on vectors of norm about 1.

    Args:
        features: columns that come in.
        outputs: D.
        scale: s, the kernel's width; a sequence of several splits the outputs among them.
        seed: of W and b. It is public: it protects nothing.
        each: how many columns, drawn at random, each output reads (the others' weights are 0); ``None`` for all. A few make
            the kernel a sum over small groups of columns, as trees of that depth are: better where few columns interact.
    """

    weight: torch.Tensor
    phase: torch.Tensor

    def __init__(
        self, features: int, outputs: int, scale: float | Sequence[float] = 1.0, seed: int = 0, *, each: int | None = None
    ) -> None:
        super().__init__()
        scales = (scale,) if isinstance(scale, int | float) else tuple(scale)
        if features < 1 or outputs < len(scales) or not scales or not all(math.isfinite(s) and s > 0 for s in scales):
            raise ConfigurationError(f"RandomFourier can't make {outputs!r} features of {features!r} columns at scale {scale!r}")
        if each is not None and not 1 <= each <= features:
            raise ConfigurationError(f"RandomFourier: each output reads 1 to {features} columns, not {each!r}")
        self.features, self.outputs, self.scales, self.seed, self.each = int(features), int(outputs), scales, int(seed), each
        draw = torch.Generator().manual_seed(self.seed)
        widths = torch.tensor([scales[i * len(scales) // outputs] for i in range(outputs)], dtype=torch.float64)
        weight = torch.randn(outputs, features, generator=draw, dtype=torch.float64) / widths[:, None]
        phase = 2 * math.pi * torch.rand(outputs, generator=draw, dtype=torch.float64)
        if each is not None:
            read = torch.rand(outputs, features, generator=draw, dtype=torch.float64).argsort(dim=1)[:, :each]
            weight = torch.zeros_like(weight).scatter(1, read, weight.gather(1, read))
        self.register_buffer("weight", weight.float())
        self.register_buffer("phase", phase.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, D)."""
        if x.ndim != 2 or x.shape[1] != self.features:
            raise DataError(f"RandomFourier expects (batch, {self.features}), not a tensor of shape {tuple(x.shape)}")
        return math.sqrt(2 / self.outputs) * torch.cos(
            torch.nn.functional.linear(x, self.weight.to(x.dtype), self.phase.to(x.dtype))
        )

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        reads = "" if self.each is None else f", each={self.each}"
        return f"{self.features}, {self.outputs}, scale={', '.join(f'{s:g}' for s in self.scales)}, seed={self.seed}{reads}"


@rule(RandomFourier)
def _random_fourier(layer: RandomFourier, call: Call) -> Transfer:
    """D entries in ±√(2/D): ‖y‖ ≤ √2, whatever comes in. |cos'| ≤ 1, so the gain is at most √(2/D)·‖W‖₂ ≤ √(2/D)·‖W‖_F."""
    peak = math.sqrt(2 / layer.outputs)
    gain = peak * float(np.linalg.norm(layer.weight.double().cpu().numpy(), 2)) * (1 + 1e-9)
    return Transfer(Bound(math.sqrt(2.0), call.output_shape, max_abs=peak), (times(gain, 1.0),), exact=False)


@lowering(RandomFourier)
def _plain_random_fourier(layer: RandomFourier, site: Site) -> torch.Tensor:
    angles = torch.nn.functional.linear(site.x, layer.weight.to(site.dtype), layer.phase.to(site.dtype))
    return math.sqrt(2 / layer.outputs) * torch.cos(angles)


@register("tabular")
def tabular(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    radius: float = 10.0,
    compress: float | None = None,
    standardise: bool = False,
    fourier: int = 0,
    scale: float | Sequence[float] = 1.0,
    each: int | None = None,
    centre: bool = False,
    landmarks: int = 0,
    ridge: float = 1e-4,
    reach: float | None = None,
    input_mode: Literal["ball", "sphere"] = "sphere",
    constant: float = 1.0,
    hidden: Sequence[int] = (),
    hidden_clip: float | None = 0.3,
    clip: float | None = 0.3,
    init: float = 1.0,
) -> nn.Sequential:
    """A linear layer from zero, or a small network of plain weights, on bounded features of a row: no weight has a constraint.

    The last layer's Δ is ``clip`` (its inputs have norm 1), that of hidden ones ``hidden_clip``. Everything in front of them is
    fixed by public constants, or, where ``standardise``, by statistics that the plan pays for.

    Args:
        input_shape: (columns,).
        classes: number of outputs.
        radius: a public bound: longer rows are scaled down to it (behind ``compress``).
        compress: draw columns in logarithmically from this level on, for columns of very different sizes.
        standardise: each column minus its mean by its deviation, released privately: needs ``statistics_budget``.
        fourier: number of random Fourier features (:class:`RandomFourier`); 0 takes the columns themselves.
        scale: their kernel's width or widths, in units of the columns.
        each: how many columns each of them reads.
        centre: subtract their means, released privately (needs ``statistics_budget``), before they are brought to norm 1. What all
            rows have in common tells no classes apart, but takes up most of the norm that the noise is scaled to.
        landmarks: number of kernel features at fixed points (:class:`~lipdp.models.landmarks.Landmarks`) of width ``scale``, for
            columns that come standardised; instead of ``fourier``.
        ridge: how far those are whitened.
        reach: behind the standardisation, longer rows are scaled down to this norm, so that rare outliers don't set the scale.
        input_mode: how rows without Fourier features are brought to norm 1, "sphere" or "ball" (of radius ``reach``).
        constant: value of the column that serves as bias, relative to the rest; columns themselves only.
        hidden: widths of hidden layers.
        hidden_clip: bound on the gradient at their outputs; ``None`` for none, where per-example gradients are clipped.
        clip: bound on the logits' gradient; ``None`` likewise.
        init: deviation of hidden layers' first weights.
    """
    if len(input_shape) != 1:
        raise ConfigurationError(f"tabular takes rows of numbers, shape (columns,), not {input_shape}")
    if centre and (standardise or not fourier):
        raise ConfigurationError(
            "centre is for Fourier features (fourier=…), and can't be had with standardise: statistics are released once"
        )
    if landmarks and (fourier or not isinstance(scale, int | float)):
        raise ConfigurationError("landmarks are features of one width, instead of Fourier features: leave out fourier")
    columns = input_shape[0]
    layers: list[torch.nn.Module] = []
    if compress is not None:
        layers.append(Asinh(compress))
    layers.append(nn.BoundedInput(input_shape, norm=radius))
    if standardise:
        layers.append(nn.Standardize(columns, radius=radius))
    if reach is not None:
        layers.append(nn.Boundary(norm=reach))
    if fourier:
        layers += [RandomFourier(columns, fourier, scale, each=each), nn.BoundedInput((fourier,), mode="sphere")]
        if centre:
            layers += [nn.Standardize(fourier, radius=1.0, moments=1), nn.BoundedInput((fourier,), mode="sphere")]
        width = fourier
    elif landmarks and isinstance(scale, int | float):
        layers += [Landmarks(columns, landmarks, scale, ridge), nn.BoundedInput((landmarks,), mode="sphere")]
        width = landmarks
    else:
        if input_mode == "ball":
            layers.append(nn.Normalize(0.0, reach or radius))
        layers += [nn.BoundedInput(input_shape, mode=input_mode), Constant(columns, constant)]
        width = columns + 1
        layers.append(nn.BoundedInput((width,), mode="sphere"))
    for size in hidden:
        layer = torch.nn.Linear(width, size, bias=False)
        torch.nn.init.normal_(layer.weight, std=init)
        bound = [] if hidden_clip is None else [nn.Boundary(cotangent=hidden_clip)]
        layers += [layer, *bound, torch.nn.ReLU(), nn.Boundary(norm=1.0)]
        width = size
    last = torch.nn.Linear(width, classes, bias=False)
    torch.nn.init.zeros_(last.weight)
    return nn.Sequential(*layers, last, *([] if clip is None else [nn.ClipGradient(clip)]))
