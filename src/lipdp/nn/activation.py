"""Activations that preserve norms: sorting and rearranging entries loses nothing going back.

And small learned things whose parameters stay in a box: slopes, angles, scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lipdp._pairs import Stage, available, sorted_pool, stage
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering, placed
from lipdp.parametrize import Constrained
from lipdp.parametrize.constraint import project_box
from lipdp.twins import Decision, Where, twin


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


class Abs(torch.nn.Module):
    """``|x|``: preserves norms, going forward and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Absolute values."""
        return torch.abs(x)


class BoundedPReLU(Constrained, torch.nn.PReLU):
    """``max(x, 0) + a·min(x, 0)`` with learned |a| ≤ 1, kept by projection: 1-Lipschitz, ``Δ_a = G·X``.

    Arguments are those of :class:`torch.nn.PReLU`.

    Args:
        num_parameters: 1 for one slope a for all entries, or the number of channels (dimension 1) for one each.
        init: the slope a at the start, brought to [−1, 1].
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def reset_parameters(self) -> None:
        """The slope of the constructor, in [−1, 1]: what is said of the layer holds from the start."""
        super().reset_parameters()
        self.project_()

    def project_(self) -> None:
        """Back to |a| ≤ 1."""
        with torch.no_grad():
            self.weight.copy_(project_box(self.weight, -1.0, 1.0))


@rule(BoundedPReLU, rounds="each")
def _bounded_prelu(layer: BoundedPReLU, call: Call) -> Transfer:
    """Slopes 1 and a, |a| ≤ 1; ∂/∂a = Σ_t δ_t·min(x_t, 0) over the entries that share a, at most G·X."""
    x = call.inputs[0]
    return Transfer(x, parameters={"weight": x.norm})


class Householder(Constrained, torch.nn.Module):
    """Reflects pairs of channels at a learned line: z ↦ z where ⟨v, z⟩ ≥ 0, else z − 2⟨v, z⟩v, v = (cos φ, sin φ).

    Continuous and piecewise orthogonal, so norms and cotangent norms are preserved; φ = −π/4 gives MaxMin (largest first).
    ``Δ_φ = 2·G·X``: the reflection turns by 2φ.

    Args:
        channels: number of channels, even; pairs are neighbours. One angle for each pair.
        dim: the dimension that holds the channels.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(self, channels: int, dim: int = 1, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if channels < 2 or channels % 2 or dim == 0:
            raise ConfigurationError(f"Householder needs an even number of channels in a dimension ≥ 1, not {channels} in {dim}")
        self.channels, self.dim = channels, dim
        self.angle = torch.nn.Parameter(torch.full((channels // 2,), -math.pi / 4, device=device, dtype=dtype))

    def project_(self) -> None:
        """Back to [−2π, 2π]: any finite angle is legal, and this one is the same modulo 2π."""
        with torch.no_grad():
            self.angle.copy_(project_box(torch.remainder(self.angle, 2 * math.pi), -2 * math.pi, 2 * math.pi))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reflect the pairs on the far side."""
        if isinstance(x, torch.Tensor) and (self.dim % x.ndim == 0 or x.shape[self.dim] != self.channels):
            raise DataError(f"Householder({self.channels}, dim={self.dim}) got a tensor of shape {tuple(x.shape)}")
        pairs = torch.unflatten(torch.movedim(x, self.dim, -1), -1, (self.channels // 2, 2))
        first, second = pairs[..., 0], pairs[..., 1]
        cosine, sine = self.angle.cos(), self.angle.sin()
        far = (cosine * first + sine * second).clamp(max=0.0) * 2
        reflected = torch.stack((first - far * cosine, second - far * sine), dim=-1).flatten(-2)
        return torch.movedim(reflected, -1, self.dim)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"channels={self.channels}, dim={self.dim}"


@rule(Householder)
def _householder(layer: Householder, call: Call) -> Transfer:
    """The identity or the reflection I − 2vvᵀ, which agree where ⟨v, z⟩ = 0.

    ∂(I − 2vvᵀ)/∂φ = −2(v'vᵀ + vv'ᵀ), of norm 2, so |∂/∂φ| ≤ Σ_t‖δ_t‖·2‖z_t‖ ≤ 2·G·X, and pairs are disjoint.
    """
    (dim,) = call.dims(layer.dim)
    x = call.inputs[0]
    row = x.row_norm if dim == call.rank - 1 else math.inf
    return Transfer(Bound(x.norm, x.shape, row), parameters={"angle": times(2.0, x.norm)})


class LayerScale(Constrained, torch.nn.Module):
    """``γ⊙x`` with learned |γ| ≤ ``bound``, kept by projection: ℓ = bound, ``Δ_γ = G·X``.

    Args:
        shape: shape of γ, broadcast against one example; ``()`` is one scalar.
        bound: the box that γ is kept in.
        init: where γ starts, ``bound`` by default.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        bound: float = 1.0,
        init: float | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < bound < math.inf:
            raise ConfigurationError(f"LayerScale bound must be a positive finite number, not {bound!r}")
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.bound = float(bound)
        value = self.bound if init is None else float(init)
        self.weight = torch.nn.Parameter(torch.full(self.shape, value, device=device, dtype=dtype))
        self.project_()

    def project_(self) -> None:
        """Back to |γ| ≤ bound."""
        with torch.no_grad():
            self.weight.copy_(project_box(self.weight, -self.bound, self.bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        if isinstance(x, torch.Tensor):
            last = x.shape[1:][len(x.shape) - 1 - len(self.shape) :]
            if len(self.shape) >= x.ndim or any(size not in (1, n) for size, n in zip(self.shape, last, strict=True)):
                raise DataError(f"LayerScale of shape {self.shape} does not broadcast to examples of shape {tuple(x.shape[1:])}")
        return x * self.weight

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.shape}, bound={self.bound:g}"


@rule(LayerScale, rounds="each")
def _layer_scale(layer: LayerScale, call: Call) -> Transfer:
    """A diagonal map of norm ≤ bound; for each entry of γ |Σ_t δ_t·x_t| ≤ ‖δ‖‖x‖ over its places: Δ = G·X."""
    x, bound = call.inputs[0], layer.bound
    output = Bound(times(bound, x.norm), x.shape, times(bound, x.row_norm), times(bound, x.max_abs))
    return Transfer(output, (bound,), {"weight": x.norm})


@rule(Abs, rounds="each")
def _abs(layer: Abs, call: Call) -> Transfer:
    """‖|x|‖ = ‖x‖, and slopes are ±1 (0 at 0)."""
    return Transfer(call.inputs[0])


@lowering(BoundedPReLU)
def _plain_prelu(layer: BoundedPReLU, site: Site) -> torch.nn.Module:
    return placed(torch.nn.PReLU(layer.num_parameters, device="meta"), layer)
