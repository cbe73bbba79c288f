"""Fixed layers around a scattering transform: they bring drawings into one pose, and even coefficients out, by public constants.

A pose is centred, upright and of like width, by each drawing's own moments. Handwriting differs from hand to hand by its slant more
than by anything else, and a linear classifier has to learn every class at every slant. What undoes it is a function of one example
alone, fixed beforehand, so it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch.nn import functional as F

from lipdp._checks import one_of, positive
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, as_computed, lowering

Compression = Literal["none", "log", "root"]


class Compress(torch.nn.Module):
    """``y_c = sign(x_c)·f(|x_c|/a_c)`` per channel (dimension 1), f(u) = log(1+u) or √(1+2u) − 1: large values are drawn in.

    Scattering coefficients are skewed, as energies are; their logarithms or roots are less so, which suits linear layers. In both
    cases f(u) ≤ u and f' ≤ f'(0) = 1, so the layer is 1/min a-Lipschitz.

    Args:
        levels: a, one positive number for each channel: where it turns from linear to compressing. Public constants.
        kind: "log" or "root".
    """

    levels: torch.Tensor

    def __init__(self, levels: Sequence[float], kind: Literal["log", "root"] = "log") -> None:
        super().__init__()
        values = torch.tensor([float(level) for level in levels])
        if not len(values) or not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ConfigurationError("Compress needs a positive finite level for each channel")
        self.kind = one_of("Compress kind", kind, ("log", "root"))
        self.register_buffer("levels", values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compress each channel."""
        if x.ndim < 2 or x.shape[1] != len(self.levels):
            raise DataError(f"Compress has {len(self.levels)} channels, and the tensor the shape {tuple(x.shape)}")
        return self._compressed(x, x.ndim, x.dtype)

    def _compressed(self, x: torch.Tensor, rank: int, dtype: torch.dtype) -> torch.Tensor:
        levels = self.levels.to(dtype).reshape(-1, *([1] * (rank - 2)))
        u = torch.abs(x) / levels
        return torch.sign(x) * (torch.log1p(u) if self.kind == "log" else torch.sqrt(1 + 2 * u) - 1)

    def extra_repr(self) -> str:
        """Arguments, in short."""
        low, high = float(self.levels.min()), float(self.levels.max())
        return f"{len(self.levels)} channels, levels from {low:.3g} to {high:.3g}, kind={self.kind!r}"


@rule(Compress)
def _compress(layer: Compress, call: Call) -> Transfer:
    """|y| ≤ |x|/a and |dy/dx| ≤ 1/a, both approached as x → 0 in the channel of the least a."""
    x = call.inputs[0]
    if not bool((torch.isfinite(layer.levels) & (layer.levels > 0)).all()):
        raise call.refuse("its levels are not positive finite numbers; they were changed")
    gain = 1 / float(layer.levels.double().min())
    return Transfer(Bound(times(gain, x.norm), x.shape, max_abs=times(gain, x.max_abs)), (gain,), exact=False)


@lowering(Compress)
def _plain_compress(layer: Compress, site: Site) -> torch.Tensor:
    return layer._compressed(site.x, len(site.shape) + 1, site.dtype)


