"""What the calculus says of one tensor, what one operation does to it, and whose word that is.

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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from lipdp.behaviour import ByClass, entered
from lipdp.errors import UnsupportedError

Shape = tuple[int, ...]


def times(*factors: float) -> float:
    """Product of bounds in [0, ∞] where 0·∞ = ∞: the only reading of an unknown product that can't under-report."""
    if any(math.isinf(factor) for factor in factors):
        return math.inf
    return math.prod(factors)


@dataclass(frozen=True)
class Bound:
    """An activation: its shape without the batch dimension, and X ≥ ‖activation of one example‖₂ over the whole tensor.

    ``norm`` may be ``math.inf``: an unbounded activation is legal as long as no parameter's Δ comes out infinite.

    Two finer bounds are optional (∞: nothing is known), for rules that can use them: attention, gates, token means. A rule
    that does not know them leaves them out, which is always right.

    Attributes:
        norm: X, made smaller where the finer bounds imply less: ``X ≤ √rows·row_norm`` and ``X ≤ √n·max_abs``.
        shape: without the batch dimension.
        row_norm: bound on the norm of each row, the vectors along the last dimension (tokens).
        max_abs: bound on the absolute value of each entry.
    """

    norm: float
    shape: Shape
    row_norm: float = math.inf
    max_abs: float = math.inf

    def __post_init__(self) -> None:
        for value in (self.norm, self.row_norm, self.max_abs):
            if not value >= 0:  # also catches NaN
                raise ValueError(f"a bound on a norm is a number in [0, inf], not {value}")
        finer = min(times(math.sqrt(self.rows), self.row_norm), times(math.sqrt(self.size), self.max_abs))
        if finer < self.norm:
            object.__setattr__(self, "norm", finer)

    @property
    def rows(self) -> int:
        """Number of vectors along the last dimension."""
        return math.prod(self.shape[:-1])

    @property
    def row(self) -> float:
        """The least bound on the norm of one row that is known."""
        length = self.shape[-1] if self.shape else 1
        return min(self.norm, self.row_norm, times(math.sqrt(length), self.max_abs))

    @property
    def peak(self) -> float:
        """The least bound on one entry that is known."""
        return min(self.row, self.max_abs)

    @property
    def size(self) -> int:
        """Scalars per example, n."""
        return math.prod(self.shape)

    def positions(self, feature_dims: int = 1) -> int:
        """Positions T that share a parameter acting on the last ``feature_dims`` dimensions (a dense layer's tokens)."""
        return math.prod(self.shape[: len(self.shape) - feature_dims])


@dataclass(frozen=True)
class Transfer:
    """What one operation does to bounds: one row of the table "backpropagation for bounds".

    With G the bound on the cotangent of the output, input i receives the cotangent ``min(gains[i]·G, clip)`` and
    parameter p has the per-example gradient bound ``Δ_p = parameters[p]·G``. All of it is data, so that a rule can be
    printed, compared and tested without running anything.

    Attributes:
        output: bound on the output, or one per output for an operation that splits a tensor into disjoint parts; the
            cotangents of such parts combine to ``√(ΣG_i²)``.
        gains: for each tensor input in order of appearance, a bound on the norm of the operation's transposed Jacobian.
        parameters: name of the parameter → factor of G in its Δ. Every trainable parameter of a module must be named.
        clip: bound enforced on the cotangent going back (:class:`lipdp.nn.ClipGradient`).
        normalises: every cotangent but 0 is brought to the norm ``clip``, also those that were shorter.
        exact: whether some input, weights and cotangent reach the bound. Tests hold exact rules to 99%.
        why_infinite: for a rule with an infinite value, the reason, for the error message.
        note: which bound was used where there is a choice, and how tight it is.
        sizes: for a parameter whose *effective weight* is bounded and noised in its place (a reparametrised layer), the
            number of that weight's entries.
    """

    output: Bound | tuple[Bound, ...]
    gains: Sequence[float] = (1.0,)
    parameters: Mapping[str, float] = field(default_factory=dict)
    clip: float = math.inf
    normalises: bool = False
    exact: bool = True
    why_infinite: str = ""
    note: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


