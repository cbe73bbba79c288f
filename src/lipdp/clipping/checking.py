"""What goes on around the self-checks: the model untouched, random numbers repeated, other examples to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lipdp._numerics import HALF, Undrawn, no_autocast, seed_torch
from lipdp.clipping.arithmetic import matmuls
from lipdp.clipping.looking import is_mask, one_place_less
from lipdp.clipping.loops import PerExampleLoss
from lipdp.digest import same_bits
from lipdp.errors import UnsupportedError
from lipdp.inputs import Inputs, leaves, mapped


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
    devices = {parameter.device for parameter, _ in values}
    with Undrawn(*devices):
        try:
            yield
        finally:
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
            if not same_bits(buffer, value):
                if value.layout == torch.strided:
                    buffer.copy_(value)
                else:
                    buffer.data = value.clone()


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
