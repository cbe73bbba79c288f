"""Digests: what differs in anything that counts has another digest."""

import itertools

import pytest
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305

from lipdp.digest import Tag, content_digest, keyed_words, same_bits, same_bytes

DIFFERENT = [
    torch.zeros(2),
    torch.zeros(2, 1),
    torch.zeros(2, dtype=torch.float64),
    torch.zeros(2, dtype=torch.int32),
    torch.tensor([0.0, -0.0]),
    torch.tensor([1.0, 2.0]),
    torch.tensor([2.0, 1.0]),
    torch.tensor([1 + 2j]),
    torch.tensor([1 - 2j]),
    torch.tensor([True, False]),
    torch.tensor([], dtype=torch.bfloat16),
    b"",
    b"12",
    "12",
    12,
    12.0,
    True,
    1,
    None,
    [],
    (),
    {},
    ["1", "2"],
    ["12", ""],
    [["1"], "2"],
    {"1": "2"},
]

KEY = bytes(range(32))


def test_different_contents_have_different_digests() -> None:
    digests = [content_digest(content) for content in DIFFERENT]
    same = [(DIFFERENT[a], DIFFERENT[b]) for a, b in itertools.combinations(range(len(DIFFERENT)), 2) if digests[a] == digests[b]]
    assert not same


def test_layout_in_memory_does_not_count_but_conjugation_does() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert content_digest(x.t().contiguous().t()) == content_digest(x)
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert content_digest(z.conj()) == content_digest(z.conj().resolve_conj()) != content_digest(z)


def test_keys_separate() -> None:
    assert content_digest("a", key=b"1") != content_digest("a", key=b"2")
    assert content_digest("a", key=b"1") == content_digest("a", key=b"1")


def test_unknown_things_are_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        content_digest(object())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_words_see_every_entry_and_its_place(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (37,)).to(dtype)
    x[3], x[5] = 0, 1
    before = keyed_words(x, KEY).tolist()
    swapped = x.clone()
    swapped[[3, 5]] = x[[5, 3]]
    assert keyed_words(swapped, KEY).tolist() != before
    assert keyed_words(x.clone(), KEY).tolist() == before
    for i in range(len(x)):
        changed = x.clone()
        changed[i] = 1 - x[i].to(torch.int8) if dtype == torch.bool else x[i] + 1
        assert keyed_words(changed, KEY).tolist() != before


def test_words_see_changes_that_cancel_in_a_sum() -> None:
    x = torch.zeros(1000, dtype=torch.int64)
    y = x.clone()
    y[10], y[20] = 1, -1
    assert keyed_words(x, KEY).tolist() != keyed_words(y, KEY).tolist()


def test_tags_are_of_the_bytes_under_a_key():
    x, key = torch.arange(6.0), b"k" * 32
    tag = Tag(key).update(x).finish()
    assert tag == Tag(key).update(x[:2]).update(x[2:].reshape(2, 2)).finish()
    assert tag == Poly1305.generate_tag(key, x.numpy().tobytes())
    others = [Tag(b"l" * 32).update(x), Tag(key).update(x.flip(0)), Tag(key).update(x.double()), Tag(key)]
    assert len({tag, *(other.finish() for other in others)}) == 5


def test_words_under_a_key_differ_with_key_and_content():
    x = torch.arange(10.0)
    words = keyed_words(x, b"k" * 32)
    assert words.shape == (1, 2)
    others = [keyed_words(y, b"k" * 32) for y in (x.flip(0), x[:9], x + 1)] + [keyed_words(x, b"l" * 32)]
    assert not any(bool((other == words).any()) for other in others)


def test_tags_of_quantised_tensors_are_of_their_values():
    tensors = [torch.quantize_per_tensor(torch.arange(4.0), scale, 0, torch.qint8) for scale in (1.0, 0.5, 1.0)]
    one, other, again = (Tag(b"k" * 32).update(tensor).finish() for tensor in tensors)
    assert one == again
    assert content_digest(tensors[0]) == content_digest(tensors[2]) != content_digest(torch.zeros(4))
    assert one == Tag(b"k" * 32).update(torch.arange(4.0)).finish()
    assert other == Tag(b"k" * 32).update(torch.arange(4.0)).finish(), "0, 1, 2, 3 either way"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[::2, 1:],
        lambda x: x.half(),
        lambda x: torch.complex(x, -x).conj(),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    ],
)
def test_the_same_bits_in_any_layout(make):
    x = torch.arange(16.0).reshape(4, 4) - 3
    changed = x.clone()
    changed[2, 3] += 1
    assert same_bits(make(x), make(x.clone()))
    assert not same_bits(make(x), make(changed))
    assert not same_bits(make(x), make(x[:2]))


def test_the_same_bits_are_more_than_equal_numbers():
    nan = torch.full((2,), torch.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.eye(2), torch.eye(2).to_sparse())
    explicit = torch.sparse_coo_tensor([[0, 1], [0, 1]], [1.0, 0.0], (2, 2)), torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2))
    assert not same_bits(*explicit), "a zero that is stored"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bool, torch.int8, torch.complex64, torch.complex128, torch.bfloat16]
)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 64])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_bits_are_the_same_wherever_they_lie(dtype: torch.dtype, count: int, start: int) -> None:
    """They are compared eight bytes at once where that can be."""
    own = torch.randint(0, 2, (100,)).to(dtype)[start : start + count]
    other = own.clone()
    assert same_bits(own, other)
    if count:
        other[-1] = other[-1] == 0
        assert not same_bits(own, other)


@pytest.mark.parametrize("start", [0, 1, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 12, 24])
def test_every_bit_of_a_row_of_bytes_counts(start, length):
    row = torch.arange(40, dtype=torch.uint8)[start : start + length]
    assert same_bytes(row, row.clone())
    for place in range(length):
        changed = row.clone()
        changed[place] ^= 16
        assert not same_bytes(row, changed)
