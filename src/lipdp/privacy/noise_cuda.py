"""The door to the CUDA kernels of :mod:`lipdp.privacy.noise`: nothing here waits for the device."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipdp._kernels import Kernels
from lipdp.digest import keyed_words
from lipdp.graphs import Branches, GraphedFunction
from lipdp.privacy.noise import (
    SERIES,
    TERMS,
    Segment,
    Table,
    cells_of,
    grid,
    mantissa_of,
    noised_on_processor,
    pieces_of,
    table,
)
from lipdp.privacy.randomness import chacha_bytes, derive_key

_CELLS = 16  # bits of the choice that are looked up: the table stays close to the processors
_BLOCK = 128  # blocks of ChaCha20 a program computes
_LISTED = 128  # listed places a program works on
_PROGRAMS = 1024  # that share a list
_ROWS = 2048  # words that a program of the digest adds up
_FEW = 2**12  # bytes
_CLAIM = b"lipdp: the claim"  # what a key is mixed with to tell its draw by
_AT_ONCE = 3  # tensors whose digests are one launch: weights, inputs, targets
_READ_AS = {
    torch.float64: torch.int64,
    torch.int64: torch.int64,
    torch.float32: torch.int32,
    torch.int32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.uint8: torch.uint8,
    torch.bool: torch.uint8,
}


_Tables = tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]


def _right(device: torch.device) -> bool:
    """ChaCha20 as on the processor, and noise too, for enough values that all of the kernels' ways are gone."""
    key = bytes(range(32))
    blocks = chacha_on_device(key, 5, (1, 2, 3), 7, device).cpu().numpy().astype("<i4").tobytes()
    sums = torch.linspace(-3.0, 3.0, 20_000, dtype=torch.float64)
    (drawn,), _ = noised_on_device([([sums.to(device)], 0.7, torch.float64)], key, [], bound=False)
    expected = noised_on_processor(sums.numpy(), 0.7, key)
    return blocks == chacha_bytes(key, 64 * 7, counter=5, nonce=(1, 2, 3)) and bool(np.array_equal(drawn.cpu().numpy(), expected))


_KERNELS = Kernels("lipdp.privacy.noise_kernels", "noise", _right, least=None, instead="it is drawn on the processor")
available = _KERNELS.on  # on this device: tried once, against known answers and the processor's noise


