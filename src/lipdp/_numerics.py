"""How numbers are rounded, in which arithmetic they are computed, and when they are read: the few things that every room needs.

Reading one number from a GPU stops the host until all that was asked of the GPU is done. Whoever computes something that is only
good if some numbers are finite (a projection with its certificate) asks :func:`are_finite`; whoever uses the results in a block of
:func:`deferred_checks` gets a condition instead, and must know it to be true before anything leaves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

HALF = (torch.float16, torch.bfloat16)
_LARGEST_KEPT = 31 * 2**20
_NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_LONG = 8192
_PROCESSOR = torch.device("cpu")
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


@cache
def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of rounding to nearest: half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2


def accumulators(dtype: torch.dtype) -> torch.dtype:
    """What sums of such numbers are accumulated in: never in half precision."""
    return torch.float32 if dtype in HALF else dtype


@lru_cache(maxsize=4096)
def gamma(terms: float, dtype: torch.dtype) -> float:
    """γ_n = n·u/(1 − n·u): how far a sum of n terms can be off, of the sum of their sizes, in any order; ∞ if they are too many."""
    length = terms * unit_roundoff(accumulators(dtype))
    return length / (1 - length) if length < 1 else float("inf")


def wide(tensor: torch.Tensor) -> torch.dtype:
    """What long sums of this tensor's entries are accumulated in."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that is divided among ranks (all of which have to ask for it); any other as it is. Detached."""
    given = tensor.detach()
    whole: torch.Tensor = given.full_tensor() if hasattr(given, "full_tensor") else given
    return whole


@contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """Never compute more coarsely than the plan's slack covers: TF32 only where planned, bf16 autocast where planned."""
    half, allow = precision == "bfloat16", precision in ("tf32", "bfloat16")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32) if device.type == "cuda" else None
    switched = before is not None and before != (allow, allow)
    try:
        if switched:
            matmul.allow_tf32 = cudnn.allow_tf32 = allow
        if half or torch.is_autocast_enabled(device.type):  # also switched off where it is not planned, in a caller's own autocast
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
                yield
        else:
            yield
    finally:
        if switched and before is not None:
            matmul.allow_tf32, cudnn.allow_tf32 = before


def seed_torch(seed: int) -> None:
    """torch.manual_seed, without what it does for devices that are not used.

    For each kind of accelerator that torch was built for and nobody has touched, it formats the stack of its caller and keeps the
    call for later, for ever: a quarter of the time of planning a small network was that.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def random_states(device: torch.device) -> tuple[Any, ...]:
    """What the generators that everybody draws from will draw next: torch's, Python's and numpy's."""
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), of_device, random.getstate(), np.random.get_state()  # noqa: NPY002


def set_random_states(states: tuple[Any, ...], device: torch.device) -> None:
    """Let them draw that again."""
    of_torch, of_device, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, device)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002


def seed_all(seed: int) -> None:
    """Let the generators that everybody draws from go on from here: torch's, Python's and numpy's."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002


class Undrawn:
    """Within the block random numbers may be drawn: afterwards torch's, Python's and numpy's generators are where they were.

    A class, not a generator function: one of those that a Ctrl-C has left open would put them back whenever it is thrown away, in
    the middle of something else.

    Args:
        devices: whose generators are put back too.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices or (_PROCESSOR,)

    def __enter__(self) -> None:
        self._states = [random_states(device) for device in self._devices]

    def __exit__(self, *_: object) -> None:
        for states, device in zip(self._states, self._devices, strict=True):
            set_random_states(states, device)


def keep_freed_memory() -> None:
    """Let the C library keep freed buffers for the next microbatch, instead of giving them back to the system each time.

    Memory that was given back has to be cleared and mapped again page by page: a fifth of the time of a small network's step was
    that. glibc gives blocks back that are larger than the largest one it has seen freed, up to 32 MB, and keeps twice that much at
    the end of its heap. So it is shown a large one, which is never touched and costs nothing. Other libraries are not affected.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products in the dtype of their factors, whatever autocast the caller is in."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


_numbers: ContextVar[list[torch.Tensor] | None] = ContextVar("numbers", default=None)


@contextmanager
def deferred_checks() -> Iterator[list[torch.Tensor]]:
    """Within the block :func:`are_finite` does not wait for the device: it takes its numbers for finite and notes them.

    At the end of the block the list has a condition for all of them: what was computed may be used once that is known to be true.
    """
    conditions: list[torch.Tensor] = []
    noted: list[torch.Tensor] = []
    token = _numbers.set(noted)
    try:
        yield conditions
    finally:
        _numbers.reset(token)
    if noted:
        conditions.append(torch.isfinite(torch.cat([numbers.detach().reshape(-1) for numbers in noted])).all())


def is_deferring() -> bool:
    """Whether checks are deferred, and no value may be read from the device."""
    return _numbers.get() is not None


def are_finite(numbers: torch.Tensor) -> bool:
    """Whether all of them are finite; under :func:`deferred_checks` they are noted, and it is assumed."""
    noted = _numbers.get()
    if noted is None:
        return bool(torch.isfinite(numbers).all())
    noted.append(numbers)
    return True


def same_as_array(tensor: torch.Tensor) -> bool:
    """Whether numpy sees the same numbers in the same memory."""
    ordinary = type(tensor) in _ORDINARY and tensor.dtype in _NUMPY and tensor.device.type == "cpu"
    return ordinary and tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_neg()


def same_entries(a: torch.Tensor, b: torch.Tensor) -> bool:
    """What torch.equal says: same shape, no entry differs, none is NaN. Of long tensors on a processor by numpy, twice as fast."""
    if a.device.type == "cpu" == b.device.type and a.dtype == b.dtype and a.dtype in _NUMPY and type(a) in _ORDINARY:
        with torch._C.DisableTorchFunction():
            if a.numel() < _LONG:
                return bool(torch.equal(a, b))
            return bool(np.array_equal(a.detach().numpy(), b.detach().numpy()))
    return bool(torch.equal(a, b))
