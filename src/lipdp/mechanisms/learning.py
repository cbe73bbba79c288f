"""``learn``: from a question and a public belief about datasets to a private mechanism, or to the expert's if that is better."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lipdp._checks import positive, whole
from lipdp.errors import ConfigurationError
from lipdp.fields import Count, check_fields
from lipdp.mechanisms import beyond
from lipdp.mechanisms.distributions import Belief, Distribution, Everyday, Mixture, as_distribution, draw
from lipdp.mechanisms.experts import Level, best_experts, levels_to
from lipdp.mechanisms.learn_parts import SumSettings, UtilitySettings, learn_sums, learn_utility
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.problem import Problem, Query
from lipdp.mechanisms.ranked import by_depth, by_intervals
from lipdp.mechanisms.truths import by_mean_and_variance, by_records_beyond, on_the_query
from lipdp.mechanisms.worst import Robust, affordable, draws, noisy_query

_CONFIDENCE = 2.33  # standard errors that a challenger has to be ahead by
_LARGEST = 400  # records that mechanisms are trained with: beyond, those for so many are resized
_STRESS = (1, 3)  # other numbers of Gaussians on which a mechanism for the default prior of four must not lose
_SHARE = 0.07  # part of the learned mechanism's training datasets that each of them gets: see docs/mechanisms_inside.md
_MOST = 2**28  # records: those of one draw lie in memory
_CLEAR = 400.0  # ε times the records beyond a quantile above which only the noise on its rank counts, and nothing is fitted


@dataclass(frozen=True)
class Settings:
    """How much work ``learn`` does. The defaults take well under a minute on two cores for n = 100, robust ones a few seconds.

    ``robust`` is the number of datasets that a robust mechanism is fitted to; the others are for ``robustness=None``.

    Attributes:
        training: datasets that mechanisms and experts are fitted to.
        validation: datasets that choose among what was fitted.
        held_out: datasets that decide whether the learned one or the expert is returned, and give its expected loss.
        sums: how long and how wide learned sums are trained.
        utility: the same for learned choices, which quantiles have besides sums.
        expert: the strongest experts that are tried: "textbook", "tuned" or "strong".
        robust: datasets, as above.
    """

    training: Count = 16_000
    validation: Count = 3_000
    held_out: Count = 12_000
    sums: SumSettings = field(default_factory=SumSettings)
    utility: UtilitySettings = field(default_factory=UtilitySettings)
    expert: Level = "strong"
    robust: Count = 1500

    def __post_init__(self) -> None:
        check_fields(self, "settings")

    @classmethod
    def quick(cls) -> Settings:
        """A few seconds: for trying things out and for tests; worse mechanisms, the same guarantee."""
        sums = SumSettings(screening=40, steps=150, batch=256)
        utility = UtilitySettings(steps=30, batch=64, responses=(24,), channels=8, kernel=5)
        return cls(training=1500, validation=500, held_out=800, sums=sums, utility=utility, expert="tuned", robust=400)


def settings_or(default: Settings, settings: Settings | None) -> Settings:
    """What was given, or the default; anything else is refused."""
    if settings is not None and not isinstance(settings, Settings):
        raise ConfigurationError(f"settings is a {type(settings).__name__}: give lipdp.mechanisms.Settings(…), or nothing.")
    return default if settings is None else settings


def learn(
    query: str | Query,
    epsilon: float,
    n: int,
    bounds: Sequence[float],
    distribution: Belief | None = None,
    loss: str = "squared",
    *,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    seed: int = 0,
) -> Mechanism:
    """Learn an ε-DP mechanism (pure, replace-one) that answers ``query`` about n numbers inside ``bounds``.

    Nothing private is read: training uses draws of ``distribution`` only. The mechanism gains from the belief, and on no dataset
    loses more than 1 + τ times what a mechanism loses that assumes nothing (see :mod:`lipdp.mechanisms.worst` for what of this
    is proved); its report says its worst ratio and loss, and where.

    With ``robustness=None`` only the belief counts: a mechanism is trained and compared with the tuned expert on held-out draws,
    dataset by dataset; where it is not better beyond chance (mean difference plus 2.33 standard errors below 0), the expert is
    returned. For the default prior (four Gaussians) it must not lose on a pool of single and triple Gaussians either. Off the
    belief, such a mechanism can be a hundred times as bad as plain noise. ``mechanism.report["returned"]`` says which came back.

    Args:
        query: ``"mean"``, ``"variance"``, ``"median"``, ``"p10"`` (any percentile), ``"quantile:0.25"``.
        epsilon: ε of each release.
        n: size of the dataset, public.
        bounds: (lo, hi) that hold for every possible record.
        distribution: a belief about datasets: public data as an array, a frozen distribution of scipy's, or a callable
            ``distribution(count, n, generator) -> (count, n)``. By default :class:`~lipdp.mechanisms.Everyday` columns, or, with
            ``robustness=None``, a :class:`~lipdp.mechanisms.Mixture` of four truncated Gaussians.
        loss: ``"squared"``, or ``"quantile"`` (number of points between truth and answer).
        robustness: τ. Smaller: closer to a mechanism without assumptions; larger: more gain where the belief is true.
        settings: how much work to do.
        seed: of training and evaluation; release noise has nothing to do with it.
    """
    return compare(query, epsilon, n, bounds, distribution, loss, robustness=robustness, settings=settings, seed=seed).chosen


@dataclass(frozen=True)
class Comparison:
    """What ``learn`` found, each with its report.

    Attributes:
        tuned: the tuned expert (the textbook one where ``settings.expert`` says so); robust: the mechanism without assumptions.
        expert: the same, or a stronger expert that was confirmed to be better: what is returned where learning does not win.
        learned: the best learned mechanism.
        chosen: what ``learn`` returns.
    """

    tuned: Mechanism
    expert: Mechanism
    learned: Mechanism
    chosen: Mechanism


def compare(
    query: str | Query,
    epsilon: float,
    n: int,
    bounds: Sequence[float],
    distribution: Belief | None = None,
    loss: str = "squared",
    *,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    seed: int = 0,
) -> Comparison:
    """The same work as :func:`learn`, with all that was compared.

    Args:
        query: as in :func:`learn`, and so are the others.
        epsilon: ε of each release.
        n: size of the dataset, public.
        bounds: (lo, hi) that hold for every possible record.
        distribution: a belief about datasets.
        loss: "squared" or "quantile".
        robustness: τ; ``None``: only the belief counts.
        settings: how much work to do.
        seed: of training and evaluation; release noise has nothing to do with it.
    """
    problem = Problem.of(query, epsilon, n, bounds, loss)
    work = settings_or(Settings(), settings)
    if problem.n > _MOST:
        raise ConfigurationError(
            f"n is {problem.n}: no columns of more than {_MOST} records are drawn to plan with. Learn for fewer, and take "
            "mechanism.for_size(n)."
        )
    belief = None if distribution is None else as_distribution(distribution, problem.low, problem.high)
    if robustness is not None:
        return _compare_robust(
            problem, belief or Everyday(problem.low, problem.high), positive("robustness", robustness), work, seed
        )
    if problem.n > _LARGEST:
        return _compare_smaller(problem, belief, work, seed)
    return _compare_experts(problem, belief, work, seed)


def _compare_robust(problem: Problem, belief: Distribution, robustness: float, work: Settings, seed: int) -> Comparison:
    """A mechanism held against one without assumptions, which stays where the belief gains nothing that is sure."""
    start, seeds = time.perf_counter(), _seeds(seed)
    found = robust_mechanism(problem, belief, robustness, work.robust, next(seeds))
    count, noise, place = affordable(work.robust, problem.n), next(seeds), next(seeds)
    parts = [(found.mechanism.losses(t, noise), found.plain.losses(t, noise)) for t in draws(belief, problem, count, place)]
    new, old = (torch.cat(losses) for losses in zip(*parts, strict=True))
    ratios, ones = new / old.clamp(min=1e-13), torch.ones_like(old)  # below, it is the lattice's rounding
    surely = _beats(new, old) or (_beats(ratios, ones) and not _beats(old, new))
    better = found.mechanism is not found.plain and (surely or found.ratio <= 1)
    scale = problem.loss_scale
    losses = {id(found.mechanism): float(new.mean()) * scale, id(found.plain): float(old.mean()) * scale}
    shared: dict[str, Any] = {
        "returned": "learned" if better else "expert",
        "expert": found.plain.title,
        "expert_loss": losses[id(found.plain)],
        "learned": found.mechanism.title,
        "learned_loss": losses[id(found.mechanism)],
        "learned_to_expert": loss_ratio(float(new.mean()), float(old.mean())),
        "tuned": found.plain.title,
        "tuned_loss": losses[id(found.plain)],
        "held_out_datasets": count,
        "seed": seed,
        "seconds": time.perf_counter() - start,
    }
    plain, learned = (
        replace(each.mechanism, report={"expected_loss": losses[id(each.mechanism)], **each.report(robustness), **shared})
        for each in (found.of_plain(), found)
    )
    return Comparison(plain, plain, learned, learned if better else plain)


def robust_mechanism(problem: Problem, belief: Distribution, robustness: float, count: int, seed: int) -> Robust:
    """The best one under the belief whose loss is nowhere above 1 + τ times the plain one's."""
    if problem.query.kind == "quantile":
        if problem.epsilon * min(problem.rank(), problem.n - problem.rank()) >= _CLEAR:
            return by_depth(problem)
        return by_intervals(problem, belief, robustness, affordable(count, problem.n), seed)
    if problem.loss == "quantile":  # of a mean: its loss depends on all of the data, and nothing is shifted
        plain = noisy_query(problem, "laplace")
        everywhere, most = "every dataset: it is the mechanism that assumes nothing", float(problem.n)
        return Robust(plain, plain, 1.0, most, most, everywhere, "no more than all records lie in between")
    drawn = draws(belief, problem, affordable(count, problem.n), seed)
    parts = [(problem.query(part), part.mean(1), beyond.counted(part)) for part in drawn]
    truths, means, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    found = on_the_query(problem, truths, robustness)
    if problem.query.kind == "variance":
        return by_mean_and_variance(found, means, truths, robustness)
    return by_records_beyond(found, means, counts, robustness)


