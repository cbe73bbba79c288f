"""What a computation depends on besides its inputs, as one hashable value: storages, modes, settings, hooks, closures.

Whoever keeps something that was made for a model (a recorded CUDA graph, a verdict) compares fingerprints to learn whether it
still is that model. Values of tensors are no part of it; where they are stored is. :func:`reachable_tensors` lists them.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lipdp._checks import named
from lipdp.errors import LipdpError, UnsupportedError

_PLAIN = (int, float, complex, bool, str, bytes, range, type(None), torch.dtype, torch.device, torch.layout, enum.Enum)
_TENSORS = ("_parameters", "_buffers")
_WITHOUT_PARTS = frozenset((*_PLAIN, type, types.ModuleType, types.BuiltinFunctionType))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_Signed = dict[int, tuple[int, Any]]  # by id: how many references deep, and the object, so that no other takes its id
_UNSIGNED = (0, None)
_DEPTH = 6
# Of data behind a global name: items of a container, bytes of an array.
_MANY, _LARGE = 4096, 2**20


def fingerprint(*objects: Any) -> Hashable:
    """Equal for equal states of the same objects; different once a storage, a mode, a setting, a hook or a closure changes.

    Modules are followed into their attributes and the forward of their class, functions into their closures, defaults and the data
    (numbers, texts, containers, tensors) that they read by a global name, containers into their items. What is deeper than a few
    references is identified by its object alone.

    Example:
        >>> layer = torch.nn.Dropout(0.5)
        >>> before = fingerprint(layer)
        >>> layer.p = 0.1
        >>> fingerprint(layer) == before
        False
    """
    seen: _Signed = {}
    with readable():
        return tuple(_sign(value, seen, _DEPTH) for value in objects)


class Watched:
    """Numbers the states of some objects: the same number for the same :func:`fingerprint`, computed only when a quick look
    finds something changed.

    The quick look compares attributes by identity (the old ones are kept, so no other object can take their place) and containers
    by the identity of their items. Whatever could change inside without that showing is signed in full each time.

    Attributes:
        looks: how often a quick look has found something changed, the first one included. Between two calls that leave it alone all
            modules, their children and their parameters have been the same objects.
    """

    def __init__(self, *objects: Any) -> None:
        self.objects = objects
        self.looks = 0
        self._modules: list[torch.nn.Module] = []
        self._seen: tuple[Any, ...] | None = None
        self._numbers: dict[Hashable, int] = {}
        self._present = 0

    def __call__(self) -> int:
        """The present state's number."""
        with readable():
            changed = self._seen is None or not self._unchanged()
            if changed:
                self._look()
        if changed:
            self._present = self._numbers.setdefault(fingerprint(*self.objects), len(self._numbers))
        return self._present

    def _look(self) -> None:
        self.looks += 1
        self._modules = [module for value in self.objects if isinstance(value, torch.nn.Module) for module in value.modules()]
        values = [value for module in self._modules for value in (*vars(module), *vars(module).values())]
        self._containers = [value for value in values if isinstance(value, dict | list | set)]
        self._filled = [value for value in self._containers if value]  # most are empty: no hooks
        within = [part for value in self._filled for part in (*value, *(value.values() if isinstance(value, dict) else ()))]
        self._tensors = [t for t in (*values, *within) if isinstance(t, torch.Tensor) and _has_place(t)]
        others = [value for value in self.objects if not isinstance(value, torch.nn.Module)]
        nested = [value for value in (*within, *others) if isinstance(value, dict | list | set)]
        self._deep = [*nested, *(value for value in (*values, *within, *others) if not _settled(value))]
        self._deep += [forward for forward in {_forward(module) for module in self._modules} if not _settled(forward)]
        simple = [_simple_objects(value, _DEPTH) for value in self._deep]
        self._simple = [value for found in simple if found is not None for value in found]
        self._deep = [value for value, found in zip(self._deep, simple, strict=True) if found is None]
        self._seen = self._glance()

    def _unchanged(self) -> bool:
        assert self._seen is not None
        (objects, *numbers), (present, *others) = self._seen, self._glance()
        return numbers == others and len(objects) == len(present) and all(map(operator.is_, objects, present))

    def _glance(self) -> tuple[list[Any], list[int], list[Hashable], list[Hashable]]:
        """All that is compared by identity, end to end: classes, what they compute, attributes with their names (two may have
        changed places), items; how many belong to each; where tensors are; signatures."""
        objects: list[Any] = []
        sizes = []
        for module in (*self._modules, *self._simple):
            kind, own = module.__class__, module.__dict__
            objects += (kind, getattr(kind, "forward", None), *own, *own.values())
            sizes.append(len(own))
        sizes += map(len, self._containers)
        for value in self._filled:
            objects += value
            if isinstance(value, dict):
                objects += value.values()
        places: list[Hashable] = [(t.data_ptr(), t.requires_grad, t.shape, t.stride(), t.dtype) for t in self._tensors]
        return objects, sizes, places, [_sign(value, {}, _DEPTH) for value in self._deep]


