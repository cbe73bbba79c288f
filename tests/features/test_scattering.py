"""The scattering transform: its formulas, its constant, and what the calculus, certificates and exports make of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import nn
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError, DataError
from lipdp.features.scattering import Scattering2d, Spectrum, filter_bank, layer_norm_squared, padded_size


def wave_image() -> np.ndarray:
    i, j = np.mgrid[0:12, 0:10]
    return np.sin(0.7 * i + 0.11 * j**2) + 0.02 * i * j


# ------------------------------------------------------------------ the formulas, written down slowly


def slow_gabor(m: int, n: int, sigma: float, theta: float, xi: float, slant: float) -> np.ndarray:
    c, s = math.cos(theta), math.sin(theta)
    out = np.zeros((m, n), complex)
    for u in range(m):
        for v in range(n):
            for turn_u in range(-2, 3):
                for turn_v in range(-2, 3):
                    a, b = u + turn_u * m, v + turn_v * n
                    along, across = c * a + s * b, -s * a + c * b
                    out[u, v] += np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2) + 1j * xi * along)
    return out * slant / (2 * math.pi * sigma**2)


def slow_morlet(m: int, n: int, j: int, theta: float, L: int) -> np.ndarray:
    arguments = (m, n, 0.8 * 2**j, theta)
    wave, envelope = slow_gabor(*arguments, 3 * math.pi / 4 / 2**j, 4 / L), slow_gabor(*arguments, 0.0, 4 / L)
    return wave - wave.sum() / envelope.sum() * envelope


def dft(n: int) -> np.ndarray:
    return np.exp(-2j * math.pi * np.outer(np.arange(n), np.arange(n)) / n)


def convolve(u: np.ndarray, full_filter: np.ndarray) -> np.ndarray:
    """Circular convolution of a map sampled every 2^r pixels with the frequencies of a filter that such a map has."""
    m, n = u.shape
    spectrum = dft(full_filter.shape[0]) @ full_filter @ dft(full_filter.shape[1])
    for axis, size in enumerate((m, n)):
        spectrum = np.roll(np.roll(spectrum, size // 2, axis).take(range(size), axis), -(size // 2), axis)
    product = (dft(m) @ u @ dft(n)) * spectrum
    return dft(m).conj() @ product @ dft(n).conj() / (m * n)


def slow_scattering(x: np.ndarray, L: int) -> np.ndarray:
    """J = 2, order 2, reflect padding: S₀, then |x∗ψ| by (j, θ), then the paths j₁=0 < j₂=1 by (θ₁, θ₂)."""
    sizes = [((n + 4) // 4 + 1) * 4 for n in x.shape]
    margins = [((p - n) // 2, (p - n + 1) // 2) for n, p in zip(x.shape, sizes, strict=True)]
    padded = np.pad(x, margins, mode="reflect")
    angles = [(int(L - L / 2 - 1) - t) * math.pi / L for t in range(L)]
    psi = [[slow_morlet(*sizes, j, angle, L) for angle in angles] for j in (0, 1)]
    phi = slow_gabor(*sizes, 1.6, 0.0, 0.0, 1.0)

    def average(u: np.ndarray) -> np.ndarray:
        step = 4 * u.shape[0] // sizes[0]
        return convolve(u, phi).real[::step, ::step][1:-1, 1:-1]

    first = [np.abs(convolve(padded, wave)) for wave in psi[0]]
    coarse = [np.abs(convolve(padded, wave)[::2, ::2]) for wave in psi[1]]
    second = [np.abs(convolve(u, wave)[::2, ::2]) for u in first for wave in psi[1]]
    return np.stack([average(u) for u in (padded, *first, *coarse, *second)])


def test_against_the_formulas_written_down_slowly() -> None:
    expected = slow_scattering(wave_image(), L=4)
    layer = Scattering2d((1, 12, 10), J=2, L=4)
    found = layer(torch.tensor(wave_image(), dtype=torch.float32)[None, None])[0] / layer.scale
    assert layer.maps == 25
    assert found.shape == expected.shape == layer.output_shape
    np.testing.assert_allclose(found.numpy(), expected, atol=3e-6)


# kymatio 0.3.0's own output for wave_image(), J=2, L=4 (its frontend run once with the missing scipy function stubbed): the first
# four values of some maps. It writes 3.1415 for π where it normalises φ and ψ, once for each filter of a path.
KYMATIO = {
    0: (0.670846, 0.122328, 0.124014, 0.258661),
    1: (0.092901, 0.153688, 0.128436, 0.276664),
    3: (0.093142, 0.153972, 0.072095, 0.03888),
    6: (0.150791, 0.080792, 0.239561, 0.121409),
    8: (0.102398, 0.263136, 0.096052, 0.228567),
    9: (0.020478, 0.031612, 0.017942, 0.023541),
    14: (0.020483, 0.009409, 0.009144, 0.002724),
    24: (0.02993, 0.027462, 0.030847, 0.025852),
}


@pytest.mark.parametrize("number", KYMATIO)
def test_against_values_of_kymatio(number: int) -> None:
    layer = Scattering2d((1, 12, 10), J=2, L=4)
    found = layer(torch.tensor(wave_image(), dtype=torch.float32)[None, None])[0, number].flatten()[:4] / layer.scale
    filters = 1 if number == 0 else 2 if number <= 8 else 3
    expected = np.array(KYMATIO[number]) * (3.1415 / math.pi) ** filters
    np.testing.assert_allclose(found.numpy(), expected, atol=3e-6)


@pytest.mark.parametrize(("J", "L", "order", "maps"), [(1, 3, 1, 4), (2, 8, 2, 81), (3, 8, 2, 217), (3, 2, 3, 27), (2, 4, 5, 25)])
def test_maps_and_shapes(J: int, L: int, order: int, maps: int) -> None:
    layer = Scattering2d((2, 16, 19), J=J, L=L, order=order)
    assert layer.maps == maps
    y = layer(torch.rand(3, 2, 16, 19))
    assert y.shape == (3, *layer.output_shape)
    assert y.shape[1] == 2 * maps
    assert layer(torch.rand(0, 2, 16, 19)).shape == (0, *layer.output_shape)


def test_channels_are_transformed_one_by_one_and_colours_before_them() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 12, 12)
    three, one = Scattering2d((3, 12, 12), L=3), Scattering2d((1, 12, 12), L=3)
    maps = one.maps
    for channel in range(3):
        alone = one(x[:, channel : channel + 1])
        assert torch.allclose(three(x)[:, channel * maps : (channel + 1) * maps], alone, atol=1e-6)
    yuv = Scattering2d((3, 12, 12), L=3, colour="yuv")
    brightness = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    assert torch.allclose(yuv(x)[:, :maps] / yuv.scale, one(brightness) / one.scale, atol=1e-6)


# ------------------------------------------------------------------ the constant


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(8, 8), (4, 12), (8, 16)]))
def test_norm_of_a_sampled_layer_is_exact(seed: int, shape: tuple[int, int]) -> None:
    """Against the singular values of the layer as one matrix on real images."""
    rng = np.random.default_rng(seed)
    steps = rng.choice([1, 2, 4], size=3)
    filters = [Spectrum(rng.normal(size=shape), int(step), float(rng.uniform(0.1, 2))) for step in steps]
    images = np.eye(math.prod(shape)).reshape(-1, *shape)
    rows = []
    for f in filters:
        out = np.fft.ifft2(np.fft.fft2(images) * f.values)[:, :: f.step, :: f.step].reshape(len(images), -1) * math.sqrt(f.weight)
        rows += [out.real.T, out.imag.T]
    assert layer_norm_squared(filters) == pytest.approx(np.linalg.norm(np.concatenate(rows), 2) ** 2, rel=1e-9)


def test_without_sampling_it_is_the_littlewood_paley_sum() -> None:
    bank = filter_bank((16, 16), J=2, L=8)
    spectra = [bank.phi[0], *bank.psi[0, 0], *bank.psi[0, 1]]
    energy = sum(0.5 * (s**2 + np.roll(s[::-1, ::-1], 1, (0, 1)) ** 2) for s in spectra)
    assert layer_norm_squared([Spectrum(s, 1) for s in spectra]) == pytest.approx(energy.max(), rel=1e-12)


def largest_gain(layer: Scattering2d, steps: int = 60, starts: int = 4) -> float:
    """Gradient ascent on ‖S(a) − S(b)‖/‖a − b‖ over pairs of images, near ones and the pair (a, 0) included; float64."""
    torch.manual_seed(0)
    layer = layer.double()
    a = torch.randn(starts, *layer.input_shape, dtype=torch.float64)
    b = torch.randn_like(a)
    b[0] = 0
    b[1] = a[1] + 1e-3 * b[1]
    a.requires_grad_()
    b.requires_grad_()
    optimizer = torch.optim.Adam([a, b], lr=0.05)
    best = 0.0
    for _ in range(steps):
        gains = (layer(a) - layer(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
        best = max(best, float(gains.detach().max()))
        optimizer.zero_grad()
        (-gains.sum()).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize(
    ("shape", "options", "least"),
    [
        ((1, 8, 8), {"J": 1, "L": 4, "order": 1, "padding": "zeros"}, 0.75),
        ((1, 12, 12), {"L": 4, "padding": "zeros"}, 0.75),
        ((1, 12, 12), {"L": 4}, 0.45),
        ((1, 8, 9), {"J": 3, "L": 3, "order": 3}, 0.25),
        ((3, 8, 8), {"L": 3, "colour": "yuv", "padding": "circular"}, 0.4),
        ((2, 7, 11), {"L": 2, "padding": "symmetric"}, 0.3),
    ],
    ids=str,
)
def test_no_pair_of_images_gets_further_apart(shape: tuple[int, ...], options: dict[str, object], least: float) -> None:
    gain = largest_gain(Scattering2d(shape, **options))  # type: ignore[arg-type]
    assert least < gain <= 1


@pytest.mark.parametrize("padding", ["reflect", "symmetric", "circular", "zeros"])
def test_copies_of_padding_are_counted(padding: str) -> None:
    layer = Scattering2d((1, 8, 8), L=2, padding=padding)  # type: ignore[arg-type]
    impulses = torch.eye(64).reshape(64, 1, 8, 8)
    energies = layer._extend(impulses).square().sum((1, 2, 3))
    assert energies.max() == math.prod(layer._copies(8, margins) for margins in layer._margins)
    assert (energies.max() > 1) == (padding != "zeros")


def test_small_images_are_reflected_more_than_once() -> None:
    layer = Scattering2d((1, 8, 8), J=3, L=2)
    assert padded_size(8, 3) == 24
    assert layer._copies(8, layer._margins[0]) >= 3
    assert layer(torch.rand(1, 1, 8, 8)).shape == (1, layer.maps, 1, 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_norms_and_homogeneity(seed: int, size: float) -> None:
    layer = Scattering2d((1, 8, 8), L=3)
    x = size * torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    y = layer(x)
    assert bool((y.flatten(1).norm(dim=1) <= x.flatten(1).norm(dim=1)).all())
    assert torch.allclose(layer(3 * x), 3 * y, rtol=1e-4, atol=1e-5 * size)


# ------------------------------------------------------------------ the calculus


def test_bounds_pass_through_it() -> None:
    front = Scattering2d((1, 12, 12), L=2)
    features = math.prod(front.output_shape)
    model = nn.Sequential(nn.BoundedInput((1, 12, 12), norm=3.0), front, nn.Flatten(), nn.SpectralLinear(features, 4, bias=False))
    result = analyse(model, 1.0)
    assert result.sensitivities == pytest.approx({"3.weight": 3.0})
    assert result.lipschitz == pytest.approx(1.0)
    x = torch.rand(3, 1, 12, 12)
    radii = lipdp.certify(model, x, model(x).argmax(1))
    assert bool((radii > 0).all())
    assert torch.allclose(model.export()(x), model(x), atol=1e-6)


def test_derivatives_where_maps_vanish() -> None:
    layer = Scattering2d((1, 8, 8), L=2)
    x = torch.zeros(1, 1, 8, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    y = torch.rand(2, 1, 8, 8)
    assert torch.allclose(layer(y), layer(y.clone().requires_grad_()), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((8, 8), {}, "images"),
        ((1, 8, 8), {"J": 4}, "Lower J"),
        ((1, 8, 8), {"J": 0}, "J is"),
        ((1, 8, 8), {"L": 2.0}, "L is"),
        ((1, 8, 8), {"order": 0}, "order is"),
        ((1, 8, 8), {"colour": "yuv"}, "needs 3"),
        ((3, 8, 8), {"colour": "lab"}, "colour"),
        ((1, 8, 8), {"padding": "mirror"}, "padding"),
    ],
)
def test_settings_that_can_not_be_meant(shape: tuple[int, ...], options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Scattering2d(shape, **options)  # type: ignore[arg-type]


def test_images_of_another_size() -> None:
    with pytest.raises(DataError, match="expects images"):
        Scattering2d((1, 8, 8), L=2)(torch.rand(1, 1, 9, 8))
