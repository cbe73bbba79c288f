"""Notes on convolutions: which bound, and how much of it the weights use now."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lipdp import nn
from lipdp.bounds import convolution_notes
from lipdp.bounds.analysis import lower_norm
from lipdp.parametrize import constraint
from tests.soundness.harness import impulse_jacobian, largest_singular_value

T = torch.nn


@pytest.mark.parametrize(
    "layer",
    [
        nn.SpectralConv2d(2, 3, 3, padding=1),
        nn.SpectralConv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular", constraint=constraint.AOC()),
        nn.SpectralConvTranspose2d(2, 3, 3, stride=2),
        nn.FourierConv2d(2, 3, 3, padding=1),
        T.Conv2d(2, 3, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_the_estimate_is_below_the_norm_and_near_it(layer: torch.nn.Module) -> None:
    shape = (2, 6, 6)
    true = largest_singular_value(impulse_jacobian(layer, shape))
    assert true * 0.97 <= lower_norm(layer, shape, iterations=60) <= true * (1 + 1e-5)


def test_every_convolution_has_a_note_that_says_which_bound_and_how_tight() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"padding": 1, "padding_mode": "circular", "bias": False}
    model = nn.Sequential(
        nn.BoundedInput((2, 8, 8)),
        nn.SpectralConv2d(2, 4, 3, **options),
        nn.SpectralConv2d(4, 4, 3, **options, constraint=constraint.AOC()),
        nn.SpectralConv2d(4, 4, 3, **options, constraint=constraint.CircularFFT(8)),
        nn.FourierConv2d(4, 4, 3, padding=1, bias=False),
        nn.GroupSort(2),
        T.Conv2d(4, 4, 3).requires_grad_(False),
        nn.Boundary(norm=1.0, cotangent=1.0),
        T.Conv2d(4, 2, 3),
    )
    notes = {note.layer: note for note in convolution_notes(model)}
    assert list(notes) == ["1", "2", "3", "4", "6", "8"]
    assert all(0 < note.found <= note.bound * (1 + 1e-5) for note in notes.values())
    assert "RKO" in str(notes["1"])
    assert notes["1"].tightness < 0.9
    assert notes["2"].tightness == pytest.approx(1.0, abs=1e-3)
    assert notes["3"].tightness == pytest.approx(1.0, abs=1e-3)
    assert "AOC" in str(notes["2"])
    assert "Fourier" in str(notes["4"])
    assert 0.5 < notes["4"].tightness <= 1
    assert math.isfinite(notes["6"].bound)
    assert math.isinf(notes["8"].bound)
    assert "unbounded" in str(notes["8"])


def test_a_layer_used_twice_has_one_note_and_models_without_convolutions_none() -> None:
    layer = nn.SpectralConv2d(2, 2, 3, padding=1)
    assert len(convolution_notes(T.Sequential(layer, layer), input_shape=(2, 5, 5))) == 1
    assert convolution_notes(nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 2))) == ()


def test_nothing_is_looked_for_behind_a_bound_that_is_reached(monkeypatch):
    """Orthogonal 1×1 kernels: the first vector already has the norm; without the bound one more is tried."""
    torch.manual_seed(0)
    layer, calls = nn.SpectralConv2d(4, 4, 1, bias=False), []
    shape, forward = (4, 5, 5), nn.SpectralConv2d.forward
    monkeypatch.setattr(nn.SpectralConv2d, "forward", lambda self, x: calls.append(1) or forward(self, x))
    found = lower_norm(layer, shape, bound=1.0)
    assert len(calls) == 1
    assert found == pytest.approx(lower_norm(layer, shape), rel=1e-3)
    assert len(calls) == 2  # and finds nothing more
