"""Quantiles and first crossings of bounded numbers, with pure ε-DP: to choose an input bound or a clipping norm, paid for.

Nothing is drawn in floating point. Numbers are rounded to a public grid, each by itself; noise on the grid, and choices from it,
are exact (:mod:`lipdp.privacy.randomness`), with what rounding adds to a sensitivity counted in.

**Adaptive clipping** follows a private quantile (Andrew et al., 2021), paid for inside the step's own Gaussian mechanism.
With b_i = 1[‖g_i‖ ≤ C], each step also releases ``S = Σ_i (b_i − ½) + N(0, σ_b²)``. One example changes that sum by ½ at most, so
the pair (gradient, S) is one Gaussian mechanism: for a total multiplier z the gradient gets ``z_Δ = (z⁻² − (2σ_b)⁻²)^(-1/2)``.
With k clipping norms there are k counts, and k terms ``(2σ_b)⁻²``.
The accountant is told z, once: the whole run's ε is known before it starts, and nothing is spent beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from lipdp._checks import discreet, is_number, kind_of, one_of, positive, whole
from lipdp.errors import ConfigurationError, DataError
from lipdp.fields import Count, Probability, Scale, check_fields
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.costs import Pure, exact
from lipdp.privacy.randomness import Stream, discrete_laplace, exp_of_minus

Floats = npt.NDArray[np.float64]

# A released quantile is one of so many places of the range and its end, finer than any use of it.
_PLACES = 2**30
# Utilities end so far below the best one (in the exponent): what lies beyond has probability 2^-250 in all, and the weights that
# are left can be computed to 2^-200 of themselves.
_DEEPEST, _BITS = 200, 512
_LESS = 1 - Fraction(1, 2**60)  # of ε is spent: the rounding of weights stays inside the rest
# Steps of the grid that queries are rounded to, in their sensitivity.
_STEPS = 2**40


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
    return 1.0 if one_of("adjacency", adjacency, get_args(Adjacency)) == "replace_one" else max(quantile, 1 - quantile)


def quantile_probabilities(
    values: Iterable[float] | torch.Tensor,
    quantile: float,
    bounds: tuple[float, float],
    *,
    epsilon: float,
    adjacency: Adjacency = "add_remove",
) -> tuple[Floats, Floats]:
    """The output distribution of :func:`private_quantile` on a grid without end: edges (n+2,) and probabilities (n+1,).

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
    generator: Stream | None = None,
    budget: AnyBudget = None,
) -> PrivateQuantile:
    """A γ-quantile of one number per record, ε-DP (δ = 0), by the exponential mechanism on a fine public grid of the range.

    Args:
        values: one number per record; clipped to ``bounds`` (what is not a number counts as the upper one). How many there are
            is private too, for "add_remove".
        quantile: γ, e.g. 0.9.
        bounds: public (low, high); the answer lies between them.
        epsilon: pure ε of this one release.
        adjacency: which datasets are neighbours; the noise follows (:func:`rank_sensitivity`).
        generator: for a repeatable release; as secret as the data. By default a fresh key from the operating system.
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file; charged before anything is drawn.

    Proof: u moves by at most Δ, and so does max(u, −L), so exp(ε·u/2Δ) by a factor of at most exp(ε/2), and so does its sum over
    the grid. Weights are whole numbers, of at least 2²⁰⁰: rounding them moves the ratio by less than the 2⁻⁶⁰ of ε that are left
    over.
    """
    low, high = _range(bounds)
    gamma, spent = Fraction(_share(quantile)), positive("epsilon", epsilon)
    data = np.clip(np.nan_to_num(_numbers(values), nan=high), low, high)
    # Place j is above a value x from this one on; each record is rounded by itself, so that neighbours stay neighbours.
    first_above = np.sort(np.clip(np.floor((data - low) * (_PLACES / (high - low))).astype(np.int64) + 1, 0, _PLACES + 1))
    rank_sensitivity(float(gamma), adjacency)  # refuses other neighbours
    moves = Fraction(1) if adjacency == "replace_one" else max(gamma, 1 - gamma)  # exactly
    slope = min(Fraction(spent), exact("epsilon", spent)) * _LESS / (2 * moves)  # what is charged is the decimal
    charge(budget, Pure(epsilon, adjacency), f"a quantile ({quantile:g})")
    place = _choose_place(first_above, gamma, slope, _stream(generator))
    return PrivateQuantile(min(max(low + place * ((high - low) / _PLACES), low), high), float(epsilon))


