"""Learned utilities for quantiles: a Lipschitz network on counts, released by permute-and-flip.

The probabilities of permute-and-flip are exact and differentiable, so the expected loss is minimised directly, with no sampling of
responses. Training starts at the expert (rank utility), through the gate of :class:`~lipdp.mechanisms.utilities.CountNetwork`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipdp.mechanisms.experts import grid, rank_utility, selection
from lipdp.mechanisms.losses import response_loss
from lipdp.mechanisms.mechanism import SelectionMechanism
from lipdp.mechanisms.postprocess import Sample
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.selection import probabilities
from lipdp.mechanisms.utilities import CountNetwork, LearnedUtility

__all__ = ["UtilitySettings", "learn_utility"]

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
    with torch.random.fork_rng(devices=[]):
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
