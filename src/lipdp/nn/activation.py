"""Activations that preserve norms: sorting and rearranging entries loses nothing going back."""

from __future__ import annotations

import math

import torch

from lipdp._pairs import available, sorted_pool
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering
from lipdp.program.fusing import Stage, stage
from lipdp.twins import Decision, Where, twin

__all__ = ["FullSort", "GroupSort", "MaxMin"]


class GroupSort(torch.nn.Module):
    """Sorts groups of ``group_size`` neighbouring channels, largest first.

    The output is a permutation of the input, chosen by the input: piecewise orthogonal, so norms and cotangent norms are
    preserved exactly where ReLU would lose half of them.

    Args:
        group_size: how many neighbouring channels are sorted together; ``None`` sorts all of them.
        dim: the dimension that holds the channels (1, as in torch's convolutions and dense layers on (batch, features)).
    """

    def __init__(self, group_size: int | None = 2, dim: int = 1) -> None:
        super().__init__()
        if group_size is not None and group_size < 1:
            raise ConfigurationError(f"group_size must be at least 1 (or None for all channels), not {group_size}")
        if dim == 0:
            raise ConfigurationError("GroupSort dim=0 would sort across the examples of the batch; use dim 1 or later")
        self.group_size = group_size
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sort within groups."""
        dim = self.dim % x.ndim
        channels = x.shape[dim]
        size = channels if self.group_size is None else self.group_size
        if dim == 0 or channels % size:
            raise DataError(
                f"GroupSort({self.group_size}) needs a multiple of {size} channels in dimension {self.dim}, got {channels} "
                f"in a tensor of shape {tuple(x.shape)}"
            )
        if size == 2 and dim == 1 and not torch.is_grad_enabled() and available(x):
            return sorted_pool(x, sort=True)
        grouped = torch.unflatten(x, dim, (channels // size, size))
        if size == 2:  # two comparisons instead of a sort
            first, second = grouped.unbind(dim + 1)
            # where() instead of maximum() and minimum(), whose backward passes also look for ties.
            larger = first >= second
            if x.device.type == "cpu":  # where() is not vectorised there; lerp() is, and exact at weights 0 and 1
                weight = larger.to(x.dtype)
                pair = torch.lerp(second, first, weight), torch.lerp(first, second, weight)
            else:
                pair = torch.where(larger, first, second), torch.where(larger, second, first)
            result = torch.stack(pair, dim + 1)
        else:
            result = grouped.sort(dim=dim + 1, descending=True).values
        return result.flatten(dim, dim + 1)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"group_size={self.group_size}, dim={self.dim}"


class MaxMin(GroupSort):
    """GroupSort of pairs.

    Args:
        dim: the dimension that holds the channels, an even number of them; not 0, the batch.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__(2, dim)


class FullSort(GroupSort):
    """GroupSort of all channels at once.

    Args:
        dim: the dimension whose entries are sorted; not 0, the batch.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__(None, dim)


@rule(GroupSort, rounds="each")
def _group_sort(layer: GroupSort, call: Call) -> Transfer:
    """A permutation P(x), constant around almost every x: ‖P(x)x‖ = ‖x‖ and ‖P(x)ᵀδ‖ = ‖δ‖."""
    (dim,) = call.dims(layer.dim)
    x = call.inputs[0]
    return Transfer(Bound(x.norm, x.shape, x.row_norm if dim == call.rank - 1 else math.inf, x.max_abs))


@lowering(GroupSort)
def _plain(layer: GroupSort, site: Site) -> torch.Tensor:
    rank = len(site.shape) + 1
    dim = layer.dim % rank
    channels = site.shape[dim - 1]
    size = channels if layer.group_size is None else layer.group_size
    grouped = torch.unflatten(site.x, dim, (channels // size, size))
    if size == 2:
        first, second = torch.select(grouped, dim + 1, 0), torch.select(grouped, dim + 1, 1)
        result = torch.stack((torch.maximum(first, second), torch.minimum(first, second)), dim + 1)
    else:
        result = torch.sort(grouped, dim=dim + 1, descending=True)[0]
    return torch.flatten(result, dim, dim + 1)


@twin(
    torch.nn.ReLU,
    torch.nn.ReLU6,
    torch.nn.LeakyReLU,
    torch.nn.PReLU,
    torch.nn.RReLU,
    torch.nn.ELU,
    torch.nn.CELU,
    torch.nn.SELU,
    torch.nn.GELU,
    torch.nn.SiLU,
    torch.nn.Mish,
    torch.nn.Hardswish,
    torch.nn.Softplus,
)
def _twin_of_activation(module: torch.nn.Module, where: Where) -> Decision:
    """GroupSort keeps the gradient's norm where ReLU and its like lose some of it."""
    channels = where.shape[where.features % (len(where.shape) + 1) - 1]
    if channels % 2 == 0:
        return Decision("replaced", GroupSort(2, dim=where.features))
    note = f"{channels} channels are odd: GroupSort(2) needs an even number"
    if isinstance(module, torch.nn.PReLU | torch.nn.RReLU):
        return Decision("replaced", torch.nn.ReLU(), note)
    if getattr(module, "inplace", False):
        vars(module)["inplace"] = False  # it is the conversion's own copy
    return Decision("kept", module, note)


@stage(GroupSort, MaxMin)
def _pairs(layer: GroupSort) -> Stage | None:
    """Groups of two are pairs."""
    return Stage(dim=layer.dim) if layer.group_size == 2 else None
