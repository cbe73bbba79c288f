"""Learned utilities for quantiles: a Lipschitz network on counts, released by permute-and-flip.

The probabilities of permute-and-flip are exact and differentiable, so the expected loss is minimised directly, with no sampling of
responses. Training starts at the expert (rank utility), through the gate of :class:`~lipdp.mechanisms.utilities.CountNetwork`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipdp.mechanisms.experts import grid, selection
from lipdp.mechanisms.losses import response_loss
from lipdp.mechanisms.mechanism import SelectionMechanism
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.selection import probabilities
from lipdp.mechanisms.utilities import CountNetwork, LearnedUtility

__all__ = ["UtilitySettings", "learn_utility"]

_NODES = 12  # of the quadrature, in training


@dataclass(frozen=True)
class UtilitySettings:
    """How long and how large; fixed on validation draws of the default prior, for all levels and ε."""

    steps: int = 1200
    batch: int = 128
    rate: float = 2e-2
    responses: int = 64
    channels: int = 16
    kernel: int = 9


def learn_utility(problem: Problem, t: Tensor, settings: UtilitySettings, seed: int) -> SelectionMechanism:
    """Train on unit datasets ``t``; the answers for the responses are then the best ones under all of ``t``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = CountNetwork(settings.responses, settings.channels, settings.kernel)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    places = grid(settings.responses)
    rank = problem.query.p * problem.n
    utility = LearnedUtility(places, rank, network)
    centred, expert = (part.float() for part in utility.inputs(t))
    truth = problem.query(t)
    values = torch.nn.Parameter(places.float().clone())
    squared = problem.loss == "squared"
    costs = None if squared else response_loss(problem.loss, t, truth, places.expand(t.shape[0], -1)).float()
    answers = truth.float()
    scale = float(truth.var()) if squared else problem.n / 10
    optimiser = torch.optim.Adam([*network.parameters(), values], lr=settings.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.rate, total_steps=max(settings.steps, 20), pct_start=0.1)
    for _ in range(settings.steps):
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
    return selection(problem, f"learned utility, {settings.responses} responses, permute-and-flip", utility, "permute_and_flip", t)
