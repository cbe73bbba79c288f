"""Where every random number of a release comes from: ChaCha20 under a 256-bit key, each draw at a place of its own.

A :class:`Stream` is a key and a count of the draws made from it. What a draw gives is a function of (key, number of the draw,
place in it), of nothing else: a run that is killed and done again makes the same draws, needs no generator state, and noise can be
computed at any place, on any device. Keys come from the operating system (:func:`fresh_key`), and from one another only one way
(:func:`derive_key`): who learns one draw, or the key of one step, learns nothing about another.

A key is as secret as the data. Whoever knows it can subtract the noise. It does not belong in logs, reports or shared checkpoints.

**On the integers** draws are exact, in rational arithmetic, from the bits of a :class:`Stream`. Floating-point noise has gaps and
tells on the value under it (Mironov 2012). There nothing is rounded: the probabilities are exactly those of the proof. After
Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), algorithms 1 and 2, and McKenna and Sheldon,
"Permute-and-Flip" (2020).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms

from lipdp._checks import whole
from lipdp.errors import ConfigurationError

KEY_BYTES = 32
_BLOCK = 64  # bytes of a block of ChaCha20
_MOST_BLOCKS = 2**32  # that one nonce has
_ZEROS = memoryview(bytes(1 << 20))
_POOL = 4096  # bytes drawn at once for small numbers
_WINDOW = 1 << 15  # words that stay in a processor's cache
_SPARSE = 1 << 10  # words in a row that cost as much as a block by itself

Words = npt.NDArray[np.uint32]
Claim = bytes | torch.Tensor
"""What stands for all that a draw depends on, one way: bytes, or words of 64 bits on a device, where they are not waited for."""


def fresh_key() -> bytes:
    """A new secret key: 256 bits from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def fresh_seed() -> int:
    """The same as a number."""
    return int.from_bytes(fresh_key(), "big")


def derive_key(key: bytes, *parts: Any) -> bytes:
    """The key for one use: HMAC-SHA-256 of what it is for: texts, numbers, bytes, ``None``, tuples and lists of them.

    What Python writes for such values stands for no others, so no two uses share a message.

    Args:
        key: the secret that the new one comes from; who knows the new one does not know it.
        parts: what the new key is for, in any number.
    """
    return hmac.digest(key, repr(parts).encode("utf-8", "surrogatepass"), "sha256")


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """The seed of a torch generator for one use in one step: the first 63 bits of SHA-256(seed, step, purpose).

    For what needs no secret: augmentation, dropout. Noise and samples come from a :class:`Stream`.

    Args:
        seed: of the run, a whole number, 0 or more.
        step: its number, 0 or more.
        purpose: what is drawn, a text that is not empty; different ones give unrelated seeds.
    """
    return int.from_bytes(hashlib.sha256(_message(seed, step, purpose)).digest()[:8], "big") >> 1


def generator(seed: int, step: int, purpose: str) -> Stream:
    """The stream for one use (``"sample"``, ``"noise"``, …) in one step, a function of (seed, step, purpose).

    The seed has to be secret and hard to guess: take :func:`fresh_seed`. One that a person chose is for tests only.

    Args:
        seed: of the run, a whole number, 0 or more.
        step: its number, 0 or more.
        purpose: what is drawn, a text that is not empty; different ones give unrelated streams.
    """
    return Stream(hashlib.blake2b(_message(seed, step, purpose), digest_size=KEY_BYTES, person=b"lipdp stream").digest())


def _message(seed: int, step: int, purpose: str) -> bytes:
    if not isinstance(purpose, str) or not purpose:
        raise ConfigurationError(f"purpose is {purpose!r}: say what the randomness is for, e.g. 'sample' or 'noise'.")
    # Decimal numbers end at the separator and the free text comes last: no two triples share a message.
    return f"lipdp/{whole('seed', seed, least=0)}/{whole('step', step, least=0)}/{purpose}".encode()


_life = object()  # of this process: a fork begins another one


