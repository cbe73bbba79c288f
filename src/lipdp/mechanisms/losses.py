"""Response losses: what it costs to answer r where the truth is q(x).

squared:  (q(x) − r)²
quantile: #{i : min(q(x), r) < x_i < max(q(x), r)}, the number of points between the truth and the answer
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.queries import Query

__all__ = ["Loss", "check_loss", "rank_between", "response_loss", "smooth_loss", "with_ends"]

Loss = Literal["squared", "quantile"]


def check_loss(loss: str, query: Query) -> Loss:
    """The loss's name, or why it makes no sense here."""
    if loss not in get_args(Loss):
        raise ConfigurationError(f"loss is {loss!r}: choose one of {', '.join(get_args(Loss))}.")
    if loss == "quantile" and query.kind == "variance":
        raise ConfigurationError(
            "loss='quantile' counts data points between truth and answer, but a variance is no point of the data's axis. "
            "Use loss='squared' for the variance."
        )
    return loss  # type: ignore[return-value]


def response_loss(loss: Loss, t: Tensor, truth: Tensor, answer: Tensor) -> Tensor:
    """L(x, q(x), r) for sorted unit datasets (batch, n), truths (batch,) and answers (batch, R), as (batch, R)."""
    q = truth[:, None]
    if loss == "squared":
        return (answer - q) ** 2
    low, high = torch.minimum(q, answer).contiguous(), torch.maximum(q, answer).contiguous()
    data = t.contiguous()
    inside = torch.searchsorted(data, high) - torch.searchsorted(data, low, right=True)
    return inside.clamp(min=0).to(t.dtype)


def smooth_loss(loss: Loss, t: Tensor, truth: Tensor, answer: Tensor) -> Tensor:
    """The same with a useful derivative in the answer, for training; answers (batch, R) too.

    For the quantile error, counts become ranks: the piecewise-linear interpolation of the empirical distribution between
    neighbouring points (0 at the low end of the domain, n at the high end).
    """
    if loss == "squared":
        return (answer - truth[:, None]) ** 2
    ends = with_ends(t)
    return (rank_between(ends, answer) - rank_between(ends, truth[:, None])).abs()


def with_ends(t: Tensor) -> Tensor:
    """Sorted unit datasets with 0 before and 1 behind, (batch, n + 2)."""
    batch = t.shape[0]
    return torch.cat([t.new_zeros(batch, 1), t, t.new_ones(batch, 1)], 1)


def rank_between(ends: Tensor, value: Tensor) -> Tensor:
    """How many points lie below each value, interpolated between neighbouring points; from :func:`with_ends`."""
    n = ends.shape[1] - 2
    inside = value.detach().clamp(0, 1).contiguous()
    place = (torch.searchsorted(ends, inside, right=True) - 1).clamp(0, n)
    left, right = ends.gather(1, place), ends.gather(1, place + 1)
    # Outside of [0, 1] the slope continues, so that a stray answer is drawn back in.
    part = (value - left) / (right - left).clamp(min=1e-6)
    inner = place + part
    outside = torch.where(value < 0, value * n, n + (value - 1) * n)
    return torch.where((value < 0) | (value > 1), outside, inner)
