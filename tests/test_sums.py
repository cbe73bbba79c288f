"""Sums over records: what they are off by, whatever order a library adds in; and which nodes of a backward pass they cover."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lipdp import _backward, _sums, _sums_kernel
from lipdp._backward import LongSums, gradients
from lipdp._sums import (
    AREA,
    BLOCK,
    BLOCKS,
    contract,
    contract_apart,
    convolution_sums,
    row_sums,
    sum_slack,
)

U = 2.0**-24


def summed_in_a_random_order(values: torch.Tensor, generator: random.Random) -> float:
    """By a random binary tree, in float32."""
    terms = list(values)
    while len(terms) > 1:
        first = generator.randrange(len(terms) - 1)
        terms[first : first + 2] = [terms[first] + terms[first + 1]]
    return float(terms[0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(0, 10**6), st.sampled_from(["ones", "random", "swallowed"]))
def test_any_order_of_adding_stays_below_the_bound(count, seed, kind):
    """The partial sums of any binary tree have at most 2, 3, …, n terms: the rounding is at most u·(n² + n)/2."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.ones(count) if kind == "ones" else torch.rand(count, generator=generator)
    if kind == "swallowed":
        values = torch.where(torch.arange(count) < count // 2, torch.ones(count), 0.49 * 2.0**-23 * (count // 2 or 1))
    error = abs(summed_in_a_random_order(values, random.Random(seed)) - float(values.double().sum()))
    assert error <= U * (count**2 + count) / 2


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 3000), st.integers(1, 40), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
)
def test_products_are_those_of_float64(rows, p, d, dtype):
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.rand(rows, n, generator=generator).to(dtype) for n in (p, d))
    found, expected = contract(a, b), a.double().T @ b.double()
    assert found.dtype == torch.float64
    longest = min(rows, BLOCK) + min(-(-rows // BLOCK), BLOCKS)
    assert torch.all((found - expected).abs() <= 4 * longest * U * expected)


def test_large_products_go_block_by_block():
    a, b = torch.rand(1500, 150), torch.rand(1500, 130)
    found, expected = contract(a, b), a.double().T @ b.double()
    assert torch.all((found - expected).abs() <= 4 * (BLOCK + BLOCKS) * U * expected)
    several = contract(torch.rand(3, 700, 4), torch.rand(3, 700, 5))
    assert several.shape == (3, 4, 5)
    assert several.dtype == torch.float64


def test_a_block_is_added_up_before_it_is_added(monkeypatch):
    """2²⁴ + 1 is 2²⁴: a library that added products to what is there one by one would lose them, and is not used so."""
    a = torch.ones(2 * BLOCK, 200)
    b = torch.ones(2 * BLOCK, 200)
    a[:BLOCK], b[:BLOCK] = 2.0**8, 2.0**9  # the first block: 2¹⁷·128 = 2²⁴
    assert torch.equal(contract(a, b), torch.full((200, 200), 2.0**24 + BLOCK, dtype=torch.float64))
    monkeypatch.setattr(_sums, "_added_last", {})
    real = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, x, y: real(self, x, y).copy_(self.clone().mul_(0).add_(2.0**24)))
    assert not _sums._adds_blocks_last(torch.zeros(3, 4), True, True)


@pytest.mark.parametrize(("length", "records"), [(2, 2000), (5, 500), (40, 30), (300, 5)])
@pytest.mark.parametrize(("long", "at_once"), [(1, 1), (2**62, 2**17), (2**62, 100)])
def test_records_apart(monkeypatch, length, records, long, at_once):
    """A record whose terms are huge and cancel leaves no trace in the sum of the others, however many are computed at once."""
    monkeypatch.setattr(_sums, "_LONG_PRODUCT", long)
    monkeypatch.setattr(_sums, "_LONG_PART", 16)  # entries: three rows of five, and then two
    monkeypatch.setattr(_sums, "_CACHED", at_once)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(records, length, 6, generator=generator), torch.rand(records, length, 5, generator=generator)
    weights = torch.rand(records, generator=generator)
    expected = torch.einsum("b,btp,btd->pd", weights.double(), a.double(), b.double())
    assert torch.allclose(contract_apart(a, b, weights), expected, rtol=1e-5)
    a[1], b[1], weights = 0.0, 1.0, torch.ones(records)
    without = contract_apart(a, b, weights)
    a[1, 0], a[1, 1] = 1.3e12, -1.3e12  # exactly 0 in all
    assert torch.equal(contract_apart(a, b, weights), without)
    together = (a.flatten(0, 1).T @ b.flatten(0, 1)).double()
    assert float((together - without).norm()) > 1.0  # added up with the others it does


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1), st.booleans(), st.data())
def test_kernels_of_convolutions(rows, groups, channels, outputs, apart, transposed, data):
    axes = data.draw(st.integers(1, 3))
    stride, padding, dilation = (data.draw(st.integers(low, 2)) for low in (1, 0, 1))
    torch.manual_seed(rows)
    make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d) if transposed else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layer = make[axes - 1](groups * channels, groups * outputs, 2, stride, padding, dilation=dilation, groups=groups).double()
    x = torch.randn(rows, groups * channels, *[5] * axes, dtype=torch.float64)
    y = layer(x)
    delta = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, layer.weight, delta)
    found = convolution_sums(
        delta.float(), x.float(), layer.weight.shape, layer.stride, layer.padding, layer.dilation, groups,
        transposed=transposed, apart=apart,
    )  # fmt: skip
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_convolutions_of_many_records_are_cut(monkeypatch):
    """No more than c records with c²·T ≤ AREA in one call, or in one group of it."""
    seen = []
    real = torch.ops.aten.convolution_backward

    class Watched:
        def __call__(self, delta, x, kernel, *rest):
            seen.append((len(x), delta[0, 0].numel(), rest[-2]))
            return real(delta, x, kernel, *rest)

    monkeypatch.setattr(_sums.torch.ops.aten, "convolution_backward", Watched())
    for rows, side, channels in ((50, 32, 3), (40, 16, 12), (500, 4, 12), (7, 64, 1)):
        delta, x = torch.ones(rows, 2, side, side), torch.ones(rows, channels, side, side)
        seen.clear()
        found = convolution_sums(delta, x, (2, channels, 1, 1), (1, 1), (0, 0), (1, 1))
        assert torch.equal(found, torch.full_like(found, rows * side * side))
        assert all(records**2 * positions <= AREA for records, positions, _ in seen)
        assert sum(records * groups for records, _, groups in seen) == rows


