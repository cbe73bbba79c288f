"""Whose numbers are these? Every operation of a pass is followed, from the batch to the losses.

Clipping is right if what it calls the gradient of a record depends on that record alone. Checks on some batches can't show that for
the next one: a model may mix its records only where a pixel is above 50. So it is not checked, it is followed: while the model and
the loss run, in every pass, each memory that depends on the batch has a map from addresses to records. With B records,

    record(address) = ((address - start) // unit) mod B,        in bytes.

Views and writes in place need no rule: they are the same memory, and where a tensor has its records follows from its strides. Any
other operation has a rule (:mod:`lipdp.clipping.follow_rules`) that says where the records of its result are, or that it has
mixed them. Elementwise operations, products with weights, normalisations of a record: kept apart. A sum over the batch, a sort of
it, a product of records with records: mixed, whatever the numbers are. An operation without a rule is mixing.

A memory that nobody has seen being made is no constant. Known are those that were there before the pass (what the model and the
loss lead to: :func:`known_before`), and those that operations of this pass, or of an earlier one, have made of nothing or of
constants. Any other came past the operations (from another thread, by DLPack, from numpy): whose it is can't be told.

Only operations of the thread that runs the pass are seen. A number that another one has read is no operation's, so no other may run
meanwhile (:mod:`lipdp.clipping.beside`). A memory that can be read without an operation, because its storage or its address was
handed out in the pass, must not come to hold a record's numbers.

What leaves the tensors (``item``, ``tolist``, ``if x.max() > 3``, the size of ``nonzero``) decides what is done with the others:
that is noted too (:attr:`Following.reads`).

Let every operation keep its records apart, in the pass that was made. Then record i's loss is a function of record i (and of
weights, random numbers, settings) alone; the backward pass, which goes back through the same operations, gives to row i of whatever
was declared to be the records' (:meth:`Following.declare`) what record i alone determines. That is all that clipping needs, and it
holds in each pass by itself: nothing is concluded from one batch for another.
"""

from __future__ import annotations

import functools
import gc
import sys
import types as kinds
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipdp.clipping.beside import BESIDE, Beside, on_fork
from lipdp.clipping.follow_rules import TAKEN_OUT, At, Call, Mixed, Rule, State, rule_of
from lipdp.clipping.kept import names_of
from lipdp.clipping.past import NotApartError, Readings, Reason, asks_for_a_shortcut, hands_out, is_lifted, line
from lipdp.errors import UnsupportedError
from lipdp.fingerprint import reachable_tensors
from lipdp.inputs import Inputs, leaves, rows_of

__all__ = [
    "ATTEMPTS",
    "TAKEN_OUT",
    "UNKNOWN",
    "At",
    "Following",
    "Mixed",
    "NotApartError",
    "Reason",
    "distrust",
    "follow",
    "known_before",
    "rows_first",
]


class _Memory(NamedTuple):
    """Whose the numbers at an address are, in bytes."""

    start: int
    unit: int


_Form = tuple[torch.Size, tuple[int, ...], int, int]
"""Of a tensor: shape, strides, where it begins in its memory, and bytes of a number."""


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size()


_FUNCTIONS = (kinds.FunctionType, kinds.MethodType, functools.partial, functools._lru_cache_wrapper)


@functools.lru_cache(maxsize=4096)
def _read_map(records: int, whose: _Memory, form: _Form) -> At | None:
    """Where the records are in a tensor of this form; ``None``: in no order."""
    start, unit = whose
    shape, strides, offset, width = form
    turn, (above, within) = records * unit, divmod(offset * width - start, unit)
    found = None
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        step = stride * width
        if size == 1 or step == 0 or step % turn == 0:
            continue
        runs = unit // step if step <= unit else 0
        if found is None and runs and runs * step == unit and size % (records * runs) == 0:
            found = At(dim, runs)
            within += (runs - 1) * step
        else:
            within += (size - 1) * step
    return None if found is None or within >= unit or above % records else found


@functools.lru_cache(maxsize=4096)
def _map(records: int, at: At, form: _Form, exact: bool) -> _Memory | str:
    """The memory of a tensor of this form that has its records there; or why there is none."""
    _, strides, offset, width = form
    unit = at.runs * strides[at.dim] * width
    if unit == 0:
        return "one memory for all records"
    whose = _Memory(offset * width if exact else offset * width - offset * width % unit, unit)
    return whose if _read_map(records, whose, form) == at else "records that overlap in memory"


