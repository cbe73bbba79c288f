"""What a model or its loss may read and keep where no attribute of theirs leads: classes, functions, globals, weak references.

:mod:`lipdp.fingerprint` follows attributes, containers and closures, and is asked in every step. Records that are taken one by one
must leave nothing behind, so there one looks further: into what the functions of the model's own classes name. Not into
packages that are installed: they are many, and nobody's model.
"""

from __future__ import annotations

import contextvars
import ctypes
import enum
import functools
import gc
import inspect
import io
import random
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from lipdp.clipping.past import hands_out
from lipdp.errors import UnsupportedError
from lipdp.fingerprint import reachable_tensors

# Where nothing is looked for: they keep nothing of a record, or it is theirs to say.
_NOBODYS = frozenset({"torch", "lipdp", "numpy", "builtins", *sys.stdlib_module_names}) - {"__main__"}
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_DATA = (
    *(int, float, complex, str, bytes, bytearray, tuple, Mapping, Set, Sequence, Iterator, deque, torch.Tensor, np.ndarray),
    *(types.SimpleNamespace, threading.local, weakref.ReferenceType, contextvars.ContextVar, io.BytesIO, io.StringIO),
    *(random.Random, torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, functools.partial, types.MethodType),
)
_CACHES = functools._lru_cache_wrapper
_FUNCTIONS = (types.FunctionType, _CACHES)
_CALLED = (*_FUNCTIONS, types.MethodType, functools.partial)
# Items of a container, bytes of an array.
_MANY, _LARGE = 4096, 2**20


def known_before(model: torch.nn.Module, loss: Any) -> list[torch.Tensor]:
    """Tensors that the two may use and that are there before a pass: in attributes, in containers, behind names that their
    functions read (globals, closures), in caches of functions."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    if not isinstance(loss, types.FunctionType):
        classes.update(type(loss).__mro__)
    functions = [part for cls in classes if not _is_torchs(cls) for part in vars(cls).values()]
    functions += [value for module in model.modules() for value in vars(module).values() if isinstance(value, _CALLED)]
    tensors, waiting, seen = reachable_tensors(model, loss), [*functions, loss], set()
    behind: list[Any] = []
    met: dict[int, Any] = {}  # what functions read, by id, and kept while ids are compared: most of them read the same
    opened: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)
        if isinstance(value, functools._lru_cache_wrapper):
            behind += gc.get_referents(value)
        if isinstance(value, types.FunctionType | functools._lru_cache_wrapper) and hasattr(value, "__wrapped__"):
            waiting.append(value.__wrapped__)  # too: what is around it may keep what it gives
        value = getattr(value, "__func__", getattr(value, "func", getattr(value, "fget", value)))
        if not isinstance(value, types.FunctionType) or value in seen or _is_torchs(value):
            continue
        seen.add(value)
        names = names_of(value.__code__)
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        for part in list(read):
            if isinstance(part, types.ModuleType) and not _is_torchs(part):
                read += [vars(part)[name] for name in names if name in vars(part)]
        read += [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        read += [value.__defaults__, value.__kwdefaults__]
        for part in list(read):
            if id(part) not in opened and isinstance(part, Mapping | list | tuple | set):
                opened[id(part)] = part
                read += part.values() if isinstance(part, Mapping) else part
        for part in read:
            if id(part) in met:
                continue
            met[id(part)] = part
            if hands_out(part):
                raise UnsupportedError(
                    f"{value.__qualname__} reads the memory of tensors by {part.__name__}, past all that lipdp can follow. Use "
                    "torch.from_dlpack(tensor), or tensor.__dlpack__()."
                )
            if callable(part):
                waiting.append(part)
            if id(part) in opened or isinstance(part, torch.Tensor) or not (callable(part) or isinstance(part, types.ModuleType)):
                behind.append(part)
    return list({id(t): t for t in (*tensors, *reachable_tensors(behind))}.values())


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _is_torchs(value: Any) -> bool:
    home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(home).split(".")[0] in ("torch", "lipdp", "builtins", "typing", "abc")


def is_iterator(value: Any) -> bool:
    """Whether it is one of Python's own, of which one may learn where it stands."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def position(value: Any) -> Hashable:
    """Where an iterator of Python's stands: the numbers in what it is made again from."""
    if isinstance(value, io.BytesIO | io.StringIO):  # what another one reads
        return () if value.closed else (value.getvalue(), value.tell())
    with warnings.catch_warnings(), suppress(TypeError, ValueError):  # generators and files have none
        warnings.simplefilter("ignore", DeprecationWarning)
        made: tuple[Any, ...] = value.__reduce__()
        parts = [inner for part in made[1:] for inner in (part if isinstance(part, tuple) else (part,))]
        numbers = [part for part in parts if isinstance(part, (int, float, Iterator))]
        return tuple(position(part) if isinstance(part, Iterator) else part for part in numbers)
    return None


