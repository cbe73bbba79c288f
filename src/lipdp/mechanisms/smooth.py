"""Smooth sensitivity (Nissim, Raskhodnikova and Smith 2007) for quantiles, as an expert to compare with.

The answer is q(x) + S(x)/α·Z, with Z of density ∝ 1/(1 + z⁴) and α = β = ε/10: pure ε-DP (their lemma 2.6 with γ = 4). S is
β-smooth: S(x) = max_k e^(−βk)·A_k(x), A_k the local sensitivity within k replacements. It is here for evaluation only: its noise
has a data-dependent scale and no exact integer sampler, so :meth:`release` is refused and ``learn()`` never falls back to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lipdp.errors import UnsupportedError
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.noise import Sampler
from lipdp.mechanisms.postprocess import Table
from lipdp.mechanisms.problem import Problem, response_loss

__all__ = ["SmoothSensitivity", "heavy_density", "heavy_quantile", "smooth_sensitivity"]

_POINTS = 20_001


def smooth_sensitivity(t: Tensor, problem: Problem) -> Tensor:
    """S(x) of sorted unit datasets, (batch,).

    An order statistic x_(j) has, within k replacements, local sensitivity max_{0≤s≤k+1} (x_(j+s) − x_(j+s−k−1)), with 0 and 1
    beyond the ends; a midpoint of two has at most the average of theirs. All k ≥ n give 1.
    """
    batch, n = t.shape
    beta = problem.epsilon / 10
    low, high = problem.query._places(n)
    padded = torch.cat([t.new_zeros(batch, n + 1), t, t.new_ones(batch, n + 1)], 1)
    best = t.new_zeros(batch)
    for k in range(n + 1):
        if math.exp(-beta * k) <= float(best.min()):  # A_k ≤ 1: nothing more to find
            break
        local = t.new_zeros(batch)
        for place in (low, high):
            start = n + 1 + place - k - 1
            gaps = padded[:, start + k + 1 : start + 2 * k + 3] - padded[:, start : start + k + 2]
            local = local + gaps.amax(1) / 2
        best = torch.maximum(best, math.exp(-beta * k) * local)
    return best


def heavy_density(z: Tensor) -> Tensor:
    """√2/π · 1/(1 + z⁴)."""
    return math.sqrt(2) / math.pi / (1 + z**4)


def heavy_quantile(u: Tensor) -> Tensor:
    """The inverse CDF of that density, from a table in arctan z."""
    angle = torch.linspace(-math.pi / 2, math.pi / 2, _POINTS, dtype=torch.float64)[1:-1]
    z = torch.tan(angle)
    cdf = torch.cumulative_trapezoid(heavy_density(z) * (1 + z**2), angle)
    cdf = torch.cat([cdf.new_zeros(1), cdf])
    return Table((cdf / cdf[-1],), z)(u.reshape(-1, 1)).reshape(u.shape)


@dataclass(frozen=True)
class SmoothSensitivity(Mechanism):
    """The mechanism of this module with a decoder; evaluated, never released."""

    decoder: Table
    report: dict[str, Any] = field(default_factory=dict, kw_only=True)
    kind: ClassVar[str] = "smooth"

    @property
    def sensitivity(self) -> float:
        """The global one; the noise follows the smooth one, which is smaller."""
        return float(self.problem.query.sensitivity(self.problem.n)) * self.problem.scale

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`."""
        draws = 64
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand((t.shape[0], draws), dtype=torch.float64, generator=generator)
        z = heavy_quantile((torch.arange(draws, dtype=torch.float64) + uniform) / draws)
        truth = self.problem.query(t)
        noisy = truth[:, None] + smooth_sensitivity(t, self.problem)[:, None] * (10 / self.epsilon) * z
        answers = self.decoder(noisy.reshape(-1, 1)).reshape(noisy.shape)
        return response_loss(self.problem.loss, t, truth, answers).mean(1)

    def for_size(self, n: int) -> SmoothSensitivity:
        """The same rule at another size."""
        return replace(self, problem=self.problem.resized(n), report=self._resized_report(n))

    def check_sampler(self, sampler: Sampler) -> None:
        """No sampler will do."""
        raise UnsupportedError(
            "smooth sensitivity is here for comparison only: its noise can't be drawn without floating point. Use the mechanism "
            "that learn() returns, or best_expert()."
        )

    def _noised(self) -> str:
        return "the query, with noise of density 1/(1+z^4) for the smooth sensitivity (comparison only)"

    def _state(self) -> dict[str, Any]:
        return {"decoder": self.decoder.state()}
