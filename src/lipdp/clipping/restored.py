"""What a model, its loss and what these name hold, as it was: to be put back behind a pass that is not to leave anything.

A pass that is followed gives Python no number (:mod:`lipdp.clipping.follow`). But a model may be run on records in one that is not:
at a first look, or on each by itself. A number that it puts somewhere then (an attribute, a global list, a table of a class) would
be found there by the records of later passes, as if it were a constant. So what such a pass has written is taken back, wherever a
name leads to it, and no model need be asked why it has written. A table that follows from shapes is made again; a counter goes on
from where it was. Where records are taken one by one, what has changed is refused (:meth:`Before.stays`).

Names are followed as in :mod:`lipdp.clipping.kept`. Not put back is what is inside objects of installed packages (a queue, a
logger: other threads may be at work on them), and where an iterator or a generator stands.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import ctypes
import functools
import io
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lipdp.clipping.holders import BARE, MANY, WAITING, Held, Together, cached_results, cell_contents, held_by, weights_among
from lipdp.clipping.kept import behind, is_iterator, is_nobodys
from lipdp.errors import UnsupportedError
from lipdp.fingerprint import readable, slots

# What holds nothing; a class of somebody's own that derives from one may have attributes.
_PLAIN = frozenset({int, float, complex, bool, str, bytes, range, type(None), torch.dtype, torch.device, torch.layout, torch.Size})
_DEPTH = 64


class Before:
    """What objects hold, and what their classes and functions name.

    Args:
        objects: a model, its loss.
        weights: the numbers in parameters, too, which a pass that is followed can't write to.

    Example:
        >>> table = {"largest": 1.0}
        >>> before = Before(table)
        >>> table["largest"] = 2.0
        >>> before.holds(), before.put_back(), table
        (False, True, {'largest': 1.0})
    """

    def __init__(self, *objects: Any, weights: bool = False) -> None:
        self.objects = objects
        with readable():
            held = self._walk(objects)
            self._held = Together([*held, *weights_among(held)] if weights else held)
        self.holds = self._held.are_as_they_were  # whether nothing has changed

    def is_current(self) -> bool:
        """Whether it stands for what is there before another pass: global numbers (of a loop) may have gone on meanwhile."""
        if self.holds():
            return True
        self._held.learn()
        return self.holds()

    def stays(self) -> bool:
        """Whether all is equal to what it was. What is, but is another object, is put back, and what is in weights."""
        with readable():
            return self.holds() or (self._held.are_equal() and self.put_back())

    def put_back(self) -> bool:
        """Whatever has changed is as it was, where that can be. Whether it could.

        A generator that has gone on has kept what it was given, a very large tensor what was written into it. How far an iterator
        of Python's has come may be nobody's (a counter's number of calls), and is not asked.
        """
        return self._held.put_back()

    def put_back_all(self) -> None:
        """The same; an error where something can't be."""
        if not self._held.put_back():
            raise UnsupportedError(
                f"{type(self.objects[0]).__name__} or its loss changes what it holds while it runs, and it can't be put back: it "
                "goes on with a generator, which keeps what it is given, or writes into a frozen parameter or a very large "
                "tensor. Make it a function of its inputs."
            )

    def _walk(self, objects: Sequence[Any]) -> list[Held]:
        held: list[Held] = []
        met: dict[int, tuple[Any, bool]] = {}  # kept, so that no id is used again
        nested: set[int] = set()  # modules that are met by themselves, however deep they lie in others
        level = [(value, False) for value in objects]
        for _ in range(_DEPTH):
            deeper: list[tuple[Any, bool]] = []
            for value, foreign in level:
                if type(value) in _PLAIN:
                    continue
                if not (isinstance(value, _KNOWN) or is_iterator(value)) and is_nobodys(type(value)):
                    foreign = True
                elif not isinstance(value, BARE):
                    foreign = False  # a class, a function, a module of somebody's own
                if id(value) in met and (foreign or not met[id(value)][1]):
                    continue
                met[id(value)] = value, foreign
                if not foreign:
                    held += held_by(value)
                if isinstance(value, torch.nn.Module) and id(value) not in nested:
                    modules = list(value.modules())
                    nested.update(map(id, modules))
                    deeper += [(module, False) for module in modules]
                deeper += [(part, foreign) for part in _inside(value)]
            level = deeper
        return held


@contextmanager
def left_as_it_was(*objects: Any, weights: bool = False) -> Iterator[None]:
    """Whatever the objects come to hold within the block, and what their classes and functions name, is put back.

    ``weights``: the numbers in parameters, too, that are written to past their versions.
    """
    before = Before(*objects, weights=weights)
    try:
        yield
    except BaseException:
        before.put_back()
        raise
    before.put_back_all()


# What leads on ------------------------------------------------------------------------------------------------------------


# What is no object of an installed package, whose parts belong together in ways that nobody here knows.
_KNOWN = (
    *(*BARE, torch.Tensor, torch.nn.Module, type, threading.local),
    *(types.FunctionType, types.MethodType, functools._lru_cache_wrapper, functools.partial, types.SimpleNamespace),
    *(weakref.ReferenceType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, contextvars.ContextVar),
    *(io.BytesIO, io.StringIO, ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, types.MappingProxyType),
    *(random.Random, torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState),
    *(property, staticmethod, classmethod, *WAITING, types.CellType, memoryview, BaseException),
    *(argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap),
)


def _inside(value: Any) -> Iterable[Any]:
    yield from behind(value)
    if isinstance(value, dict | types.MappingProxyType):
        yield from [*value.keys(), *value.values()] if len(value) <= MANY else ()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value if len(value) <= MANY else ()
    elif isinstance(value, np.ndarray):
        yield from value.flat if value.dtype.hasobject and value.size <= MANY else ()
        yield value.base
    elif isinstance(value, torch.Tensor):
        yield value._base
    elif isinstance(value, BaseException):
        yield from (value.args, value.__cause__, value.__context__)
    elif isinstance(value, memoryview):
        yield value.obj
    elif isinstance(value, types.FunctionType):
        yield from (cell for cell in value.__closure__ or ())
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, types.CellType):
        yield from cell_contents(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from cached_results(value)
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    if not isinstance(value, (type, types.ModuleType, torch.Tensor)):
        own = getattr(value, "__dict__", None)
        yield from own.values() if isinstance(own, dict) else ()
        yield from (slots(value) or {}).values()
