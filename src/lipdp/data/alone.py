"""Somebody's own augmentation, given a batch or, where it takes the examples out of it, each example by itself.

By itself an example gets random numbers of its seat's own, in memory of its own, and nothing may stay behind it: so how many
numbers another one has drawn, and what was seen of it, changes nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch

from lipdp._numerics import Undrawn, random_states, seed_all, set_random_states
from lipdp.clipping.follow import TAKEN_OUT, UNKNOWN, NotApartError, kept_apart
from lipdp.clipping.kept import kept_elsewhere
from lipdp.clipping.verify import state_of
from lipdp.errors import DataError, LipdpNotice
from lipdp.fingerprint import fingerprint, generator_states, reachable_tensors
from lipdp.inputs import owned

__all__ = ["alone_or_together"]

# Augmentations that were met: whether each is given its examples one by one.
_met: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def alone_or_together(augmentation: Any, x: torch.Tensor, generator: torch.Generator | None) -> Any:
    """``augmentation(x, generator)``, each row of which depends on that row of ``x`` alone; refused where it may not."""
    alone: bool | None = None
    with suppress(TypeError):  # what has no hash is new each time
        alone = _met.get(augmentation)
    kept: Hashable = None
    if alone is not False:
        with suppress(Exception):  # a made-up example first: what is made once, and kept (a table), is nobody's
            _one_by_one(augmentation, torch.zeros_like(x[:1]), (0, 0), generator)
        kept = _kept(augmentation)
    if not alone:
        before = None if alone is False else (random_states(x.device), None if generator is None else generator.get_state())
        try:
            together = kept_apart(augmentation, x, generator)
        except NotApartError as error:
            reason = error.reason
        else:
            _meet(augmentation, False, x)
            return together
        name = type(augmentation).__name__
        if before is None or reason.what not in (TAKEN_OUT, UNKNOWN):
            raise DataError(
                f"the augmentation {name} may mix examples: {reason}. One of them would change what others contribute, and no "
                "bound would hold. Let each copy depend on its own example alone (no mixup), by operations along other dimensions "
                "than the first, and read no values."
            )
        set_random_states(before[0], x.device)  # how many were drawn may be told by the examples
        if generator is not None and before[1] is not None:
            generator.set_state(before[1])
        warnings.warn(
            f"the augmentation {name} takes examples out of their batch: {reason}. So each is given to it by itself, more "
            "slowly; what it does with several (mixup) it does not do.",
            LipdpNotice,
            stacklevel=3,
        )
        _meet(augmentation, True, x)
    first, second = torch.randint(
        2**62, (2,), generator=generator, device="cpu" if generator is None else generator.device
    ).tolist()
    copies = _one_by_one(augmentation, x, (first, second), generator)
    if _kept(augmentation) != kept:
        _meet(augmentation, None, x)
        raise DataError(
            f"the augmentation {type(augmentation).__name__} takes examples one by one, and keeps something from one to the next "
            "(a counter, a table, a random number generator of its own). Draw from the generator that it is given, or from "
            "torch's, Python's or numpy's own, which each example gets anew; or work on the whole batch along other dimensions "
            "than the first."
        )
    return copies


def _meet(augmentation: Any, alone: bool | None, x: torch.Tensor) -> None:
    if len(x) > 1:  # of one example nothing is followed
        with suppress(TypeError):
            if alone is None:
                _met.pop(augmentation, None)
            else:
                _met[augmentation] = alone


def _one_by_one(augmentation: Any, x: torch.Tensor, seeds: tuple[int, int], generator: torch.Generator | None) -> torch.Tensor:
    """The copies of each example, by seats."""
    copies = []
    with Undrawn(x.device):
        for seat in range(len(x)):
            seed_all(seeds[0] + seat)
            own = None if generator is None else torch.Generator(generator.device).manual_seed(seeds[1] + seat)
            made = augmentation(owned(x[seat : seat + 1]), own)
            if not isinstance(made, torch.Tensor) or made.shape[:1] != (1,):
                what = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
                raise DataError(f"the augmentation {type(augmentation).__name__} gives {what} of one example, not (1, copies, …)")
            copies.append(owned(made))
    return torch.cat(copies)


def _kept(augmentation: Any) -> Hashable:
    """All that can be named of what it could keep of an example."""
    tensors = state_of(reachable_tensors(augmentation))
    return fingerprint(augmentation), tensors, generator_states(augmentation), kept_elsewhere(augmentation)
