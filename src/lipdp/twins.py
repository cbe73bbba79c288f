"""What takes the place of an ordinary layer in a Lipschitz network. A layer says itself whose twin it is::

    @twin(torch.nn.Linear)
    def _twin_of_linear(module: torch.nn.Linear, where: Where) -> Decision:
        return Decision("replaced", SpectralLinear(module.in_features, module.out_features))

Every twin keeps the shapes, so each can be decided by itself; :func:`lipdp.convert` asks for all layers of a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from lipdp.behaviour import entered
from lipdp.bounds.calculus import Shape

Outcome = Literal["replaced", "kept", "removed", "not converted"]


@dataclass(frozen=True)
class Where:
    """What a replacement may depend on.

    Attributes:
        shape: one example's shape of the input.
        output: one example's shape of the output.
        features: the dimension that holds the features, 1 behind a convolution and −1 behind a dense layer.
        last: whether the layer gives the model's output.
        copy_weights: whether the twin starts from the projected weights.
        alone: whether the layer reads one tensor and nothing else (no masks, no offsets).
        input: whether that tensor is the model's own input.
    """

    shape: Shape
    output: Shape
    features: int
    last: bool
    copy_weights: bool
    alone: bool = True
    input: bool = False


@dataclass(frozen=True)
class Decision:
    """``module`` takes the layer's place (``None``: nothing does)."""

    outcome: Outcome
    module: torch.nn.Module | None
    note: str = ""


Twin = Callable[[Any, Where], Decision | None]
T = TypeVar("T", bound=Twin)
_twins: dict[type[torch.nn.Module], Twin] = {}


def twin(*classes: type[torch.nn.Module]) -> Callable[[T], T]:
    """Register the decorated function: it decides what takes the place of layers of these classes."""

    return entered(_twins, *classes)


def find_twin(module: torch.nn.Module) -> Twin | None:
    """What decides about the module: what its very class was given; of torch's own layers, also that of the nearest base class."""
    if "forward" in vars(module):
        return None  # it no longer is what its class is
    classes = type(module).__mro__ if type(module).__module__.startswith("torch.nn.modules") else (type(module),)
    return next((_twins[cls] for cls in classes if cls in _twins), None)


def keep_trained(new: torch.nn.Module, module: torch.nn.Module) -> None:
    """What was frozen stays frozen."""
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(module.get_parameter(name).requires_grad)
