"""Examples must not depend on their company: on whole batches, of the size and in the mode in which they are trained on.

With the same random numbers, an example's loss stays the same *to the bit* when others are replaced: those whose number has some
binary digit in common, digit by digit. Any two examples differ in one, so whoever depends on whom, it shows. So it does for what
layers show of an example in the backward pass. A training step whose records have seats of their own rests on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lipdp._numerics import HALF
from lipdp.clipping.checking import checking, fitting, in_double_if_refused, made_up, others_like, put_back, same_randomness
from lipdp.clipping.contribution import Contribution
from lipdp.clipping.loops import PerExampleLoss, loss_values
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError

__all__ = ["verify_company"]

# Examples whose gradients are compared at a time, and rows up to which every set of others is replaced in the backward pass too.
_EXAMPLES, _SMALL = 3, 8
_IN_COMPANY = (
    "the loss of an example changes when other examples of its batch of {rows} are replaced: some layer mixes the examples (by "
    "statistics, an order, a sum or an attention over the batch?). Use layers that treat examples alone (GroupNorm, LayerNorm), or "
    "put it in evaluation mode."
)
_BACK_IN_COMPANY = (
    "what reaches '{name}' in the backward pass of an example changes when other examples of its batch of {rows} are replaced: "
    "some backward pass (a hook, a function of its own) mixes the examples. Use operations that treat examples alone."
)


def verify_company(model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Raise if an example of this batch depends on others in it. False if nothing could be compared (nothing is finite)."""
    return in_double_if_refused(_verify_company, model, loss, x, y)


def _verify_company(model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor) -> bool:
    x = fitting(model, x)
    rows = len(x)
    if rows < 2:
        return True
    numbers = torch.arange(rows, device=x.device)
    sets = [(numbers >> digit) & 1 == value for digit in range((rows - 1).bit_length()) for value in (0, 1)]
    with checking(model, x.device):
        company = _Company(model, loss, x, y)
        before = company.losses(x)
        finite = torch.isfinite(before)
        if not bool(finite.any()):
            return False
        for replaced in sets:
            after = company.losses(company.with_others(replaced))
            kept = ~replaced & finite & torch.isfinite(after)
            if _differs(before[kept], after[kept]):
                raise UnsupportedError(_IN_COMPANY.format(rows=rows))
        shown = company.shown(x)
        for replaced in sets if rows <= _SMALL else sets[:2]:
            again = company.shown(company.with_others(replaced))
            for name in shown.keys() & again.keys():
                if _shows_differently(shown[name], again[name], torch.nonzero(~replaced & finite).flatten()):
                    raise UnsupportedError(_BACK_IN_COMPANY.format(name=name, rows=rows))
    return True


def _shows_differently(one: Contribution, other: Contribution, kept: torch.Tensor) -> bool:
    """Whether the gradients of the examples ``kept`` are not the same: what they are made of, or where that differs, themselves."""
    pairs = zip(_tensors(one), _tensors(other), strict=False)
    if all(a.shape == b.shape and (len(a) != one.batch or not _differs(a[kept], b[kept])) for a, b in pairs):
        return False
    for start in range(0, len(kept), _EXAMPLES):
        dropped = torch.ones(one.batch, dtype=torch.bool, device=kept.device)
        dropped[kept[start : start + _EXAMPLES]] = False
        a, b = (part.without(dropped).weighted_sum((~dropped).float()) for part in (one, other))
        if bool((a - b).abs().max() > 1e-3 * torch.maximum(a.abs().max(), b.abs().max())):
            return True
    return False


class _Company:
    """A batch, seen with the same random numbers again and again."""

    def __init__(self, model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model, self.loss, self.x, self.y = model, loss, x, y
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._others = others_like(x)

    def with_others(self, replaced: torch.Tensor) -> torch.Tensor:
        """The batch with other examples in some places, of a kind that the model can have there."""
        for choose in self._kinds:
            found = torch.where(replaced.reshape(-1, *[1] * (self.x.ndim - 1)), choose(replaced), self.x)
            try:
                self.losses(found)
            except (RuntimeError, ValueError, IndexError):
                continue
            return found
        raise UnsupportedError(
            f"the model can't be evaluated on a batch of {len(self.x)} in which some examples are replaced by others, so whether "
            "it mixes them can't be told. Use method='naive', which takes every example by itself."
        )

    @property
    def _kinds(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
        """Those of other places; made-up ones; those of the nearest place before, which keeps an order that a model may need."""
        return lambda replaced: self._others, lambda replaced: made_up(self.x), self._before

    def _before(self, replaced: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(len(self.x), device=self.x.device)
        kept = torch.where(replaced, 0, numbers).cummax(0).values
        first = int(torch.nonzero(~replaced)[0])
        return self.x[torch.where(numbers < first, first, kept)]

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        """(batch,)."""
        same_randomness()
        try:
            return loss_values(self.loss, self.model(x), self.y).detach()
        finally:
            put_back(self._buffers)

    def shown(self, x: torch.Tensor) -> Mapping[str, Contribution]:
        """Per-example gradients as layers show them."""
        same_randomness()
        try:
            with recording(self.model, len(x)) as recorded:
                return recorded.contributions(loss_values(self.loss, self.model(x), self.y).sum())
        finally:
            put_back(self._buffers)


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part.detach()
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))
    elif isinstance(part, tuple | list):
        for one in part:
            yield from _tensors(one)


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are not the same, but for a few units in the last place: vectorised functions look at neighbours."""
    if torch.equal(one, other) or not one.is_floating_point():
        return not torch.equal(one, other)
    a, b = torch.nan_to_num(one.double()), torch.nan_to_num(other.double())
    tolerance = 0.05 if one.dtype in HALF else 256 * float(torch.finfo(one.dtype).eps)
    return bool((a - b).abs().max() > tolerance * a.abs().max().clamp_min(1e-30))
