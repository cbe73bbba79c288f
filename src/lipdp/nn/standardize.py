"""Standardising features by statistics that are themselves released privately."""

from __future__ import annotations

import math
from typing import Literal

import torch

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering

__all__ = ["Standardize"]


class Standardize(torch.nn.Module):
    """``y_c = (x_c − μ_c)/σ_c`` per channel (dimension 1), with μ and σ that were paid for; or ``y_c = x_c − μ_c`` with μ alone.

    Means and deviations of private data are a query about them. ``lipdp.plan(…, statistics_budget=0.05)`` sets a part of the
    budget aside for it, and :func:`lipdp.fit` (or :meth:`lipdp.PrivacyEngine.release_statistics`) releases them once, before
    the first step, and puts them here. Until then nothing bounds this layer's output, so a
    :class:`~lipdp.nn.BoundedInput` or :class:`~lipdp.nn.Boundary` has to follow; with it no Δ depends on the statistics.

    Args:
        channels: size of dimension 1.
        radius: R, a public bound: for the statistics (only) each record is scaled into the ball of this radius.
        floor: the least σ, so that a constant channel is not blown up.
        moments: 2 releases means and deviations. 1 releases the means alone, and leaves σ = 1: one vector instead of two, so at
            the same cost each mean has √2 times less noise. For features that something public has evened out before.
    """

    mean: torch.Tensor
    std: torch.Tensor
    ready: torch.Tensor

    def __init__(self, channels: int, radius: float, *, floor: float = 1e-3, moments: Literal[1, 2] = 2) -> None:
        super().__init__()
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
            raise ConfigurationError(f"Standardize needs a number of channels of at least 1, not {channels!r}")
        for name, value in (("radius", radius), ("floor", floor)):
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigurationError(f"Standardize {name} must be a positive finite number, not {value!r}")
        if isinstance(moments, bool) or moments not in (1, 2):
            raise ConfigurationError(f"Standardize releases 1 moment (means) or 2 (and deviations), not {moments!r}")
        self.channels, self.radius, self.floor, self.moments = channels, float(radius), float(floor), moments
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.register_buffer("ready", torch.tensor(False))

    def set_statistics(self, mean: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Use these: private statistics, or public ones. No variance for a layer of one moment."""
        if (variance is None) != (self.moments == 1):
            raise DataError(
                f"Standardize of {self.moments} moment(s) takes a mean and {'no' if self.moments == 1 else 'a'} variance"
            )
        given = (mean,) if variance is None else (mean, variance)
        if any(values.shape != self.mean.shape for values in given):
            raise DataError(
                f"Standardize has {self.channels} channels; the statistics are of shape "
                + " and ".join(str(tuple(values.shape)) for values in given)
            )
        if not all(bool(torch.isfinite(values).all()) for values in given):
            raise DataError("the statistics hold a NaN or an infinity")
        self.mean.copy_(mean)
        if variance is not None:
            self.std.copy_(variance.clamp_min(self.floor**2).sqrt())
        self.ready.fill_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Standardise each channel."""
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise DataError(f"Standardize expects {self.channels} channels in dimension 1, got a tensor of shape {tuple(x.shape)}")
        shape = (1, -1, *([1] * (x.ndim - 2)))
        return (x - self.mean.to(x.dtype).reshape(shape)) / self.std.to(x.dtype).reshape(shape)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        deviations = f", floor={self.floor:g}" if self.moments == 2 else ", moments=1"
        return f"{self.channels}, radius={self.radius:g}{deviations}"


@rule(Standardize, rounds="each")
def _standardize(layer: Standardize, call: Call) -> Transfer:
    """‖(x−μ)/σ‖ ≤ ‖x‖/min σ + √T·‖μ/σ‖ over T positions; 1/min σ-Lipschitz. Unbounded until the statistics are known."""
    x = call.inputs[0]
    if not bool(layer.ready):
        return Transfer(
            Bound(math.inf, x.shape),
            (math.inf,),
            why_infinite="its statistics are not released yet; put BoundedInput or Boundary(norm=…) behind it",
        )
    if not bool((torch.isfinite(layer.mean) & torch.isfinite(layer.std) & (layer.std > 0)).all()):
        raise call.refuse("its statistics are not finite means and positive finite deviations; they were changed. Set them again.")
    gain = 1 / float(layer.std.min())
    shift = math.sqrt(math.prod(x.shape[1:])) * float(torch.linalg.vector_norm((layer.mean / layer.std).double()))
    return Transfer(Bound(times(gain, x.norm) + shift, x.shape), (gain,), exact=False)


@lowering(Standardize)
def _plain(layer: Standardize, site: Site) -> torch.Tensor:
    mean, std = layer.mean.to(site.dtype), layer.std.to(site.dtype)
    return torch.movedim((torch.movedim(site.x, 1, -1) - mean) / std, -1, 1)
