"""Whose numbers are these? Every operation of a pass is followed, from the batch to the losses.

Clipping is right if what it calls the gradient of a record depends on that record alone. Checks on some batches can't show that for
the next one: a model may mix its records only where a pixel is above 50. So it is not checked, it is followed: while the model and
the loss run, in every pass, it is known of each memory whose the numbers in it are (:mod:`lipdp.clipping.memories`). Views and
writes in place need no rule for that. Any other operation has one (:mod:`lipdp.clipping.follow_rules`) that says where the records
of its result are, or that it has mixed them. Elementwise operations, products with weights, normalisations of a record: kept apart.
A sum over the batch, a sort of it, a product of records with records: mixed, whatever the numbers are. An operation without a rule
is mixing.

Only operations of the thread that runs the pass are seen. A number that another one has read is no operation's, so no other may run
meanwhile (:mod:`lipdp.clipping.beside`). A memory that can be read without an operation, because its storage or its address was
handed out in the pass, must not come to hold a record's numbers.

What would leave the tensors (``item``, ``tolist``, ``if x.max() > 3``, the size of ``nonzero``) could decide what is done with the
others, and be kept for later ones: such an operation raises before it runs (:meth:`Memories.read`). So Python is given no number of
a batch, and of a pass that is refused it has none to keep.

Let every operation keep its records apart, in the pass that was made. Then record i's loss is a function of record i (and of
weights, random numbers, settings) alone; the backward pass, which goes back through the same operations, gives to row i of whatever
was declared to be the records' (:meth:`Following.declare`) what record i alone determines. That is all that clipping needs, and it
holds in each pass by itself: nothing is concluded from one batch for another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipdp.clipping.beside import BESIDE, Beside, on_fork
from lipdp.clipping.follow_rules import rule_of
from lipdp.clipping.memories import OWN, Memories, key_of
from lipdp.clipping.operations import TAKEN_OUT, At, Call, Mixed, Rule, State, constant, shaped
from lipdp.clipping.past import NotApartError, Readings, Reason, asks_for_a_shortcut, line
from lipdp.errors import LipdpError
from lipdp.inputs import Inputs, leaves, rows_of

# How often a pass is made that something else has run beside.
ATTEMPTS = 4
_NUMBERS = {int, float, bool}
_LIFT = torch.ops.aten.lift_fresh.default
_SCALAR = torch.ops.aten._local_scalar_dense.default


class Following(Memories, TorchDispatchMode):
    """Within the block, operations on what was declared are followed.

    Attributes:
        answering: whether a question if something holds for all of the batch is answered by no, whatever the batch is, and if it
            does for any of it, by yes, where a library asks that is known for shortcuts (for masks that are full): they are not
            taken, and no answer depends on a record. Elsewhere it is a read.
        answered: whether that was done.
        recomputed: whether something of the pass is computed anew in the backward pass (:meth:`going_back`).
    """

    def __init__(self, records: int, *, answering: bool = True, known: Iterable[torch.Tensor] = (), strict: bool = True) -> None:
        Memories.__init__(self, records, known, strict)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.answering, self.answered = answering, False
        self.recomputed = False
        self._beside: Beside | None = None

    # Operations ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, rule = kwargs or {}, rule_of(func)
        if rule.only_views and _keeping() is None:
            output = _viewed(func, args, kwargs)
            if output is not None:  # the same memory: whose it is, is known of that
                return output
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
        if rule.unwritten:
            self.read(f"{rule.name} gives memory that nobody has written to, and numbers of other records may be in it")
        if depends and not (rule.only_computes or rule.view):
            self._check(rule, args_in_order, states)
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
        for part in self._written_by(rule.changed, args_in_order) if rule.changed else ():
            if part.layout == torch.strided:
                self._written.add(key_of(part))
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled: there is nothing to keep it from

    def _check(self, rule: Rule, args: Sequence[Any], states: Sequence[Any]) -> None:
        """Before an operation on the batch: raise if Python would see something of it."""
        if rule.reads and rule.shows(args, states):
            self.read(f"Python sees what {rule.name} makes of the batch")
        if not rule.known:  # its numbers need not be all that it gives: sizes, random numbers drawn, what it does by itself
            what = f"{rule.name}, of which nobody has said what it does with a batch"
            if rule.torchs:
                self.reads.append(Reason(what, line()))
            else:  # it may be written in Python
                self.read(what)
        for part in self._written_by(rule.changed, args) if rule.changed else ():
            self._check_write(part)

    def _follow(self, rule: Rule, args: Sequence[Any], states: list[Any], output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(map(_tells, outputs)):
            self.read(f"Python sees what {rule.name} makes of the batch")
        if rule.view:
            return
        call = Call(rule, self.records, args, states, output)
        results = self._of_one(call) if self.records == 1 else self._of_many(call, outputs)
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
        for part in self._written_by(rule.written, args) if rule.written and not rule.keeps else ():  # in place, and not given back
            if part.numel():
                self._write(part, Mixed(f"{rule.name} writes into it", line()))

    def _of_many(self, call: Call, outputs: Sequence[Any]) -> Any:
        """Where the records are in what an operation gives."""
        try:
            return call.rule.results(call)
        except Exception as error:  # whatever is not understood is not claimed
            mixed = error if isinstance(error, Mixed) else Mixed("what it does with the records is not understood")
            results = _answering(call, mixed)
            if results.what == TAKEN_OUT and not any(part.numel() for part in outputs):
                self.reads.append(Reason(TAKEN_OUT, results.where))  # no record by chance
            return results

    @staticmethod
    def _of_one(call: Call) -> State:
        """The same of a record that is alone: all is its own, but what an earlier one has left. Questions are answered as ever."""
        if call.rule.results is constant:
            return None
        if call.rule.results is shaped and not any(one for one in call.states[1:]):
            return None
        flat = [one for state in call.states for one in (state if isinstance(state, list) else (state,))]
        foreign = next((one for one in flat if isinstance(one, Mixed) and one.foreign), None)
        results = _answering(call, Mixed("over the records"))
        return foreign or (OWN if results.answer is None and results.counted < 0 else results)

    @staticmethod
    def _written_by(places: Sequence[int], args: Sequence[Any]) -> list[torch.Tensor]:
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
        self.forget(copy)
        return copy

    def _reason(self, state: State, what: str) -> Reason:
        if isinstance(state, Mixed):
            return Reason(state.what, state.where)
        return Reason(f"{what} has its records in another dimension than it should", line())

    def conclude(self, losses: torch.Tensor) -> None:
        """Raise :class:`NotApartError` unless each record's loss is known to depend on it alone, going back too."""
        state = self.state(losses)
        if self.records == 1:
            if isinstance(state, Mixed) and state.foreign:
                raise NotApartError(Reason(state.what, state.where))
        elif state != At(0, 1):
            raise NotApartError(self._reason(state, "the loss") if state is not None else Reason("the loss does not show", ""))
        self._alone(started=True)
        if self.reads:
            raise NotApartError(self.reads[0])
        if self.was_written_past():
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
        except LipdpError:
            raise
        except Exception as error:
            if self.refused:  # the model has gone on without a number that it was not given
                raise NotApartError(self.reads[0]) from error
            raise
        else:
            if self.refused:
                raise NotApartError(self.reads[0])
        finally:
            _current = before
            self.remember()

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
        return self._of.knows(tensor) and key_of(tensor) not in self._own

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        parts = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        if not torch.is_grad_enabled():
            rule = rule_of(func)
            written = self._of._written_by(rule.changed, rule.in_order(args, kwargs or {})) if rule.changed else []
            if not any(self._is_kept(part) for part in written):
                output = func(*args, **(kwargs or {}))
                if all(self._of.state(part) is None for part in parts):
                    self._own.update(key_of(part) for part in tree_leaves(output) if isinstance(part, torch.Tensor))
                    self._of._note_made(output)
                return output
        self._own.difference_update(key_of(part) for part in parts if part.layout == torch.strided)
        output = self._of.__torch_dispatch__(func, types, args, kwargs)
        for part in tree_leaves(output):
            state = self._of.state(part) if isinstance(part, torch.Tensor) else None
            if isinstance(state, Mixed) and state.answer is None and (state.foreign or self._of.records > 1):
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
            of.forget(part)

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
        _current.refused = True  # by the copy


