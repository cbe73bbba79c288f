"""Examples must not depend on their company: on whole batches, of the size and in the mode in which they are trained on.

With the same random numbers, an example's loss stays the same *to the bit* when others are replaced: those whose number has some
binary digit in common, digit by digit. Any two examples differ in one, so whoever depends on whom, it shows. So it does for what
layers show of an example in the backward pass. A training step whose records have seats of their own rests on it.

What goes on around these checks is here too: the model untouched, random numbers repeated, other examples of the same kind.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lipdp._numerics import HALF, no_autocast, seed_torch
from lipdp.clipping.arithmetic import matmuls
from lipdp.clipping.contribution import Contribution
from lipdp.clipping.layouts import is_mask, layouts_of, one_place_less
from lipdp.clipping.loops import PerExampleLoss, loss_values
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError
from lipdp.inputs import Inputs, call, device_of, leaves, mapped, per_row, rows_of, select

__all__ = ["checking", "fitting", "in_double_if_refused", "made_up", "others_like", "put_back", "same_randomness", "verify_company"]


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


def verify_company(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> bool:
    """Raise if an example of this batch depends on others in it. False if nothing could be compared (nothing is finite)."""
    return in_double_if_refused(_verify_company, model, loss, x, y)


def _verify_company(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> bool:
    x = fitting(model, x)
    rows, device = rows_of(x), device_of(x)
    if rows < 2:
        return True
    numbers = torch.arange(rows, device=device)
    sets = [(numbers >> digit) & 1 == value for digit in range((rows - 1).bit_length()) for value in (0, 1)]
    with checking(model, device):
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

    def __init__(self, model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> None:
        self.model, self.loss, self.x, self.y = model, loss, x, y
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._others = others_like(x)

    def with_others(self, replaced: torch.Tensor) -> Inputs:
        """The batch with other examples in some places, of a kind that the model can have there."""
        for choose in self._kinds:
            found: Inputs = mapped(lambda other, own: torch.where(per_row(replaced, own), other, own), choose(replaced), self.x)
            try:
                self.losses(found)
            except (RuntimeError, ValueError, IndexError):
                continue
            return found
        raise UnsupportedError(
            f"the model can't be evaluated on a batch of {rows_of(self.x)} in which some examples are replaced by others, so "
            "whether it mixes them can't be told. Use method='naive', which takes every example by itself."
        )

    @property
    def _kinds(self) -> tuple[Callable[[torch.Tensor], Inputs], ...]:
        """Those of other places; made-up ones; those of the nearest place before, which keeps an order that a model may need."""
        return lambda replaced: self._others, lambda replaced: made_up(self.x), self._before

    def _before(self, replaced: torch.Tensor) -> Inputs:
        numbers = torch.arange(rows_of(self.x), device=device_of(self.x))
        kept = torch.where(replaced, 0, numbers).cummax(0).values
        first = int(torch.nonzero(~replaced)[0])
        chosen: Inputs = select(self.x, torch.where(numbers < first, first, kept))
        return chosen

    def losses(self, x: Inputs) -> torch.Tensor:
        """(batch,)."""
        same_randomness()
        try:
            return loss_values(self.loss, call(self.model, x), self.y).detach()
        finally:
            put_back(self._buffers)

    def shown(self, x: Inputs) -> Mapping[str, Contribution]:
        """Per-example gradients as layers show them."""
        same_randomness()
        try:
            with recording(self.model, rows_of(x), layouts=layouts_of(self.model, x)) as recorded:
                return recorded.contributions(loss_values(self.loss, call(self.model, x), self.y).sum())
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


def in_double_if_refused(
    check: Callable[..., bool], model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor
) -> bool:
    """``check(model, loss, x, y)``; where it refuses a model in float32, the same in float64."""
    try:
        return check(model, loss, x, y)
    except UnsupportedError as error:
        if any(tensor.dtype != torch.float32 for tensor in _real_tensors(model)):
            raise
        # Deep networks turn rounding into visible differences (a ReLU at its kink). In float64, only what is real remains.
        try:
            with _in_double(model, loss):
                wide_x, wide_y = mapped(lambda part: part.double() if part.is_floating_point() else part, (x, y))
                return check(model, loss, wide_x, wide_y)
        except UnsupportedError:
            raise
        except Exception:  # the model can't be evaluated in float64: what was found stands
            raise error from None


@contextmanager
def checking(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Gradients on, in float32 proper; the model is the same afterwards: parameters, buffers, modes, random numbers."""
    with (
        torch.enable_grad(),
        no_autocast(device),
        matmuls(device, tf32=False),
        _differentiable_recurrence(model),
        _untouched(model),
    ):
        yield


def fitting(model: torch.nn.Module, inputs: Inputs) -> Inputs:
    """Inputs in half precision are meant for an autocast, which is off here."""
    if any(parameter.dtype in HALF for parameter in model.parameters()):
        return inputs
    fitted: Inputs = mapped(lambda leaf: leaf.float() if leaf.dtype in HALF else leaf, inputs)
    return fitted


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


@contextmanager
def _differentiable_recurrence(model: torch.nn.Module) -> Iterator[None]:
    """cuDNN's recurrent layers have no backward pass in evaluation mode; torch's own do."""
    if not any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        yield
        return
    with torch.backends.cudnn.flags(enabled=False):
        yield


def _real_tensors(module: object) -> list[torch.Tensor]:
    """Parameters and buffers that hold real numbers."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]


@contextmanager
def _in_double(*modules: object) -> Iterator[None]:
    """Parameters and buffers in float64; their very storages are put back afterwards."""
    kept = [(tensor, tensor.data) for module in modules for tensor in _real_tensors(module)]
    try:
        for tensor, value in kept:
            tensor.data = value.double()
        yield
    finally:
        for tensor, value in kept:
            tensor.data = value


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({parameter.device.index or 0 for parameter, _ in values if parameter.device.type == "cuda"})
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
            for module, mode in modes:
                module.training = mode
            for parameter, value in values:
                parameter.data = value
            put_back(buffers)


def same_randomness() -> None:
    """From here on, random numbers are those that followed the last call."""
    seed_torch(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def put_back(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Buffers as they were."""
    with torch.no_grad():
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
