"""Whose the numbers in a memory are: what is known of the tensors of a pass while its operations are followed.

With B records, each memory that depends on the batch has a map from addresses to records,

    record(address) = ((address - start) // unit) mod B,        in bytes.

Views and writes in place need no rule: they are the same memory, and where a tensor has its records follows from its strides.

A memory that nobody has seen being made is no constant. Known are those that were there before the pass
(:func:`lipdp.clipping.kept.known_before`), and those that operations of this pass, or of an earlier one, have made of nothing or
of constants. Any other came past the operations (from another thread, by DLPack, from numpy): whose it is can't be told.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lipdp.clipping.operations import TAKEN_OUT, At, Mixed, State
from lipdp.clipping.past import NotApartError, Reason, is_lifted, line

EARLIER = "numbers of an earlier batch, which the model has kept"
UNKNOWN = "a tensor that no operation of this pass has made, and that was not there before (another thread's, DLPack's, numpy's?)"
_earlier: dict[int, StorageWeakRef] = {}  # what depended on batches before, as long as somebody holds it
_constants: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # made of nothing in passes before, and not written to since


OWN = At(0, 1)
"""Of a record that is alone in its batch: whatever depends on it is its own."""


class _Memory(NamedTuple):
    """Whose the numbers at an address are, in bytes."""

    start: int
    unit: int


_Form = tuple[torch.Size, tuple[int, ...], int, int]
"""Of a tensor: shape, strides, where it begins in its memory, and bytes of a number."""


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size()


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


class Memories:
    """Those of one pass.

    Attributes:
        records: rows of the batch.
        reads: values of the batch that Python has seen, and other things that make a pass more than its operations.
        strict: whether Python is given none of them.
    """

    def __init__(self, records: int, known: Iterable[torch.Tensor], strict: bool) -> None:
        self.records, self.strict = records, strict
        self.reads: list[Reason] = []
        self.refused = False  # whether it was not given one
        self._memories: dict[int, _Entry] = {}
        self._lent: set[int] = set()  # memories that may be read past all operations
        self._bare: set[int] = set()  # memories that may be written to without a version that tells
        self._given: set[int] = set()  # the batch itself, which is the caller's to keep
        self._known = [tensor for tensor in known if tensor.layout == torch.strided]
        for key, (made, version) in list(_constants.items()):
            tensor = made()
            if tensor is None or version_of(tensor) != version or key_of(tensor) != key:
                del _constants[key]
            else:
                self._known.append(tensor)
        self._versions = [version_of(tensor) for tensor in self._known]
        self._written: set[int] = set()
        for tensor in self._known:
            storage = tensor.untyped_storage()
            self._memories[storage._cdata] = _Entry(storage, None)
        earlier = Mixed(EARLIER, foreign=True)  # one for all of them: nobody writes to a state
        for key, alive in list(_earlier.items()):
            if alive.expired():  # type: ignore[no-untyped-call]
                del _earlier[key]
            else:
                self._memories[key] = _Entry(alive, earlier)

    def declare(self, tensor: torch.Tensor, at: At, *, given: bool = False) -> None:
        """From here on, these are the records' numbers. ``given``: the batch itself, which is the caller's to keep."""
        if given:
            self._given.add(key_of(tensor))
        if tensor.numel() and not (key_of(tensor) in self._memories and self.state(tensor) == at):
            self._set(tensor, at, exact=True)

    def state(self, tensor: torch.Tensor) -> State:
        """Where the records are in a tensor; ``None``: it does not depend on the batch."""
        if tensor.layout != torch.strided:
            return Mixed("a tensor without a memory of its own (sparse)", line())
        entry = self._memories.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return Mixed(UNKNOWN, line(), foreign=True) if tensor.numel() else None
        whose = entry.whose
        if whose is None or isinstance(whose, Mixed):
            return whose
        if not tensor.numel():
            return None  # no number at all, whatever the batch is
        if self.records == 1:
            return OWN
        found = _read_map(self.records, whose, _form(tensor))
        if found is None:
            return Mixed(TAKEN_OUT, line())
        return found

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether something of the batch may be in a tensor's memory, in entries that it does not have itself too."""
        entry = self._memories.get(key_of(tensor)) if tensor.layout == torch.strided else None
        return entry is None or entry.whose is not None

    def read(self, what: str) -> None:
        """Raise before Python sees something of the batch: nothing can be kept of a number that nobody was given."""
        self.reads.append(Reason(what, line()))
        if self.strict:
            self.refused = True
            raise NotApartError(self.reads[-1])

    def lend(self, tensor: torch.Tensor, how: str) -> None:
        """The tensor's memory is handed out: what is in it, or is written to it from here on, can be read past all operations."""
        self._lent.add(key_of(tensor))
        if self.shows(tensor):
            self.read(f"Python sees values of the batch ({how})")

    def bare(self, tensor: torch.Tensor) -> None:
        """The tensor's memory can be written to from here on without a version that tells (``.data``)."""
        if tensor.layout == torch.strided:
            self._bare.add(key_of(tensor))

    def _set(self, tensor: torch.Tensor, at: At | Mixed, *, exact: bool = False) -> None:
        if tensor.layout != torch.strided:
            return  # see state
        storage = tensor.untyped_storage()
        whose: _Memory | Mixed | str
        if isinstance(at, Mixed):
            whose = at
        else:
            whose = _Memory(0, 1) if self.records == 1 else _map(self.records, at, _form(tensor), exact)
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
        entry = self._memories.get(key_of(tensor)) if tensor.layout == torch.strided else None
        if tensor.layout == torch.strided and (entry is None or entry.whose is None or key_of(tensor) in _earlier):
            self._check_shared(tensor.untyped_storage())
        before = None if entry is None else self.state(tensor)
        if isinstance(state, Mixed) or entry is None or entry.whose is None:
            self._set(tensor, state)
        elif before != state:
            self._set(tensor, state := Mixed("records written over others", line()))
        if entry is not None and not isinstance(before, Mixed) and (isinstance(state, Mixed) or key_of(tensor) in self._bare):
            self._overwritten(before, state)

    def _check_write(self, tensor: torch.Tensor) -> None:
        """Before numbers that depend on the batch are written to a tensor: can its memory be read past all operations?"""
        if tensor.layout != torch.strided:
            return
        key, storage = key_of(tensor), tensor.untyped_storage()
        if key in self._lent:
            self.read("records are written into memory that was handed out, and can be read past all operations")
        entry = self._memories.get(key)
        if not storage.resizable() and (entry is None or entry.whose is None or key in _earlier):
            self.reads.append(Reason("records are written into memory that others have too (numpy's, say)", line()))

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

    def _meet(self, tensor: torch.Tensor) -> State:
        """The state of an argument of :meth:`lift_fresh`: numbers of Python's that torch has just copied are nobody's."""
        if tensor.layout == torch.strided and key_of(tensor) not in self._memories and is_lifted(self.state) and _is_fresh(tensor):
            self._nobodys(tensor)
        return self.state(tensor)

    def _note_made(self, output: Any) -> None:
        for part in output if isinstance(output, list | tuple) else [output]:
            if isinstance(part, torch.Tensor):
                self._nobodys(part)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether anything is known of its memory."""
        return tensor.layout == torch.strided and key_of(tensor) in self._memories

    def forget(self, tensor: torch.Tensor) -> None:
        """It is made anew: nobody's."""
        self._memories.pop(key_of(tensor), None)
        self._nobodys(tensor)

    def was_written_past(self) -> bool:
        """Whether a tensor that was known before was written to by no operation of this pass."""
        for tensor, version in zip(self._known, self._versions, strict=True):
            if version_of(tensor) != version and key_of(tensor) not in self._written:
                return True
        return False

    def remember(self) -> None:
        """For later passes: what depends on this batch, and what is nobody's."""
        for key, (alive, whose, made) in self._memories.items():
            if whose is not None:
                if key not in self._given and isinstance(alive, StorageWeakRef):
                    _earlier[key] = alive
            elif made is not None and (tensor := made()) is not None and key_of(tensor) == key:
                _constants[key] = made, version_of(tensor)


def distrust(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> None:
    """What a model has come to hold while it ran, and no operation that was followed has made of nothing, is the batch's."""
    keys = {key_of(tensor) for tensor in before if tensor.layout == torch.strided}
    for tensor in after:
        if tensor.layout == torch.strided and key_of(tensor) not in keys and key_of(tensor) not in _constants:
            _earlier[key_of(tensor)] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def key_of(tensor: torch.Tensor) -> int:
    """Of its memory."""
    key: int = tensor.untyped_storage()._cdata
    return key


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to; −1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def _is_fresh(tensor: torch.Tensor) -> bool:
    """Whether its memory is torch's own, not one that it was lent (numpy's)."""
    return tensor.untyped_storage().resizable()
