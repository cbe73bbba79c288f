"""How each layer is said in plain torch. A layer brings its own lowering::

    @lowering(MyLayer)
    def _my_layer(layer: MyLayer, site: Site) -> torch.Tensor:
        return torch.relu(site.x) * layer.factor     # recorded by torch.fx; layer.factor becomes a constant

A layer with weights answers with the torch.nn module that does the same; it takes the layer's place, and its name::

    @lowering(MyLinear)
    def _my_linear(layer: MyLinear, site: Site) -> torch.nn.Module:
        return plain_linear(layer.weight, layer.bias)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lipdp.behaviour import ByClass
from lipdp.bounds.bound import Shape
from lipdp.errors import ConfigurationError

__all__ = ["Lowering", "Site", "find_lowering", "lowering"]


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
