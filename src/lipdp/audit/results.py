"""What an audit says: numbers, a table, JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from torch import Tensor

from lipdp._checks import named_one
from lipdp._texts import downwards, guarantee, percent, text_table
from lipdp.audit.statistics import (
    GaussianCurve,
    bisect,
    check_confidence,
    clopper_pearson,
    guess_p_value,
    many_run_epsilon,
    one_run_bound,
    one_run_epsilon,
    run_curve,
    scaled_run,
)
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy.accounting import privacy_profile, run_epsilon
from lipdp.privacy.runs import PrivateRun

_SHARES = (1.0, 0.25, 0.05, 0.01)  # of the canaries that are guessed at, the surest first
_MOST_NOISE = 64.0
_SEARCHED = {"least": 1 / 16, "most": 4.0, "precision": 0.03}  # what noise may have been divided by, where it takes an accountant

GAUSSIAN = "independent guesses, noise of the plan's shape (strength unknown)"
CURVE = "noise of the plan's shape (strength unknown)"
EVENTS = "independent guesses"
NOTHING = "nothing"


class Report:
    """What every audit gives: plain data, and that as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        raise NotImplementedError

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on ε at the plan's δ.

    Attributes:
        name: of the analysis.
        epsilon: the bound.
        assumes: what it rests on, beside the fair coins.
    """

    name: str
    epsilon: float
    assumes: str


@dataclass(frozen=True)
class AuditResult(Report):
    """What guessing at canaries has shown of a run.

    Attributes:
        epsilon: the lower bound; that of the first of ``bounds``.
        claimed: ε that the audited run costs by the accountant.
        delta: of both.
        confidence: of each bound.
        assumes: what ``epsilon`` rests on.
        bounds: all of them.
        p_value: the largest probability that a mechanism as planned makes so many right guesses with.
        alarm: below this, the plan is refuted.
        access: "white" (every released sum) or "black" (the last weights).
        method: of the plan.
        steps: of the audited run.
        sampling_rate: of the audited run.
        canaries: in each run.
        runs: how many were made.
        guesses: in all.
        correct: of them.
        strength: mean part of what the plan allows a record that a canary used (1: the worst case).
        privacy: whether this may be published.
        seconds: that it took.
    """

    epsilon: float
    claimed: float
    delta: float
    confidence: float
    assumes: str
    bounds: tuple[EpsilonBound, ...]
    p_value: float
    alarm: float
    access: str
    method: str
    steps: int
    sampling_rate: float
    canaries: int
    runs: int
    guesses: int
    correct: int
    strength: float
    privacy: str
    seconds: float

    @property
    def refuted(self) -> bool:
        """Whether the plan's promise does not fit what was seen: a fault in the library, its use, or the machine."""
        return self.p_value < self.alarm

    def __getitem__(self, name: str) -> EpsilonBound:
        return named_one("bound", name, self.bounds)

    def __str__(self) -> str:
        claimed = self.claimed or math.inf
        rows = [(b.name, downwards(b.epsilon), percent(b.epsilon / claimed, 0), b.assumes) for b in self.bounds]
        verdict = (
            f"REFUTED: under the plan so many right guesses have probability {self.p_value:.2g} at most: the guarantee is broken."
            if self.refuted
            else f"the plan stands: under it so many right guesses have probability up to {self.p_value:.2g}"
        )
        head = (
            f"{self.access}-box audit of {self.steps} steps at sampling rate {self.sampling_rate:.3g} ({self.method}): "
            f"{self.correct:,} of {self.guesses:,} guesses right\n"
            f"claimed {guarantee(self.claimed, self.delta)}; canaries use {self.strength:.0%} of what a record may; "
            f"{self.runs} runs of {self.canaries} canaries, {self.seconds:.1f} s; {self.privacy}"
        )
        headers = ("bound", f"ε ≥ ({self.confidence:.2%})", "of claimed", "assumes")
        body = text_table(headers, rows, right=headers[1:3])
        return f"{head}\n{body}\n{verdict}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**dataclasses.asdict(self), "refuted": self.refuted}


