"""Learned sums: s = Σφ(x_i) with a learned piecewise-linear φ: [0, 1] → ℝᵐ, noised, and decoded by a free network.

φ is divided by its exact L1 sensitivity (:func:`~lipdp.mechanisms.statistics.knot_sensitivity`), so noise of scale 1/ε is always
enough, and how much each of the m sums may say is learned with the rest: k, the paper's Lipschitz constant, is no setting. Given
the weights with which a dataset falls on the knots, a training step is a small matrix product: seconds on one core.

Learned utilities, for quantiles: a Lipschitz network on counts, released by permute-and-flip, whose probabilities are exact and
differentiable: the expected loss is minimised directly, with no sampling of responses. Training starts at the expert (rank
utility), through the gate of :class:`~lipdp.mechanisms.utilities.CountNetwork`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipdp._numerics import Undrawn
from lipdp.mechanisms.experts import additive, grid, moments, rank_utility, selection
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism, SelectionMechanism
from lipdp.mechanisms.noise import NoiseKind, draw_noise
from lipdp.mechanisms.postprocess import Network, Sample
from lipdp.mechanisms.problem import Problem, Query, rank_between, response_loss, with_ends
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic, Statistic, hats, knot_sensitivity
from lipdp.mechanisms.utilities import CountNetwork, LearnedUtility, probabilities

_KNOTS = 65
_SCREENED = 6000  # datasets for the decoders of short runs
_MOMENTS = ((0.3, 2.0), (0.15, 1.0))  # clipped moments that are good for quantiles at small and at larger ε: (edge, weight)
_HOPELESS = 1.1  # times a rival's loss, after the short run: longer training gains less than that


@dataclass(frozen=True)
class SumSettings:
    """How long and how wide; fixed on validation draws of the default prior, for all queries and ε."""

    screening: int = 500
    steps: int = 2500
    batch: int = 512
    rate: float = 3e-3
    width: int = 64


@dataclass
class _Run:
    """Datasets in the form that training needs, and the answers wanted."""

    problem: Problem
    weights: Tensor
    truth: Tensor  # (M, queries)
    scales: Tensor  # losses are divided by these (queries,)
    ends: Tensor | None  # for the quantile error: the datasets with their ends,
    rank: Tensor | None  # and the truths' ranks in them (M, 1)

    def losses(self, chosen: Tensor, answers: Tensor) -> Tensor:
        """Of answers (batch, queries) to the chosen datasets, with useful derivatives."""
        if self.ends is None or self.rank is None:
            return (answers - self.truth[chosen]) ** 2
        return (rank_between(self.ends[chosen], answers) - self.rank[chosen]).abs()


def initial_table(knots: Tensor, m: int, query: Query | None) -> Tensor:
    """Where φ starts: one sum at the expert's statistic, several at soft steps spread over the range.

    (z, z²) would be the expert's pair for the variance, but it is a worse place to start from: 1.05 against 0.90 at ε = 0.5.
    """
    z = 2 * knots[:, None] - 1
    if m == 1 and query is not None:
        return z**2 if query.kind == "variance" else z
    return torch.sigmoid(10 * (knots[:, None] - (torch.arange(m) + 0.5) / m))


def train_sum(run: _Run, table: Tensor, noise: NoiseKind, steps: int, settings: SumSettings, seed: int) -> tuple[Tensor, Network]:
    """Minimise the expected loss over φ's values at the knots and the decoder; returns both."""
    epsilon = run.problem.epsilon
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(table.clone())
    centre = run.weights.mean(0)

    def statistic(weights: Tensor) -> Tensor:
        return (weights - centre) @ parameter / knot_sensitivity(parameter)

    with Undrawn(), torch.no_grad():
        torch.manual_seed(seed)
        network = Network(table.shape[1], run.truth.shape[1], settings.width)
        network.spread.copy_((statistic(run.weights[:4000]).var(0) + 2 / epsilon**2).sqrt())
        network.offset.copy_(run.truth.mean(0))
        network.gain.copy_(run.truth.std(0))
    optimiser = torch.optim.Adam([parameter, *network.parameters()], lr=settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.rate, total_steps=max(steps, 20), pct_start=0.1)
    for _ in range(steps):
        chosen = torch.randint(run.weights.shape[0], (settings.batch,), generator=generator)
        s = statistic(run.weights[chosen])
        uniform = torch.rand(s.shape, generator=generator).clamp(1e-7, 1 - 1e-7)
        answers = network.raw(s + draw_noise(noise, uniform, 1.0, epsilon))
        optimiser.zero_grad()
        (run.losses(chosen, answers) / run.scales).mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    final = parameter.detach()
    if not bool(torch.isfinite(final).all()):  # diverged: φ stays where it started, and its network will not win
        final = table.clone()
        network = Network(table.shape[1], run.truth.shape[1], settings.width)
    with torch.no_grad():
        # The released statistic is Σφ, not centred, from the first knot's zero, in φ's own units.
        size = knot_sensitivity(final)
        network.centre.copy_(centre @ final - run.problem.n * final[0])
        network.spread.mul_(size)
    return final, network


