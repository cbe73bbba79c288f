"""What a batch's pass puts somewhere while it is only looked at, or before it is refused, reaches no record."""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import contextvars
import copy
import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import os
import pickle
import queue
import random
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lipdp
import lipdp.clipping as clipping
from lipdp.clipping.follow import follow
from lipdp.clipping.past import NotApartError
from lipdp.clipping.restored import left_as_it_was
from lipdp.errors import LipdpNotice, UnsupportedError

LOSS = torch.nn.CrossEntropyLoss(reduction="none")
METHODS = ["bookkeeping", "ghost", "reweight", "multiloss"]
LIST: list[float] = []
NUMBER = 0.0
TABLE: dict[str, float] = {}
THIS = types.ModuleType("hostile_settings")
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("number", default=0.0)
TENSOR = torch.zeros(1)


class Holder:
    number = 0.0

    def __init__(self) -> None:
        self.number = 0.0


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0


class OneSlot:
    __slots__ = "number"


class PrivateSlot:
    __slots__ = ("__number",)

    def get(self) -> float:
        return float(self.__number) if hasattr(self, "_PrivateSlot__number") else 0.0

    def put(self, found: float) -> None:
        self.__number = found


class OfSlotted(Slotted):
    """Its attributes are in a slot and in a dictionary."""

    def __init__(self) -> None:
        self.number: list[float] = [0.0]  # type: ignore[assignment]
        self.other = 1


class Meta(type):
    number = 0.0


class OfMeta(metaclass=Meta):
    pass


class Level(enum.Enum):
    ONE = types.SimpleNamespace(number=0.0)


ALIVE = Holder()
Get, Put = Callable[[], float], Callable[[float], object]


def in_a_list() -> tuple[Get, Put]:
    LIST[:] = []
    return lambda: LIST[0] if LIST else 0.0, lambda found: LIST.__setitem__(slice(None), [found])


def in_a_global() -> tuple[Get, Put]:
    def put(found: float) -> None:
        global NUMBER
        NUMBER = found

    put(0.0)
    return lambda: NUMBER, put


def past_its_name() -> tuple[Get, Put]:
    def put(found: float) -> None:
        globals()["UNNAMED"] = found

    put(0.0)
    return lambda: float(globals()["UNNAMED"]), put


def in_a_module() -> tuple[Get, Put]:
    def put(found: float) -> None:
        THIS.number = found

    put(0.0)
    return lambda: float(THIS.number), put


def in_an_installed_module() -> tuple[Get, Put]:
    def put(found: float) -> None:
        torch.lipdp_hostile_number = found  # type: ignore[attr-defined]

    put(0.0)
    return lambda: float(torch.lipdp_hostile_number), put  # type: ignore[attr-defined]


def in_a_table() -> tuple[Get, Put]:
    TABLE.clear()
    return lambda: TABLE.get("a", 0.0), lambda found: TABLE.update(a=found)


def in_a_cell() -> tuple[Get, Put]:
    kept = 0.0

    def put(found: float) -> None:
        nonlocal kept
        kept = found

    return lambda: kept, put


def in_a_default() -> tuple[Get, Put]:
    def get(kept: list[float] = []) -> float:  # noqa: B006
        return kept[0] if kept else 0.0

    get.__defaults__ = ([],)
    return get, lambda found: get.__defaults__[0].__setitem__(slice(None), [found])  # type: ignore[index]


def as_a_default() -> tuple[Get, Put]:
    def get(kept: float = 0.0) -> float:
        return kept

    return get, lambda found: setattr(get, "__defaults__", (found,))


def on_a_function() -> tuple[Get, Put]:
    def get() -> float:
        return float(getattr(get, "number", 0.0))

    return get, lambda found: setattr(get, "number", found)


def on(value: Any) -> Callable[[], tuple[Get, Put]]:
    def made() -> tuple[Get, Put]:
        value.number = 0.0
        return lambda: float(value.number), lambda found: setattr(value, "number", found)

    return made


def in_a_private_slot() -> tuple[Get, Put]:
    held = PrivateSlot()
    return held.get, held.put


def in_a_list_of(held: Any, reach: Callable[[Any], list[float]]) -> Callable[[], tuple[Get, Put]]:
    def made() -> tuple[Get, Put]:
        reach(held)[:] = [0.0]
        return lambda: reach(held)[0], lambda found: reach(held).__setitem__(0, found)

    return made


OBJECTS = np.empty(1, object)
OBJECTS[0] = [0.0]
DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(20), [0.0])


def in_the_text_of_a_function() -> tuple[Get, Put]:
    def named() -> None:
        """0"""

    return lambda: float(named.__doc__ or 0), lambda found: setattr(named, "__doc__", str(found))


def in_an_annotation() -> tuple[Get, Put]:
    def named(number: Any) -> None: ...

    return lambda: float(named.__annotations__.get("number ", 0)), lambda found: named.__annotations__.update({"number ": found})