def bounds_of_guesses(
    scores: Tensor, blind: Tensor, coins: Tensor, plan: PrivacyPlan, confidence: float, *, independent: bool
) -> tuple[tuple[EpsilonBound, ...], float]:
    """The bounds that scores (above 0: guessed in) give, strongest assumption first, and the p-value of the plan's promise.

    Without abstaining, m of m guesses are made; with it, the share that is surest. The shares are fixed beforehand, and what the
    confidence leaves is divided among them. Bounds that allow any dependence are from ``blind``, scores that depend on what was
    released alone: a guess that looks at other coins, or is made or not by how sure guesses are that do, tells its own coin
    through them, whatever the mechanism is.
    """
    run, total = plan.run, len(coins)
    correct = int(((scores > 0) == coins).sum())
    right, order = (blind > 0) == coins, blind.abs().argsort(descending=True)
    level = (1 - check_confidence(confidence)) / len(_SHARES)
    counts = [(int(right[order[: max(1, round(share * total))]].sum()), max(1, round(share * total))) for share in _SHARES]
    free = max(one_run_epsilon(v, r, total, plan.delta, 1 - level) for v, r in counts)
    factors = [
        one_run_bound(v, r, total, lambda x: run_curve(scaled_run(run, 1 / x), coarse=True), 1 - level, **_SEARCHED)
        for v, r in counts
    ]
    curve = EpsilonBound("any dependence", _epsilon(plan, run, max(factors)), CURVE)
    nothing = EpsilonBound("assumption-free", free, NOTHING)
    if not independent:
        p_value = min(1.0, len(_SHARES) * min(guess_p_value(v, r, total, run_curve(run)) for v, r in counts))
        return (curve, nothing), p_value
    low = clopper_pearson(correct, total, confidence)[0]
    first = EpsilonBound("independent guesses", _epsilon(plan, run, _strength(run, low)), GAUSSIAN)
    from scipy.stats import binom

    events = EpsilonBound("Clopper–Pearson", _event_epsilon(scores, coins, plan.delta, confidence), EVENTS)
    return (first, events, curve, nothing), float(binom.sf(correct - 1, total, _accuracy(run)))


def _event_epsilon(scores: Tensor, coins: Tensor, delta: float, confidence: float) -> float:
    """From the scores of canaries that are out and in, as of runs without and with a record."""
    absent, present = scores[~coins], scores[coins]
    return many_run_epsilon(absent.tolist(), present.tolist(), delta, confidence) if min(len(absent), len(present)) >= 4 else 0.0


def _epsilon(plan: PrivacyPlan, run: PrivateRun, strength: float) -> float:
    """ε of the plan if its noise were divided by ``strength``."""
    return run_epsilon(scaled_run(run, 1 / strength), plan.delta, plan.accountant, plan.adjacency) if strength > 0 else 0.0


def _accuracy(run: PrivateRun, *, coarse: bool = False) -> float:
    """The best chance to guess a fair coin: (1 + total variation)/2, and the total variation is δ(0)."""
    if run.sampling_rate == 1 and not run.releases:
        curve = run_curve(run)
        assert isinstance(curve, GaussianCurve)
        return NormalDist().cdf(curve.mu / 2)
    return (1 + privacy_profile(run, [0.0], coarse=coarse)[0]) / 2


def _strength(run: PrivateRun, accuracy: float) -> float:
    """What the noise was divided by, at least: the largest x such that noise divided by x allows no guesses this good."""
    if accuracy <= 0.5:
        return 0.0
    if run.sampling_rate == 1 and not run.releases:
        curve = run_curve(run)
        assert isinstance(curve, GaussianCurve)
        return 2 * NormalDist().inv_cdf(min(accuracy, 1 - 1e-12)) / curve.mu

    def falls_short(log: float) -> bool:
        return _accuracy(scaled_run(run, math.exp(-log)), coarse=True) < accuracy

    low, high = -math.log(_MOST_NOISE), math.log(4.0)
    return math.exp(bisect(falls_short, low, high, 12)[0]) if falls_short(low) else 0.0
