"""What the kernels of lipdp.privacy.noise_kernels compute, in plain Python: all that is around them then runs without a device."""

from __future__ import annotations

import contextlib
import struct
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lipdp.digest import keyed_words
from lipdp.privacy import noise_cuda
from lipdp.privacy.noise import noised_on_processor

# The known answer of draft-irtf-cfrg-xchacha, section 2.2.1: key, what it is mixed with, the key that this makes.
HCHACHA = (
    bytes(range(32)),
    bytes.fromhex("000000090000004a0000000031415927"),
    "82413b4227b27bfed30e42508a877d73a0f9e4d58a74a853c12ec41326d3ecdc",
)
_MASK = 0xFFFFFFFF
_COLUMNS = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
_DIAGONALS = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]


def hchacha20(key: bytes, given: bytes) -> bytes:
    """As draft-irtf-cfrg-xchacha says it, section 2.2."""
    x = list(struct.unpack("<16I", b"expand 32-byte k" + key + given))
    for _ in range(10):
        for a, b, c, d in (*_COLUMNS, *_DIAGONALS):
            for one, other, to, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[one] = (x[one] + x[other]) & _MASK
                x[to] ^= x[one]
                x[to] = ((x[to] << left) | (x[to] >> (32 - left))) & _MASK
    return struct.pack("<8I", *x[:4], *x[12:])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def absorb(key: torch.Tensor, words: torch.Tensor, pairs: int, out: torch.Tensor, **_: Any) -> None:
    made = _bytes(key[:8])
    for pair in range(pairs):
        made = hchacha20(made, _bytes(words[pair]))
    out.copy_(torch.from_numpy(np.frombuffer(made, dtype="<i4").copy()))


def digest(*given: Any, **_: Any) -> None:
    *parts, secret, out = given
    for row, (values, count) in enumerate(zip(parts[:3], parts[3:], strict=True)):
        if count:
            out[row] += keyed_words(values[:count], _bytes(secret[:8]))[0]


class _Launched:
    def __init__(self, kernel: Callable[..., None]) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._kernel


def _noised(flat: torch.Tensor, std: float, dtype: torch.dtype, key: torch.Tensor, segment: int, tables: Any) -> torch.Tensor:
    return torch.from_numpy(noised_on_processor(flat.contiguous().numpy(), std, _bytes(key), segment)).to(dtype)


def draw_as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """From here on noise for the processor is drawn as for a device that has the kernels."""
    kernels = types.SimpleNamespace(absorb=_Launched(absorb), digest=_Launched(digest))
    for cached in (noise_cuda.release_function, noise_cuda._replayed_release):
        cached.cache_clear()
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(noise_cuda, "available", lambda device: True)
    patch.setattr(noise_cuda, "_KERNELS", types.SimpleNamespace(module=kernels))
    patch.setattr(noise_cuda, "_noised", _noised)