def test_rows():
    x = torch.rand(1000, 3, 5)
    assert torch.allclose(row_sums(x, (0,)), x.double().sum(0), rtol=1e-6)
    assert torch.allclose(row_sums(x, (0, 2)), x.double().sum((0, 2)), rtol=1e-6)
    assert row_sums(torch.rand(3), (0,)).shape == ()


class Shifted(nn.Module):
    """Parameters of many kinds, used by hand."""

    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.rand(1, 6)), nn.Parameter(torch.rand(6))
        self.vector, self.matrix = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6, 4))

    def forward(self, x):
        h = (x + self.shift) * self.scale
        return torch.cat([h @ self.matrix, (h @ self.vector)[:, None], torch.einsum("bi,ij->bj", h, self.matrix)], 1)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.bag = nn.Embedding(3, 4), nn.EmbeddingBag(3, 4, mode="sum")
        self.places = nn.Parameter(torch.rand(5, 4))
        self.layer, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, x):
        n = (x[:, :5].abs() * 7).long() % 3
        h = self.norm(self.layer(self.embed(n) + self.places))
        return torch.cat([h.flatten(1), self.bag(n), self.places[n[:, 0]]], 1)


LAYERS = {
    "dense": lambda: nn.Linear(6, 3),
    "tokens": Tokens,
    "by hand": Shifted,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.PReLU(4), nn.ConvTranspose1d(4, 2, 2), nn.Flatten()
    ),
    "statistics": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.PReLU()).eval(),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, (1, 2)), nn.InstanceNorm2d(3, affine=True), nn.Flatten()
    ),
    "volumes": lambda: nn.Sequential(nn.Unflatten(1, (1, 1, 2, 3)), nn.Conv3d(1, 3, (1, 1, 2)), nn.Flatten()),
    "root mean squares": lambda: nn.Sequential(nn.Linear(6, 4), nn.RMSNorm(4)),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_every_kind_of_parameter(name):
    """Of aligned records, sums in float32 drift; these don't: against the float64 sum of every record's own gradient."""
    torch.manual_seed(0)
    model, rows = LAYERS[name](), 3000
    x = (torch.rand(1, 6) + 0.2).repeat(rows, 1) + 1e-3 * torch.rand(rows, 6)
    parameters = list(model.parameters())
    weight = torch.rand(model(x[:1]).shape[1])

    def total(z):
        return (model(z) * weight).sum()

    found = gradients(total(x), parameters, rows)
    few = 60  # records like all the others
    each = [torch.autograd.grad(total(x[i : i + 1]), parameters, allow_unused=True) for i in range(few)]
    part = gradients(total(x[:few]), parameters, few)
    for k, parameter in enumerate(parameters):
        sizes = sum(float(g[k].double().norm()) for g in each)
        expected = sum(g[k].double() for g in each)
        assert float((part[k].double() - expected).norm()) <= 40 * U * sizes + 1e-6 * few, parameter.shape
        doubled = gradients(total(torch.cat([x, x])), parameters, 2 * rows)[k].double()
        # Twice the records, twice the sum: to a few units, for no sum is long.
        assert float((doubled - 2 * found[k].double()).norm()) <= 64 * U * float(doubled.norm()) + 1e-9, parameter.shape


