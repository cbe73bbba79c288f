"""Quantiles and first crossings of bounded numbers, with pure ε-DP: to choose an input bound or a clipping norm, paid for.

Noise is drawn in float64. Floating-point noise is not the real-valued noise of the proofs (Mironov 2012): probabilities are off by
about 1e-15 of themselves, and low bits can tell on the value under them. The releases here show no such bits: a crossing is an
index, and a quantile is rounded to a fixed grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy._checks import is_number, positive, whole
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.costs import Pure
from lipdp.privacy.randomness import fresh_seed
from lipdp.privacy.randomness import generator as make_generator

__all__ = [
    "Crossing",
    "PrivateQuantile",
    "above_threshold",
    "clip_search",
    "crossing_probabilities",
    "crossing_scales",
    "private_quantile",
    "quantile_probabilities",
    "rank_sensitivity",
]

Floats = npt.NDArray[np.float64]

# Released quantiles are multiples of this part of the range: coarse enough to hide rounding, finer than any use of them.
_GRID = 2.0**-30


@dataclass(frozen=True)
class PrivateQuantile:
    """A released quantile and what it cost.

    Attributes:
        value: the release.
        epsilon: pure ε of it (δ = 0).
    """

    value: float
    epsilon: float


@dataclass(frozen=True)
class Crossing:
    """The first query above the threshold and what finding it cost.

    Attributes:
        index: its position, or None where none was above.
        epsilon: pure ε (δ = 0), however many queries were looked at.
        value: for :func:`clip_search`, the candidate at ``index``.
    """

    index: int | None
    epsilon: float
    value: float | None = None


def rank_sensitivity(quantile: float, adjacency: Adjacency) -> float:
    """Most by which one record moves the utility u(x, r) = −|#{i: x_i < r} − γ·n| of the γ-quantile, at any r.

    replace-one: n stays and the count moves by at most 1, so 1.
    add/remove-one: n moves too. A record below r moves ``count − γn`` by 1−γ, any other one by −γ: so max(γ, 1−γ).
    """
    if adjacency == "replace_one":
        return 1.0
    if adjacency == "add_remove":
        return max(quantile, 1 - quantile)
    raise ConfigurationError(f"adjacency is {adjacency!r}: choose add_remove or replace_one.")


def quantile_probabilities(
    values: Iterable[float] | torch.Tensor,
    quantile: float,
    bounds: tuple[float, float],
    *,
    epsilon: float,
    adjacency: Adjacency = "add_remove",
) -> tuple[Floats, Floats]:
    """The exact output distribution of :func:`private_quantile` (before its rounding): edges (n+2,) and probabilities (n+1,).

    The density of the exponential mechanism, ∝ exp(ε·u(x, r)/2Δ) on [low, high], is constant between neighbouring values:
    the interval with k values below it has the probability ∝ length·exp(−ε·|k − γn|/2Δ).
    """
    low, high = _range(bounds)
    gamma = _share(quantile)
    budget = positive("epsilon", epsilon)
    data = np.sort(np.clip(np.nan_to_num(_numbers(values), nan=high), low, high))
    edges = np.concatenate([[low], data, [high]])
    lengths = np.diff(edges)
    utility = -np.abs(np.arange(len(data) + 1) - gamma * len(data))
    with np.errstate(divide="ignore"):  # between equal values there is no room: log 0
        weights = np.log(lengths) + budget / (2 * rank_sensitivity(gamma, adjacency)) * utility
    weights = np.exp(weights - weights.max())
    return edges, weights / weights.sum()


def private_quantile(
    values: Iterable[float] | torch.Tensor,
    quantile: float,
    bounds: tuple[float, float],
    *,
    epsilon: float,
    adjacency: Adjacency = "add_remove",
    generator: torch.Generator | None = None,
    budget: AnyBudget = None,
) -> PrivateQuantile:
    """A γ-quantile of one number per record, ε-DP (δ = 0), by the exponential mechanism on the continuous range.

    Args:
        values: one number per record; clipped to ``bounds`` (what is not a number counts as the upper one). How many there are
            is private too, for "add_remove".
        quantile: γ, e.g. 0.9.
        bounds: public (low, high); the answer lies between them.
        epsilon: pure ε of this one release.
        adjacency: which datasets are neighbours; the noise follows (:func:`rank_sensitivity`).
        generator: for a repeatable release; as secret as the data. By default from the operating system's randomness.
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file; charged before anything is drawn.

    Proof: u moves by at most Δ, so exp(ε·u/2Δ) by a factor of at most exp(ε/2), and so does its integral.
    """
    edges, probabilities = quantile_probabilities(values, quantile, bounds, epsilon=epsilon, adjacency=adjacency)
    charge(budget, Pure(epsilon, adjacency), f"a quantile ({quantile:g})")
    draw = _uniforms(generator, 2)
    cumulative = np.cumsum(probabilities)
    interval = min(int(np.searchsorted(cumulative, draw[0] * cumulative[-1], side="right")), len(probabilities) - 1)
    place = edges[interval] + draw[1] * (edges[interval + 1] - edges[interval])
    low, high = _range(bounds)
    step = (high - low) * _GRID
    return PrivateQuantile(min(max(low + round((place - low) / step) * step, low), high), float(epsilon))


def crossing_scales(epsilon: float, sensitivity: float = 1.0, *, monotone: bool = False) -> tuple[float, float]:
    """Scales of the Laplace noise on the threshold and on each query, for ``above_threshold`` at ε.

    With ε₁ + ε₂ = ε: threshold Δ/ε₁, queries 2Δ/ε₂; for monotone queries (one record moves all of them the same way) Δ/ε₂.
    The split ε₂/ε₁ = 2^⅔ (1 if monotone) gives the difference of the two noises its least variance (Lyu, Su and Li 2017).
    """
    budget, delta = positive("epsilon", epsilon), positive("sensitivity", sensitivity)
    moves = 1.0 if monotone else 2.0
    first = budget / (1 + moves ** (2 / 3))
    return delta / first, moves * delta / (budget - first)


def above_threshold(
    queries: Iterable[float],
    threshold: float,
    *,
    epsilon: float,
    sensitivity: float = 1.0,
    monotone: bool = False,
    generator: torch.Generator | None = None,
    budget: AnyBudget = None,
) -> Crossing:
    """The position of the first query that is above the threshold, all of them noised: ε-DP however many queries there are.

    Sparse vector technique for one crossing, in the corrected form of Lyu, Su and Li (2017, algorithm 1): noise on the threshold,
    fresh noise on *every* query, nothing but the index released, and an end at the first crossing.

    Proof. Let ρ be the threshold's noise, of scale Δ/ε₁. Replace ρ by ρ+Δ for a neighbour: no query that was below rises above,
    for a query moves by ≤ Δ; this costs e^ε₁. The crossing query must still cross a threshold that is Δ higher, having moved by up
    to Δ: noise of scale 2Δ/ε₂ makes that cost e^ε₂. If all queries move the same way, then upwards the move helps, and
    downwards the threshold need not be moved; so scale Δ/ε₂ will do.

    Args:
        queries: numbers, evaluated one by one until one crosses (a generator stops being read there).
        threshold: a public number.
        epsilon: pure ε of the whole search.
        sensitivity: Δ, most by which one record moves any of the queries.
        monotone: whether, for any two neighbours, all queries move in the same direction. If in doubt, False.
        generator: as in :func:`private_quantile`.
        budget: as in :func:`private_quantile`; the sensitivity has to be that of its neighbours.
    """
    if not is_number(threshold):
        raise ConfigurationError(f"threshold is {threshold!r}: it has to be a finite public number.")
    threshold_scale, query_scale = crossing_scales(epsilon, sensitivity, monotone=monotone)
    charge(budget, Pure(epsilon), "a first crossing")
    source = _source(generator)
    level = threshold + _laplace(threshold_scale, source)
    for index, query in enumerate(queries):
        if not math.isfinite(query):
            raise DataError(f"query number {index} is {query!r}: a query of bounded sensitivity is finite.")
        if query + _laplace(query_scale, source) >= level:
            return Crossing(index, float(epsilon))
    return Crossing(None, float(epsilon))


def crossing_probabilities(
    queries: Sequence[float],
    threshold: float,
    *,
    epsilon: float,
    sensitivity: float = 1.0,
    monotone: bool = False,
    nodes: int = 20_001,
) -> Floats:
    """P(index = 0), …, P(index = last), P(None) of :func:`above_threshold`, by numerical integration over the threshold's noise.

    P(k) = ∫ p(ρ)·Π_{i<k} P(q_i + ν < T + ρ)·P(q_k + ν ≥ T + ρ) dρ, summed over an even grid of ρ that leaves out e⁻⁴⁰.
    """
    threshold_scale, query_scale = crossing_scales(epsilon, sensitivity, monotone=monotone)
    reach = 40 * threshold_scale
    rho = np.linspace(-reach, reach, 2 * (whole("nodes", nodes, least=3) // 2) + 1)
    mass = np.exp(-np.abs(rho) / threshold_scale)
    mass /= mass.sum()
    asked = np.asarray(queries, dtype=np.float64)
    gap = (threshold + rho[:, None] - asked[None, :]) / query_scale
    half = np.exp(-np.abs(gap)) / 2
    below, above = np.where(gap < 0, half, 1 - half), np.where(gap < 0, 1 - half, half)
    before = np.cumprod(np.concatenate([np.ones((len(rho), 1)), below], axis=1), axis=1)
    each = before * np.concatenate([above, np.ones((len(rho), 1))], axis=1)
    result: Floats = mass @ each
    return result


def clip_search(
    norms: Iterable[float] | torch.Tensor,
    candidates: Sequence[float],
    *,
    quantile: float = 0.9,
    dataset_size: int,
    epsilon: float,
    generator: torch.Generator | None = None,
    budget: AnyBudget = None,
) -> Crossing:
    """The smallest candidate C that leaves a share ``quantile`` of the examples unclipped, as far as noise tells; ε-DP.

    The alternative to adaptive clipping: one search before training (over gradient norms at the initial weights, or input norms),
    not a count in every step. It asks ``−#{i: ‖g_i‖ > C}`` for each candidate in rising order, and stops above ``−(1−γ)·N``.

    The queries move by at most 1, and all in the same direction, for a record that is added or removed, and also for one
    that is replaced (its norm rises or falls): monotone in both cases, so the cost is the same for both adjacencies.

    Args:
        norms: one number per record, over the whole dataset. A norm that is not a number counts as above every candidate.
        candidates: public, in rising order.
        quantile: γ.
        dataset_size: N, a public constant.
        epsilon: pure ε of the whole search.
        generator: as in :func:`private_quantile`.
        budget: as in :func:`private_quantile`.

    Returns:
        The crossing, with the candidate as ``value``; None where even the largest clips too many.
    """
    grid = [positive("a candidate", value) for value in candidates]
    if not grid or any(later <= earlier for earlier, later in itertools.pairwise(grid)):
        raise ConfigurationError("candidates are public positive numbers in strictly rising order, at least one.")
    data = _numbers(norms)
    allowed = (1 - _share(quantile)) * whole("dataset_size", dataset_size)
    too_long = (-float(len(data) - np.count_nonzero(data <= value)) for value in grid)
    found = above_threshold(too_long, -allowed, epsilon=epsilon, monotone=True, generator=generator, budget=budget)
    return Crossing(found.index, found.epsilon, None if found.index is None else grid[found.index])


def _range(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not (is_number(low) and is_number(high) and low < high):
        raise ConfigurationError(f"bounds are {bounds!r}: two finite public numbers, the lower one first.")
    return float(low), float(high)


def _share(quantile: float) -> float:
    if not (is_number(quantile) and 0 <= quantile <= 1):
        raise ConfigurationError(f"quantile is {quantile!r}: a share between 0 and 1, e.g. 0.9.")
    return float(quantile)


def _numbers(values: Iterable[float] | torch.Tensor) -> Floats:
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    data = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    if data.ndim != 1:
        raise DataError(f"a private quantile is of one number per record, shape (records,); got shape {data.shape}.")
    return data


def _source(generator: torch.Generator | None) -> torch.Generator:
    return make_generator(fresh_seed(), 0, "quantile") if generator is None else generator


def _uniforms(generator: torch.Generator | None, count: int) -> Floats:
    source = _source(generator)
    drawn: Floats = torch.rand(count, generator=source, dtype=torch.float64, device=source.device).cpu().numpy()
    return drawn


def _laplace(scale: float, source: torch.Generator) -> float:
    """Laplace noise: the difference of two exponentials, −log(1−u) with u in [0, 1)."""
    first, second = -np.log1p(-_uniforms(source, 2))
    return float(scale * (first - second))
