"""Composed privacy losses against brute force: polynomials multiplied in whole numbers, δ(ε) summed up in 80 digits.

Nothing is shared with what is tested but the masses of one step. Those are compared with closed forms, in mpmath, on their own.
"""

from __future__ import annotations

import itertools
import math
import os

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lipdp.privacy._composed_losses import Composition, _Direction, compose_losses
from lipdp.privacy._step_losses import MISPLACED, Masses, SampledGaussian, largest_loss, step_masses

DIGITS = 80
BITS = 300  # a mass is so many bits behind the point; what is cut off only makes the reference smaller
mpmath.mp.dps = DIGITS


class Exact:
    """A distribution on whole numbers (from ``lowest`` on), its masses in units of 2^−BITS, rounded down."""

    def __init__(self, lowest: int, masses: list[int]) -> None:
        self.lowest, self.masses = lowest, masses

    @classmethod
    def of(cls, masses: Masses) -> Exact:
        return cls(masses.lowest, [int(mpmath.floor(mpmath.ldexp(mpmath.mpf(float(m)), BITS))) for m in masses.probabilities])

    def __mul__(self, other: Exact) -> Exact:
        """Polynomials as one large number each (Kronecker): their product holds all sums of products."""
        slot = 2 * BITS + max(len(self.masses), len(other.masses)).bit_length() + 1
        product = self._packed(slot) * other._packed(slot)
        count, step = len(self.masses) + len(other.masses) - 1, slot // 8 + 1
        content = product.to_bytes(step * count + step, "little")
        masses = [int.from_bytes(content[step * k : step * (k + 1)], "little") >> BITS for k in range(count)]
        return Exact(self.lowest + other.lowest, masses)

    def _packed(self, slot: int) -> int:
        step = slot // 8 + 1
        return int.from_bytes(b"".join(mass.to_bytes(step, "little") for mass in self.masses), "little")

    def power(self, count: int) -> Exact:
        if count == 1:
            return self
        half = self.power(count // 2)
        whole = half * half
        return whole * self if count % 2 else whole

    def delta(self, epsilon: mpmath.mpf, h: float) -> mpmath.mpf:
        """Σ_{l > ε} m(l)·(1 − e^{ε − l}); the mass at infinity is left out."""
        first = max(0, int(mpmath.floor(epsilon / h)) + 1 - self.lowest)
        terms = ((self.lowest + first + k, mass) for k, mass in enumerate(self.masses[first:]) if mass)
        return mpmath.ldexp(mpmath.fsum(-mpmath.expm1(epsilon - mpmath.mpf(h) * place) * mass for place, mass in terms), -BITS)


def exact_delta(parts: list[tuple[Masses, int]], epsilon: float, h: float) -> mpmath.mpf:
    whole = None
    for masses, count in parts:
        own = Exact.of(masses).power(count)
        whole = own if whole is None else whole * own
    finite = 1 - mpmath.fprod((1 - mpmath.mpf(masses.infinity)) ** count for masses, count in parts)
    assert whole is not None
    return whole.delta(mpmath.mpf(epsilon), h) + finite


def compare(parts: list[tuple[Masses, int]], h: float, delta: float, loose: float | None = None) -> None:
    """ε at δ and δ at that ε are not below what brute force says; and ε not far above it, where that is to be seen."""
    counts = [count for _, count in parts]
    composed = Composition([_Direction([masses for masses, _ in parts], counts, h)], h, 0.0)
    epsilon = composed.epsilon(delta, {})
    assert epsilon < math.inf
    there = exact_delta(parts, epsilon, h)
    assert there <= delta, f"ε = {epsilon} is too small: δ there is {mpmath.nstr(there, 12)}, not {delta}"
    assert there <= composed.delta(epsilon, {}), "δ is too small"
    if loose is not None:
        assert exact_delta(parts, epsilon * (1 - loose), h) > delta * (1 - 1e-6), f"ε = {epsilon} is more than {loose:g} too large"


def made_up(logs: list[float], lowest: int) -> Masses:
    weights = np.exp(np.asarray(logs) - max(logs))
    return Masses(lowest, weights / weights.sum(), 0.0)


masses = st.builds(made_up, st.lists(st.floats(-60.0, 0.0), min_size=2, max_size=7), st.integers(-4, 1))


@settings(
    max_examples=int(os.environ.get("LIPDP_COMPOSITIONS", "15")), deadline=None, derandomize="LIPDP_COMPOSITIONS" not in os.environ
)
@given(
    masses=masses,
    count=st.sampled_from([2, 3, 7, 30, 63, 64, 100, 700]),
    h=st.sampled_from([1e-3, 0.02, 0.3, 2.0]),
    digits=st.floats(1.0, 30.0),
)
@example(masses=Masses(-1, np.array([0.5, 0.0, 0.5]), 0.0), count=100, h=0.05, digits=29.0)
@example(masses=Masses(0, np.array([1 - 1e-9, 0, 0, 0, 0, 1e-9]), 0.0), count=2000, h=0.5, digits=20.0)
def test_any_distribution(masses: Masses, count: int, h: float, digits: float) -> None:
    """Few points, masses of 26 magnitudes, up to 2,000 steps, δ to 1e-30; coefficients of transforms that are 0 among them."""
    compare([(masses, count)], h, 10.0**-digits)


@pytest.mark.parametrize("neighbours", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "h", "delta"),
    [(1.0, 0.01, 100, 0.05, 1e-8), (0.6, 1e-4, 64, 0.1, 1e-15), (3.0, 0.3, 40, 0.02, 1e-25), (0.8, 1e-6, 90, 0.02, 1e-11)],
)
def test_sampled_gaussians(sigma: float, q: float, steps: int, h: float, delta: float, neighbours: str) -> None:
    """The same, of steps as they are composed; every direction by itself."""
    for own in step_masses(SampledGaussian(sigma, q), neighbours, h, math.log(delta / steps / 1e5)):
        compare([(own, steps)], h, delta, loose=0.005)


