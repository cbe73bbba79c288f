"""Containers and residual connections: all but the mix are traced through."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, export, lowering
from lipdp.parametrize import Constrained
from lipdp.parametrize.constraint import project_box


class Sequential(torch.nn.Sequential):
    """:class:`torch.nn.Sequential`, under the same roof as the other layers."""

    def export(self, *, input_shape: Sequence[int] | None = None) -> torch.nn.Module:
        """A plain torch module with the same outputs and no lipdp in it: :func:`lipdp.export`."""
        return export(self, input_shape=input_shape)


class Flatten(torch.nn.Flatten):
    """:class:`torch.nn.Flatten` of each example.

    Args:
        start_dim: the first dimension that is merged, 1 or later: the batch dimension 0 stays.
        end_dim: the last one, itself included; −1 is the tensor's last.
    """


class Residual(torch.nn.Module):
    """``(x + f(x))/2``: the 1-Lipschitz residual connection.

    ``X_out = (X + X_f)/2`` and ``G_in = ½G + G_f(½G)``, which the calculus finds from the sum and the factor ½.

    Args:
        module: f, from tensors of one shape to tensors of the same.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average of x and f(x)."""
        y: torch.Tensor = self.module(x)
        if isinstance(y, torch.Tensor) and y.shape != x.shape:
            raise DataError(f"Residual needs f(x) of x's shape {tuple(x.shape)}, got {tuple(y.shape)}")
        return (x + y) * 0.5


class ConvexMix(Constrained, torch.nn.Module):
    """``(1 − a)·x + a·y`` of two tensors of one shape, ``a`` fixed or learned in [low, high] ⊂ [0, 1]: ``Δ_a = G·(X + Y)``.

    Args:
        weight: a, or where it starts if it is learned.
        learned: whether a is a trained parameter, projected into [low, high]; otherwise it is a buffer that stays ``weight``.
        low: the least that a learned a may be, at least 0 and at most ``weight``.
        high: the most that it may be, at least ``weight`` and at most 1. Nearer ends give smaller bounds.
    """

    def __init__(self, weight: float = 0.5, learned: bool = False, low: float = 0.0, high: float = 1.0) -> None:
        super().__init__()
        if not 0 <= low <= weight <= high <= 1:
            raise ConfigurationError(f"a convex mix needs 0 ≤ low ≤ weight ≤ high ≤ 1, not {low}, {weight}, {high}")
        self.low, self.high, self.learned = (low, high, True) if learned else (weight, weight, False)
        value = torch.tensor(float(weight))
        if learned:
            self.weight = torch.nn.Parameter(value)
            self.project_()
        else:
            self.register_buffer("weight", value)

    def project_(self) -> None:
        """Back to [low, high], where it is learned."""
        if self.learned:
            with torch.no_grad():
                self.weight.copy_(project_box(self.weight, self.low, self.high))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mix."""
        if isinstance(x, torch.Tensor) and x.shape != y.shape:
            raise DataError(f"a mix needs two tensors of one shape, not {tuple(x.shape)} and {tuple(y.shape)}")
        return x * (1 - self.weight) + y * self.weight

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"low={self.low:g}, high={self.high:g}, learned={self.learned}"


@rule(ConvexMix, rounds="each")
def _convex_mix(layer: ConvexMix, call: Call) -> Transfer:
    """‖(1−a)x + ay‖ ≤ |1−a|X + |a|Y, largest at an end of [low, high]; ∂/∂a = ⟨δ, y − x⟩ ≤ G(X + Y).

    A fixed a is a buffer, which could hold any number: the bound is that of the number it holds.
    """
    x, y = call.inputs
    low, high = (layer.low, layer.high) if layer.learned else (float(layer.weight),) * 2
    if not 0 <= low <= high <= 1:
        raise call.refuse(f"its weight is {low:g} to {high:g}, and a convex mix has one in [0, 1]")

    def at(first: float, second: float) -> float:
        return max(times(abs(1 - a), first) + times(abs(a), second) for a in (low, high))

    output = Bound(at(x.norm, y.norm), x.shape, at(x.row_norm, y.row_norm), at(x.max_abs, y.max_abs))
    return Transfer(
        output, (abs(1 - low), abs(high)), {"weight": x.norm + y.norm} if layer.learned else {}, exact=not layer.learned
    )


class ConvexResidual(torch.nn.Module):
    """``(1 − a)·x + a·f(x)`` with ``a`` fixed or learned in [low, high] ⊂ [0, 1].

    Args:
        module: f, from tensors of one shape to tensors of the same.
        weight: a, the share of f(x), or where it starts if it is learned.
        learned: whether a is a trained parameter, projected into [low, high].
        low: the least that a learned a may be, from 0 to ``weight``.
        high: the most that it may be, from ``weight`` to 1.
    """

    def __init__(
        self, module: torch.nn.Module, weight: float = 0.5, learned: bool = False, low: float = 0.0, high: float = 1.0
    ) -> None:
        super().__init__()
        self.module = module
        self.mix = ConvexMix(weight, learned, low, high)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix x and f(x)."""
        y: torch.Tensor = self.mix(x, self.module(x))
        return y


class ConcatResidual(torch.nn.Module):
    """``[x, f(x)]/√2`` side by side along ``dim``: 1-Lipschitz where f is (the calculus says √2, as it adds both paths).

    Args:
        module: f, whose outputs have x's shape but for their size along ``dim``.
        dim: where x and f(x) are joined, not 0, the batch; 1 puts their channels side by side.
    """

    def __init__(self, module: torch.nn.Module, dim: int = 1) -> None:
        super().__init__()
        if dim == 0:
            raise ConfigurationError("ConcatResidual dim=0 would join the examples of the batch; use dim 1 or later")
        self.module = module
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join x and f(x)."""
        y: torch.Tensor = self.module(x)
        joined: torch.Tensor = torch.cat((x, y), dim=self.dim)
        return joined * math.sqrt(0.5)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"dim={self.dim}"


@lowering(Flatten)
def _plain_flatten(layer: Flatten, site: Site) -> torch.nn.Module:
    return torch.nn.Flatten(layer.start_dim, layer.end_dim)
