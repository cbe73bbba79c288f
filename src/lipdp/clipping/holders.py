"""Places that a model may write to, each with what was in it: dictionaries, lists, variables of closures, caches, tensors, ...

What leads to them, and when they are put back, is :mod:`lipdp.clipping.restored`.
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
import sys
import types
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_, methodcaller
from typing import Any

import numpy as np
import torch

from lipdp.clipping.kept import is_iterator, is_nobodys, names_of, position
from lipdp.clipping.memories import version_of
from lipdp.digest import same_bits
from lipdp.fingerprint import slot_names, slots

__all__ = ["BARE", "MANY", "Held", "Together", "cached_results", "cell_contents", "held_by", "weights_among"]

# Items of a container, bytes of an array and of a tensor, that are too many to be copied.
MANY, _LARGE, _VERY_LARGE = 4096, 2**20, 2**26
_MISSING = object()
# Containers are whoever's holds them.
BARE = (dict, list, set, deque, tuple, frozenset, bytearray, array, np.ndarray)


class Held(ABC):
    """Something that can be written to, and what was in it.

    Attributes:
        may_move: whether it can't be put back, and how far it has come may be nobody's: a counter's number of calls.
    """

    may_move = False

    @abstractmethod
    def is_as_it_was(self) -> bool:
        """Whether nothing has changed."""

    @abstractmethod
    def put_back(self) -> None:
        """It is what it was, where that can be."""


class Together:
    """Many of them, and the process's environment. Most are dictionaries without anything in them (a module's hooks)."""

    def __init__(self, held: list[Held]) -> None:
        self._environment = _Environment()
        self._held = [self._environment, *held]
        tables = [one for one in held if isinstance(one, _Table) and type(one.table) in (dict, OrderedDict)]
        self._empty = [one.table for one in tables if not one.table]
        self._tables = [(one.table, one.before) for one in tables if one.before]
        lists = [one for one in held if isinstance(one, _Items) and type(one.items) is list]
        self._lists = [(one.items, one.before) for one in lists]
        trained = [one for one in held if isinstance(one, _Tensor) and one.tensor.requires_grad and one.tensor.is_leaf]
        self._trained = [(one.tensor, one.grad) for one in trained]
        asked = {id(one) for one in (*tables, *lists, *trained)}
        self._others = [one for one in held if id(one) not in asked]

    def are_as_they_were(self) -> bool:
        """Whether nothing has changed."""
        if any(self._empty) or self._environment.present != self._environment.before:
            return False
        for table, before in self._tables:
            if len(table) != len(before) or not (all(map(is_, table.values(), before.values())) and all(map(is_, table, before))):
                return False
        for items, there in self._lists:
            if len(items) != len(there) or not all(map(is_, items, there)):
                return False
        for tensor, gradient in self._trained:
            if tensor.grad is not gradient:
                return False
        return all(map(methodcaller("is_as_it_was"), self._others))

    def learn(self) -> None:
        """Names that have come to stand for another number or text have been given it by somebody else, and it leads nowhere."""
        for one in self._others:
            if isinstance(one, _Names):
                one.learn()

    def put_back(self) -> bool:
        """They are what they were, where that can be. Whether all are that may not move."""
        for one in self._held:
            if not one.is_as_it_was():
                one.put_back()
        return all(one.is_as_it_was() for one in self._held if not one.may_move)


def held_by(value: Any) -> Iterator[Held]:
    """What can be written to in a value itself, not in what it leads to."""
    if isinstance(value, type):
        yield from (_Attributes(base) for base in inspect.getmro(value) + inspect.getmro(type(value)) if not is_nobodys(base))
        return
    if isinstance(value, torch.Tensor):
        yield _Tensor(value)
    elif isinstance(value, dict):
        yield _Table(value)
    elif isinstance(value, (list, deque, set, bytearray, array)):
        if len(value) <= MANY:
            yield _Items(value)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and value.nbytes <= _LARGE:
            yield _Array(value)
    elif isinstance(value, types.CellType):
        yield _Cell(value)
    elif isinstance(value, types.FunctionType):
        yield from (_Function(value), _Table(value.__annotations__))
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
        yield _Position(value)
    else:
        yield from (_State(value, *ways) for kind, ways in _STATES.items() if isinstance(value, kind))
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield _Table(own)
    if not (isinstance(value, (torch.Tensor, *BARE)) or is_nobodys(type(value))) and slot_names(type(value)):
        yield _Slots(value)


class _Table(Held):
    """A dictionary: the same keys in the same order, the same objects."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table, self.before = table, dict(table) if len(table) <= MANY else None

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


class _Names(Held):
    """Global names of a module that somebody reads: written to one by one, for others may have been meanwhile.

    A part of a package that has been imported meanwhile (``numpy.fft``, when it is first asked for) stays: Python would not find it
    again, for what is imported is not bound to its name a second time.
    """

    def __init__(self, known: dict[str, Any], names: Iterable[str]) -> None:
        self.known, self.names = known, list(names)
        self.before = [known.get(name, _MISSING) for name in self.names]

    def is_as_it_was(self) -> bool:
        return all(
            self.known.get(name, _MISSING) is value or self._is_imported(name, value)
            for name, value in zip(self.names, self.before, strict=True)
        )

    def learn(self) -> None:
        for place, name in enumerate(self.names):
            if isinstance(value := self.known.get(name), (int, float, str)):
                self.before[place] = value

    def put_back(self) -> None:
        for name, value in zip(self.names, self.before, strict=True):
            if value is not _MISSING:
                self.known[name] = value
            elif name in self.known and not self._is_imported(name, value):
                del self.known[name]

    def _is_imported(self, name: str, value: Any) -> bool:
        part = self.known.get(name)
        return (
            value is _MISSING
            and isinstance(part, types.ModuleType)
            and sys.modules.get(f"{self.known.get('__name__')}.{name}") is part
        )


