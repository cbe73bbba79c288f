"""The paper's networks: L1-Lipschitz layers, LaplaceNetwork and UtilityNetwork, each k-Lipschitz in the dataset by construction.

With ‖W‖₁→₁ (the largest absolute column sum) at most k_l in layer l, and ReLU or GroupSort between layers,
|f(x) − f(x')| ≤ k·‖x − x'‖₁ with k = Πk_l; replacing one record moves x by at most c = hi − lo in L1, so f has global
sensitivity c·k.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lipdp.errors import ConfigurationError
from lipdp.privacy._checks import positive, whole

__all__ = ["Activation", "L1Linear", "LaplaceNetwork", "UtilityNetwork"]

Activation = Literal["relu", "groupsort"]
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
    if name not in ("relu", "groupsort"):
        raise ConfigurationError(f"activation is {name!r}: choose 'relu' (the paper's) or 'groupsort'.")
    return nn.ReLU() if name == "relu" else _Sort()


class LaplaceNetwork(nn.Module):
    """f: ℝⁿ → ℝ of two layers (100 hidden units), k-Lipschitz in L1, each layer √k. f(x) + Lap(ck/ε) is ε-DP."""

    def __init__(self, n: int, k: float, hidden: int = 100, activation: Activation = "relu", presort: bool = False) -> None:
        super().__init__()
        self.k, self.presort, self.activation = positive("k", k), presort, activation
        share = self.k**0.5
        self.body = nn.Sequential(L1Linear(n, hidden, share), _activation(activation), L1Linear(hidden, 1, share))

    def sensitivity(self, width: float) -> float:
        """c·k."""
        return width * self.k

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n) to (batch,). Sorting first (``presort``) is non-expansive in L1, so it leaves k as it is."""
        made: Tensor = self.body(x.sort(-1).values if self.presort else x)
        return made[:, 0]


class UtilityNetwork(nn.Module):
    """u(x, r) of Fig. 3: G_d(x) of two layers, k-Lipschitz; G_r(r) of one free layer; [G_d, G_r] → G_c of two layers, 1-Lipschitz.

    So u is k-Lipschitz in x for every r, of sensitivity c·k, and P(r) ∝ exp(ε·u/(2ck)) is ε-DP. The paper leaves out the 2:
    ``factor=1.0`` in :func:`lipdp.mechanisms.paper.utility_probabilities` does that, for the regression test only.
    """

    def __init__(self, n: int, k: float, hidden: int = 100, activation: Activation = "relu", presort: bool = False) -> None:
        super().__init__()
        self.k, self.presort, self.activation = positive("k", k), presort, activation
        share = self.k**0.5
        self.data = nn.Sequential(L1Linear(n, hidden, share), _activation(activation), L1Linear(hidden, hidden, share))
        self.response = nn.Linear(1, hidden)
        self.combine = nn.Sequential(
            _activation(activation), L1Linear(2 * hidden, hidden, 1.0), _activation(activation), L1Linear(hidden, 1, 1.0)
        )

    def sensitivity(self, width: float) -> float:
        """c·k."""
        return width * self.k

    def forward(self, x: Tensor, responses: Tensor) -> Tensor:
        """Utilities (batch, R) of datasets (batch, n) and responses (R,)."""
        data: Tensor = self.data(x.sort(-1).values if self.presort else x)
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
