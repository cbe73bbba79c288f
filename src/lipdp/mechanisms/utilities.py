"""Utilities on counts: how good each response of a public grid is, with a proved L∞ sensitivity under replacing one record.

The counts N(r) = #{x_i < r} (and ≤) move by at most one each when a record is replaced. Utilities are integers, on a lattice of
2⁻¹⁶ of a count, so that the released choice is drawn without floating point.

A response is chosen by the exponential mechanism or by permute-and-flip, whose probabilities are exact here. Both see utilities
u(x, r) of sensitivity Δ through a_r = exp(ε(u_r − u_max)/2Δ). The factor ½ is needed: exp(ε·u/Δ), as the paper writes it, is only
2ε-DP in general.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lipdp._checks import one_of
from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, read
from lipdp.mechanisms.postprocess import length, load_weights
from lipdp.mechanisms.problem import Problem

Selection = Literal["exponential", "permute_and_flip"]
ENOUGH_NODES = 24
"""Quadrature nodes that are as good as exact (10⁻⁸ for 300 responses at ε = 0.1, less elsewhere), where speed counts."""
_CHUNK = 200_000  # numbers in one intermediate tensor: what fits in a core's own cache is three times faster
_FINE = 2**16
_ROWS = 250  # datasets at a time: what fits in a cache is three times as fast
_MARGIN = 1e-9  # rows are scaled to 1 − 1e-9: normalisation itself rounds
_LARGEST = 2**24  # of the numbers that a learned utility computes with, in counts


def counts(t: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """#{x_i < r} and #{x_i ≤ r}, each (batch, R), of sorted datasets."""
    data, places = t.contiguous(), grid.to(t.dtype).expand(t.shape[0], -1).contiguous()
    return torch.searchsorted(data, places), torch.searchsorted(data, places, right=True)


@dataclass(frozen=True)
class RankUtility:
    """The expert's u(x, r) = −dist(np, [#{x < r}, #{x ≤ r}]), of sensitivity 1.

    It is −max(#{x<r} − np, np − #{x≤r}, 0), a maximum of functions that each move by at most one.
    """

    grid: Tensor
    rank: Fraction

    def check(self, problem: Problem) -> None:
        """Its sensitivity is 1 count for every problem."""
        check_grid(self.grid)

    @property
    def sensitivity(self) -> int:
        """In lattice steps."""
        return _FINE

    @property
    def unit(self) -> float:
        """Counts per lattice step."""
        return 1 / _FINE

    def integers(self, t: Tensor) -> Tensor:
        """Utilities (batch, R)."""
        below, upto = counts(t, self.grid)
        target = round(self.rank * _FINE)
        return -torch.maximum(below * _FINE - target, target - upto * _FINE).clamp(min=0)

    def resized(self, n: int, old: int) -> RankUtility:
        """For another size: the rank scales, the counts do not."""
        return replace(self, rank=self.rank * n / old)

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"kind": "rank", "grid": self.grid}


class _Taps(torch.autograd.Function):
    """Σ_k W_k·x shifted by k, for x (channels, places) and W (outputs, channels, K); the last K−1 places are left 0.

    A convolution as K matrix products over all datasets at once: for so few channels, and in float64, several times as fast as
    ``conv1d``, forwards and backwards.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        outputs, _, taps = weight.shape
        made, places = x.new_zeros(outputs, x.shape[1]), x.shape[1] - taps + 1
        for k, tap in enumerate(weight.unbind(2)):
            made[:, :places].addmm_(tap, x[:, k : k + places])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        places = x.shape[1] - weight.shape[2] + 1
        given = gradients[0][:, :places]
        own, taps = torch.zeros_like(x), []
        for k, tap in enumerate(weight.unbind(2)):
            own[:, k : k + places].addmm_(tap.T, given)
            taps.append(given @ x[:, k : k + places].T)
        return own, torch.stack(taps, 2)


def _along_the_grid(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution along the last axis of (channels, batch, R), ends repeated."""
    reach, responses = weight.shape[2] // 2, x.shape[2]
    padded = F.pad(x, (reach, reach), mode="replicate")
    # Datasets lie side by side: what is computed across their borders is cut off again.
    flat: Tensor = _Taps.apply(padded.reshape(x.shape[0], -1), weight)  # type: ignore[no-untyped-call]
    made = flat.reshape(weight.shape[0], x.shape[1], -1)
    return made.narrow(2, 0, responses)