def _compare_smaller(problem: Problem, belief: Distribution | None, work: Settings, seed: int) -> Comparison:
    """For many records: the mechanisms for fewer of them with as much more ε, resized.

    What noise does to a mean or to a rank ÷ n depends on nε alone: a sum's noise ÷ n has scale 1/nε, a choice sees ε·rank. So with
    n′ε′ = nε, what was learned for (n′, ε′) has the same distribution of answers for (n, ε), but for the grain of n′ records.
    """
    smaller = replace(problem, n=_LARGEST, epsilon=problem.epsilon * problem.n / _LARGEST)
    found = _compare_experts(smaller, belief, work, seed)
    grain = problem.n / _LARGEST if problem.loss == "quantile" else 1.0

    def resized(mechanism: Mechanism) -> Mechanism:
        made = mechanism.for_size(problem.n)
        report = {**mechanism.report, "made_for_n": _LARGEST}
        report |= {key: value * grain for key, value in report.items() if key == "expected_loss" or key.endswith("_loss")}
        return replace(made, problem=replace(made.problem, epsilon=problem.epsilon), report=report)

    tuned, expert, learned = (resized(each) for each in (found.tuned, found.expert, found.learned))
    return Comparison(tuned, expert, learned, learned if found.chosen is found.learned else expert)


