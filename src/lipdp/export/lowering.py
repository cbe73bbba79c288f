"""How each layer is said in plain torch. A layer brings its own lowering::

    @lowering(MyLayer)
    def _my_layer(layer: MyLayer, site: Site) -> torch.Tensor:
        return torch.relu(site.x) * layer.factor     # recorded by torch.fx; layer.factor becomes a constant

A layer with weights answers with the torch.nn module that does the same; it takes the layer's place, and its name::

    @lowering(MyLinear)
    def _my_linear(layer: MyLinear, site: Site) -> torch.nn.Module:
        return placed(torch.nn.Linear(layer.in_features, layer.out_features, device="meta"), layer)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lipdp.behaviour import ByClass
from lipdp.bounds.calculus import Shape
from lipdp.errors import ConfigurationError

__all__ = ["Lowering", "Site", "find_lowering", "lowering", "narrowed", "placed", "used_weight", "widened"]


@dataclass(frozen=True)
class Site:
    """One call of a layer, as a lowering sees it.

    Attributes:
        where: how messages name the layer.
        inputs: stand-ins for the layer's tensor arguments: torch functions and methods applied to them are recorded.
        shapes: the shape of one example of each, or ``None`` where the model's input shape is not known.
        dtype: of the first input.
    """

    where: str
    inputs: tuple[torch.Tensor, ...]
    shapes: tuple[Shape | None, ...]
    dtype: torch.dtype

    @property
    def x(self) -> torch.Tensor:
        """The first input."""
        return self.inputs[0]

    @property
    def shape(self) -> Shape:
        """One example's shape of the first input, which must be known."""
        shape = self.shapes[0]
        if shape is None:
            raise ConfigurationError(
                f"{self.where} is exported for one size of input, and the model's input shape is unknown. Pass input_shape= "
                "(the shape of one example), or start the model with lipdp.nn.BoundedInput."
            )
        return shape


Lowering = Callable[[Any, Site], "torch.nn.Module | torch.Tensor"]
L = TypeVar("L", bound=Lowering)
_lowerings: ByClass[Lowering] = ByClass()


def lowering(*classes: type[torch.nn.Module]) -> Callable[[L], L]:
    """Register the decorated function as the lowering of these classes, and of subclasses with the same forward."""

    def register(function: L) -> L:
        for cls in classes:
            _lowerings[cls] = function
        return function

    return register


def find_lowering(module: torch.nn.Module) -> Lowering | None:
    """The lowering of the module's class or nearest base class that computes the same, see :mod:`lipdp.behaviour`."""
    return _lowerings.find(module)


P = TypeVar("P", bound=torch.nn.Module)


def used_weight(layer: torch.nn.Module, name: str = "weight") -> torch.Tensor:
    """The weight that ``layer`` computes with: W = π(θ) where it is reparametrised, the parameter itself elsewhere."""
    effective: Callable[[str], torch.Tensor] | None = getattr(layer, "effective", None)
    value: torch.Tensor = getattr(layer, name) if effective is None else effective(name)
    return value


def placed(plain: P, layer: torch.nn.Module, scale: float | None = None) -> P:
    """``plain`` with the layer's weight, times ``scale``, and bias. What is not changed is the same object: ties stay tied."""
    stored: torch.nn.Parameter | None = getattr(layer, "weight", None)
    if stored is not None:
        weight = used_weight(layer)
        if scale is not None:
            weight = weight.detach() * scale
        if weight is not stored:
            weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=stored.requires_grad)
        plain.register_parameter("weight", weight)
    if hasattr(layer, "bias"):
        plain.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
    return plain


def widened(site: Site) -> torch.Tensor:
    """The first input in float32 or better."""
    wide = torch.promote_types(site.dtype, torch.float32)
    return site.x if wide == site.dtype else site.x.to(wide)


def narrowed(y: torch.Tensor, site: Site) -> torch.Tensor:
    """Back in the first input's own type."""
    return y if torch.promote_types(site.dtype, torch.float32) == site.dtype else y.to(site.dtype)
