"""The CUDA kernels against the processor: known answers, the same noise to the bit, keys that depend on the device's own numbers.

They run on a GPU, or here in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/privacy/test_noise_cuda.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct

import numpy as np
import pytest
import torch

from lipdp import privacy
from lipdp.privacy import noise, noise_cuda
from lipdp.privacy.noise import mantissa_of, noised_on_processor, table
from lipdp.privacy.randomness import chacha_bytes

from .stand_in import HCHACHA
from .test_randomness import KNOWN, assert_told_by_tags

ON_CUDA = torch.cuda.is_available()
usable = importlib.util.find_spec("triton") is not None and (ON_CUDA or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not usable, reason="needs a GPU, or TRITON_INTERPRET=1")
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
KEY = bytes(range(100, 132))
COUNT = 400_000 if ON_CUDA else 3000


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    noise_cuda._replayed_release.cache_clear()
    if not ON_CUDA:
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(noise_cuda, "available", lambda device: True)


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), KNOWN)
def test_known_answers(key, counter, nonce, expected):
    found = noise_cuda.chacha_on_device(key, counter, struct.unpack("<3I", bytes.fromhex(nonce)), 1, DEVICE)
    assert found.cpu().numpy().astype("<i4").tobytes().hex() == expected


def test_many_blocks():
    found = noise_cuda.chacha_on_device(KEY, 2**32 - 200, (7, 2**31 + 5, 2**32 - 1), 200, DEVICE)
    assert found.cpu().numpy().astype("<i4").tobytes() == chacha_bytes(
        KEY, 64 * 200, counter=2**32 - 200, nonce=(7, 2**31 + 5, 2**32 - 1)
    )


@pytest.mark.parametrize("std", [1.0, 0.37, 1.999e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_noise_as_on_the_processor(std, dtype):
    sums = (torch.linspace(-1, 1, COUNT, dtype=torch.float64) * 7 * std).to(dtype)
    (found,), _ = noise_cuda.noised_on_device([([sums.to(DEVICE)], std, dtype)], KEY, [], bound=False)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), torch.from_numpy(noised_on_processor(sums.double().numpy(), std, KEY)).to(dtype))


def test_segments_small_parts_and_odd_sums():
    parts = [torch.tensor([0.5]), torch.empty(0), torch.tensor([np.nan, np.inf, -np.inf, 1e30, -1e30, 3.5, -2.5] * 3)]
    given = [([part.double().to(DEVICE)], std, torch.float64) for part, std in zip(parts, (1.0, 3.0, 1.3), strict=True)]
    found, _ = noise_cuda.noised_on_device(given, KEY, [], bound=False)
    for number, ([part], std, _) in enumerate(given):
        assert np.array_equal(found[number].cpu().numpy(), noised_on_processor(part.cpu().numpy(), std, KEY, number))


def test_every_place_can_be_settled_from_all_bits(monkeypatch):
    """With nothing decided by the first word, the second kernel does all of it: the same noise."""
    monkeypatch.setattr(noise_cuda, "cells_of", lambda ends, bits: np.full(1 << bits, noise.SLOW, dtype=np.int16))
    noise_cuda._tables.cache_clear()
    sums = torch.zeros(600, dtype=torch.float64)
    (found,), _ = noise_cuda.noised_on_device([([sums.to(DEVICE)], 1.3, torch.float64)], KEY, [], bound=False)
    noise_cuda._tables.cache_clear()
    noise_cuda._replayed_release.cache_clear()
    assert np.array_equal(found.cpu().numpy(), noised_on_processor(sums.numpy(), 1.3, KEY))


def on_device(key):
    return torch.from_numpy(np.frombuffer(key, dtype="<i4").copy()).to(DEVICE)


def release(sums, seen=(), bound=True):
    stream = privacy.Stream(KEY, bound=bound)
    for words in seen:
        stream.absorb(words.to(DEVICE))
    return privacy.add_noise({"a": sums.to(DEVICE)}, {"a": 1.0}, stream)["a"].cpu()


def test_unbound_releases_are_those_of_the_processor(monkeypatch):
    sums = torch.linspace(0, 1, 500)
    found = release(sums, bound=False)
    monkeypatch.setattr(noise_cuda, "available", lambda device: False)
    assert torch.equal(found, release(sums, bound=False))


def test_noise_is_bound_to_the_sums_and_to_what_was_seen():
    sums = torch.zeros(500, dtype=torch.float64)
    base = release(sums)
    assert torch.equal(base, release(sums))
    other = sums.clone()
    other[17] = 1e-12
    swapped = torch.zeros(500, dtype=torch.float64)
    swapped[18] = 1e-12
    words = torch.tensor([[1, 2]])
    releases = [
        base,
        release(other),
        release(swapped),
        release(sums, [words]),
        release(sums, [words.flip(1)]),
        release(sums, [words, words]),
    ]
    for number, one in enumerate(releases):
        for two in releases[:number]:
            assert abs(float(np.corrcoef(one, two)[0, 1])) < 6 / 500**0.5


def test_a_draw_is_told_by_its_tag():
    assert_told_by_tags(DEVICE)


def test_keys_on_the_device_are_hchacha20():
    key, nonce, expected = HCHACHA
    out = torch.empty(8, dtype=torch.int32, device=DEVICE)
    words = torch.from_numpy(np.frombuffer(nonce, dtype="<i8").copy()).to(DEVICE)
    noise_cuda._KERNELS.module.absorb[(1,)](on_device(key), words, 1, out)
    assert out.cpu().numpy().astype("<i4").tobytes().hex() == expected


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")
def test_a_release_does_not_wait_for_the_device():
    sums, stream = torch.zeros(10_000, device=DEVICE), privacy.Stream(KEY)
    for _ in range(3):  # compiles, then records
        privacy.add_noise({"a": sums}, {"a": 1.0}, stream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        privacy.add_noise({"a": sums}, {"a": 1.0}, stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")
@pytest.mark.parametrize("bound", [True, False])
def test_releases_that_are_replayed_are_those_that_are_called(bound):
    """Ten releases under one stream, replayed from the third on; each is a tensor of its own."""
    draw = torch.Generator().manual_seed(0)
    sums = [torch.randn(5000, generator=draw).to(DEVICE) for _ in range(10)]
    stream, again = privacy.Stream(KEY, bound=bound), privacy.Stream(KEY, bound=bound)
    replayed = [privacy.add_noise({"a": part, "b": part[:7]}, {"a": 1.0, "b": 3.0}, stream) for part in sums]
    assert noise_cuda._replayed_release(((1, 1.0, torch.float32), (1, 3.0, torch.float32)), sums[0].device, bound).recordings == 1
    for part, found in zip(sums, replayed, strict=True):
        noise_cuda._replayed_release.cache_clear()
        expected = privacy.add_noise({"a": part, "b": part[:7]}, {"a": 1.0, "b": 3.0}, again)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")
def test_a_release_can_be_recorded():
    """As a CUDA graph, with the key in a buffer: other keys, other noise, without recording again."""
    sums = torch.zeros(10_000, dtype=torch.float64, device=DEVICE)
    key, tables = on_device(KEY), noise_cuda._tables(mantissa_of(1.3), DEVICE)
    noise_cuda._noised(sums, 1.3, torch.float64, key, 0, tables)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = noise_cuda._noised(sums, 1.3, torch.float64, key, 0, tables)
    for other in (KEY, bytes(32)):
        key.copy_(on_device(other))
        graph.replay()
        assert np.array_equal(out.cpu().numpy(), noised_on_processor(np.zeros(10_000), 1.3, other))


def test_lists_of_undecided_places_are_long_enough():
    """The part of words that the kernel's table does not decide is far below the eighth that the list has room for."""
    for std in (1.0, 1.5, 1.999):
        bins = table(mantissa_of(std))
        cells = noise.cells_of(bins.ends[: bins.bins], 17)[: 1 << 16]
        assert float((cells == noise.SLOW).mean()) < 1 / 25