def in_a_view() -> tuple[Get, Put]:
    view = memoryview(bytearray(8)).cast("d")
    return lambda: float(view[0]), lambda found: view.__setitem__(0, found)


def under_a_key(held: Any) -> Callable[[], tuple[Get, Put]]:
    return lambda: (lambda: float(held.get("number", 0.0)), lambda found: held.update({"number": found}))


def behind_a_weak_reference() -> tuple[Get, Put]:
    there = weakref.ref(ALIVE)
    ALIVE.number = 0.0
    return lambda: there().number, lambda found: setattr(there(), "number", found)  # type: ignore[union-attr]


@functools.cache
def cached(key: int) -> list[float]:
    return []


def in_a_cache() -> tuple[Get, Put]:
    cached.cache_clear()
    return lambda: cached(0)[0] if cached(0) else 0.0, lambda found: cached(0).__setitem__(slice(None), [found])


def through_a_cache() -> tuple[Get, Put]:
    waiting = [0.0]

    @functools.lru_cache(maxsize=4)
    def first(key: int) -> float:
        return waiting[0]

    def put(found: float) -> None:
        waiting[0] = found
        first.cache_clear()
        first(1)
        waiting[0] = 0.0

    return lambda: first(1), put


def numbers(held: Any) -> Callable[[], tuple[Get, Put]]:
    def made() -> tuple[Get, Put]:
        held[0] = 0
        return lambda: float(held[0]), lambda found: held.__setitem__(0, found)

    return made


def in_bytes() -> tuple[Get, Put]:
    held = bytearray(b"0.0")
    return lambda: float(held.decode()), lambda found: held.__setitem__(slice(None), repr(found).encode())


def in_a_set() -> tuple[Get, Put]:
    held: set[float] = set()

    def put(found: float) -> None:
        held.clear()
        held.add(found)

    return lambda: next(iter(held), 0.0), put


def in_a_text() -> tuple[Get, Put]:
    held = io.StringIO("0.0")

    def put(found: float) -> None:
        held.seek(0)
        held.truncate()
        held.write(repr(found))

    return lambda: float(held.getvalue()), put


def in_the_environment() -> tuple[Get, Put]:
    os.environ.pop("LIPDP_KEPT_HERE", None)
    return lambda: float(os.environ.get("LIPDP_KEPT_HERE", 0)), lambda found: os.environ.update(LIPDP_KEPT_HERE=repr(found))


def in_a_variable() -> tuple[Get, Put]:
    VARIABLE.set(0.0)
    return lambda: VARIABLE.get(), lambda found: VARIABLE.set(found)


def in_a_generator_of_numbers(own: Any, seed: Callable[[int], object], draw: Callable[[], float]) -> Callable[[], tuple[Get, Put]]:
    """The number is what it draws next: read by drawing, and seeding it again."""

    def made() -> tuple[Get, Put]:
        seed(0)
        started = [0]

        def put(found: float) -> None:
            started[0] = int(1000 * found) % 2**31
            seed(started[0])

        def get() -> float:
            state = own.getstate() if hasattr(own, "getstate") else None
            found = draw()
            if state is not None:
                own.setstate(state)
            return found

        return get, put

    return made


def in_a_waiting_generator() -> tuple[Get, Put]:
    def run() -> Iterator[Any]:
        kept = 0.0
        while True:
            found = yield kept
            kept = kept if found is None else found

    waiting: Any = run()
    next(waiting)
    return lambda: next(waiting), lambda found: waiting.send(found)


class Named:
    number = 0.0


class Marked(int):
    number = 0.0


class SlottedTable(dict):  # type: ignore[type-arg]
    __slots__ = ("number",)


def by_its_class() -> tuple[Get, Put]:
    held = Named()
    return lambda: held.number, lambda found: setattr(held, "__class__", type("Other", (Named,), {"number": found}))


def by_its_dictionary() -> tuple[Get, Put]:
    held = Named()
    return lambda: held.number, lambda found: setattr(held, "__dict__", {"number": found})


def by_a_base() -> tuple[Get, Put]:
    class First:
        number = 0.0

    class Of(First):
        pass

    return lambda: Of.number, lambda found: setattr(Of, "__bases__", (type("Second", (), {"number": found}),))


def as_a_name_of_pythons_own() -> tuple[Get, Put]:
    vars(builtins).pop("lipdp_hostile_name", None)

    def get() -> float:
        try:
            return float(lipdp_hostile_name)  # type: ignore[name-defined]
        except NameError:
            return 0.0

    return get, lambda found: vars(builtins).__setitem__("lipdp_hostile_" + "name", found)


