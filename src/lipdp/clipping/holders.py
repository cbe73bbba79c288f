"""Places that a model may write to, each with what was in it: dictionaries, lists, variables of closures, caches, tensors, ...

What leads to them, and when they are put back, is :mod:`lipdp.clipping.restored`.
"""

from __future__ import annotations

import builtins
import contextvars
import ctypes
import functools
import gc
import inspect
import io
import os
import random
import sys
import types
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from operator import attrgetter, eq, is_, methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch

from lipdp.clipping.kept import frame_of, is_iterator, is_nobodys, names_of, position
from lipdp.clipping.memories import version_of
from lipdp.digest import same_bits
from lipdp.fingerprint import fingerprint, slot_names, slots

# Items of a container, bytes of an array and of a tensor, that are too many to be copied.
MANY, _LARGE, _VERY_LARGE = 4096, 2**20, 2**26
_MISSING = object()
# Containers are whoever's holds them.
BARE = (dict, list, set, deque, tuple, frozenset, bytearray, array, np.ndarray)
# Functions that wait in their middle.
WAITING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# Variables of the environment that torch sets when it comes to compile something.
_TORCHS = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


class Kind(NamedTuple):
    """Of places.

    Attributes:
        copy: what is in one, to be kept.
        same: whether that still is in it.
        restore: puts it back, and gives what is in it then; where it can't be, it still is another.
    """

    copy: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    restore: Callable[[Any, Any], Any]


class Held:
    """A place, and what was in it."""

    __slots__ = ("before", "kind", "place")

    def __init__(self, place: Any, kind: Kind) -> None:
        self.place, self.kind, self.before = place, kind, kind.copy(place)

    def is_as_it_was(self) -> bool:
        """Whether nothing has changed."""
        return self.kind.same(self.place, self.before)

    def is_equal(self) -> bool:
        """Whether what is in it now is equal to what was, though other objects."""
        kind = self.kind
        trained = kind is _WEIGHTS and self.place.requires_grad  # put back, whatever is in them
        if trained or self.is_as_it_was():
            return True
        present, before = kind.copy(self.place), self.before
        if kind is _ENVIRONMENT:
            present, before = (
                {name: text for name, text in one.items() if os.fsdecode(name) not in _TORCHS} for one in (present, before)
            )
        return kind in _BY_CONTENTS and fingerprint(present) == fingerprint(before)

    def put_back(self) -> None:
        """It is what it was, where that can be."""
        self.before = self.kind.restore(self.place, self.before)


class Together:
    """Many of them, and the process's environment. Most are dictionaries without anything in them (a module's hooks)."""

    def __init__(self, held: list[Held]) -> None:
        self._environment = Held(getattr(os.environ, "_data", os.environ), _ENVIRONMENT)
        self._held = [self._environment, *held]
        tables = [one for one in held if one.kind is _TABLE and type(one.place) in (dict, OrderedDict)]
        self._empty = [one.place for one in tables if not one.before]
        self._tables = [(one.place, one.before) for one in tables if one.before]
        lists = [one for one in held if one.kind is _ITEMS and type(one.place) is list]
        self._lists = [(one.place, one.before) for one in lists]
        trained = [one for one in held if one.kind is _TENSOR and one.place.requires_grad and one.place.is_leaf]
        self._trained = [(one.place, one.before.grad) for one in trained]
        owners = [one for one in held if one.kind is _OWNER]
        self._owners = [one.place for one in owners]
        self._classes, self._dictionaries = list(map(_class_of, self._owners)), list(map(_dictionary_of, self._owners))
        asked = {id(one) for one in (*tables, *lists, *trained, *owners)}
        self._others = [one for one in held if id(one) not in asked]

    def are_as_they_were(self) -> bool:
        """Whether nothing has changed."""
        if any(self._empty) or not self._environment.is_as_it_was():
            return False
        for table, before in self._tables:  # as _has_items and _are do
            if len(table) != len(before) or not (all(map(is_, table.values(), before.values())) and all(map(is_, table, before))):
                return False
        for items, there in self._lists:
            if len(items) != len(there) or not all(map(is_, items, there)):
                return False
        for tensor, gradient in self._trained:
            if tensor.grad is not gradient or not tensor.requires_grad:
                return False
        if not all(map(is_, map(_class_of, self._owners), self._classes)):
            return False
        if not all(map(is_, map(_dictionary_of, self._owners), self._dictionaries)):
            return False
        return all(map(methodcaller("is_as_it_was"), self._others))

    def are_equal(self) -> bool:
        """Whether what has changed is equal to what was there."""
        return all(map(methodcaller("is_equal"), self._held))

    def learn(self) -> None:
        """Names that have come to stand for another number or text have been given it by somebody else, and it leads nowhere."""
        for one in self._others:
            if one.kind is _NAMES:
                known, names = one.place
                for number, value in enumerate(map(known.get, names)):
                    if isinstance(value, (int, float, str)):
                        one.before[number] = value

    def put_back(self) -> bool:
        """They are what they were, where that can be. Whether all are, but for iterators: how far one has come may be nobody's."""
        for one in self._held:
            if not one.is_as_it_was():
                one.put_back()
        return all(one.is_as_it_was() for one in self._held if one.kind is not _POSITION)


