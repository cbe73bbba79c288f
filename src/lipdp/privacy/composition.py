"""The ε of everything that a dataset has paid for: events of all kinds, composed by dp-accounting.

Three upper bounds, each a theorem, and the smallest holds:

- *all*: the privacy loss distributions of all events, composed (PLD). An ε-DP release enters as the pair that dominates all of
  them, loss ±ε with odds e^ε : 1; an (ε, δ)-DP one with mass δ at infinity besides.
- *apart*: the distributions of the noise events alone, at δ − Σδ_i, plus Σε_i of the others (basic composition).
- *quick*: as *apart*, with Rényi divergences in the place of PLD. They are vectors that add up, so a charge that this bound allows
  needs nothing else: it costs the same whatever was charged before.

Samples of a fixed size (replaced records) have Rényi divergences and no PLD, Poisson samples for replaced records a PLD and no
divergences. Where both were charged, each kind has its own ε at one half of δ, and the sum of the two holds.

PLD rounds up to a grid. Where that alone refuses a charge, the analysis that plans are made with is asked (``_analyses.py``), and a
finer grid. And dp-accounting composes by Fourier transforms, whose rounding is about 1e-16 a release: where that is no longer
nothing against δ, its figure is taken at a δ that is smaller by :data:`_TRANSFORM` a release, and *apart* is that analysis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from lipdp._texts import brief
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy._analyses import FEW_ORDERS, as_known, divergences, events_epsilon, parts_epsilon
from lipdp.privacy._step_losses import SampledGaussian
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.costs import Approximate, Pure, from_key, to_key

Counts = Mapping[str, int]
"""How often each event was charged, by :func:`~lipdp.privacy.costs.to_key`."""

_GRIDS = (1e-4, 1e-5)  # dp-accounting's default, and what a refusal is checked with
_WORTH_REFINING = 1.25  # a grid costs less than this factor
_WIDEST = 1_000.0  # privacy loss beyond which no distribution is built: 1e7 bins on the first grid
_TRANSFORM = 1e-15  # of δ, for each release: what the rounding of a plain transform may hide, and more
_NOTICED = 1e-3  # share of δ from which on that is reckoned with
_ROUNDING = 1e-13  # of a Rényi divergence: what the arithmetic of one may have lost, and more
_MANY = 64  # kinds of events of a sort from which on they are merged
_REBUILD = 256  # increments after which a composition is made anew from its groups, where these are few


class Totals:
    """Events counted up, and sums over them that make the next charge cheap.

    Attributes:
        counts: how often each event was charged.
        stated: Σε of the releases that are known by their guarantee alone.
        slack: Σδ of those.
    """

    def __init__(self, adjacency: Adjacency) -> None:
        self.adjacency = adjacency
        self.counts: dict[str, int] = {}
        self.noise: dict[str, int] = {}
        self.stated, self.slack = Fraction(0), Fraction(0)
        self._curve: Any = 0.0

    def add(self, more: Counts) -> None:
        """Count these too; negative numbers give something back."""
        for key, count in more.items():
            _count(self.counts, key, count)
            event = _in_relation(from_key(key), self.adjacency)
            if isinstance(event, Pure | Approximate):
                self.stated += count * event.epsilon
                self.slack += count * (event.delta if isinstance(event, Approximate) else 0)
            if isinstance(from_key(key), Pure | Approximate):
                continue
            _count(self.noise, key, count)
            self._curve = None if self._curve is None or count < 0 else self._curve + count * self._curve_of(key)

    def plus(self, more: Counts) -> Totals:
        """The totals with these too; for asking, not for keeping."""
        copied = Totals(self.adjacency)
        copied.counts, copied.noise = dict(self.counts), dict(self.noise)
        copied.stated, copied.slack, copied._curve = self.stated, self.slack, self._curve
        copied.add(more)
        return copied

    def quick(self, more: Counts, delta: Fraction) -> float:
        """An upper bound on the ε of all this and ``more``, in constant time."""
        extra = Totals(self.adjacency)
        extra.add(more)
        stated, slack = self.stated + extra.stated, self.slack + extra.slack
        if slack > delta:
            return math.inf
        if not self.noise and not extra.noise:
            return math.nextafter(float(stated), math.inf)
        curve = self.curve + extra.curve
        known = slack < delta and not isinstance(curve, float)
        return float(stated) + (_curve_epsilon(curve, float(delta - slack)) if known else math.inf)

    @property
    def curve(self) -> Any:
        """The Rényi divergences of the noise, infinite where they are not known."""
        if self._curve is None:
            self._curve = sum((count * self._curve_of(key) for key, count in self.noise.items()), 0.0)
        return self._curve

    def without(self, keys: Iterable[str]) -> Totals:
        """The totals of all but these events."""
        left = Totals(self.adjacency)
        left.add({key: count for key, count in self.counts.items() if key not in set(keys)})
        return left

    def _curve_of(self, key: str) -> Any:
        return math.inf if as_known(from_key(key), self.adjacency) is None else _curve(key, self.adjacency)


class Composition:
    """What counts of events cost at δ for one relation of neighbours. It keeps what it composed last, and goes on from there."""

    def __init__(self, delta: Fraction, adjacency: Adjacency) -> None:
        self.delta, self.adjacency = delta, adjacency
        self._kept: dict[tuple[float, bool], _Composed] = {}

    def fits(self, totals: Totals, more: Counts, total: Fraction) -> bool:
        """Whether ``totals`` and ``more`` cost at most ε = ``total``."""
        extra = Totals(self.adjacency)
        extra.add(more)
        if not totals.noise and not extra.noise and totals.slack + extra.slack <= self.delta:
            if totals.stated + extra.stated <= total:  # exactly, in rational numbers
                return True
        elif totals.quick(more, self.delta) <= total:
            return True
        return self.delta > 0 and self.epsilon(totals.plus(more), total) <= total

    def epsilon(self, totals: Totals, total: Fraction | None = None) -> float:
        """The smallest ε known for ``totals``; on a finer grid where the first one alone puts it above ε = ``total``."""
        if self.delta == 0:
            return float(totals.stated) if not totals.noise and not totals.slack else math.inf
        least = min(self._tight(totals, _GRIDS[0]), totals.quick({}, self.delta))
        fixed = [key for key in totals.noise if _is_fixed_size(from_key(key))]
        if fixed:
            return min(least, self._divergences(totals), self._in_two(totals, fixed, total))
        if _hidden(totals.counts, float(self.delta)) or (total is not None and total < least < _WORTH_REFINING * total):
            least = min(least, self._as_planned(totals))
        if total is not None and total < least < _WORTH_REFINING * total:
            least = min(least, self._tight(totals, _GRIDS[1]))
        return least

    def _as_planned(self, totals: Totals) -> float:
        """*apart*, by the analysis that plans are made with, where the noise is Gaussian: what was planned for ε fits."""
        steps = _gaussians(totals.noise)
        if not steps or totals.slack >= self.delta:
            return math.inf
        return float(totals.stated) + parts_epsilon(steps, float(self.delta - totals.slack), self.adjacency).value

    def _divergences(self, totals: Totals) -> float:
        """*quick*, at all of the orders that plans are made with."""
        noise = [(from_key(key), count) for key, count in totals.noise.items()]
        if totals.slack >= self.delta or any(as_known(event, self.adjacency) is None for event, _ in noise):
            return math.inf
        return float(totals.stated) + events_epsilon(noise, float(self.delta - totals.slack), self.adjacency)

    def _in_two(self, totals: Totals, fixed: Sequence[str], total: Fraction | None) -> float:
        """ε of the samples of fixed size at half of the δ that is left, and of all the rest at the other half, added up."""
        rest, half = totals.without(fixed), (self.delta - totals.slack) / 2
        if half <= 0 or not rest.counts or self.adjacency != "replace_one":
            return math.inf
        alone = events_epsilon([(from_key(key), totals.noise[key]) for key in fixed], float(half), self.adjacency)
        left = None if total is None or total <= alone else total - Fraction(alone)
        return alone + Composition(self.delta - half, self.adjacency).epsilon(rest, left)

    def _tight(self, totals: Totals, grid: float) -> float:
        apart = math.inf
        if totals.slack <= self.delta:
            left = float(self.delta - totals.slack)
            apart = float(totals.stated) + (self._pld(totals.noise, left, grid, alone=True) if totals.noise else 0.0)
        if totals.stated == 0 and totals.slack == 0:
            return apart
        return min(apart, self._pld(_merged(totals.counts), float(self.delta), grid, alone=False))

    def _pld(self, counts: Counts, delta: float, grid: float, *, alone: bool) -> float:
        if (
            delta <= _hidden(counts, delta)
            or _width(counts, self.adjacency) * _GRIDS[0] > _WIDEST * grid
            or not _known(counts, self.adjacency)
        ):
            return math.inf
        base = self._kept.get((grid, alone))
        if base is None or not base.extends_to(counts):
            base = _Composed(self.adjacency, grid)
        self._kept[grid, alone] = base = base.extended(counts)
        return base.epsilon(delta - _hidden(counts, delta))


class _Composed:
    """The distribution of some counts on one grid."""

    def __init__(self, adjacency: Adjacency, grid: float) -> None:
        self._adjacency, self._grid = adjacency, grid
        self._counts: dict[str, int] = {}
        self._distribution: Any = None
        self._increments = 0
        self._epsilons: dict[float, float] = {}

    def extends_to(self, counts: Counts) -> bool:
        """Whether what is wanted is this and more, and going on from here is worth it."""
        if self._increments >= _REBUILD and len(counts) <= _REBUILD // 8 and counts != self._counts:
            return False
        return all(counts.get(key, 0) >= count for key, count in self._counts.items())

    def extended(self, counts: Counts) -> _Composed:
        """The distribution of ``counts``."""
        more = {key: count - self._counts.get(key, 0) for key, count in counts.items() if count > self._counts.get(key, 0)}
        if not more:
            return self
        made = _Composed(self._adjacency, self._grid)
        made._counts, made._increments, made._distribution = dict(counts), self._increments, self._distribution
        for key, count in more.items():
            part = _distribution(key, count, self._adjacency, self._grid)
            made._distribution = part if made._distribution is None else made._distribution.compose(part)
            made._increments += 1
        return made

    def epsilon(self, delta: float) -> float:
        """ε at δ."""
        if self._distribution is None:
            return 0.0
        if delta not in self._epsilons:
            self._epsilons[delta] = float(self._distribution.get_epsilon_for_delta(delta))
        return self._epsilons[delta]


# --- single events ----------------------------------------------------------------------------------------------------


def check_event(event: Any, adjacency: Adjacency, delta: Fraction) -> None:
    """Refuse an event that a budget with this δ and these neighbours can't account for."""
    if isinstance(event, Pure | Approximate):
        if delta == 0 and isinstance(event, Approximate):
            raise BudgetError(f"this budget has delta 0, and the release has delta {brief(float(event.delta))}: {_PURE_ONLY}")
        return
    if delta == 0:
        raise BudgetError(f"this budget has delta 0, and {type(event).__name__} needs a delta: {_PURE_ONLY}")
    _check_parameters(event)
    if as_known(event, adjacency) is not None or isinstance(_in_relation(event, adjacency), Pure):
        return
    if _is_fixed_size(event):
        raise ConfigurationError(
            "samples of a fixed size are private for replaced records: this budget is for a record more or less (add_remove): "
            "another promise. Begin a budget with adjacency='replace_one' and charge all releases about these data to that one, "
            "or train with Poisson samples."
        )
    if not _accountant(adjacency, _GRIDS[0]).supports(event):
        raise ConfigurationError(
            f"dp-accounting has no analysis of {type(event).__name__} for {adjacency} neighbours. If you have one of your own, "
            "charge what it says as lipdp.privacy.Approximate(epsilon, delta)."
        )