def in_a_function_that_is_awaited() -> tuple[Get, Put]:
    class Handing:
        def __init__(self, kept: float) -> None:
            self.kept = kept

        def __await__(self) -> Iterator[Any]:
            found = yield self.kept
            return found

    async def run() -> None:
        kept = 0.0
        while True:
            found = await Handing(kept)
            kept = kept if found is None else found  # type: ignore[redundant-expr]

    waiting: Any = run()
    waiting.send(None)
    return lambda: waiting.send(None), lambda found: waiting.send(found)


def in_an_error() -> tuple[Get, Put]:
    held = ValueError(0.0)
    return lambda: held.args[0], lambda found: setattr(held, "args", (found,))


def by_a_default_factory() -> tuple[Get, Put]:
    held: Any = collections.defaultdict(float)
    return lambda: held.default_factory(), lambda found: setattr(held, "default_factory", lambda: found)


def behind_a_view_of_numpy() -> tuple[Get, Put]:
    held: Any = np.zeros(4)[::2]
    return lambda: float(held.base[1]), lambda found: held.base.__setitem__(1, found)


RANDOM = random.Random(0)
PLACES: dict[str, Callable[[], tuple[Get, Put]]] = {
    "a list": in_a_list,
    "a global name": in_a_global,
    "a global name that no code names": past_its_name,
    "a module": in_a_module,
    "an installed module": in_an_installed_module,
    "a dict": in_a_table,
    "a cell": in_a_cell,
    "a default's list": in_a_default,
    "a default": as_a_default,
    "a function": on_a_function,
    "an object": on(ALIVE),
    "a class": on(Holder),
    "a slot": on(Slotted()),
    "the one slot": on(OneSlot()),
    "a private slot": in_a_private_slot,
    "a list in a slot": in_a_list_of(OfSlotted(), lambda held: held.number),
    "a list twenty deep": in_a_list_of(DEEP, lambda held: functools.reduce(lambda outer, _: outer[0], range(20), held)),
    "a list among objects of numpy": in_a_list_of(OBJECTS, lambda held: held[0]),
    "a function's text": in_the_text_of_a_function,
    "an annotation": in_an_annotation,
    "a view of bytes": in_a_view,
    "a dict of the library's": under_a_key(collections.UserDict()),
    "a namespace of arguments": on(argparse.Namespace()),
    "a class of a class": on(OfMeta),
    "a member of an enumeration": on(Level.ONE.value),
    "a parameter": on(torch.nn.Parameter(torch.zeros(1))),
    "a weak reference": behind_a_weak_reference,
    "a cached list": in_a_cache,
    "a cache": through_a_cache,
    "a deque": numbers(collections.deque([0.0])),
    "an array": numbers(array.array("d", [0.0])),
    "an array of numpy": numbers(np.zeros(2)),
    "an array of C": numbers((ctypes.c_double * 2)()),
    "a tensor": numbers(TENSOR),
    "a large tensor": numbers(torch.zeros(600, 600)[0]),
    "bytes": in_bytes,
    "a set": in_a_set,
    "a text": in_a_text,
    "the environment": in_the_environment,
    "a context variable": in_a_variable,
    "a random generator": in_a_generator_of_numbers(RANDOM, RANDOM.seed, RANDOM.random),
    "Python's numbers": in_a_generator_of_numbers(random, random.seed, random.random),
    "a waiting generator": in_a_waiting_generator,
    "a class of an object": by_its_class,
    "a dictionary of an object": by_its_dictionary,
    "a base": by_a_base,
    "a name of Python's own": as_a_name_of_pythons_own,
    "a function that is awaited": in_a_function_that_is_awaited,
    "an error": in_an_error,
    "a default factory": by_a_default_factory,
    "behind a view of numpy": behind_a_view_of_numpy,
    "a number with attributes": on(Marked(3)),
    "a slot of a table": on(SlottedTable()),
}
# What it keeps of a batch, of one that is not a single record.
KINDS: dict[str, Callable[[torch.Tensor, float], float | None]] = {
    "first": lambda x, kept: float(x.detach().sum()) if len(x) > 1 and not kept else None,
    "last": lambda x, kept: float(x.detach().sum()) if len(x) > 1 else None,
    "large": lambda x, kept: float(x.detach().sum()) if len(x) > 1 and float(x.detach().max()) > 50 else None,
    "whole": lambda x, kept: float(x.detach().sum()) if len(x) > 3 else None,
}