def frame_of(waiting: Any) -> types.FrameType | None:
    """Where a generator, or a function that is awaited, waits in its middle."""
    kinds = ((types.GeneratorType, "gi_frame"), (types.CoroutineType, "cr_frame"), (types.AsyncGeneratorType, "ag_frame"))
    return next((getattr(waiting, name) for kind, name in kinds if isinstance(waiting, kind)), None)


def behind(value: Any) -> Iterator[Any]:
    """What a value leads to past its attributes and items."""
    if isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, _FUNCTIONS):
        yield from _of_function(value)
    elif (frame := frame_of(value)) is not None:
        yield dict(frame.f_locals)
    elif isinstance(value, weakref.ReferenceType):
        yield value()
    elif isinstance(value, contextvars.ContextVar):
        yield value.get(None)
    elif isinstance(value, torch.Tensor):
        if value.is_leaf:
            yield from (part for part in (value.grad, value._backward_hooks) if part is not None)
        if getattr(value, "__dict__", None):
            yield value.__dict__
    if not isinstance(value, (type, *_FUNCTIONS)) and not is_nobodys(type(value)):
        yield type(value)


def is_nobodys(value: Any) -> bool:
    """Whether this class or function is Python's, torch's, ours or of another package that is installed."""
    name = getattr(value, "__module__", None)
    return not isinstance(name, str) or _is_installed(name.partition(".")[0])


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether it is one of Python's own packages, or of those installed beside them."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in _NOBODYS or (isinstance(file, str) and file.startswith(_INSTALLED))


def _of_class(cls: type) -> Iterator[Any]:
    for base in inspect.getmro(cls) + inspect.getmro(type(cls)):
        if not is_nobodys(base):
            for name, value in vars(base).items():
                plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                plain = plain.fget if isinstance(plain, property) else plain
                if isinstance(plain, enum.Enum):
                    yield plain.value
                elif isinstance(plain, _FUNCTIONS) or (not name.startswith("__") and _is_kept(plain)):
                    yield plain


def _of_function(function: Any) -> Iterator[Any]:
    """Its own attributes; data, functions and classes that it, or a function inside it, reads by global names."""
    while isinstance(function, _CACHES):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType) or is_nobodys(function):
        return
    yield dict(function.__dict__)
    known, names = function.__globals__, names_of(function.__code__)
    for name in names:
        value = known.get(name)
        if isinstance(value, types.ModuleType):
            inside = vars(value)
            found = [inside[other] for other in names if other in inside]
            yield from (part for part in found if not isinstance(part, str) and _is_kept(part))
        elif (
            isinstance(value, _CACHES)
            or (isinstance(value, (type, types.FunctionType)) and not is_nobodys(value))
            or _is_kept(value)
        ):
            yield value


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> frozenset[str]:
    """What it reads by name, functions inside it too."""
    inside = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*(names_of(part) for part in inside))


def _is_kept(value: Any) -> bool:
    """Data, and objects of the user's own classes; no tables that are too large to look at."""
    if isinstance(value, (type, types.ModuleType)) or not (isinstance(value, _DATA) or not is_nobodys(type(value))):
        return False
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    return value.nbytes <= _LARGE if isinstance(value, np.ndarray) else not isinstance(value, Sized) or len(value) <= _MANY