@pytest.mark.parametrize("name", list(LAYERS))
def test_nothing_sums_over_records_unseen(name):
    """Every operation that gets tensors of all rows and gives one without them is one that is handled."""
    torch.manual_seed(0)
    model, rows = LAYERS[name](), 37
    seen = []

    class Watching(LongSums):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors = [a for a in args if isinstance(a, torch.Tensor) and a.ndim]
            outputs = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
            over = any(rows in a.shape or a.shape[0] % rows == 0 for a in tensors)
            if over and any(rows not in r.shape and (not r.ndim or r.shape[0] % rows) and r.numel() for r in outputs):
                seen.append(func)
            return result

    total = model(torch.rand(rows, 6) + 0.1).sum()
    with Watching(rows):
        torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    aten = torch.ops.aten
    harmless = {aten.slice.Tensor, aten.expand.default, aten.select.int, aten.new_zeros.default, aten.t.default, aten.view.default}
    assert set(seen) - harmless <= set(_backward._handlers), set(seen) - set(_backward._handlers)
    assert seen


def test_the_mode_is_off_outside_of_a_backward_pass():
    x = torch.rand(5, 3, requires_grad=True)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.sum(0)

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no gradient")

    with pytest.raises(RuntimeError, match="no gradient"):
        gradients(Failing.apply(x).sum(), [x], 5)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None


def test_the_slack_grows_with_what_it_counts():
    assert sum_slack(U, rows=1) < sum_slack(U, rows=100) < sum_slack(U, rows=4096) < 0.01
    assert sum_slack(U, convolutions=True) >= sum_slack(U)
    assert sum_slack(U, U, rows=4096, roundings=3) < 0.01
    assert sum_slack(2.0**-53, 2.0**-53) < 1e-5
    assert sum_slack(0.0) < 1e-5


def test_gradients_equal_autograds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x, y = torch.randn(700, 5), torch.randint(3, (700,))
    expected = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
    found = gradients(F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()), 700)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [256, 1000, 4097])