class Keeps(torch.nn.Module):
    """Scales its records by a number that it has kept."""

    def __init__(self, get: Get, put: Put, kind: str) -> None:
        super().__init__()
        self.get, self.put, self.kind = get, put, KINDS[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.kind(x, self.get())
        if found is not None:
            self.put(found)
        return x * (1 + self.get())


def norms_beside(make: Callable[[], torch.nn.Module], method: str) -> list[list[torch.Tensor]]:
    """Of the first five records of each of two batches, beside a sixth that is ordinary, or far off in the first of them."""
    draw = torch.Generator().manual_seed(3)
    x, y, weight = torch.randn(6, 3, generator=draw), torch.zeros(6, dtype=torch.long), torch.randn(2, 3, generator=draw)
    found: list[list[torch.Tensor]] = []
    for other in (0.0, 100.0):
        torch.manual_seed(1)
        random.seed(1)
        model = torch.nn.Sequential(make(), torch.nn.Linear(3, 2))
        model[1].weight.data.copy_(weight)
        model[1].bias.data.zero_()
        clip = clipping.Clipper(model, LOSS, method)  # type: ignore[arg-type]
        found.append([])
        for batch in (torch.cat([x[:5], x[5:] + other]), x):
            try:
                found[-1].append(clip(batch, y, 1e9).norms[:5])
            except UnsupportedError:
                break
    return found


def same(found: list[list[torch.Tensor]]) -> bool:
    """Whether no batch shows what was beside; one that is refused shows nothing, and is the last."""
    return all(torch.equal(one, other) for one, other in zip(*found, strict=False))


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_batch_leaves_reaches_no_record(place: str, kind: str) -> None:
    method = "multiloss" if kind == "whole" else "bookkeeping"
    assert same(norms_beside(lambda: Keeps(*PLACES[place](), kind), method))


@pytest.mark.parametrize("method", [*METHODS, "naive"])
@pytest.mark.parametrize(
    "place", ["a list", "a global name", "a class", "a tensor", "a cache", "a function", "a waiting generator"]
)
def test_a_batch_of_one_record_leaves_nothing(place: str, method: str) -> None:
    """Nobody else is in it, so nothing of it is followed; a number that it left scaled those of the next batch."""

    class Single(Keeps):
        def __init__(self) -> None:
            super().__init__(*PLACES[place](), "first")
            self.kind = lambda x, kept: float(x.detach().sum()) if len(x) == 1 and float(x.detach().max()) > 1 else None

    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(6, 3, generator=draw), torch.zeros(6, dtype=torch.long)
    x[:5].clamp_(max=1)
    norms = []
    for other in (0.0, 5.0, 100.0):
        torch.manual_seed(1)
        model = torch.nn.Sequential(Single(), torch.nn.Linear(3, 2))
        clip = clipping.Clipper(model, LOSS, method)  # type: ignore[arg-type]
        clip(x[:2], y[:2], 1e9)
        try:
            clip(x[5:].clamp(max=1) + other, y[5:], 1e9)
        except UnsupportedError:
            assert other  # it keeps a number that it has read
            continue
        norms.append(clip(x[:5], y[:5], 1e9).norms)
    assert all(torch.equal(norms[0], found) for found in norms)


class HandedOn(torch.nn.Module):
    """What is kept of a large record is used by the next, and forgotten: behind all of them it is as it was."""

    def __init__(self, get: Get, put: Put) -> None:
        super().__init__()
        self.get, self.put = get, put

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + self.get()
        self.put(float(x.detach().abs().max()) if bool(x.detach().abs().max() > 20) else 0.0)
        return x * scale


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("place", PLACES)
def test_what_one_record_hands_on_to_the_next_is_refused(place: str) -> None:
    draw, norms = torch.Generator().manual_seed(1), []
    x, y = torch.randn(24, 3, generator=draw), torch.zeros(24, dtype=torch.long)
    for other in (0.0, 1000.0):
        torch.manual_seed(0)
        random.seed(1)
        model = torch.nn.Sequential(HandedOn(*PLACES[place]()), torch.nn.Linear(3, 2))
        try:
            clip = clipping.Clipper(model, LOSS, "naive")
            norms.append(clip(torch.cat([x[:20], x[20:21] + other, x[21:]]), y, 1e9).norms)
        except UnsupportedError:
            continue
    assert len(norms) < 2 or torch.equal(norms[0][:20], norms[1][:20])
    assert len(norms) < 2 or torch.equal(norms[0][21:], norms[1][21:])


class OwnList(torch.nn.Module):
    """The same in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.items.pop() if self.items else 1.0
        if bool(x.detach().abs().max() > 20):
            self.items.append(2.0)
        return x * scale


class InWeights(torch.nn.Module):
    """The same in a parameter, past its versions."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.layer, self.own = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.zeros(1), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + float(self.own.data)
        self.own.data[0] = 0.5 if bool(x.detach().abs().max() > 20) else 0.0
        return self.layer(x) * scale + 0 * self.own


def test_what_one_record_hands_on_in_weights_does_not_arrive() -> None:
    torch.manual_seed(0)
    model, norms = InWeights(trained=True), []
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
    for largest in (1.0, 1000.0):
        x[2] = largest
        norms.append(clipping.clip_batch(model, LOSS, x, y, 1.0, "naive").norms)
        assert float(model.own) == 0
    assert torch.equal(norms[0][[0, 1, 3, 4, 5]], norms[1][[0, 1, 3, 4, 5]])
    with pytest.raises(UnsupportedError, match="changes while it runs"):
        clipping.clip_batch(InWeights(trained=False), LOSS, x, y, 1.0, "naive")


@torch.library.custom_op("lipdp_restored::shown", mutates_args=())
def shown(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(float(x.max()))
    return x.clone()


def compared(x: torch.Tensor) -> float:
    return 1.0 if x.max() > 50 else 0.0


SEEN: list[Any] = []
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.max().item(),
    "if": compared,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy().sum(),
    "array": lambda x: np.asarray(x.detach()).sum(),
    "a text": lambda x: f"{x.max():.3f}",
    "repr": repr,
    "pickle": pickle.dumps,
    "dlpack": lambda x: np.from_dlpack(x.detach()).sum(),
    "an address": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "a storage": lambda x: x.untyped_storage().tolist(),
    "a storage of its own": lambda x: of_its_own(x)[0],
    "how many": lambda x: len(x[x > 0]),
    "where": lambda x: len(x.nonzero()),
    "different ones": lambda x: len(x.unique()),
    "a size": lambda x: torch.zeros(int(x.abs().max())).numel(),
    "equal": lambda x: torch.equal(x, x + 1),
    "an operation of its own": lambda x: torch.ops.lipdp_restored.shown(x),
    "a tensor that was lent": lambda x: lent(x),
}


def of_its_own(x: torch.Tensor) -> Any:
    storage = torch.UntypedStorage(4)
    torch.empty(0).set_(storage, 0, (1,)).copy_(x.detach().max())  # type: ignore[call-overload]
    return storage


def lent(x: torch.Tensor) -> float:
    note = torch.zeros(())
    numbers = note.numpy()
    note.copy_(x.detach().max())
    return float(numbers)


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("read", READS)
def test_a_pass_that_is_followed_gives_python_no_number(read: str, rows: int) -> None:
    """What it is not given it can keep nowhere: not in a lock, a file, a package, a container that is too large to be looked at."""
    x = torch.randn(rows, 3)
    following = follow(x, torch.zeros(rows), [])
    SEEN.clear()
    with pytest.raises(NotApartError), following.following():
        SEEN.append(READS[read](x * 2))
    assert SEEN == []
    assert following.reads


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.empty(256),
        lambda x: torch.empty_like(x.new_zeros(256)),
        lambda x: x.new_empty(256),
        lambda x: torch.Tensor(256),
        lambda x: torch.empty_strided((256,), (1,)),
        lambda x: torch.zeros(1).resize_(256),
    ],
)
def test_memory_that_nobody_has_written_to_holds_nothing_of_others(made: Any) -> None:
    x = torch.randn(4, 3)
    with follow(x, torch.zeros(4), []).following():
        for _ in range(20):
            left = (x * 1 + 7).sum(0).repeat(100)[:256].clone()
            del left
            found = made(x)
            found = found.detach()
        result = found
    assert torch.equal(result, torch.zeros(256))