class _Entry(NamedTuple):
    """A memory; as long as ``alive`` is held, no other memory has its key.

    ``whose`` is ``None`` for nobody's; then ``made`` is the tensor that it was made as.
    """

    alive: StorageWeakRef | torch.UntypedStorage
    whose: _Memory | Mixed | None
    made: weakref.ref[torch.Tensor] | None = None


# How often a pass is made that something else has run beside.
ATTEMPTS = 4
_NUMBERS = {int, float, bool}
_LIFT = torch.ops.aten.lift_fresh.default
_SCALAR = torch.ops.aten._local_scalar_dense.default


class Following(TorchDispatchMode):
    """Within the block, operations on what was declared are followed.

    Attributes:
        records: rows of the batch.
        answering: whether a question if something holds for all of the batch is answered by no, whatever the batch is, and if it
            does for any of it, by yes, where a library asks that is known for shortcuts (for masks that are full): they are not
            taken, and no answer depends on a record. Elsewhere it is a read.
        answered: whether that was done.
        reads: values of the batch that Python has seen, and other things that make a pass more than its operations.
        recomputed: whether something of the pass is computed anew in the backward pass (:meth:`going_back`).
    """

    def __init__(self, records: int, *, answering: bool = True, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records, self.answering, self.answered = records, answering, False
        self.reads: list[Reason] = []
        self.recomputed = False
        self._memories: dict[int, _Entry] = {}
        self._lent: set[int] = set()  # memories that may be read past all operations
        self._bare: set[int] = set()  # memories that may be written to without a version that tells
        self._beside: Beside | None = None
        self._given: set[int] = set()  # the batch itself, which is the caller's to keep
        self._known = [tensor for tensor in known if tensor.layout == torch.strided]
        for key, (made, version) in list(_constants.items()):
            tensor = made()
            if tensor is None or _version(tensor) != version or _key(tensor) != key:
                del _constants[key]
            else:
                self._known.append(tensor)
        self._versions = [_version(tensor) for tensor in self._known]
        self._written: set[int] = set()
        for tensor in self._known:
            storage = tensor.untyped_storage()
            self._memories[storage._cdata] = _Entry(storage, None)
        earlier = Mixed(EARLIER)  # one for all of them: nobody writes to a state
        for key, alive in list(_earlier.items()):
            if alive.expired():  # type: ignore[no-untyped-call]
                del _earlier[key]
            else:
                self._memories[key] = _Entry(alive, earlier)

    # What is known of a tensor -------------------------------------------------------------------------------------------

    def declare(self, tensor: torch.Tensor, at: At, *, given: bool = False) -> None:
        """From here on, these are the records' numbers. ``given``: the batch itself, which is the caller's to keep."""
        if given:
            self._given.add(_key(tensor))
        if tensor.numel() and not (_key(tensor) in self._memories and self.state(tensor) == at):
            self._set(tensor, at, exact=True)

    def state(self, tensor: torch.Tensor) -> State:
        """Where the records are in a tensor; ``None``: it does not depend on the batch."""
        if tensor.layout != torch.strided:
            return Mixed("a tensor without a memory of its own (sparse)", line())
        entry = self._memories.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return Mixed(UNKNOWN, line()) if tensor.numel() else None
        whose = entry.whose
        if whose is None or isinstance(whose, Mixed):
            return whose
        if not tensor.numel():
            return None  # no number at all, whatever the batch is
        found = _read_map(self.records, whose, _form(tensor))
        if found is None:
            return Mixed(TAKEN_OUT, line())
        return found

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether something of the batch may be in a tensor's memory, in entries that it does not have itself too."""
        entry = self._memories.get(_key(tensor)) if tensor.layout == torch.strided else None
        return entry is None or entry.whose is not None

    def lend(self, tensor: torch.Tensor, how: str) -> None:
        """The tensor's memory is handed out: what is in it, or is written to it from here on, can be read past all operations."""
        self._lent.add(_key(tensor))
        if self.shows(tensor):
            self.reads.append(Reason(f"Python sees values of the batch ({how})", line()))

    def bare(self, tensor: torch.Tensor) -> None:
        """The tensor's memory can be written to from here on without a version that tells (``.data``)."""
        if tensor.layout == torch.strided:
            self._bare.add(_key(tensor))

    def _set(self, tensor: torch.Tensor, at: At | Mixed, *, exact: bool = False) -> None:
        if tensor.layout != torch.strided:
            return  # see state
        storage = tensor.untyped_storage()
        whose = at if isinstance(at, Mixed) else _map(self.records, at, _form(tensor), exact)
        if isinstance(whose, str):
            whose = Mixed(whose, line())
        self._memories[storage._cdata] = _Entry(StorageWeakRef(storage), whose)  # type: ignore[no-untyped-call]

    def _nobodys(self, tensor: torch.Tensor) -> None:
        """The tensor was made of nothing that depends on the batch."""
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._memories.setdefault(storage._cdata, _Entry(alive, None, weakref.ref(tensor)))

    def _write(self, tensor: torch.Tensor, state: State) -> None:
        """The tensor was given numbers with this state; its memory may be that of others.

        Numbers of no record change nothing: whose the rest is stays true of them too.
        """
        if state is None:
            return
        entry = self._memories.get(_key(tensor)) if tensor.layout == torch.strided else None
        if tensor.layout == torch.strided and (entry is None or entry.whose is None or _key(tensor) in _earlier):
            self._check_shared(tensor.untyped_storage())
        if tensor.layout == torch.strided and _key(tensor) in self._lent:
            what = "records are written into memory that was handed out, and can be read past all operations"
            self.reads.append(Reason(what, line()))
        before = None if entry is None else self.state(tensor)
        if isinstance(state, Mixed) or entry is None or entry.whose is None:
            self._set(tensor, state)
        elif before != state:
            self._set(tensor, state := Mixed("records written over others", line()))
        if entry is not None and not isinstance(before, Mixed) and (isinstance(state, Mixed) or _key(tensor) in self._bare):
            self._overwritten(before, state)

    def _overwritten(self, before: State, state: State) -> None:
        """A memory has become other records'. What was read of it before, the backward pass reads again: from the same memory.

        Where versions are counted torch sees that; they are not for what is written through ``.data``, or in compiled code.
        """
        if before != state:
            what = state.what if isinstance(state, Mixed) else "records are written past the versions of a tensor (.data)"
            self.reads.append(Reason(f"what the backward pass may need is overwritten: {what}", line()))

    def _check_shared(self, storage: torch.UntypedStorage) -> None:
        """Records are written into a memory that was nobody's: is it also that of others?"""
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for tensor in self._known:
            other = tensor.untyped_storage()
            apart = other.device != storage.device or other.data_ptr() >= end or begin >= other.data_ptr() + other.nbytes()
            if other._cdata != storage._cdata and not apart:
                self._set(tensor, Mixed("records are written into memory that it has too", line()))
        if not storage.resizable():
            self.reads.append(Reason("records are written into memory that others have too (numpy's, say)", line()))

    def _meet(self, tensor: torch.Tensor) -> State:
        """The state of an argument of :meth:`lift_fresh`: numbers of Python's that torch has just copied are nobody's."""
        if tensor.layout == torch.strided and _key(tensor) not in self._memories and is_lifted(self.state) and _is_fresh(tensor):
            self._nobodys(tensor)
        return self.state(tensor)

    # Operations ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, rule = kwargs or {}, rule_of(func)
        args_in_order, states, depends = rule.in_order(args, kwargs) if kwargs else args, list[Any](), False
        for arg in args_in_order:
            state: Any = None
            if isinstance(arg, torch.Tensor):
                state = self.state(arg) if func is not _LIFT else self._meet(arg)
                depends = depends or state is not None
            elif type(arg) in (list, tuple) and not _NUMBERS.issuperset(map(type, arg)):
                state = [self.state(part) if isinstance(part, torch.Tensor) else None for part in arg]
                depends = depends or any(part is not None for part in state)
            states.append(state)
        if depends and self.answering and func is _SCALAR and self._is_shortcut(states[0]):
            self.answered = True
            return states[0].answer
        try:
            output = rule.run(*args, **kwargs)
        except Exception:
            if depends:  # the model may catch it, and so see something of the batch
                self.reads.append(Reason(f"{rule.name} raises for what is in the batch", line()))
            raise
        if depends:
            if _keeping() is not None:
                self._note_keeper()
            self._follow(rule, args_in_order, states, output)
        elif not rule.view:
            self._note_made(output)
        for part in self._written_by(rule, rule.changed, args_in_order) if rule.changed else ():
            if part.layout == torch.strided:
                self._written.add(_key(part))
        return output

    def _note_keeper(self) -> None:
        """Functions keep what the backward pass needs: torch's, which computes it anew, or somebody's."""
        home = str(getattr((_keeping() or (None, None))[1], "__module__", None) or "")
        self.recomputed |= home == "torch.utils.checkpoint"
        if not home.startswith("torch."):
            self.reads.append(Reason("what the backward pass is kept for passes a function of its own", line()))

    @staticmethod
    def _is_shortcut(state: Any) -> bool:
        return isinstance(state, Mixed) and state.answer is not None and asks_for_a_shortcut()

    def _note_made(self, output: Any) -> None:
        for part in output if isinstance(output, list | tuple) else [output]:
            if isinstance(part, torch.Tensor):
                self._nobodys(part)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled: there is nothing to keep it from

    def _follow(self, rule: Rule, args: Sequence[Any], states: list[Any], output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if rule.shows(args, states) or any(map(_tells, outputs)):
            self.reads.append(Reason(f"Python sees what {rule.name} makes of the batch", line()))
        elif not rule.known:  # its numbers need not be all that it gives: sizes, random numbers drawn, what it does by itself
            self.reads.append(Reason(f"{rule.name}, of which nobody has said what it does with a batch", line()))
        if rule.view:
            return
        call = Call(rule, self.records, args, states, output)
        try:
            results = rule.results(call)
        except Exception as error:  # whatever is not understood is not claimed
            mixed = error if isinstance(error, Mixed) else Mixed("what it does with the records is not understood")
            named = mixed.what if mixed.where or mixed.what == TAKEN_OUT else f"{rule.name}: {mixed.what}"
            results = Mixed(named, mixed.where or line())
            if named == TAKEN_OUT and not any(part.numel() for part in outputs):
                self.reads.append(Reason(named, results.where))  # no record by chance
            results.answer = rule.answer(call)
            if rule.name == "sum" and isinstance(output, torch.Tensor) and not output.ndim:
                results.counted = args[0].numel()
        if not isinstance(results, list):
            results = [results] * len(outputs)
        for part, state in zip(outputs, results, strict=True):
            if isinstance(part, torch.Tensor) and part.numel():
                if rule.writes:
                    self._write(part, state)
                elif state is not None:
                    self._set(part, state)
                else:
                    self._nobodys(part)
        for part in self._written_by(rule, rule.written, args):  # in place, and not given back
            if part.numel() and not rule.keeps:
                self._write(part, Mixed(f"{rule.name} writes into it", line()))

    @staticmethod
    def _written_by(rule: Rule, places: Sequence[int], args: Sequence[Any]) -> list[torch.Tensor]:
        """Tensors among the arguments at these places, in lists too."""
        parts = (part for number in places if number < len(args) for part in tree_leaves(args[number]))
        return [part for part in parts if isinstance(part, torch.Tensor)]

    # What follows ---------------------------------------------------------------------------------------------------------

    def belongs(self, tensor: torch.Tensor, at: At, what: str) -> None:
        """Raise unless each record's part of a tensor is its own. One that nobody's numbers are in is the records' from here on."""
        state = self.state(tensor)
        if state is None:
            self.declare(tensor, at)
        elif state != at:
            raise NotApartError(self._reason(state, what))

    def own(self, tensor: torch.Tensor, at: At | None, what: str) -> None:
        """The same for one that is only read; without ``at``, no record's numbers may be in it."""
        state = self.state(tensor)
        if state is not None and state != at:
            raise NotApartError(self._reason(state, what))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is not followed."""
        copy = tensor.detach().clone()
        self._memories.pop(_key(copy), None)
        self._nobodys(copy)
        return copy

    def _reason(self, state: State, what: str) -> Reason:
        if isinstance(state, Mixed):
            return Reason(state.what, state.where)
        return Reason(f"{what} has its records in another dimension than it should", line())

    def conclude(self, losses: torch.Tensor) -> None:
        """Raise :class:`NotApartError` unless each record's loss is known to depend on it alone, going back too."""
        if self.records == 1:
            return
        state = self.state(losses)
        if state != At(0, 1):
            raise NotApartError(self._reason(state, "the loss") if state is not None else Reason("the loss does not show", ""))
        self._alone(started=True)
        if self.reads:
            raise NotApartError(self.reads[0])
        for tensor, version in zip(self._known, self._versions, strict=True):
            if _version(tensor) != version and _key(tensor) not in self._written:
                raise NotApartError(Reason("a tensor that the model reads was written to by something else (a thread?)", ""))
        foreign = None if losses.grad_fn is None else _foreign(losses.grad_fn)
        if foreign is not None:
            raise NotApartError(Reason(f"{foreign.__qualname__} has a backward pass of its own", foreign.__module__))

    def _alone(self, *, started: bool) -> None:
        """Raise if something else than this thread has run since the pass began. ``started``: or was begun since."""
        who = None if self._beside is None else self._beside.who(started=started)
        if who is not None:
            raise NotApartError(Reason(BESIDE, who))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within the block, what the model does is followed, and what it reads is noted."""
        global _current
        before, _current = _current, self
        self._beside = Beside()
        try:
            with self, Readings(self).reading():
                yield
        finally:
            _current = before
            for key, (alive, whose, made) in self._memories.items():
                if whose is not None:
                    if key not in self._given and isinstance(alive, StorageWeakRef):
                        _earlier[key] = alive
                elif made is not None and (tensor := made()) is not None and _key(tensor) == key:
                    _constants[key] = made, _version(tensor)

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Within the block is the backward pass: what is computed anew there (checkpointing) may have become something else."""
        if self.recomputed:
            with _Again(self), Readings(self).reading():
                yield
            if self.reads:
                raise NotApartError(self.reads[0])
        else:
            yield
        self._alone(started=False)  # torch may have begun its own threads for a device; hooks of the model are no part of a pass

    def untouched(self, *given: torch.Tensor) -> _Untouched:
        """Within the block, a module is evaluated again for one record at a time, on copies: nothing else of the batch is used.

        ``given``: what it is evaluated with besides.
        """
        return _Untouched(self, given)


class _Again(TorchDispatchMode):
    """Within the block, operations that are to be differentiated keep records apart."""

    def __init__(self, of: Following) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of
        self._own: set[int] = set()  # what the backward pass itself has made, and nothing that is differentiated has read

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether something that is computed anew may have kept this memory, so that what is written there matters."""
        return tensor.layout == torch.strided and _key(tensor) in self._of._memories and _key(tensor) not in self._own

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        parts = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        if not torch.is_grad_enabled():
            rule = rule_of(func)
            written = self._of._written_by(rule, rule.changed, rule.in_order(args, kwargs or {})) if rule.changed else []
            if not any(self._is_kept(part) for part in written):
                output = func(*args, **(kwargs or {}))
                if all(self._of.state(part) is None for part in parts):
                    self._own.update(_key(part) for part in tree_leaves(output) if isinstance(part, torch.Tensor))
                    self._of._note_made(output)
                return output
        self._own.difference_update(_key(part) for part in parts if part.layout == torch.strided)
        output = self._of.__torch_dispatch__(func, types, args, kwargs)
        for part in tree_leaves(output):
            state = self._of.state(part) if isinstance(part, torch.Tensor) else None
            if isinstance(state, Mixed) and state.answer is None:
                raise NotApartError(Reason(state.what, state.where))
        if self._of.reads:
            raise NotApartError(self._of.reads[0])
        return output

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Untouched(TorchDispatchMode):
    """Within the block, nothing that depends on the batch is touched."""

    def __init__(self, of: Following, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of
        for part in given:
            of._memories.pop(_key(part), None)
            of._nobodys(part)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for part in tree_leaves((args, kwargs)):
            if isinstance(part, torch.Tensor) and (self._of._meet(part) if func is _LIFT else self._of.state(part)) is not None:
                raise NotApartError(Reason("a module uses what it was not given", line()))
        output = func(*args, **(kwargs or {}))
        if not rule_of(func).view:
            self._of._note_made(output)
        return output

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_current: Following | None = None


def _forked() -> None:
    if _current is not None:
        _current.reads.append(Reason(BESIDE, "a copy of this process"))


on_fork(_forked)
_earlier: dict[int, StorageWeakRef] = {}  # what depended on batches before, as long as somebody holds it


_constants: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # made of nothing in passes before, and not written to since
EARLIER = "numbers of an earlier batch, which the model has kept"
UNKNOWN = "a tensor that no operation of this pass has made, and that was not there before (another thread's, DLPack's, numpy's?)"


def follow(x: Inputs, y: torch.Tensor, known: Iterable[torch.Tensor], *, answering: bool = True) -> Following:
    """What follows a pass over these inputs and targets, with what is :func:`known_before`.

    A record by itself meets no other; questions about it are answered as in company, or it would have another gradient.
    """
    following = Following(rows_of(x), answering=answering, known=known)
    for part in sorted((*leaves(x), y), key=torch.Tensor.storage_offset):  # columns of one table have one map
        following.declare(part, At(0, 1), given=True)
    return following


def known_before(model: torch.nn.Module, loss: Any) -> list[torch.Tensor]:
    """Tensors that the two may use and that are there before a pass: in attributes, in containers, behind names that their
    functions read (globals, closures), in caches of functions."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    if not isinstance(loss, kinds.FunctionType):
        classes.update(type(loss).__mro__)
    functions = [part for cls in classes if not _is_torchs(cls) for part in vars(cls).values()]
    functions += [value for module in model.modules() for value in vars(module).values() if isinstance(value, _FUNCTIONS)]
    tensors, waiting, seen = reachable_tensors(model, loss), [*functions, loss], set()
    behind: list[Any] = []
    met: dict[int, Any] = {}  # what functions read, by id, and kept while ids are compared: most of them read the same
    opened: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)
        if isinstance(value, functools._lru_cache_wrapper):
            behind += gc.get_referents(value)
        if isinstance(value, kinds.FunctionType | functools._lru_cache_wrapper) and hasattr(value, "__wrapped__"):
            waiting.append(value.__wrapped__)  # too: what is around it may keep what it gives
        value = getattr(value, "__func__", getattr(value, "func", getattr(value, "fget", value)))
        if not isinstance(value, kinds.FunctionType) or value in seen or _is_torchs(value):
            continue
        seen.add(value)
        names = names_of(value.__code__)
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        for part in list(read):
            if isinstance(part, kinds.ModuleType) and not _is_torchs(part):
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
            if id(part) in opened or isinstance(part, torch.Tensor) or not (callable(part) or isinstance(part, kinds.ModuleType)):
                behind.append(part)
    return list({id(t): t for t in (*tensors, *reachable_tensors(behind))}.values())


def distrust(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> None:
    """What a model has come to hold while it ran, and no operation that was followed has made of nothing, is the batch's."""
    keys = {_key(tensor) for tensor in before if tensor.layout == torch.strided}
    for tensor in after:
        if tensor.layout == torch.strided and _key(tensor) not in keys and _key(tensor) not in _constants:
            _earlier[_key(tensor)] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_empty(cell: kinds.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _is_torchs(value: Any) -> bool:
    home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(home).split(".")[0] in ("torch", "lipdp", "builtins", "typing", "abc")


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def rows_first(tensor: torch.Tensor) -> None:
    """To be called where a function of ours treats rows by themselves going back: records must be nowhere else."""
    if _current is not None:
        state = _current.state(tensor)
        if isinstance(state, At) and state.dim != 0:
            _current.reads.append(Reason("rows that are not records have their gradients clipped", line()))


def _foreign(start: Any) -> type | None:
    """A function with a backward pass of its own, if there is one in this graph: what it does is not to be seen. Not ours."""
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            made: type = node._forward_cls  # type: ignore[attr-defined]
            home = sys.modules.get(made.__module__)
            if not made.__module__.startswith("lipdp.") or getattr(home, made.__qualname__, None) is not made:
                return made
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return None


# The functions that keep what the backward pass needs (saved_tensors_hooks), if there are any.
_keeping: Callable[[], Any] = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tells(output: Any) -> bool:
    """Whether what an operation gives is of as many numbers as values say (sparse)."""
    return isinstance(output, torch.Tensor) and (output.layout != torch.strided or output.is_nested)


def _is_fresh(tensor: torch.Tensor) -> bool:
    """Whether its memory is torch's own, not one that it was lent (numpy's)."""
    return tensor.untyped_storage().resizable()
