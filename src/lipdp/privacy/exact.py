"""Exact samplers on the integers, in rational arithmetic, from the bits of a :class:`~lipdp.privacy.randomness.Stream`.

Floating-point noise has gaps and tells on the value under it (Mironov 2012). Here nothing is rounded: the probabilities are
exactly those of the proof. After Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020),
algorithms 1 and 2, and McKenna and Sheldon, "Permute-and-Flip" (2020).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

from lipdp.privacy.randomness import Stream

__all__ = [
    "Below",
    "bernoulli_exp",
    "discrete_laplace",
    "discrete_staircase",
    "exp_of_minus",
    "exponential_mechanism",
    "permute_and_flip",
]

Below = Callable[[int], int]
"""``below(k)`` is uniform on 0, …, k−1: that of a stream. Where none is given, one with a fresh key is used."""


@lru_cache(maxsize=256)
def exp_of_minus(x: Fraction, bits: int) -> int:
    """exp(−x), x ≥ 0, in units of 2^-bits: by its series, off by less than one such unit."""
    halvings = max(0, int(x).bit_length() + 1)
    fine = bits + 2 * halvings + 16
    small = (x.numerator << fine) // (x.denominator << halvings)
    term = total = 1 << fine
    for n in itertools.count(1):
        term = -(term * small >> fine) // n
        if term in (0, -1):
            break
        total += term
    for _ in range(halvings):
        total = total * total >> fine
    return total >> (fine - bits)


def bernoulli_exp(gamma: Fraction, below: Below | None = None) -> bool:
    """True with probability exactly exp(−γ), γ ≥ 0.

    For γ ≤ 1: let K be the first k with Bernoulli(γ/k) = 0. P(K > k) = γᵏ/k!, so P(K odd) = Σ (−γ)ᵏ/k! = exp(−γ).
    """
    below = below or Stream().below
    while gamma > 1:
        if not bernoulli_exp(Fraction(1), below):
            return False
        gamma -= 1
    k = 1
    while below(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1


def _geometric(gamma: Fraction, below: Below) -> int:
    """G with P(G = g) ∝ exp(−γg), for γ = a/b: with U uniform on 0…b−1 kept with probability exp(−U/b), and V ~ ∝ exp(−v),
    U + bV is ∝ exp(−z/b), and its quotient by a is ∝ exp(−γg).
    """
    a, b = gamma.numerator, gamma.denominator
    while True:
        start = below(b)
        if bernoulli_exp(Fraction(start, b), below):
            break
    turns = 0
    while bernoulli_exp(Fraction(1), below):
        turns += 1
    return (start + b * turns) // a


def discrete_laplace(scale: Fraction, below: Below | None = None) -> int:
    """Z with P(Z = z) ∝ exp(−|z|/scale): shifting by Δ changes each probability by at most exp(Δ/scale)."""
    below = below or Stream().below
    while True:
        size, negative = _geometric(1 / scale, below), below(2) == 1
        if size or not negative:  # zero once, not twice
            return -size if negative else size


def discrete_staircase(sensitivity: int, step: int, epsilon: Fraction, below: Below | None = None) -> int:
    """Z on the integers with the staircase shape of Geng and Viswanath (2014): P(Z = ±z) ∝ exp(−ε·level(z)), where
    level(z) = ⌊z/Δ⌋ + [z mod Δ ≥ step], 1 ≤ step ≤ Δ.

    Shifting by at most Δ changes ⌊|z|/Δ⌋ + [|z| mod Δ ≥ step] by at most one, so each probability by at most exp(ε): the
    level of z+Δ is that of z plus one, levels do not fall with |z|, and |z + d| ≤ |z| + Δ.
    """
    below = below or Stream().below
    while True:
        turns, place = _geometric(epsilon, below), below(sensitivity)
        if place >= step and not bernoulli_exp(epsilon, below):
            continue
        size, negative = turns * sensitivity + place, below(2) == 1
        if size or not negative:
            return -size if negative else size


def permute_and_flip(utilities: Sequence[int], sensitivity: int, epsilon: Fraction, below: Below | None = None) -> int:
    """An index: go through all in random order, stop at r with probability exp(−ε(u_max − u_r)/2Δ)."""
    below = below or Stream().below
    best, left = max(utilities), list(range(len(utilities)))
    while True:  # the best one always stops
        index = left.pop(below(len(left)))
        if bernoulli_exp(epsilon * (best - utilities[index]) / (2 * sensitivity), below):
            return index


def exponential_mechanism(utilities: Sequence[int], sensitivity: int, epsilon: Fraction, below: Below | None = None) -> int:
    """An index r with P(r) ∝ exp(ε·u_r/2Δ): the same coins as permute-and-flip, but with replacement (rejection sampling)."""
    below = below or Stream().below
    best = max(utilities)
    while True:
        index = below(len(utilities))
        if bernoulli_exp(epsilon * (best - utilities[index]) / (2 * sensitivity), below):
            return index
