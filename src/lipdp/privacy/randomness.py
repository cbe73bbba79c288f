"""Counter-based randomness: every draw is a function of (secret seed, step number, purpose), of nothing else.

Why: a run that is killed and resumed from an older checkpoint does some steps again. With fresh randomness those would
be new releases about the same data, to be paid for again; here they are exactly the releases made before, which cost
nothing, as long as the step is the same computation (same data, same kind of device: CPU and GPU streams differ).
And resuming needs no generator state: the seed and the step number say it all.

The seed is as secret as the data. Whoever knows it can subtract the noise. It does not belong in logs, reports or
shared checkpoints; a fixed seed in published code is for tests only.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
import torch

from lipdp.errors import ConfigurationError
from lipdp.privacy._checks import whole

__all__ = ["derive_seed", "fresh_seed", "generator"]

_MT_WORDS = 624  # 32-bit words of Mersenne-Twister state
_MT_OFFSET = 3  # in torch's CPU state, as 64-bit entries: seed, flags, position, then one entry per word


def fresh_seed() -> int:
    """A new secret seed: 128 bits from the operating system."""
    return secrets.randbits(128)


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """The seed of one use in one step: the first 63 bits of SHA-256(seed, step, purpose)."""
    return int.from_bytes(hashlib.sha256(_message(seed, step, purpose)).digest()[:8], "big") >> 1


def generator(seed: int, step: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for one use (``"sample"``, ``"noise"``, …) in one step, a function of (seed, step, purpose).

    On accelerators it is seeded with :func:`derive_seed` (their generators use all 64 bits as a key). torch's CPU
    generator looks at 32 bits of its seed only: noise could be found by trying them all, and two of 10,000 steps would
    share their noise with probability 1%. So there the whole 19,937-bit state is filled, from SHAKE-256 of the triple.
    """
    made = torch.Generator(device=device)
    derived = derive_seed(seed, step, purpose)
    made.manual_seed(derived)
    if made.device.type == "cpu":
        state = made.get_state()
        words = state.view(torch.int64)
        if words.numel() < _MT_OFFSET + _MT_WORDS or int(words[_MT_OFFSET]) != derived & 0xFFFFFFFF:
            raise ConfigurationError(
                f"torch {torch.__version__} lays out its CPU generator's state in a way that this lipdp does not know, "
                "so noise can't be seeded with more than 32 bits. Use a torch version that lipdp was tested with."
            )
        filling = hashlib.shake_256(_message(seed, step, purpose)).digest(4 * _MT_WORDS)
        fresh = np.frombuffer(filling, dtype="<u4").astype(np.int64)
        words[_MT_OFFSET : _MT_OFFSET + _MT_WORDS] = torch.from_numpy(fresh)
        made.set_state(state)
    return made


def _message(seed: int, step: int, purpose: str) -> bytes:
    if not isinstance(purpose, str) or not purpose:
        raise ConfigurationError(f"purpose is {purpose!r}: say what the randomness is for, e.g. 'sample' or 'noise'.")
    # Decimal numbers end at the separator and the free text comes last: no two triples share a message.
    return f"lipdp/{whole('seed', seed, least=0)}/{whole('step', step, least=0)}/{purpose}".encode()
