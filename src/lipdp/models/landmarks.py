"""Kernel values at fixed points, whitened for standard normal rows: features of public make for small tables."""

from __future__ import annotations

import math

import numpy as np
import torch

from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering

__all__ = ["Landmarks"]

_ROWS = 8000  # drawn to learn what standard normal rows look like


class Landmarks(torch.nn.Module):
    """``y = M(k(x) − c)`` with k_j(x) = Π_i 1/(1 + (x_i − z_ji)²/s²) and M = (Σ + ρ·tr(Σ)·I)^(−1/2): fixed, none of it private.

    The landmarks z_j are drawn from N(0, I), and c and Σ are mean and covariance of k(x) for x ~ N(0, I): for columns that come
    standardised, what can be known of them without looking. A linear layer behind it is a kernel machine on m points (Williams &
    Seeger, 2001), with features that are centred and whitened at no cost. Unwhitened, most of a row's norm, which the noise is
    scaled to, lies in a few directions; what tells the classes apart may lie in any. The kernel is a product of Cauchy kernels,
    whose long tails still tell rows apart that are far from all landmarks.

    Args:
        features: columns that come in.
        outputs: m, the number of landmarks.
        scale: s, the kernel's width.
        ridge: ρ: directions with less than this share of the variance are not whitened but left small.
        seed: of the landmarks, and of the rows that c and Σ are estimated from. It is public: it protects nothing.
    """

    points: torch.Tensor
    centre: torch.Tensor
    whitener: torch.Tensor

    def __init__(self, features: int, outputs: int, scale: float = 3.0, ridge: float = 1e-4, seed: int = 0) -> None:
        super().__init__()
        if features < 1 or outputs < 1 or not all(math.isfinite(value) and value > 0 for value in (scale, ridge)):
            raise ConfigurationError(
                f"Landmarks can't make {outputs!r} features of {features!r} columns at scale {scale!r} with ridge {ridge!r}"
            )
        self.features, self.outputs, self.scale, self.ridge = int(features), int(outputs), float(scale), float(ridge)
        self.seed = int(seed)
        draw = torch.Generator().manual_seed(self.seed)
        points = torch.randn(self.outputs, self.features, generator=draw, dtype=torch.float64)
        values = _cauchy(torch.randn(_ROWS, self.features, generator=draw, dtype=torch.float64), points, self.scale)
        centre = values.mean(0)
        covariance = (values - centre).T @ (values - centre) / _ROWS
        sizes, directions = torch.linalg.eigh(covariance)
        sizes = sizes.clamp_min(0.0)
        whitener = (directions * (sizes + self.ridge * sizes.sum()).rsqrt()) @ directions.T
        for name, value in (("points", points), ("centre", centre), ("whitener", whitener)):
            self.register_buffer(name, value.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, m)."""
        if x.ndim != 2 or x.shape[1] != self.features:
            raise DataError(f"Landmarks expects (batch, {self.features}), not a tensor of shape {tuple(x.shape)}")
        values = _cauchy(x, self.points.to(x.dtype), self.scale)
        return torch.nn.functional.linear(values - self.centre.to(x.dtype), self.whitener.to(x.dtype))

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.features}, {self.outputs}, scale={self.scale:g}, ridge={self.ridge:g}, seed={self.seed}"


def _cauchy(x: torch.Tensor, points: torch.Tensor, scale: float) -> torch.Tensor:
    """k_j(x), one column at a time: never more than (batch, m) numbers. Through logarithms, so that no product overflows."""
    total = torch.log1p(((x[:, :1] - points[:, 0]) / scale).square())
    for column in range(1, points.shape[1]):
        total = total + torch.log1p(((x[:, column : column + 1] - points[:, column]) / scale).square())
    return torch.exp(-total)


@rule(Landmarks)
def _landmarks(layer: Landmarks, call: Call) -> Transfer:
    """k_j lies in [0, 1], so ‖k − c‖² ≤ Σ max(c_j, 1 − c_j)².

    With t_i = (x_i − z_i)/s and v_i = log(1 + t_i²), k = e^(−V) for V = Σ v_i, and

        ‖∇k_j‖ = (2/s)·k·√(Σ t_i²/(1 + t_i²)²) ≤ (2/s)·e^(−V)·√V ≤ √(2/e)/s,

    for t²/(1 + t²)² = e^(−v)·(1 − e^(−v)) ≤ v, and √V·e^(−V) is largest at V = ½. So k(x) has the gain √(2m/e)/s at most, and both
    bounds are multiplied by ‖M‖₂. Reached by one landmark of many columns.
    """
    size = float(np.linalg.norm(layer.whitener.double().cpu().numpy(), 2)) * (1 + 1e-9)
    centre = layer.centre.double().cpu()
    reach = float(torch.maximum(centre.abs(), (1 - centre).abs()).norm()) * (1 + 1e-6)
    return Transfer(
        Bound(size * reach, call.output_shape), (size * math.sqrt(2 * layer.outputs / math.e) / layer.scale,), exact=False
    )


@lowering(Landmarks)
def _plain_landmarks(layer: Landmarks, site: Site) -> torch.Tensor:
    values = _cauchy(site.x, layer.points.to(site.dtype), layer.scale)
    return torch.nn.functional.linear(values - layer.centre.to(site.dtype), layer.whitener.to(site.dtype))
