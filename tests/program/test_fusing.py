"""Fused layers: the same outputs and gradients as the layers they stand for, inside the same bounds, found by themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import _pairs, losses, nn
from lipdp._pairs import Pooling, available, sorted_pool
from lipdp.bounds import program_of
from lipdp.errors import UnsupportedError
from lipdp.program import check_program

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
KINDS = [(True, Pooling(2, 2, 1e-12)), (True, None), (False, Pooling(2, 3, 1e-6)), (True, Pooling(3, 1, 1e-3))]


def layers(sort: bool, pool: Pooling | None) -> torch.nn.Module:
    """The same by layers."""
    pools = [] if pool is None else [nn.L2NormPool2d((pool.height, pool.width), eps=pool.eps)]
    return torch.nn.Sequential(*[nn.GroupSort(2)] * sort, *pools)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sort", "pool"), KINDS)
def test_gradients_and_their_gradients(sort, pool, device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    bias = torch.randn(4, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return sorted_pool(x, sort=sort, pool=pool, bias=bias)

    assert torch.autograd.gradcheck(function, (x, bias))
    assert torch.autograd.gradgradcheck(function, (x, bias))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 5), st.sampled_from([2, 6, 16, 130]), st.integers(3, 9), st.integers(3, 9), st.sampled_from(KINDS), st.booleans()
)
def test_it_is_what_the_layers_compute(device, rows, channels, height, width, kind, last):
    """Ties, windows that cover all pixels or not, layouts, empty batches: outputs and cotangents, in float32."""
    sort, pool = kind
    generator = torch.Generator().manual_seed(rows + 10 * channels)
    x = torch.randn(rows, channels, height, width, generator=generator).mul(4).round().div(4).to(device)  # many are equal, or 0
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = sorted_pool(ours, sort=sort, pool=pool), layers(sort, pool)(theirs)
    g = torch.randn(expected.shape, generator=generator).to(device)
    found.backward(g)
    expected.backward(g)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_of_zeros_passes_nothing_back(device):
    x = torch.zeros(1, 2, 2, 2, device=device, requires_grad=True)
    sorted_pool(x, sort=True, pool=Pooling(2, 2, 1e-60)).sum().backward()  # in float32, that ε is 0
    assert torch.equal(x.grad, torch.zeros_like(x))


def network(bias: bool = False) -> torch.nn.Module:
    return nn.Sequential(
        nn.BoundedInput((3, 8, 8)),
        nn.SpectralConv2d(3, 8, 3, padding=1, bias=bias),
        nn.GroupSort(2),
        nn.L2NormPool2d(2),
        nn.SpectralConv2d(8, 4, 3, padding=1, bias=bias),
        nn.MaxMin(),
        nn.Flatten(),
        nn.SpectralLinear(64, 6, bias=bias),
        nn.GroupSort(2, dim=-1),
        nn.SpectralLinear(6, 3, bias=bias),
    )


def fused_nodes(model: torch.nn.Module, shape: tuple[int, ...] = (3, 8, 8)) -> list[list[str]]:
    program = program_of(model, shape)
    calls = program._fusions().values()
    return [[type(program.modules[str(node.target)]).__name__ for node in call.inside] for call in calls]


def test_neighbours_fuse_by_themselves():
    assert fused_nodes(network()) == [["GroupSort", "L2NormPool2d"], ["MaxMin"], ["GroupSort"]]


class Read(torch.nn.Module):
    """Something else reads what was sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.bound, self.sort, self.pool = nn.BoundedInput((4, 4, 4)), nn.GroupSort(2), nn.L2NormPool2d(2)

    def forward(self, x):
        y = self.sort(self.bound(x))
        return torch.cat([self.pool(y).flatten(1), y.flatten(1)], 1)


class Other(nn.L2NormPool2d):
    """Not the pool that is known."""

    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (nn.L2NormPool2d(2, stride=1), [["GroupSort"]]),
        (nn.L2NormPool2d(2, padding=1), [["GroupSort"]]),
        (torch.nn.AvgPool2d(2), [["GroupSort"]]),
        (nn.L2NormPool2d((1, 2)), [["GroupSort", "L2NormPool2d"]]),
    ],
)
def test_only_what_is_known_fuses(pool, expected):
    model = nn.Sequential(nn.BoundedInput((4, 4, 4)), nn.GroupSort(2), pool)
    assert fused_nodes(model, (4, 4, 4)) == expected
    wider = nn.Sequential(nn.BoundedInput((4, 4, 4)), nn.GroupSort(4), nn.GroupSort(2, dim=2), nn.GroupSort(2, dim=3))
    assert fused_nodes(wider, (4, 4, 4)) == [["GroupSort"]]  # along rows of four: the last dimension
    assert fused_nodes(Read(), (4, 4, 4)) == [["GroupSort"], ["L2NormPool2d"]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_program_and_its_fused_form_agree(bias, device):
    program = program_of(network(bias).to(device), (3, 8, 8))
    check_program(program)
    x = torch.randn(5, 3, 8, 8, device=device)
    torch.testing.assert_close(program.fused(x), program(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pool", [None, Pooling(2, 2, 1e-12), Pooling(2, 3, 1e-6), Pooling(3, 3, 1e-3)])
def test_on_a_processor_it_is_the_layers_to_the_bit(pool, dtype):
    """So a fused program is compared without computing its convolutions again."""
    x = torch.randn(3, 6, 11, 12, dtype=dtype, requires_grad=True)
    wanted, found = layers(True, pool)(x), sorted_pool(x, sort=True, pool=pool)
    cotangent = torch.randn_like(wanted)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y, x, cotangent)[0] for y in (found, wanted)))


def test_a_fused_form_that_computes_something_else_is_refused(monkeypatch):
    """What runs is what was proved: planning compares the fused form too."""
    monkeypatch.setitem(_pairs._stages, nn.L2NormPool2d, lambda layer: _pairs.Stage(pool=Pooling(2, 2, 0.1)))
    with pytest.raises(UnsupportedError, match="fused"):
        lipdp.plan(network(), losses.CrossEntropy(), dataset_size=100, batch_size=10, steps=2, delta=1e-3, noise_multiplier=1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contributions_of_the_fused_form_stay_below_the_claim(device, dtype):
    """The soundness harness's question, put to what runs: no record's gradient exceeds Δ times the rounding slack."""
    model, loss = network(), losses.CrossEntropy(tau=4.0)
    bounds = lipdp.sensitivities(model, loss)
    model = model.to(device, dtype)
    program = program_of(model, (3, 8, 8))
    x = (torch.randn(32, 3, 8, 8, device=device, dtype=dtype) * 3).requires_grad_()
    targets = torch.arange(32, device=device) % 3
    parameters = dict(model.named_parameters())
    for _ in range(10):
        norms = torch.zeros(len(x), device=device, dtype=dtype)
        for row in range(0, len(x), 8):
            values = loss(program.fused(x[row : row + 1]), targets[row : row + 1]).sum()
            found = torch.autograd.grad(values, list(parameters.values()), create_graph=True)
            for name, gradient in zip(parameters, found, strict=True):
                assert float(gradient.detach().double().norm()) <= bounds[name] * (1 + 1e-4)
            norms[row] = sum(gradient.square().sum() for gradient in found)
        (direction,) = torch.autograd.grad(norms.sum(), x)
        with torch.no_grad():
            x += direction / direction.flatten(1).norm(dim=1).clamp_min(1e-9).reshape(-1, 1, 1, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_kernels_are_used():
    assert available(torch.zeros(1, device="cuda"))
