"""Norm rules by module class: how a layer's per-example gradients follow from its input and its output's cotangent.

A rule is one small function::

    @norm_rule(torch.nn.Linear)
    def _linear(layer, inputs, output):
        x = positions(inputs[0])
        def contributions(cotangent):
            return {"weight": OuterSum(positions(cotangent), x, tuple(layer.weight.shape)), …}
        return contributions

It is called in the forward pass; what it returns is called in the backward pass, with the cotangent of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from lipdp.behaviour import ByClass
from lipdp.clipping.contribution import Contribution

__all__ = [
    "Contributions",
    "NormRule",
    "Refusal",
    "WatchedForward",
    "find_norm_rule",
    "find_refusal",
    "find_watched_forward",
    "is_at_once",
    "norm_rule",
    "refuse",
    "watched_forward",
]

Contributions = Callable[[torch.Tensor], Mapping[str, Contribution]]
NormRule = Callable[[Any, tuple[Any, ...], torch.Tensor], Contributions]
Refusal = Callable[[Any], str | None]
R = TypeVar("R", bound=NormRule)

_rules: ByClass[NormRule] = ByClass()
_refusals: dict[type[torch.nn.Module], Refusal] = {}
_at_once: set[NormRule] = set()


WatchedForward = Callable[[Any, str], Callable[..., Any]]
_watched_forwards: ByClass[WatchedForward] = ByClass()


def watched_forward(*classes: type[torch.nn.Module]) -> Callable[[WatchedForward], WatchedForward]:
    """Register a factory of forwards that can be watched for these classes (and for subclasses that compute the same).

    It is called with the :class:`lipdp.clipping.record.Recording` and the layer's name.
    """

    def register(factory: WatchedForward) -> WatchedForward:
        for cls in classes:
            _watched_forwards[cls] = factory
        return factory

    return register


def find_watched_forward(module: torch.nn.Module) -> WatchedForward | None:
    """The factory for a module with trainable parameters of its own, if its class has one."""
    return _watched_forwards.find(module) if any(p.requires_grad for p in module.parameters(recurse=False)) else None


def norm_rule(*classes: type[torch.nn.Module], at_once: bool = False) -> Callable[[R], R]:
    """Register the decorated function as the norm rule of these classes (and of subclasses with the same forward).

    With ``at_once`` the contributions hold neither input nor cotangent, only sums as small as the parameters: they are made as soon
    as the backward pass has the cotangent, and both are let go.
    """

    def register(function: R) -> R:
        for cls in classes:
            _rules[cls] = function
        if at_once:
            _at_once.add(function)
        return function

    return register


def refuse(*classes: type[torch.nn.Module]) -> Callable[[Refusal], Refusal]:
    """Register a function that says why an instance of these classes can't be trained by clipping (None: it can)."""

    def register(function: Refusal) -> Refusal:
        for cls in classes:
            _refusals[cls] = function
        return function

    return register


def find_norm_rule(module: torch.nn.Module) -> NormRule | None:
    """The rule of the module's class, or of the nearest base class that computes the same, see :mod:`lipdp.behaviour`."""
    return None if is_parametrized(module) else _rules.find(module)


def is_at_once(rule: NormRule) -> bool:
    """Whether the rule's contributions are made during the backward pass, see :func:`norm_rule`."""
    return rule in _at_once


def find_refusal(module: torch.nn.Module) -> str | None:
    """Why the module can't be used, if it can't."""
    for cls in type(module).__mro__:
        if cls in _refusals:
            return _refusals[cls](module)
    return None
