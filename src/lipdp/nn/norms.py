"""Layer, RMS and group normalisation whose scale and shift stay bounded, and input normalisation by public constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lipdp._checks import positive, whole
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.bounds.rules_norms import Affine, centred_rows, channel_groups, normalised_transfer, plain_rows
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering, placed
from lipdp.nn.linear import BallBias
from lipdp.parametrize.constraint import project_box
from lipdp.twins import Decision, Where, twin


def _checked(name: str, eps: float, scale: float, bias_norm: float) -> tuple[float, float]:
    positive(f"{name} eps, of which its Lipschitz constant is scale/√eps,", eps)
    return positive(f"{name} scale", scale), positive(f"{name} bias_norm", bias_norm)


class _Bounded(BallBias):
    """What the three share: γ in the box [−scale, scale], β in the ball of radius bias_norm."""

    weight: Any
    scale: float

    def project_(self) -> None:
        """Back to ‖γ‖∞ ≤ scale and ‖β‖₂ ≤ bias_norm."""
        with torch.no_grad():
            if self.weight is not None:
                self.weight.copy_(project_box(self.weight, -self.scale, self.scale))
            if self.bias_bound is not None:
                self.project_bias_()

    def _affine(self) -> Affine:
        weight = (1.0, None) if self.weight is None else (self.scale, "weight")
        bias = (0.0, None) if self.bias_bound is None else (self.bias_norm, "bias")
        return Affine(weight[0], bias[0], weight[1], bias[1])

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}, scale={self.scale:g}{self.bias_repr()}"  # type: ignore[misc]


class LayerNorm(_Bounded, torch.nn.LayerNorm):
    """Layer normalisation with ‖γ‖∞ ≤ ``scale`` and ‖β‖₂ ≤ ``bias_norm``, kept by projection: ℓ = scale/√eps.

    ``eps`` is 1 unless given, where torch has 1e-5: the layer is then 1-Lipschitz, and inputs of root mean square well above
    1 are normalised as usual. Bounds: see theory, "LayerNorm".

    Args:
        normalized_shape: sizes of the last dimensions that are normalised together; one number for the last alone.
        eps: added to the variance before the root; a smaller one gives a steeper layer.
        elementwise_affine: whether there are γ and β, an entry each for every normalised one.
        bias: whether there is β beside γ.
        scale: the most that any |γ_i| may be; without γ the factor is 1.
        bias_norm: radius of the ball that β is kept in.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1.0,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        scale: float = 1.0,
        bias_norm: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.scale, self.bias_norm = _checked("LayerNorm", eps, scale, bias_norm)
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.project_()


@rule(LayerNorm)
def _layer_norm(layer: LayerNorm, call: Call) -> Transfer:
    """As for torch's own, with ‖γ‖∞ ≤ scale and ‖β‖ ≤ bias_norm in place of ∞."""
    return normalised_transfer(call, centred_rows(call, len(layer.normalized_shape), layer.eps), layer._affine())


class RMSNorm(_Bounded, torch.nn.RMSNorm):
    """``γ⊙x/√(mean(x²)+eps)`` with ‖γ‖∞ ≤ ``scale``, kept by projection: ℓ = scale/√eps, with eps = 1 unless given.

    Args:
        normalized_shape: sizes of the last dimensions that are normalised together; one number for the last alone.
        eps: added to the mean square before the root; a smaller one gives a steeper layer.
        elementwise_affine: whether there is γ, an entry for every normalised one.
        scale: the most that any |γ_i| may be; without γ the factor is 1.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1.0,
        elementwise_affine: bool = True,
        *,
        scale: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.scale, self.bias_norm = _checked("RMSNorm", eps, scale, 1.0)
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.project_()


@rule(RMSNorm)
def _rms_norm(layer: RMSNorm, call: Call) -> Transfer:
    """As for torch's own, with ‖γ‖∞ ≤ scale in place of ∞."""
    return normalised_transfer(call, plain_rows(call, len(layer.normalized_shape), layer.eps), layer._affine())