class CountNetwork(torch.nn.Module):
    """u = (1−g)·expert + g·network(N − np), 1-Lipschitz in L∞ of the counts.

    The network is two convolutions along the grid with MaxMin activations, and a mixing of channels. Each output of a layer is
    Σ w·input with Σ|w| ≤ 1 (weights divided by max(1, Σ|w|), a parametrisation), MaxMin permutes its inputs, padding repeats
    them: every step is 1-Lipschitz in L∞, and so is a convex combination. What is added to each response (``offset``) does not
    depend on the data. It starts at the expert: MaxMin of (z, −z) holds −|z|.
    """

    def __init__(self, responses: int, channels: int = 16, kernel: int = 9) -> None:
        super().__init__()
        self.sizes = (responses, channels, kernel)
        if channels < 2 or channels % 2 or kernel % 2 == 0:
            raise ConfigurationError(
                f"a count network needs an even number of channels and an odd kernel, not {channels} and {kernel}."
            )
        middle, half = kernel // 2, channels // 2
        first = 0.3 * torch.randn(channels, 1, kernel) / kernel
        second = 0.3 * torch.randn(channels, channels, kernel) / (channels * kernel)
        last = 0.3 * torch.randn(1, channels, 1) / channels
        first[0, 0, middle], first[half, 0, middle] = 1.0, -1.0  # MaxMin pairs channels j and j + half: here |z| and −|z|
        second[0, half, middle] = second[half, half, middle] = 1.0
        last[0, 0, 0] = last[0, half, 0] = 0.5
        self.weights = torch.nn.ParameterList([first, second, last])
        self.biases = torch.nn.ParameterList([torch.zeros(channels), torch.zeros(channels), torch.zeros(1)])
        self.offset = torch.nn.Parameter(torch.zeros(responses))
        self.gate = torch.nn.Parameter(torch.zeros(()))

    @staticmethod
    def normalised(weight: Tensor) -> Tensor:
        """Rows of absolute sum at most 1."""
        total = weight.abs().sum((1, 2), keepdim=True)
        return weight * ((1 - _MARGIN) / total.clamp(min=1.0))

    def forward(self, centred: Tensor, expert: Tensor) -> Tensor:
        """Utilities (batch, R), in counts, from N(r) − np and the expert's utilities."""
        hidden = centred[None]  # (channels, batch, R)
        for weight, bias in zip(list(self.weights)[:2], list(self.biases)[:2], strict=True):
            hidden = _along_the_grid(hidden, self.normalised(weight)) + bias[:, None, None]
            first, second = torch.chunk(hidden, 2, 0)
            hidden = torch.cat([torch.maximum(first, second), torch.minimum(first, second)])
        mixed = torch.tensordot(self.normalised(self.weights[2])[0, :, 0], hidden, 1)
        network: Tensor = mixed + self.biases[2] + self.offset
        gate = torch.sigmoid(self.gate)
        return (1 - gate) * expert + gate * network


