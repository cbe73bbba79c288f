"""The paper's system: networks of a chosen Lipschitz constant k trained for the expected response loss (ERL), and their mechanisms.

Networks see the data in the paper's units, [0, c]: scale matters to their training. Losses and answers are in unit form, as
everywhere here, so f is divided by c (c² for the variance). Two corrections: P(r) ∝ exp(ε·u/2ck), with the ½ that the paper lacks;
and networks are evaluated in float64 and rounded to a lattice when released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lipdp._numerics import Undrawn
from lipdp.errors import ConfigurationError
from lipdp.mechanisms.experts import additive
from lipdp.mechanisms.mechanism import AdditiveMechanism, SelectionMechanism
from lipdp.mechanisms.networks import Activation, LaplaceNetwork, NetworkStatistic, NetworkUtility, UtilityNetwork
from lipdp.mechanisms.postprocess import Sample, Table
from lipdp.mechanisms.problem import Problem, response_loss

_Net = TypeVar("_Net", bound=nn.Module)


@dataclass(frozen=True)
class Training:
    """The paper's: batches of 32 datasets out of 10⁴ drawn before, Adam, two layers of 100, ReLU, 50 responses."""

    epochs: int = 5
    batch: int = 32
    rate: float = 1e-3
    hidden: int = 100
    activation: Activation = "relu"
    presort: bool = False
    restarts: int = 5


def utility_probabilities(utilities: Tensor, sensitivity: float, epsilon: float, factor: float = 0.5) -> Tensor:
    """P(r) ∝ exp(factor·ε·u/Δ). Only factor ½ is ε-DP; 1.0 is what the paper writes, and reaches 2ε."""
    return torch.softmax(utilities * (factor * epsilon / sensitivity), -1)


def laplace_erl(network: LaplaceNetwork, problem: Problem, t: Tensor) -> Tensor:
    """E (f(x) − q(x))² + 2c²k²/ε², divided by the square of the query's scale (squared loss only)."""
    dtype = _dtype(network)
    error: Tensor = network(t.to(dtype) * problem.width) / problem.scale - problem.query(t).to(dtype)
    return (error**2).mean() + 2 * (network.sensitivity(problem.width) / problem.scale / problem.epsilon) ** 2


def utility_erl(network: UtilityNetwork, problem: Problem, t: Tensor, responses: Tensor) -> Tensor:
    """E_x Σ_r L(x, q(x), r)·P(r | x), in unit scale."""
    dtype = _dtype(network)
    utilities = network(t.to(dtype) * problem.width, responses.to(dtype) * problem.width)
    chances = utility_probabilities(utilities, network.sensitivity(problem.width), problem.epsilon)
    costs = response_loss(problem.loss, t, problem.query(t), responses.to(t.dtype).expand(t.shape[0], -1))
    return (chances * costs.to(dtype)).sum(1).mean()


def _dtype(network: nn.Module) -> torch.dtype:
    return next(network.parameters()).dtype


def blind_loss(problem: Problem, t: Tensor, responses: Tensor | None = None) -> float:
    """The baseline that does not see the data: the best constant of the responses (or of the line, squared loss)."""
    truth = problem.query(t)
    if responses is None:
        return float(truth.var(correction=0))
    return float(response_loss(problem.loss, t, truth, responses.to(t.dtype).expand(t.shape[0], -1)).mean(0).min())


def paper_responses(count: int = 50) -> Tensor:
    """The paper's R: points spread evenly over the range, ends included."""
    return torch.linspace(0, 1, count, dtype=torch.float64)


def train_laplace(problem: Problem, k: float, t: Tensor, seed: int, training: Training | None = None) -> LaplaceNetwork:
    """A network of Lipschitz constant k that approximates the query on datasets ``t``."""
    how = training or Training()
    if problem.loss != "squared":
        raise ConfigurationError("the paper's Laplace networks are trained for squared loss: set loss='squared'.")
    return _train(
        lambda: LaplaceNetwork(problem.n, k, how.hidden, how.activation, how.presort),
        lambda network, batch: laplace_erl(network, problem, batch),
        t,
        seed,
        how,
    )


def train_utility(problem: Problem, k: float, t: Tensor, seed: int, training: Training | None = None) -> UtilityNetwork:
    """A utility of Lipschitz constant k, trained for the expected response loss of its exponential mechanism."""
    how, responses = training or Training(), paper_responses()
    return _train(
        lambda: UtilityNetwork(problem.n, k, how.hidden, how.activation, how.presort),
        lambda network, batch: utility_erl(network, problem, batch, responses),
        t,
        seed,
        how,
    )


def _train(make: Callable[[], _Net], erl: Callable[[_Net, Tensor], Tensor], t: Tensor, seed: int, how: Training) -> _Net:
    """Minimise; start again from new weights where the first epoch does not improve (at most ``restarts`` times)."""
    generator = torch.Generator().manual_seed(seed)
    check = t[:1000]
    for attempt in range(how.restarts + 1):
        with Undrawn():
            torch.manual_seed(seed + 7919 * attempt)
            network = make()
        optimiser = torch.optim.Adam(network.parameters(), lr=how.rate)
        with torch.no_grad():
            before = float(erl(network, check))
        for epoch in range(how.epochs):
            order = torch.randperm(t.shape[0], generator=generator)
            for chosen in torch.split(order, how.batch):
                optimiser.zero_grad()
                erl(network, t[chosen]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            if epoch == 0:
                with torch.no_grad():
                    improved = float(erl(network, check)) < before
                if not improved and attempt < how.restarts:
                    break
        else:
            return network.eval()
    raise AssertionError("the last attempt always runs to its end")


def laplace_mechanism(problem: Problem, network: LaplaceNetwork, t: Tensor | None = None) -> AdditiveMechanism:
    """f(x) + Lap(ck/ε) as a mechanism; with datasets ``t``, decoded by E[q | released] (the paper does not), else as it is."""
    statistic = NetworkStatistic(network, problem.width, problem.scale)
    title = f"the paper's Laplace network, k = {network.k:g}"
    if t is not None:
        return additive(problem, title + ", decoded", statistic, "laplace", Sample.of(problem, t))
    far = 100 * (1 + network.sensitivity(problem.width) / problem.scale / problem.epsilon)
    line = torch.tensor([-far, far], dtype=torch.float64)
    return AdditiveMechanism(problem, title, statistic, "laplace", Table((line,), line))


def utility_mechanism(problem: Problem, network: UtilityNetwork) -> SelectionMechanism:
    """The exponential mechanism of a utility network over the paper's 50 responses, with the factor ½."""
    responses = paper_responses()
    title = f"the paper's utility network, k = {network.k:g}, exponential"
    return SelectionMechanism(problem, title, NetworkUtility(network, responses, problem.width), "exponential", responses)
