"""Normalisation that never looks at another example."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering
from lipdp.twins import Decision, Where, twin

__all__ = ["LayerCentering"]


class LayerCentering(torch.nn.Module):
    """Subtracts each example's own mean: ``y = x − mean(x)`` over ``dim``.

    An orthogonal projection (‖y‖ ≤ ‖x‖, and so for cotangents). It takes batch normalisation's place: the mean is over the
    example's features, never over the batch.

    Args:
        dim: dimensions to average over; ``None``: all but the batch. ``1`` centres over channels, ``(2, 3)`` each map.
    """

    def __init__(self, dim: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.dim = None if dim is None else ((dim,) if isinstance(dim, int) else tuple(dim))
        if self.dim is not None and (0 in self.dim or not self.dim):
            raise ConfigurationError(
                "LayerCentering over dimension 0, or over none, would average over the batch; use dimensions from 1 on"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Centre each example."""
        if x.ndim < 2:  # mean over no dimension is torch's mean over all of them, the batch included
            raise DataError(f"LayerCentering needs examples of at least one dimension, got a tensor of shape {tuple(x.shape)}")
        return x - x.mean(dim=tuple(range(1, x.ndim)) if self.dim is None else self.dim, keepdim=True)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"dim={self.dim}"


@rule(LayerCentering)
def _layer_centering(layer: LayerCentering, call: Call) -> Transfer:
    """I − 11ᵀ/n is an orthogonal projection: symmetric, of norm 1."""
    x = call.inputs[0]
    dims = tuple(range(1, call.rank)) if layer.dim is None else call.dims(layer.dim)
    return Transfer(Bound(x.norm, x.shape, x.row_norm if dims == (call.rank - 1,) else math.inf))


@lowering(LayerCentering)
def _plain(layer: LayerCentering, site: Site) -> torch.Tensor:
    dims = tuple(range(1, len(site.shape) + 1)) if layer.dim is None else layer.dim
    return site.x - torch.mean(site.x, dim=dims, keepdim=True)


@twin(
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.modules.instancenorm._InstanceNorm,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)
def _twin_of_norm(module: torch.nn.Module, where: Where) -> Decision:
    """Centring over the same features, without the division by a standard deviation, whose slope has no useful bound."""
    dims: tuple[int, ...] | None = None
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        dims = tuple(range(-len(module.normalized_shape), 0))
    elif isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        dims = tuple(range(2, len(where.shape) + 1))
    averaged = math.prod(where.shape if dims is None else where.shape[dims[0] if dims[0] < 0 else dims[0] - 1 :])
    if averaged == 1:
        return Decision("removed", None, "centring one number would leave nothing of it")
    mixing = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    return Decision("replaced", LayerCentering(dims), "over each example, never the batch" if mixing else "without scaling")
