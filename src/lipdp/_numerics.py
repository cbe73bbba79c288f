"""How numbers are rounded, and in which arithmetic they are computed: the few things that every room needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = [
    "HALF",
    "accumulators",
    "arithmetic",
    "gamma",
    "keep_freed_memory",
    "no_autocast",
    "seed_torch",
    "unit_roundoff",
    "whole_tensor",
    "wide",
]

HALF = (torch.float16, torch.bfloat16)
_LARGEST_KEPT = 31 * 2**20


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of rounding to nearest: half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2


def accumulators(dtype: torch.dtype) -> torch.dtype:
    """What sums of such numbers are accumulated in: never in half precision."""
    return torch.float32 if dtype in HALF else dtype


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
    with ExitStack() as stack:
        if device.type == "cuda":
            allow = precision in ("tf32", "bfloat16")
            before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", before[0])
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", before[1])
            torch.backends.cuda.matmul.allow_tf32 = allow
            torch.backends.cudnn.allow_tf32 = allow
        # Also switched off where it is not planned: the caller may be inside an autocast of his own.
        stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"))
        yield


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


def keep_freed_memory() -> None:
    """Let the C library keep freed buffers for the next microbatch, instead of giving them back to the system each time.

    Memory that was given back has to be cleared and mapped again page by page: a fifth of the time of a small network's step was
    that. glibc gives blocks back that are larger than the largest one it has seen freed, up to 32 MB, and keeps twice that much at
    the end of its heap. So it is shown a large one, which is never touched and costs nothing. Other libraries are not affected.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Products in the dtype of their factors, whatever autocast the caller is in."""
    with torch.autocast(device.type, enabled=False):
        yield