class Mix(torch.nn.Module):
    """A fixed matrix M over the channels (dimension 1) of images: ‖y‖ ≤ ‖M‖₂·‖x‖."""

    matrix: torch.Tensor

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        if matrix.ndim != 2:
            raise ConfigurationError(f"Mix needs a matrix (channels out, channels in), not a tensor of shape {tuple(matrix.shape)}")
        self.register_buffer("matrix", matrix.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the channels of each position."""
        if x.ndim != 4 or x.shape[1] != self.matrix.shape[1]:
            raise DataError(f"Mix expects (batch, {self.matrix.shape[1]}, height, width), got the shape {tuple(x.shape)}")
        return self._mixed(x, tuple(x.shape[2:]), x.dtype)

    def _mixed(self, x: torch.Tensor, grid: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        product = torch.matmul(self.matrix.to(dtype), torch.flatten(x, 2))
        return torch.reshape(product, (-1, self.matrix.shape[0], *grid))

    def extra_repr(self) -> str:
        """The matrix, in short."""
        return f"{self.matrix.shape[1]} → {self.matrix.shape[0]} channels"


@rule(Mix)
def _mix(layer: Mix, call: Call) -> Transfer:
    """‖y‖² = Σ_p‖M·x_p‖² ≤ ‖M‖₂²·‖x‖². Singular values in float64 are right to 1e-12."""
    x = call.inputs[0]
    norm = float(torch.linalg.matrix_norm(layer.matrix.double(), 2)) * (1 + 1e-9)
    return Transfer(Bound(times(norm, x.norm), call.output_shape), (norm,))


@lowering(Mix)
def _plain_mix(layer: Mix, site: Site) -> torch.Tensor:
    return layer._mixed(site.x, site.shape[1:], site.dtype)


class SideBySide(torch.nn.Module):
    """The outputs of several branches, each flattened, one behind the other. The calculus traces through it."""

    def __init__(self, *branches: torch.nn.Module) -> None:
        super().__init__()
        if not branches:
            raise ConfigurationError("SideBySide() of no branches has no output")
        self.branches = torch.nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join."""
        return torch.cat([torch.flatten(branch(x), 1) for branch in self.branches], dim=1)


class ToGrid(torch.nn.Module):
    """Takes what :class:`SideBySide` joined apart and puts all maps on one grid, as channels: coarse ones repeat their values.

    Then one per-channel layer serves maps of all scales. :attr:`evening` holds, for every place, 1/√(how often its value is
    repeated): multiplied by it, a map has the norm that it had before.

    Args:
        shapes: (channels, height, width) of each part; the first one's grid is used, and must be the finest.
    """

    evening: torch.Tensor

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.shapes = tuple((int(c), int(h), int(w)) for c, h, w in shapes)
        _, height, width = self.shapes[0]
        if any(h > height or w > width for _, h, w in self.shapes):
            raise ConfigurationError(f"the first of the maps {self.shapes} has to be the finest: the others are put on its grid")
        self.sizes = tuple(math.prod(shape) for shape in self.shapes)
        self.input_shape = (sum(self.sizes),)
        self.output_shape = (sum(c for c, _, _ in self.shapes), height, width)
        parts, self.most_reads = [], 1
        for number, (channels, h, w) in enumerate(self.shapes):
            rows, columns = (torch.arange(n) * size // n for n, size in ((height, h), (width, w)))
            self.register_buffer(f"rows_{number}", rows, persistent=False)
            self.register_buffer(f"columns_{number}", columns, persistent=False)
            repeats = torch.bincount(rows)[rows][:, None] * torch.bincount(columns)[columns][None, :]
            self.most_reads = max(self.most_reads, int(repeats.max()))
            parts.append(repeats.double().rsqrt().float().expand(channels, height, width))
        self.register_buffer("evening", torch.cat(parts), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, channels, height, width)."""
        if x.shape[1:] != self.input_shape:
            raise DataError(f"ToGrid expects {self.input_shape[0]} features, got a tensor of shape {tuple(x.shape)}")
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        maps, start = [], 0
        for number, (shape, size) in enumerate(zip(self.shapes, self.sizes, strict=True)):
            part = torch.reshape(x[:, start : start + size], (-1, *shape))
            rows, columns = self.get_buffer(f"rows_{number}"), self.get_buffer(f"columns_{number}")
            maps.append(torch.index_select(torch.index_select(part, 2, rows), 3, columns))
            start += size
        return torch.cat(maps, dim=1)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.shapes}"


@rule(ToGrid)
def _to_grid(layer: ToGrid, call: Call) -> Transfer:
    """A selection that reads each value at most m times: ‖y‖² ≤ m·‖x‖², reached by a value that is read so often."""
    x = call.inputs[0]
    gain = math.sqrt(layer.most_reads)
    return Transfer(Bound(times(gain, x.norm), call.output_shape, max_abs=x.max_abs), (gain,))


class FromGrid(torch.nn.Module):
    """Undoes :class:`ToGrid`, behind its :attr:`~ToGrid.evening`: the adjoint Eᵀ of E = evening·ToGrid.

    E repeats a value m times, each divided by √m, so its columns are orthonormal: EᵀE = I, and Eᵀ is 1-Lipschitz. Training
    weights W on z = E·x with isotropic noise is, in law, training V = W·E on x: V's gradient is that on x, and noise on W comes
    to V as isotropic noise of the same size. So nothing is lost by going back, and rows are as short as they were.

    Args:
        grid: what put the maps on one grid.
    """

    def __init__(self, grid: ToGrid) -> None:
        super().__init__()
        self.shapes, self.input_shape = grid.shapes, grid.output_shape
        self.output_shape = grid.input_shape
        for number, (_, h, w) in enumerate(self.shapes):
            rows, columns = grid.get_buffer(f"rows_{number}"), grid.get_buffer(f"columns_{number}")
            self.register_buffer(f"rows_{number}", _even_selection(rows, h).T.contiguous(), persistent=False)
            self.register_buffer(f"columns_{number}", _even_selection(columns, w), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) → (batch, features)."""
        if x.shape[1:] != self.input_shape:
            raise DataError(f"FromGrid expects maps of shape {self.input_shape}, got a tensor of shape {tuple(x.shape)}")
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        parts, start = [], 0
        for number, (channels, _, _) in enumerate(self.shapes):
            rows, columns = (self.get_buffer(f"{name}_{number}").to(dtype) for name in ("rows", "columns"))
            parts.append(torch.flatten(torch.matmul(torch.matmul(rows, x[:, start : start + channels]), columns), 1))
            start += channels
        return torch.cat(parts, dim=1)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.shapes}"


def _even_selection(chosen: torch.Tensor, size: int) -> torch.Tensor:
    """(positions, size): a one where position p reads value chosen[p], divided by √(how many read it). Columns are orthonormal."""
    selection = torch.nn.functional.one_hot(chosen, size).float()
    return selection / selection.sum(0).sqrt()


@rule(FromGrid)
def _from_grid(layer: FromGrid, call: Call) -> Transfer:
    """Selections with orthonormal columns, transposed: ‖Eᵀz‖ ≤ ‖z‖, reached by every z = E·x."""
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


class Window(torch.nn.Module):
    """x times public constants of its own shape (or one that broadcasts to it): ‖y‖ ≤ max|c|·‖x‖."""

    factors: torch.Tensor

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors.detach().clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale each entry."""
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        return x * self.factors.to(dtype)


@rule(Window)
def _window(layer: Window, call: Call) -> Transfer:
    x, gain = call.inputs[0], float(layer.factors.abs().max())
    return Transfer(Bound(times(gain, x.norm), x.shape, times(gain, x.row_norm), times(gain, x.max_abs)), (gain,))


def window(height: int, width: int, corner: float) -> torch.Tensor:
    """1 in the middle, ``corner`` in the corners of an image: corner^(r²/r_max²)."""
    positive("the weight of the corners", corner)
    y, x = (
        torch.linspace(-1, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1, dtype=torch.float64) for n in (height, width)
    )
    factors: torch.Tensor = (corner ** ((y[:, None] ** 2 + x[None, :] ** 2) / 2)).float()
    return factors


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
        for name, value in (("shear", shear), ("stretch", stretch)):
            if not 0 <= value <= 1:
                raise ConfigurationError(f"Straighten {name} must be between 0 and 1, not {value!r}")
        self.shear, self.stretch, self.spread = float(shear), float(stretch), positive("Straighten spread", spread)
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
            return self.computed(x.float(), torch.float32).to(x.dtype)
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
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


lowering(FromGrid, Straighten, ToGrid, Window)(as_computed)
