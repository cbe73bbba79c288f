"""Where the examples are in what a module sees: found by running a model on two and on three examples, and comparing shapes.

A dimension that grows with the examples, by one row each, holds them. One that stays the same does not, whatever its size happens
to be in some batch. One that grows by several rows for each (windows, tokens) holds as many of every example, one example after
another, as far as shapes tell; that it is so is proved in each pass (:mod:`lipdp.clipping.follow`), and where it is not, a larger
module is taken. Nobody goes by shapes behind an operation that chooses (:mod:`lipdp.clipping.looking`). So a layer is

* ordinary: dimension 0 of its tensors holds the examples; or dimension 1 does (length first);
* shared: it sees no example at all and gives a tensor of one row, (1, …), that every example uses: a table of positions. Its
  output is repeated for each example, and so has a cotangent for each;
* or neither: then its parameters' gradients are those of the smallest module around it for which this is so. That one is
  evaluated again for each example (:mod:`lipdp.clipping.fallback`).

Whatever is found here is only used where the self-check (:mod:`lipdp.clipping.verify`) finds each example's gradient to be that
of the example alone. Where it does not, the next larger module is tried.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lipdp.errors import UnsupportedError
from lipdp.inputs import Inputs, named_leaves


@dataclass(frozen=True)
class Place:
    """Examples lie in dimension ``dim``, ``runs`` rows for each of them."""

    dim: int
    runs: int

    def fits(self, tensor: torch.Tensor, batch: int) -> bool:
        """Whether a tensor can be laid out so, with this many examples."""
        return 0 <= self.dim < tensor.ndim and tensor.shape[self.dim] == self.runs * batch

    def by_example(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """(batch, …) with what the module would get for one example alone behind it."""
        shape = (*tensor.shape[: self.dim], batch, self.runs, *tensor.shape[self.dim + 1 :])
        return tensor.reshape(shape).movedim(self.dim, 0)


class HiddenGradientError(UnsupportedError):
    """Some parameters' gradients are not what their layers show, or can't be told there; a larger module may show them.

    Attributes:
        parameters: these parameters.
    """

    def __init__(self, message: str, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(message)
        self.parameters = tuple(parameters)


class UnseenLayerError(HiddenGradientError):
    """A layer is called that nobody called when the model was looked at: where its examples are is not known."""


FIRST, SECOND = Place(0, 1), Place(1, 1)
ODD = Place(-1, 0)  # it changes with the examples, and not as they do: tokens that some layer has chosen


Where = Place | torch.Size
"""Where the examples are in a tensor; a size: they are nowhere in it, and it always has this one."""


@dataclass(frozen=True)
class Call:
    """One call of a module: where the examples are in each tensor of its arguments and of its output."""

    inputs: tuple[Where, ...]
    outputs: tuple[Where, ...]

    def fits(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], batch: int) -> bool:
        """Whether these tensors can be those of such a call."""
        if len(inputs) != len(self.inputs) or len(outputs) != len(self.outputs):
            return False
        for where, part in zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True):
            if not (where.fits(part, batch) if isinstance(where, Place) else part.shape == where):
                return False
        return True

    @cached_property
    def sees_examples(self) -> bool:
        """Whether an argument holds some."""
        return any(isinstance(where, Place) for where in self.inputs)

    @cached_property
    def rows_for_all(self) -> bool:
        """Whether some output is one row, (1, …), that all examples use."""
        return any(not isinstance(where, Place) and where[:1] == (1,) for where in self.outputs)

    @cached_property
    def shared(self) -> bool:
        """Whether it sees no example, and gives nothing but rows that all use."""
        return not self.sees_examples and bool(self.outputs) and all(where[:1] == (1,) for where in _sizes(self.outputs))

    @cached_property
    def replays(self) -> bool:
        """Whether it can be evaluated for one example at a time: every output has a part for each, or is a row that all use."""
        if ODD in (*self.inputs, *self.outputs) or not self.outputs:
            return False
        return self.shared or (self.sees_examples and all(w[:1] == (1,) for w in self.outputs if not isinstance(w, Place)))

    def doubted(self) -> Call:
        """The same, where no dimension is believed to hold the examples."""
        sides = ((ODD if isinstance(where, Place) else where for where in side) for side in (self.inputs, self.outputs))
        return Call(*map(tuple, sides))

    @cached_property
    def place(self) -> Place | None:
        """Where the examples are, if they are at the same place in all its tensors."""
        places = {*self.inputs, *self.outputs}
        first = next(iter(places), None)
        return first if len(places) == 1 and isinstance(first, Place) else None


def _sizes(wheres: tuple[Where, ...]) -> Iterator[tuple[int, ...]]:
    """Sizes of those without examples; (0,) for the others, which is none that all could use."""
    return ((0,) if isinstance(where, Place) else tuple(where) for where in wheres)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors among arguments or outputs, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def numbers_in(value: Any) -> list[torch.Tensor]:
    """Those that may carry a gradient."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [leaf for leaf in tensors_in(value) if leaf.is_floating_point()]