_PURE_ONLY = "it pays for pure epsilon-DP releases only. Begin budgets with a delta above 0 for training and Gaussian noise."


def _check_parameters(event: Any) -> None:
    from dp_accounting import dp_event

    if isinstance(event, dp_event.NonPrivateDpEvent | dp_event.UnsupportedDpEvent):
        raise BudgetError(f"{type(event).__name__} has no finite cost: no budget pays for it.")
    for name in ("noise_multiplier", "standard_deviation", "noise_parameter"):
        value = getattr(event, name, None)
        if value is not None and not value > 0:
            raise BudgetError(f"{type(event).__name__} with {name} {value!r} has no finite cost: no budget pays for it.")
    q = getattr(event, "sampling_probability", None)
    if q is not None and not 0 < q <= 1:
        raise ConfigurationError(f"sampling_probability is {q!r}: each record's chance to be in a sample, above 0, at most 1.")
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent) and not 0 < event.sample_size <= event.source_dataset_size:
        raise ConfigurationError(f"{event.sample_size} of {event.source_dataset_size} records can't be drawn without replacement.")
    if hasattr(event, "event"):
        _check_parameters(event.event)


def _is_fixed_size(event: Any) -> bool:
    from dp_accounting import dp_event

    return isinstance(event, dp_event.SampledWithoutReplacementDpEvent)


