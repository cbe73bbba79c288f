"""Networks for tables of numbers: fixed features of public make, and a head of plain weights between boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.features.kernels import Asinh, Constant, Landmarks, RandomFourier
from lipdp.features.layers import SideBySide
from lipdp.models.by_name import register

__all__ = ["tabular"]


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
    line: bool = False,
    sums: float | None = None,
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
        fourier: number of random Fourier features (:class:`~lipdp.features.kernels.RandomFourier`); 0 takes the columns themselves.
        scale: their kernel's width or widths, in units of the columns.
        each: how many columns each of them reads.
        centre: subtract their means, released privately (needs ``statistics_budget``), before they are brought to norm 1. What all
            rows have in common tells no classes apart, but takes up most of the norm that the noise is scaled to.
        line: put the columns themselves, at norm 1, beside the Fourier features: what is a sum over columns is learned from
            them, and what is not from the features, each with as much of the squared norm.
        sums: width of a kernel that is a sum over the columns, beside the others (needs ``line``; half of ``fourier`` features are
            its): what is a sum of curves, one of each column, is learned from it.
        landmarks: number of kernel features at fixed points (:class:`~lipdp.features.kernels.Landmarks`) of width ``scale``, for
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
    if sums is not None and not (line and fourier > 1):
        raise ConfigurationError(
            "sums puts a kernel of single columns beside Fourier features and the columns: give fourier and line"
        )
    if line and (not fourier or centre):
        raise ConfigurationError("line puts the columns beside Fourier features (fourier=…), and can't be had with centre")
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
        joint = fourier if sums is None else fourier - fourier // 2
        curved = [RandomFourier(columns, joint, scale, each=each), nn.BoundedInput((joint,), mode="sphere")]
        if line:
            straight = [nn.BoundedInput(input_shape, mode="sphere"), Constant(columns, constant)]
            straight.append(nn.BoundedInput((columns + 1,), mode="sphere"))
            both = fourier + columns + 1
            parts = [nn.Sequential(*curved), nn.Sequential(*straight)]
            if sums is not None:
                single = RandomFourier(columns, fourier // 2, sums, each=1, seed=1)
                parts.append(nn.Sequential(single, nn.BoundedInput((fourier // 2,), mode="sphere")))
            curved = [SideBySide(*parts), nn.BoundedInput((both,), mode="sphere")]
        layers += curved
        if centre:
            layers += [nn.Standardize(fourier, radius=1.0, moments=1), nn.BoundedInput((fourier,), mode="sphere")]
        width = both if line else fourier
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
