"""Texts as numbers by public rules: nothing is learned from them, so nothing is released. Words in a bag, letters in windows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence

import torch

from lipdp._checks import whole
from lipdp.errors import ConfigurationError

__all__ = ["COMMON_WORDS", "hashed_bag", "hashed_word", "windows", "words"]

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_TAG = re.compile(r"<[^>]*>")

_COMMON = """
    a about all also an and are as at be because been but by can do does for from had has have he her him his how i if in into is it
    it's its just me more my of on one only or other out over s she so some than that the their them then there these they this to
    up us was we were what when which who with would you your
"""
COMMON_WORDS = frozenset(_COMMON.split())
"""English words that say little by themselves."""


def words(text: str) -> Iterator[str]:
    """Runs of letters and digits, lower case, inner apostrophes kept; mark-up in angle brackets is left out."""
    return (found.group() for found in _WORD.finditer(_TAG.sub(" ", text).lower()))


def hashed_word(word: str) -> int:
    """A number of 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def hashed_bag(texts: Sequence[str], buckets: int = 16_384, *, leave_out: Collection[str] = COMMON_WORDS) -> torch.Tensor:
    """Texts as vectors (len(texts), buckets) of norm 1: which words are in them, by a public hash.

    Every different word of a text adds +1 or −1, by a bit of its hash, to the entry that its hash names: words that share a bucket
    cancel as often as they add, so products of vectors are those of the sets of words on average. A text without words is 0. A
    vocabulary would be learned from the texts and have to be paid for; a hash knows nothing of them.

    Args:
        texts: as they are.
        buckets: entries of a vector.
        leave_out: words that are not looked at; a public list.

    Example:
        >>> vectors = hashed_bag(["A great film", "great, GREAT film!", "dull"], buckets=64)
        >>> bool(torch.equal(vectors[0], vectors[1])), round(float(vectors[2].norm()), 3)
        (True, 1.0)
    """
    if isinstance(texts, str):
        raise ConfigurationError("texts is one string: pass a list of texts")
    whole("buckets", buckets, least=2)
    vectors = torch.zeros(len(texts), buckets)
    known: dict[str, int] = {}
    left_out = frozenset(leave_out)
    for row, text in enumerate(texts):
        numbers = [known.setdefault(word, hashed_word(word)) for word in sorted(set(words(text)) - left_out)]
        places = torch.tensor([number % buckets for number in numbers], dtype=torch.long)
        signs = torch.tensor([1.0 - 2.0 * (number >> 63) for number in numbers])
        vectors[row].index_add_(0, places, signs)
    return torch.nn.functional.normalize(vectors, out=vectors)


def windows(text: str | bytes, length: int) -> torch.Tensor:
    """A text as records of ``length`` + 1 bytes (records, length + 1), one after another; a rest that is too short is left out.

    Of a record the first ``length`` bytes are the input and the last ``length`` the targets of next-letter training. Records share
    no byte, so that one record is what a guarantee by record protects: ``length`` + 1 letters, not a work nor its author.

    Args:
        text: letters (encoded as UTF-8) or bytes.
        length: of a record's input.

    Example:
        >>> windows("to be or not to be", 5).shape
        torch.Size([3, 6])
    """
    whole("length", length, least=1)
    numbers = torch.frombuffer(bytearray(text.encode() if isinstance(text, str) else text), dtype=torch.uint8).long()
    count = len(numbers) // (length + 1)
    if count == 0:
        raise ConfigurationError(f"the text has {len(numbers)} bytes, fewer than one record of {length} + 1")
    return numbers[: count * (length + 1)].reshape(count, length + 1)
