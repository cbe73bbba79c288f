"""Which optimisers a private run can have."""

from __future__ import annotations

import warnings

import torch

from lipdp.errors import ConfigurationError, LipdpWarning

__all__ = ["check_optimizer"]


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Refuse an optimiser that asks several times a step, or trains something else; warn of parameters that it leaves out."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates the loss several times a step, and each time is a query; use another optimiser")
    ours = {id(p) for p in model.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in ours for p in theirs):
        raise ConfigurationError(
            "the optimiser holds parameters that are not the model's. Make it from model.parameters(), once the model is final."
        )
    held = {id(p) for p in theirs}
    idle = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if idle:
        warnings.warn(
            f"the optimiser does not train {', '.join(idle[:3])}{'…' if len(idle) > 3 else ''}: noise is spent on them for "
            "nothing. Freeze them (requires_grad_(False)) before planning.",
            LipdpWarning,
            stacklevel=4,
        )