@dataclass
class Layouts:
    """What is known of a model's modules.

    Attributes:
        calls: the different calls of each, by name.
        repeated: names of modules whose rows for all examples may be repeated for each of them, with the same result.
        risen: by layer: how many modules around it would do, and did not.
        spread: by module: how its own parameters are given to each example (:mod:`lipdp.clipping.handed`).
        handed: modules whose uses of their own parameters show the gradients (:mod:`lipdp.clipping.handed`).
        answering: whether questions about all of a batch may be answered the same for every batch
            (:class:`lipdp.clipping.follow.Following`).
        answered: whether that was done.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    risen: dict[str, int] = field(default_factory=dict)
    spread: dict[str, dict[str, int]] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)
    answering: bool = True
    answered: bool = False

    def find(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, batch: int) -> Call | None:
        """The call that these arguments and this output are one of."""
        simple = not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)
        given, made = list(args) if simple else tensors_in((args, kwargs)), numbers_in(output)
        for known in self.calls.get(name, ()):
            if known.fits(given, made, batch):
                return known
        return None

    def has_not_seen(self, name: str) -> bool:
        """Whether the model was looked at, and this module was not called."""
        return bool(self.calls) and name not in self.calls

    def is_ordinary(self, name: str) -> bool:
        """Whether a norm rule can be used: in every call the examples are first, or second, or it is shared."""
        calls, repeated = self.calls.get(name, ()), name in self.repeated
        return all((known.shared and repeated) or (known.place is not None and _usual(known.place)) for known in calls)

    def is_regular(self, name: str) -> bool:
        """Whether nothing that it sees or gives changes with the contents, or otherwise than the examples do."""
        calls = self.calls.get(name, ())
        return bool(calls) and not any(ODD in (*known.inputs, *known.outputs) for known in calls)

    def can_replay(self, name: str) -> bool:
        """Whether the module can be evaluated for one example at a time, in every call."""
        calls, repeated = self.calls.get(name, ()), name in self.repeated
        return bool(calls) and all(known.replays and (repeated or not known.rows_for_all) for known in calls)


def _usual(place: Place) -> bool:
    return place.dim == 0 or place == SECOND


_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, Layouts]] = weakref.WeakKeyDictionary()
_looks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def generation(model: torch.nn.Module) -> int:
    """A number that grows whenever something else is known of the model: what was verified before rested on other layouts."""
    return _looks.get(model, 0)


def renew(model: torch.nn.Module) -> None:
    """From now on other layouts are used for this model."""
    _looks[model] = generation(model) + 1


def _kind(x: Inputs) -> Hashable:
    return x.shape[1:] if isinstance(x, torch.Tensor) else tuple((name, tuple(leaf.shape[1:])) for name, leaf in named_leaves(x))


def know(model: torch.nn.Module, x: Inputs, found: Layouts) -> None:
    """This is known of the model from now on, for data of this kind."""
    _known.setdefault(model, {})[_kind(x)] = found
    renew(model)


def layouts_of(model: torch.nn.Module, x: Inputs) -> Layouts | None:
    """What :func:`look_at` found for data of this kind, if it has looked."""
    return _known.get(model, {}).get(_kind(x))


def configs_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """The settings that modules hold as their ``config``, each once."""
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return tuple(config for config in configs.values() if config is not None)


@contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Decoders that keep keys and values for the next token (``config.use_cache``) don't: a layer could not be evaluated twice."""
    keeping = [config for config in configs if getattr(config, "use_cache", None) is True]
    try:
        for config in keeping:
            config.use_cache = False
        yield
    finally:
        for config in keeping:
            config.use_cache = True
