"""Fixed layers behind a scattering transform: they even its coefficients out, by public constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering

__all__ = ["Compress", "Compression", "FromGrid", "Mix", "SideBySide", "ToGrid", "Window", "window"]


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
        if kind not in ("log", "root"):
            raise ConfigurationError(f"Compress kind must be 'log' or 'root', not {kind!r}")
        self.kind = kind
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
        return self._arranged(x)

    def _arranged(self, x: torch.Tensor) -> torch.Tensor:
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


@lowering(ToGrid)
def _plain_to_grid(layer: ToGrid, site: Site) -> torch.Tensor:
    return layer._arranged(site.x)


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
        return self._collected(x, x.dtype)

    def _collected(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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


@lowering(FromGrid)
def _plain_from_grid(layer: FromGrid, site: Site) -> torch.Tensor:
    return layer._collected(site.x, site.dtype)


class Window(torch.nn.Module):
    """x times public constants of its own shape (or one that broadcasts to it): ‖y‖ ≤ max|c|·‖x‖."""

    factors: torch.Tensor

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors.detach().clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale each entry."""
        return x * self.factors.to(x.dtype)


@rule(Window)
def _window(layer: Window, call: Call) -> Transfer:
    x, gain = call.inputs[0], float(layer.factors.abs().max())
    return Transfer(Bound(times(gain, x.norm), x.shape, times(gain, x.row_norm), times(gain, x.max_abs)), (gain,))


@lowering(Window)
def _plain_window(layer: Window, site: Site) -> torch.Tensor:
    return site.x * layer.factors.to(site.dtype)


def window(height: int, width: int, corner: float) -> torch.Tensor:
    """1 in the middle, ``corner`` in the corners of an image: corner^(r²/r_max²)."""
    if not (math.isfinite(corner) and corner > 0):
        raise ConfigurationError(f"the weight of the corners must be a positive number, not {corner!r}")
    y, x = (
        torch.linspace(-1, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1, dtype=torch.float64) for n in (height, width)
    )
    factors: torch.Tensor = (corner ** ((y[:, None] ** 2 + x[None, :] ** 2) / 2)).float()
    return factors
