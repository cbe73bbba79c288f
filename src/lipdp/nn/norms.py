"""Layer, RMS and group normalisation whose scale and shift stay bounded, and input normalisation by public constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.bounds.rules_norms import Affine, centred_rows, channel_groups, normalised_transfer, plain_rows
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering, placed
from lipdp.parametrize import Constrained
from lipdp.parametrize.constraint import project_ball, project_box

__all__ = ["GroupNorm", "LayerNorm", "Normalize", "RMSNorm"]


def _checked(name: str, eps: float, scale: float, bias_norm: float) -> tuple[float, float]:
    if not 0 < eps < math.inf:
        raise ConfigurationError(f"{name} eps must be positive and finite, not {eps!r}: its Lipschitz constant is scale/√eps")
    for what, value in (("scale", scale), ("bias_norm", bias_norm)):
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} {what} must be a positive finite number, not {value!r}")
    return float(scale), float(bias_norm)


class _Bounded(Constrained):
    """What the three share: γ in the box [−scale, scale], β in the ball of radius bias_norm."""

    weight: Any
    scale: float
    bias_norm: float

    def project_(self) -> None:
        """Back to ‖γ‖∞ ≤ scale and ‖β‖₂ ≤ bias_norm."""
        with torch.no_grad():
            if self.weight is not None:
                self.weight.copy_(project_box(self.weight, -self.scale, self.scale))
            bias = getattr(self, "bias", None)
            if bias is not None:
                bias.copy_(project_ball(bias, self.bias_norm))

    def _affine(self) -> Affine:
        has_weight, has_bias = self.weight is not None, getattr(self, "bias", None) is not None
        return Affine(
            self.scale if has_weight else 1.0,
            self.bias_norm if has_bias else 0.0,
            "weight" if has_weight else None,
            "bias" if has_bias else None,
        )

    def _bounds_repr(self) -> str:
        bias = f", bias_norm={self.bias_norm:g}" if getattr(self, "bias", None) is not None else ""
        return f"scale={self.scale:g}{bias}"


class LayerNorm(_Bounded, torch.nn.LayerNorm):
    """Layer normalisation with ‖γ‖∞ ≤ ``scale`` and ‖β‖₂ ≤ ``bias_norm``, kept by projection: ℓ = scale/√eps.

    ``eps`` is 1 unless given, where torch has 1e-5: the layer is then 1-Lipschitz, and inputs of root mean square well above
    1 are normalised as usual. Bounds: see theory, "LayerNorm".
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

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}, {self._bounds_repr()}"


@rule(LayerNorm)
def _layer_norm(layer: LayerNorm, call: Call) -> Transfer:
    """As for torch's own, with ‖γ‖∞ ≤ scale and ‖β‖ ≤ bias_norm in place of ∞."""
    return normalised_transfer(call, centred_rows(call, len(layer.normalized_shape), layer.eps), layer._affine())


class RMSNorm(_Bounded, torch.nn.RMSNorm):
    """``γ⊙x/√(mean(x²)+eps)`` with ‖γ‖∞ ≤ ``scale``, kept by projection: ℓ = scale/√eps, with eps = 1 unless given."""

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

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}, {self._bounds_repr()}"


@rule(RMSNorm)
def _rms_norm(layer: RMSNorm, call: Call) -> Transfer:
    """As for torch's own, with ‖γ‖∞ ≤ scale in place of ∞."""
    return normalised_transfer(call, plain_rows(call, len(layer.normalized_shape), layer.eps), layer._affine())


class GroupNorm(_Bounded, torch.nn.GroupNorm):
    """Group normalisation with ‖γ‖∞ ≤ ``scale`` and ‖β‖₂ ≤ ``bias_norm``: ℓ = scale/√eps, with eps = 1 unless given."""

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

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}, {self._bounds_repr()}"


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


@lowering(Normalize)
def _plain_normalize(layer: Normalize, site: Site) -> torch.Tensor:
    mean, std = layer.mean.to(site.dtype), layer.std.to(site.dtype)
    return torch.movedim((torch.movedim(site.x, 1, -1) - mean) / std, -1, 1)
