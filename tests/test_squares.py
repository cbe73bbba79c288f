"""The loss of squares: its value, its gradient, and a constant that is reached."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import losses
from lipdp.errors import ConfigurationError, DataError


def test_value_and_gradient() -> None:
    z = torch.tensor([[0.5, -0.25, 0.0, 0.75]], requires_grad=True)
    wanted = torch.tensor([[-0.25, 0.75, -0.25, -0.25]])
    value = losses.Squares()(z, torch.tensor([1]))
    assert float(value.detach()) == pytest.approx(float((z.detach() - wanted).square().sum()) / 2)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    assert torch.allclose(gradient, z.detach() - wanted)
    assert float(losses.Squares()(wanted, torch.tensor([1]))) == 0


@settings(max_examples=50, deadline=None)
@given(classes=st.integers(2, 12), norm=st.floats(0, 10), seed=st.integers(0, 10_000))
def test_constant(classes: int, norm: float, seed: int) -> None:
    """Holds for all outputs in the ball, and is reached at the one opposite to what is wanted."""
    loss = losses.Squares()
    bound = loss.lipschitz_for(classes, norm)
    z = torch.randn(16, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    z = norm * z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
    y = torch.arange(16) % classes
    wanted = torch.nn.functional.one_hot(y, classes).double() - 1 / classes
    z[0] = -norm * wanted[0] / torch.linalg.vector_norm(wanted[0])
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(z, y).sum(), z)
    sizes = torch.linalg.vector_norm(gradient, dim=1)
    assert float(sizes.max()) <= bound * (1 + 1e-9)
    assert float(sizes[0]) == pytest.approx(bound)


def test_refuses() -> None:
    loss = losses.Squares()
    assert loss.lipschitz == math.inf
    with pytest.raises(ConfigurationError, match="K ≥ 2"):
        loss.lipschitz_for(1, 1.0)
    with pytest.raises(ConfigurationError, match="positions"):
        loss.lipschitz_for(3, 1.0, positions=4)
    with pytest.raises(DataError, match="class"):
        loss(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(DataError, match="K ≥ 2"):
        loss(torch.zeros(2, 1), torch.tensor([0, 0]))


def test_examples_are_independent() -> None:
    z, y = torch.randn(6, 4), torch.arange(6) % 4
    together = losses.Squares()(z, y)
    assert torch.allclose(together, torch.cat([losses.Squares()(z[i : i + 1], y[i : i + 1]) for i in range(6)]))
