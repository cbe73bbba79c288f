"""A batch that does not fit into memory, in parts: Σ_i ν_i·g_i is a sum over examples, whose norms don't depend on each other."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from lipdp.clipping.batch import Batch, Clipped
from lipdp.errors import LipdpNotice

__all__ = ["even_part", "joined", "notice_parts", "part_of"]


def even_part(examples: int, most: int) -> int:
    """The size of even parts of ``most`` examples at most: all of one shape but perhaps the last."""
    count = -(-examples // most)
    return -(-examples // count)


def part_of(batch: Batch, start: int, size: int, copies: int) -> Batch:
    """Examples ``start`` to ``start + size``, with all their copies."""
    rows = slice(start * copies, (start + size) * copies)
    return Batch(batch.x[rows], batch.y[rows], batch.keep[start : start + size])


def joined(parts: Sequence[Clipped]) -> Clipped:
    """What clipping them at once would have given."""
    sums = {name: total.clone() for name, total in parts[0].sums.items()}
    for part in parts[1:]:
        torch._foreach_add_(list(sums.values()), [part.sums[name] for name in sums])
    norms, factors, kept = (torch.cat([getattr(part, field) for part in parts]) for field in ("norms", "factors", "kept"))
    return replace(parts[0], sums=sums, norms=norms, factors=factors, kept=kept)


def notice_parts(examples: int, most: int) -> None:
    """Say so once: smaller microbatches would save the attempt, and be as fast."""
    warnings.warn(
        f"a batch of {examples} examples does not fit into the GPU's memory: it is clipped in parts of {most}, with the same "
        "result. With a microbatch_size of that or less it is not tried in vain.",
        LipdpNotice,
        stacklevel=4,
    )
