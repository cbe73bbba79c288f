"""Examples must not depend on their company: on whole batches, of the size and in the mode in which they are trained on.

With the same random numbers, an example's loss stays the same *to the bit* when others are replaced, inputs and targets: those
whose number has some binary digit in common, digit by digit. Any two examples differ in one, so whoever depends on whom, it shows.
So it does for what layers show of an example in the backward pass. A training step whose records have their seats rests on it.
What only shows in batches of other contents is looked for too (:func:`lipdp.clipping.others.contrasts`).

What goes on around these checks is here too: the model untouched, random numbers repeated.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lipdp._numerics import HALF, no_autocast, seed_torch
from lipdp.clipping.arithmetic import matmuls
from lipdp.clipping.contribution import Contribution
from lipdp.clipping.layouts import layouts_of
from lipdp.clipping.loops import PerExampleLoss, loss_values
from lipdp.clipping.others import Records, contrasts, made_up, mixture, others_like, targets_like
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError
from lipdp.inputs import Inputs, call, device_of, mapped, rows_of, select

__all__ = ["checking", "fitting", "in_double_if_refused", "put_back", "same_randomness", "verify_company"]


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
        before = company.losses((x, y))
        finite = torch.isfinite(before)
        if not bool(finite.any()):
            return False
        for replaced in sets:
            _check_kept(before, company.with_others(replaced)[1], ~replaced & finite)
        _check_contrasts(company, [*sets[:2], numbers < rows - 1])
        shown = company.shown((x, y))
        for replaced in sets if rows <= _SMALL else sets[:2]:
            again = company.shown(company.with_others(replaced)[0])
            for name in shown.keys() & again.keys():
                if _shows_differently(shown[name], again[name], torch.nonzero(~replaced & finite).flatten()):
                    raise UnsupportedError(_BACK_IN_COMPANY.format(name=name, rows=rows))
    return True


def _check_kept(before: torch.Tensor, after: torch.Tensor, kept: torch.Tensor) -> None:
    """Raise if the losses of the examples that were kept are not what they were; those ``before`` are finite."""
    if not bool(torch.isfinite(after[kept]).all()) or _differs(before[kept], after[kept]):
        raise UnsupportedError(_IN_COMPANY.format(rows=len(before)))


def _check_contrasts(company: _Company, sets: Sequence[torch.Tensor]) -> None:
    """The same with contents that later batches may have. What the model can't be evaluated on shows nothing."""
    for batch, others in contrasts(company.model, company.x, company.y):
        try:
            before = company.losses(batch)
            after = [company.losses(mixture(batch, others, replaced)) for replaced in sets]
        except Exception:  # whatever it raises: such contents it does not take
            continue
        for replaced, losses in zip(sets, after, strict=True):
            _check_kept(before, losses, ~replaced & torch.isfinite(before))


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

    def with_others(self, replaced: torch.Tensor) -> tuple[Records, torch.Tensor]:
        """The batch with other examples in some places, of a kind that the model can have there, and its losses."""
        for choose in self._kinds:
            batch = mixture((self.x, self.y), choose(replaced), replaced)
            try:
                return batch, self.losses(batch)
            except (RuntimeError, ValueError, IndexError):
                continue
        raise UnsupportedError(
            f"the model can't be evaluated on a batch of {rows_of(self.x)} in which some examples are replaced by others, so "
            "whether it mixes them can't be told. Use method='naive', which takes every example by itself."
        )

    @property
    def _kinds(self) -> tuple[Callable[[torch.Tensor], Records], ...]:
        """Those of other places; made-up ones; those of the nearest place before, which keeps an order that a model may need."""
        targets = targets_like(self.y)
        return (
            lambda replaced: (self._others, targets),
            lambda replaced: (self._others, self.y),
            lambda replaced: (made_up(self.x), self.y),
            self._before,
        )

    def _before(self, replaced: torch.Tensor) -> Records:
        numbers = torch.arange(rows_of(self.x), device=device_of(self.x))
        kept = torch.where(replaced, 0, numbers).cummax(0).values
        first = int(torch.nonzero(~replaced)[0])
        chosen: Records = select((self.x, self.y), torch.where(numbers < first, first, kept))
        return chosen

    def losses(self, batch: Records) -> torch.Tensor:
        """(batch,)."""
        x, y = batch
        same_randomness()
        try:
            return loss_values(self.loss, call(self.model, x), y).detach()
        finally:
            put_back(self._buffers)

    def shown(self, batch: Records) -> Mapping[str, Contribution]:
        """Per-example gradients as layers show them."""
        x, y = batch
        same_randomness()
        try:
            with recording(self.model, rows_of(x), layouts=layouts_of(self.model, x)) as recorded:
                return recorded.contributions(loss_values(self.loss, call(self.model, x), y).sum())
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