def test_all_blocks_at_once_are_as_exact_as_one_after_another(rows, monkeypatch):
    """What a GPU does, and in several calls where memory is short: blocks of 128 rows in float32, everything else in float64."""
    generator = torch.Generator().manual_seed(rows)
    a, b = torch.rand(rows, 7, generator=generator), torch.rand(rows, 5, generator=generator)
    expected = a.double().T @ b.double()
    for at_once in (2**24, 7 * 5 * 3):
        monkeypatch.setattr(_sums, "_AT_ONCE", at_once)
        found = _sums._all_blocks(a.T, b)
        assert found.dtype == torch.float64
        assert float((found - expected).abs().max() / expected.max()) <= BLOCK * U


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels are not run")
@pytest.mark.parametrize(("rows", "length", "p", "d"), [(7, 2, 5, 130), (40, 128, 96, 200), (300, 33, 17, 16), (3, 700, 260, 9)])
@pytest.mark.parametrize("turned", [False, True])
def test_outer_products_on_a_gpu(rows, length, p, d, turned):
    """Σ_i w_i·Σ_t a_it ⊗ b_it as in float64, for factors in either layout; a record that cancels leaves nothing behind."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, length, size, device="cuda", generator=generator) for size in (p, d))
    if turned:
        a, b = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b))
    weights = torch.rand(rows, 3, device="cuda", generator=generator)[:, 1]  # as one group's factors lie in memory
    assert _sums_kernel.available(a, b)
    expected = torch.einsum("b,btp,btd->pd", weights.double(), a.double(), b.double())
    assert float((_sums_kernel.outer_sums(a, b, weights, "tf32x3") - expected).norm() / expected.norm()) < 3e-6
    assert float((_sums_kernel.outer_sums(a, b, weights, "tf32") - expected).norm() / expected.norm()) < 3e-3
    a[1], b[1] = 0.0, 1.0
    without = contract_apart(a, b, weights)
    a[1, 0], a[1, 1] = 2.0**40, -(2.0**40)
    assert torch.equal(contract_apart(a, b, weights), without)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels are not run")
@pytest.mark.parametrize("apart", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("channels", "outputs", "side", "kernel", "stride", "padding", "dilation", "groups"),
    [(3, 32, 17, 3, 1, 1, 1, 1), (24, 70, 8, 3, 1, 1, 1, 2), (64, 64, 9, 5, 2, 2, 1, 1), (8, 16, 12, 3, 1, 0, 2, 4)],
)
def test_convolutions_on_a_gpu(channels, outputs, side, kernel, stride, padding, dilation, groups, last, apart):
    """The gradient of a kernel as torch has it in float64, however many rows make up a record, in both layouts."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(outputs, channels // groups, kernel, kernel, device="cuda", dtype=torch.float64, generator=generator)
    x = torch.randn(38, channels, side, side, device="cuda", generator=generator)
    size = torch.nn.functional.conv2d(x.double(), weight, None, stride, padding, dilation, groups).shape
    delta = torch.randn(size, device="cuda", generator=generator)
    if last:
        x, delta = (t.contiguous(memory_format=torch.channels_last) for t in (x, delta))
    settings = ((stride, stride), (padding, padding), (dilation, dilation), groups)
    expected = torch.ops.aten.convolution_backward(
        delta.double(), x.double(), weight, None, *map(list, settings[:3]), False, [0, 0], groups, [False, True, False]
    )[1]
    before = torch.backends.cudnn.allow_tf32
    try:
        for allowed, limit in ((False, 3e-6), (True, 3e-3)):
            torch.backends.cudnn.allow_tf32 = allowed
            computed = convolution_sums(delta, x, tuple(weight.shape), *settings, apart=apart)
            assert float((computed - expected).norm() / expected.norm()) < limit
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("at_once", [1, 200, 2**17])
def test_kernels_apart_however_many_at_once(monkeypatch, at_once):
    monkeypatch.setattr(_sums, "_CACHED", at_once)
    generator = torch.Generator().manual_seed(0)
    x, delta = torch.randn(70, 3, 6, 6, generator=generator), torch.randn(70, 4, 4, 4, generator=generator)
    found = convolution_sums(delta, x, (4, 3, 3, 3), (1, 1), (0, 0), (1, 1), apart=2)
    expected = torch.nn.grad.conv2d_weight(x.double(), (4, 3, 3, 3), delta.double())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
