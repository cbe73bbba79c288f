"""Containers. They have no rule of their own: the calculus traces through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lipdp.errors import DataError

__all__ = ["Flatten", "Residual", "Sequential"]


class Sequential(torch.nn.Sequential):
    """:class:`torch.nn.Sequential`, under the same roof as the other layers."""

    def export(self, *, input_shape: Sequence[int] | None = None) -> torch.nn.Module:
        """A plain torch module with the same outputs and no lipdp in it: :func:`lipdp.export`."""
        from lipdp.export import export  # it knows the layers, so it can't be imported before them

        return export(self, input_shape=input_shape)


class Flatten(torch.nn.Flatten):
    """:class:`torch.nn.Flatten` of each example."""


class Residual(torch.nn.Module):
    """``(x + f(x))/2``: the 1-Lipschitz residual connection.

    ``X_out = (X + X_f)/2`` and ``G_in = ½G + G_f(½G)``, which the calculus finds from the sum and the factor ½.
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