class GroupNorm(_Bounded, torch.nn.GroupNorm):
    """Group normalisation with ‖γ‖∞ ≤ ``scale`` and ‖β‖₂ ≤ ``bias_norm``: ℓ = scale/√eps, with eps = 1 unless given.

    Args:
        num_groups: parts that the channels are split into, each normalised by itself over its channels and all places.
        num_channels: size of dimension 1, a multiple of ``num_groups``.
        eps: added to the variance before the root; a smaller one gives a steeper layer.
        affine: whether there are γ and β, an entry each for every channel.
        scale: the most that any |γ_i| may be; without γ the factor is 1.
        bias_norm: radius of the ball that β is kept in.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1.0,
        affine: bool = True,
        *,
        scale: float = 1.0,
        bias_norm: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.scale, self.bias_norm = _checked("GroupNorm", eps, scale, bias_norm)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.project_()


@rule(GroupNorm)
def _group_norm(layer: GroupNorm, call: Call) -> Transfer:
    """As for torch's own, with ‖γ‖∞ ≤ scale and ‖β‖ ≤ bias_norm in place of ∞."""
    return normalised_transfer(call, channel_groups(call, layer.num_groups, layer.eps), layer._affine())


class Normalize(torch.nn.Module):
    """``(x − mean)/std`` per channel (dimension 1), by constants that are *public*: never read off the private data.

    Args:
        mean: one number for each channel, or one for all.
        std: the same; all positive.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        first, second = (torch.tensor([v] if isinstance(v, int | float) else list(v), dtype=torch.float32) for v in (mean, std))
        if not (bool(torch.isfinite(first).all()) and bool(torch.isfinite(second).all()) and bool((second > 0).all())):
            raise ConfigurationError(f"Normalize needs finite means and positive finite deviations, not {mean} and {std}")
        self.register_buffer("mean", first)
        self.register_buffer("std", second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift and scale each channel."""
        for constants in (self.mean, self.std):
            if isinstance(x, torch.Tensor) and (x.ndim < 2 or len(constants) not in (1, x.shape[1])):
                raise DataError(f"Normalize has {len(constants)} channels, and the tensor the shape {tuple(x.shape)}")
        channels_last = (torch.movedim(x, 1, -1) - self.mean.to(x.dtype)) / self.std.to(x.dtype)
        return torch.movedim(channels_last, -1, 1)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


@rule(Normalize)
def _normalize(layer: Normalize, call: Call) -> Transfer:
    """A diagonal map of norm 1/min σ, and a shift μ/σ at each of T positions: X/min σ + √T‖μ/σ‖."""
    x = call.inputs[0]
    mean, std = layer.mean.double(), layer.std.double()
    if not bool(torch.isfinite(mean).all() & (torch.isfinite(std) & (std > 0)).all()):
        raise call.refuse("its constants are not finite means and positive finite deviations; they were changed")
    each = (mean / std).expand(x.shape[0])
    gain = float(1 / std.min())
    norm = times(gain, x.norm) + math.sqrt(math.prod(x.shape[1:])) * float(each.norm())
    return Transfer(Bound(norm, x.shape), (gain,), exact=False)


@lowering(LayerNorm)
def _plain_layer_norm(layer: LayerNorm, site: Site) -> torch.nn.Module:
    shape, affine = list(layer.normalized_shape), layer.elementwise_affine
    return placed(torch.nn.LayerNorm(shape, layer.eps, affine, layer.bias is not None, device="meta"), layer)


@lowering(RMSNorm)
def _plain_rms_norm(layer: RMSNorm, site: Site) -> torch.nn.Module:
    return placed(torch.nn.RMSNorm(list(layer.normalized_shape), layer.eps, layer.elementwise_affine, device="meta"), layer)


@lowering(GroupNorm)
def _plain_group_norm(layer: GroupNorm, site: Site) -> torch.nn.Module:
    return placed(torch.nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, layer.affine, device="meta"), layer)


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
def _plain_centering(layer: LayerCentering, site: Site) -> torch.Tensor:
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