def _has_place(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie in memory by shape and strides: not those of sparse, nested, meta and torch.func's tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta and not _is_wrapped(tensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is one of torch.func's, which have no memory of their own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _simple_objects(value: Any, depth: int) -> list[Any] | None:
    """An object and those in its attributes, where nothing else is in them but plain values; ``None`` for any other.

    Then it is the same inside as long as the attributes of each are the same objects.
    """
    own = getattr(value, "__dict__", None)
    kinds = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.nn.Module, torch.Tensor, np.ndarray)
    holding = (Mapping, Set, Sequence, deque, bytearray, functools.partial)
    if not isinstance(own, dict) or isinstance(value, (*kinds, *holding)) or slot_names(type(value)) or depth == 0:
        return None
    found = [value]
    for part in own.values():
        if not isinstance(part, _PLAIN):
            inside = _simple_objects(part, depth - 1)
            if inside is None:
                return None
            found += inside
    return found


def _forward(module: torch.nn.Module) -> Any:
    """What its class computes."""
    return getattr(type(module), "forward", None)


def _read_globals(function: types.FunctionType) -> list[Any]:
    """Data that a function of the user's reads by global names: flags, counters, tables that are not too large to look at."""
    if (function.__module__ or "").startswith(("torch.", "lipdp.")):
        return []
    known = function.__globals__
    values = [known[name] for name in function.__code__.co_names if name in known and not name.startswith("__")]
    kinds = (*_PLAIN, *_CONTAINERS, torch.Tensor, np.ndarray)
    return [value for value in values if isinstance(value, kinds) and not _is_large(value)]


def _is_large(value: Any) -> bool:
    return value.nbytes > _LARGE if isinstance(value, np.ndarray) else isinstance(value, _CONTAINERS) and len(value) > _MANY


def _settled(value: Any) -> bool:
    """Whether nothing can change inside while it is the same object, or whether :class:`Watched` looks inside anyway."""
    if isinstance(value, tuple):
        return all(_settled(part) for part in value)
    if isinstance(value, types.FunctionType):
        bare = value.__closure__ is None and value.__defaults__ is None and value.__kwdefaults__ is None
        return bare and not _read_globals(value)
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_nested
    if isinstance(value, dict | list | set):
        return True  # their items are looked at one by one
    return isinstance(value, (*_PLAIN, torch.nn.Module, type, types.BuiltinFunctionType))


def _sign(value: Any, seen: _Signed, depth: int) -> Hashable:
    kind = value.__class__
    if isinstance(value, _PLAIN):
        return kind, value  # 1, 1.0 and True are equal, and not the same setting
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if depth <= seen.get(id(value), _UNSIGNED)[0]:
        return kind, id(value)
    seen[id(value)] = depth, value
    deeper = depth - 1
    if isinstance(value, torch.nn.Module):
        return tuple(_module(module, seen, deeper) for module in value.modules())
    if isinstance(value, tuple | list):
        return kind, tuple(_sign(part, seen, deeper) for part in value)
    if isinstance(value, dict):
        return kind, tuple((_sign(key, seen, deeper), _sign(part, seen, deeper)) for key, part in value.items())
    if isinstance(value, types.FunctionType):
        inside = [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_read_globals(value)]
        return id(value.__code__), tuple(_sign(part, seen, deeper) for part in inside)
    if isinstance(value, types.MethodType):
        return _sign(value.__func__, seen, deeper), _sign(value.__self__, seen, deeper)
    if isinstance(value, functools.partial):
        return tuple(_sign(part, seen, deeper) for part in (value.func, value.args, value.keywords))
    if isinstance(value, np.ndarray):
        return kind, value.shape, value.dtype.str, repr(value.tolist()) if value.dtype.hasobject else value.tobytes()
    if isinstance(value, Mapping | Set | Sequence | deque | bytearray) and not isinstance(value, type):
        items = value.items() if isinstance(value, Mapping) else value
        return kind, tuple(_sign(part, seen, deeper) for part in items)
    own = None if isinstance(value, type) else _own(value)
    return kind, id(value), None if own is None else _sign(own, seen, deeper)


def _own(value: Any) -> dict[str, Any] | None:
    """Attributes of an object: it may have a dictionary, slots or both."""
    own, more = getattr(value, "__dict__", None), slots(value)
    return {**own, **more} if isinstance(own, dict) and more else own if isinstance(own, dict) else more


def slot_names(cls: type) -> list[str]:
    """The slots of a class, by the names that its objects have them by: ``__scale`` is ``_Class__scale``."""
    found = []
    for base in cls.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if isinstance(name, str) and name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__") and base.__name__.strip("_")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return found


