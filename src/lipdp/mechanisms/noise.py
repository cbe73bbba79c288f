"""Noise for sums: the Laplace and staircase distributions, as densities (to train and evaluate) and as real draws (to release).

Releases are integers plus integer noise, by :mod:`lipdp.privacy.randomness`: without rounding, from the same cryptographic stream
as all other releases. opendp (extra ``mechanisms``) draws Laplace noise of the same distribution where it is asked for; staircase
noise is not in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lipdp._checks import one_of
from lipdp._texts import brief
from lipdp.errors import ConfigurationError
from lipdp.privacy import randomness
from lipdp.privacy.randomness import Stream

NoiseKind = Literal["laplace", "staircase"]
Sampler = Literal["auto", "opendp", "exact"]


def staircase_step(epsilon: float) -> float:
    """γ of the staircase for squared error, as a part of Δ: where the first step ends (Geng and Viswanath 2014, theorem 4).

    With b = exp(−ε): γ = −b/(1−b) + (b − 2b² + 2b⁴ − b⁵)^⅓ / (2^⅓·(1−b)²). For small ε it tends to ½.
    """
    b = math.exp(-epsilon)
    if 1 - b < 1e-3:
        return 0.5
    inside = b - 2 * b**2 + 2 * b**4 - b**5
    value = -b / (1 - b) + math.copysign(abs(inside) ** (1 / 3), inside) / (2 ** (1 / 3) * (1 - b) ** 2)
    return min(max(value, 1e-6), 1.0)


def density(kind: NoiseKind, z: Tensor, sensitivity: float, epsilon: float) -> Tensor:
    """The density of the noise at z, up to a constant."""
    size = z.abs() / sensitivity
    if kind == "laplace":
        return torch.exp(-epsilon * size)
    floor = size.floor()
    return torch.exp(-epsilon * (floor + (size - floor >= staircase_step(epsilon)).to(z.dtype)))


def draw_noise(kind: NoiseKind, uniform: Tensor, sensitivity: float, epsilon: float) -> Tensor:
    """Noise from uniforms of (0, 1), by inverse CDF: for evaluation and training only."""
    centred = 2 * uniform - 1
    sign, u = torch.sign(centred), centred.abs().clamp(max=1 - 1e-12)
    if kind == "laplace":
        return -sign * torch.log1p(-u) * (sensitivity / epsilon)
    gamma, b = staircase_step(epsilon), math.exp(-epsilon)
    # One-sided mass of turn g is (1−b)·b^g; inside of it γ against (1−γ)·b.
    turn = torch.floor(torch.log1p(-u) / -epsilon)
    rest = ((u - (1 - torch.exp(-epsilon * turn))) / ((1 - b) * torch.exp(-epsilon * turn))).clamp(0, 1)
    first = gamma / (gamma + (1 - gamma) * b)
    place = torch.where(rest < first, rest / first * gamma, gamma + (rest - first) / max(1 - first, 1e-12) * (1 - gamma))
    return sign * (turn + place) * sensitivity


def opendp_installed() -> bool:
    """Whether opendp can be imported."""
    return importlib.util.find_spec("opendp") is not None


def check_sampler(sampler: Sampler, draws: str) -> bool:
    """Whether opendp makes these draws: where it is asked for, offers them and is installed. An order is obeyed or refused.

    ``draws`` is a kind of noise or of selection. opendp has no staircase noise, and its exponential mechanism has no pure-DP map.
    """
    offered = draws in ("laplace", "permute_and_flip")
    if one_of("sampler", sampler, get_args(Sampler)) == "opendp" and not opendp_installed():
        raise ConfigurationError(
            "sampler='opendp', but opendp is not installed. Install it with: pip install 'lipdp[mechanisms]', or use "
            "sampler='exact', lipdp's own exact sampler of the same distribution."
        )
    if sampler == "opendp" and not offered:
        raise ConfigurationError(
            f"sampler='opendp', but opendp does not offer {draws.replace('_', '-')} draws for pure DP: use sampler='auto' or "
            "'exact' (the same guarantee)."
        )
    return sampler == "opendp"


@cache
def _opendp() -> Any:
    dp = importlib.import_module("opendp.prelude")
    dp.enable_features("contrib")
    return dp


def release_noise(
    kind: NoiseKind, values: Sequence[int], sensitivity: int, epsilon: Fraction, sampler: Sampler = "auto"
) -> list[int]:
    """Integers of joint L1 sensitivity Δ plus fresh noise, ε-DP: the real release.

    Laplace: P(Z = z) ∝ exp(−ε|z|/Δ) on each. Staircase: one value only (on more, the shape does not compose to ε).
    """
    opendp, below = check_sampler(sampler, kind), Stream().below
    if kind == "staircase":
        if len(values) != 1:
            raise ConfigurationError(f"staircase noise is for one value, not {len(values)}: use Laplace noise for a vector.")
        step = min(max(round(staircase_step(float(epsilon)) * sensitivity), 1), sensitivity)
        return [values[0] + randomness.discrete_staircase(sensitivity, step, epsilon, below)]
    if not opendp:
        return [value + randomness.discrete_laplace(sensitivity / epsilon, below) for value in values]
    dp = _opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
    measurement = _within(lambda scale: dp.m.make_laplace(*space, scale=scale), sensitivity, epsilon, sensitivity / float(epsilon))
    return [int(value) for value in measurement(list(values))]


def release_selection(method: str, utilities: Sequence[int], sensitivity: int, epsilon: Fraction, sampler: Sampler = "auto") -> int:
    """The index of a response, ε-DP for utilities that each move by at most Δ: the real release.

    opendp's noisy max with exponential noise is permute-and-flip (Ding et al. 2021); its exponential mechanism is not offered
    with a pure-DP map, so that one is always ours.
    """
    opendp, below = check_sampler(sampler, method), Stream().below
    if method == "exponential":
        return randomness.exponential_mechanism(utilities, sensitivity, epsilon, below)
    if not opendp:
        return randomness.permute_and_flip(utilities, sensitivity, epsilon, below)
    dp = _opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.linf_distance(T="i64")
    measurement = _within(
        lambda scale: dp.m.make_noisy_max(*space, dp.max_divergence(), scale=scale),
        sensitivity,
        epsilon,
        2 * sensitivity / float(epsilon),
    )
    return int(measurement(list(utilities)))


_DEEPEST, _BITS = 200, 512  # as in lipdp.privacy.quantile: weights end at exp(−200), and are right to 2⁻²⁰⁰ of themselves
_LESS = 1 - Fraction(1, 2**60)  # of ε is spent: the rounding of weights stays inside the rest


def deepest(epsilon: Fraction) -> Fraction:
    """L, the distance from which on all blocks of :func:`release_block` weigh the same: (ε/2)·L = 200."""
    return _DEEPEST / (epsilon * _LESS / 2)


def release_block(blocks: Sequence[tuple[Fraction, int]], epsilon: Fraction) -> tuple[int, int]:
    """The index of a block and the number of one of its copies, from (distance, copies): the real release, ε-DP.

    P(one copy) ∝ exp(−(ε/2)·min(distance, L)), for distances that each move by at most one when a record is replaced and copies
    that are public. Weights are whole numbers of at least 2²⁰⁰; rounding moves their ratios by less than the 2⁻⁶⁰ of ε left over.
    """
    slope = epsilon * _LESS / 2
    weights = _distance_weights({distance for distance, _ in blocks}, slope)
    sizes = [weights[distance] * copies for distance, copies in blocks]
    drawn = Stream().below(sum(sizes))
    for index, ((distance, _), size) in enumerate(zip(blocks, sizes, strict=True)):
        if drawn < size:
            return index, drawn // weights[distance]
        drawn -= size
    raise AssertionError


def _distance_weights(distances: Iterable[Fraction], slope: Fraction) -> dict[Fraction, int]:
    """exp(−slope·min(d, L)) in units of 2⁻⁵¹², those a whole number apart by powers of exp(−slope)."""
    least, step = randomness.exp_of_minus(Fraction(_DEEPEST), _BITS), randomness.exp_of_minus(slope, _BITS)
    weights: dict[Fraction, int] = {}
    last: dict[Fraction, tuple[Fraction, int]] = {}
    for distance in sorted(distances):
        before, weight = last.get(distance % 1, (distance, 0))
        if not weight:
            weight = randomness.exp_of_minus(min(slope * distance, Fraction(_DEEPEST)), _BITS)
        while before < distance and weight > least:
            before, weight = before + 1, weight * step >> _BITS
        last[distance % 1] = (distance, max(weight, least))
        weights[distance] = max(weight, least)
    return weights


def _within(make: Any, sensitivity: int, epsilon: Fraction, scale: float) -> Any:
    """The measurement whose own privacy map says at most ε: float scales are rounded up, never down."""
    for _ in range(64):
        measurement = make(scale)
        if Fraction(measurement.map(sensitivity)) <= epsilon:
            return measurement
        scale *= 1 + 2**-50
    raise ConfigurationError(
        f"opendp's privacy map does not reach epsilon {brief(float(epsilon))} for sensitivity {sensitivity}: use sampler='exact'."
    )