def _choose_place(first_above: npt.NDArray[np.int64], gamma: Fraction, slope: Fraction, stream: Stream) -> int:
    """A place j of the grid with probability ∝ exp(−slope·min(|k_j − γn|, L)), k_j values being below it, slope·L = 200."""
    count = len(first_above)
    centre, reach = gamma * count, math.ceil(_DEEPEST / slope)
    near = range(max(0, math.floor(centre) - reach), min(count, math.ceil(centre) + reach) + 1)
    edges = [0, *first_above[near.start : near.stop - 1].tolist(), _PLACES + 1]
    if near.start > 0:  # places with fewer values below them than any near one has
        edges[0] = int(first_above[near.start - 1])
    if near.stop <= count:
        edges[-1] = int(first_above[near.stop - 1])
    weights = _weights(near, centre, slope)
    least = exp_of_minus(Fraction(_DEEPEST), _BITS)
    blocks = [(0, edges[0], least), *zip(edges, edges[1:], weights, strict=False), (edges[-1], _PLACES + 1, least)]
    return _pick(blocks, stream)


def _pick(blocks: list[tuple[int, int, int]], stream: Stream) -> int:
    """A place of these blocks (start, stop, weight of each place), in proportion to the weights."""
    drawn = stream.below(sum((stop - start) * weight for start, stop, weight in blocks))
    for start, stop, weight in blocks:
        if drawn < (stop - start) * weight:
            return start + drawn // weight
        drawn -= (stop - start) * weight
    raise AssertionError


def _weights(near: range, centre: Fraction, slope: Fraction) -> list[int]:
    """exp(−slope·min(|k − centre|, L)) for each k, in units of 2^-512: by powers of exp(−slope), from the middle outwards."""
    least, step = exp_of_minus(Fraction(_DEEPEST), _BITS), exp_of_minus(slope, _BITS)
    middle = math.ceil(centre)
    weights: dict[int, int] = {}
    for side, first in ((range(middle, near.stop), middle - centre), (range(middle - 1, near.start - 1, -1), centre - middle + 1)):
        weight = exp_of_minus(slope * first, _BITS)
        for k in side:
            weights[k] = max(weight, least)
            weight = weight * step >> _BITS
    return [weights[k] for k in near]


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
    generator: Stream | None = None,
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
    stream = _stream(generator)
    # One record moves a rounded query by the sensitivity and one step more, in steps of the grid.
    spacing = math.ldexp(1.0, math.frexp(sensitivity / _STEPS)[1])
    moved = math.ceil(Fraction(sensitivity) / Fraction(spacing)) + 1
    grown = moved * Fraction(spacing) / Fraction(sensitivity) * (1 + Fraction(1, 2**50)) / Fraction(spacing)
    level = _in_steps(threshold, spacing) + discrete_laplace(Fraction(threshold_scale) * grown, stream.below)
    for index, query in enumerate(queries):
        if not math.isfinite(query):
            raise DataError("a query is no finite number: one of bounded sensitivity is.")
        if _in_steps(query, spacing) + discrete_laplace(Fraction(query_scale) * grown, stream.below) >= level:
            return Crossing(index, float(epsilon))
    return Crossing(None, float(epsilon))


def _in_steps(value: float, spacing: float) -> int:
    """Rounded to the grid, exactly."""
    return round(Fraction(value) / Fraction(spacing))


