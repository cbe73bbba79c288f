"""The secrets and the random numbers of tests follow from names: nothing fails, or passes, by chance.

Keys of runs are drawn by the operating system, and samples and noise follow from keys: a statement about a run that holds in 999 of
1,000 would fail in every hundredth run of the suite. Here the same numbers come again in every run, and none depends on the tests
before. Processes that a test starts or forks draw their secrets from the system. ``LIPDP_ROTATION=N`` draws the N-th other numbers,
and other examples of hypothesis, where there is time for it.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

__all__ = ["ROTATION", "following_from"]

ROTATION = os.environ.get("LIPDP_ROTATION", "")
_PROCESS = os.getpid()
_system = os.urandom


@contextmanager
def following_from(name: str) -> Iterator[None]:
    """Within the block, secrets and random numbers follow from this name; afterwards all go on as before."""
    import numpy as np
    import torch

    from lipdp._numerics import seed_torch

    seed = hashlib.sha256(f"{ROTATION} {name}".encode()).digest()
    draws = count()

    def secret(size: int) -> bytes:
        if os.getpid() != _PROCESS:
            return _system(size)
        return hashlib.shake_256(seed + next(draws).to_bytes(8, "big")).digest(size)

    number = int.from_bytes(seed[:4], "big")
    before = random._urandom, random.getstate(), np.random.get_state(), torch.get_rng_state()  # type: ignore[attr-defined]  # noqa: NPY002
    random._urandom = secret  # type: ignore[attr-defined]  # what `secrets` draws from
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    seed_torch(number)  # torch.manual_seed also formats the stack, three times: a fifth of what a small test takes
    try:
        yield
    finally:
        random._urandom = before[0]  # type: ignore[attr-defined]
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
        torch.set_rng_state(before[3])