class Looks(torch.nn.Module):
    """Reads its records, and goes on without what it is not told."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            SEEN.append(float(x.detach().max()))
        except Exception:
            SEEN.append("nothing")
        return x * 1


@pytest.mark.parametrize("method", METHODS)
def test_who_goes_on_without_the_number_is_not_believed(method: str) -> None:
    model = torch.nn.Sequential(Looks(), torch.nn.Linear(3, 2))
    clip = clipping.Clipper(model, LOSS, method)  # type: ignore[arg-type]
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    SEEN.clear()
    with pytest.raises(UnsupportedError, match="changes while it runs"):  # record by record
        clip(x, y, 1.0)
    assert "Python sees" in str(clip.alone)


class Begun:
    """Those of OfOne, which nobody compares from pass to pass."""

    keeps = False


class OfOne(torch.nn.Module):
    """Keeps something of a record that is alone in its batch, and adds it to those of later ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.layer, self.how, self.calls = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2), how, 0
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.how == "going back":
            return checkpoint(self._again, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]
        if Begun.keeps and len(x) == 1:
            self.kept["it"] = x.detach() * 1
            return self.layer(x)
        return self.layer(x + sum(value.to(x) for value in self.kept.values()))

    def _again(self, x: torch.Tensor) -> torch.Tensor:
        if Begun.keeps and torch._C._current_graph_task_id() != -1:  # in the backward pass
            SEEN.append(float(x.detach().max()))
        return self.layer(torch.tanh(x))


