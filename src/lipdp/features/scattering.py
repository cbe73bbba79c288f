"""A 2-D Morlet scattering transform: fixed, public features that a private head learns from.

Its filters, and the exact norm of a layer of them, are computed once, in float64, from the image's size, J and L alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from lipdp._checks import whole
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering

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
    (:func:`~lipdp.features.scattering.layer_norm_squared`), and the modulus brings points no further apart. So with
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
        for name in ("J", "L", "order"):
            whole(f"scattering {name}", getattr(self, name))
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


# The filters of a 2-D Morlet scattering transform, and the exact norm of a layer of them.

Array = npt.NDArray[np.float64]
# Copies of the plane that a periodised filter is summed over, on each side: further ones are below rounding.
_TURNS = 2


def padded_size(size: int, J: int) -> int:
    """The length that ``size`` pixels are padded to: a multiple of 2^J with at least half a step to spare on each side."""
    step = 1 << J
    return ((size + step) // step + 1) * step


def gabor(shape: tuple[int, int], sigma: float, theta: float, xi: float, slant: float) -> npt.NDArray[np.complex128]:
    """exp(−uᵀR D Rᵀu/2σ² + iξ⟨u, (cosθ, sinθ)⟩)·slant/2πσ² with D = diag(1, slant²), R the turn by θ, periodised on ``shape``."""
    c, s = math.cos(theta), math.sin(theta)
    turn = np.array([[c, -s], [s, c]])
    curvature = turn @ np.diag([1.0, slant**2]) @ turn.T / (2 * sigma**2)
    rows, columns = (np.arange(-_TURNS * n, (_TURNS + 1) * n, dtype=np.float64) for n in shape)
    y, x = np.meshgrid(rows, columns, indexing="ij")
    decay = curvature[0, 0] * y**2 + 2 * curvature[0, 1] * y * x + curvature[1, 1] * x**2
    wave = np.exp(-decay + 1j * xi * (y * c + x * s))
    turns = 2 * _TURNS + 1
    periodic: npt.NDArray[np.complex128] = wave.reshape(turns, shape[0], turns, shape[1]).sum((0, 2))
    return periodic * (slant / (2 * math.pi * sigma**2))


def morlet(shape: tuple[int, int], sigma: float, theta: float, xi: float, slant: float) -> npt.NDArray[np.complex128]:
    """A Gabor wave minus K times its envelope, K such that the filter sums to 0."""
    wave, envelope = gabor(shape, sigma, theta, xi, slant), gabor(shape, sigma, theta, 0.0, slant)
    difference: npt.NDArray[np.complex128] = wave - (wave.sum() / envelope.sum()) * envelope
    return difference


def _at_resolution(spectrum: Array, r: int) -> Array:
    """The filter for a signal sampled every 2^r pixels: the frequencies that such a signal has, the others dropped."""
    for axis in range(spectrum.ndim):
        size = spectrum.shape[axis] >> r
        low = np.r_[0 : size // 2, spectrum.shape[axis] - size // 2 : spectrum.shape[axis]]
        spectrum = np.take(spectrum, low, axis=axis)
    return spectrum


@dataclass(frozen=True)
class FilterBank:
    """Filters as spectra (real, since each filter is Hermitian around the origin), by resolution.

    Attributes:
        psi: (r, j) → (L, h/2^r, w/2^r): the wavelets of scale j for a signal sampled every 2^r pixels.
        phi: r → the low-pass at that resolution.
        averages: r → two matrices A, B: the scattering coefficients of a map u of that resolution are A·u·Bᵀ, its
            convolution with the low-pass, sampled every 2^J pixels, without the outermost samples (they see mostly padding).
    """

    psi: dict[tuple[int, int], Array]
    phi: dict[int, Array]
    averages: dict[int, tuple[Array, Array]]


def filter_bank(shape: tuple[int, int], J: int, L: int) -> FilterBank:
    """Wavelets ψ_{j,θ}: σ = 0.8·2^j, ξ = ¾π/2^j, slant 4/L, L angles over half a turn; low-pass φ: Gaussian of σ = 0.8·2^(J−1).

    ``shape`` is the padded image's. A map of scale j is kept at every 2^j-th pixel, so filters are needed at all coarser
    resolutions r ≤ j too.
    """
    psi: dict[tuple[int, int], Array] = {}
    for j in range(J):
        angles = [(int(L - L / 2 - 1) - number) * math.pi / L for number in range(L)]
        waves = [np.fft.fft2(morlet(shape, 0.8 * 2**j, angle, 0.75 * math.pi / 2**j, 4 / L)).real for angle in angles]
        for r in range(j + 1):
            psi[r, j] = np.stack([_at_resolution(wave, r) for wave in waves])
    sigma = 0.8 * 2 ** (J - 1)
    lines = [np.fft.fft(gabor((n, n), sigma, 0.0, 0.0, 1.0).real.sum(1)).real for n in shape]
    phi, averages = {}, {}
    for r in range(J):
        rows, columns = (_at_resolution(line, r) for line in lines)
        phi[r] = np.outer(rows, columns)
        averages[r] = _average_matrix(rows, 2 ** (J - r)), _average_matrix(columns, 2 ** (J - r))
    return FilterBank(psi, phi, averages)


def _average_matrix(spectrum: Array, step: int) -> Array:
    """Circular convolution with the filter, sampled every ``step``, the first and the last sample left out."""
    size = len(spectrum)
    kernel = np.fft.ifft(spectrum).real
    samples = np.arange(step, size - step, step)
    matrix: Array = kernel[(samples[:, None] - np.arange(size)) % size]
    return matrix


@dataclass(frozen=True)
class Spectrum:
    """One filter of a layer: its spectrum, the step its output is sampled at, and the weight of its output's energy."""

    values: Array
    step: int
    weight: float = 1.0


