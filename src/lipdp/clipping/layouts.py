"""Where the examples are in what a module sees: found by running a model on two and on three examples, and comparing shapes.

A dimension that grows with the examples, by one row each, holds them. One that stays the same does not, whatever its size happens
to be in some batch. One that grows by several rows for each (windows, tokens) holds as many of every example, one example after
another, as far as shapes tell; that it is so is proved in each pass (:mod:`lipdp.clipping.follow`), and where it is not, a larger
module is taken. Nobody goes by shapes behind an operation that chooses (:mod:`lipdp.clipping.chosen`). So a layer is

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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lipdp.clipping.chosen import Suspects
from lipdp.clipping.handed import Handing, Spreading, spreadable
from lipdp.errors import UnsupportedError
from lipdp.inputs import Inputs, call, leaves, mapped, named_leaves, rows_of, select

__all__ = [
    "FIRST",
    "SECOND",
    "Call",
    "HiddenGradientError",
    "Layouts",
    "Place",
    "UnseenLayerError",
    "Where",
    "configs_of",
    "generation",
    "is_mask",
    "layouts_of",
    "look_at",
    "one_place_less",
    "renew",
    "without_caches",
]

_SIZES = (2, 3)
_CONTENTS = 3  # other contents that shapes are looked at with: moved ones
_DRAWN, _DRAWN_IF_READ = 1, 8  # and such that are drawn anew: more where Python has read values, and sizes may follow them


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
_ODD = Place(-1, 0)  # it changes with the examples, and not as they do: tokens that some layer has chosen


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
        if _ODD in (*self.inputs, *self.outputs) or not self.outputs:
            return False
        return self.shared or (self.sees_examples and all(w[:1] == (1,) for w in self.outputs if not isinstance(w, Place)))

    def doubted(self) -> Call:
        """The same, where no dimension is believed to hold the examples."""
        sides = ((_ODD if isinstance(where, Place) else where for where in side) for side in (self.inputs, self.outputs))
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
        return bool(calls) and not any(_ODD in (*known.inputs, *known.outputs) for known in calls)

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


def layouts_of(model: torch.nn.Module, x: Inputs) -> Layouts | None:
    """What :func:`look_at` found for data of this kind, if it has looked."""
    return _known.get(model, {}).get(_kind(x))


def look_at(model: torch.nn.Module, x: Inputs) -> Layouts:
    """Run the model on two and on three of these examples (repeated, where there are fewer), and see where they are.

    A model that can't be run on so many leaves nothing known: then dimension 0 holds the examples, or it is refused.
    """
    rows = rows_of(x)
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), without_caches(configs_of(model)):
        try:
            model.eval()  # without what is random: layers that are left out, masks of other shapes
            two, three = (select(x, torch.arange(size) % rows) for size in _SIZES)
            suspects = Suspects(model)
            with suspects.watching():
                few, more = _calls(model, two), _calls(model, three)
            contents_of = _others(three, _DRAWN_IF_READ if suspects.read else _DRAWN)
            seen_of = [(other, seen) for other in contents_of if (seen := _tried(model, other))]
            others = [seen for _, seen in seen_of]
            found = Layouts({name: _compared(few[name], more[name], others, name) for name in few.keys() & more.keys()})
            found.calls.update(_in_training_only(model, modes, (two, three), few))
            found.calls.update({name: [known.doubted() for known in found.calls.get(name, ())] for name in suspects.names})
            found.repeated = _repeated(model, three, found)
            contents = [two, three, *(other for other, _ in seen_of)]
            regular = {n for n in few if found.is_regular(n) and n not in suspects.choosing}
            found.handed = _handed(model, (two, three), regular)
            found.spread = _spread(model, contents, regular - found.handed)
        except _FAILS:
            found = Layouts()
        finally:
            for module, mode in modes:
                module.training = mode
    before = layouts_of(model, x)
    if before is not None and all(getattr(before, part) == getattr(found, part) for part in _FOUND):
        return before  # with all that has risen since
    _known.setdefault(model, {})[_kind(x)] = found
    renew(model)
    return found


def _in_training_only(
    model: torch.nn.Module, modes: Sequence[tuple[torch.nn.Module, bool]], sizes: Sequence[Inputs], seen: Mapping[str, Any]
) -> dict[str, list[Call]]:
    """Calls of modules that are not called in evaluation mode (a second head, say)."""
    missing = any(
        name not in seen and any(True for _ in module.parameters(recurse=False)) for name, module in model.named_modules()
    )
    if not missing or not any(training for _, training in modes):
        return {}
    for module, training in modes:
        module.training = training
    few, more = (_tried(model, x) for x in sizes)
    model.eval()
    return {name: _compared(few[name], more[name], (), name) for name in few.keys() & more.keys() if name not in seen}


_FOUND = "calls", "repeated", "spread", "handed"
_FAILS = RuntimeError, ValueError, IndexError, TypeError, NotImplementedError


def _repeated(model: torch.nn.Module, x: Inputs, found: Layouts) -> set[str]:
    """Modules whose rows for all examples, (1, …), can be repeated for each without changing what the model computes: tried."""
    names = [
        name
        for name, module in model.named_modules()
        if any(known.rows_for_all for known in found.calls.get(name, ())) and any(p.requires_grad for p in module.parameters())
    ]
    if not names:
        return set()
    expected = _outputs(model, x)
    return {name for name in names if _same_with(model, x, name, found.calls[name], expected)}


def _handed(model: torch.nn.Module, sizes: Sequence[Inputs], regular: Set[str]) -> set[str]:
    """Modules whose own parameters' gradients can be told from their uses in torch's functions."""
    handing = Handing({name: module for name, module in spreadable(model).items() if name in regular})
    try:
        for x in sizes if handing.modules else ():
            with handing.looking(rows_of(x)):
                call(model, x)
    except Exception:  # whatever it raises, some module can't be given stand-ins
        return set()
    return handing.fitting()


def _spread(model: torch.nn.Module, contents: Sequence[Inputs], regular: Set[str]) -> dict[str, dict[str, int]]:
    """How modules' own parameters can be given to each example, where all that they see has a place for each."""
    candidates = {name: module for name, module in spreadable(model).items() if name in regular}
    spreading = Spreading(candidates)
    for x in contents if candidates else ():
        with spreading.looking(rows_of(x)):
            call(model, x)
    return spreading.fitting()


