"""The filters of a 2-D Morlet scattering transform, and the exact norm of a layer of them.

Everything here is computed once, in float64, from the image's size, J and L alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FilterBank", "Spectrum", "filter_bank", "gabor", "layer_norm_squared", "morlet", "padded_size"]

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