def _prepare(problem: Problem, t: Tensor, queries: list[Query]) -> tuple[_Run, Tensor]:
    knots = torch.linspace(0, 1, _KNOTS, dtype=torch.float64)
    truth = torch.stack([query(t) for query in queries], 1).float()
    scales = truth.var(0) if problem.loss == "squared" else torch.full((len(queries),), problem.n / 10)
    ends = with_ends(t.float()) if problem.loss == "quantile" else None
    rank = None if ends is None else rank_between(ends, truth)
    return _Run(problem, hats(t, knots).float(), truth, scales, ends, rank), knots


@dataclass(frozen=True)
class _Start:
    """Where a training run begins: φ at the knots, the noise, and whether it is an expert's."""

    table: Tensor
    noise: NoiseKind
    expert: bool = False

    @property
    def title(self) -> str:
        return f"learned sums, m = {self.table.shape[1]}, {self.noise}"


def starts(problem: Problem, knots: Tensor, experts: Iterable[Mechanism] = ()) -> list[_Start]:
    """Several numbers of sums and kinds of noise, and φ of each expert that noises a sum: learning can begin where it ends."""
    most = {"mean": 2, "variance": 3, "quantile": 4}[problem.query.kind]
    ways: list[tuple[int, NoiseKind]] = [(1, "staircase"), *((m, "laplace") for m in range(1, most + 1))]
    made = [_Start(initial_table(knots.float(), m, problem.query), noise) for m, noise in ways]
    known: list[tuple[Statistic, NoiseKind]] = [(e.statistic, e.noise) for e in experts if isinstance(e, AdditiveMechanism)]
    if problem.query.kind == "quantile":
        known += [(moments(edge, 1 - edge, weight), "laplace") for edge, weight in _MOMENTS]
    for statistic, noise in known:
        table = expert_table(statistic, knots)
        if table is not None:
            made.append(_Start(table.float(), noise, expert=True))
    return made


def expert_table(statistic: Statistic, knots: Tensor) -> Tensor | None:
    """φ of an expert's sum at the knots, of sensitivity 1 there; a clipped mean is one too. None for other statistics."""
    table = None
    if isinstance(statistic, PiecewiseSum):
        table = statistic.contributions(knots).to(torch.float64)
    elif isinstance(statistic, QueryStatistic) and statistic.query.kind == "mean":
        table = knots.clamp(*statistic.window)[:, None]
    return None if table is None else table / knot_sensitivity(table)


def learn_sums(
    problem: Problem,
    t: Tensor,
    validation: Tensor,
    settings: SumSettings,
    seed: int,
    experts: Iterable[Mechanism] = (),
    rival: float = math.inf,
) -> tuple[AdditiveMechanism, float]:
    """The best learned sum, and its loss on ``validation``.

    All starts are screened shortly; the best of the experts' and the best of the others are trained on, since the one that is ahead
    early is often not the one that gets furthest. Where one is far behind the loss of a ``rival`` that was learned otherwise, it
    is left as it is.
    """
    run, knots = _prepare(problem, t, [problem.query])
    sample = Sample.of(problem, t)
    few = sample.first(_SCREENED)
    tried: list[tuple[float, _Start, AdditiveMechanism]] = []
    for start in starts(problem, knots, experts):
        table, network = train_sum(run, start.table, start.noise, settings.screening, settings, seed)
        reached = replace(start, table=table)
        made, loss = _finished(problem, knots, reached, network, few, validation)
        tried.append((loss, reached, made))
    finished = [(made, loss) for loss, _, made in tried]
    for kind in (True, False):
        own = sorted((entry[:2] for entry in tried if entry[1].expert == kind), key=lambda entry: entry[0])
        for loss, start in own[:1]:
            if loss > _HOPELESS * rival:
                continue
            table, network = train_sum(run, start.table, start.noise, settings.steps, settings, seed + 1)
            finished.append(_finished(problem, knots, replace(start, table=table), network, sample, validation))
    return min(finished, key=lambda entry: entry[1])


