"""Other examples in the place of some of a batch: what an example's loss and gradient must not depend on.

Those of the batch itself in other places are the first choice: a model takes them. They do not show everything. A model that cuts
a batch to its longest text mixes nothing while all are as long; one that scales a batch whose largest number is above 1, nothing
while none is; a sum over the batch that is multiplied by 0 changes nothing while it is finite. A verdict stands for later batches,
with other contents. So beside the batch as it is, :func:`contrasts` are tried: examples as unlike as a model may get them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lipdp.clipping.layouts import is_mask, one_place_less
from lipdp.inputs import Inputs, device_of, leaves, mapped, per_row, rows_of, select

__all__ = ["Records", "contrasts", "made_up", "mixture", "others_like", "targets_like"]

_SCALE = 1e3  # between contrasting examples and the batch, up and down

Records = tuple[Inputs, torch.Tensor]
"""Inputs and targets."""


def mixture(own: Records, others: Records, replaced: torch.Tensor) -> Records:
    """``own`` with ``others`` in the places ``replaced``."""
    mixed: Records = mapped(lambda mine, other: torch.where(per_row(replaced, mine), other, mine), own, others)
    return mixed


def others_like(inputs: Inputs) -> Inputs:
    """Other inputs of the same kind: what a gradient must not depend on. Those of the batch itself, unless they repeat."""
    rolled: Inputs = mapped(lambda leaf: leaf.roll(1, 0), inputs)
    pairs = zip(leaves(rolled), leaves(inputs), strict=True)
    same = torch.stack([(one == other).reshape(len(one), -1).all(1).cpu() for one, other in pairs]).all(0)
    others = made_up(inputs) if bool(same[1:].any()) else rolled
    if isinstance(inputs, torch.Tensor):
        return others
    with_masks: Inputs = mapped(_other_mask, others, inputs)
    return with_masks


def targets_like(y: torch.Tensor) -> torch.Tensor:
    """Other targets: those of the neighbours; where all are the same, others that a loss should take."""
    if not y.numel() or not bool((y == y[:1]).all()):
        return y.roll(1, 0)
    if y.dtype == torch.bool:
        return ~y
    if y.is_floating_point() or y.is_complex():
        return torch.where(y == 0, 1, y / 2)
    if bool(y.any()):
        return y // 2
    return y + 1 if y.device.type == "cpu" else y  # on a GPU, a class that does not exist ends the process


def _other_mask(other: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Another mask, where all examples have the same one (all of their places): what masks mix would not show."""
    return one_place_less(other) if is_mask(own) and torch.equal(other, own) else other


def made_up(inputs: Inputs) -> Inputs:
    """Different inputs that the model can take: column by column in the same range (numbers may stand for categories).

    Beside other inputs, whole numbers of at most 1 are masks and kinds of tokens: they stay.
    """
    alone = isinstance(inputs, torch.Tensor)

    def other(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point() or leaf.is_complex():
            return 0.5 * leaf + 0.1
        if not alone and (leaf.dtype == torch.bool or leaf.numel() == 0 or int(leaf.max()) <= 1):
            return leaf
        return ~leaf if leaf.dtype == torch.bool else leaf // 2

    changed: Inputs = mapped(other, inputs)
    return changed


def contrasts(model: torch.nn.Module, x: Inputs, y: torch.Tensor) -> Iterator[tuple[Records, Records]]:
    """Batches, and others that are unlike them: short and long, small and large, numbers and none, and the same one all over.

    Not every model takes them (a column may stand for a category, lengths may have to fall): such a one shows nothing.
    """
    targets = targets_like(y)
    yield (_short(x, _padding(model)), y), (others_like(x), targets)
    if any(leaf.is_floating_point() for leaf in leaves(x)):
        yield (_with_numbers(x, lambda leaf: leaf / _SCALE), y), (_with_numbers(x, lambda leaf: (leaf + 1) * _SCALE), targets)
        yield (x, y), (_with_numbers(x, lambda leaf: torch.full_like(leaf, float("nan"))), targets)
    first = torch.zeros(rows_of(x), dtype=torch.long, device=device_of(x))
    yield (x, y), (select(x, first), select(y, first))


def _padding(model: torch.nn.Module) -> int:
    """The token that stands for none: as an embedding says, else 0."""
    numbers = (module.padding_idx for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return next((number for number in numbers if number is not None), 0)


def _short(x: Inputs, padding: int) -> Inputs:
    """Nothing but padding behind the first place of each example; a length (a whole number) of 1 at most."""

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim < 2:
            return leaf if leaf.is_floating_point() or leaf.dtype == torch.bool else leaf.clamp(max=1)
        whole = not leaf.is_floating_point() and not is_mask(leaf)
        shorter = leaf.clone()
        shorter[:, 1:] = padding if whole else 0
        return shorter

    shorter: Inputs = mapped(cut, x)
    return shorter


def _with_numbers(x: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """The real numbers changed. A column of whole numbers may stand for categories: it stays, unless all are of that kind."""

    def changed(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return leaf
        real = (leaf != leaf.round()).any(0, keepdim=True)
        if not bool(real.any()) and leaf.device.type == "cpu":
            real = torch.ones_like(real)
        return torch.where(real, change(leaf), leaf)

    others: Inputs = mapped(changed, x)
    return others
