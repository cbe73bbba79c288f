"""What becomes of each ordinary layer: the twin that a layer of lipdp registered for it (:mod:`lipdp.twins`), or why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.registry import has_rule
from lipdp.bounds.way_out import way_out
from lipdp.twins import Decision, Where, find_twin, twin

__all__ = ["FUNCTIONS", "decide"]


# Functions and methods, as the module that does the same. The module's arguments are those of the call, by name.
FUNCTIONS: dict[Any, Callable[..., torch.nn.Module]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"), lambda **_: torch.nn.ReLU()),
    F.relu6: lambda **_: torch.nn.ReLU6(),
    F.leaky_relu: lambda negative_slope=0.01, **_: torch.nn.LeakyReLU(negative_slope),
    F.elu: lambda alpha=1.0, **_: torch.nn.ELU(alpha),
    F.celu: lambda alpha=1.0, **_: torch.nn.CELU(alpha),
    F.selu: lambda **_: torch.nn.SELU(),
    F.gelu: lambda approximate="none", **_: torch.nn.GELU(approximate),
    F.silu: lambda **_: torch.nn.SiLU(),
    F.mish: lambda **_: torch.nn.Mish(),
    F.hardswish: lambda **_: torch.nn.Hardswish(),
    F.softplus: lambda beta=1, threshold=20, **_: torch.nn.Softplus(beta, threshold),
    F.max_pool2d: lambda kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False, **_: (
        torch.nn.MaxPool2d(kernel_size, stride or None, padding, dilation, return_indices, ceil_mode)
    ),
    F.avg_pool2d: lambda kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None, **_: (
        torch.nn.AvgPool2d(kernel_size, stride or None, padding, ceil_mode, count_include_pad, divisor_override)
    ),
    F.adaptive_avg_pool2d: lambda output_size, **_: torch.nn.AdaptiveAvgPool2d(output_size),
    F.adaptive_max_pool2d: lambda output_size, return_indices=False, **_: torch.nn.AdaptiveMaxPool2d(output_size, return_indices),
    F.dropout: lambda p=0.5, **_: torch.nn.Dropout(p),
    F.dropout2d: lambda p=0.5, **_: torch.nn.Dropout2d(p),
}


def decide(module: torch.nn.Module, where: Where) -> Decision | None:
    """What becomes of ``module``; ``None`` if it stays and there is nothing to say."""
    rule = find_twin(module)
    if rule is not None:
        return rule(module, where)
    trained = any(parameter.requires_grad for parameter in module.parameters())
    if not has_rule(module) and way_out(module):
        return Decision("not converted", module, way_out(module))
    if not has_rule(module):
        return Decision("not converted", module, "nothing bounds it: give its class a rule (lipdp.bounds.rule), or replace it")
    if trained and type(module).__module__.startswith("torch.nn"):
        return Decision("not converted", module, "its weights stay unconstrained: put lipdp.nn.Boundary around it, or replace it")
    return None


@twin(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
def _dropout(module: torch.nn.Dropout, where: Where) -> Decision:
    module.inplace = False
    if not 0 < module.p < 1:
        return Decision("removed", None, f"p={module.p:g}")
    return Decision("kept", module, f"it multiplies the sensitivities around it by {1 / (1 - module.p):.3g}: consider removing it")


@twin(torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.Sigmoid)
def _softmax(module: torch.nn.Module, where: Where) -> Decision | None:
    if where.last:
        return Decision("removed", None, "lipdp's losses take logits")
    if has_rule(module):
        return None
    return Decision("not converted", module, "nothing bounds it here: use torch.softmax, or give its class a rule")
