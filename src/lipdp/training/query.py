"""What a step asks of the data: a sum of bounded per-example gradients, and where the bound comes from.

The engine is the same for every method; a query says how the sum is computed and proves (or enforces) its sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from lipdp.bounds import Analysis, analyse
from lipdp.clipping import check_supported, clipped_gradients
from lipdp.errors import ConfigurationError
from lipdp.losses import Loss, as_loss
from lipdp.parametrize import effective_leaves, pull_back
from lipdp.training.batches import microbatches
from lipdp.training.gradients import arithmetic, gradient_sum, zeros_like_sum
from lipdp.training.plan import CLIPPED_GROUP, ROUNDOFF, PrivacyPlan
from lipdp.training.planning import clipping_slack, per_example_loss

__all__ = ["ClippedQuery", "ProvedQuery", "Query", "query_of"]

# Bounds of the same model come out of the same arithmetic; anything above this is another model.
_SAME = 1 + 1e-9


class Query(Protocol):
    """A bounded sum over the sampled examples."""

    @property
    def loss(self) -> Callable[..., torch.Tensor]:
        """One value per example."""
        ...

    def bounds(self) -> dict[str, float]:
        """Group name → sensitivity that holds for the model as it is now; raises if the plan promises less."""
        ...

    def sums(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        microbatch_size: int,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """The query's answer, not yet noised."""
        ...

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of the parameters from the noised answer; sees no data."""
        ...


def query_of(model: torch.nn.Module, loss: Any, plan: PrivacyPlan, input_shape: tuple[int, ...] | None) -> Query:
    """The query that the plan's method stands for."""
    if plan.method == "clipless":
        return ProvedQuery(model, as_loss(loss), plan, input_shape)
    return ClippedQuery(model, per_example_loss(loss), plan)


def _check_names(plan: PrivacyPlan, sizes: Mapping[str, int]) -> None:
    planned = {name for group in plan.groups for name in group.parameters}
    if planned != set(sizes):
        different = sorted(planned ^ set(sizes))
        raise ConfigurationError(
            f"the plan was made for another model: the trainable parameters differ in {', '.join(different[:5])}. Make a new plan."
        )
    for group in plan.groups:
        size = sum(sizes[name] for name in group.parameters)
        if size != group.size:
            raise ConfigurationError(
                f"the plan was made for another model: '{group.name}' has {size} entries here, {group.size} in the plan. Make a "
                "new plan."
            )


def _check_slack(plan: PrivacyPlan, needed: float) -> None:
    if needed > plan.slack * _SAME:
        raise ConfigurationError(
            "the model computes more coarsely than the plan's rounding slack covers. Make a new plan for the model as it is."
        )


class ProvedQuery:
    """Sensitivities proved by the calculus of bounds."""

    def __init__(self, model: torch.nn.Module, loss: Loss, plan: PrivacyPlan, input_shape: tuple[int, ...] | None) -> None:
        self.model, self.plan, self.input_shape = model, plan, input_shape
        self.loss: Callable[..., torch.Tensor] = loss
        self._proved_loss = loss

    def bounds(self) -> dict[str, float]:
        """The calculus, run again."""
        analysis: Analysis = analyse(self.model, self._proved_loss, input_shape=self.input_shape)
        planned, found = self.plan.sensitivities, analysis.sensitivities
        if any(group.parameters != (group.name,) for group in self.plan.groups):
            raise ConfigurationError("a clipless plan has one group for each parameter; this one was changed. Make a new plan.")
        _check_names(self.plan, {row.name: row.size for row in analysis.parameters})
        for name, bound in found.items():
            if bound > planned[name] * _SAME:
                raise ConfigurationError(
                    f"the plan was made for another model or loss: parameter '{name}' has sensitivity {bound:.6g} here, and "
                    f"{planned[name]:.6g} in the plan. Make a new plan."
                )
        _check_slack(self.plan, analysis.slack(ROUNDOFF[self.plan.precision]))
        return found

    def sums(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        microbatch_size: int,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """One ordinary backward pass per microbatch; for reparametrised layers it ends at the effective weight."""
        with effective_leaves(self.model) as leaves:
            return gradient_sum(
                self.model,
                self._proved_loss,
                {**parameters, **leaves},
                inputs,
                targets,
                microbatch_size=microbatch_size,
                device=device,
                precision=self.plan.precision,
            )

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The noised gradients of effective weights, pulled back to the parameters: post-processing."""
        return pull_back(self.model, noised)


class ClippedQuery:
    """Sensitivity enforced: every example's gradient is clipped to ``max_grad_norm``."""

    def __init__(self, model: torch.nn.Module, loss: Callable[..., torch.Tensor], plan: PrivacyPlan) -> None:
        self.model, self.loss, self.plan = model, loss, plan

    def bounds(self) -> dict[str, float]:
        """C for the one group; refuses layers whose per-example gradients can't be told."""
        check_supported(self.model)
        _check_names(self.plan, {name: p.numel() for name, p in self.model.named_parameters() if p.requires_grad})
        assert self.plan.max_grad_norm is not None
        if [group.name for group in self.plan.groups] != [CLIPPED_GROUP]:
            raise ConfigurationError("a plan for clipping has one group of all parameters; this one was changed. Make a new plan.")
        if self.plan.max_grad_norm > self.plan.sensitivity * _SAME:
            raise ConfigurationError(
                f"the plan's sensitivity {self.plan.sensitivity:.6g} is below its max_grad_norm {self.plan.max_grad_norm:.6g}. "
                "Make a new plan."
            )
        _check_slack(self.plan, clipping_slack(self.plan.precision))
        return {CLIPPED_GROUP: self.plan.max_grad_norm}

    def sums(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        microbatch_size: int,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Σ_i ν_i·g_i by the plan's method, microbatch by microbatch."""
        assert self.plan.max_grad_norm is not None
        assert self.plan.method != "clipless"
        total = {name: zeros_like_sum(p) for name, p in parameters.items()}
        for x, y, mask in microbatches(inputs, targets, microbatch_size, device):
            with arithmetic(self.plan.precision, device):
                found = clipped_gradients(self.model, self.loss, x, y, self.plan.max_grad_norm, self.plan.method, mask=mask)
            for name, gradient in found.items():
                total[name] += gradient
        return total

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """They are the parameters' own."""
        return dict(noised)