class Standardize(torch.nn.Module):
    """``y_c = (x_c − μ_c)/σ_c`` per channel (dimension 1), with μ and σ that were paid for; or ``y_c = x_c − μ_c`` with μ alone.

    Means and deviations of private data are a query about them. ``lipdp.plan(…, statistics_budget=0.05)`` sets a part of the
    budget aside for it, and :func:`lipdp.fit` (or :meth:`lipdp.PrivacyEngine.release_statistics`) releases them once, before
    the first step, and puts them here. Until then nothing bounds this layer's output, so a
    :class:`~lipdp.nn.BoundedInput` or :class:`~lipdp.nn.Boundary` has to follow; with it no Δ depends on the statistics.

    Args:
        channels: size of dimension 1.
        radius: R, a public bound: for the statistics (only) each record is scaled into the ball of this radius.
        floor: the least σ, so that a constant channel is not blown up.
        moments: 2 releases means and deviations. 1 releases the means alone, and leaves σ = 1: one vector instead of two, so at
            the same cost each mean has √2 times less noise. For features that something public has evened out before.
    """

    mean: torch.Tensor
    std: torch.Tensor
    ready: torch.Tensor

    def __init__(self, channels: int, radius: float, *, floor: float = 1e-3, moments: Literal[1, 2] = 2) -> None:
        super().__init__()
        self.channels = whole("Standardize channels", channels)
        self.radius, self.floor = positive("Standardize radius", radius), positive("Standardize floor", floor)
        if isinstance(moments, bool) or moments not in (1, 2):
            raise ConfigurationError(f"Standardize releases 1 moment (means) or 2 (and deviations), not {moments!r}")
        self.moments = moments
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.register_buffer("ready", torch.tensor(False))

    @property
    def mean_share(self) -> float:
        """Share of the release's privacy that the means have; the rest is the mean squares'."""
        return 1.0 if self.moments == 1 else 0.5

    def set_statistics(self, mean: torch.Tensor, variance: torch.Tensor | None = None) -> None:
        """Use these: private statistics, or public ones. No variance for a layer of one moment."""
        if (variance is None) != (self.moments == 1):
            raise DataError(
                f"Standardize of {self.moments} moment(s) takes a mean and {'no' if self.moments == 1 else 'a'} variance"
            )
        given = (mean,) if variance is None else (mean, variance)
        if any(values.shape != self.mean.shape for values in given):
            raise DataError(
                f"Standardize has {self.channels} channels; the statistics are of shape "
                + " and ".join(str(tuple(values.shape)) for values in given)
            )
        if not all(bool(torch.isfinite(values).all()) for values in given):
            raise DataError("the statistics hold a NaN or an infinity")
        self.mean.copy_(mean)
        if variance is not None:
            self.std.copy_(variance.clamp_min(self.floor**2).sqrt())
        self.ready.fill_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Standardise each channel."""
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise DataError(f"Standardize expects {self.channels} channels in dimension 1, got a tensor of shape {tuple(x.shape)}")
        shape = (1, -1, *([1] * (x.ndim - 2)))
        return (x - self.mean.to(x.dtype).reshape(shape)) / self.std.to(x.dtype).reshape(shape)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        deviations = f", floor={self.floor:g}" if self.moments == 2 else ", moments=1"
        return f"{self.channels}, radius={self.radius:g}{deviations}"


@rule(Standardize, rounds="each")
def _standardize(layer: Standardize, call: Call) -> Transfer:
    """‖(x−μ)/σ‖ ≤ ‖x‖/min σ + √T·‖μ/σ‖ over T positions; 1/min σ-Lipschitz. Unbounded until the statistics are known."""
    x = call.inputs[0]
    if not bool(layer.ready):
        return Transfer(
            Bound(math.inf, x.shape),
            (math.inf,),
            why_infinite="its statistics are not released yet; put BoundedInput or Boundary(norm=…) behind it",
        )
    if not bool((torch.isfinite(layer.mean) & torch.isfinite(layer.std) & (layer.std > 0)).all()):
        raise call.refuse("its statistics are not finite means and positive finite deviations; they were changed. Set them again.")
    gain = 1 / float(layer.std.min())
    shift = math.sqrt(math.prod(x.shape[1:])) * float(torch.linalg.vector_norm((layer.mean / layer.std).double()))
    return Transfer(Bound(times(gain, x.norm) + shift, x.shape), (gain,), exact=False)


@lowering(Normalize, Standardize)
def _plain_standardize(layer: Normalize | Standardize, site: Site) -> torch.Tensor:
    mean, std = layer.mean.to(site.dtype), layer.std.to(site.dtype)
    return torch.movedim((torch.movedim(site.x, 1, -1) - mean) / std, -1, 1)
