"""Sums over the records of a microbatch whose rounding is small and known: short sums in float32, added up in float64.

A layer's gradient is a sum over all rows of a microbatch, Σ_i δ_i ⊗ x_i. Added up in float32, in whatever order a library likes, it
is off by up to u·K·Σ_i‖g_i‖ for K terms: with a thousand rows, far more than u·Δ, and *how* far depends on every row. One record
more or less then changes the sum by its own gradient and by the difference of two rounding errors of the whole.

Here float32 only adds up :data:`BLOCK` rows of a matrix product, then :data:`BLOCKS` of such blocks; or c records of a convolution
with T positions, where c²·T ≤ :data:`AREA`. Everything longer is added up in float64. With Δ ≥ Σ_t‖δ_it‖‖x_it‖ for every record i,

* L rows, one for each record: in any order of adding, the partial sums that are rounded have at most 2, 3, …, L terms, so the error
  is at most u·Δ·(L² + L)/2. Where a record has T > 1 rows it may lie in two blocks, with rows of others that are zero but lengthen
  the sums: 0.56·L²·u·Δ at most, over all T (at T = 3);
* M blocks of L rows: partial sums of at most 2·L, 3·L, …, M·L terms: u·Δ·L·(M² + M)/2;
* a convolution: c·T terms, each in at most c·T partial sums: u·Δ·c²·T;
* the sum with the record and the sum without it: twice that. Where another record has to move for it (:mod:`lipdp.training.seats`):
  twice again.

:func:`sum_slack` is the total. What is rounded *before* these sums, in the passes through the network, is a record's own and does
not depend on the others: see :mod:`lipdp.bounds.rounding`. How a backward pass comes to add up like this: :mod:`lipdp._backward`.

Clipped gradients are short, but what they are sums of (δ_t ⊗ x_t over positions t) may be long and cancel. There every record is
added up by itself (``apart``), and records in float64: nothing of one record is rounded together with another's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lipdp import _sums_kernel
from lipdp._numerics import HALF, wide

BLOCK = 128
"""Rows of a matrix product that are added up in float32."""
BLOCKS = 8
"""Blocks that are added up in float32."""
AREA = 2**14
"""c²·T of a convolution: c records at T positions are added up in float32."""
MOST_ROWS = 4096
"""Records of a microbatch at most: its sum is rounded to the parameter's type once."""

# Entries of a product up to which all blocks are computed at once: many small calls cost more than the memory.
_SMALL = 2**14
# Numbers that blocks (or records) which are computed at once may hold.
_AT_ONCE = 2**24
# Numbers of records' products that are computed at once on a processor, before they are added up: what stays in its cache.
_CACHED = 2**17
# Entries of a product from which on records are added up one by one there, and of a part of it then.
_LONG_PRODUCT, _LONG_PART = 2**15, 2**20
# Blocks of a convolution, and channels of an input, from which on all blocks at once are faster on a processor.
_FEW = 9
# Across blocks and microbatches, in float64: 2·n·u₆₄ of the sizes of n of them, for a billion records.
_ACROSS = 1e-6