@dataclass(frozen=True)
class LearnedUtility:
    """A :class:`CountNetwork` on mid-counts (#{x<r} + #{x≤r})/2, evaluated in float64 and rounded to the lattice.

    Sensitivity: ⌈2¹⁶·factor⌉ + 1 lattice steps. The network is 1-Lipschitz and its inputs move by at most ``factor`` (n_trained
    ÷ n, which is 1 unless the mechanism was resized); rounding adds at most one step, floating point (below 10⁻⁶ of a step)
    nothing that survives being an integer.
    """

    grid: Tensor
    rank: Fraction
    network: CountNetwork
    factor: Fraction = Fraction(1)

    def check(self, problem: Problem) -> None:
        """The network is for this grid, and its numbers are small enough for float64 to be exact to half a step.

        Every layer's outputs are at most its inputs and its bias, so no number is above n·factor + Σ max|b| + max|offset|. A sum of
        some hundred products in float64 is off by 2⁻⁴⁴ of the largest at most: of 2²⁴, 2⁻²⁰, where a step is 2⁻¹⁶.
        """
        check_grid(self.grid)
        if self.network.sizes[0] != self.grid.shape[0]:
            raise ConfigurationError(
                f"the utility network is for {self.network.sizes[0]} responses, and the grid has {self.grid.shape[0]}."
            )
        if not 0 < self.factor <= 10**6:
            raise ConfigurationError(f"the factor on a learned utility's counts is {self.factor}: it has to lie in (0, 10^6].")
        with torch.no_grad():
            added = [float(part.double().abs().max()) for part in (*self.network.biases, self.network.offset)]
        largest = float(problem.n * self.factor) + sum(added)
        if not largest <= _LARGEST or not math.isfinite(float(self.network.gate.detach())):
            raise ConfigurationError(
                f"the utility network works with numbers up to {largest:g}: beyond {_LARGEST} its sensitivity is not certain."
            )

    @property
    def sensitivity(self) -> int:
        """In lattice steps."""
        return math.ceil(_FINE * self.factor) + 1

    @property
    def unit(self) -> float:
        """Counts per lattice step."""
        return 1 / _FINE

    def inputs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The network's inputs: centred mid-counts and the expert's utilities, both times ``factor``."""
        below, upto = (part.to(torch.float64) for part in counts(t, self.grid))
        rank = float(self.rank)
        expert = -torch.maximum(below - rank, rank - upto).clamp(min=0)
        scale = float(self.factor)
        return ((below + upto) / 2 - rank) * scale, expert * scale

    def integers(self, t: Tensor) -> Tensor:
        """Utilities (batch, R)."""
        network = self.network.double().eval()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in network.parameters()):
            raise ConfigurationError(
                "the utility network holds NaN or infinite weights, so its sensitivity is not 1: learn it again."
            )
        with torch.no_grad():
            parts = [network(*self.inputs(part)) for part in torch.split(t, _ROWS)]
        return (torch.cat(parts) * _FINE).round().to(torch.int64)

    def resized(self, n: int, old: int) -> LearnedUtility:
        """For another size: counts are scaled to the size it was trained for, and the sensitivity with them."""
        return replace(self, rank=self.rank * n / old, factor=self.factor * old / n)

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""
        own = {"grid": self.grid, "factor": str(self.factor)}
        return {"kind": "learned", "weights": dict(self.network.state_dict()), **own}


class Utility(Protocol):
    """What a selection mechanism needs of its utility: integers, each of a proved sensitivity."""

    @property
    def unit(self) -> float:
        """Counts (or utility) per lattice step."""

    @property
    def sensitivity(self) -> int:
        """Of each utility, under replacing one record, in lattice steps."""

    def integers(self, t: Tensor) -> Tensor:
        """(batch, R), int64, of sorted unit datasets."""

    @property
    def grid(self) -> Tensor:
        """The responses, in unit form."""

    def check(self, problem: Problem) -> None:
        """Refuse a problem that its sensitivity does not hold for."""

    def resized(self, n: int, old: int) -> Utility:
        """For datasets of n records instead of ``old``."""

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""


def check_grid(grid: Tensor) -> None:
    """Refuse what is no list of responses in unit form."""
    read(Annotated[Tensor, Array(1, torch.float64)], grid, "a mechanism's grid")


@dataclass(frozen=True)
class RankState:
    """A :class:`RankUtility` in a file: the rank follows from the problem."""

    kind: Literal["rank"]
    grid: Annotated[Tensor, Array(1, torch.float64)]

    def build(self, problem: Problem) -> RankUtility:
        """The utility."""
        return RankUtility(self.grid, problem.query.p * problem.n)


@dataclass(frozen=True)
class LearnedState:
    """A :class:`LearnedUtility` in a file: the rank follows from the problem, the network's sizes from its weights."""

    kind: Literal["learned"]
    grid: Annotated[Tensor, Array(1, torch.float64)]
    factor: Annotated[Fraction, Range(above=0, most=10**6)]
    weights: dict[str, Any]

    def build(self, problem: Problem) -> LearnedUtility:
        """The utility."""
        sizes = length(self.weights, "offset"), length(self.weights, "weights.0"), length(self.weights, "weights.0", 2)
        network = load_weights(CountNetwork(*sizes), self.weights, "the utility network")
        return LearnedUtility(self.grid, problem.query.p * problem.n, network.double(), self.factor)


