"""What a model may keep of a record where its attributes do not lead, under naive: refused in the batch in which it is kept.

Each model keeps the first record of a kind, and scales later ones of that kind by it: a record that is computed once more gives
what it gave, so only a look at what is kept tells. All records here are of one kind; the made-up one is of another.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import io
import itertools
import math
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import lipdp.clipping as clipping
from lipdp.errors import UnsupportedError

Step = Callable[[Any, torch.Tensor], float]
C = 0.05
KIND = 3


class Kept(torch.nn.Module):
    """A linear map, turned by what ``step`` gives for a record."""

    def __init__(self, step: Step, **attributes: Any) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.step = step
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) * math.cos(3 * self.step(self, x))
        return y


def size(x: torch.Tensor) -> float:
    return float(x.detach().abs().max())


def kind(x: torch.Tensor) -> int:
    return int(x.detach().argmax())


def first(table: dict[Any, float], x: torch.Tensor) -> float:
    return table.setdefault(kind(x), size(x))


class Slotted:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: dict[int, float] = {}


class Holder:
    shared: dict[int, float]

    def __init__(self) -> None:
        self.table: dict[int, float] = {}
        type(self).shared = {}

    @classmethod
    def first(cls, x: torch.Tensor) -> float:
        return first(cls.shared, x)

    def __call__(self, x: torch.Tensor) -> float:
        return first(self.shared, x)


class Meta(type):
    table: ClassVar[dict[int, float]] = {}


class OfMeta(metaclass=Meta):
    pass


class Level(enum.Enum):
    ONE = types.SimpleNamespace()


class Constants:
    """A class that holds an object."""

    held = Holder()


ALIVE: list[Any] = []
OBJECT = Holder()
GLOBAL: dict[int, float] = {}
GLOBAL_NUMBER = 0.0
THIS = types.ModuleType("hostile_settings")


@functools.cache
def cached_largest(kind: int) -> list[float]:
    return []


def through(cached: Callable[[int], list[float]], x: torch.Tensor) -> float:
    found = cached(kind(x))
    if not found:
        found.append(size(x))
    return found[0]


def clear() -> None:
    global GLOBAL_NUMBER
    GLOBAL.clear()
    Meta.table.clear()
    OBJECT.table, Constants.held.table = {}, {}
    Level.ONE.value.__dict__.clear()
    cached_largest.cache_clear()
    GLOBAL_NUMBER = 0.0
    THIS.table = {}
    for name in [name for name in os.environ if name.startswith("LIPDP_HOSTILE_KIND")]:
        del os.environ[name]


def in_a_cell() -> Kept:
    found: float | None = None

    def step(model: Any, x: torch.Tensor) -> float:
        nonlocal found
        if kind(x) == KIND and found is None:
            found = size(x)
        return found or 0.0

    return Kept(step)


def in_a_default() -> Kept:
    def step(model: Any, x: torch.Tensor, table: dict[int, float] = {}) -> float:  # noqa: B006
        return first(table, x)

    step.__defaults__ = ({},)
    return Kept(step)


def in_a_keyword_default() -> Kept:
    def step(model: Any, x: torch.Tensor, *, table: dict[int, float] = {}) -> float:  # noqa: B006
        return first(table, x)

    step.__kwdefaults__ = {"table": {}}
    return Kept(step)


def on_its_class() -> Kept:
    class Own(Kept):
        table: ClassVar[dict[int, float]] = {}

    return Own(lambda model, x: first(model.table, x))


def behind_its_class() -> Kept:
    class Base(Kept):
        table: ClassVar[dict[int, float]] = {}

    class Own(Base):
        pass

    return Own(lambda model, x: first(model.table, x))


def on_a_function() -> Kept:
    def step(model: Any, x: torch.Tensor) -> float:
        return first(step.table, x)  # type: ignore[attr-defined]

    step.table = {}  # type: ignore[attr-defined]
    return Kept(step)


def by_a_global_function() -> Kept:
    return Kept(lambda model, x: remember(x))


def remember(x: torch.Tensor) -> float:
    return (lambda: first(GLOBAL, x))()


def as_a_global_number() -> Kept:
    def step(model: Any, x: torch.Tensor) -> float:
        global GLOBAL_NUMBER
        if kind(x) == KIND and not GLOBAL_NUMBER:
            GLOBAL_NUMBER = size(x)
        return GLOBAL_NUMBER

    return Kept(step)


def in_a_generator() -> Kept:
    def run() -> Iterator[float]:
        table: dict[int, float] = {}
        x = yield 0.0
        while True:
            x = yield first(table, x)

    waiting: Any = run()
    next(waiting)
    return Kept(lambda model, x: model.run.send(x), run=waiting)


def moving(iterator: Iterator[Any], number: Callable[[Any], float] = float) -> Kept:
    """Goes on at records of the kind; a fourth of them is turned."""
    return Kept(lambda model, x: number(next(model.iterator)) if kind(x) == KIND else 0.0, iterator=iterator)


def behind_a_weak_reference() -> Kept:
    ALIVE.append(Holder())
    return Kept(lambda model, x: first(model.other().table, x), other=weakref.ref(ALIVE[-1]))


def in_a_weak_dictionary() -> Kept:
    ALIVE.append(Holder())
    return Kept(
        lambda model, x: first(next(iter(model.others.values())).table, x),
        others=weakref.WeakValueDictionary({1: ALIVE[-1]}),
    )


def in_a_context_variable() -> Kept:
    variable: contextvars.ContextVar[dict[int, float]] = contextvars.ContextVar("variable")
    variable.set({})
    return Kept(lambda model, x: first(variable.get(), x))


def in_a_cache_of_a_method() -> Kept:
    class Own(Kept):
        @functools.cache  # noqa: B019
        def look(self, kind: int) -> list[float]:
            return []

    return Own(lambda model, x: through(model.look, x))


def numbers(held: Any) -> Kept:
    def step(model: Any, x: torch.Tensor) -> float:
        if not model.held[kind(x)]:
            model.held[kind(x)] = size(x)
        return float(model.held[kind(x)])

    return Kept(step, held=held)


def in_a_text() -> Kept:
    def step(model: Any, x: torch.Tensor) -> float:
        table = dict(line.split() for line in model.text.getvalue().splitlines())
        if str(kind(x)) not in table:
            model.text.write(f"{kind(x)} {size(x)}\n")
        return float(table.get(str(kind(x)), size(x)))

    return Kept(step, text=io.StringIO())


def in_a_gradient() -> Kept:
    def step(model: Any, x: torch.Tensor) -> float:
        weight = model.inner.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if not weight.grad[0, kind(x)]:
            weight.grad[0, kind(x)] = size(x)
        return float(weight.grad[0, kind(x)])

    return Kept(step)


def on_a_parameter() -> Kept:
    model = Kept(lambda model, x: first(model.inner.weight.table, x))
    model.inner.weight.table = {}  # type: ignore[attr-defined, assignment]
    return model


def in_a_hook_of_a_parameter() -> Kept:
    model, table = Kept(lambda model, x: 0.0), dict[int, float]()
    model.inner.bias.register_hook(lambda g: g * math.cos(9 * table.setdefault(int(g.argmin()), float(g.abs().max()))))
    return model


def in_a_hook_of_a_module() -> Kept:
    model, table = Kept(lambda model, x: 0.0), dict[int, float]()
    model.inner.register_forward_hook(lambda module, inputs, output: output * math.cos(3 * first(table, inputs[0])))
    return model


def in_an_operation() -> Kept:
    table: dict[int, float] = {}

    @torch.library.custom_op(f"lipdp_hostile{len(ALIVE)}::first", mutates_args=())
    def operation(x: torch.Tensor) -> torch.Tensor:
        return x.new_tensor(first(table, x))

    ALIVE.append(operation)
    return Kept(lambda model, x: float(operation(x.detach())))


def in_the_environment() -> Kept:
    return Kept(lambda model, x: float(os.environ.setdefault(f"LIPDP_HOSTILE_KIND{kind(x)}", str(size(x)))))


def on_a_thread() -> Kept:
    local = threading.local()
    local.table = {}
    return Kept(lambda model, x: first(model.local.table, x), local=local)


HOSTILE: dict[str, Callable[[], Kept]] = {
    "a cell": in_a_cell,
    "a default": in_a_default,
    "a keyword's default": in_a_keyword_default,
    "its class": on_its_class,
    "a class behind its class": behind_its_class,
    "an object's class": lambda: Kept(lambda model, x: model.other(x), other=Holder()),
    "a class method": lambda: Kept(lambda model, x: Holder.first(x), other=Holder()),
    "a class of a class": lambda: Kept(lambda model, x: first(model.other.table, x), other=OfMeta),
    "a global object": lambda: Kept(lambda model, x: first(OBJECT.table, x)),
    "an object on a class": lambda: Kept(lambda model, x: first(Constants.held.table, x)),
    "a slot": lambda: Kept(lambda model, x: first(model.other.table, x), other=Slotted()),
    "a member of an enumeration": lambda: Kept(lambda model, x: first(Level.ONE.value.__dict__, x)),
    "a function": on_a_function,
    "a global of another function": by_a_global_function,
    "a global number": as_a_global_number,
    "a module's attribute": lambda: Kept(lambda model, x: first(THIS.table, x)),
    "a generator's locals": in_a_generator,
    "an iterator over a list": lambda: moving(iter([0, 1] * 50)),
    "an enumeration": lambda: moving(enumerate(itertools.repeat(0)), lambda pair: pair[0] % 2),
    "a cycle": lambda: moving(itertools.cycle([0, 1, 0, 0])),
    "a slice": lambda: moving(itertools.islice([0, 1] * 50, 90)),
    "an accumulation": lambda: moving(itertools.accumulate([0, 1] * 50)),
    "a map": lambda: moving(map(float, [0, 1] * 50)),
    "a weak reference": behind_a_weak_reference,
    "a weak dictionary": in_a_weak_dictionary,
    "a context variable": in_a_context_variable,
    "a thread's own": on_a_thread,
    "a cache of a function": lambda: Kept(lambda model, x: through(cached_largest, x)),
    "a cache of a method": in_a_cache_of_a_method,
    "an array": lambda: numbers(array.array("d", [0.0] * 4)),
    "an array of C": lambda: numbers((ctypes.c_double * 4)()),
    "an array of numpy": lambda: numbers(np.zeros(4)),
    "a tensor": lambda: numbers(torch.zeros(4)),
    "a deque": lambda: numbers(collections.deque([0.0] * 4)),
    "a text": in_a_text,
    "a gradient": in_a_gradient,
    "a parameter's attribute": on_a_parameter,
    "a parameter's hook": in_a_hook_of_a_parameter,
    "a module's hook": in_a_hook_of_a_module,
    "an operation": in_an_operation,
    "the environment": in_the_environment,
}


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=draw)
    x[:, KIND] = 3 + 3 * torch.rand(count, generator=draw)
    return x, torch.full((count,), 2)


def gradient(make: Callable[[], Kept], x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    clear()
    torch.manual_seed(1)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    found = clipping.clipped_gradients(make(), loss, x, y, C, "naive", mask=mask)
    return torch.cat([value.flatten() for value in found.values()])


def test_the_made_up_record_is_of_another_kind() -> None:
    assert kind(torch.rand(4, generator=torch.Generator().manual_seed(0))) != KIND


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("where", HOSTILE)
def test_what_a_record_leaves_is_refused(where: str, count: int) -> None:
    """It would turn the others: so is the batch, and each neighbour of it."""
    x, y = batch(count)
    mask = torch.arange(count) != count // 2
    for given in ((x, y, None), (x[1:], y[1:], None), (x, y, mask)):
        with pytest.raises(UnsupportedError, match=r"remembers|changes while it runs"):
            gradient(HOSTILE[where], *given)
    clear()


@functools.cache
def positions(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length)


class Ordinary(Kept):
    """Keeps what follows from shapes, and reads settings from everywhere."""

    tables: ClassVar[dict[int, torch.Tensor]] = {}
    settings = types.MappingProxyType({"scale": 0.1})

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.look(x), order=iter([1, 2]), note=io.StringIO("a"), path=(ctypes.c_int * 2)())
        self.parent = weakref.ref(ALIVE[-1] if ALIVE else Ordinary)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def width(self, length: int) -> int:
        return 2 * length

    def look(self, x: torch.Tensor) -> float:
        length = x.shape[1]
        self.tables.setdefault(length, torch.ones(length))
        known = os.environ.get("HOME", "") + sys.platform + self.note.getvalue()
        return float(positions(length).mean()) + self.settings["scale"] * self.width(length) + 0 * len(known)


def test_what_follows_from_shapes_may_be_kept() -> None:
    positions.cache_clear()
    Ordinary.tables.clear()
    x, y = batch(4)
    whole = gradient(Ordinary, x, y)
    without = gradient(Ordinary, x[1:], y[1:])
    assert float((whole - without).norm()) <= C * (1 + 1e-6)
    x = torch.cat([x, x[:, :0]], 1)
    assert torch.equal(gradient(Ordinary, x, y), whole)
