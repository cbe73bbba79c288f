"""The count network's convolution against torch's, and its gradient against differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lipdp.mechanisms.utilities import CountNetwork, _along_the_grid, _Taps


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(1, 4),
    outputs=st.integers(1, 4),
    batch=st.integers(1, 5),
    responses=st.integers(2, 12),
    reach=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_convolution(channels: int, outputs: int, batch: int, responses: int, reach: int, seed: int) -> None:
    """Datasets lie side by side in one matrix: nothing of one may leak into another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(channels, batch, responses, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(outputs, channels, 2 * reach + 1, dtype=torch.float64, generator=generator).requires_grad_()
    mine = _along_the_grid(x, weight)
    theirs = F.conv1d(F.pad(x.transpose(0, 1), (reach, reach), mode="replicate"), weight).transpose(0, 1)
    assert torch.allclose(mine, theirs, atol=1e-12)
    given_ = torch.randn(mine.shape, dtype=torch.float64, generator=generator)
    for ours, other in zip(
        torch.autograd.grad(mine, (x, weight), given_), torch.autograd.grad(theirs, (x, weight), given_), strict=True
    ):
        assert torch.allclose(ours, other, atol=1e-12)


def test_gradients_of_the_taps() -> None:
    x = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_Taps.apply, (x, weight))


@pytest.mark.parametrize("gate", [-3.0, 0.0, 3.0])
def test_one_dataset_at_a_time_gives_the_same_utilities(gate: float) -> None:
    torch.manual_seed(0)
    network = CountNetwork(20, 6, 5).double().requires_grad_(False)
    network.gate.fill_(gate)
    centred, expert = torch.randn(7, 20, dtype=torch.float64), -torch.rand(7, 20, dtype=torch.float64)
    together = network(centred, expert)
    for i in range(7):
        assert torch.allclose(network(centred[i : i + 1], expert[i : i + 1])[0], together[i], atol=1e-12)


def test_it_starts_at_the_expert() -> None:
    """Without the small random weights beside it, MaxMin of (z, −z) holds −|z|: the rank utility."""
    network = CountNetwork(15, 4, 3).double().requires_grad_(False)
    for place, weight in enumerate(network.weights):
        keep = weight.abs() > 0.4
        network.weights[place].copy_(torch.where(keep, weight, torch.zeros(())))
    network.gate.fill_(50.0)
    z = torch.randn(4, 15, dtype=torch.float64) * 5
    assert torch.allclose(network(z, torch.zeros_like(z)), -z.abs(), atol=1e-6)
