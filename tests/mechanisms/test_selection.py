"""Probabilities of the selection mechanisms, against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.utilities import ENOUGH_NODES, flip_probabilities, probabilities


def test_permute_and_flip_is_its_definition() -> None:
    """Over all 120 orders: the first candidate whose coin says stop."""
    logits = torch.tensor([[0.0, -0.3, -2.0, -0.05, 0.0]], dtype=torch.float64)
    stop = logits.exp()[0].tolist()
    want = [0.0] * 5
    for order in itertools.permutations(range(5)):
        left = 1 / 120
        for candidate in order:
            want[candidate] += left * stop[candidate]
            left *= 1 - stop[candidate]
    assert torch.allclose(flip_probabilities(logits)[0], torch.tensor(want, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("responses", [2, 3, 50, 64, 101, 300])
def test_they_sum_to_one_and_few_nodes_are_enough(responses: int) -> None:
    utilities = -100 * torch.rand(40, responses, dtype=torch.float64, generator=torch.Generator().manual_seed(responses))
    for epsilon in (0.1, 1.0, 5.0):
        exact = probabilities("permute_and_flip", utilities, 1.0, epsilon)
        assert torch.allclose(exact.sum(1), torch.ones(40, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(probabilities("permute_and_flip", utilities, 1.0, epsilon, ENOUGH_NODES), exact, atol=1e-10)


def test_permute_and_flip_is_never_worse_than_exponential() -> None:
    """McKenna and Sheldon 2020: its expected utility is at least that of the exponential mechanism, on every input."""
    utilities = -20 * torch.rand(200, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flip, exponential = (
        (probabilities(method, utilities, 1.0, 1.0) * utilities).sum(1)  # type: ignore[arg-type]
        for method in ("permute_and_flip", "exponential")
    )
    assert bool((flip >= exponential - 1e-12).all())
    assert float((flip - exponential).max()) > 0.1


def test_gradient() -> None:
    utilities = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda u: probabilities("permute_and_flip", u, 1.0, 1.0), (utilities,))
    wide = (-30 * torch.rand(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).requires_grad_()
    assert torch.autograd.gradcheck(lambda u: probabilities("permute_and_flip", u, 1.0, 2.0), (wide,))


def test_float32_is_close_also_where_weights_vanish() -> None:
    """Training cuts weights off at e^-60, so that they do not become subnormal: nothing that counts is lost."""
    utilities = -200 * torch.rand(50, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    short, exact = (probabilities("permute_and_flip", u, 1.0, 2.0) for u in (utilities.float(), utilities))
    assert torch.allclose(short.double(), exact, atol=1e-5)
    assert float(short.min()) > 1.2e-38  # the smallest normal number


def test_unknown_method() -> None:
    with pytest.raises(ConfigurationError, match="choose one of"):
        probabilities("softmax", torch.zeros(1, 2), 1.0, 1.0)  # type: ignore[arg-type]
