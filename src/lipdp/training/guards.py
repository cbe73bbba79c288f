"""Ways around the engine, closed: steps of the optimiser that no engine takes, and batches that are used twice.

And signals that ask a run to end: it finishes its step first.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lipdp.errors import ConfigurationError, LipdpWarning
from lipdp.inputs import leaves, plain

# --- the optimiser ----------------------------------------------------------------------------------------------------


class Held:
    """Some parameters and their optimiser, of which only :meth:`step` lets steps through.

    An ordinary ``loss.backward(); optimizer.step()`` on private batches would train without noise and cost nothing. So while
    somebody holds them, any optimiser over any of the parameters refuses to step. It ends with :meth:`release`, or with the object.
    """

    def __init__(self, parameters: Iterator[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = {id(p): p for p in parameters}
        self._optimizer = optimizer
        self.hold()

    def hold(self) -> None:
        """Hold them, again after :meth:`release`."""
        _held.add(self)
        if not _hook:
            _hook.append(register_optimizer_step_pre_hook(_refuse))

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimiser trains what is held."""
        if optimizer is self._optimizer:
            return True
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimiser, and of those that it calls.

        That it is under way is read off the stack: there is nothing that an interrupt could leave open behind it.
        """
        optimizer.step()

    def release(self) -> None:
        """Let the parameters go."""
        _held.discard(self)
        _unhook_if_idle()

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        import copy

        return Held(iter(copy.deepcopy(list(self._parameters.values()), memo)), copy.deepcopy(self._optimizer, memo))


_held: weakref.WeakSet[Held] = weakref.WeakSet()
_hook: list[Any] = []


def _unhook_if_idle() -> None:
    if _hook and not _held:
        _hook.pop().remove()


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Held.step.__code__:
            return
        frame = frame.f_back
    if any(held.concerns(optimizer) for held in list(_held)):
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() was called on parameters that a PrivacyEngine trains: such a step has no noise and "
            "is not accounted for. Call engine.step(*batch). To train on public data before or after the private run, call "
            "engine.close() first, or make the engine later."
        )
    _unhook_if_idle()


def is_guard(hook: object) -> bool:
    """Whether it is the hook that refuses steps, and nobody else's."""
    return hook is _refuse


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class _Drawn:
    """A batch that an engine has drawn, or the numbers of its records, by the memory that it lies in: views are the same batch."""

    memory: tuple[Any, ...]
    owner: str
    number: int
    rows: int
    strides: set[tuple[int, int]]
    used: bool = False

    def lies_in(self, memory: int) -> bool:
        """Whether this is its number still: that may be another tensor's by now."""
        for ref in self.memory:
            if ref.cdata == memory:
                return not ref.expired()
        return False


OWN = "own"
"""Said in the place of a batch's name: these records were drawn by the caller, who answers for how."""
_batches: dict[int, _Drawn] = {}
_MANY = 256
_noting = threading.RLock()  # batches may be fetched by several threads
_look_at = _MANY  # at so many of them it is looked at which are gone
_weak: Any = reductions.StorageWeakRef  # it is what torch's own queues know a tensor's memory by


def note_batch(batch: Any, owner: str, number: int) -> None:
    """Remember that ``owner`` drew this batch, or these numbers of records, as its ``number``."""
    global _look_at
    parts = leaves(batch)
    storages = [part.untyped_storage() for part in parts]
    strides = {(storage._cdata, part.stride(0)) for storage, part in zip(storages, parts, strict=True)}
    drawn = _Drawn(tuple(_weak(storage) for storage in storages), owner, number, len(parts[-1]), strides)
    with _noting:
        if len(_batches) > _look_at:
            for memory in [memory for memory, other in _batches.items() if all(part.expired() for part in other.memory)]:
                del _batches[memory]
            _look_at = max(_MANY, 2 * len(_batches))  # somebody may keep all of them
        for storage in storages:
            _batches[storage._cdata] = drawn