def slots(value: Any) -> dict[str, Any] | None:
    """Attributes of an object past its dictionary."""
    return {name: getattr(value, name) for name in slot_names(type(value)) if hasattr(value, name)} or None


def reachable_tensors(*objects: Any) -> list[torch.Tensor]:
    """Every tensor that the objects' attributes and items lead to within a few references, each once: also plain attributes.

    One that was made inside torch.func, and kept, is refused: nobody can read it outside.
    """
    tensors = [value for value in reached(*objects) if isinstance(value, torch.Tensor)]
    if any(map(_is_wrapped, tensors)):
        raise UnsupportedError(
            "the model or its loss has kept a tensor that it made of a record (in a list of its own, say), and is to be run on "
            "others after it: what one record has left there may reach the next. Make it a function of its inputs; to look at what "
            "it computes, use a copy of the model."
        )
    return tensors


def reached(*objects: Any) -> list[Any]:
    """What the objects' attributes and items lead to within a few references, each once."""
    with readable():
        return _led_to(objects)


def _led_to(objects: Sequence[Any]) -> list[Any]:
    met: dict[int, Any] = {}  # kept, so that no id is used again
    level = [part for value in objects for part in (value.modules() if isinstance(value, torch.nn.Module) else [value])]
    for depth in range(_DEPTH, -1, -1):
        deeper: list[Any] = []
        for value in level:
            if type(value) in _WITHOUT_PARTS or id(value) in met:  # nearly all
                continue
            met[id(value)] = value
            if depth and not isinstance(value, (torch.Tensor, *_PLAIN)):
                deeper += _parts(value)
        level = deeper
    return list(met.values())


@contextmanager
def readable() -> Iterator[None]:
    """Objects of the user's are asked for what they hold; what they raise then is no error of ours."""
    try:
        yield
    except LipdpError:
        raise
    except Exception as error:
        raise UnsupportedError(
            "something that the model or its loss holds can't be looked at, so that a change of it would go unnoticed: asked for "
            f"its contents it raises {named(error)}. Keep it outside of the model, or in a form that can be read."
        ) from error


@contextmanager
def nothing_kept(*objects: Any) -> Iterator[None]:
    """Attributes that they set meanwhile are as they were afterwards: what is run again is no pass, and leaves nothing."""
    parts = [part for one in objects for part in (one.modules() if isinstance(one, torch.nn.Module) else (one,))]
    owned = [part.__dict__ for part in parts if isinstance(getattr(part, "__dict__", None), dict)]
    before = [dict(attributes) for attributes in owned]
    try:
        yield
    finally:
        for present, attributes in zip(owned, before, strict=True):
            if present.keys() != attributes.keys() or any(present[name] is not value for name, value in attributes.items()):
                present.clear()
                present.update(attributes)


def storages(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Where each of them lies in memory: what a recording that reads them was made for."""
    return tuple(t.data_ptr() if t.layout == torch.strided and not t.is_nested else id(t) for t in tensors)


def _parts(value: Any) -> list[Any]:
    if type(value) in (list, tuple, set, frozenset):  # by type first: asking abstract classes takes longer
        return list(value)
    if type(value) is not types.FunctionType:
        if type(value) is dict or isinstance(value, Mapping):
            return [*value.keys(), *value.values()]
        if isinstance(value, Sequence | Set | deque):
            return list(value)
    if isinstance(value, types.FunctionType):
        return [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    own = None if isinstance(value, type | types.ModuleType) else _own(value)
    return list(own.values()) if own else []


def _cells(function: types.FunctionType) -> list[Any]:
    parts = []
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            parts.append(None)
    return parts


def _tensor(tensor: torch.Tensor) -> Hashable:
    place = tensor.data_ptr() if _has_place(tensor) else id(tensor)
    shape = None if tensor.is_nested else tensor.shape
    strides = tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else None
    return place, shape, strides, tensor.dtype, tensor.requires_grad


def _module(module: torch.nn.Module, seen: _Signed, depth: int) -> Hashable:
    seen[id(module)] = max(depth, seen.get(id(module), _UNSIGNED)[0]), module
    parts: list[Hashable] = [id(module), id(module.__class__), _sign(_forward(module), seen, depth)]
    for name, value in vars(module).items():
        if name in _TENSORS:
            parts.append(tuple((key, None if tensor is None else _tensor(tensor)) for key, tensor in value.items()))
        elif name == "_modules":
            parts.append(tuple((key, id(child)) for key, child in value.items()))
        elif value.__class__ in (int, bool, str, float):
            parts.append((name, value))
        elif isinstance(value, _CONTAINERS) and not value:  # dictionaries of hooks, most of a module's attributes
            parts.append((name, value.__class__))
        else:  # not asked whether it is true: a tensor or an array of several numbers is neither
            parts.append((name, _sign(value, seen, depth)))
    return tuple(parts)
