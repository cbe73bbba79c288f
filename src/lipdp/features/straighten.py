"""Drawings brought into one pose: centred, upright and of like width, each by its own moments.

Handwriting differs from hand to hand by its slant more than by anything else, and a linear classifier has to learn every class at
every slant. What undoes it is a function of one example alone, fixed beforehand, so it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering

__all__ = ["Straighten", "Straightening", "straighten_layers"]


# What the fronts of heads take: not, with its own settings, or with these.
Straightening = bool | Mapping[str, float]

_MOST_SHEAR, _MOST_STRETCH = 1.0, 1.6
# Variance of rows or columns, in pixels², below which a drawing has no slant or width to speak of: a dot, a level stroke.
_LEAST_VARIANCE = 0.5
# Coordinates are rounded, and with them the weights of pixels: far below this.
_ROUNDING = 1 + 1e-4


class Straighten(torch.nn.Module):
    """Moves, shears and stretches each image by its own moments: ink on an empty (zero) ground, the last two dimensions in pixels.

    With ink p = Σ_channels |x| as a distribution over positions (u down, v across, from the middle), mean (ū, v̄) and covariances
    V, the new image reads the old one, between its pixels by linear interpolation and as 0 beyond its border, at

        u' = u + ū,    v' = d·v + s·u + v̄,    s = shear·V_uv/V_uu,    d = (√(V_vv − 2s·V_uv + s²·V_uu) / (spread·width))^stretch

    so that its mean is in the middle, with shear 1 its covariance 0, and its standard deviation across, the root above divided
    by d, nearer to ``spread`` of the image's width. Slants are limited to |s| ≤ 1, stretches to 1/1.6 ≤ d ≤ 1.6. Ink is counted
    relative to all of it, so S(λx) = λS(x) for λ ≥ 0, and a blank image stays blank.

    Its norm: for any (ū, v̄, s, d) this is a linear map of nonnegative weights. A new pixel's weights sum to at most 1. An old
    pixel's sum to at most h(d): rows are read at distances of 1, so their weights sum to 1, and along a row new pixels read at
    distances d, where Σ_k max(0, 1 − |t + kd|) is largest at t = 0 (the hat's Fourier transform is nonnegative):
    h(d) = Σ_k max(0, 1 − |k|d), falling in d. By Schur's test ``‖S(x)‖ ≤ √h(1/1.6)·‖x‖``, kept in ``norm_gain``; without
    stretch it is 1.

    It has no useful Lipschitz constant: a little ink far out moves, turns and stretches the whole image. Certificates are refused
    behind it; training needs none, as nothing below is trained.

    Args:
        shape: (channels, height, width) of one image.
        shear: 1 takes the slant off, 0 leaves it, between them a part of it.
        stretch: exponent: 0 leaves widths, 1 makes them all alike.
        spread: the standard deviation across that is left as it is, in units of the image's width.
    """

    monomials: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, shape: Sequence[int], *, shear: float = 1.0, stretch: float = 0.5, spread: float = 0.16) -> None:
        super().__init__()
        self.input_shape = tuple(int(s) for s in shape)
        if len(self.input_shape) != 3 or min(self.input_shape) < 1:
            raise ConfigurationError(f"Straighten works on images (channels, height, width), not on {self.input_shape}")
        for name, value, most in (("shear", shear, 1.0), ("stretch", stretch, 1.0), ("spread", spread, math.inf)):
            least_open = name == "spread"
            if not (math.isfinite(value) and 0 <= value <= most and (value > 0 or not least_open)):
                among = "a positive number" if least_open else "between 0 and 1"
                raise ConfigurationError(f"Straighten {name} must be {among}, not {value!r}")
        self.shear, self.stretch, self.spread = float(shear), float(stretch), float(spread)
        most_stretch = _MOST_STRETCH if stretch else 1.0
        hats = (max(0.0, 1 - abs(k) / most_stretch) for k in range(-2, 3))  # neighbours beyond these are further than a pixel
        self.norm_gain = math.sqrt(sum(hats)) * _ROUNDING
        _, height, width = self.input_shape
        u, v = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in (height, width))
        down, across = u[:, None].expand(height, width), v[None, :].expand(height, width)
        powers = torch.stack([torch.ones_like(down), down, across, down * down, across * across, down * across])
        for name, values in (("monomials", powers.flatten(1).T.contiguous()), ("rows", u[:, None]), ("columns", v[None, :])):
            self.register_buffer(name, values.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) → the same shape."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataError(f"Straighten expects images of shape {self.input_shape}; got a tensor of shape {tuple(x.shape)}")
        if x.dtype in (torch.bfloat16, torch.float16):  # too coarse for positions
            return self._straightened(x.float(), torch.float32).to(x.dtype)
        return self._straightened(x, x.dtype)

    def _straightened(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In torch functions alone, so that it can be exported too."""
        _, height, width = self.input_shape
        down, across, slant, distance = (torch.reshape(value, (-1, 1, 1)) for value in self._pose(x, dtype))
        rows, columns = self.rows.to(dtype), self.columns.to(dtype)
        read_across = distance * columns + slant * rows + across
        read_down = rows + down + torch.zeros_like(read_across)
        places = torch.stack([read_across * (2 / width), read_down * (2 / height)], dim=-1)
        return F.grid_sample(x, places, mode="bilinear", padding_mode="zeros", align_corners=False)

    def _pose(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """ū, v̄, s and d of each image."""
        ink = torch.flatten(torch.sum(torch.abs(x), 1), 1)
        sums = torch.matmul(ink, self.monomials.to(dtype))
        means = sums / torch.clamp_min(sums[:, :1], torch.finfo(dtype).tiny)
        down, across, down2, across2, both = (means[:, number] for number in range(1, 6))
        height2 = torch.clamp_min(down2 - down * down, _LEAST_VARIANCE)
        width2, covariance = across2 - across * across, both - down * across
        slant = torch.clamp(self.shear * covariance / height2, -_MOST_SHEAR, _MOST_SHEAR)
        upright2 = torch.clamp_min(width2 - 2 * slant * covariance + slant * slant * height2, _LEAST_VARIANCE)
        distance = torch.ones_like(slant)
        if self.stretch:
            wide = torch.sqrt(upright2) / (self.spread * self.input_shape[2])
            distance = torch.clamp(torch.pow(wide, self.stretch), 1 / _MOST_STRETCH, _MOST_STRETCH)
        return down, across, slant, distance

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.input_shape}, shear={self.shear:g}, stretch={self.stretch:g}, spread={self.spread:g}"


def straighten_layers(shape: Sequence[int], straighten: Straightening) -> list[torch.nn.Module]:
    """The first layers of a front: a :class:`Straighten`, or none."""
    if isinstance(straighten, bool):
        return [Straighten(shape)] if straighten else []
    unknown = sorted(set(straighten) - {"shear", "stretch", "spread"})
    if unknown:
        raise ConfigurationError(f"Straighten has no setting {', '.join(unknown)}; it has shear, stretch and spread")
    return [Straighten(shape, **straighten)]


@rule(Straighten)
def _straighten(layer: Straighten, call: Call) -> Transfer:
    """‖S(x)‖ ≤ √h·‖x‖, and a new pixel is at most the largest old one. Nothing useful is known of how steep it is."""
    x = call.inputs[0]
    return Transfer(
        Bound(times(layer.norm_gain, x.norm), call.output_shape, max_abs=times(_ROUNDING, x.max_abs)),
        (math.inf,),
        exact=False,
        why_infinite="how Straighten moves an image depends on the image, so a small change may move all of it; leave it out "
        "(straighten=False) where certificates are wanted",
    )


@lowering(Straighten)
def _plain_straighten(layer: Straighten, site: Site) -> torch.Tensor:
    return layer._straightened(site.x, site.dtype)