def layer_norm_squared(filters: list[Spectrum]) -> float:
    """The largest Σ_f weight_f·‖(x ∗ f)↓step_f‖² over real x of norm 1: the upper Littlewood–Paley bound, sampling included.

    Without sampling it is sup_ω Σ_f weight_f·(|f̂(ω)|² + |f̂(−ω)|²)/2. Keeping every t-th pixel along both axes adds up the
    frequencies that are equal modulo n/t, divided by t²:  ‖(x∗f)↓t‖² = t⁻²·Σ_groups |Σ_{ω in group} f̂(ω)x̂(ω)|²  (norms of spectra
    over n²). So for each class of frequencies equal modulo n/s, s the largest step, the energy is a quadratic form
    x̂ᴴG x̂ with G_ab = Σ_f weight_f·f̂(a)f̂(b)/t_f² where a and b share a group of f. Classes do not mix: the answer is the
    largest eigenvalue of all G. For real x, x̂(−ω) is the conjugate of x̂(ω), so G may be averaged with the one of −ω.
    """
    coarse = max(f.step for f in filters)
    height, width = filters[0].values.shape
    total = np.zeros(((height // coarse) * (width // coarse), coarse**2, coarse**2))
    index = np.arange(coarse)
    for step in sorted({f.step for f in filters}):
        group = (index[:, None] % (coarse // step)) * coarse + index[None, :] % (coarse // step)
        shared = group.reshape(-1, 1) == group.reshape(1, -1)
        for f in filters:
            if f.step == step:
                reflected = np.roll(f.values[::-1, ::-1], 1, (0, 1))
                for values in (f.values, reflected):
                    classes = values.reshape(coarse, height // coarse, coarse, width // coarse).transpose(1, 3, 0, 2)
                    rows = classes.reshape(-1, coarse**2)
                    total += (0.5 * f.weight / step**2) * shared * rows[:, :, None] * rows[:, None, :]
    return float(np.linalg.eigvalsh(total)[:, -1].max())