def claim_batch(parts: tuple[Any, torch.Tensor], owner: str, sample: Any = None) -> int | None:
    """The number of the batch that these records are, by their memory or by what ``sample`` says; ``None``: nobody knows.

    Refused: batches that were used, that are not this owner's, that are two, or a part of one.
    """
    if isinstance(sample, str) and sample != OWN:
        raise ConfigurationError(f"sample={sample!r}: a batch of engine.batches, numbers of engine.samples, or 'own'")
    found = _known(parts)
    drawn = [one for _, one in found if one is not None]
    if not isinstance(sample, str | None):
        sample = sample if isinstance(sample, torch.Tensor) else plain(sample)
        named = [one for _, one in _known(sample) if one is not None]
        if len(named) < max(1, len(leaves(sample))):
            raise ConfigurationError(
                "sample is no batch of engine.batches, nor a tensor of engine.samples: pass the very object that they gave."
            )
        drawn += named
    for one in drawn:
        if one.used:
            raise ConfigurationError(
                "this batch was used in a step before. A batch is for one step: two steps on one sample are not what was accounted "
                "for. Take the next one of engine.batches(train)."
            )
        if one.owner != owner:
            raise ConfigurationError(
                "this batch was drawn by another engine, whose sampling and secret are not this one's. Take batches of "
                "engine.batches(train) of the same engine."
            )
        if one.number != drawn[0].number:
            raise ConfigurationError(
                f"these are parts of two batches, number {drawn[0].number} and number {one.number} of this run: a record that is "
                "in both would move two rows of the sum. Pass inputs and targets as one batch of engine.batches(train) gives them."
            )
    are_rows = True
    for part, known in found:  # a view that is expanded has one record in several rows
        if known is not None and len(part) > 1:
            are_rows = are_rows and (part.untyped_storage()._cdata, part.stride(0)) in known.strides
    if drawn and (len(parts[1]) not in (0, drawn[0].rows) or not are_rows):
        raise ConfigurationError(
            f"this batch was drawn with another number of records than the {len(parts[1])} that are passed, or with others in its "
            "rows. Which ones are left out, or are in it twice, would depend on the others: one record more would move several "
            "rows of the sum. Pass all of them, once."
        )
    return drawn[0].number if drawn else None


def tell_of_own_records() -> None:
    """Say once what a step rests on whose records are no batch that an engine has drawn."""
    warnings.warn(
        "these records are not a batch as this engine has drawn it, so nobody but you knows how they were: the guarantee holds if "
        "each step has a sample of its own, drawn as the plan's sampling says (a shuffled DataLoader's are not). Take batches of "
        "engine.batches(train), which step moves and converts by itself. What you make of one record by record (.to, .clone): "
        "engine.step(inputs, targets, sample=batch); gathered by engine.samples(train): sample=numbers; drawn by yourself: "
        "sample='own'.",
        LipdpWarning,
        stacklevel=4,
    )


def spend_batch(parts: tuple[Any, Any], sample: Any = None) -> None:
    """From now on the batch is used."""
    for _, drawn in [*_known(parts), *([] if isinstance(sample, str | None) else _known(sample))]:
        if drawn is not None:
            drawn.used = True


def spend_all(owner: str, number: int | None = None) -> None:
    """From now on all batches that ``owner`` has drawn are used, or the one of this number."""
    with _noting:
        for drawn in _batches.values():
            drawn.used = drawn.used or (drawn.owner == owner and number in (None, drawn.number))


def _known(parts: Any) -> list[tuple[Any, _Drawn | None]]:
    """Each tensor of it, with what it was drawn as."""
    known: list[tuple[Any, _Drawn | None]] = []
    for part in leaves(parts):
        drawn = None
        if isinstance(part, torch.Tensor):
            memory = part.untyped_storage()._cdata
            drawn = _batches.get(memory)
            drawn = drawn if drawn is not None and drawn.lies_in(memory) else None
        known.append((part, drawn))
    return known


_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupts:
    """Within its block the first SIGINT or SIGTERM is only noted; a second one does what it always did.

    Only in the main thread, where Python has its handlers. A handler of somebody's own, and a signal that is ignored, stay as they
    are.

    Attributes:
        received: the signal, once there was one.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, usual in _USUAL.items():
                if signal.getsignal(number) == usual:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self.received = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Undoing:
    """What is to be undone when a work ends, whatever ends it::

        undoing = Undoing()
        try:
            with undoing:
                undoing.add(restore)
                ...
        except BaseException:
            undoing.finish()
            raise

    The block alone is not enough: a Ctrl-C may arrive in its ``__exit__``, before that has done anything, and what is cleaned up
    when an error is forgotten may wait for as long as somebody looks at the error. What was undone is not undone again.
    """

    def __init__(self) -> None:
        self._left: list[tuple[Callable[[], object], bool]] = []

    def add(self, undo: Callable[[], object], *, only_after_errors: bool = False) -> None:
        """Call ``undo`` at the end, before what was added earlier; where the block ends well, not if ``only_after_errors``."""
        self._left.append((undo, only_after_errors))

    def finish(self) -> None:
        """Undo what is left of it."""
        while self._left:
            self._left[-1][0]()
            self._left.pop()

    def __enter__(self) -> Undoing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._left = [(undo, only_after_errors) for undo, only_after_errors in self._left if not only_after_errors]
        self.finish()
