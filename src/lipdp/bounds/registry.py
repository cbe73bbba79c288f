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

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lipdp.bounds.bound import Bound, Shape, Transfer
from lipdp.errors import UnsupportedError

__all__ = ["Call", "ParameterRef", "find_function_rule", "find_module_rule", "has_rule", "rule", "rule_class", "rule_for_function"]

ModuleRule = Callable[[Any, "Call"], Transfer]
R = TypeVar("R", bound=ModuleRule)
FunctionRule = Callable[["Call"], Transfer]

_module_rules: dict[type[torch.nn.Module], ModuleRule] = {}
_functions: dict[type[torch.nn.Module], list[object]] = {}  # what each class computed when it got its rule
_function_rules: dict[Any, FunctionRule] = {}


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
        if 0 in dims:
            raise UnsupportedError(
                f"{self.where} works along dimension 0, the batch: it mixes examples, so one example's influence can't be "
                "bounded. Work along dimensions 1 and up."
            )
        return dims

    def refuse(self, why: str) -> UnsupportedError:
        """The error for a form of this operation that has no rule."""
        return UnsupportedError(f"{self.where}: {why}")


def rule(*classes: type[torch.nn.Module]) -> Callable[[R], R]:
    """Register the decorated function as the rule of these module classes (and of subclasses with the same forward)."""

    def register(function: R) -> R:
        for cls in classes:
            _module_rules[cls] = function
            _functions[cls] = _code_of(cls)
        return function

    return register


def rule_for_function(*targets: Any) -> Callable[[FunctionRule], FunctionRule]:
    """Register the decorated function as the rule of torch functions, operators, or (strings) tensor methods."""

    def register(function: FunctionRule) -> FunctionRule:
        for target in targets:
            _function_rules[target] = function
        return function

    return register


def rule_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The class whose rule holds for ``module``: its own, or the nearest base class that it extends without changing what is computed.

    A rule speaks of the functions that its class had when the rule was registered, through the whole resolution order. It does not
    hold where one of them was replaced since; for a subclass that overrides ``forward`` or any other method of the class that
    ``forward`` may call; for one that brings other classes in behind it (a mixin between the class and its bases); and for an object
    whose methods were replaced on the instance.
    """
    order = type(module).__mro__
    for position, cls in enumerate(order):
        if cls not in _module_rules:
            continue
        if order[position:] != cls.__mro__ or not _same_code(_code_of(cls), _functions[cls]):
            return None
        own = (item for subclass in order[:position] for item in vars(subclass).items())
        changed = any(_is_code(value) and hasattr(cls, name) and name not in _HARMLESS for name, value in own)
        replaced = any(callable(getattr(cls, name, None)) for name in vars(module))
        return None if changed or replaced else cls
    return None


def find_module_rule(module: torch.nn.Module) -> ModuleRule | None:
    """The rule that holds for the module, see :func:`rule_class`."""
    cls = rule_class(module)
    return None if cls is None else _module_rules[cls]


# What a subclass may redefine and still compute the same thing.
_HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "__annotate__", "__annotate_func__"}


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def _code_of(cls: type) -> list[object]:
    """The functions behind a class, up to torch.nn.Module (which tracers and compilers patch for a while)."""
    bases = cls.__mro__[: cls.__mro__.index(torch.nn.Module)] if torch.nn.Module in cls.__mro__ else cls.__mro__
    return [value for base in bases for value in vars(base).values() if _is_code(value)]


def _same_code(a: list[object], b: list[object]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def has_rule(module: torch.nn.Module) -> bool:
    """Whether the module is one step of the calculus, instead of being traced into."""
    return rule_class(module) is not None


def find_function_rule(target: Any) -> FunctionRule | None:
    """The rule of a torch function or operator, or of a tensor method given by its name."""
    return _function_rules.get(target)