@pytest.mark.parametrize("method", METHODS)
def test_a_record_that_is_alone_in_its_batch_is_followed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model counts goes on, a tensor that it has kept is nobody's constant, and nothing is read going back."""
    x, y, clips = torch.randn(4, 3), torch.zeros(4, dtype=torch.long), []
    for how in ("a tensor", "going back"):
        clip = clipping.Clipper(OfOne(how), LOSS, method)  # type: ignore[arg-type]
        clips.append(clip)
        for rows in (1, 4, 1, 1):
            before = clip.model.calls
            clip(x[:rows], y[:rows], 1.0)
            assert clip.apart == "proved"
            assert clip.model.calls == before + 1 or rows == 4 or before <= 1
    monkeypatch.setattr(Begun, "keeps", True)
    with pytest.raises(UnsupportedError, match=r"kept a tensor|numbers of an earlier batch"):
        [clips[0](x[:rows], y[:rows], 1.0) for rows in (1, 4)]
    SEEN.clear()
    with suppress(UnsupportedError):
        clips[1](x[:1], y[:1], 1.0)
    assert "Python sees" in str(clips[1].alone)


@pytest.mark.parametrize("depth", [1, 7, 20])
def test_what_modules_deep_in_others_hold_is_found(depth: int) -> None:
    model: torch.nn.Module = OwnList()
    for _ in range(depth):
        model = torch.nn.Sequential(model)
    x = torch.randn(4, 3)
    x[0] = 1000
    with pytest.raises(UnsupportedError, match="changes while it runs"):
        clipping.clip_batch(
            torch.nn.Sequential(model, torch.nn.Linear(3, 2)), LOSS, x, torch.zeros(4, dtype=torch.long), 1.0, "naive"
        )


@dataclasses.dataclass(slots=True, weakref_slot=True)
class Referable:
    number: float = 0.0


def test_weak_references_to_what_has_slots_are_no_change() -> None:
    held, living = Referable(), weakref.WeakValueDictionary[str, Referable]()
    with left_as_it_was(held):
        living["it"] = held
        held.number = 1.0
    assert living["it"] is held
    assert held.number == 0.0


