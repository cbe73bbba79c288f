"""Choosing hyper-parameters privately: a random number of runs, of which only the best is released (Papernot & Steinke, 2022).

Let Q be one run: settings drawn at random (without looking at the data), training, a score. Draw K from one of the distributions
below, run Q K times with fresh randomness, publish the best-scored outcome and nothing else: neither the other runs nor K. If Q is
(λ, ε(λ))-RDP for all λ, then the whole is (λ, ε')-RDP with

- K truncated negative binomial, shape η ≥ 0 and γ in (0, 1) (their Theorem 2), for any λ̂ ≥ 1:
  ε' = ε(λ) + (1 + η)·(1 − 1/λ̂)·ε(λ̂) + (1 + η)·log(1/γ)/λ̂ + log(E K)/(λ − 1);
- K Poisson of mean μ (their Theorem 6), where Q is also (ε̂, δ̂)-DP with e^ε̂ ≤ 1 + 1/(λ − 1):
  ε' = ε(λ) + μ·δ̂ + log(μ)/(λ − 1).

At ε = 1 a run, ten runs in expectation cost ε ≈ 1.9 (logarithmic) to 2.5 (Poisson), a hundred 2.3 (logarithmic). The analysis is
dp-accounting's ``RepeatAndSelectDpEvent``.

**The score is part of Q.** A score computed on held-out records tells about them. :func:`score_multiplier` gives the noise that
makes it cost nothing extra: split each record's fate by a coin of its own (:func:`record_coins`), score by a count to which a
record adds at most 1, and add Gaussian noise of std σ_v. A record is then either trained on (the score is post-processing of the
run) or scored on (the trained model does not depend on it), so Q's curve is max(ε_train(λ), λ/2σ_v²), and σ_v² ≥ λ/2ε_train(λ) at
all λ leaves ε_train. Sums are divided by how many records are *expected* on a side, never by how many there are.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from lipdp._checks import is_number, positive, probability
from lipdp._texts import brief
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy.accounting import event
from lipdp.privacy.randomness import KEY_BYTES, Stream
from lipdp.privacy.runs import PrivateRun

DISTRIBUTIONS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Shapes η that have a name."""

_MOST = 1_000_000  # where the sum over a distribution's tail is cut: 10,000 times a mean of 100


@dataclass(frozen=True)
class Repetitions:
    """The distribution of the number of runs K.

    P(K = k) = (1 − γ)^k/(γ^−η − 1)·Π_{l<k} (l + η)/(l + 1) for k ≥ 1; its limit (1 − γ)^k/(k·log(1/γ)) for η = 0; Poisson for
    η = ∞, where K may be 0. γ is the one that gives the mean: E K = η(1 − γ)/(γ(1 − γ^η)), or (1/γ − 1)/log(1/γ) for η = 0.

    Attributes:
        mean: E K, at least 1.
        shape: η: 0 logarithmic, 1 geometric, ∞ Poisson. Smaller shapes cost less and have longer tails.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no distribution."""
        if not (is_number(self.mean) and self.mean > 1):
            raise ConfigurationError(f"the mean number of runs is {self.mean!r}: it has to be a finite number above 1")
        shaped = not isinstance(self.shape, bool) and isinstance(self.shape, int | float)
        if not shaped or math.isnan(self.shape) or self.shape < 0:
            raise ConfigurationError(
                f"the shape is {self.shape!r}: 0 (logarithmic), 1 (geometric), inf (Poisson) or any number above 0"
            )

    @cached_property
    def gamma(self) -> float:
        """γ, rounded up by less than 1e-12 of itself (a larger one makes fewer runs, and costs less); not for Poisson."""
        if math.isinf(self.shape):
            raise ConfigurationError("the Poisson distribution has no gamma")
        low, high = 0.0, 1.0
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._mean_at(middle) <= self.mean else (middle, high)
        return high

    def _mean_at(self, gamma: float) -> float:
        if self.shape == 0:
            return (1 / gamma - 1) / -math.log(gamma)
        return self.shape * (1 - gamma) / (gamma * -math.expm1(self.shape * math.log(gamma)))

    def probability(self, k: int) -> float:
        """P(K = k)."""
        if math.isinf(self.shape):
            return math.exp(k * math.log(self.mean) - self.mean - math.lgamma(k + 1)) if k >= 0 else 0.0
        if k < 1:
            return 0.0
        gamma, eta = self.gamma, self.shape
        if eta == 0:
            return math.exp(k * math.log1p(-gamma)) / (k * -math.log(gamma))
        ways = math.lgamma(k + eta) - math.lgamma(eta) - math.lgamma(k + 1)
        return math.exp(k * math.log1p(-gamma) + ways) / math.expm1(-eta * math.log(gamma))

    def draw(self, generator: Stream) -> int:
        """K, by inversion of the distribution function. It is a secret, as the stream's key is."""
        uniform = float(generator.uniforms(1))
        k, below = 0, self.probability(0)
        chance = self.probability(1)
        while uniform >= below + chance and k + 1 < _MOST:
            below += chance
            k += 1
            chance = self._next(k, chance)
        return k if math.isinf(self.shape) and uniform < self.probability(0) else k + 1

    def _next(self, k: int, chance: float) -> float:
        """P(K = k + 1) from P(K = k), k ≥ 1."""
        if math.isinf(self.shape):
            return chance * self.mean / (k + 1)
        return chance * (1 - self.gamma) * (k + self.shape) / (k + 1)


