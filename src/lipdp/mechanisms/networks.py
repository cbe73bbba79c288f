"""The paper's networks: L1-Lipschitz layers, LaplaceNetwork and UtilityNetwork, each k-Lipschitz in the dataset by construction.

With ‖W‖₁→₁ (the largest absolute column sum) at most k_l in layer l, and ReLU or GroupSort between layers,
|f(x) − f(x')| ≤ k·‖x − x'‖₁ with k = Πk_l; replacing one record moves x by at most c = hi − lo in L1, so f has global
sensitivity c·k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from lipdp._checks import one_of, positive, whole
from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, read
from lipdp.mechanisms.postprocess import length, load_weights
from lipdp.mechanisms.problem import Problem

Activation = Literal["relu", "groupsort"]
_FINE = 2**32
_MARGIN = 1e-6  # normalisation in float32 can leave a column a few units in the last place above its bound


class L1Linear(nn.Module):
    """y = W'x + b with every column of W' of absolute sum at most k: W'_ij = W_ij / max(1, ‖W_·j‖₁/k), the paper's (1).

    A parametrisation: gradients go through it. It bounds ‖W'‖₁→₁, so ‖y − y'‖₁ ≤ k‖x − x'‖₁.
    """

    def __init__(self, in_features: int, out_features: int, lipschitz: float = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.lipschitz = positive("lipschitz", lipschitz)
        self.weight = nn.Parameter(torch.empty(whole("out_features", out_features), whole("in_features", in_features)))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Columns begin at their bound, with random signs and shares."""
        with torch.no_grad():
            nn.init.normal_(self.weight)
            self.weight.mul_(self.lipschitz / self.weight.abs().sum(0))
            if self.bias is not None:
                self.bias.zero_()

    def normalised(self) -> Tensor:
        """W'."""
        total = self.weight.abs().sum(0, keepdim=True)
        return self.weight * ((1 - _MARGIN) / (total / self.lipschitz).clamp(min=1.0))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        return nn.functional.linear(x, self.normalised(), self.bias)

    def extra_repr(self) -> str:
        """Shown in print(module)."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, lipschitz={self.lipschitz:g}"


class _Sort(nn.Module):
    """GroupSort with groups of two: it permutes, so it is 1-Lipschitz in every norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, 2).sort(-1).values.reshape(x.shape)


def _activation(name: Activation) -> nn.Module:
    return nn.ReLU() if one_of("activation", name, get_args(Activation)) == "relu" else _Sort()


class _PaperNetwork(nn.Module):
    """What both have in common: n numbers come in, and the whole is k-Lipschitz in L1."""

    def __init__(self, n: int, k: float, activation: Activation, presort: bool) -> None:
        super().__init__()
        self.n, self.k, self.presort, self.activation = n, positive("k", k), presort, activation

    def sensitivity(self, width: float) -> float:
        """c·k."""
        return width * self.k

    def state(self) -> dict[str, Any]:
        """For saving."""
        return {"k": self.k, "activation": self.activation, "presort": self.presort, "weights": dict(self.state_dict())}

    def sorted(self, x: Tensor) -> Tensor:
        """``presort``: sorting is non-expansive in L1, so it leaves k as it is."""
        return x.sort(-1).values if self.presort else x