def clip_search(
    norms: Iterable[float] | torch.Tensor,
    candidates: Sequence[float],
    *,
    quantile: float = 0.9,
    dataset_size: int,
    epsilon: float,
    generator: Stream | None = None,
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
    chosen = above_threshold(too_long, -allowed, epsilon=epsilon, monotone=True, generator=generator, budget=budget)
    return Crossing(chosen.index, chosen.epsilon, None if chosen.index is None else grid[chosen.index])


def _range(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not (is_number(low) and is_number(high) and low < high):
        raise ConfigurationError(f"bounds are {bounds!r}: two finite public numbers, the lower one first.")
    return float(low), float(high)


def _share(quantile: float) -> float:
    if not (is_number(quantile) and 0 <= quantile <= 1):
        raise ConfigurationError(f"quantile is {quantile!r}: a share between 0 and 1, e.g. 0.9.")
    return float(quantile)


@discreet
def _numbers(values: Iterable[float] | torch.Tensor) -> Floats:
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    try:
        data = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    except (TypeError, ValueError):  # without numpy's text, which shows the value
        raise DataError(f"a private quantile is of numbers, one for each record; {kind_of(values)} holds something else.") from None
    if data.ndim != 1:
        raise DataError(f"a private quantile is of one number per record, shape (records,); got shape {data.shape}.")
    return data


def _stream(generator: Stream | None) -> Stream:
    if generator is not None and not isinstance(generator, Stream):
        raise ConfigurationError(
            f"a release is drawn from a lipdp.privacy.Stream, not from a {type(generator).__name__}: torch's own generators can be "
            "predicted from what they gave. Leave generator out, or pass lipdp.privacy.generator(seed, …)."
        )
    return Stream() if generator is None else generator


COUNT_SENSITIVITY = 0.5
"""|b_i − ½|: how much one example moves the centred count."""
_FAR = 600.0  # of exponents: exp reaches no further


def gradient_multiplier(total: float, count_noise: float, counts: int = 1) -> float:
    """z_Δ = (z⁻² − k(2σ_b)⁻²)^(-1/2): what is left for the gradient when k counts are released with standard deviation σ_b.

    Larger than ``total``: the gradient must be noised more, since the counts use a part of the budget. Needs 2σ_b > √k·z.

    Args:
        total: z, the noise multiplier of the whole step, which is accounted for.
        count_noise: σ_b, in examples.
        counts: k, one for each clipping norm.
    """
    z, sigma_b = positive("total multiplier", total), positive("count_noise", count_noise)
    least = z * COUNT_SENSITIVITY * math.sqrt(counts)
    if not sigma_b > least:
        raise ConfigurationError(
            f"count_noise={sigma_b:g} leaves nothing for the gradient at a total multiplier of {z:g}: the count alone would use "
            f"more than the budget. Use a count_noise above {least:g}; batch_size/20 is usual."
        )
    return 1 / math.sqrt(z**-2 - counts * (sigma_b / COUNT_SENSITIVITY) ** -2)


@dataclass(frozen=True)
class AdaptiveClip:
    """The clipping norm's update: ``C ← C·exp(−η(b̃ − γ))`` with ``b̃ = S/b + ½``, b the constant expected batch size.

    Attributes:
        quantile: γ, the share of examples that should not be clipped.
        rate: η.
        count_noise: σ_b. By default a :func:`lipdp.plan` takes b/20, or 3z if that is more (then the gradient's noise grows by
            1.4%), times √k for k clipping norms.
        batch_size: b; by default the plan's.
    """

    quantile: Probability = 0.5
    rate: Scale = 0.2
    count_noise: Scale | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self, "adaptive clipping")

    def completed(self, batch_size: int, multiplier: float, counts: int) -> AdaptiveClip:
        """The same with a plan's batch size, and with σ_b chosen where it was left open."""
        noise = self.count_noise or max(batch_size / 20, 3 * multiplier) * math.sqrt(counts)
        return dataclasses.replace(self, batch_size=batch_size, count_noise=noise)

    def centred_count(self, norms: torch.Tensor, clip: float) -> torch.Tensor:
        """Σ_i (1[‖g_i‖ ≤ C] − ½), to be noised by σ_b."""
        return ((norms <= clip).to(torch.float64) - COUNT_SENSITIVITY).sum()

    def updated(self, clip: float, noised_count: float) -> float:
        """C after one step, from the released S."""
        change = -self.rate * (self.share(noised_count) - self.quantile)
        return clip * math.exp(min(max(change, -_FAR), _FAR))

    def share(self, noised_count: float) -> float:
        """b̃ = S/b + ½, the released estimate of the share that is not clipped."""
        if self.batch_size is None:
            raise ConfigurationError("this AdaptiveClip has no batch_size yet: a plan completes it")
        return noised_count / self.batch_size + COUNT_SENSITIVITY