ModuleRule = Callable[[Any, "Call"], Transfer]
R = TypeVar("R", bound=ModuleRule)
F = TypeVar("F")
FunctionRule = Callable[["Call"], Transfer]

_module_rules: ByClass[ModuleRule] = ByClass()
_function_rules: dict[Any, FunctionRule] = {}

Rounds = Literal["moves", "each", "ball", "counted", "arithmetic", "sums"]
"""What rounding in an operation depends on, see :mod:`lipdp.bounds.rounding`.

"moves": numbers are moved, not computed with; "each": one by one; "ball": norms of examples, and a division by them; "counted":
products with a kernel whose norm is counted; "arithmetic": sums and products of tensors; "sums": anything, sums as
long as an example.
"""
_rounds: dict[Any, Rounds] = {}


@dataclass(frozen=True)
class ParameterRef:
    """A trainable parameter that ``forward`` uses by itself, as in ``x + self.position``.

    Attributes:
        name: qualified, as in ``model.named_parameters()``.
        tensor: the parameter itself. Its values change with every step: a rule may rely on its shape only.
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Call:
    """One operation of the traced graph, as a rule sees it.

    Activations in ``args`` and ``kwargs`` are replaced by their :class:`Bound`, trainable parameters by
    :class:`ParameterRef`; constant tensors and Python values stay as they are.

    Attributes:
        where: how messages name it: the layer, or the function and the layer in whose forward it stands.
        args: positional arguments, replaced as above.
        kwargs: arguments by name, replaced as above.
        inputs: the bounds of all activations among the arguments, in order of appearance.
        output_shapes: shape of each output without the batch dimension; one, except where a tensor is split.
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

    return _entered(_module_rules, classes, rounds)


def rule_for_function(*targets: Any, rounds: Rounds = "sums") -> Callable[[FunctionRule], FunctionRule]:
    """Register the decorated function as the rule of torch functions, operators, or (strings) tensor methods.

    ``rounds``: how their arithmetic rounds, see :data:`Rounds`.
    """

    return _entered(_function_rules, targets, rounds)


def rule_for_both(
    classes: Sequence[type[torch.nn.Module]], targets: Sequence[Any], *settings: tuple[str, int, Any], rounds: Rounds = "sums"
) -> Callable[[Callable[..., Transfer]], Callable[..., Transfer]]:
    """Register the decorated function as the rule of module classes and of the functions that compute the same.

    It is called with the call and with each of the ``settings``: the module's attribute of this name, or the function's argument of
    this (name, position, default).
    """

    def enter(function: Callable[..., Transfer]) -> Callable[..., Transfer]:
        @rule(*classes, rounds=rounds)
        def of_module(module: torch.nn.Module, call: Call) -> Transfer:
            return function(call, *(getattr(module, name) for name, _, _ in settings))

        @rule_for_function(*targets, rounds=rounds)
        def of_function(call: Call) -> Transfer:
            return function(call, *(call.argument(place, name, default) for name, place, default in settings))

        return function

    return enter


def _entered(store: Any, keys: tuple[Any, ...], rounds: Rounds) -> Callable[[F], F]:
    def enter(function: F) -> F:
        _rounds[function] = rounds
        return entered(store, *keys)(function)

    return enter


# How the arithmetic rounds of what a rule is for; the rule of a module, of a torch function or operator, or of a method by name.
rounds_like = _rounds.__getitem__
find_module_rule, find_function_rule = _module_rules.find, _function_rules.get


def rule_class(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The class whose rule holds for ``module``, see :mod:`lipdp.behaviour`."""
    return _module_rules.class_of(module)  # a function, for programs hold it, and are copied


def has_rule(module: torch.nn.Module) -> bool:
    """Whether the module is one step of the calculus, instead of being traced into."""
    return rule_class(module) is not None
