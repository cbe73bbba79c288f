"""The paper's system: constraints, training, restarts, and its mechanisms as mechanisms of this library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lipdp.errors import ConfigurationError
from lipdp.mechanisms import load
from lipdp.mechanisms.networks import L1Linear, LaplaceNetwork, UtilityNetwork
from lipdp.mechanisms.paper import (
    Training,
    _train,
    blind_loss,
    laplace_erl,
    laplace_mechanism,
    paper_responses,
    train_laplace,
    train_utility,
    utility_erl,
    utility_mechanism,
)
from lipdp.mechanisms.problem import Problem
from tests.mechanisms.common import BOUNDS, N, datasets, private

SMALL = Training(epochs=3, hidden=16, rate=3e-3)


def test_columns_are_bounded_and_gradients_flow() -> None:
    layer = L1Linear(7, 5, lipschitz=0.7)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-2, 2, 7))
    sums = layer.normalised().detach().abs().sum(0)
    assert float(sums.max()) <= 0.7
    assert float(sums.min()) < 0.1  # a column inside its bound stays as it is
    layer(torch.rand(3, 7)).sum().backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None
    assert bool((layer.weight.grad != 0).any())


def test_the_utility_is_the_plain_network_on_the_concatenation() -> None:
    """Its first joint layer is computed in two halves; here the long way round."""
    network = UtilityNetwork(6, 2.0, hidden=8, activation="groupsort")
    x, responses = torch.rand(3, 6), torch.linspace(0, 1, 4)
    network.requires_grad_(False)
    got = network(x, responses)
    for i in range(3):
        for j in range(4):
            joined = torch.cat([network.data(x[i : i + 1]), network.response(responses[j].reshape(1, 1))], 1)
            assert float(network.combine(joined)) == pytest.approx(float(got[i, j]), abs=1e-5)


def test_laplace_networks_learn_and_release(tmp_path: Path) -> None:
    problem = Problem.of("mean", 2.0, N, BOUNDS)
    t, test = datasets(1500, 1), datasets(400, 2)
    network = train_laplace(problem, 1 / N, t, seed=0, training=SMALL)
    erl = float(laplace_erl(network, problem, test).detach())
    assert erl < 0.9 * (blind_loss(problem, test) + 2 * (network.k / 2.0) ** 2)
    mechanism = laplace_mechanism(problem, network)
    assert float(mechanism.losses(test).mean()) == pytest.approx(erl, rel=0.05)  # E(f−q)² + 2k²/ε², as simulated
    decoded = laplace_mechanism(problem, network, t)
    assert float(decoded.losses(test).mean()) < erl
    decoded.save(tmp_path / "m")
    assert torch.equal(load(tmp_path / "m").losses(test, 1), decoded.losses(test, 1))
    assert -10 < mechanism.release(private()) < 20
    with pytest.raises(ConfigurationError, match="exactly"):
        mechanism.for_size(7)


def test_utility_networks_learn_and_release(tmp_path: Path) -> None:
    problem = Problem.of("median", 4.0, N, BOUNDS, "quantile")
    t, test = datasets(800, 1), datasets(300, 2)
    responses = paper_responses()
    network = train_utility(problem, 1.0, t, seed=0, training=SMALL)
    erl = float(utility_erl(network, problem, test, responses).detach())
    untrained = UtilityNetwork(N, 1.0, 16)
    assert erl < 0.9 * float(utility_erl(untrained, problem, test, responses).detach())
    mechanism = utility_mechanism(problem, network)
    assert float(mechanism.losses(test).mean()) == pytest.approx(erl, rel=1e-3)
    mechanism.save(tmp_path / "m")
    assert torch.equal(load(tmp_path / "m").losses(test), mechanism.losses(test))
    assert float(mechanism.probabilities(private()).sum()) == pytest.approx(1)
    assert 0 <= mechanism.release(private()) <= 10


def test_sorting_first_makes_it_symmetric_at_the_same_k() -> None:
    network = LaplaceNetwork(N, 1.0, hidden=8, presort=True)
    x = torch.rand(5, N)
    assert torch.allclose(network(x), network(x.flip(1)))
    moved = x.clone()
    moved[:, 3] = torch.rand(5)
    assert bool(((network(x) - network(moved)).abs() <= (x - moved).abs().sum(1) + 1e-6).all())


def test_it_starts_again_where_the_first_epoch_does_not_improve() -> None:
    """The loss of the first two networks does not depend on their weights; the third one's does."""
    made: list[torch.nn.Linear] = []

    def make() -> torch.nn.Linear:
        made.append(torch.nn.Linear(1, 1))
        return made[-1]

    def loss(network: torch.nn.Linear, batch: torch.Tensor) -> torch.Tensor:
        return (network.weight**2).sum() if len(made) >= 3 else 0 * network.weight.sum() + 1

    network = _train(make, loss, torch.rand(64, 1), 0, Training(epochs=2, restarts=5))
    assert len(made) == 3
    assert network is made[2]
    made.clear()
    stuck = _train(make, lambda network, batch: 0 * network.weight.sum() + 1, torch.rand(64, 1), 0, Training(epochs=2, restarts=2))
    assert len(made) == 3  # it gives up trying, and returns what it has
    assert stuck is made[2]


def test_quantile_loss_is_for_utilities() -> None:
    with pytest.raises(ConfigurationError, match="squared"):
        train_laplace(Problem.of("median", 1.0, N, BOUNDS, "quantile"), 1.0, datasets(10, 1), 0)
    with pytest.raises(ConfigurationError, match="activation"):
        LaplaceNetwork(N, 1.0, activation="tanh")  # type: ignore[arg-type]