def _known(counts: Counts, adjacency: Adjacency) -> bool:
    """Whether dp-accounting's PLD has an analysis of all of them."""
    events = (_in_relation(from_key(key), adjacency) for key in counts)
    return all(isinstance(event, Pure | Approximate) or _accountant(adjacency, _GRIDS[0]).supports(event) for event in events)


def _count(counts: dict[str, int], key: str, more: int) -> None:
    counts[key] = counts.get(key, 0) + more
    if counts[key] == 0:
        del counts[key]


def _in_relation(event: Any, adjacency: Adjacency) -> Any:
    """The event for these neighbours. Replacing is removing and adding: twice ε, and δ(1 + e^ε), of what was proved for either.

    The other way round nothing changes: where a release is for a public number of records, a record that is not there is a blank
    one, some value that the release allows. See docs/budget.md.
    """
    from dp_accounting import dp_event

    if adjacency != "replace_one":
        return event
    if isinstance(event, dp_event.LaplaceDpEvent):
        return Pure(2 / Fraction(event.noise_multiplier))
    if not isinstance(event, Pure | Approximate) or event.adjacency != "add_remove":
        return event
    if isinstance(event, Pure):
        return Pure(2 * event.epsilon)
    spread = Fraction(math.nextafter(1 + math.exp(float(event.epsilon)), math.inf)) if event.epsilon < 700 else None
    delta = Fraction(1) if spread is None else event.delta * spread
    if delta >= 1:
        raise BudgetError(
            f"(epsilon {brief(float(event.epsilon))}, delta {brief(float(event.delta))}) says nothing about replacing a record."
        )
    return Approximate(2 * event.epsilon, delta)


