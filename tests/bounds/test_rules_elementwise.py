"""Elementwise activations: the claimed slope and growth against the function itself, on a dense grid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp.bounds import analyse
from lipdp.bounds.propagate import forward_pass
from lipdp.errors import UnsupportedError
from tests.soundness.functions import Forward

T = torch.nn
N = 5
# Name, module or None, function: every registered elementwise rule, with its parameters.
CASES: list[tuple[str, Any, Any]] = [
    ("relu", T.ReLU(), torch.relu),
    ("relu-F", None, F.relu),
    ("relu-method", None, lambda x: x.relu()),
    ("relu6", T.ReLU6(), F.relu6),
    ("celu", T.CELU(), F.celu),
    ("celu-0.3", T.CELU(0.3), lambda x: F.celu(x, 0.3)),
    ("celu-4", T.CELU(4.0), lambda x: F.celu(x, alpha=4.0)),
    ("celu-torch", None, lambda x: torch.celu(x, 2.0)),
    ("softsign", T.Softsign(), F.softsign),
    ("tanhshrink", T.Tanhshrink(), F.tanhshrink),
    ("abs", None, torch.abs),
    ("abs-method", None, lambda x: x.abs()),
    ("tanh", T.Tanh(), torch.tanh),
    ("tanh-method", None, lambda x: x.tanh()),
    ("sigmoid", T.Sigmoid(), torch.sigmoid),
    ("sigmoid-method", None, lambda x: x.sigmoid()),
    ("hardsigmoid", T.Hardsigmoid(), F.hardsigmoid),
    ("logsigmoid", T.LogSigmoid(), F.logsigmoid),
    ("gelu", T.GELU(), F.gelu),
    ("gelu-tanh", T.GELU(approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    ("silu", T.SiLU(), F.silu),
    ("mish", T.Mish(), F.mish),
    ("hardswish", T.Hardswish(), F.hardswish),
    ("selu", T.SELU(), F.selu),
    ("selu-torch", None, torch.selu),
    ("sin", None, torch.sin),
    ("neg", None, torch.neg),
    ("neg-operator", None, lambda x: -x),
    ("leaky", T.LeakyReLU(), F.leaky_relu),
    ("leaky-3", T.LeakyReLU(3.0), lambda x: F.leaky_relu(x, 3.0)),
    ("leaky-minus-2", T.LeakyReLU(-2.0), lambda x: F.leaky_relu(x, negative_slope=-2.0)),
    ("elu", T.ELU(), F.elu),
    ("elu-2.5", T.ELU(2.5), lambda x: F.elu(x, 2.5)),
    ("elu-0.2", T.ELU(0.2), lambda x: F.elu(x, alpha=0.2)),
    ("elu-minus-2", T.ELU(-2.0), lambda x: F.elu(x, -2.0)),
    ("softplus", T.Softplus(), F.softplus),
    ("softplus-0.1", T.Softplus(0.1), lambda x: F.softplus(x, 0.1)),
    ("softplus-8", T.Softplus(8.0, threshold=2.0), lambda x: F.softplus(x, beta=8.0, threshold=2.0)),
    ("softplus-threshold", T.Softplus(1.0, threshold=-3.0), lambda x: F.softplus(x, 1.0, -3.0)),
    ("hardtanh", T.Hardtanh(), F.hardtanh),
    ("hardtanh-wide", T.Hardtanh(-0.5, 7.0), lambda x: F.hardtanh(x, -0.5, 7.0)),
    ("hardtanh-kwargs", None, lambda x: F.hardtanh(x, min_val=-3.0, max_val=0.0)),
    ("dropout-eval", T.Dropout(0.4).eval(), lambda x: F.dropout(x, 0.4, False)),
]
MODELS = [
    pytest.param(model, id=f"{name}-{kind}")
    for name, module, function in CASES
    for kind, model in (("module", module), ("function", Forward(lambda m, x, f=function: f(x))))
    if model is not None
]
# Where f(0) ≠ 0 the offset is reached at X = 0.
OFFSETS = ("sigmoid", "hardsigmoid", "softplus", "logsigmoid")


def values_and_slopes(model: torch.nn.Module, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = points.reshape(-1, 1).clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return y.detach().flatten(), slope.flatten()


def largest_norm(model: torch.nn.Module, radius: float) -> float:
    """Max ‖f(x)‖ over x with k equal entries ±radius/√k and N−k zeros: where the bounds of the table are reached."""
    k = torch.arange(1, N + 1, dtype=torch.float64)
    at = radius / k.sqrt()
    with torch.no_grad():
        at_zero, right, left = model(torch.cat([at.new_zeros(1), at, -at])[:, None]).flatten().split([1, N, N])
    return max(float((k * side.square() + (N - k) * at_zero**2).max().sqrt()) for side in (right, left))


@pytest.mark.parametrize("model", MODELS)
def test_slope_is_the_supremum_of_the_derivative(model: torch.nn.Module) -> None:
    grid = torch.cat(
        [
            torch.linspace(-12, 12, 24_001),
            torch.linspace(-90, 90, 1_801),
            torch.linspace(-0.01, 0.01, 2_001),
            torch.tensor([3 - 1e-9, -3 + 1e-9]),
        ]
    )
    steepest = float(values_and_slopes(model, grid.double())[1].abs().max())
    claimed = analyse(model, 1.0, input_shape=(N,), input_norm=1.0).lipschitz
    assert steepest <= claimed * (1 + 1e-9)
    assert steepest >= 0.99 * claimed


@pytest.mark.parametrize("model", MODELS)
def test_growth_covers_every_radius_and_is_reached_at_some(model: torch.nn.Module) -> None:
    radii = [10.0**e for e in range(-4, 5)] + [0.5, 2.0, 3.0, 7.0]
    proved = analyse(model, 1.0, input_shape=(N,), input_norm=radii[0])
    (final,) = (node.args[0] for node in proved.program.graph.nodes if node.op == "output")
    bounds = [forward_pass(proved.program, radius).bounds[final].norm for radius in radii]
    assert bounds[0] == proved.output.norm
    ratios = [largest_norm(model, radius) / bound for radius, bound in zip(radii, bounds, strict=True)]
    assert max(ratios) <= 1 + 1e-9
    assert max(ratios) >= 0.99


@pytest.mark.parametrize("model", [p for p in MODELS if p.id.startswith(OFFSETS)])
def test_the_value_at_zero_is_the_offset(model: torch.nn.Module) -> None:
    if "threshold" in str(model) and getattr(model, "threshold", 1) < 0:
        return  # torch answers the identity beyond the threshold: f(0) = 0
    bound = analyse(model, 1.0, input_shape=(N,), input_norm=0.0).output.norm
    actual = largest_norm(model, 0.0)
    assert actual <= bound * (1 + 1e-12)
    assert actual >= 0.99 * bound or actual == 0.0


@pytest.mark.parametrize(
    ("make", "shape"), [(T.Dropout, (3,)), (T.Dropout1d, (2, 3)), (T.Dropout2d, (2, 3, 1)), (T.Dropout3d, (2, 3, 1, 1))]
)
def test_dropout_in_training_mode_scales_by_the_kept_share(make: Any, shape: tuple[int, ...]) -> None:
    result = analyse(make(0.75), 1.0, input_shape=shape, input_norm=2.0)
    assert result.output.norm == pytest.approx(8.0, rel=1e-12)
    assert result.lipschitz == pytest.approx(4.0, rel=1e-12)
    x = torch.ones(64, *shape)
    assert float(make(0.75)(x).max()) == pytest.approx(4.0)


def test_functional_dropout_trains_by_default() -> None:
    result = analyse(Forward(lambda m, x: F.dropout(x, 0.5)), 1.0, input_shape=(3,), input_norm=1.0)
    assert result.lipschitz == pytest.approx(2.0)
    assert analyse(T.Dropout(1.0), 1.0, input_shape=(3,), input_norm=1.0).output.norm == 0.0


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (T.CELU(-1.0), "alpha > 0"),
        (Forward(lambda m, x: F.celu(x, alpha=-0.5)), "alpha > 0"),
        (T.Softplus(-1.0), "beta > 0"),
        (T.Hardtanh(0.5, 2.0), "0 inside"),
        (Forward(lambda m, x: F.hardtanh(x, -3.0, -1.0)), "0 inside"),
    ],
)
def test_parameters_outside_the_proof_are_refused(model: torch.nn.Module, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        analyse(model, 1.0, input_shape=(3,), input_norm=1.0)


def test_celu_of_negative_alpha_really_grows_without_bound() -> None:
    """Why it is refused: the naive rule "1-Lipschitz" is off by e¹⁰ at −10."""
    x = torch.tensor([-10.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.celu(x, -1.0).sum(), x)
    assert abs(float(slope)) > math.exp(9.9)
