"""The small network of the DP-SGD recipe: its options, and that they are trained by clipping as they are."""

from __future__ import annotations

import pytest
import torch

import lipdp.models
from lipdp.clipping import clipped_gradients
from lipdp.errors import ConfigurationError

SHAPE = (1, 28, 28)


def made(**options):
    torch.manual_seed(0)
    return lipdp.models.create("tanh-cnn", input_shape=SHAPE, classes=10, **options)


def test_the_published_network_by_default():
    """16 and 32 channels, kernels of 8 and 4, 512 features, 32 hidden units: 26,010 parameters, under the same names as ever."""
    model = made()
    assert sum(p.numel() for p in model.parameters()) == 26_010
    assert [name for name, _ in model.named_parameters()] == [f"{k}.{part}" for k in (0, 3, 7, 9) for part in ("weight", "bias")]
    assert sum(isinstance(module, torch.nn.Tanh) for module in model) == 3


def test_public_constants_are_taken_off_the_input():
    x = torch.rand(3, *SHAPE)
    plain, standardised = made(), made(centre=0.25, spread=0.5)
    assert torch.allclose(standardised(x), plain((x - 0.25) / 0.5))
    assert len(list(standardised.buffers())) == 0


@pytest.mark.parametrize(
    "options", [{}, {"hidden": 0}, {"activation": "relu", "groups": 4, "centre": 0.1, "spread": 0.3, "width": 8}]
)
def test_clipped_as_the_naive_loop_does(options):
    model = made(**options).double()
    x, y = torch.rand(4, *SHAPE, dtype=torch.float64), torch.arange(4)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    sums = [clipped_gradients(model, loss, x, y, 0.3, method) for method in ("naive", "bookkeeping")]
    for name, expected in sums[0].items():
        assert torch.allclose(sums[1][name], expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"activation": "gelu"}, "tanh, relu"),
        ({"width": 16, "groups": 5}, "does not divide"),
        ({"groups": -1}, "does not divide"),
        ({"spread": 0.0}, "spread"),
        ({"centre": float("nan")}, "finite"),
    ],
)
def test_refused(options, match):
    with pytest.raises(ConfigurationError, match=match):
        made(**options)


def test_small_images_are_refused():
    with pytest.raises(ConfigurationError, match="at least 20 pixels"):
        lipdp.models.create("tanh-cnn", input_shape=(1, 16, 16), classes=10)