def sum_slack(
    inside: float, stored: float = 0.0, *, rows: int = MOST_ROWS, roundings: int = 1, convolutions: bool = False
) -> float:
    """What rounding can add to one record's part of a sum over microbatches, relative to Δ.

    Args:
        inside: u of a block's sums.
        stored: u of the numbers that a microbatch's sum is handed on in, once it is complete; 0: it stays in float64.
        rows: records of a microbatch.
        roundings: how often a complete sum is rounded: stored, scaled, added to that of another use of the parameter.
        convolutions: whether several records of a convolution are added up together.
    """
    length = min(rows, BLOCK)
    blocks = min(-(-rows // BLOCK), BLOCKS)
    longest = 0.5625 * length**2 + length + 1.25 * length * (blocks**2 + blocks - 2) / 2
    if convolutions:
        longest = max(longest, AREA)
    return 4 * longest * inside + 4 * rows * stored * roundings + _ACROSS


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision promoted: a sum in it would be rounded to it."""
    return tensor.float() if tensor.dtype in HALF else tensor


def _blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A dimension cut into blocks, of which it is a multiple."""
    blocks: torch.Tensor = x.unflatten(dim, (-1, BLOCK))  # type: ignore[no-untyped-call]
    return blocks


def contract(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ_k a_k ⊗ b_k, (…, K, p) and (…, K, d) → (…, p, d) in float64, in blocks."""
    return contracted(a, b).to(wide(a))


def contracted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """:func:`contract`, but in float32 where that is all it takes."""
    a, b = _single(a).transpose(-1, -2), _single(b)
    rows, step = b.shape[-2], BLOCK * BLOCKS
    if b.ndim == 2 and b.device.type == "cuda" and rows >= 2 * BLOCK and b.dtype != torch.float64:
        return _all_blocks(a, b)
    if rows <= step:
        return _few_blocks(a, b)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=wide(a), device=a.device)
    for start in range(0, rows, step):
        total += _few_blocks(a[..., start : start + step], b[..., start : start + step, :])
    return total


def _all_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a·b for a (p, K) and b (K, d): all blocks in a few calls, added up in float64. On a GPU many small calls take longer."""
    rows, size = len(b), len(a) * b.shape[1]
    whole, at_once = rows // BLOCK * BLOCK, BLOCK * max(1, _AT_ONCE // max(1, size))
    total = torch.zeros(len(a), b.shape[1], dtype=wide(a), device=a.device)
    for start in range(0, whole, at_once):
        part = slice(start, min(start + at_once, whole))
        total += torch.bmm(_blocks(a[:, part], 1).transpose(0, 1), _blocks(b[part], 0)).sum(0, dtype=total.dtype)
    return total if whole == rows else total.add_(a[:, whole:] @ b[whole:])


def _few_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a·b for a (…, p, K) and b (…, K, d), by blocks of K, which are added up as they are."""
    rows = b.shape[-2]
    if b.ndim == 2 and rows >= 2 * BLOCK and a.shape[0] * b.shape[1] <= _SMALL:
        whole = rows // BLOCK * BLOCK
        total = torch.bmm(_blocks(a[:, :whole], 1).transpose(0, 1), _blocks(b[:whole], 0)).sum(0)
        return total if whole == rows else total.add_(a[:, whole:] @ b[whole:])
    total = a[..., :BLOCK] @ b[..., :BLOCK, :]
    in_one = b.ndim == 2 and rows > BLOCK and _adds_blocks_last(total, a.stride(0) == 1, b.stride(1) == 1)
    for start in range(BLOCK, rows, BLOCK):
        part = a[..., start : start + BLOCK], b[..., start : start + BLOCK, :]
        total = total.addmm_(*part) if in_one else total.add_(part[0] @ part[1])
    return total


_added_last: dict[tuple[Any, ...], bool] = {}


def _adds_blocks_last(like: torch.Tensor, a_down: bool, b_across: bool) -> bool:
    """Whether the library's C + A·B adds up A·B by itself before it adds C: asked once for a shape, by numbers that tell.

    2²⁴ + 1 is 2²⁴ in float32: added to C one by one, the ones of A·B would be lost.
    """
    key = (tuple(like.shape), like.dtype, str(like.device), a_down, b_across, torch.get_num_threads())
    if key not in _added_last:
        if like.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        p, d = like.shape
        a = torch.ones(BLOCK, p, dtype=like.dtype, device=like.device).T if a_down else like.new_ones(p, BLOCK)
        b = like.new_ones(BLOCK, d) if b_across else like.new_ones(d, BLOCK).T
        large = 2.0 / torch.finfo(like.dtype).eps
        expected = large + BLOCK
        _added_last[key] = bool((torch.full_like(like, large).addmm_(a, b) == expected).all())
    return _added_last[key]


def contract_apart(a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ_i w_i·Σ_t a_it ⊗ b_it, (B, T, p) and (B, T, d) → (p, d) in float64: every record by itself, then all of them."""
    a, b = _single(a), _single(b)
    records, length, p, d = *a.shape, b.shape[2]
    weights = weights.to(a.dtype)
    if length > 1 and records and _sums_kernel.available(a, b):
        return _sums_kernel.outer_sums(a, b, weights)
    scale = weights[:, None, None]
    a, b = (a * scale, b) if p <= d else (a, b * scale)
    if length <= 1:
        return contract(a.flatten(0, 1), b.flatten(0, 1))
    total = torch.zeros(p, d, dtype=wide(a), device=a.device)
    if a.device.type == "cpu" and p * d >= _LONG_PRODUCT:
        return _one_by_one(a.transpose(1, 2), b, total)
    size = max(1, _at_once(a.device) // max(1, p * d))
    for start in range(0, records, size):
        total += torch.bmm(a[start : start + size].transpose(1, 2), b[start : start + size]).sum(0, dtype=total.dtype)
    return total


def _at_once(device: torch.device) -> int:
    return _CACHED if device.type == "cpu" else _AT_ONCE


def _one_by_one(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """total + Σ_i a_i·b_i, (B, p, T) and (B, T, d), in its place: each product stays in a processor's cache until it is added."""
    side = max(1, _LONG_PART // total.shape[1])
    for start in range(0, len(total), side):
        part = total[start : start + side]
        product = a.new_empty(part.shape)
        for of_a, of_b in zip(a[:, start : start + side], b, strict=True):
            part += torch.mm(of_a, of_b, out=product)
    return total


def row_sums(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Σ over ``dims``, the first dimension among them: positions of a record first, then records, by blocks."""
    inner = [dim for dim in dims if dim != 0]
    each = _single(x)
    each = each.sum(inner) if inner else each
    whole = len(each) // BLOCK * BLOCK
    blocks = _blocks(each[:whole], 0).sum(1).sum(0, dtype=wide(x))
    return blocks if whole == len(each) else blocks + each[whole:].sum(0)


def convolution_sums(
    delta: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: Sequence[int] = (),
    apart: int = 0,
) -> torch.Tensor:
    """The gradient of a convolution's kernel, summed over all rows, in float64.

    ``apart``: how many rows make up a record, each of which is added up by itself; 0: several of them together, as far as
    :data:`AREA` allows.
    """
    delta, x = _single(delta), _single(x)
    positions = math.prod((x if transposed else delta).shape[2:]) * max(1, apart)
    if positions > AREA and not apart:
        delta, x = delta.to(wide(delta)), x.to(wide(x))
    rows = len(x)
    size = apart or max(1, math.isqrt(AREA // positions) if positions <= AREA else rows)
    if rows > size and not transposed and _sums_kernel.available(delta, x) and len(stride) <= 2:
        return _sums_kernel.convolution_sums(delta, x, shape, stride, padding, dilation, groups, size, apart=bool(apart))
    settings = (list(stride), list(padding), list(dilation), transposed, list(output_padding or [0] * len(stride)))

    def gradients(cotangents: torch.Tensor, inputs: torch.Tensor, sets: int = 1) -> torch.Tensor:
        kernel = inputs.new_empty(1).expand(sets * shape[0], *shape[1:])
        kernels: torch.Tensor = torch.ops.aten.convolution_backward(
            cotangents, inputs, kernel, None, *settings, sets * groups, [False, True, False]
        )[1]
        return kernels

    if rows <= size:
        return gradients(delta, x).to(wide(x))
    total = torch.zeros(*shape, dtype=wide(x), device=x.device)
    most = max(1, (_at_once(x.device) if apart else _AT_ONCE) // max(1, total.numel()))
    while rows:
        sets = min(most, rows // size)
        if sets <= 1 or (sets <= _FEW and delta.device.type == "cpu" and shape[1] < _FEW):
            part = slice(0, size)
            total += gradients(delta[part], x[part])
        else:
            part = slice(0, sets * size)
            here, there = (_side_by_side(tensor[part], size, apart > 1) for tensor in (delta, x))
            total += gradients(here, there, sets).reshape(sets, *shape).sum(0, dtype=total.dtype)
        delta, x = delta[part.stop :], x[part.stop :]
        rows = len(x)
    return total


def _side_by_side(rows: torch.Tensor, size: int, neighbours: bool) -> torch.Tensor:
    """Blocks of ``size`` rows as the groups of one convolution: (B, C, …) → (size, B/size·C, …).

    Without a copy, row j·(B/size)+k is the j-th of block k. ``neighbours``: a block has to have consecutive rows.
    """
    blocks = rows.reshape(-1, size, *rows.shape[1:]).transpose(0, 1) if neighbours else rows.contiguous()
    return blocks.reshape(size, -1, *rows.shape[2:])
