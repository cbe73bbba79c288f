"""One answer to "does this object still compute what was said of its class?", for rules, norm rules, lowerings and losses.

What is said of a class speaks of the functions that it has when it is said, through the whole resolution order. It does not
hold where one of them was replaced since; for a subclass that overrides ``forward`` or any other method of the class that
``forward`` may call; for one that brings other classes in behind it (a mixin between the class and its bases); and for an object
whose methods were replaced on the instance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

import torch

F = TypeVar("F")
V = TypeVar("V")
# What a subclass may redefine and still compute the same thing.
_HARMLESS = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters", "__annotate__", "__annotate_func__"})


_said = 0  # how often something was said of a class


class ByClass(Generic[V]):
    """What is said of classes of modules, found for their instances and those of subclasses that compute the same."""

    def __init__(self) -> None:
        self._values: dict[type[torch.nn.Module], V] = {}
        self._code: dict[type[torch.nn.Module], list[object]] = {}
        self._seen: dict[type[torch.nn.Module], list[object]] = {}

    def __setitem__(self, cls: type[torch.nn.Module], value: V) -> None:
        global _said
        _said += 1
        self._values[cls] = value
        self._code[cls], self._seen[cls] = _code_of(cls), _attributes_of(cls)

    def _is_as_it_was(self, cls: type[torch.nn.Module]) -> bool:
        """Whether the functions behind a class are those that it had; with all attributes the same objects they are."""
        present = _attributes_of(cls)
        if _same(present, self._seen[cls]):
            return True
        same = _same([value for value in present if is_code(value)], self._code[cls])
        if same:
            self._seen[cls] = present
        return same

    def __getitem__(self, cls: type[torch.nn.Module]) -> V:
        return self._values[cls]

    def __iter__(self) -> Iterator[type[torch.nn.Module]]:
        return iter(self._values)

    def class_of(self, module: torch.nn.Module) -> type[torch.nn.Module] | None:
        """The class that speaks for ``module``: its own or the nearest base class, if it still computes the same; else ``None``."""
        for cls in type(module).__mro__:
            if cls in self._values:
                same = self._is_as_it_was(cls) and not changed_methods(module, cls)
                return cls if same else None
        return None

    def find(self, module: torch.nn.Module) -> V | None:
        """What is said of :meth:`class_of` the module."""
        cls = self.class_of(module)
        return None if cls is None else self._values[cls]


def entered(store: ByClass[Any] | MutableMapping[Any, Any], *keys: Any) -> Callable[[F], F]:
    """A decorator that enters its function for each of the keys."""

    def enter(function: F) -> F:
        for key in keys:
            store[key] = function
        return function

    return enter


class ClassBodies:
    """The bodies of some classes and of all their bases up to torch.nn.Module, as they are when this is made: a quick first look.

    Args:
        classes: the classes.
    """

    def __init__(self, classes: Collection[type]) -> None:
        self._said = _said
        self._classes = list(classes)
        self._bodies = [vars(base) for base in {base: None for cls in classes for base in _bases_of(cls)}]
        self._held = self._contents()

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassBodies:
        return self  # classes are not copied either

    @property
    def stand(self) -> bool:
        """Whether every attribute of every class is the object that it was, and nothing more was said of any class."""
        sizes, present = self._contents()
        return self._said == _said and sizes == self._held[0] and all(map(operator.is_, present, self._held[1]))

    def _contents(self) -> tuple[list[int], list[object]]:
        """Names and values of all bodies and the orders of the classes, end to end; and how many each body has."""
        sizes: list[int] = []
        present: list[object] = [cls.__mro__ for cls in self._classes]
        for body in self._bodies:
            sizes.append(len(body))
            present += body
            present += body.values()
        return sizes, present


def changed_methods(instance: object, cls: type, allowed: Collection[str] = ()) -> list[str]:
    """Names of what an instance, or its class on the way down from ``cls``, computes otherwise than ``cls`` does."""
    order = type(instance).__mro__
    position = order.index(cls)
    if order[position:] != cls.__mro__:
        return [f"the bases of {cls.__name__}"]
    own = (item for subclass in order[:position] for item in vars(subclass).items())
    fine = _HARMLESS | set(allowed)
    overridden = [name for name, value in own if is_code(value) and hasattr(cls, name) and name not in fine]
    replaced = [name for name in vars(instance) if callable(getattr(cls, name, None))]
    return [*overridden, *replaced]


def is_code(value: Any) -> bool:
    """Whether an attribute of a class is something that is run."""
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def _attributes_of(cls: type) -> list[object]:
    """All that a class and its bases hold."""
    return [value for base in _bases_of(cls) for value in vars(base).values()]


def _bases_of(cls: type) -> tuple[type, ...]:
    """A class and its bases, up to torch.nn.Module (which tracers and compilers patch for a while)."""
    return cls.__mro__[: cls.__mro__.index(torch.nn.Module)] if torch.nn.Module in cls.__mro__ else cls.__mro__


def _code_of(cls: type) -> list[object]:
    """The functions among them."""
    return [value for value in _attributes_of(cls) if is_code(value)]


def _same(a: list[object], b: list[object]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))