def _compare_experts(problem: Problem, distribution: Distribution | None, work: Settings, seed: int) -> Comparison:
    """Learned and experts' mechanisms under a belief."""
    start = time.perf_counter()
    seeds = _seeds(seed)
    t, validation, held_out = _draws(problem, work, seeds, distribution)
    found = best_experts(problem, t, validation, levels_to(work.expert)[1:] or ("textbook",))
    if distribution is None:
        t, validation = (_blend(problem, part, next(seeds)) for part in (t, validation))
    learned = _best_learned(problem, t, validation, work, next(seeds), list(found.values()))
    judge = _Judge(held_out, [], next(seeds))
    if distribution is None:
        judge.shifted += [draw(Mixture(k, problem.low, problem.high), problem, work.held_out // 3, next(seeds)) for k in _STRESS]
    tuned, *stronger = found.values()
    expert = tuned
    for challenger in stronger:
        expert = challenger if judge.prefers(challenger, expert) else expert
    better = judge.prefers(learned, expert)
    scale = problem.loss_scale
    shared: dict[str, Any] = {
        "returned": "learned" if better else "expert",
        "expert": expert.title,
        "expert_loss": judge.loss(expert) * scale,
        "learned": learned.title,
        "learned_loss": judge.loss(learned) * scale,
        "learned_to_expert": loss_ratio(judge.loss(learned), judge.loss(expert)),
        "shifted_ratios": judge.shifted_ratios(learned, expert),
        "tuned": tuned.title,
        "tuned_loss": judge.loss(tuned) * scale,
        "held_out_datasets": work.held_out,
        "seed": seed,
        "seconds": time.perf_counter() - start,
    }
    tuned, expert, learned = (
        replace(each, report={"expected_loss": judge.loss(each) * scale, **shared}) for each in (tuned, expert, learned)
    )
    return Comparison(tuned, expert, learned, learned if better else expert)


def expert_draws(problem: Problem, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    """The datasets that ``learn`` with this seed fits experts to and chooses them with: for the same experts outside of it."""
    t, validation, _ = _draws(problem, settings, _seeds(seed), None)
    return t, validation


def _draws(
    problem: Problem, work: Settings, seeds: Iterator[int], distribution: Distribution | None
) -> tuple[Tensor, Tensor, Tensor]:
    belief = Mixture(4, problem.low, problem.high) if distribution is None else distribution
    t, validation, held_out = (
        draw(belief, problem, count, next(seeds)) for count in (work.training, work.validation, work.held_out)
    )
    return t, validation, held_out


@dataclass
class _Judge:
    """Whether one mechanism may replace another: paired losses on datasets that nothing was fitted to."""

    held_out: Tensor
    shifted: list[Tensor]
    noise: int
    known: dict[int, tuple[Mechanism, list[Tensor]]] = field(default_factory=dict)  # kept, so that no id is given twice

    def losses(self, mechanism: Mechanism) -> list[Tensor]:
        """On the held-out datasets, then on each kind of shifted ones; with the same noise for every mechanism."""
        if id(mechanism) not in self.known:
            made = [mechanism.losses(part, self.noise) for part in (self.held_out, *self.shifted)]
            self.known[id(mechanism)] = (mechanism, made)
        return self.known[id(mechanism)][1]

    def loss(self, mechanism: Mechanism) -> float:
        """The average on held-out datasets."""
        return float(self.losses(mechanism)[0].mean())

    def shifted_ratios(self, challenger: Mechanism, incumbent: Mechanism) -> list[float | None]:
        """Challenger ÷ incumbent on each kind of shifted datasets."""
        pairs = zip(self.losses(challenger)[1:], self.losses(incumbent)[1:], strict=True)
        return [loss_ratio(float(new.mean()), float(old.mean())) for new, old in pairs]

    def prefers(self, challenger: Mechanism, incumbent: Mechanism) -> bool:
        """Better beyond chance on held-out datasets, and no worse on the shifted ones, taken together."""
        (new, *others), (old, *before) = self.losses(challenger), self.losses(incumbent)
        return _beats(new, old) and (not others or bool(torch.cat(others).mean() <= torch.cat(before).mean()))


def loss_ratio(loss: float, other: float) -> float | None:
    """loss ÷ other: 1 where both are 0 (a belief that leaves nothing to tell), None where only the other one is."""
    if other > 0:
        return loss / other
    return 1.0 if loss == 0 else None


def _blend(problem: Problem, t: Tensor, seed: int) -> Tensor:
    """A few of the default prior's datasets replaced by ones of fewer Gaussians.

    Fitted to four Gaussians alone, p10 at ε = 0.5 loses 9 to 30% to the expert on single ones; with 5 to 10% of these it wins
    everywhere, for 2% of its loss on four.
    """
    others = [
        draw(Mixture(components, problem.low, problem.high), problem, int(_SHARE * t.shape[0]), seed + components)
        for components in _STRESS
    ]
    return torch.cat([t[: t.shape[0] - sum(part.shape[0] for part in others)], *others])


def _best_learned(
    problem: Problem, t: Tensor, validation: Tensor, work: Settings, seed: int, experts: list[Mechanism]
) -> Mechanism:
    if problem.query.kind != "quantile":
        return learn_sums(problem, t, validation, work.sums, seed, experts)[0]
    chosen = learn_utility(problem, t, work.utility, seed)
    rival = float(chosen.losses(validation).mean())
    summed, loss = learn_sums(problem, t, validation, work.sums, seed, experts, rival)
    return summed if loss < rival else chosen


def _beats(challenger: Tensor, incumbent: Tensor) -> bool:
    """Paired, one-sided, at 1%: better by more than 2.33 standard errors."""
    difference = challenger - incumbent
    error = float(difference.std()) / math.sqrt(difference.shape[0])
    return float(difference.mean()) + _CONFIDENCE * error < 0


def _seeds(seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(whole("seed", seed, least=0) % 2**63)
    while True:
        yield int(torch.randint(2**40, (1,), generator=generator))