def held_by(value: Any) -> Iterator[Held]:
    """What can be written to in a value itself, not in what it leads to."""
    if isinstance(value, type):
        yield from (Held(base, _CLASS) for base in inspect.getmro(value) + inspect.getmro(type(value)) if not is_nobodys(base))
        return
    if isinstance(value, torch.Tensor):
        yield Held(value, _TENSOR)
    elif isinstance(value, (dict, list, deque, set, bytearray, array)):
        if isinstance(value, defaultdict):
            yield Held(value, _FACTORY)
        if len(value) <= MANY:
            yield Held(value, _TABLE if isinstance(value, dict) else _BYTES if isinstance(value, bytearray | array) else _ITEMS)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and value.nbytes <= _LARGE:
            yield Held(value, _NUMBERS)
    elif isinstance(value, types.CellType):
        yield Held(value, _CELL)
    elif isinstance(value, types.FunctionType):
        yield from (Held(value, _FUNCTION), Held(value.__annotations__, _TABLE))
        if not is_nobodys(value):
            names, known = names_of(value.__code__), value.__globals__
            yield Held((known, list(known if "globals" in names else names)), _NAMES)
            yield Held((vars(builtins), [name for name in names if name not in known]), _NAMES)
            modules = [known.get(name) for name in names]
            yield from (Held((vars(part), list(names)), _NAMES) for part in modules if isinstance(part, types.ModuleType))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield Held(value, _CACHE)
    elif isinstance(value, contextvars.ContextVar):
        yield Held(value, _VARIABLE)
    elif isinstance(value, WAITING):
        yield Held(value, _WAITING)
    elif isinstance(value, BaseException):
        yield Held(value, _RAISED)
    elif is_iterator(value):
        yield Held(value, _POSITION)
    else:
        everybodys = any(value is own for own in _SEEDED)
        yield from (Held(value, own) for kind, own in _STATES.items() if isinstance(value, kind) and not everybodys)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield Held(value, _OWNER)
        if len(own) <= MANY:
            yield Held(own, _TABLE)
    if not is_nobodys(type(value)) and slot_names(type(value)):
        yield Held(value, _SLOTS)


def weights_among(held: Iterable[Held]) -> list[Held]:
    """The numbers of parameters, which are not looked at otherwise; on a GPU, and of very large ones, versions have to do."""
    tensors = [one.place for one in held if one.kind is _TENSOR and isinstance(one.place, torch.nn.Parameter)]
    plain = [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided and not (t.is_quantized or t.is_nested)]
    return [Held(t, _WEIGHTS) for t in plain if t.numel() * t.element_size() <= _VERY_LARGE]


def cached_results(cache: Any) -> list[Any]:
    """Results that it holds; not the dictionary of its own, which nobody else may write to."""
    (_, _, most, count), parts = cache.cache_info(), gc.get_referents(cache)
    for place, part in enumerate(parts if count else ()):
        if type(part) is dict and most is None:
            return list(part.values())
        if type(part) is dict and type(next(iter(part.values()), None)).__name__ == "_lru_list_elem":
            return parts[:place]
    return []


def cell_contents(cell: types.CellType) -> list[Any]:
    """The value of a variable of a closure, if it has one yet."""
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


# Containers --------------------------------------------------------------------------------------------------------------


def _are(items: Any, before: Any) -> bool:
    """Whether these are the same objects."""
    return len(items) == len(before) and all(map(is_, items, before))


