"""Looks at a model: where are the examples in what each of its modules sees? (:mod:`lipdp.clipping.layouts`)

It is run on two and on three examples, and on others with other contents, and shapes are compared.

Tokens that a model chooses by their contents (``x[mask]``, ``nonzero``): as many as there are examples, in one batch, by chance.

Shapes can't tell them from a batch, whatever contents are tried. The operations can: those whose output has a size that depends on
values carry a tag in torch. What is called after such an operation, inside the module that it stands in, is not believed to have
examples in any dimension. That module is evaluated again for each example, in every step, and its outputs are compared. Where it
has no trained layer behind the operation, what it gives is used outside: the same then holds for the module around it.

A size may also come from values that Python has read (``tolist``, ``int``). What was read for what is not to be told: many models
look whether a mask is full. Such a model is looked at with more contents (:func:`look_at`), so that sizes which
follow them show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lipdp.clipping.handed import Handing, Spreading, spreadable
from lipdp.clipping.layouts import (
    ODD,
    Call,
    Layouts,
    Place,
    Where,
    configs_of,
    know,
    layouts_of,
    numbers_in,
    tensors_in,
    without_caches,
)
from lipdp.inputs import Inputs, call, leaves, mapped, rows_of, select

_SIZES = (2, 3)
_CONTENTS = 3  # other contents that shapes are looked at with: moved ones
_DRAWN, _DRAWN_IF_READ = 1, 8  # and such that are drawn anew: more where Python has read values, and sizes may follow them


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
    know(model, x, found)
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
        return ODD
    for dim, (a, b) in enumerate(zip(few, more, strict=True)):
        if a != b:
            runs = b - a
            return Place(dim, runs) if (a, b) == (_SIZES[0] * runs, _SIZES[1] * runs) else ODD
    return few


# Tokens that are chosen ------------------------------------------------------------------------------------------------


def _chooses(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of its output depends on values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:
        return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    return True


class _Readings(TorchFunctionMode):
    """Whether all values of a tensor are read at once: a number by itself is an operation, which others see."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.any |= func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
        return func(*args, **(kwargs or {}))


class Suspects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, a model is run, and modules are noted that are called after tokens were chosen.

    Attributes:
        names: these modules.
        choosing: those that tokens were chosen in.
        read: whether Python has read values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.choosing: set[str] = set()
        self.read = False
        self._modules = dict(model.named_modules())
        self._trained = {name: any(p.requires_grad for p in module.parameters()) for name, module in self._modules.items()}
        self._stack: list[str] = []
        self._since: list[bool] = []  # whether tokens were chosen in each of these modules, and are about
        self._doubted: list[bool] = []  # whether a trained module was called in each of them since then

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._stack and _chooses(func, args):
            self._since[-1] = True
        self.read |= torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, it is known which module is being run."""
        handles = []
        for name, module in self._modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
                handles.append(module.register_forward_hook(self._leave, prepend=True))
        readings = _Readings()
        try:
            with readings, self:
                yield
        finally:
            self.read |= readings.any
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            if any(self._since):
                self.names.add(name)
            for level, since in enumerate(self._since):
                self._doubted[level] |= since and self._trained[name]
            self._stack.append(name)
            self._since.append(False)
            self._doubted.append(False)

        return hook

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name, chosen, doubted = self._stack.pop(), self._since.pop(), self._doubted.pop()
        if chosen:
            self.choosing.add(name)
        if chosen and not doubted and self._since:
            self._since[-1] = True  # what it has chosen is used outside