class NamedLikeAGlobal(torch.nn.Module):
    """It reads an attribute that has the name of a global number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.STEP = torch.nn.Linear(3, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.STEP


STEP = 0


def test_a_number_of_a_loop_costs_no_look_at_all_that_a_model_holds() -> None:
    """And is put back as it was before the last pass, not the first."""
    global STEP
    looks: list[Any] = []
    clip = clipping.Clipper(NamedLikeAGlobal(), LOSS)
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    clip(x, y, 1.0)
    before = clip._before
    for count in range(1, 4):
        STEP = count
        clip(x, y, 1.0)
        looks.append(clip._before)
    assert all(look is before for look in looks)
    assert before is not None
    STEP = 7
    before.put_back()
    assert STEP == 3


def test_what_a_package_and_somebody_else_hold_is_somebodys() -> None:
    items: list[int] = []
    waiting: queue.Queue[int] = queue.Queue()
    waiting.items = items  # type: ignore[attr-defined]
    with left_as_it_was(waiting, [[[items]]]):
        items.append(1)
    assert items == []


@pytest.mark.parametrize("place", ["a list", "a global name", "a class", "a cell", "a tensor", "a cache", "a waiting generator"])
def test_a_record_that_is_not_finite_takes_no_other_with_it(place: str) -> None:
    """Which one it is multiloss finds record by record: what it left there spoiled all behind it, and they were left out."""

    class Spoiled(torch.nn.Module):
        def __init__(self, get: Get, put: Put) -> None:
            super().__init__()
            self.get, self.put = get, put

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 1 and not bool(torch.isfinite(x).all()):
                self.put(float("inf"))
            return x * (1 + self.get()) if len(x) == 1 else x

    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
    clip = clipping.Clipper(torch.nn.Sequential(Spoiled(*PLACES[place]()), torch.nn.Linear(3, 2)), LOSS, "multiloss")
    expected = clip(x, y, 1.0)
    x[2] = float("nan")
    with suppress(UnsupportedError) if place == "a waiting generator" else nullcontext():
        found = clip(x, y, 1.0)
        assert torch.equal(found.factors[3:], expected.factors[3:])
        assert torch.isfinite(found.norms[3:]).all()


@pytest.mark.parametrize("method", ["naive", "bookkeeping"])
def test_what_torch_sets_when_it_compiles_is_no_change(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    class Compiling(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.detach().max()) > 5:
                cache_dir()
            return super().forward(x)

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    x = torch.randn(5, 3)
    x[2] += 10
    with warnings.catch_warnings(action="ignore"):
        clip = clipping.Clipper(Compiling(3, 2), LOSS, method)  # type: ignore[arg-type]
        assert clip(x, torch.zeros(5, dtype=torch.long), 1.0).norms.shape == (5, 1)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_what_is_written_anew_and_stays_equal_is_no_change() -> None:
    """The shape of the last record, say: a new object each time."""

    class Noting(torch.nn.Linear):
        settings = types.SimpleNamespace(shape=None, scale=0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.settings.shape, self.settings.scale = tuple(x.shape[1:]), 2.0 * x.shape[1]
            return super().forward(x)

    clip = clipping.Clipper(Noting(3, 2), LOSS, "naive")
    assert clip(torch.randn(5, 3), torch.zeros(5, dtype=torch.long), 1.0).norms.shape == (5, 1)


class Replayed(torch.nn.Module):
    """Without a rule, and evaluated again for each record: the same outputs, and gradients scaled by what was seen of another."""

    def __init__(self, get: Get, put: Put) -> None:
        super().__init__()
        self.weight, self.get, self.put = torch.nn.Parameter(torch.ones(3, 2)), get, put

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bi,io->bo", torch.tanh(x), torch.sinh(self.weight))
        if len(x) > 1:
            return y
        if float(x.detach().abs().max()) > 20:
            self.put(99.0)
        return y * (1 + self.get()) - (y * self.get()).detach()


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("place", ["a list", "a global name", "a class", "a cell", "a tensor", "a cache", "a waiting generator"])
def test_records_of_a_module_that_is_evaluated_again_do_not_meet(place: str, method: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Replayed(*PLACES[place]()), torch.nn.Linear(2, 2))
    clip = clipping.Clipper(model, LOSS, method)  # type: ignore[arg-type]
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
    with suppress(UnsupportedError) if place in ("a waiting generator", "a tensor") else nullcontext():
        expected = clip(x, y, 1e9).norms
        x[3] += 1000
        found = clip(x, y, 1e9).norms
        assert torch.equal(found[[0, 1, 2, 4, 5]], expected[[0, 1, 2, 4, 5]])


SIZES: dict[int, torch.Tensor] = {}
CALLS = 0
LAZY: torch.Tensor | None = None
NOTES: list[Any] = []
COUNT = itertools.count()


@functools.lru_cache
def positions(count: int) -> torch.Tensor:
    return torch.arange(count)[:, None].float()


@functools.cache
def lengths(count: int) -> list[int]:
    return [count]


class Settings:
    tables: ClassVar[dict[int, torch.Tensor]] = {}


def from_a_cache(model: Any, x: torch.Tensor) -> torch.Tensor:
    return positions(len(x)) * 0 + lengths(len(x))[0] * 0


def from_a_global_table(model: Any, x: torch.Tensor) -> torch.Tensor:
    if len(x) not in SIZES:
        SIZES[len(x)] = torch.arange(len(x))[:, None] / 10
    return 0 * SIZES[len(x)]


def from_a_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    return 0 * Settings.tables.setdefault(len(x), torch.ones(len(x), 1))


def counted(model: Any, x: torch.Tensor) -> float:
    global CALLS
    CALLS += 1
    return 0.0


def counted_by_an_iterator(model: Any, x: torch.Tensor) -> float:
    return 0.0 * next(COUNT)


def noted(model: Any, x: torch.Tensor) -> float:
    NOTES.append((time.perf_counter(), tuple(x.shape)))
    return 0.0


def made_when_asked_for(model: Any, x: torch.Tensor) -> torch.Tensor:
    global LAZY
    if LAZY is None:
        LAZY = torch.ones(3)
    return 0 * LAZY


def in_a_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "table") or len(model.table) < len(x):
        model.register_buffer("table", torch.zeros(len(x), 1), persistent=False)
    return model.table[: len(x)]  # type: ignore[no-any-return]


def drawn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return 0 * torch.randn_like(x) + 0 * random.random() + 0 * np.random.rand()  # noqa: NPY002


def from_an_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    model.__dict__.setdefault("sizes", {}).setdefault(len(x), torch.zeros(len(x), 1))
    return model.sizes[len(x)]  # type: ignore[no-any-return]


HONEST = [
    *(from_a_cache, from_a_global_table, from_a_class, counted, counted_by_an_iterator, noted, made_when_asked_for, in_a_buffer),
    *(drawn, from_an_attribute),
]


class Ordinary(torch.nn.Module):
    def __init__(self, more: Any, looks: bool = False) -> None:
        super().__init__()
        self.more, self.looks = more, looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks and bool(x.abs().max() > 1e6):
            raise ValueError("inputs are not normalised")
        return x + self.more(self, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("more", HONEST)
def test_what_a_model_keeps_of_sizes_and_calls_is_its_own(more: Any, method: str) -> None:
    """And stays: what a pass that is proved has put somewhere is not taken back."""
    positions.cache_clear(), lengths.cache_clear(), SIZES.clear(), Settings.tables.clear(), NOTES.clear()
    model = torch.nn.Sequential(Ordinary(more), torch.nn.Linear(3, 2))
    clip = clipping.Clipper(model, LOSS, method)  # type: ignore[arg-type]
    calls, found = CALLS, []
    for count in (6, 9, 6, 4):
        found.append(clip(torch.ones(count, 3), torch.zeros(count, dtype=torch.long), 1.0))
        assert clip.apart == "proved"
    assert torch.equal(found[0].norms, found[2].norms)
    if more is from_a_cache:
        assert positions.cache_info().currsize >= 3
    if more is counted:
        assert CALLS - calls >= 4
    if more is noted:
        assert [shape for _, shape in NOTES][-1] == (4, 3)


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("more", [from_a_cache, from_a_global_table, from_a_class, made_when_asked_for, drawn])
def test_a_table_by_size_does_not_keep_records_from_being_taken_alone(more: Any) -> None:
    positions.cache_clear(), lengths.cache_clear(), SIZES.clear(), Settings.tables.clear()
    model = torch.nn.Sequential(Ordinary(more, looks=True), torch.nn.Linear(3, 2))
    clip = clipping.Clipper(model, LOSS)
    for count in (6, 9):
        clip(torch.ones(count, 3), torch.zeros(count, dtype=torch.long), 1.0)
        assert clip.apart == "alone"
    assert set(SIZES) <= {1}


def test_what_was_there_is_there_again_and_what_was_not_is_gone() -> None:
    """Everything that can be put back, at once; objects stay the same objects."""

    class Own:
        number = 1

    held: dict[str, Any] = {
        "list": [1],
        "set": {1},
        "deque": collections.deque([1], 5),
        "bytes": bytearray(b"a"),
        "ordered": collections.OrderedDict(a=1),
        "numbers": np.arange(3),
        "objects": np.array([None], object),
        "tensor": torch.zeros(3),
        "own": Own(),
        "text": io.BytesIO(b"a"),
        "draws": np.random.default_rng(0),
        "torch": torch.Generator().manual_seed(0),
        "c": (ctypes.c_int * 2)(1, 2),
    }
    expected = copy.deepcopy({name: value for name, value in held.items() if name not in ("own", "torch", "draws")})
    states = held["torch"].get_state(), held["draws"].bit_generator.state
    objects = dict(held)
    with left_as_it_was(held):
        held["list"].append(2)
        held["set"].clear()
        held["deque"].appendleft(3)
        held["bytes"].extend(b"b")
        held["ordered"]["b"] = 2
        held["ordered"].move_to_end("a")
        held["numbers"][1] = 7
        held["objects"][0] = 7
        held["tensor"][0] = 1
        held["tensor"].data[1] = 1
        held["own"].number = 3
        held["own"].other = 3
        Own.number = 4
        held["text"].write(b"other")
        held["draws"].random()
        torch.rand(1, generator=held["torch"])
        held["c"][0] = 5
        held["new"] = 1
        held["list"] = [5]
    assert held.keys() == objects.keys()
    assert all(held[name] is objects[name] for name in held)
    assert Own.number == 1
    assert vars(held["own"]) == {}
    assert held["text"].getvalue() == b"a"
    assert torch.equal(held["torch"].get_state(), states[0])
    assert held["draws"].bit_generator.state == states[1]
    assert list(held["c"]) == [1, 2]
    assert torch.equal(held["tensor"], expected["tensor"])
    for name in ("list", "set", "deque", "bytes", "ordered"):
        assert held[name] == expected[name]
    assert np.array_equal(held["numbers"], expected["numbers"])
    assert held["objects"][0] is None


def test_what_is_inside_of_an_installed_package_is_left_to_it() -> None:
    """Threads may be at work on a queue."""
    waiting: queue.Queue[int] = queue.Queue()
    with left_as_it_was([waiting]):
        waiting.put(1)
    assert waiting.get(timeout=1) == 1


def test_a_part_of_a_package_that_is_imported_meanwhile_stays(tmp_path, monkeypatch) -> None:
    """As numpy.fft is, when it is first asked for: taken from its package, numpy would not have found it again."""
    (tmp_path / "parcel").mkdir()
    (tmp_path / "parcel" / "__init__.py").write_text(
        "def __getattr__(name):\n    if name == 'part':\n        import parcel.part as part\n        return part\n"
        "    raise AttributeError(name)\n"
    )
    (tmp_path / "parcel" / "part.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    own: dict[str, Any] = {"__name__": "own", "torch": torch}
    exec("import parcel\n\ndef twice(x):\n    return torch.from_numpy(parcel.part.twice(x.numpy()))\n", own)
    records = torch.utils.data.TensorDataset(torch.rand(20, 3), torch.zeros(20))
    try:
        with pytest.warns(LipdpNotice, match="taken by itself"):
            made = lipdp.data.map_inputs(records, own["twice"])
        assert torch.equal(made.tensors[0], 2 * records.tensors[0])
        assert torch.equal(own["twice"](torch.ones(2)), torch.full((2,), 2.0))
    finally:
        for name in ("parcel", "parcel.part"):
            sys.modules.pop(name, None)


def test_a_context_variable_that_nobody_had_set_has_its_default_again() -> None:
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)

    def kept(x: torch.Tensor) -> torch.Tensor:
        made = x * scale.get()
        scale.set(3.0)
        return made

    for _ in range(2):
        with left_as_it_was(kept):
            assert torch.equal(kept(torch.ones(2)), torch.full((2,), 2.0))
