"""Digests of values: equal only for equal content, whatever it is made of, with order, shapes and types counted.

On a processor it is SHA-256 over the bytes, or Poly1305 where a secret key is at hand. A tensor on another device is mixed there
under a secret key, so that no step waits for a copy of it: a keyed 64-bit sum over its words, each multiplied and folded together
with its position.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305

from lipdp._numerics import same_as_array, whole_tensor

_CHUNK = 1 << 26  # bytes handed to the hash at once
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGE = 1 << 22  # entries that are mixed at once on a device
# Odd 64-bit constants (the finaliser of SplitMix64), as signed numbers.
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def content_digest(*parts: Any, key: bytes = b"") -> bytes:
    """32 bytes that stand for ``parts``: tensors, bytes, texts, numbers, ``None`` and nested sequences and mappings of them.

    Tensors count with dtype and shape, numbers with their type; nesting is framed, so no two contents share a message. With a
    ``key`` it is a keyed digest (HMAC): without the key nobody can tell or forge it.

    Example:
        >>> content_digest(torch.zeros(2)) == content_digest(torch.zeros(2, 1))
        False
    """
    hasher = hmac.new(key, digestmod="sha256") if key else hashlib.sha256()
    for part in parts:
        for piece in _pieces(part):
            hasher.update(piece)
    return hasher.digest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, torch.Tensor):
        shape = f"nested {len(value.unbind())}" if value.is_nested else tuple(value.shape)
        yield _head("tensor", f"{value.dtype}{shape}{value.layout}")
        yield from _tensor_bytes(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        yield _head("bytes", str(len(value)))
        yield value if isinstance(value, bytes) else bytes(value)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield _head("str", str(len(text)))
        yield text
    elif isinstance(value, dict):
        yield _head("dict", str(len(value)))
        for key, part in value.items():
            yield from _pieces(key)
            yield from _pieces(part)
    elif isinstance(value, list | tuple):
        yield _head(type(value).__name__, str(len(value)))
        for part in value:
            yield from _pieces(part)
    elif value is None or isinstance(value, bool | int | float | complex):
        text = repr(value).encode()
        yield _head(type(value).__name__, str(len(text)))
        yield text
    else:
        raise TypeError(f"a digest is of tensors, bytes, texts, numbers and containers of them, not of {type(value).__name__}")


def _head(kind: str, size: str) -> bytes:
    return f"<{kind} {size}>".encode()


def _tensor_bytes(tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    if tensor.is_nested:
        for part in tensor.detach().unbind():
            yield from _pieces(part)
        return
    if tensor.is_quantized:
        tensor = tensor.detach().dequantize()
    elif tensor.layout != torch.strided:
        tensor = tensor.detach().to_dense()
    flat = _words(whole_tensor(tensor).to("cpu"))
    step = _CHUNK // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield memoryview(flat[start : start + step].numpy()).cast("B")  # type: ignore[arg-type]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """All entries in order, as whole numbers of the same bits."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    flat = real.contiguous().reshape(-1)
    return flat.view(_WORDS[flat.element_size()])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All entries in order, as bytes; of a tensor that has a place in memory (strided)."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | bool:
    """Whether two tensors are the same to the bit: what is no number is compared too, and zeros with their signs.

    Of any layout and type. Elsewhere than on a processor it may still be computed.

    Example:
        >>> bool(same_bits(torch.zeros(1), -torch.zeros(1)))
        False
    """
    one, other = one.detach(), other.detach()
    if _form(one) != _form(other):
        return False
    parts = _strided_parts(one), _strided_parts(other)
    pairs = list(zip(*parts, strict=False))
    if len(parts[0]) != len(parts[1]) or any(a.shape != b.shape for a, b in pairs):
        return False
    found = [same_bytes(as_bytes(a), as_bytes(b)) for a, b in pairs]
    return all(found) if one.device.type == "cpu" else torch.stack(found).all()  # type: ignore[arg-type]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | bool:
    """Whether two rows of as many bytes are the same. Elsewhere than on a processor it may still be computed.

    Eight or four at once, where they lie so: seven times as fast, and on a device in an eighth of the memory.
    """
    for word in (torch.int64, torch.int32):
        if all(part.numel() % word.itemsize == 0 and part.storage_offset() % word.itemsize == 0 for part in (one, other)):
            one, other = one.view(word), other.view(word)
            break
    return torch.equal(one, other) if one.device.type == "cpu" else (one == other).all()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return None if tensor.is_nested else tensor.shape, tensor.is_nested, tensor.dtype, tensor.device, tensor.layout


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor of any layout is made of."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX[0]  # the masks make the shifts logical
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX[1]
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def keyed_words(tensor: torch.Tensor, key: bytes) -> torch.Tensor:
    """A digest of a tensor's values, computed where the tensor is: two words of 64 bits under a key of 32 bytes, (1, 2).

    Each entry's bits w at position i become mix(w + a·i + b), mixed by multiplications and shifts (SplitMix64's finaliser),
    and are added up modulo 2^64, under numbers a and b of the key: entries that trade places, and changes that cancel in a plain
    sum, show. The same in every process that has the key.
    """
    numbers = [int.from_bytes(key[at : at + 8], "little", signed=True) for at in (0, 8, 16, 24)]
    words = _words(tensor.detach())
    total = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _LARGE):
        part = words[start : start + _LARGE].to(torch.int64)
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=tensor.device)
        for column, (a, b) in enumerate((numbers[:2], numbers[2:])):
            total[0, column] += _mix(part + index * (a | 1) + b).sum()
    return total


class Tag:
    """A digest of tensors' bytes, one after another, under a secret key of 32 bytes: Poly1305, several times as fast as a hash.

    For who does not know the key, two contents of n bytes have the same tag with probability n·2⁻¹⁰⁶. It is for what is digested
    again with a key before it leaves (:func:`content_digest`): tags themselves would tell on it.
    """

    def __init__(self, key: bytes) -> None:
        self._hasher = Poly1305(key)

    def update(self, tensor: torch.Tensor) -> Tag:
        """Add a tensor's entries; its shape and type are not told apart."""
        if same_as_array(tensor) and tensor.is_contiguous() and tensor.numel():
            self._hasher.update(tensor.detach().numpy().data.cast("B"))
            return self
        for piece in _tensor_bytes(tensor):
            self._hasher.update(piece)
        return self

    def finish(self) -> bytes:
        """The tag, 16 bytes."""
        return bytes(self._hasher.finalize())
