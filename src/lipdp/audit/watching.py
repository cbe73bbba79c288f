"""Watching a training run from outside: what its optimiser is handed in every step, and what could be told from it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp.errors import ConfigurationError, LipdpWarning
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy.accounting import run_epsilon
from lipdp.privacy.budget import AnyBudget
from lipdp.training.batches import gather
from lipdp.training.engine import PrivacyEngine

__all__ = ["MakeOptimizer", "Step", "audited_plan", "draw_samples", "hold_still", "watch_run"]

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """One step, as somebody sees it who sees all weights.

    Attributes:
        released: the noised sum by parameter: what the optimiser was handed, times the expected batch size.
        chosen: the numbers of the records in the batch. Auditors put the records there, and may know.
        stds: the planned noise of this step by parameter.
        clips: clipping norms that change, as they were.
    """

    released: Mapping[str, Tensor]
    chosen: Tensor
    stds: Mapping[str, float]
    clips: Mapping[str, float]


def hold_still(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimiser that leaves the weights where they are: each step is then a draw of one and the same mechanism."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def audited_plan(plan: PrivacyPlan, *, steps: int | None = None, sampling: bool = True) -> PrivacyPlan:
    """The plan of an audit: the same mechanism in every step, for fewer steps, or with all records in each.

    What it costs is accounted anew; one-off releases beside the steps are left out, for nothing of them is watched.
    """
    count = plan.steps if steps is None else steps
    if not (isinstance(count, int) and 1 <= count <= plan.steps):
        raise ConfigurationError(f"steps must be a whole number from 1 to the plan's {plan.steps}, not {steps!r}")
    shorter = dataclasses.replace(
        plan,
        steps=count,
        phases=tuple(phase for phase in plan.phases if phase.start < count),
        dataset_size=plan.dataset_size if sampling else plan.batch_size,
        releases=(),
    )
    cost = run_epsilon(shorter.run, plan.delta, plan.accountant, plan.adjacency)
    return dataclasses.replace(shorter, epsilon=cost)


def watch_run(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan,
    records: TensorDataset,
    optimizer: torch.optim.Optimizer,
    *,
    budget: AnyBudget = None,
    input_shape: tuple[int, ...] | None = None,
    before_step: Callable[[Mapping[str, float], Mapping[str, float]], None] | None = None,
) -> Iterator[Step]:
    """Every step of a real run of the engine on these records: its samples, its noise, its division, its projection.

    ``before_step`` is called with the step's noise and clipping norms while the weights are those that its gradients are taken at.
    """
    handed: dict[str, Tensor] = {}
    named = {id(p): name for name, p in model.named_parameters()}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        handed.clear()
        for group in optimizer.param_groups:
            handed.update({named[id(p)]: p.grad.detach().double() for p in group["params"] if p.grad is not None})

    hook = optimizer.register_step_pre_hook(note)
    try:
        with PrivacyEngine(model, loss, optimizer, plan, budget=budget, input_shape=input_shape) as engine:
            samples = engine.samples(records)
            while (chosen := _next(samples)) is not None:
                stds, clips = engine.noise_stds, engine.clipping
                if before_step is not None:
                    before_step(stds, clips)
                engine.step(*gather(records, chosen), sample=chosen)
                yield Step({name: g * plan.batch_size for name, g in handed.items()}, chosen, stds, clips)
    finally:
        hook.remove()


def draw_samples(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan,
    records: TensorDataset,
    count: int,
    *,
    input_shape: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """The first samples of a real run, as numbers of records. No step is taken, so that nothing is released."""
    with PrivacyEngine(model, loss, hold_still(model), plan, input_shape=input_shape) as engine:
        samples = engine.samples(records)
        return [chosen for chosen in (_next(samples) for _ in range(count)) if chosen is not None]


def _next(samples: Iterator[Tensor]) -> Tensor | None:
    """The next sample. An audit's records are not as many as the plan's: no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the dataset has", category=LipdpWarning)
        return next(samples, None)