def chacha_on_device(key: bytes, first: int, nonce: tuple[int, int, int], count: int, device: torch.device) -> Tensor:
    """``count`` blocks of ChaCha20 from counter ``first`` on: (count, 16), int32."""
    out = torch.empty(count, 16, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        words = _moved(np.frombuffer(key, dtype="<i4").copy(), device)
        _KERNELS.module.blocks[(-(-count // 64),)](out, words, first, *nonce, count, BLOCK=64)
    return out


def noised_on_device(
    segments: Sequence[Segment], key: bytes, seen: Sequence[Tensor], *, bound: bool
) -> tuple[list[Tensor], Tensor | None]:
    """(round(S/g) + N + ½)·g of each segment, all on one device: one long vector each, of its type. Beside them a tag.

    The key depends on the words that were ``seen``, and with ``bound`` on the sums themselves, without the host knowing them; the
    tag (four words of 64 bits, of a bound draw) depends on all of it too, and says nothing of the key.
    """
    release = _replayed_release(kinds_of(segments), segments[0][0][0].device, bound)
    vectors, tag = release(*release_inputs(segments, key, seen))
    copies: dict[int, Tensor] = {}  # the recording's memory is overwritten by the next release
    for dtype in {vector.dtype for vector in vectors}:
        numbers = [number for number, vector in enumerate(vectors) if vector.dtype == dtype]
        whole = torch.cat([vectors[number] for number in numbers])
        copies |= zip(numbers, torch.split(whole, [vectors[number].numel() for number in numbers]), strict=True)
    return [copies[number] for number in range(len(vectors))], None if tag is None else tag.clone()


Kinds = tuple[tuple[int, float, torch.dtype], ...]
"""Of each segment, how many tensors it has, its std and its type."""
Release = tuple[list[Tensor], Tensor | None]
"""Noised vectors, and the tag of a bound draw."""


def kinds_of(segments: Sequence[Segment]) -> Kinds:
    """All that :func:`release_function` has to know of segments."""
    return tuple((len(tensors), std, dtype) for tensors, std, dtype in segments)


def release_inputs(segments: Sequence[Segment], key: bytes, seen: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What :func:`release_function` takes: the secret, the words that were seen, the sums."""
    device = segments[0][0][0].device
    words = [w.to(device, torch.int64).reshape(-1, 2) for w in seen] or [torch.empty(0, 2, dtype=torch.int64, device=device)]
    secret = _moved(np.frombuffer(key + derive_key(key, "digest"), dtype="<i4").copy(), device)
    return secret, words[0] if len(words) == 1 else torch.cat(words), *(tensor for tensors, _, _ in segments for tensor in tensors)


@lru_cache(maxsize=32)
def release_function(kinds: Kinds, device: torch.device, bound: bool) -> Callable[..., Release]:
    """The work of a release, on the device from the key to the end, fit to be recorded. It keeps its tables alive."""
    tables = [_tables(mantissa_of(std), device) for _, std, _ in kinds]
    claim = _kept_there(_CLAIM, device).view(torch.int64).reshape(1, 2)

    def work(secret: Tensor, words: Tensor, *sums: Tensor) -> Release:
        given = iter(sums)
        pieces = [pieces_of(list(itertools.islice(given, count)), std, dtype) for count, std, dtype in kinds]
        with torch.cuda.device(device):
            if bound:
                words = torch.cat([words, _digests([part for parts in pieces for part in parts], secret[8:])])
            key = _absorbed(secret, words)
            tag = _absorbed(key, claim).view(torch.int64) if bound else None
            number, branches, drawn = itertools.count(), Branches(device), []
            for parts, (_, std, dtype), with_bins in zip(pieces, kinds, tables, strict=True):
                with branches.branch():
                    drawn.append([_noised(part, std, dtype, key, next(number), with_bins) for part in parts])
            branches.join()
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in drawn], tag

    return work


@lru_cache(maxsize=32)
def _replayed_release(kinds: Kinds, device: torch.device, bound: bool) -> GraphedFunction[Release]:
    """:func:`release_function`, recorded once and replayed."""
    return GraphedFunction(release_function(kinds, device, bound), state=lambda: None, limit=2)


def words_of(tensors: Sequence[Tensor], key: bytes) -> Tensor:
    """A keyed digest of each tensor's values, two words of 64 bits, where they are: (tensors, 2)."""
    if not all(available(tensor.device) and tensor.dtype in _READ_AS for tensor in tensors):
        return torch.cat([keyed_words(tensor, key) for tensor in tensors])
    with torch.cuda.device(tensors[0].device):
        return _digests([tensor.detach().reshape(-1) for tensor in tensors], _kept_there(key, tensors[0].device))


@cache
def _kept_there(key: bytes, device: torch.device) -> Tensor:
    """A key that is used in every step; kept for good, for recordings read it."""
    return _moved(np.frombuffer(key, dtype="<i4").copy(), device)


def _absorbed(key: Tensor, words: Tensor) -> Tensor:
    """The key that pairs of words make of one: one way."""
    out = torch.empty(8, dtype=torch.int32, device=key.device)
    _KERNELS.module.absorb[(1,)](key, words, len(words), out, num_warps=1)
    return out


def _digests(parts: Sequence[Tensor], secret: Tensor) -> Tensor:
    """Two words of each part; of a few parts in one launch."""
    out = torch.zeros(len(parts), 2, dtype=torch.int64, device=secret.device)
    for first in range(0, len(parts), _AT_ONCE):
        values = [part.contiguous().view(_READ_AS[part.dtype]) for part in parts[first : first + _AT_ONCE]]
        none = _AT_ONCE - len(values)
        counts = [*map(len, values), *[0] * none]
        programs = sum(-(-count // _ROWS) for count in counts)
        if programs:
            _KERNELS.module.digest[(programs,)](*values, *[out] * none, *counts, secret, out[first:], BLOCK=_ROWS)
    return out


def _moved(array: Any, device: torch.device) -> Tensor:
    """The host goes on at once: a few bytes are copied by the call itself, more of them by way of pinned memory."""
    host = torch.from_numpy(array)
    pinned = device.type == "cuda" and host.nbytes > _FEW
    return (host.pin_memory() if pinned else host).to(device, non_blocking=True)


def _noised(flat: Tensor, std: float, dtype: torch.dtype, key: Tensor, segment: int, tables: _Tables) -> Tensor:
    device, count = flat.device, flat.numel()
    released = torch.empty(count, dtype=dtype, device=device)
    if count == 0:
        return released
    bins, cells, ends, heights, half_square, series = tables
    exponent = math.frexp(grid(std))[1] - 1  # it is a power of two
    # One value in 20 is listed at most; that one in 8 were has a probability below 2^-1000 where it is not certain to fit.
    capacity = count // 8 + 4096
    places, words = (torch.empty(capacity, dtype=kind, device=device) for kind in (torch.int32, torch.int64))
    listed = torch.zeros(1, dtype=torch.int32, device=device)
    kernels = _KERNELS.module
    sums = flat.contiguous()
    kernels.draw[(-(-count // (8 * _BLOCK)),)](
        sums, released, key, cells, places, words, listed, count, capacity, exponent, segment,
        CELLS=_CELLS, BLOCK=_BLOCK,
    )  # fmt: skip
    kernels.settle[(min(_PROGRAMS, -(-capacity // _LISTED)),)](
        sums, released, key, ends, heights, half_square, series, places, words, listed, capacity, bins, exponent,
        segment, TERMS=TERMS, BLOCK=_LISTED,
    )  # fmt: skip
    return released


@lru_cache(maxsize=64)
def _tables(mantissa: int, device: torch.device) -> _Tables:
    bins: Table = table(mantissa)
    cells = _moved(cells_of(bins.ends[: bins.bins], _CELLS + 1)[: 1 << _CELLS].copy(), device)
    numbers = (bins.ends, bins.heights, (bins.half_square,), SERIES)
    return bins.bins, cells, *(_moved(_halves(part), device) for part in numbers)  # type: ignore[return-value]


def _halves(numbers: Sequence[int]) -> Any:
    """Numbers of 128 bits as pairs of words, the upper one first."""
    data = b"".join(struct.pack("<QQ", number >> 64, number & (2**64 - 1)) for number in numbers)
    return np.frombuffer(data, dtype="<i8").copy()