@cache
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    places, weights = np.polynomial.legendre.leggauss(count)
    return (places + 1) / 2, weights / 2


def flip_probabilities(logits: Tensor, nodes: int | None = None) -> Tensor:
    """P_r = a_r ∫₀¹ Π_{s≠r} (1 − w·a_s) dw, from log a_r ≤ 0 (batch, R) whose largest is 0; differentiable.

    Why: give each candidate a uniform arrival time w; r is the answer where its own coin says stop and no earlier one did.
    The integrand is a polynomial of degree R−1 in w, so ⌈R/2⌉ Gauss–Legendre nodes are exact. Fewer ``nodes`` serve training.
    """
    count = nodes if nodes is not None else (logits.shape[-1] + 1) // 2
    made: Tensor = _Flip.apply(logits, count)  # type: ignore[no-untyped-call]
    return made


class _Flip(torch.autograd.Function):
    """The quadrature, with its gradient in closed form: one (batch, nodes, R) tensor is kept instead of five.

    With q_wr = 1/(1 − w·a_r) and E_w = c_w·Π_s(1 − w·a_s): P_r = a_r Σ_w E_w q_wr. Since ∂E_w/∂a_s = −w·E_w·q_ws and
    q + w·a·q² = q², a gradient g on P gives Σ_w E_w q_ws (g_s·q_ws − w·Σ_r g_r a_r q_wr) on a_s.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, nodes: int) -> Tensor:
        places, weights = _legendre(nodes)
        w, c = torch.as_tensor(places, dtype=logits.dtype), torch.as_tensor(weights, dtype=logits.dtype)
        # Training is in float32, where less than e^-60 is nothing beside 1 but ends in subnormals, which are slow.
        a = (logits.clamp(min=-60.0) if logits.dtype == torch.float32 else logits).exp()
        miss = 1 - w[:, None] * a[:, None, :]  # (batch, nodes, R); w < 1 keeps it above 0
        product = c * miss.log().sum(-1).exp()
        inverse = miss.reciprocal_()
        ctx.save_for_backward(a, inverse, product, w)
        return a * torch.bmm(product[:, None], inverse)[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        a, inverse, product, w = ctx.saved_tensors
        (given,) = gradients
        total = torch.bmm(inverse, (given * a)[:, :, None])[..., 0]
        own = given * torch.bmm(product[:, None], inverse * inverse)[:, 0]
        others = torch.bmm((product * total * w)[:, None], inverse)[:, 0]
        return a * (own - others), None


def probabilities(method: Selection, utilities: Tensor, sensitivity: float, epsilon: float, nodes: int | None = None) -> Tensor:
    """P(r | x) for utilities (batch, R) of sensitivity Δ, as (batch, R)."""
    one_of("method", method, get_args(Selection))
    logits = (utilities - utilities.amax(-1, keepdim=True)) * (epsilon / (2 * sensitivity))
    if method == "exponential":
        return torch.softmax(logits, -1)
    exact = (logits.shape[-1] + 1) // 2
    used = exact if nodes is None else min(nodes, exact)
    rows = max(_CHUNK // (used * logits.shape[-1]), 1)
    return torch.cat([flip_probabilities(part, used) for part in torch.split(logits, rows)])