class LaplaceNetwork(_PaperNetwork):
    """f: ℝⁿ → ℝ of two layers (100 hidden units), k-Lipschitz in L1, each layer √k. f(x) + Lap(ck/ε) is ε-DP."""

    def __init__(self, n: int, k: float, hidden: int = 100, activation: Activation = "relu", presort: bool = False) -> None:
        super().__init__(n, k, activation, presort)
        share = self.k**0.5
        self.body = nn.Sequential(L1Linear(n, hidden, share), _activation(activation), L1Linear(hidden, 1, share))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n) to (batch,)."""
        made: Tensor = self.body(self.sorted(x))
        return made[:, 0]


class UtilityNetwork(_PaperNetwork):
    """u(x, r) of Fig. 3: G_d(x) of two layers, k-Lipschitz; G_r(r) of one free layer; [G_d, G_r] → G_c of two layers, 1-Lipschitz.

    So u is k-Lipschitz in x for every r, of sensitivity c·k, and P(r) ∝ exp(ε·u/(2ck)) is ε-DP. The paper leaves out the 2:
    ``factor=1.0`` in :func:`lipdp.mechanisms.paper.utility_probabilities` does that, for the regression test only.
    """

    def __init__(self, n: int, k: float, hidden: int = 100, activation: Activation = "relu", presort: bool = False) -> None:
        super().__init__(n, k, activation, presort)
        share = self.k**0.5
        self.data = nn.Sequential(L1Linear(n, hidden, share), _activation(activation), L1Linear(hidden, hidden, share))
        self.response = nn.Linear(1, hidden)
        self.combine = nn.Sequential(
            _activation(activation), L1Linear(2 * hidden, hidden, 1.0), _activation(activation), L1Linear(hidden, 1, 1.0)
        )

    def forward(self, x: Tensor, responses: Tensor) -> Tensor:
        """Utilities (batch, R) of datasets (batch, n) and responses (R,)."""
        data: Tensor = self.data(self.sorted(x))
        other: Tensor = self.response(responses[:, None])
        # The first layer of G_c is linear in the concatenation: its two halves are added, not R·batch vectors built.
        first = self.combine[1]
        assert isinstance(first, L1Linear)
        weight, half = first.normalised(), data.shape[1]
        act = self.combine[0]
        left = act(data) @ weight[:, :half].T
        right = act(other) @ weight[:, half:].T + first.bias
        hidden: Tensor = self.combine[3](self.combine[2](left[:, None] + right[None]))
        return hidden[..., 0]


@dataclass(frozen=True)
class NetworkStatistic:
    """f(x)/scale of a :class:`LaplaceNetwork` on data of [0, width], on a lattice of 2⁻³² of its sensitivity Δ = width·k/scale.

    Sensitivity in lattice steps: Δ, rounded up, plus one for rounding the value.
    """

    network: LaplaceNetwork
    width: float
    scale: float

    def check(self, problem: Problem) -> None:
        """It is for data of this size and range, and float64 is exact enough for its weights."""
        _check_range(self.network.n, self.width, problem)
        if self.scale != problem.scale:
            raise ConfigurationError(
                f"the network's outputs are scaled by {self.scale:g}, and the problem's answers by {problem.scale:g}."
            )
        _check_rounding(self.network, self.width, 0.0)

    @property
    def unit(self) -> float:
        """The lattice's step; not finer than float64 resolves."""
        return max(self.network.sensitivity(self.width) / self.scale, 2**-10) / _FINE

    @property
    def dimension(self) -> int:
        """One number."""
        return 1

    @property
    def sensitivity(self) -> int:
        """In lattice steps."""
        return math.ceil(self.network.sensitivity(self.width) / self.scale / self.unit) + 1

    def integers(self, t: Tensor) -> Tensor:
        """(batch, 1), evaluated in float64."""
        with torch.no_grad():
            values: Tensor = self.network.double()(t * self.width)
        return (values / self.scale / self.unit).round().to(torch.int64)[:, None]

    def state(self) -> dict[str, Any]:
        """For saving."""
        return {"kind": "laplace network", **self.network.state()}