def _has_items(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether it has the same keys in the same order, and the same objects."""
    return len(table) == len(before) and all(map(is_, table.values(), before.values())) and all(map(is_, table, before))


def _set_items(table: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    kind.clear(table)
    kind.update(table, before)
    return before


def _fill(items: Any, before: list[Any]) -> list[Any]:
    if isinstance(items, list):
        list.__setitem__(items, slice(None), before)
    else:
        kind: Any = deque if isinstance(items, deque) else set
        kind.clear(items)
        (kind.extend if kind is deque else kind.update)(items, before)
    return before


def _set_bytes(own: Any, before: bytes) -> bytes:
    own[:] = before if isinstance(own, bytearray) else array(own.typecode, before)
    return before


def _same_numbers(numbers: np.ndarray, before: np.ndarray) -> bool:
    if numbers.dtype.hasobject:
        return all(map(is_, numbers.flat, before.flat))
    return numbers.tobytes() == before.tobytes()


def _set_numbers(numbers: np.ndarray, before: np.ndarray) -> np.ndarray:
    numbers[...] = before
    return before


def _set_environment(present: Any, before: dict[Any, Any]) -> dict[Any, Any]:
    known = {os.fsdecode(name): os.fsdecode(text) for name, text in before.items()}
    for name in os.environ.keys() - known.keys():
        del os.environ[name]
    os.environ.update({name: text for name, text in known.items() if os.environ.get(name) != text})
    return before


_TABLE = Kind(dict, _has_items, _set_items)
_ITEMS = Kind(list, _are, _fill)
_BYTES = Kind(bytes, lambda own, before: bytes(own) == before, _set_bytes)
_NUMBERS = Kind(np.copy, _same_numbers, _set_numbers)
_ENVIRONMENT = Kind(dict, eq, _set_environment)


# Attributes --------------------------------------------------------------------------------------------------------------


def _attributes(
    read: Callable[[Any], Mapping[str, Any]],
    write: Callable[[Any, str, Any], object] = setattr,
    remove: Callable[[Any, str], object] = delattr,
) -> Kind:
    """Those of something that has no dictionary of its own that could be written to."""

    def same(owner: Any, before: dict[str, Any]) -> bool:
        present = read(owner)
        return len(present) == len(before) and all(map(is_, map(present.get, before, repeat(_MISSING)), before.values()))

    def restore(owner: Any, before: dict[str, Any]) -> dict[str, Any]:
        present = dict(read(owner))
        for name in present.keys() - before.keys():
            remove(owner, name)
        for name, value in before.items():
            if present.get(name, _MISSING) is not value:
                write(owner, name, value)
        return before

    return Kind(lambda owner: dict(read(owner)), same, restore)


_OF_FUNCTIONS = "__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__module__", "__name__", "__qualname__"
_FUNCTION = _attributes(lambda function: {name: getattr(function, name) for name in _OF_FUNCTIONS})
_CELL = _attributes(lambda cell: dict(zip(("cell_contents",), cell_contents(cell), strict=False)))
_CLASS = _attributes(lambda cls: {**vars(cls), "__bases__": cls.__bases__}, type.__setattr__, type.__delattr__)
_class_of, _dictionary_of = attrgetter("__class__"), attrgetter("__dict__")
_OWNER = _attributes(lambda own: {"__class__": _class_of(own), "__dict__": _dictionary_of(own)}, object.__setattr__)
_FACTORY = _attributes(lambda table: {"default_factory": table.default_factory})
_OF_ERRORS = "args", "__cause__", "__context__", "__traceback__"
_RAISED = _attributes(lambda error: {name: getattr(error, name) for name in _OF_ERRORS})
_SLOTS = _attributes(lambda value: slots(value) or {}, object.__setattr__, object.__delattr__)


# Global names, written to one by one: others of the module may have been meanwhile.


def _named(place: tuple[dict[str, Any], list[str]]) -> list[Any]:
    known, names = place
    return list(map(known.get, names, repeat(_MISSING)))


def _names_same(place: tuple[dict[str, Any], list[str]], before: list[Any]) -> bool:
    known, names = place
    if all(map(is_, map(known.get, names, repeat(_MISSING)), before)):
        return True
    changed = ((name, value) for name, value in zip(names, before, strict=True) if known.get(name, _MISSING) is not value)
    return all(_is_imported(known, name, value) for name, value in changed)


def _name_again(place: tuple[dict[str, Any], list[str]], before: list[Any]) -> list[Any]:
    known, names = place
    for name, value in zip(names, before, strict=True):
        if value is not _MISSING:
            known[name] = value
        elif name in known and not _is_imported(known, name, value):
            del known[name]
    return before


def _is_imported(known: dict[str, Any], name: str, before: Any) -> bool:
    """Whether this is a part of a package that has been imported meanwhile (``numpy.fft``, when it is first asked for).

    It stays: Python would not find it again, for what is imported is not bound to its name a second time.
    """
    part = known.get(name)
    module = before is _MISSING and isinstance(part, types.ModuleType)
    return module and sys.modules.get(f"{known.get('__name__')}.{name}") is part


_NAMES = Kind(_named, _names_same, _name_again)


# Tensors -----------------------------------------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    """Of a tensor: whether it is trained, its gradient, how often it was written to, and what is in it.

    The last two are not asked of one that is trained; of a frozen parameter or a very large one, which can't be put back, only
    whether it was written to.
    """

    trained: bool
    grad: torch.Tensor | None
    version: int
    entries: torch.Tensor | None


def _of_tensor(tensor: torch.Tensor) -> _Numbers:
    plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    kept = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
    copied = plain and not kept and tensor.numel() * tensor.element_size() <= _VERY_LARGE
    entries = tensor.detach().clone() if copied else None
    return _Numbers(tensor.requires_grad, tensor.grad if tensor.is_leaf else None, version_of(tensor), entries)


def _tensor_same(tensor: torch.Tensor, before: _Numbers) -> bool:
    if tensor.requires_grad != before.trained or (tensor.is_leaf and tensor.grad is not before.grad):
        return False
    if version_of(tensor) != before.version and not before.trained:
        return False
    return before.entries is None or tensor.device.type != "cpu" or bool(same_bits(tensor, before.entries))


def _set_tensor(tensor: torch.Tensor, before: _Numbers) -> _Numbers:
    if tensor.is_leaf and tensor.grad is not before.grad:
        tensor.grad = before.grad
    if tensor.is_leaf and tensor.requires_grad != before.trained:
        tensor.requires_grad_(before.trained)
    if before.entries is None:
        return before
    if not bool(same_bits(tensor, before.entries)):
        _set_entries(tensor, before.entries)
    return before._replace(version=version_of(tensor))


def _set_entries(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if tensor.shape == before.shape:
        tensor.data.copy_(before)
    else:
        tensor.data = before.clone()
    return before


_TENSOR = Kind(_of_tensor, _tensor_same, _set_tensor)
# The numbers of a parameter: ``.data`` writes to them past every version.
_WEIGHTS = Kind(lambda t: t.detach().clone(), lambda t, before: bool(same_bits(t, before)), _set_entries)


# What says where it stands -----------------------------------------------------------------------------------------------


def _clear(cache: Any, before: list[Any]) -> list[Any]:
    """What has come into it goes, with all that it had. It is made again when it is asked for."""
    cache.cache_clear()
    return []


def _set_variable(variable: contextvars.ContextVar[Any], before: tuple[Any, Any]) -> tuple[Any, Any]:
    value, unset = before
    variable.set(unset if value is _MISSING else value)  # a variable can't be unset again
    return variable.get(), unset


def _default_of(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return None


def _where(waiting: Any) -> list[Any]:
    frame = frame_of(waiting)
    return [] if frame is None else [frame.f_lasti, *frame.f_locals.values()]


def _goes_on(value: Any, before: Any) -> Any:
    """It can't be put back."""
    return before


_CACHE = Kind(cached_results, lambda cache, before: _are(cached_results(cache), before), _clear)
_VARIABLE = Kind(
    lambda own: (own.get(_MISSING), _default_of(own)), lambda own, before: own.get(_MISSING) is before[0], _set_variable
)
_WAITING = Kind(_where, lambda waiting, before: _are(_where(waiting), before), _goes_on)
_POSITION = Kind(lambda own: repr(position(own)), lambda own, before: repr(position(own)) == before, _goes_on)


def _state(get: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> Kind:
    def same(own: Any, before: Any) -> bool:
        present = get(own)
        return bool(torch.equal(present, before) if isinstance(present, torch.Tensor) else repr(present) == repr(before))

    def restore(own: Any, before: Any) -> Any:
        put(own, before)
        return before

    return Kind(get, same, restore)


def _text(own: Any) -> Any:
    return None if own.closed else (own.getvalue(), own.tell())


def _set_text(own: Any, state: Any) -> None:
    if state is not None and not own.closed:
        own.seek(0)
        own.truncate()
        own.write(state[0])
        own.seek(state[1])


_STATES: dict[Any, Kind] = {
    torch.Generator: _state(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _state(lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    np.random.Generator: _state(lambda own: own.bit_generator.state, lambda own, state: setattr(own.bit_generator, "state", state)),
    np.random.BitGenerator: _state(lambda own: own.state, lambda own, state: setattr(own, "state", state)),
    np.random.RandomState: _state(lambda own: own.get_state(), lambda own, state: own.set_state(state)),
    **dict.fromkeys((io.BytesIO, io.StringIO), _state(_text, _set_text)),
    **dict.fromkeys(
        (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
        _state(bytes, lambda own, state: ctypes.memmove(ctypes.addressof(own), state, len(state))),
    ),
}
# Everybody's: seeded anew for each record, and put back by who lets a model draw from them.
_SEEDED = (random._inst, np.random.mtrand._rand, np.random.mtrand._rand._bit_generator, torch.default_generator)
# Whose contents may be equal, though they are other objects.
_BY_CONTENTS = (_TABLE, _ITEMS, _NUMBERS, _ENVIRONMENT, _FUNCTION, _CELL, _CLASS, _SLOTS, _NAMES, _VARIABLE, _CACHE)