def _hidden(counts: Counts, delta: float) -> float:
    """What the rounding of transforms may hide of δ, where that is not nothing against it."""
    hidden = _TRANSFORM * sum(counts.values())
    return hidden if hidden > _NOTICED * delta else 0.0


def _gaussians(noise: Counts) -> list[tuple[SampledGaussian, int]]:
    """The events as sampled Gaussian steps, full batches as one; empty where there are others."""
    from dp_accounting import dp_event

    steps: list[tuple[SampledGaussian, int]] = []
    power = 0.0
    for key, count in noise.items():
        event = from_key(key)
        q, inner = (event.sampling_probability, event.event) if isinstance(event, dp_event.PoissonSampledDpEvent) else (1.0, event)
        if not isinstance(inner, dp_event.GaussianDpEvent):
            return []
        if q == 1:
            power += count * inner.noise_multiplier**-2
        else:
            steps.append((SampledGaussian(inner.noise_multiplier, q), count))
    if power:
        steps.append((SampledGaussian(power**-0.5 * (1 - 1e-14), 1.0), 1))
    return steps if len(steps) <= _MANY else []


def _merged(counts: Counts) -> Counts:
    """Very many different pure releases as fewer: each ε rounded up to three digits. It only costs more."""
    pure = {key: count for key, count in counts.items() if isinstance(from_key(key), Pure)}
    if len(pure) <= _MANY:
        return counts
    kept = {key: count for key, count in counts.items() if key not in pure}
    for key, count in pure.items():
        event = from_key(key)
        scale = Fraction(10) ** (math.floor(math.log10(event.epsilon)) - 2)
        rounded = to_key(Pure(math.ceil(event.epsilon / scale) * scale, event.adjacency))
        kept[rounded] = kept.get(rounded, 0) + count
    return kept


