"""What is said of operations: where the records are in their arguments and in what they give.

What each of them does to records is said by its rule, in :mod:`lipdp.clipping.follow_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

TAKEN_OUT = "some of the batch's records are taken out of it, or put in another order"


class At(NamedTuple):
    """Records lie in dimension ``dim``, ``runs`` rows of each at a time: those at index k are record (k // runs) mod B."""

    dim: int
    runs: int


class Mixed(Exception):  # noqa: N818  (it is a state as well)
    """Numbers that depend on several records, or on one that is not to be told.

    Attributes:
        what: was done.
        where: in the user's code.
        answer: of a question whether something holds for all or any of the batch: what is answered, whatever the batch is.
        counted: of how many numbers this is the sum, to be compared with that.
        foreign: whether the numbers of somebody who is not in this batch may be among them.
    """

    def __init__(self, what: str, where: str = "", *, foreign: bool = False) -> None:
        super().__init__(what)
        self.what, self.where, self.foreign = what, where, foreign
        self.answer: bool | None = None
        self.counted = -1


State = At | Mixed | None
"""Of a tensor; ``None``: it does not depend on the batch."""


class Call(NamedTuple):
    """One call of an operation: all its arguments in their order, their states (a list for a list of tensors), what it gave."""

    rule: Rule
    records: int
    args: Sequence[Any]
    states: Sequence[Any]
    output: Any

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by name."""
        place = self.rule.places.get(name, len(self.args))
        return self.args[place] if place < len(self.args) else default

    def state(self, name: str) -> Any:
        """Its state."""
        place = self.rule.places.get(name, len(self.states))
        return self.states[place] if place < len(self.states) else None

    @property
    def tensors(self) -> list[tuple[torch.Tensor, State]]:
        """All tensors with their states; raises one that is mixed."""
        pairs: list[tuple[torch.Tensor, State]] = []
        for arg, state in zip(self.args, self.states, strict=True):
            for part, one in zip(arg, state, strict=True) if isinstance(state, list) else ((arg, state),):
                if isinstance(one, Mixed):
                    raise one
                if isinstance(part, torch.Tensor):
                    pairs.append((part, one))
        return pairs

    def only(self, *names: str) -> At:
        """Where the records are, if of all arguments only these depend on the batch, in the same way."""
        found: At | None = None
        allowed, odd = set(map(self.rule.places.get, names)), False
        for number, state in enumerate(self.states):
            if state is None:
                continue
            if isinstance(state, Mixed):
                raise state
            if isinstance(state, list):
                for one in state:
                    if isinstance(one, Mixed):
                        raise one
                    odd = odd or one is not None
            else:
                odd = odd or number not in allowed or found not in (None, state)
                found = state
        if odd or found is None:
            raise Mixed("arguments depend on the batch that should not, or not in the same dimension")
        return found

    def dims(self, *names: str) -> set[int] | None:
        """Dimensions that an argument names; ``None``: all of them."""
        given = next((self.get(name) for name in names if name in self.rule.places), None)
        if isinstance(given, int) and not isinstance(given, bool):
            given = [given]
        if not isinstance(given, list | tuple) or not given:
            return None
        return {dimension(d, self.args[0].ndim) for d in given}


Results = Callable[[Call], Any]
"""The state of all outputs, or a list with one for each."""


@dataclass(frozen=True)
class Rule:
    """What an operation does to records.

    Attributes:
        name: of the operation.
        results: where they are afterwards.
        places: of its arguments, by name.
        defaults: of its arguments.
        view: whether it gives the memory that it was given.
        writes: whether its outputs are arguments that it has written into.
        written: arguments that it writes into and does not give back.
        changed: all that it writes into.
        reads: whether it shows something to Python: a value, or a number of values that were chosen.
        keeps: whether it leaves as it is what it could write into: statistics that are frozen, or the rule has refused.
        torchs: whether it is one of torch's own.
        unwritten: whether it gives memory that nobody has written to, and that can't be filled here.
        run: what computes it: the operation itself, or what gives the same to the bit and is quicker.
    """

    name: str
    results: Results
    places: dict[str, int]
    defaults: tuple[Any, ...]
    view: bool = False
    writes: bool = False
    written: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    reads: bool = False
    keeps: bool = False
    torchs: bool = True
    unwritten: bool = False
    run: Callable[..., Any] = field(kw_only=True)

    @cached_property
    def known(self) -> bool:
        """Whether anything is said of it."""
        return self.view or self.results is not mixing

    @cached_property
    def only_views(self) -> bool:
        """Whether it gives the memory that it was given, and does nothing else."""
        return self.view and not self.reads and not self.changed and self.name != "lift_fresh"

    @cached_property
    def only_computes(self) -> bool:
        """Whether it gives new numbers, and neither shows nor writes any."""
        return self.known and not self.reads and not self.changed

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """All arguments by their place, those that were given by name too."""
        full = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            full[self.places[name]] = value
        return full

    def shows(self, args: Sequence[Any], states: Sequence[Any]) -> bool:
        """Whether Python sees something of these arguments: by masks, as many numbers are chosen as they say."""
        return self.reads and (not self.name.startswith("index") or by_masks(args[1], states[1]))

    def answer(self, call: Call) -> bool | None:
        """No, if it asks for all of the batch; yes, if for any of it; what is not, the other way round."""
        first = call.states[0] if call.states else None
        before = first.answer if isinstance(first, Mixed) else None
        if self.name in ("all", "any") and len(call.args) == 1:
            return self.name == "any"
        if self.name == "eq" and isinstance(first, Mixed) and not isinstance(call.args[1], torch.Tensor):
            return False if call.args[1] == first.counted else None  # the sum of a mask is the number of its places
        if self.name in ("logical_not", "bitwise_not"):
            return None if before is None else not before
        return before if self.name in ("clone", "_to_copy") and call.args[0].dtype == torch.bool else None


def dimension(dim: int, ndim: int) -> int:
    """Counted from the first."""
    return dim + ndim if dim < 0 else dim


def by_masks(indices: Sequence[Any], states: Any) -> bool:
    """Whether there are masks among the indices that depend on the batch."""
    states = states if isinstance(states, list) else [None] * len(indices)
    return any(is_mask(part) and state is not None for part, state in zip(indices, states, strict=True))


def is_mask(index: Any) -> bool:
    """Of an index."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def constant(call: Call) -> Any:
    """Only the shape of its argument matters."""
    return None


def shaped(call: Call) -> Any:
    """Only the shape of its first argument matters; of others of the batch (``randint_like``'s bounds) numbers do."""
    others = [one for state in call.states[1:] for one in (state if isinstance(state, list) else [state])]
    return mixing(call) if any(one is not None for one in others) else None


def mixing(call: Call) -> Any:
    """It takes the records together, or nobody has said that it does not."""
    raise Mixed("it takes the records together, or nobody has said that it does not")