def _outputs(model: torch.nn.Module, x: Inputs) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return numbers_in(call(model, x))


def _same_with(model: torch.nn.Module, x: Inputs, name: str, calls: list[Call], expected: list[torch.Tensor]) -> bool:
    batch = rows_of(x)

    def repeat(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        known = next((one for one in calls if one.fits(tensors_in((args, kwargs)), numbers_in(output), batch)), None)
        if known is None:
            return None
        wheres = iter(known.outputs)
        leaves, structure = tree_flatten(output)
        return tree_unflatten([repeated_row(leaf, wheres, batch) for leaf in leaves], structure)

    handle = model.get_submodule(name).register_forward_hook(repeat, with_kwargs=True, prepend=True)
    try:
        outputs = _outputs(model, x)
    except _FAILS:
        return False
    finally:
        handle.remove()
    same = [a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(outputs, expected, strict=False)]
    return len(outputs) == len(expected) and all(same)


def repeated_row(leaf: Any, wheres: Iterator[Where], batch: int) -> Any:
    """A leaf of an output; if it is one row for all examples, that row for each of them."""
    if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
        return leaf
    return leaf if isinstance(next(wheres), Place) else leaf.expand(batch, *leaf.shape[1:]).clone()


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


_Seen = tuple[list[torch.Size], list[torch.Size]]


def _calls(model: torch.nn.Module, x: Inputs) -> dict[str, list[_Seen]]:
    """Shapes of arguments and outputs of every call of every module."""
    seen: dict[str, list[_Seen]] = {}

    def hook_of(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes = [part.shape for part in tensors_in((args, kwargs))], [part.shape for part in numbers_in(output)]
            seen.setdefault(name, []).append(shapes)

        return hook

    handles = [
        module.register_forward_hook(hook_of(name), with_kwargs=True, prepend=True)
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        call(model, x)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _others(x: Inputs, drawings: int) -> Iterator[Inputs]:
    """As many examples with other contents: their numbers in other places, in two ways; of masks one place less for some."""

    def elsewhere(seed: int) -> Inputs:
        draw = torch.Generator().manual_seed(seed)

        def other(leaf: torch.Tensor) -> torch.Tensor:
            if is_mask(leaf):
                return leaf
            order = torch.randperm(leaf.numel(), generator=draw).to(leaf.device)
            moved = leaf.reshape(-1)[order].reshape(leaf.shape)
            return -moved if leaf.is_floating_point() and seed % 2 else moved

        changed: Inputs = mapped(other, x)
        return changed

    def shorter(leaf: torch.Tensor) -> torch.Tensor:
        cut = one_place_less(leaf)
        cut[1::2] = leaf[1::2]
        return cut

    def others(leaf: torch.Tensor) -> torch.Tensor:
        """Every number one of the leaf's, drawn anew, so that more or fewer of them are large; in the first row the largest."""
        if is_mask(leaf) or not leaf.numel():
            return leaf
        numbers = leaf.reshape(-1)
        drawn = numbers[torch.randint(len(numbers), (len(numbers),), generator=draw).to(leaf.device)].reshape(leaf.shape)
        drawn[0] = numbers[numbers.abs().argmax()]
        return drawn

    yield from map(elsewhere, range(_CONTENTS))
    draw = torch.Generator().manual_seed(_CONTENTS)
    yield from (mapped(others, x) for _ in range(drawings))
    if any(is_mask(leaf) for leaf in leaves(x)):
        yield mapped(shorter, x)


def one_place_less(mask: torch.Tensor) -> torch.Tensor:
    """A mask without the last place of each example that has several; anything else as it is."""
    cut = mask.clone()
    if is_mask(mask):
        rows = cut.reshape(len(cut), -1)
        places = torch.arange(rows.shape[1], device=mask.device)
        last = torch.where(rows != 0, places, -1).amax(1)
        several = (rows != 0).sum(1) > 1
        rows[several, last[several]] = 0
        cut = rows.reshape(mask.shape)
    return cut


def is_mask(leaf: torch.Tensor) -> bool:
    """Whole numbers of 0 and 1, several for each example."""
    if leaf.is_floating_point() or leaf.is_complex() or leaf.ndim < 2 or not leaf.numel():
        return False
    return leaf.dtype == torch.bool or int(leaf.max()) <= 1


def _tried(model: torch.nn.Module, x: Inputs) -> dict[str, list[_Seen]]:
    """:func:`_calls`; nothing where the model does not take such contents."""
    try:
        return _calls(model, x)
    except _FAILS:
        return {}


def _compared(few: list[_Seen], more: list[_Seen], others: Sequence[Mapping[str, list[_Seen]]], name: str) -> list[Call]:
    """The different calls of a module; none is known where two runs do not call it alike (a mask that is left out, say).

    ``others``: calls with as many examples as the second run, of other contents. A tensor whose shape follows the contents (tokens
    that some layer has chosen) is no place to tell examples apart by.
    """
    if len(few) != len(more):
        return []
    calls: list[Call] = []
    for number, ((inputs, outputs), (more_inputs, more_outputs)) in enumerate(zip(few, more, strict=True)):
        if len(inputs) != len(more_inputs) or len(outputs) != len(more_outputs):
            return []
        alike = [seen[name][number] for seen in others if len(seen.get(name, ())) == len(more)]
        steady = all(seen == (more_inputs, more_outputs) for seen in alike) and len(alike) == len(others)
        wheres = tuple(map(_where, inputs, more_inputs)), tuple(map(_where, outputs, more_outputs))
        made = Call(*wheres) if steady else Call(*wheres).doubted()
        if made not in calls:
            calls.append(made)
    return calls


def _where(few: torch.Size, more: torch.Size) -> Where:
    """The first dimension that grows as the examples do."""
    if len(few) != len(more):
        return _ODD
    for dim, (a, b) in enumerate(zip(few, more, strict=True)):
        if a != b:
            runs = b - a
            return Place(dim, runs) if (a, b) == (_SIZES[0] * runs, _SIZES[1] * runs) else _ODD
    return few
