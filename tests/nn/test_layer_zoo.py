"""The rest of lipdp.nn: attacked to 99% where the rule is exact, and what each layer computes and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.bounds import analyse, certified_norm
from lipdp.errors import ConfigurationError, DataError, LipdpError, UnboundedError, UnsupportedError
from lipdp.parametrize import constraint, project_
from tests.soundness.functions import Forward
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value, noisy_steps

T = torch.nn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXACT: list[tuple[torch.nn.Module, tuple[int, ...]]] = [
    (nn.Abs(), (5,)),
    (nn.BoundedPReLU(), (4,)),
    (nn.BoundedPReLU(3), (3, 2, 2)),
    (nn.LayerScale(), (4,)),
    (nn.LayerScale(4, bound=0.7), (3, 4)),
    (nn.LayerScale((3, 1), bound=2.0), (3, 4)),
    (nn.FrobeniusLinear(4, 3), (2, 4)),
    (nn.L1Linear(4, 3, rows=True), (4,)),
    (nn.SpectralLinear(4, 4, constraint=constraint.AbsoluteSums()), (4,)),
    (nn.L2NormPool1d(2), (2, 6)),
    (nn.GlobalL2NormPool(), (3, 2, 2)),
    (nn.ScaledAvgPool1d(3), (2, 6)),
    (nn.ScaledAdaptiveAvgPool2d((2, 1)), (2, 4, 3)),
    (nn.InvertibleDownsampling(2), (1, 4, 4)),
    (nn.InvertibleUpsampling(2), (4, 2, 2)),
    (nn.ConvexMix(0.3), (4,)),
    (nn.ConvexResidual(nn.SpectralLinear(4, 4, bias=False), 0.25), (4,)),
    (nn.TokenBall(0.5), (3, 4)),
    (nn.TokenMean(), (3, 4)),
    (nn.LearnedPositions(3, 4), (3, 4)),
    (nn.BoundedInput((4,), norm=2.0, mode="floor", floor=0.5), (4,)),
    (nn.SpectralConv1d(2, 3, 2, stride=2), (2, 6)),
    (nn.SpectralConv3d(1, 2, 2, stride=2), (1, 2, 2, 4)),
    (nn.SpectralConvTranspose2d(2, 1, 2, stride=2), (2, 2, 2)),
]


@pytest.mark.parametrize(
    ("layer", "shape"), EXACT, ids=lambda value: str(value) if isinstance(value, tuple) else type(value).__name__
)
def test_exact_layers_reach_their_bounds(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    model = Forward(lambda m, x: m.mix(x, x * 2.0), mix=layer) if isinstance(layer, nn.ConvexMix) else layer
    report = attack(model, 1.0, input_shape=shape, input_norm=1.2, steps=25, draws=3)
    for row in report.rows:
        if row.kind in ("parameter", "activation", "input"):
            assert row.tightness > 0.985, str(report)


LOOSE: list[tuple[torch.nn.Module, tuple[int, ...], float]] = [
    (nn.LayerNorm(4), (3, 4), 0.5),
    (nn.LayerNorm((3, 4), eps=0.1, scale=2.0), (3, 4), 0.3),
    (nn.LayerNorm(4, bias=False), (4,), 0.5),
    (nn.LayerNorm(4, elementwise_affine=False), (2, 4), 0.5),
    (nn.RMSNorm(4, eps=0.5), (3, 4), 0.5),
    (nn.GroupNorm(2, 4), (4, 2, 2), 0.4),
    (nn.GroupNorm(1, 4, eps=0.2, affine=False), (4,), 0.3),
    (T.LayerNorm(4, eps=0.5), (3, 4), 0.5),
    (T.RMSNorm(4, eps=0.5), (3, 4), 0.5),
    (T.GroupNorm(2, 4, eps=0.5), (4, 2, 2), 0.3),
    (T.InstanceNorm2d(2, eps=0.5, affine=True), (2, 2, 2), 0.3),
    (T.InstanceNorm1d(2, eps=0.5), (2, 3), 0.3),
    (nn.Normalize((0.1, 0.5), (0.5, 2.0)), (2, 2, 2), 0.6),
    (nn.Normalize(0.3, 0.2), (2, 3), 0.9),
    (nn.ConvexResidual(nn.SpectralLinear(4, 4), 0.5, learned=True), (4,), 0.4),
    (nn.ConvexResidual(nn.SpectralLinear(4, 4), 0.5, learned=True, low=0.4, high=0.6), (4,), 0.7),
    (nn.ConcatResidual(nn.SpectralLinear(4, 4)), (4,), 0.7),
    (nn.SinusoidalPositions(3, 4, 0.1), (3, 4), 0.9),
    (nn.Householder(4), (4,), 0.99),
    (nn.Householder(4), (4, 2, 2), 0.99),
    (nn.Householder(2, dim=-1), (3, 2), 0.99),
    (nn.L1Linear(4, 3), (2, 4), 0.99),
    (nn.GlobalL2NormPool(eps=0.2), (3, 4), 0.9),
    (nn.L2NormPool1d(3, 1, 1, eps=0.1), (2, 6), 0.5),
    (nn.SpectralConv1d(2, 3, 3, padding=1), (2, 6), 0.6),
    (nn.SpectralConv3d(1, 2, 2), (1, 3, 3, 3), 0.5),
    (nn.SpectralConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1), (2, 3, 3), 0.6),
    (nn.FourierConv2d(2, 3, 3, padding=1), (2, 5, 5), 0.6),
    (T.Upsample(scale_factor=2), (1, 2, 2), 0.99),
    (T.Upsample(scale_factor=2, mode="bilinear"), (1, 3, 3), 0.9),
    (T.UpsamplingNearest2d(scale_factor=3), (1, 2, 2), 0.99),
    (T.UpsamplingBilinear2d(size=(5, 4)), (1, 3, 3), 0.9),
    (T.AdaptiveAvgPool2d(1), (2, 3, 3), 0.99),
    (T.AdaptiveAvgPool1d(3), (2, 7), 0.6),
    (T.AdaptiveMaxPool2d((2, None)), (1, 4, 3), 0.9),
    (T.Softmax(1), (4,), 0.2),
    (T.Softmax2d(), (3, 2, 2), 0.2),
    (T.LogSoftmax(-1), (2, 3), 0.3),
    (T.PReLU(), (4,), 0.99),
    (T.GLU(1), (4,), 0.5),
    (T.ChannelShuffle(2), (4, 2, 2), 0.99),
    (T.ConvTranspose1d(2, 3, 3, stride=2), (2, 4), 0.4),
    (T.ConvTranspose2d(2, 2, 2, dilation=2, groups=2), (2, 3, 3), 0.4),
]


@pytest.mark.parametrize(
    ("layer", "shape", "least"), LOOSE, ids=lambda value: type(value).__name__ if isinstance(value, T.Module) else str(value)
)
def test_other_layers_hold_under_attack(layer: torch.nn.Module, shape: tuple[int, ...], least: float) -> None:
    starts = ("random", "constant", "positive", "impulse", "inside")
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.5, steps=15, draws=3, starts=starts)
    rows = [row for row in report.rows if row.kind in ("parameter", "activation", "input")]
    assert max(row.tightness for row in rows) >= least, str(report)
    for row in rows:
        if row.kind == "parameter" and row.name.endswith("bias"):
            assert row.tightness > 0.985, str(report)


@pytest.mark.parametrize("layer", [row[0] for row in EXACT + [row[:2] for row in LOOSE]], ids=lambda layer: type(layer).__name__)
def test_weights_stay_in_their_set_through_noise(layer: torch.nn.Module) -> None:
    """Projection is idempotent (nearly), also in float32, and the set is the one that the bounds assume."""
    layer = layer.float()
    noisy_steps(layer, steps=3, noise=0.5)
    before = [p.detach().clone() for p in layer.parameters()]
    project_(layer)
    for old, new in zip(before, layer.parameters(), strict=True):
        # Björck's iteration continues where the last call stopped; the others have nothing left to do.
        slow = any(isinstance(getattr(m, "constraint", None), constraint.Bjorck) for m in layer.modules())
        assert slow or torch.allclose(old, new, rtol=1e-5, atol=1e-6)
    for module in layer.modules():
        if isinstance(module, nn.L1Linear):
            assert float(module.weight.detach().double().abs().sum(0).max()) <= 1
            assert not module.rows or float(certified_norm(module.weight)) <= 1 + 1e-12
        if isinstance(module, nn.FrobeniusLinear):
            assert float(module.weight.detach().double().norm()) <= 1
        if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) and module.weight is not None:
            assert float(module.weight.detach().double().abs().max()) <= module.scale
        if isinstance(module, nn.LearnedPositions):
            assert float(module.weight.detach().double().norm()) <= module.norm
        if isinstance(module, nn.LayerScale):
            assert float(module.weight.detach().double().abs().max()) <= module.bound


# ---------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("length", [1, 5])
def test_embedding_of_tokens_declares_its_input_and_is_exact(length: int) -> None:
    model = nn.Sequential(nn.BoundedEmbedding(7, 4, norm=0.5, length=length), nn.Flatten(), nn.SpectralLinear(4 * length, 3))
    report = attack(model, 1.0)
    bounds = {row.name: row.bound for row in report.rows if row.kind == "parameter"}
    root = math.sqrt(length)
    assert bounds == pytest.approx({"0.weight": root, "2.weight": 0.5 * root, "2.bias": 1.0}, rel=1e-12)
    assert report.tightness("parameter") > 0.99
    assert report.tightness("activation") > 0.99
    assert report.tightness("row") > 0.99
    assert analyse(model, 1.0).lipschitz == math.inf  # token ids: no certificate


def test_embeddings_of_torch_have_a_sensitivity_and_no_bound() -> None:
    free = T.Embedding(5, 4)
    report = attack(free, 1.0, input_shape=(6,))
    (row,) = [row for row in report.rows if row.kind == "parameter"]
    assert row.bound == pytest.approx(math.sqrt(6))
    assert row.tightness > 0.99
    with pytest.raises(UnboundedError, match="BoundedEmbedding"):
        analyse(T.Sequential(free, nn.SpectralLinear(4, 2)), 1.0, input_shape=(6,))
    frozen = T.Sequential(T.Embedding.from_pretrained(normal(5, 4).float()), T.Linear(4, 2))
    report = attack(frozen, 1.0, input_shape=(6,))
    longest = float(normal(5, 4).float().norm(dim=1).max())
    assert {row.name: row.bound for row in report.rows if row.kind == "parameter"} == pytest.approx(
        {"1.weight": math.sqrt(6) * longest, "1.bias": math.sqrt(6)}, rel=1e-6
    )
    for bad in (T.Embedding(5, 4, max_norm=1.0), T.Embedding(5, 4, scale_grad_by_freq=True), T.Embedding(5, 4, sparse=True)):
        with pytest.raises(UnsupportedError, match=r"max_norm|buffer|changes"):
            analyse(bad, 1.0, input_shape=(6,))
    function = Forward(lambda m, x: F.embedding(x[:, :3], m.w), w=T.Parameter(torch.zeros(5, 4)))
    assert analyse(function, 1.0, input_shape=(6,)).sensitivities == pytest.approx({"w": math.sqrt(3)})


def test_tokens_keep_their_bounds_through_the_layers_that_keep_rows() -> None:
    model = nn.Sequential(
        nn.BoundedEmbedding(5, 4, norm=0.5, length=3),
        nn.SinusoidalPositions(3, 4, 0.2),
        nn.LearnedPositions(3, 4, 0.1),
        nn.SpectralLinear(4, 6, bias_norm=0.1),
        nn.GroupSort(2, dim=-1),
        nn.LayerScale(6, 0.5),
        T.ReLU(),
        nn.TokenMean(),
    )
    rows = {row.where.split("'")[1]: row.row_norm for row in analyse(model, 1.0).layers}
    start = 0.5 + 0.2 * math.sqrt(2)
    assert rows["add"] == pytest.approx(start, rel=1e-6)
    assert rows["2"] == pytest.approx(start + 0.1)
    assert rows["3"] == rows["4"] == pytest.approx(start + 0.2)
    assert rows["5"] == rows["6"] == pytest.approx((start + 0.2) / 2)
    attack(model, 1.0, steps=5)
    assert analyse(model, 1.0).output.norm <= (start + 0.2) / 2  # the mean is no longer than its longest token


def test_sinusoidal_positions_have_the_norm_of_theory() -> None:
    for length, dim in [(1, 2), (7, 10)]:
        assert float(nn.SinusoidalPositions(length, dim).table.norm()) == pytest.approx(math.sqrt(length * dim / 2), rel=1e-6)


# ---------------------------------------------------------------------------------------------- what they compute


def test_householder_starts_as_max_min_and_keeps_norms_at_any_angle() -> None:
    x = normal(5, 6, 2)
    layer = nn.Householder(6).double()
    assert torch.allclose(layer(x), nn.MaxMin()(x), atol=1e-7)
    with torch.no_grad():
        layer.angle.copy_(normal(3) * 3)
    assert torch.allclose(layer(x).norm(dim=1), x.norm(dim=1), rtol=1e-12)
    with pytest.raises(DataError):
        layer(normal(5, 4, 2))


def test_householder_angle_and_l1_columns_reach_their_bounds() -> None:
    """Witnesses: a pair on the far side, along v; equal columns."""
    layer = nn.Householder(2).double()
    v = torch.stack((layer.angle.detach().cos(), layer.angle.detach().sin()), dim=1)
    across = torch.stack((-v[:, 1], v[:, 0]), dim=1)
    (gradient,) = torch.autograd.grad(layer(-1.5 * v), layer.angle, across)
    claimed = analyse(layer, 1.0, input_shape=(2,), input_norm=1.5).sensitivities["angle"]
    assert abs(float(gradient)) == pytest.approx(claimed, rel=1e-12)
    dense = nn.L1Linear(4, 3, bias=False).double()
    with torch.no_grad():
        dense.weight.zero_()[0] = 1.0
    dense.project_()
    found = analyse(dense, 1.0, input_shape=(4,), input_norm=1.0).lipschitz
    assert largest_singular_value(dense.weight.detach()) == pytest.approx(found, rel=1e-12) == 2.0


def test_invertible_sampling_is_inverted() -> None:
    x = normal(2, 3, 4, 6)
    assert torch.equal(nn.InvertibleUpsampling(2)(nn.InvertibleDownsampling(2)(x)), x)


def test_pools_compute_what_they_say() -> None:
    x = normal(2, 3, 6)
    assert torch.allclose(nn.L2NormPool1d(2)(x), x.unfold(2, 2, 2).norm(dim=-1))
    assert torch.allclose(nn.GlobalL2NormPool()(x), x.norm(dim=2))
    assert torch.allclose(nn.ScaledAvgPool1d(3)(x), x.unfold(2, 3, 3).sum(-1) / math.sqrt(3))
    image = normal(2, 3, 4, 6)
    assert torch.allclose(nn.ScaledAdaptiveAvgPool2d((2, 3))(image), F.adaptive_avg_pool2d(image, (2, 3)) * 2)
    with pytest.raises(DataError, match="multiples"):
        nn.ScaledAdaptiveAvgPool2d(4)(image)


def test_floored_input_is_the_sphere_above_the_floor_and_linear_below() -> None:
    layer = nn.BoundedInput((3,), norm=2.0, mode="floor", floor=0.5)
    x = torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(layer(x).norm(dim=1), torch.tensor([2.0, 0.4, 0.0]))
    assert analyse(layer, 1.0).lipschitz == 4.0
    assert "floor=0.5" in repr(layer)
    for arguments in [{"mode": "floor"}, {"floor": 0.5}, {"mode": "floor", "floor": 0.0}]:
        with pytest.raises(ConfigurationError, match="floor"):
            nn.BoundedInput((3,), **arguments)


def test_normalize_matches_its_formula_and_row_of_the_table() -> None:
    layer = nn.Normalize((0.5, 0.25), (0.5, 2.0))
    x = normal(3, 2, 4, 4)
    assert torch.allclose(layer.double()(x)[:, 1], (x[:, 1] - 0.25) / 2)
    bound = analyse(layer, 1.0, input_shape=(2, 4, 4), input_norm=3.0).output.norm
    assert bound == pytest.approx(3.0 / 0.5 + 4 * math.hypot(1.0, 0.125))
    for bad in [(0.0, 0.0), ((0.1,), (-1.0,)), (math.inf, 1.0)]:
        with pytest.raises(ConfigurationError):
            nn.Normalize(*bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(4, eps=0.0),
        lambda: nn.RMSNorm(4, scale=math.inf),
        lambda: nn.GroupNorm(2, 4, bias_norm=0.0),
        lambda: nn.Householder(3),
        lambda: nn.Householder(4, dim=0),
        lambda: nn.LayerScale(3, bound=0.0),
        lambda: nn.BoundedEmbedding(3, 2, norm=-1.0),
        lambda: nn.LearnedPositions(3, 2, norm=0.0),
        lambda: nn.SinusoidalPositions(3, 3),
        lambda: nn.TokenBall(math.inf),
        lambda: nn.ConvexMix(1.5),
        lambda: nn.ConvexMix(0.5, True, low=0.6),
        lambda: nn.ConcatResidual(T.Identity(), dim=0),
        lambda: nn.L2NormPool1d(2, eps=0.0),
        lambda: nn.GlobalL2NormPool(0.0),
        lambda: nn.ScaledAvgPool1d(3, 2),
        lambda: nn.ScaledAdaptiveAvgPool2d(0),
        lambda: nn.FourierConv2d(1, 1, 3, padding_mode="reflect"),
        lambda: nn.FourierConv2d(1, 1, 3, grid=2),
        lambda: nn.LipschitzAttention(5, 2),
        lambda: nn.LipschitzAttention(4, 2, scale=0.0),
        lambda: nn.TransformerBlock(4, 2, 5),
    ],
)
def test_arguments_that_can_not_be_meant(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_layers_refuse_tensors_they_were_not_made_for() -> None:
    cases: list[tuple[Any, torch.Tensor]] = [
        (nn.LayerScale(3), torch.zeros(2, 4)),
        (nn.LayerScale((3, 4)), torch.zeros(3, 4)),
        (nn.LearnedPositions(3, 2), torch.zeros(1, 4, 2)),
        (nn.BoundedEmbedding(3, 2, length=4), torch.zeros(1, 5, dtype=torch.long)),
        (nn.GlobalL2NormPool(), torch.zeros(3, 4)),
        (nn.ConvexResidual(T.Linear(4, 3)), torch.zeros(1, 4)),
        (nn.LipschitzAttention(4, tokens=3), torch.zeros(1, 2, 4)),
        (nn.Normalize((0.1, 0.2), 1.0), torch.zeros(1, 3, 2)),
    ]
    for layer, x in cases:
        with pytest.raises(LipdpError):
            layer(x)
    with pytest.raises(ConfigurationError, match="output_size"):
        nn.SpectralConvTranspose2d(1, 1, 2)(torch.zeros(1, 1, 3, 3), [6, 6])


def test_every_layer_shows_its_arguments() -> None:
    for layer, _ in EXACT:
        assert repr(layer)
    assert "norm=0.5, length=3" in repr(nn.BoundedEmbedding(5, 2, norm=0.5, length=3))
    assert "scale=2, bias_norm=0.1" in repr(nn.LayerNorm(3, scale=2.0))
    assert "grid=32" in repr(nn.FourierConv2d(1, 1, 3))
    assert "tokens=3" in repr(nn.LipschitzAttention(4, 2, tokens=3))


# ---------------------------------------------------------------------------------------------- one and three axes, transposed


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.SpectralConv1d(2, 3, 3, padding=2, dilation=2), (2, 5)),
        (lambda: nn.SpectralConv1d(2, 4, 4, stride=3, groups=2), (2, 8)),
        (lambda: nn.SpectralConv1d(1, 2, 5, padding=2, padding_mode="reflect"), (1, 3)),
        (lambda: nn.SpectralConv1d(1, 2, 3, padding=1, padding_mode="circular"), (1, 2)),
        (lambda: nn.SpectralConv3d(1, 2, 3, padding=1), (1, 2, 3, 2)),
        (lambda: nn.SpectralConv3d(2, 2, (1, 2, 3), groups=2, padding="same"), (2, 2, 2, 3)),
        (lambda: nn.SpectralConv3d(1, 2, 2, padding=1, padding_mode="replicate"), (1, 2, 2, 2)),
        (lambda: nn.SpectralConvTranspose2d(2, 3, 3), (2, 4, 4)),
        (lambda: nn.SpectralConvTranspose2d(2, 2, 3, 2, 1, 1, groups=2), (2, 3, 4)),
        (lambda: nn.SpectralConvTranspose2d(1, 2, (5, 2), (2, 3), (2, 0), (1, 2)), (1, 3, 3)),
        (lambda: nn.SpectralConvTranspose2d(1, 2, 3, dilation=2), (1, 3, 3)),
        (lambda: nn.SpectralConvTranspose2d(1, 2, 4), (1, 1, 1)),
        (lambda: nn.SpectralConvTranspose2d(1, 2, 3, 1, 0, 1, dilation=2), (1, 2, 2)),
    ],
)
def test_operator_norm_is_at_most_one_by_svd(make: Any, shape: tuple[int, ...]) -> None:
    layer = make()
    for start in ("orthogonal", "constant", "random"):
        with torch.no_grad():
            if start == "constant":
                layer.weight.fill_(1.0)
            elif start == "random":
                layer.weight.normal_()
        layer.project_()
        largest = largest_singular_value(impulse_jacobian(layer, shape))
        assert largest <= 1 + 1e-13
    assert largest > 0.3
    attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=4, draws=2, starts=("constant", "random"))


@pytest.mark.parametrize("init", [3.0, -5.0, 0.25])
def test_a_slope_is_in_its_set_from_the_start(init: float) -> None:
    """Bounds and certificates of a model that was never trained rest on it."""
    layer = nn.BoundedPReLU(2, init=init)
    assert torch.equal(layer.weight.detach(), torch.full((2,), max(-1.0, min(init, 1.0))))