def tuning_epsilon(run: PrivateRun, repetitions: Repetitions, delta: float) -> float:
    """ε at δ of publishing the best of K such runs (add/remove neighbours; the score as the module's text says)."""
    d, dp = probability(delta), _accounting()
    ledger = dp.rdp.RdpAccountant()
    ledger.compose(dp.dp_event.RepeatAndSelectDpEvent(_one_run(run), repetitions.mean, repetitions.shape))
    return float(ledger.get_epsilon(d))


def score_multiplier(run: PrivateRun) -> float:
    """σ_v = max_λ √(λ/2ε(λ)): noise on a count of held-out records that leaves the curve of the run as it is."""
    ledger = _accounting().rdp.RdpAccountant()
    ledger.compose(_one_run(run))
    curve = [(float(order), float(cost)) for order, cost in zip(ledger.orders, ledger.rdp, strict=True)]
    return max(math.sqrt(order / (2 * cost)) for order, cost in curve if cost > 0)


def affordable_run(
    describe: Callable[[float], PrivateRun], repetitions: Repetitions, *, epsilon: float, delta: float, precision: float = 1e-2
) -> tuple[float, float]:
    """About the largest ε of one run whose tuning costs at most ``epsilon``, and what it then costs: (ε of one run, ε of all).

    Args:
        describe: the run planned for an ε of its own; its cost has to rise with it.
        repetitions: the distribution of the number of runs.
        epsilon: target for the whole.
        delta: δ of the whole.
        precision: how much of ``epsilon`` may stay unspent, relative.
    """
    target, d = positive("epsilon", epsilon), probability(delta)
    low, high = 0.0, target
    guess = target / 3
    for _ in range(60):
        spent = tuning_epsilon(describe(guess), repetitions, d)
        if target * (1 - precision) <= spent <= target:
            return guess, spent
        low, high = (guess, high) if spent <= target else (low, guess)
        if high < 1e-3 * target:
            break
        # The cost is nearly proportional; where that leads out of the bracket, halve it.
        aim = guess * target / spent * (1 - precision / 2)
        guess = aim if low < aim < high else (low + high) / 2
    raise BudgetError(
        f"no run is small enough for the best of {repetitions.mean:g} in expectation to cost at most epsilon={brief(target)} at "
        f"delta={brief(d)}: the choice alone costs more. Take fewer runs, a smaller shape, or a larger epsilon."
    )


def record_coins(tensors: Sequence[torch.Tensor], share: float, key: bytes) -> torch.Tensor:
    """For each record (row of all ``tensors``) whether it is held out: a coin that depends on it and on a secret key alone.

    The coin is HMAC-SHA-256 of the record's bytes under the key, read as a number, being below ``share``. So whichever record is
    added or removed, at whatever place, all others keep their side: for every key, two neighbours differ by one record on one side,
    and what holds for every key holds for a random one. That needs no independence of coins: equal records share theirs, and
    one more copy of a record joins its copies. (A number for each copy would be no better, and a number for each place would be
    worse: what lies behind a removed record would change sides.)
    """
    if not (is_number(share) and 0 < share < 1):
        raise ConfigurationError(f"the share of records to hold out is {share!r}: a number between 0 and 1, e.g. 0.1")
    if not isinstance(key, bytes) or len(key) < KEY_BYTES:
        raise ConfigurationError(f"coins need a secret key of {KEY_BYTES} bytes: take lipdp.privacy.fresh_key()")
    rows = [tensor.detach().cpu().contiguous().reshape(len(tensor), -1).numpy() for tensor in tensors]
    limit = math.floor(Fraction(share) * 2**256)
    about = repr([(str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in tensors]).encode()
    coins = [
        int.from_bytes(hmac.digest(key, about + b"".join(part[number].tobytes() for part in rows), "sha256"), "big") < limit
        for number in range(len(tensors[0]))
    ]
    return torch.tensor(coins, dtype=torch.bool)


def _one_run(run: PrivateRun) -> Any:
    """The event of one run."""
    if run.pure_epsilon:
        raise ConfigurationError(
            "a run with pure releases beside its steps can't be repeated and selected: their Rényi curve is not known here. "
            "Make them Gaussian."
        )
    if run.sampling.scheme != "poisson":
        raise ConfigurationError(
            f"a run with {run.sampling.scheme} sampling can't be repeated and selected here: the analysis is for Poisson samples."
        )
    if run.steps == 0 and not run.gaussian_releases:
        raise ConfigurationError("the run releases nothing: there is nothing to choose between")
    dp = _accounting()
    parts = [event(sigma, run.sampling_rate, steps) for sigma, steps in run.segments if steps]
    return dp.ComposedDpEvent([*parts, *(event(sigma, 1.0, 1) for sigma in run.gaussian_releases)])


def _accounting() -> Any:
    import dp_accounting

    return dp_accounting
