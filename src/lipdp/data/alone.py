"""Somebody's own functions of records (an augmentation, a map of inputs), given a batch of them or each by itself.

A batch is followed through every operation (:mod:`lipdp.clipping.follow`). An augmentation that takes the examples out of it (a
loop over pictures, numpy) can't be followed, and is given each by itself: with random numbers of its seat's own, in memory of its
own, and nothing may stay behind it: so how many numbers another one has drawn, and what was seen of it, changes nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch

from lipdp._numerics import Undrawn, random_states, seed_all, set_random_states
from lipdp.clipping.beside import BESIDE
from lipdp.clipping.follow import ATTEMPTS, Following
from lipdp.clipping.kept import known_before
from lipdp.clipping.memories import UNKNOWN
from lipdp.clipping.operations import TAKEN_OUT, At
from lipdp.clipping.past import NotApartError
from lipdp.clipping.restored import Before, left_as_it_was
from lipdp.clipping.verify import state_of
from lipdp.errors import DataError, LipdpNotice
from lipdp.fingerprint import fingerprint, reachable_tensors
from lipdp.inputs import owned

# Augmentations that were met: whether each is given its examples one by one.
_met: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def kept_apart(function: Callable[..., Any], x: torch.Tensor, *more: Any) -> Any:
    """``function(x, *more)``, each row of which is known to depend on that row of ``x`` alone; else :class:`NotApartError`.

    What ``function`` has put somewhere is put back where it is refused, and of one row only, of which nothing is followed.
    """
    drawn = [(part, part.get_state()) for part in more if isinstance(part, torch.Generator)]
    if len(x) < 2:
        with left_as_it_was(function):
            return function(x.detach().clone(), *more)
    model, loss = (function, None) if isinstance(function, torch.nn.Module) else (torch.nn.Module(), function)
    before, numbers = Before(function), random_states(x.device)
    for left in reversed(range(ATTEMPTS)):
        given = x.detach().clone()  # it may write into it, and be called again
        following = Following(len(x), known=known_before(model, loss), strict=False)  # to tell what it does with them
        following.declare(given, At(0, 1), given=True)
        try:
            with torch.no_grad(), following.following():
                rows = function(given, *more)
            if isinstance(rows, torch.Tensor):
                following.conclude(rows)
        except BaseException as error:
            before.put_back()
            set_random_states(numbers, x.device)  # how many were drawn may be told by the examples
            for part, state in drawn:
                part.set_state(state)
            if not isinstance(error, NotApartError) or BESIDE not in error.reason.what or not left:
                raise
        else:
            return rows
    raise AssertionError("the last attempt returns, or raises")


def alone_or_together(augmentation: Any, x: torch.Tensor, generator: torch.Generator | None) -> Any:
    """``augmentation(x, generator)``, each row of which depends on that row of ``x`` alone; refused where it may not."""
    alone: bool | None = None
    with suppress(TypeError):  # what has no hash is new each time
        alone = _met.get(augmentation)
    if alone is not False:
        _show_public(augmentation, x, generator)
    if not alone and len(x) > 1:
        try:
            together = kept_apart(augmentation, x, generator)
        except NotApartError as error:
            reason = error.reason
        else:
            _meet(augmentation, False)
            return together
        name, beside = type(augmentation).__name__, BESIDE in reason.what
        if not beside and (alone is False or reason.what not in (TAKEN_OUT, UNKNOWN)):
            raise DataError(
                f"the augmentation {name} may mix examples: {reason}. One of them would change what others contribute, and no "
                "bound would hold. Let each copy depend on its own example alone (no mixup), by operations along other dimensions "
                "than the first, and read no values."
            )
        if beside:
            _show_public(augmentation, x, generator)
        what = f"may let examples meet: {reason}" if beside else f"takes examples out of their batch: {reason}"
        warnings.warn(
            f"the augmentation {name} {what}. So each is given to it by itself, more slowly; what it does with several (mixup) it "
            "does not do.",
            LipdpNotice,
            stacklevel=3,
        )
        if not beside:
            _meet(augmentation, True)
    first, second = torch.randint(
        2**62, (2,), generator=generator, device="cpu" if generator is None else generator.device
    ).tolist()
    if not alone and len(x) == 1:  # nothing is learned
        with left_as_it_was(augmentation):
            return _one_by_one(augmentation, x, (first, second), generator)
    try:
        return _one_by_one(augmentation, x, (first, second), generator, _kept(augmentation))
    except DataError:
        _meet(augmentation, None)
        raise


def _show_public(augmentation: Any, x: torch.Tensor, generator: torch.Generator | None) -> None:
    """A made-up example goes first: what is made once, and kept (a table), is nobody's."""
    with suppress(Exception):
        _one_by_one(augmentation, torch.zeros_like(x[:1]), (0, 0), generator)


def _meet(augmentation: Any, alone: bool | None) -> None:
    with suppress(TypeError):
        if alone is None:
            _met.pop(augmentation, None)
        else:
            _met[augmentation] = alone


def _one_by_one(
    augmentation: Any, x: torch.Tensor, seeds: tuple[int, int], generator: torch.Generator | None, kept: Hashable = None
) -> torch.Tensor:
    """The copies of each example, by seats. ``kept``: what it held before, and has to hold behind each."""
    copies: list[torch.Tensor] = []
    before = Before(augmentation)
    with Undrawn(x.device):
        for seat in range(len(x)):
            seed_all(seeds[0] + seat)
            own = None if generator is None else torch.Generator(generator.device).manual_seed(seeds[1] + seat)
            made = augmentation(owned(x[seat : seat + 1]), own)
            if kept is not None and not before.stays():  # the next one could use it, and put it back
                raise _changes(augmentation)
            if not isinstance(made, torch.Tensor) or made.shape[:1] != (1,):
                what = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
                raise DataError(f"the augmentation {type(augmentation).__name__} gives {what} of one example, not (1, copies, …)")
            if copies and made.shape != copies[0].shape:
                raise DataError(
                    f"the augmentation {type(augmentation).__name__} gives shape {tuple(made.shape)} of one example and "
                    f"{tuple(copies[0].shape)} of another: it has to be the same for all."
                )
            copies.append(owned(made))
    if kept is not None and _kept(augmentation) != kept:
        raise _changes(augmentation)
    return torch.cat(copies) if copies else augmentation(x, generator)


def _changes(augmentation: Any) -> DataError:
    return DataError(
        f"the augmentation {type(augmentation).__name__} takes examples one by one, and keeps something from one to the next "
        "(a counter, a table, a random number generator of its own). Draw from the generator that it is given, or from "
        "torch's, Python's or numpy's own, which each example gets anew; or work on the whole batch along other dimensions "
        "than the first."
    )


def _kept(augmentation: Any) -> Hashable:
    """Its settings, and the bytes of its tensors, large ones too."""
    return fingerprint(augmentation), state_of(reachable_tensors(augmentation))