def train_joint(
    problem: Problem, queries: list[Query], t: Tensor, m: int, settings: SumSettings, seed: int
) -> tuple[PiecewiseSum, Network]:
    """m sums for several queries at once (squared loss), with one network of as many outputs."""
    run, knots = _prepare(problem, t, queries)
    table, network = train_sum(run, initial_table(knots.float(), m, None), "laplace", settings.steps, settings, seed)
    return PiecewiseSum.quantised(knots, table), network.eval()


def _finished(
    problem: Problem, knots: Tensor, end: _Start, network: Network, sample: Sample, validation: Tensor
) -> tuple[AdditiveMechanism, float]:
    """With the network or, for one or two sums, the exact table E[q | s], whichever is better on ``validation``."""
    statistic = PiecewiseSum.quantised(knots, end.table)
    options = [AdditiveMechanism(problem, end.title + ", network", statistic, end.noise, network.eval())]
    if statistic.dimension <= 2:
        options.append(additive(problem, end.title + ", table", statistic, end.noise, sample))
    return min(((option, float(option.losses(validation).mean())) for option in options), key=lambda pair: pair[1])


_NODES = 12  # of the quadrature, in training
_TRIED = 1500  # datasets to choose the grid's size with, and as many to fit its answers to


@dataclass(frozen=True)
class UtilitySettings:
    """How long and how large; fixed on tuning draws of the default prior, for all levels and ε.

    ``steps`` are for grids of up to 100 responses; finer ones, which cost more and gain less, get in proportion fewer.
    """

    steps: int = 2500
    batch: int = 64
    rate: float = 4e-2
    responses: tuple[int, ...] = (32, 48, 64, 100, 200, 300)
    channels: int = 8
    kernel: int = 9


def learn_utility(problem: Problem, t: Tensor, settings: UtilitySettings, seed: int) -> SelectionMechanism:
    """Train on unit datasets ``t``; the answers for the responses are then the best ones under all of ``t``."""
    generator = torch.Generator().manual_seed(seed)
    responses = grid_size(problem, t, settings.responses)
    steps = math.ceil(settings.steps * min(1.0, 100 / responses))
    with Undrawn():
        torch.manual_seed(seed)
        network = CountNetwork(responses, settings.channels, settings.kernel)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    places = grid(responses)
    rank = problem.query.p * problem.n
    utility = LearnedUtility(places, rank, network)
    centred, expert = (part.float() for part in utility.inputs(t))
    truth = problem.query(t)
    values = torch.nn.Parameter(places.float().clone())
    squared = problem.loss == "squared"
    costs = None if squared else response_loss(problem.loss, t, truth, places.expand(t.shape[0], -1)).float()
    answers = truth.float()
    scale = float(truth.var()) if squared else problem.n / 10
    optimiser = torch.optim.Adam([*network.parameters(), values], lr=settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.rate, total_steps=max(steps, 20), pct_start=0.1)
    for _ in range(steps):
        chosen = torch.randint(t.shape[0], (settings.batch,), generator=generator)
        utilities = network(centred[chosen], expert[chosen])
        chances = probabilities("permute_and_flip", utilities, 1.0, problem.epsilon, nodes=_NODES)
        chances = chances / chances.sum(1, keepdim=True)  # the short quadrature is a little off
        cost = (values - answers[chosen, None]) ** 2 if costs is None else costs[chosen]
        optimiser.zero_grad()
        ((chances * cost).sum(1).mean() / scale).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in network.parameters()):
        network.load_state_dict(start)  # diverged: back to the expert it started at
    network.requires_grad_(False)
    title = f"learned utility, {responses} responses, permute-and-flip"
    return selection(problem, title, utility, "permute_and_flip", Sample.of(problem, t))


def grid_size(problem: Problem, t: Tensor, sizes: tuple[int, ...]) -> int:
    """With how many responses the expert's rank utility does best: a fine grid resolves, a coarse one has fewer wrong answers."""
    if len(sizes) == 1:
        return sizes[0]
    half = min(_TRIED, t.shape[0] // 2)
    fitted, check = Sample.of(problem, t[:half]), t[half : 2 * half]

    def loss(size: int) -> float:
        return float(selection(problem, "", rank_utility(problem, size), "permute_and_flip", fitted).losses(check).mean())

    return min(sizes, key=loss)
