"""Rules by module class, torch function and tensor method.

A layer brings its own rule::

    @rule(MyLayer)
    def _my_layer(layer: MyLayer, call: Call) -> Transfer:
        x = call.inputs[0]
        return Transfer(Bound(x.norm, x.shape), gains=(1.0,), parameters={"weight": x.norm})

A function rule has no first argument::

    @rule_for_function(torch.relu, torch.nn.functional.relu, "relu")   # a string is a tensor method
    def _relu(call: Call) -> Transfer: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from lipdp.behaviour import ByClass
from lipdp.bounds.bound import Bound, Shape, Transfer
from lipdp.errors import UnsupportedError

__all__ = [
    "Call",
    "ParameterRef",
    "Rounds",
    "find_function_rule",
    "find_module_rule",
    "has_rule",
    "rounds_like",
    "rule",
    "rule_class",
    "rule_for_function",
]

ModuleRule = Callable[[Any, "Call"], Transfer]
R = TypeVar("R", bound=ModuleRule)
FunctionRule = Callable[["Call"], Transfer]

_module_rules: ByClass[ModuleRule] = ByClass()
_function_rules: dict[Any, FunctionRule] = {}

Rounds = Literal["moves", "each", "ball", "counted", "arithmetic", "sums"]
"""What rounding in an operation depends on, see :mod:`lipdp.bounds.rounding`.

"moves": numbers are moved, not computed with; "each": one by one; "ball": norms of examples, and a division by them; "counted":
products with a kernel whose norm is counted; "arithmetic": sums and products of tensors; "sums": anything, sums as long as an example.
"""
_rounds: dict[Any, Rounds] = {}


@dataclass(frozen=True)
class ParameterRef:
    """A trainable parameter that ``forward`` uses by itself, as in ``x + self.position``."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Call:
    """One operation of the traced graph, as a rule sees it.

    Activations in ``args`` and ``kwargs`` are replaced by their :class:`Bound`, trainable parameters by
    :class:`ParameterRef`; constant tensors and Python values stay as they are.
    """

    where: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Bound, ...]
    output_shapes: tuple[Shape, ...]

    @property
    def output_shape(self) -> Shape:
        """Shape of the (single) output, without the batch dimension."""
        return self.output_shapes[0]

    @property
    def rank(self) -> int:
        """Number of dimensions of the first input, the batch dimension included."""
        return len(self.inputs[0].shape) + 1

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def dims(self, value: Any, *, rank: int | None = None) -> tuple[int, ...]:
        """Dimensions as non-negative numbers; refuses the batch dimension, and ``None`` (which includes it)."""
        rank = self.rank if rank is None else rank
        if value is None:
            raise UnsupportedError(
                f"{self.where} works over all dimensions, the batch dimension among them, so it mixes examples. "
                "Name the dimensions (1 and up) it should work over."
            )
        dims = tuple(int(d) % rank for d in (value if isinstance(value, tuple | list) else (value,)))
        if not dims:
            raise UnsupportedError(
                f"{self.where} names no dimensions, which torch takes for all of them, the batch included. Name some."
            )
        if 0 in dims:
            raise UnsupportedError(
                f"{self.where} works along dimension 0, the batch: it mixes examples, so one example's influence can't be "
                "bounded. Work along dimensions 1 and up."
            )
        return dims

    def refuse(self, why: str) -> UnsupportedError:
        """The error for a form of this operation that has no rule."""
        return UnsupportedError(f"{self.where}: {why}")


def rule(*classes: type[torch.nn.Module], rounds: Rounds = "sums") -> Callable[[R], R]:
    """Register the decorated function as the rule of these module classes (and of subclasses with the same forward).

    ``rounds``: how its arithmetic rounds, see :data:`Rounds`.
    """

    def register(function: R) -> R:
        for cls in classes:
            _module_rules[cls] = function
        _rounds[function] = rounds
        return function

    return register


def rule_for_function(*targets: Any, rounds: Rounds = "sums") -> Callable[[FunctionRule], FunctionRule]:
    """Register the decorated function as the rule of torch functions, operators, or (strings) tensor methods.

    ``rounds``: how their arithmetic rounds, see :data:`Rounds`.
    """

    def register(function: FunctionRule) -> FunctionRule:
        for target in targets:
            _function_rules[target] = function
        _rounds[function] = rounds
        return function

    return register


def rounds_like(function: ModuleRule | FunctionRule) -> Rounds:
    """How the arithmetic rounds of what this rule is for."""
    return _rounds[function]


def rule_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The class whose rule holds for ``module``, see :mod:`lipdp.behaviour`."""
    return _module_rules.class_of(module)


def find_module_rule(module: torch.nn.Module) -> ModuleRule | None:
    """The rule that holds for the module."""
    return _module_rules.find(module)


def has_rule(module: torch.nn.Module) -> bool:
    """Whether the module is one step of the calculus, instead of being traced into."""
    return rule_class(module) is not None


def find_function_rule(target: Any) -> FunctionRule | None:
    """The rule of a torch function or operator, or of a tensor method given by its name."""
    return _function_rules.get(target)
