"""What a model, its loss and what these name hold, as it was: to be put back behind a pass that is not to leave anything.

A model may be run on records in a pass that nothing is concluded from: a first look, a pass that turns out not to keep its records
apart. A number that it puts somewhere then (an attribute, a global list, a table of a class) would be found there by the records of
later passes, as if it were a constant. So what such a pass has written is taken back, wherever a name leads to it, and no model
need be asked why it has written. A table that follows from shapes is made again; a counter goes on from where it was.

Names are followed as in :mod:`lipdp.clipping.kept`. Not put back is what is inside objects of installed packages (a queue, a
logger: other threads may be at work on them), and where an iterator or a generator stands.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import gc
import inspect
import io
import os
import random
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch

from lipdp.clipping.kept import behind, is_iterator, is_nobodys, names_of, position
from lipdp.digest import same_bits
from lipdp.errors import UnsupportedError
from lipdp.fingerprint import readable, slots

__all__ = ["Before", "left_as_it_was"]

_PLAIN = (int, float, complex, bool, str, bytes, range, type(None), torch.dtype, torch.device, torch.layout, torch.Size)
_DEPTH = 16
# Items of a container, bytes of an array and of a tensor, that are too many to be copied.
_MANY, _LARGE, _VERY_LARGE = 4096, 2**20, 2**26
_MISSING = object()


class Before:
    """What objects hold, and what their classes and functions name.

    Example:
        >>> table = {"largest": 1.0}
        >>> before = Before(table)
        >>> table["largest"] = 2.0
        >>> before.holds(), before.put_back(), table
        (False, None, {'largest': 1.0})
    """

    def __init__(self, *objects: Any) -> None:
        self.objects = objects
        self._held: list[_Held] = [_Environment()]
        with readable():
            self._walk(objects)
        # Most are dictionaries without anything in them (a module's hooks): whether they still are is asked of all at once.
        self._empty = [held.table for held in self._held if isinstance(held, _Table) and _is_empty(held)]
        self._filled = [held for held in self._held if not _is_empty(held)]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return not any(self._empty) and all(held.is_as_it_was() for held in self._filled)

    def put_back(self) -> None:
        """Whatever has changed is as it was, where that can be."""
        for held in self._held:
            if not held.is_as_it_was():
                held.put_back()

    def put_back_all(self) -> None:
        """The same; an error where something can't be: a generator that has gone on, a very large tensor.

        How far an iterator of Python's has come may be nobody's (a counter's number of calls): that is none.
        """
        self.put_back()
        if not all(held.is_as_it_was() for held in self._held if type(held) is not _Iterator):
            raise UnsupportedError(
                f"{type(self.objects[0]).__name__} or its loss changes what it holds while it runs, and it can't be put back: it "
                "goes on with a generator, which keeps what it is given, or writes into a frozen parameter or a very large "
                "tensor. Make it a function of its inputs."
            )

    def _walk(self, objects: Sequence[Any]) -> None:
        met: dict[int, Any] = {}  # kept, so that no id is used again
        level = [(value, False) for value in objects]
        for _ in range(_DEPTH):
            deeper: list[tuple[Any, bool]] = []
            for value, foreign in level:
                if isinstance(value, _PLAIN) or id(value) in met:
                    continue
                met[id(value)] = value
                if not (isinstance(value, _KNOWN) or is_iterator(value)) and is_nobodys(type(value)):
                    foreign = True
                elif not isinstance(value, _BARE):
                    foreign = False  # a class, a function, a module of somebody's own
                if not foreign:
                    self._held += _held_by(value)
                deeper += [(part, foreign) for part in _inside(value)]
            level = deeper


@contextmanager
def left_as_it_was(*objects: Any) -> Iterator[None]:
    """Whatever the objects come to hold within the block, and what their classes and functions name, is put back."""
    before = Before(*objects)
    try:
        yield
    except BaseException:
        before.put_back()
        raise
    before.put_back_all()


# What leads on ------------------------------------------------------------------------------------------------------------


# Containers are whoever's holds them: of an object of an installed package, parts belong together in ways that nobody here knows.
_BARE = (dict, list, set, deque, tuple, frozenset, bytearray, array, np.ndarray)
_KNOWN = (
    *(*_BARE, torch.Tensor, torch.nn.Module, type, threading.local),
    *(types.FunctionType, types.MethodType, functools._lru_cache_wrapper, functools.partial, types.SimpleNamespace),
    *(weakref.ReferenceType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, contextvars.ContextVar),
    *(io.BytesIO, io.StringIO, ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, types.MappingProxyType),
    *(random.Random, torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState),
    *(property, staticmethod, classmethod, types.GeneratorType, types.CellType),
)


def _inside(value: Any) -> Iterable[Any]:
    yield from behind(value)
    if isinstance(value, dict | types.MappingProxyType):
        yield from [*value.keys(), *value.values()] if len(value) <= _MANY else ()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value if len(value) <= _MANY else ()
    elif isinstance(value, types.FunctionType):
        yield from (cell for cell in value.__closure__ or ())
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, types.CellType):
        yield from _contents(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _cached(value)
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    if not isinstance(value, (type, types.ModuleType, torch.Tensor)):
        own = getattr(value, "__dict__", None) or slots(value)
        yield from own.values() if isinstance(own, dict) else ()


def _cached(cache: Any) -> list[Any]:
    """Results that it holds; not the dictionary of its own, which nobody else may write to."""
    (_, _, most, count), parts = cache.cache_info(), gc.get_referents(cache)
    for place, part in enumerate(parts if count else ()):
        if type(part) is dict and most is None:
            return list(part.values())
        if type(part) is dict and type(next(iter(part.values()), None)).__name__ == "_lru_list_elem":
            return parts[:place]
    return []


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


# What is put back ---------------------------------------------------------------------------------------------------------


class _Held:
    """Something that can be written to, and what was in it."""

    def is_as_it_was(self) -> bool:
        raise NotImplementedError

    def put_back(self) -> None:
        raise NotImplementedError


def _held_by(value: Any) -> Iterator[_Held]:
    if isinstance(value, type):
        yield from (_Attributes(base) for base in inspect.getmro(value) + inspect.getmro(type(value)) if not is_nobodys(base))
        return
    if isinstance(value, torch.Tensor):
        yield _Tensor(value)
    elif isinstance(value, dict):
        yield _Table(value)
    elif isinstance(value, (list, deque, set, bytearray, array)):
        if len(value) <= _MANY:
            yield _Items(value)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and value.nbytes <= _LARGE:
            yield _Array(value)
    elif isinstance(value, types.CellType):
        yield _Cell(value)
    elif isinstance(value, types.FunctionType):
        yield _Function(value)
        if not is_nobodys(value):
            names, known = names_of(value.__code__), value.__globals__
            yield _Names(known, known if "globals" in names else names)
            modules = [known.get(name) for name in names]
            yield from (_Names(vars(part), names) for part in modules if isinstance(part, types.ModuleType))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield _Cache(value)
    elif isinstance(value, contextvars.ContextVar):
        yield _Variable(value)
    elif isinstance(value, types.GeneratorType):
        yield _Waiting(value)
    elif is_iterator(value):
        yield _Iterator(value)
    else:
        yield from (_State(value, *ways) for kind, ways in _STATES.items() if isinstance(value, kind))
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield _Table(own)
    if not (isinstance(value, (torch.Tensor, *_BARE)) or is_nobodys(type(value))) and slots(value):
        yield _Slots(value)


class _Table(_Held):
    """A dictionary: the same keys in the same order, the same objects."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table, self.before = table, dict(table) if len(table) <= _MANY else None

    def is_as_it_was(self) -> bool:
        table, before = self.table, self.before
        if before is None:
            return True
        if len(table) != len(before):
            return False
        return not table or (all(map(is_, table.values(), before.values())) and all(map(is_, table, before)))

    def put_back(self) -> None:
        kind = OrderedDict if isinstance(self.table, OrderedDict) else dict
        kind.clear(self.table)
        kind.update(self.table, self.before or {})


def _is_empty(held: _Held) -> bool:
    return isinstance(held, _Table) and type(held.table) in (dict, OrderedDict) and not held.table


class _Names(_Held):
    """Global names of a module that somebody reads: written to one by one, for others may have been meanwhile."""

    def __init__(self, known: dict[str, Any], names: Iterable[str]) -> None:
        self.known, self.names = known, list(names)
        self.before = [known.get(name, _MISSING) for name in self.names]

    def is_as_it_was(self) -> bool:
        return all(self.known.get(name, _MISSING) is value for name, value in zip(self.names, self.before, strict=True))

    def put_back(self) -> None:
        for name, value in zip(self.names, self.before, strict=True):
            if value is not _MISSING:
                self.known[name] = value
            elif name in self.known:
                del self.known[name]


class _Items(_Held):
    """A list, a deque, a set, an array of Python's."""

    def __init__(self, items: Any) -> None:
        self.items, self.before = items, list(items)

    def is_as_it_was(self) -> bool:
        if len(self.items) != len(self.before):
            return False
        if isinstance(self.items, bytearray | array):
            return list(self.items) == self.before
        return all(map(is_, self.items, self.before))

    def put_back(self) -> None:
        items, before = self.items, self.before
        if isinstance(items, list):
            list.__setitem__(items, slice(None), before)
        elif isinstance(items, bytearray):
            items[:] = bytes(before)
        elif isinstance(items, array):
            items[:] = array(items.typecode, before)
        else:
            kind: Any = deque if isinstance(items, deque) else set
            kind.clear(items)
            (kind.extend if kind is deque else kind.update)(items, before)


class _Array(_Held):
    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.before = numbers, numbers.copy()

    def is_as_it_was(self) -> bool:
        if self.numbers.dtype.hasobject:
            return all(map(is_, self.numbers.flat, self.before.flat))
        return self.numbers.tobytes() == self.before.tobytes()

    def put_back(self) -> None:
        self.numbers[...] = self.before


class _Tensor(_Held):
    """A tensor's gradient, and what is in it: of one that is trained that is not asked, and of a frozen parameter or a very large
    one, which can't be put back, only whether it was written to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version, self.before = tensor, _version(tensor), None
        self.grad = tensor.grad if tensor.is_leaf else None
        plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        kept = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        if plain and not kept and tensor.numel() * tensor.element_size() <= _VERY_LARGE:
            self.before = tensor.detach().clone()

    def is_as_it_was(self) -> bool:
        tensor = self.tensor
        if (tensor.is_leaf and tensor.grad is not self.grad) or (_version(tensor) != self.version and not tensor.requires_grad):
            return False
        return self.before is None or tensor.device.type != "cpu" or bool(same_bits(tensor, self.before))

    def put_back(self) -> None:
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad
        if self.before is not None:
            if self.tensor.shape != self.before.shape:
                self.tensor.data = self.before.clone()
            elif not same_bits(self.tensor, self.before):
                self.tensor.data.copy_(self.before)
            self.version = _version(self.tensor)


class _Cell(_Held):
    """A variable of a closure."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell, self.before = cell, _contents(cell)

    def is_as_it_was(self) -> bool:
        present = _contents(self.cell)
        return len(present) == len(self.before) and all(map(is_, present, self.before))

    def put_back(self) -> None:
        if self.before:
            self.cell.cell_contents = self.before[0]
        else:
            del self.cell.cell_contents


class _Function(_Held):
    """What a function computes, and its defaults."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function, self.before = function, (function.__code__, function.__defaults__, function.__kwdefaults__)

    def is_as_it_was(self) -> bool:
        function = self.function
        return all(map(is_, (function.__code__, function.__defaults__, function.__kwdefaults__), self.before))

    def put_back(self) -> None:
        self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__ = self.before


class _Attributes(_Held):
    """Those of a class."""

    def __init__(self, cls: type) -> None:
        self.cls, self.before = cls, dict(vars(cls))

    def is_as_it_was(self) -> bool:
        present = vars(self.cls)
        return len(present) == len(self.before) and all(map(is_, present.values(), self.before.values()))

    def put_back(self) -> None:
        present = dict(vars(self.cls))
        for name in present.keys() - self.before.keys():
            type.__delattr__(self.cls, name)
        for name, value in self.before.items():
            if present.get(name, _MISSING) is not value:
                type.__setattr__(self.cls, name, value)


class _Slots(_Held):
    """Attributes of an object that has no dictionary."""

    def __init__(self, value: Any) -> None:
        self.value, self.before = value, slots(value) or {}

    def is_as_it_was(self) -> bool:
        present = slots(self.value) or {}
        return present.keys() == self.before.keys() and all(present[name] is value for name, value in self.before.items())

    def put_back(self) -> None:
        for name in (slots(self.value) or {}).keys() - self.before.keys():
            object.__delattr__(self.value, name)
        for name, value in self.before.items():
            object.__setattr__(self.value, name, value)


class _Cache(_Held):
    """A cache of a function: what has come into it goes, with all that it had. It is made again when it is asked for."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.before = cache, _cached(cache)

    def is_as_it_was(self) -> bool:
        present = _cached(self.cache)
        return len(present) == len(self.before) and all(map(is_, present, self.before))

    def put_back(self) -> None:
        self.cache.cache_clear()
        self.before = []


class _Variable(_Held):
    """A variable of a context."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.variable, self.before = variable, variable.get(_MISSING)

    def is_as_it_was(self) -> bool:
        return self.variable.get(_MISSING) is self.before

    def put_back(self) -> None:
        self.variable.set(None if self.before is _MISSING else self.before)


class _State(_Held):
    """What says where it stands, and can be told to: random generators, texts, memory of C."""

    def __init__(self, value: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> None:
        self.value, self.get, self.put, self.before = value, get, put, get(value)

    def is_as_it_was(self) -> bool:
        present = self.get(self.value)
        return bool(torch.equal(present, self.before) if isinstance(present, torch.Tensor) else repr(present) == repr(self.before))

    def put_back(self) -> None:
        self.put(self.value, self.before)


class _Waiting(_Held):
    """A generator that waits: it can't be put back."""

    def __init__(self, waiting: types.GeneratorType[Any, Any, Any]) -> None:
        self.waiting, self.before = waiting, self._where(waiting)

    @staticmethod
    def _where(waiting: types.GeneratorType[Any, Any, Any]) -> list[Any]:
        frame = waiting.gi_frame
        return [] if frame is None else [frame.f_lasti, *frame.f_locals.values()]

    def is_as_it_was(self) -> bool:
        present = self._where(self.waiting)
        return len(present) == len(self.before) and all(map(is_, present, self.before))

    def put_back(self) -> None:
        pass


class _Iterator(_Waiting):
    """An iterator of Python's."""

    @staticmethod
    def _where(waiting: Any) -> list[Any]:
        return [repr(position(waiting))]

    def is_as_it_was(self) -> bool:
        return self._where(self.waiting) == self.before


class _Environment(_Held):
    """The process's."""

    def __init__(self) -> None:
        self.before = dict(_environment())

    def is_as_it_was(self) -> bool:
        return _environment() == self.before

    def put_back(self) -> None:
        present = os.environ
        before = {os.fsdecode(name): os.fsdecode(value) for name, value in self.before.items()}
        for name in present.keys() - before.keys():
            del present[name]
        present.update({name: value for name, value in before.items() if present.get(name) != value})


def _environment() -> Mapping[Any, Any]:
    return getattr(os.environ, "_data", os.environ)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


_STATES: dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (lambda own: own.get_state(), lambda own, state: own.set_state(state)),
    random.Random: (lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    np.random.Generator: (lambda own: own.bit_generator.state, lambda own, state: setattr(own.bit_generator, "state", state)),
    np.random.BitGenerator: (lambda own: own.state, lambda own, state: setattr(own, "state", state)),
    np.random.RandomState: (lambda own: own.get_state(), lambda own, state: own.set_state(state)),
    io.BytesIO: (lambda own: _text(own), lambda own, state: _set_text(own, state)),
    io.StringIO: (lambda own: _text(own), lambda own, state: _set_text(own, state)),
    **dict.fromkeys(
        (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
        (bytes, lambda own, state: ctypes.memmove(ctypes.addressof(own), state, len(state))),
    ),
}


def _text(own: Any) -> Any:
    return None if own.closed else (own.getvalue(), own.tell())


def _set_text(own: Any, state: Any) -> None:
    if state is not None and not own.closed:
        own.seek(0)
        own.truncate()
        own.write(state[0])
        own.seek(state[1])
