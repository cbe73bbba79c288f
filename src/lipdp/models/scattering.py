"""A 2-D Morlet scattering transform: fixed, public features that a private head learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering
from lipdp.models.scattering_filters import FilterBank, Spectrum, filter_bank, layer_norm_squared, padded_size

__all__ = ["Colour", "Padding", "Scattering2d"]

Colour = Literal["rgb", "yuv"]
Padding = Literal["reflect", "symmetric", "circular", "zeros"]

# ITU-R BT.601: brightness, and two differences of colour.
_YUV = ((0.299, 0.587, 0.114), (-0.14713, -0.28886, 0.436), (0.615, -0.51499, -0.10001))
_NUMPY_PADDING = {"reflect": "reflect", "symmetric": "symmetric", "circular": "wrap"}
# Filters are stored in float32 and transforms rounded: both far below this.
_ROUNDING = 1 + 1e-5
_ENTRIES_ON_CPU = 2**19


class Scattering2d(torch.nn.Module):
    """Averages of wavelet moduli: ``x∗φ``, ``|x∗ψ₁|∗φ``, ``||x∗ψ₁|∗ψ₂|∗φ`` …, sampled every 2^J pixels, scaled to be 1-Lipschitz.

    For a layer W of filters, ‖W x‖² ≤ A‖x‖² with A its Littlewood–Paley bound
    (:func:`~lipdp.models.scattering_filters.layer_norm_squared`), and the modulus brings points no further apart. So with
    A_j the squared constant of everything that follows a wavelet of scale j, which weighs that wavelet's energy,
    ``ℓ² = c·‖M‖₂²·A(φ, √A_j·ψ_j)``, where M is the change of colours and c counts the copies that padding makes of one
    pixel. The output is divided by ℓ (kept in ``scale``), so it is non-expansive and ‖S(x)‖ ≤ ‖x‖: certificates pass through it.

    The filters are fixed by the settings; nothing is read off the data. For L angles there are Σ_m C(J, m)·L^m maps for each
    channel: 81 for J=2, L=8, order 2. They come by order, then by scales (j₁ < j₂ < …), then by angles, channel after channel.

    Args:
        shape: (channels, height, width) of one image.
        J: the coarsest scale, 2^J pixels.
        L: angles.
        order: how many wavelets a path has at most.
        colour: "rgb" leaves channels as they are; "yuv" turns red, green, blue into brightness and two colour differences.
        padding: how images continue beyond their border.
    """

    def __init__(
        self,
        shape: Sequence[int],
        J: int = 2,
        L: int = 8,
        order: int = 2,
        colour: Colour = "rgb",
        padding: Padding = "reflect",
    ) -> None:
        super().__init__()
        self.input_shape = tuple(int(s) for s in shape)
        self.J, self.L, self.order, self.colour, self.padding = J, L, order, colour, padding
        self._check()
        channels, *sides = self.input_shape
        self._padded = [padded_size(n, J) for n in sides]
        self._margins = [((p - n) // 2, (p - n + 1) // 2) for n, p in zip(sides, self._padded, strict=True)]
        bank = filter_bank((self._padded[0], self._padded[1]), J, L)
        colours = np.array(_YUV) if colour == "yuv" else np.eye(channels)
        copies = math.prod(self._copies(n, margins) for n, margins in zip(sides, self._margins, strict=True))
        largest = float(np.linalg.norm(colours, 2))
        self.unscaled_lipschitz = math.sqrt(copies * _squared_constant(bank, J, order)) * largest * _ROUNDING
        self.scale = 1 / self.unscaled_lipschitz
        self.maps = sum(math.comb(J, m) * L**m for m in range(order + 1))
        self.output_shape = (channels * self.maps, *(p // 2**J - 2 for p in self._padded))
        self._store(bank, colours)

    def _check(self) -> None:
        if len(self.input_shape) != 3 or min(self.input_shape) < 1:
            raise ConfigurationError(f"scattering works on images (channels, height, width), not on {self.input_shape}")
        for name, value, least in (("J", self.J, 1), ("L", self.L, 1), ("order", self.order, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"scattering {name} must be a whole number of at least {least}, not {value!r}")
        if min(self.input_shape[1:]) < 2**self.J:
            raise ConfigurationError(
                f"scattering at J={self.J} averages over {2**self.J} pixels, and an image has {self.input_shape[1:]}. Lower J."
            )
        if self.colour not in ("rgb", "yuv") or (self.colour == "yuv" and self.input_shape[0] != 3):
            raise ConfigurationError(
                f"colour={self.colour!r} with {self.input_shape[0]} channel(s): 'rgb' leaves any channels alone, 'yuv' needs 3"
            )
        if self.padding not in ("zeros", *_NUMPY_PADDING):
            raise ConfigurationError(f"padding must be 'reflect', 'symmetric', 'circular' or 'zeros', not {self.padding!r}")

    def _positions(self, size: int, margins: tuple[int, int]) -> np.ndarray:
        return np.pad(np.arange(size), margins, mode=_NUMPY_PADDING[self.padding])  # type: ignore[call-overload,no-any-return]

    def _copies(self, size: int, margins: tuple[int, int]) -> int:
        """How often padding repeats one pixel along an axis at most: ‖padded‖² ≤ copies·‖image‖², reached by an impulse."""
        return 1 if self.padding == "zeros" else int(np.bincount(self._positions(size, margins)).max())

    def _store(self, bank: FilterBank, colours: np.ndarray) -> None:
        dtype = torch.get_default_dtype()

        def keep(name: str, values: np.ndarray, kind: torch.dtype) -> None:
            # Not persistent: they follow from the settings, and a saved head need not carry them.
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values)).to(kind), persistent=False)

        for (r, j), values in bank.psi.items():
            keep(f"psi_{r}_{j}", values if r == j else _by_alias(values, 2 ** (j - r)), dtype)
        for r, (rows, columns) in bank.averages.items():
            keep(f"rows_{r}", rows * self.scale, dtype)
            keep(f"columns_{r}", columns.T, dtype)
        if self.colour != "rgb":
            keep("colours", colours, dtype)
        if self.padding != "zeros":
            for name, size, margins in zip(("up", "across"), self.input_shape[1:], self._margins, strict=True):
                keep(name, self._positions(size, margins), torch.long)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) → (batch, channels·maps, about height/2^J, about width/2^J)."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataError(f"Scattering2d expects images of shape {self.input_shape}; got a tensor of shape {tuple(x.shape)}")
        if x.shape[0] == 0:  # an empty Poisson batch; not every FFT library takes it
            return x.new_zeros((0, *self.output_shape))
        differentiable = x.requires_grad and torch.is_grad_enabled()
        if differentiable or x.device.type != "cpu":
            return self._transform(x, differentiable)
        # A few images at a time: on a processor what stays in its cache.
        rows = max(1, _ENTRIES_ON_CPU // (self.input_shape[0] * math.prod(self._padded) * self.L))
        return torch.cat([self._transform(part, differentiable) for part in torch.split(x, rows)])

    def _transform(self, x: torch.Tensor, differentiable: bool) -> torch.Tensor:
        """The transform in torch functions alone, so that it can be exported too."""
        height, width = self._padded
        padded = torch.reshape(self._extend(self._recolour(x)), (-1, height, width))
        channels, *grid = self.output_shape
        parts = []
        nodes = [(-1, padded)]  # the last wavelet's scale j, and its maps, sampled every 2^j pixels; −1: none yet
        for wavelets in range(self.order + 1):
            following = []
            for last, u in nodes:
                r = max(last, 0)
                parts.append(torch.reshape(self._average(u, r), (-1, self.input_shape[0], self.L**wavelets, *grid)))
                if wavelets < self.order and last + 1 < self.J:
                    spectrum = torch.fft.fft2(u)
                    following += [(j, self._modulus(spectrum, r, j, differentiable)) for j in range(last + 1, self.J)]
            nodes = following
        return torch.reshape(torch.cat(parts, dim=2), (-1, channels, *grid))

    def _recolour(self, x: torch.Tensor) -> torch.Tensor:
        if self.colour == "rgb":
            return x
        return torch.unflatten(torch.matmul(self.get_buffer("colours"), torch.flatten(x, 2)), 2, self.input_shape[1:])

    def _extend(self, x: torch.Tensor) -> torch.Tensor:
        (top, bottom), (left, right) = self._margins
        if self.padding == "zeros":
            return F.pad(x, (left, right, top, bottom))
        return torch.index_select(torch.index_select(x, 2, self.get_buffer("up")), 3, self.get_buffer("across"))

    def _modulus(self, spectrum: torch.Tensor, r: int, j: int, differentiable: bool) -> torch.Tensor:
        """|u ∗ ψ_{j,θ}| for all θ, sampled every 2^j pixels, of û (N, h, w) at resolution r: (N·L, h', w') at resolution j."""
        height, width = (n >> j for n in self._padded)
        psi = self.get_buffer(f"psi_{r}_{j}")
        if r == j:
            product = torch.unsqueeze(spectrum, 1) * psi
        else:
            # Sampling every ``step`` pixels is the mean over the step² frequencies that it makes equal: as many products, added
            # up in rows of real and imaginary parts as they lie in memory.
            step = 2 ** (j - r)
            parts = torch.reshape(torch.view_as_real(spectrum), (-1, step, height, step, 2 * width))
            means = torch.unsqueeze(parts[:, 0, :, 0], 1) * psi[0, 0]
            for row in range(step):
                for column in range(row == 0, step):
                    means = means.addcmul_(torch.unsqueeze(parts[:, row, :, column], 1), psi[row, column])
            product = torch.view_as_complex(torch.reshape(means, (-1, self.L, height, width, 2)))
        return torch.reshape(_modulus_of(torch.fft.ifft2(product), differentiable), (-1, height, width))

    def _average(self, u: torch.Tensor, r: int) -> torch.Tensor:
        return torch.matmul(torch.matmul(self.get_buffer(f"rows_{r}"), u), self.get_buffer(f"columns_{r}"))

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.input_shape}, J={self.J}, L={self.L}, order={self.order}, colour={self.colour!r}, padding={self.padding!r}"


def _modulus_of(z: torch.Tensor, differentiable: bool) -> torch.Tensor:
    if differentiable:
        return torch.abs(z)
    # Six times as fast on a CPU, but its derivative at 0 is not a number. In place: z is nobody else's.
    squares = torch.view_as_real(z).square_()
    return torch.add(squares[..., 0], squares[..., 1]).sqrt_()


def _by_alias(spectra: np.ndarray, step: int) -> np.ndarray:
    """(L, h, w) → (step, step, L, h/step, 2w/step), divided by step²: one filter for each set of frequencies that sampling makes
    equal, with every value twice, for real and imaginary parts."""
    count, height, width = spectra.shape
    parts = spectra.reshape(count, step, height // step, step, width // step).transpose(1, 3, 0, 2, 4)
    return np.repeat(parts / step**2, 2, axis=-1)


def _squared_constant(bank: FilterBank, J: int, order: int) -> float:
    """ℓ² of the transform of a padded image, before scaling."""

    def following(r: int, least: int, wavelets: int) -> float:
        filters = [Spectrum(bank.phi[r], 2 ** (J - r))]
        if wavelets:
            for j in range(least, J):
                weight = following(j, j + 1, wavelets - 1)
                filters += [Spectrum(values, 2 ** (j - r), weight) for values in bank.psi[r, j]]
        return layer_norm_squared(filters)

    return following(0, 0, order)


@rule(Scattering2d)
def _scattering(layer: Scattering2d, call: Call) -> Transfer:
    """1-Lipschitz by its scaling, and S(0) = 0, so ‖S(x)‖ ≤ ‖x‖. Not exact: no image is worst for padding and filters at once."""
    return Transfer(Bound(call.inputs[0].norm, call.output_shape), exact=False)


@lowering(Scattering2d)
def _plain_scattering(layer: Scattering2d, site: Site) -> torch.Tensor:
    return layer._transform(site.x, differentiable=True)