@dataclass(frozen=True)
class NetworkUtility:
    """u(x, r) of a :class:`UtilityNetwork` over a grid (unit form), on a lattice as in :class:`NetworkStatistic`; Δ = width·k."""

    network: UtilityNetwork
    grid: Tensor
    width: float

    def check(self, problem: Problem) -> None:
        """It is for data of this size and range, and float64 is exact enough for its weights."""
        _check_range(self.network.n, self.width, problem)
        read(Annotated[Tensor, Array(1, torch.float64)], self.grid, "a mechanism's grid")
        layer, places = self.network.response, float(self.grid.abs().max()) * self.width
        with torch.no_grad():
            _check_rounding(self.network, self.width, float(places * layer.weight.abs().sum() + layer.bias.abs().sum()))

    @property
    def unit(self) -> float:
        """The lattice's step; not finer than float64 resolves."""
        return max(self.network.sensitivity(self.width), 2**-10) / _FINE

    @property
    def sensitivity(self) -> int:
        """In lattice steps."""
        return math.ceil(self.network.sensitivity(self.width) / self.unit) + 1

    def integers(self, t: Tensor) -> Tensor:
        """(batch, R), evaluated in float64."""
        network = self.network.double()
        with torch.no_grad():
            parts = [network(part * self.width, self.grid.double() * self.width) for part in torch.split(t, 500)]
        return (torch.cat(parts) / self.unit).round().to(torch.int64)

    def resized(self, n: int, old: int) -> NetworkUtility:
        """Not possible: the network reads exactly n numbers."""
        raise ConfigurationError(f"the paper's network reads {old} numbers, not {n}: train one for n = {n}, or use learn().")

    def state(self) -> dict[str, Any]:
        """For saving."""
        return {"kind": "utility network", "grid": self.grid, **self.network.state()}


def _check_range(n: int, width: float, problem: Problem) -> None:
    if n != problem.n or width != problem.width:
        raise ConfigurationError(
            f"the network is for {n} numbers of a range of {width:g}, and the problem is about {problem.n} of a range of "
            f"{problem.width:g}."
        )


def _check_rounding(network: LaplaceNetwork | UtilityNetwork, width: float, beside: float) -> None:
    """Refuse weights so large that float64 loses more than the layers' margin leaves.

    No number inside is above M = κ·(κ·n·c + all biases + what enters ``beside`` the data), κ = max(k, 1); a sum of so many products
    is off by as many roundings of M. Two outputs may so differ by more than c·k, but every layer's normalisation stays 1e-6 below
    its bound: that covers errors of ½·1e-6·c·k in each.
    """
    with torch.no_grad():
        biases = sum(
            float(layer.bias.abs().sum()) for layer in network.modules() if isinstance(layer, L1Linear) and layer.bias is not None
        )
        terms = network.n + sum(parameter.shape[0] for parameter in network.parameters())
    steep = max(network.k, 1.0)
    largest = steep * (steep * network.n * width + biases + beside)
    if not largest * terms * 2.0**-52 <= _MARGIN / 2 * width * network.k:
        raise ConfigurationError(
            f"the network works with numbers up to {largest:g}: too large for its sensitivity {network.sensitivity(width):g} to be "
            "certain in float64. Learn it again."
        )


@dataclass(frozen=True)
class _PaperState:
    k: Annotated[float, Range(least=1e-12, most=1e12)]
    activation: Activation
    presort: bool
    weights: dict[str, Any]


@dataclass(frozen=True)
class LaplaceState(_PaperState):
    """A :class:`NetworkStatistic` in a file: size, range and scale follow from the problem, widths from the weights."""

    kind: Literal["laplace network"]

    def build(self, problem: Problem) -> NetworkStatistic:
        """The statistic."""
        hidden = length(self.weights, "body.0.weight")
        network = LaplaceNetwork(problem.n, self.k, hidden, self.activation, self.presort)
        return NetworkStatistic(load_weights(network, self.weights, "the network").double().eval(), problem.width, problem.scale)


@dataclass(frozen=True)
class UtilityState(_PaperState):
    """A :class:`NetworkUtility` in a file."""

    kind: Literal["utility network"]
    grid: Annotated[Tensor, Array(1, torch.float64)]

    def build(self, problem: Problem) -> NetworkUtility:
        """The utility."""
        hidden = length(self.weights, "data.0.weight")
        network = UtilityNetwork(problem.n, self.k, hidden, self.activation, self.presort)
        return NetworkUtility(load_weights(network, self.weights, "the utility network").double().eval(), self.grid, problem.width)
