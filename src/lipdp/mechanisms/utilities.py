"""Utilities on counts: how good each response of a public grid is, with a proved L∞ sensitivity under replacing one record.

The counts N(r) = #{x_i < r} (and ≤) move by at most one each when a record is replaced. Utilities are integers, on a lattice of
2⁻¹⁶ of a count, so that the released choice is drawn without floating point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lipdp.errors import ConfigurationError

__all__ = ["CountNetwork", "LearnedUtility", "RankUtility", "Utility", "counts", "utility_from_state"]

_FINE = 2**16
_ROWS = 250  # datasets at a time: what fits in a cache is three times as fast
_MARGIN = 1e-9  # rows are scaled to 1 − 1e-9: normalisation itself rounds


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
        return {"kind": "rank", "grid": self.grid, "rank": str(self.rank)}


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
        sizes, weights = list(self.network.sizes), dict(self.network.state_dict())
        own = {"grid": self.grid, "rank": str(self.rank), "factor": str(self.factor)}
        return {"kind": "learned", "sizes": sizes, "weights": weights, **own}


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

    def resized(self, n: int, old: int) -> Utility:
        """For datasets of n records instead of ``old``."""

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""


def utility_from_state(state: dict[str, Any]) -> Utility:
    """The inverse of ``state()``."""
    if state["kind"] == "utility network":
        from lipdp.mechanisms.paper import utility_from_paper  # it is built on this module

        return utility_from_paper(state)
    if state["kind"] == "rank":
        return RankUtility(state["grid"], Fraction(state["rank"]))
    network = CountNetwork(*state["sizes"]).double()
    network.load_state_dict(state["weights"])
    return LearnedUtility(state["grid"], Fraction(state["rank"]), network, Fraction(state["factor"]))