def _forked() -> None:
    global _life
    _life = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Stream:
    """Random draws from a secret key, the operating system's by default. No two draws of a stream share a bit.

    A stream is never two: copies, and the one that an ``os.fork`` would leave in the child, would make the same draws for other
    releases, whose difference has no noise. They are refused.

    Args:
        key: 32 secret bytes.
        bound: whether noise depends on what it is added to as well, so that other sums never get the same noise, even if a draw is
            made again; see :func:`lipdp.privacy.add_noise`. Without it, whoever sees two releases of one draw sees the difference
            of what was released.

    Attributes:
        key: the secret.
        bound: as above.
        claim: called with the number of a bound draw and with a tag that all it depends on is mixed into, its sums too, before it
            is handed out: who keeps a book of what was released can refuse a second draw there that is another one.
    """

    def __init__(self, key: bytes | None = None, *, bound: bool = True) -> None:
        self.key = fresh_key() if key is None else key
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise ConfigurationError(f"a stream's key is {KEY_BYTES} secret bytes: take lipdp.privacy.fresh_key()")
        self.bound = bound
        self.claim: Callable[[int, Claim], None] | None = None
        self._draws = 0
        self._seen: list[torch.Tensor] = []
        self._pool, self._used = b"", 0
        self._life = _life

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a stream can't be copied or pickled: the copy would make the same draws, and two releases with the same noise tell "
            "what they differ in. Make a new one, lipdp.privacy.Stream(), where it is used."
        )

    def __repr__(self) -> str:
        return f"Stream({self._draws} draws made)"

    def absorb(self, words: torch.Tensor) -> None:
        """Let all later draws depend on these whole numbers too (pairs of 64 bits, on any device), without waiting for a device."""
        self._seen.append(words.reshape(-1, 2))
        self._pool = b""

    def claim_last(self, tag: Claim | None) -> None:
        """The last draw is about to be handed out; ``None``: it is not bound to its sums."""
        if self.claim is not None and tag is not None:
            self.claim(self._draws - 1, tag)

    def begin(self, *about: Any) -> tuple[bytes, list[torch.Tensor]]:
        """The key of the next draw, one that is for ``about``; and the words that it has to be mixed with."""
        self._refuse_forked()
        number, self._draws = self._draws, self._draws + 1
        return derive_key(self.key, "draw", number, *about), list(self._seen)

    def next_key(self, *about: Any) -> bytes:
        """The key of the next draw, all mixed in."""
        key, words = self.begin(*about)
        return mix_key(key, words)

    def words(self, count: int) -> Words:
        """Independent uniform words of 32 bits."""
        taken = np.empty(count, dtype="<u4")
        fill_with_chacha(taken.data.cast("B"), self.next_key("words"), 0, (0, 0, 0))
        return taken.astype(np.uint32, copy=False)

    def uniforms(self, count: int) -> torch.Tensor:
        """Independent uniform multiples of 2⁻⁵³ in [0, 1), float64, on the processor."""
        wide = self.words(2 * count).view(np.uint64) >> np.uint64(11)
        return torch.from_numpy(wide.astype(np.float64) * 2.0**-53)

    def below(self, limit: int) -> int:
        """A whole number, uniform on 0, …, limit − 1: exactly, by rejection."""
        size = whole("limit", limit)
        bits = (size - 1).bit_length()
        length = -(-bits // 8)
        while True:
            drawn = int.from_bytes(self._take(length), "little") >> (8 * length - bits)
            if drawn < size:
                return drawn

    def _take(self, count: int) -> bytes:
        """A few bytes, out of one draw for many of them."""
        self._refuse_forked()
        if self._used + count > len(self._pool):
            self._pool, self._used = chacha_bytes(self.next_key("bytes"), max(_POOL, count)), 0
        self._used += count
        return self._pool[self._used - count : self._used]

    def _refuse_forked(self) -> None:
        if self._life is not _life:
            raise ConfigurationError(
                "this stream was made in another process, of which this one is a copy (os.fork): both would make the same draws. "
                "Make a new one, lipdp.privacy.Stream(), in the process that draws from it."
            )


def mix_key(key: bytes, words: list[torch.Tensor]) -> bytes:
    """The key with words that were computed on some device mixed in; waits for them."""
    return derive_key(key, "seen", [part.tolist() for part in words]) if words else key


def chacha_bytes(key: bytes, count: int, *, counter: int = 0, nonce: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    """``count`` bytes of ChaCha20 (RFC 8439) from block ``counter`` on."""
    taken = bytearray(count)
    fill_with_chacha(memoryview(taken), key, counter, nonce)
    return bytes(taken)


def fill_with_chacha(place: memoryview, key: bytes, counter: int, nonce: tuple[int, int, int]) -> None:
    """The same into memory that is there."""
    if counter + -(-len(place) // _BLOCK) > _MOST_BLOCKS:
        raise ConfigurationError(f"{len(place)} bytes from block {counter} on are more than one nonce of ChaCha20 has.")
    encryptor = _encryptor(key, counter, nonce)
    for start in range(0, len(place), len(_ZEROS)):
        part = place[start : start + len(_ZEROS)]
        encryptor.update_into(_ZEROS[: len(part)], part)


def _encryptor(key: bytes, counter: int, nonce: tuple[int, int, int]) -> CipherContext:
    return Cipher(algorithms.ChaCha20(key, struct.pack("<4I", counter, *nonce)), mode=None).encryptor()


def chacha_words(key: bytes, places: npt.NDArray[np.int64], nonce: tuple[int, int, int] = (0, 0, 0)) -> npt.NDArray[np.uint64]:
    """The words of 64 bits at these rising places of ChaCha20, eight to a block."""
    taken = np.empty(len(places), dtype="<u8")
    if not len(places):
        return taken
    if int(places[-1] - places[0]) > _SPARSE * len(places):
        encryptor, block = _encryptor(key, 0, nonce), np.empty(8, dtype="<u8")
        for row, place in enumerate(places.tolist()):
            encryptor.reset_nonce(struct.pack("<4I", place // 8, *nonce))
            encryptor.update_into(_ZEROS[:_BLOCK], block.data.cast("B"))
            taken[row] = block[place % 8]
        return taken
    window = np.empty(_WINDOW, dtype="<u8")
    firsts = np.arange(int(places[0]) // 8 * 8, int(places[-1]) + 1, _WINDOW)
    edges = np.append(np.searchsorted(places, firsts), len(places)).tolist()
    for first, start, stop in zip(firsts.tolist(), edges, edges[1:], strict=False):
        if start < stop:
            part = window[: int(places[stop - 1]) - first + 1]
            fill_with_chacha(part.data.cast("B"), key, first // 8, nonce)
            part.take(places[start:stop] - first, out=taken[start:stop], mode="clip")
    return taken


Below = Callable[[int], int]
"""``below(k)`` is uniform on 0, …, k−1: that of a stream. Where none is given, one with a fresh key is used."""


@lru_cache(maxsize=256)
def exp_of_minus(x: Fraction, bits: int) -> int:
    """exp(−x), x ≥ 0, in units of 2^-bits: by its series, off by less than one such unit."""
    halvings = max(0, int(x).bit_length() + 1)
    fine = bits + 2 * halvings + 16
    small = (x.numerator << fine) // (x.denominator << halvings)
    term = total = 1 << fine
    for n in itertools.count(1):
        term = -(term * small >> fine) // n
        if term in (0, -1):
            break
        total += term
    for _ in range(halvings):
        total = total * total >> fine
    return total >> (fine - bits)


def bernoulli_exp(gamma: Fraction, below: Below | None = None) -> bool:
    """True with probability exactly exp(−γ), γ ≥ 0.

    For γ ≤ 1: let K be the first k with Bernoulli(γ/k) = 0. P(K > k) = γᵏ/k!, so P(K odd) = Σ (−γ)ᵏ/k! = exp(−γ).
    """
    below = below or Stream().below
    while gamma > 1:
        if not bernoulli_exp(Fraction(1), below):
            return False
        gamma -= 1
    k = 1
    while below(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1


def _geometric(gamma: Fraction, below: Below) -> int:
    """G with P(G = g) ∝ exp(−γg), for γ = a/b: with U uniform on 0…b−1 kept with probability exp(−U/b), and V ~ ∝ exp(−v),
    U + bV is ∝ exp(−z/b), and its quotient by a is ∝ exp(−γg).
    """
    a, b = gamma.numerator, gamma.denominator
    while True:
        start = below(b)
        if bernoulli_exp(Fraction(start, b), below):
            break
    turns = 0
    while bernoulli_exp(Fraction(1), below):
        turns += 1
    return (start + b * turns) // a


def discrete_laplace(scale: Fraction, below: Below | None = None) -> int:
    """Z with P(Z = z) ∝ exp(−|z|/scale): shifting by Δ changes each probability by at most exp(Δ/scale)."""
    below = below or Stream().below
    while True:
        size, negative = _geometric(1 / scale, below), below(2) == 1
        if size or not negative:  # zero once, not twice
            return -size if negative else size


def discrete_staircase(sensitivity: int, step: int, epsilon: Fraction, below: Below | None = None) -> int:
    """Z on the integers with the staircase shape of Geng and Viswanath (2014): P(Z = ±z) ∝ exp(−ε·level(z)), where
    level(z) = ⌊z/Δ⌋ + [z mod Δ ≥ step], 1 ≤ step ≤ Δ.

    Shifting by at most Δ changes ⌊|z|/Δ⌋ + [|z| mod Δ ≥ step] by at most one, so each probability by at most exp(ε): the
    level of z+Δ is that of z plus one, levels do not fall with |z|, and |z + d| ≤ |z| + Δ.
    """
    below = below or Stream().below
    while True:
        turns, place = _geometric(epsilon, below), below(sensitivity)
        if place >= step and not bernoulli_exp(epsilon, below):
            continue
        size, negative = turns * sensitivity + place, below(2) == 1
        if size or not negative:
            return -size if negative else size


def permute_and_flip(utilities: Sequence[int], sensitivity: int, epsilon: Fraction, below: Below | None = None) -> int:
    """An index: go through all in random order, stop at r with probability exp(−ε(u_max − u_r)/2Δ)."""
    below = below or Stream().below
    best, left = max(utilities), list(range(len(utilities)))
    while True:  # the best one always stops
        index = left.pop(below(len(left)))
        if bernoulli_exp(epsilon * (best - utilities[index]) / (2 * sensitivity), below):
            return index


def exponential_mechanism(utilities: Sequence[int], sensitivity: int, epsilon: Fraction, below: Below | None = None) -> int:
    """An index r with P(r) ∝ exp(ε·u_r/2Δ): the same coins as permute-and-flip, but with replacement (rejection sampling)."""
    below = below or Stream().below
    best = max(utilities)
    while True:
        index = below(len(utilities))
        if bernoulli_exp(epsilon * (best - utilities[index]) / (2 * sensitivity), below):
            return index