def _width(counts: Counts, adjacency: Adjacency) -> float:
    """About how much privacy loss the distribution of all of them has to hold."""
    total = largest = 0.0
    for key, count in counts.items():
        one, each = _loss(_in_relation(from_key(key), adjacency), adjacency)
        largest, total = max(largest, one), total + count * each
    return largest + total


def _loss(event: Any, adjacency: Adjacency) -> tuple[float, float]:
    """Of one event: how far its loss reaches, and about what it adds to the width of a composition.

    A Gaussian's loss reaches 1/2σ² + 8/σ; its mean is KL ≤ min(q/2σ², log(1 + q²(e^{1/σ²} − 1))), the second being the Rényi
    divergence of order 2.
    """
    from dp_accounting import dp_event

    if isinstance(event, Pure | Approximate):
        epsilon = float(event.epsilon)
        return epsilon, epsilon * math.tanh(epsilon / 2)
    q = 1.0
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        q, event = event.sampling_probability, event.event
    if isinstance(event, dp_event.LaplaceDpEvent):
        return _loss(Pure(1 / Fraction(event.noise_multiplier)), adjacency)
    sigma = getattr(event, "noise_multiplier", getattr(event, "standard_deviation", 1.0))
    sigma = sigma if adjacency == "add_remove" else sigma / 2
    mean = q / (2 * sigma**2)
    if sigma >= 0.1:
        mean = min(mean, math.log1p(q**2 * math.expm1(sigma**-2)))
    return 1 / (2 * sigma**2) + 8 / sigma, mean


# --- dp-accounting ----------------------------------------------------------------------------------------------------


def _accountant(adjacency: Adjacency, grid: float) -> Any:
    import dp_accounting
    from dp_accounting import pld

    relation = dp_accounting.NeighboringRelation
    chosen = relation.ADD_OR_REMOVE_ONE if adjacency == "add_remove" else relation.REPLACE_ONE
    return pld.PLDAccountant(chosen, grid)


@lru_cache(maxsize=64)
def _distribution(key: str, count: int, adjacency: Adjacency, grid: float) -> Any:
    """The privacy loss distribution of so many of one event."""
    from dp_accounting.pld import common, privacy_loss_distribution

    event = _in_relation(from_key(key), adjacency)
    if isinstance(event, Pure | Approximate):
        delta = event.delta if isinstance(event, Approximate) else Fraction(0)
        one = privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(float(event.epsilon), float(delta)), value_discretization_interval=grid
        )
        return one.self_compose(count)
    accountant = _accountant(adjacency, grid)
    accountant.compose(event, count)
    return accountant._pld  # the accountant's own distribution: how an event becomes one is dp-accounting's business


@lru_cache(maxsize=1024)
def _curve(key: str, adjacency: Adjacency) -> Any:
    """The Rényi divergences of one event."""
    import numpy as np

    _, values = divergences(from_key(key), adjacency, FEW_ORDERS)
    return np.where(values >= 0, values, math.inf) + _ROUNDING


def _curve_epsilon(curve: Any, delta: float) -> float:
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(rdp_privacy_accountant.compute_epsilon(FEW_ORDERS, curve, delta)[0])
