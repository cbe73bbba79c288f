from __future__ import annotations

import colorsys
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import losses, nn
from lipdp.bounds import analyse
from lipdp.data import (
    COLOUR_SPACES,
    HSV,
    RGB,
    YIQ,
    YUV,
    Grayscale,
    StandardRGB,
    colour_space,
    rgb_to_grayscale,
    rgb_to_hsv,
    rgb_to_yiq,
    rgb_to_yuv,
)
from lipdp.errors import ConfigurationError, DataError, UnboundedError

# As printed in the standards, to their four digits.
PRINTED_YUV = [[0.299, 0.587, 0.114], [-0.14713, -0.28886, 0.436], [0.615, -0.51499, -0.10001]]
PRINTED_YIQ = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
LIPSCHITZ = ["rgb", "standard_rgb", "yiq", "yuv", "grayscale"]


def _images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("function", "printed"), [(rgb_to_yuv, PRINTED_YUV), (rgb_to_yiq, PRINTED_YIQ)])
def test_matrices_are_the_printed_ones(function: object, printed: list[list[float]]) -> None:
    matrix = function(torch.eye(3, dtype=torch.float64).reshape(3, 3, 1, 1))[..., 0, 0].T  # type: ignore[operator]
    assert torch.allclose(matrix, torch.tensor(printed, dtype=torch.float64), atol=1.1e-4)


def test_gray_stays_gray() -> None:
    gray = torch.full((1, 3, 2, 2), 0.4, dtype=torch.float64)
    for convert in (rgb_to_yuv, rgb_to_yiq):
        assert torch.allclose(convert(gray)[:, 0], gray[:, 0])
        assert float(convert(gray)[:, 1:].abs().max()) < 1e-12
    assert torch.allclose(rgb_to_grayscale(gray), gray[:, :1])


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.2, 0.5, 1.0]) | st.floats(0, 1)] * 3), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_hsv_against_the_standard_library(colours: list[tuple[float, float, float]]) -> None:
    ours = rgb_to_hsv(torch.tensor(colours, dtype=torch.float64).T.reshape(1, 3, 1, -1))[0, :, 0].T
    theirs = torch.tensor([colorsys.rgb_to_hsv(*colour) for colour in colours], dtype=torch.float64)
    turn = (ours[:, 0] - theirs[:, 0]).abs()
    assert bool((torch.minimum(turn, 1 - turn) < 1e-9).all())  # 0 and 1 are the same hue
    assert torch.allclose(ours[:, 1:], theirs[:, 1:])


@pytest.mark.parametrize("name", LIPSCHITZ)
def test_lipschitz_constant_is_exact(name: str) -> None:
    """The Jacobian on a 2×2 image, column by column: its largest singular value is the layer's constant, and the calculus's."""
    layer = colour_space(name).double()
    base = layer(torch.zeros(1, 3, 2, 2, dtype=torch.float64))
    columns = layer(torch.eye(12, dtype=torch.float64).reshape(12, 3, 2, 2)) - base
    true = float(torch.linalg.matrix_norm(columns.reshape(12, -1), 2))
    claimed = layer.lipschitz
    assert true <= claimed * (1 + 1e-7)
    assert claimed == pytest.approx(true, rel=1e-6)
    assert analyse(torch.nn.Sequential(layer), 1.0, input_shape=(3, 2, 2)).lipschitz == pytest.approx(claimed)


@pytest.mark.parametrize("name", list(COLOUR_SPACES))
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_activation_bounds_hold(name: str, scale: float) -> None:
    """Inputs in a ball, and pixels in a box: the outputs' norm and largest entry stay below the rule's."""
    layer = colour_space(name)
    x = scale * (2 * _images(200, 3, 2, 2).float() - 0.5)
    norm = float(x.flatten(1).norm(dim=1).max())
    bound = analyse(torch.nn.Sequential(layer), 1.0, input_shape=(3, 2, 2), input_norm=norm).output
    y = layer(x)
    assert tuple(y.shape[1:]) == bound.shape
    assert float(y.flatten(1).norm(dim=1).max()) <= bound.norm * (1 + 1e-6)
    assert float(y.abs().max()) <= bound.max_abs * (1 + 1e-6)


def _model(*front: torch.nn.Module, channels: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *front,
        nn.BoundedInput((channels, 4, 4), norm=2.0),
        nn.Flatten(),
        nn.SpectralLinear(16 * channels, 8, bias=False),
        nn.GroupSort(2),
        nn.SpectralLinear(8, 3, bias=False),
    )


@pytest.mark.parametrize("front", [RGB(), StandardRGB(), YUV(), YIQ(), HSV()], ids=lambda m: type(m).__name__)
def test_in_front_of_a_model(front: torch.nn.Module) -> None:
    """The bounds behind a BoundedInput are those of the model without the colours; it can be exported."""
    model, plain = _model(front), _model()
    loss = losses.CrossEntropy()
    expected = {f"{int(name[0]) + 1}{name[1:]}": value for name, value in lipdp.sensitivities(plain, loss).items()}
    assert lipdp.sensitivities(model, loss) == pytest.approx(expected)
    x = _images(5, 3, 4, 4).float()
    exported = model.export()
    assert torch.allclose(exported(x), model(x), atol=1e-6)
    assert not any("lipdp" in type(module).__module__ for module in exported.modules())


@pytest.mark.parametrize("front", [StandardRGB(), YUV(), YIQ()], ids=lambda m: type(m).__name__)
def test_certificates_are_in_the_units_of_the_raw_input(front: torch.nn.Module) -> None:
    model = _model(front)
    x = _images(30, 3, 4, 4).float()
    labels = model(x).argmax(1)
    radii = lipdp.certify(model, x, labels)
    assert bool((radii > 0).any())
    for seed in range(10):
        step = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        step = step / step.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1) * radii.reshape(-1, 1, 1, 1).float() * 0.999
        assert torch.equal(model(x + step).argmax(1), labels)


def test_hsv_has_no_certificate() -> None:
    assert HSV().lipschitz == math.inf
    model = _model(HSV())
    x = _images(2, 3, 4, 4).float()
    with pytest.raises(UnboundedError, match="HSV"):
        lipdp.certify(model, x, model(x).argmax(1))


def test_grayscale_declares_the_shape_in_front_of_it() -> None:
    model = _model(Grayscale((3, 4, 4)), channels=1)
    assert set(lipdp.sensitivities(model, losses.CrossEntropy())) == {"3.weight", "5.weight"}
    assert model(_images(2, 3, 4, 4).float()).shape == (2, 3)


def test_refusals() -> None:
    with pytest.raises(DataError, match="3 channels"):
        rgb_to_yuv(torch.zeros(2, 1, 4, 4))
    with pytest.raises(DataError, match="3 channels"):
        YUV()(torch.zeros(2, 4, 4, 3))
    with pytest.raises(DataError, match="3 channels"):
        rgb_to_hsv(torch.zeros(3))
    with pytest.raises(ConfigurationError, match="colour space"):
        colour_space("lab")


def test_precision_and_device_follow_the_input() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert YUV()(torch.rand(2, 3, 2, 2).to(dtype)).dtype == dtype