def test_several_kinds_of_steps() -> None:
    steps = [(SampledGaussian(1.0, 0.05), 20), (SampledGaussian(2.0, 0.3), 9), (SampledGaussian(4.0, 1.0), 1)]
    log_tail = math.log(1e-10 / 30 / 1e5)
    kinds = [step_masses(step, "add_remove", 0.05, log_tail) for step, _ in steps]
    for direction in range(2):
        compare([(kind[direction], count) for kind, (_, count) in zip(kinds, steps, strict=True)], 0.05, 1e-10, loose=0.005)
    whole = compose_losses(steps, "add_remove", 0.05, log_tail).epsilon(1e-10, {})
    assert all(
        exact_delta([(kind[direction], count) for kind, (_, count) in zip(kinds, steps, strict=True)], whole, 0.05) <= 1e-10
        for direction in range(2)
    )


def phi(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def true_delta(sigma: float, q: float, epsilon: mpmath.mpf, direction: str) -> mpmath.mpf:
    """sup_S P(S) − e^ε·Q(S) of one step: over the half-line where P's density is above e^ε times Q's."""
    s, rate, level = mpmath.mpf(sigma), mpmath.mpf(q), mpmath.exp(epsilon)

    def mixed(x: mpmath.mpf, centre: int) -> mpmath.mpf:
        """Mass above x of (1 − q)·N(0, σ²) + q·N(centre, σ²)."""
        return (1 - rate) * phi(-x / s) + rate * phi((centre - x) / s)

    if direction == "removed":
        ratio = (level - 1 + rate) / rate
        if ratio <= 0:
            return 1 - level
        x = s * s * mpmath.log(ratio) + mpmath.mpf(1) / 2
        return mixed(x, 1) - level * phi(-x / s)
    ratio = (1 / level - 1 + rate) / rate
    if ratio <= 0:
        return mpmath.mpf(0)
    x = s * s * mpmath.log(ratio) + mpmath.mpf(1) / 2
    return phi(x / s) - level * (1 - mixed(x, 1))


@pytest.mark.parametrize(
    ("sigma", "q"), [(0.3, 1e-6), (0.68, 1e-6), (1.0, 0.01), (3.0, 0.3), (30.0, 0.9), (0.5, 1.0), (200.0, 1e-3)]
)
@pytest.mark.parametrize("log_tail", [-30.0, -80.0])
def test_one_step_on_the_grid_is_never_below_the_closed_form(sigma: float, q: float, log_tail: float) -> None:
    """At points of the grid and between them; with every tail that counts as infinite, however rarely a record is drawn."""
    step = SampledGaussian(sigma, q)
    h = largest_loss(step, "add_remove", log_tail) / 150
    for name, own in zip(("removed", "added"), step_masses(step, "add_remove", h, log_tail), strict=True):
        places = [own.lowest + k for k in range(len(own.probabilities))]
        for share in (0.0, 0.01, 0.137, 0.5, 0.9):
            for place in (math.floor(share * places[-1]), math.floor(share * places[-1]) + 0.4):
                level = mpmath.mpf(max(place * h, 0.0))
                pairs = zip((mpmath.mpf(h) * k for k in places), own.probabilities.tolist(), strict=True)
                ours = own.infinity + mpmath.fsum(-mpmath.expm1(level - loss) * m for loss, m in pairs if loss > level and m)
                # The points of the grid are right to a few units in the last place.
                truth = true_delta(sigma, q, level + mpmath.mpf(MISPLACED) * (q + h * max(map(abs, places))), name)
                assert ours >= truth * (1 - mpmath.mpf(10) ** -14), (name, place)


@pytest.mark.parametrize("q", [1e-9, 1e-6, 1e-3, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("log_tail", [-5.0, -40.0, -100.0])
def test_what_counts_as_infinite_is_no_more_than_was_asked_for(q: float, log_tail: float) -> None:
    for sigma, neighbours in itertools.product((0.2, 1.0, 20.0), ("add_remove", "replace_one")):
        step = SampledGaussian(sigma, q)
        own = step_masses(step, neighbours, largest_loss(step, neighbours, log_tail) / 50, log_tail)[0]
        assert own.infinity <= math.exp(log_tail) * (1 + 1e-9)