class _Items(Held):
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


class _Array(Held):
    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.before = numbers, numbers.copy()

    def is_as_it_was(self) -> bool:
        if self.numbers.dtype.hasobject:
            return all(map(is_, self.numbers.flat, self.before.flat))
        return self.numbers.tobytes() == self.before.tobytes()

    def put_back(self) -> None:
        self.numbers[...] = self.before


class _Tensor(Held):
    """A tensor's gradient, and what is in it: of one that is trained that is not asked, and of a frozen parameter or a very large
    one, which can't be put back, only whether it was written to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version, self.before = tensor, version_of(tensor), None
        self.grad = tensor.grad if tensor.is_leaf else None
        plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        kept = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        if plain and not kept and tensor.numel() * tensor.element_size() <= _VERY_LARGE:
            self.before = tensor.detach().clone()

    def is_as_it_was(self) -> bool:
        tensor = self.tensor
        if (tensor.is_leaf and tensor.grad is not self.grad) or (version_of(tensor) != self.version and not tensor.requires_grad):
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
            self.version = version_of(self.tensor)


class _Weights(Held):
    """The numbers of a parameter: ``.data`` writes to them past every version."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.before = tensor, tensor.detach().clone()

    def is_as_it_was(self) -> bool:
        return bool(same_bits(self.tensor, self.before))

    def put_back(self) -> None:
        if self.tensor.shape == self.before.shape:
            self.tensor.data.copy_(self.before)
        else:
            self.tensor.data = self.before.clone()


def weights_among(held: Iterable[Held]) -> list[Held]:
    """The numbers of parameters, which are not looked at otherwise; on a GPU, and of very large ones, versions have to do."""
    tensors = [one.tensor for one in held if isinstance(one, _Tensor) and isinstance(one.tensor, torch.nn.Parameter)]
    plain = [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided and not (t.is_quantized or t.is_nested)]
    return [_Weights(t) for t in plain if t.numel() * t.element_size() <= _VERY_LARGE]


class _Cell(Held):
    """A variable of a closure."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell, self.before = cell, cell_contents(cell)

    def is_as_it_was(self) -> bool:
        present = cell_contents(self.cell)
        return len(present) == len(self.before) and all(map(is_, present, self.before))

    def put_back(self) -> None:
        if self.before:
            self.cell.cell_contents = self.before[0]
        else:
            del self.cell.cell_contents


class _Function(Held):
    """What a function computes, its defaults, and what it is called."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function, self.before = function, [getattr(function, name) for name in _OF_FUNCTIONS]

    def is_as_it_was(self) -> bool:
        return all(map(is_, (getattr(self.function, name) for name in _OF_FUNCTIONS), self.before))

    def put_back(self) -> None:
        for name, value in zip(_OF_FUNCTIONS, self.before, strict=True):
            setattr(self.function, name, value)


_OF_FUNCTIONS = "__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__module__", "__name__", "__qualname__"


class _Attributes(Held):
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


class _Slots(Held):
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


class _Cache(Held):
    """A cache of a function: what has come into it goes, with all that it had. It is made again when it is asked for."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.before = cache, cached_results(cache)

    def is_as_it_was(self) -> bool:
        present = cached_results(self.cache)
        return len(present) == len(self.before) and all(map(is_, present, self.before))

    def put_back(self) -> None:
        self.cache.cache_clear()
        self.before = []


class _Variable(Held):
    """A variable of a context."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.variable, self.before = variable, variable.get(_MISSING)
        try:
            self.unset = variable.get()  # its default: a variable can't be unset again
        except LookupError:
            self.unset = None

    def is_as_it_was(self) -> bool:
        return self.variable.get(_MISSING) is self.before

    def put_back(self) -> None:
        self.variable.set(self.unset if self.before is _MISSING else self.before)
        self.before = self.variable.get()


class _State(Held):
    """What says where it stands, and can be told to: random generators, texts, memory of C."""

    def __init__(self, value: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> None:
        self.value, self.get, self.put, self.before = value, get, put, get(value)

    def is_as_it_was(self) -> bool:
        present = self.get(self.value)
        return bool(torch.equal(present, self.before) if isinstance(present, torch.Tensor) else repr(present) == repr(self.before))

    def put_back(self) -> None:
        self.put(self.value, self.before)


class _Waiting(Held):
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


class _Position(_Waiting):
    """An iterator of Python's."""

    may_move = True

    @staticmethod
    def _where(waiting: Any) -> list[Any]:
        return [repr(position(waiting))]

    def is_as_it_was(self) -> bool:
        return self._where(self.waiting) == self.before


class _Environment(Held):
    """The process's."""

    def __init__(self) -> None:
        self.present: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
        self.before = dict(self.present)

    def is_as_it_was(self) -> bool:
        return self.present == self.before

    def put_back(self) -> None:
        present = os.environ
        before = {os.fsdecode(name): os.fsdecode(value) for name, value in self.before.items()}
        for name in present.keys() - before.keys():
            del present[name]
        present.update({name: value for name, value in before.items() if present.get(name) != value})


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