on_fork(_forked)


def follow(x: Inputs, y: torch.Tensor, known: Iterable[torch.Tensor], *, answering: bool = True, strict: bool = True) -> Following:
    """What follows a pass over these inputs and targets, with what is :func:`known_before`.

    A record by itself meets no other; questions about it are answered as in company, or it would have another gradient.
    """
    following = Following(rows_of(x), answering=answering, known=known, strict=strict)
    for part in sorted((*leaves(x), y), key=torch.Tensor.storage_offset):  # columns of one table have one map
        following.declare(part, At(0, 1), given=True)
    return following


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


def _answering(call: Call, mixed: Mixed) -> Mixed:
    """What was mixed, where, and what is answered to the question that it may be."""
    named = mixed.what if mixed.where or mixed.what == TAKEN_OUT else f"{call.rule.name}: {mixed.what}"
    results = Mixed(named, mixed.where or line())
    results.answer = call.rule.answer(call)
    if call.rule.name == "sum" and isinstance(call.output, torch.Tensor) and not call.output.ndim:
        results.counted = call.args[0].numel()
    return results


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What an operation gives that gives one tensor of the memory that it was given; ``None`` where it does not, or raises."""
    try:
        output = func(*args, **kwargs)
    except Exception:  # it is called again, by who tells what that shows
        return None
    return output if isinstance(output, torch.Tensor) and not _tells(output) else None


def _tells(output: Any) -> bool:
    """Whether what an operation gives is of as many numbers as values say (sparse)."""
    return isinstance(output, torch.Tensor) and (output.layout != torch.strided or output.is_nested)
