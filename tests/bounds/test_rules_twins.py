"""The functions of torch.nn.functional that have a module for a twin, and what else ``forward`` may say, under attack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp.bounds import analyse
from lipdp.errors import UnsupportedError
from tests.soundness.functions import Forward
from tests.soundness.harness import attack

T = torch.nn
P = torch.nn.Parameter
IMG, SEQ, TOK = (2, 4, 5), (2, 6), (3, 4)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(name: str, f: Any, shape: tuple[int, ...], least: float = 0.99, **attributes: Any) -> Any:
    return pytest.param(f, shape, attributes, least, id=name)


MASK = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
CASES = [
    # affine functions with constants: the certified norm of what they are given
    case("linear", lambda m, x: F.linear(x, m.w, m.b), TOK, 0.9, w=normal(2, 4), b=normal(2)),
    case("linear-kwargs", lambda m, x: F.linear(x, weight=m.w), (4,), w=normal(2, 4)),
    case("conv1d", lambda m, x: F.conv1d(x, m.w, padding=1), SEQ, 0.5, w=normal(3, 2, 3)),
    case("conv2d", lambda m, x: F.conv2d(x, m.w, m.b, 1, (1, 0)), IMG, 0.4, w=normal(3, 2, 3, 2), b=normal(3)),
    case("conv2d-same", lambda m, x: F.conv2d(x, m.w, padding="same", dilation=2), IMG, 0.3, w=normal(2, 2, 2, 3)),
    case("conv2d-groups", lambda m, x: F.conv2d(x, m.w, stride=2, groups=2), IMG, 0.5, w=normal(4, 1, 2, 2)),
    case("conv3d", lambda m, x: F.conv3d(x, m.w), (1, 3, 3, 3), 0.3, w=normal(2, 1, 2, 2, 2)),
    case("conv-transpose1d", lambda m, x: F.conv_transpose1d(x, m.w, stride=2), SEQ, 0.5, w=normal(2, 3, 3)),
    case("conv-transpose2d", lambda m, x: F.conv_transpose2d(x, m.w, None, 2, 1, 1), IMG, 0.5, w=normal(2, 1, 3, 3)),
    case("conv-transpose2d-groups", lambda m, x: F.conv_transpose2d(x, m.w, groups=2, dilation=2), IMG, 0.5, w=normal(2, 2, 2, 3)),
    case("conv-transpose3d", lambda m, x: F.conv_transpose3d(x, m.w), (1, 2, 2, 2), 0.3, w=normal(1, 2, 2, 2, 2)),
    # windows
    case("max-pool1d", lambda m, x: F.max_pool1d(x, 2), SEQ),
    case("max-pool2d", lambda m, x: F.max_pool2d(x, (2, 1), stride=(2, 2)), IMG),
    case("max-pool2d-overlap", lambda m, x: F.max_pool2d(x, 3, 1, padding=1), IMG, 0.3),
    case("max-pool3d", lambda m, x: F.max_pool3d(x, 2, ceil_mode=True), (1, 3, 3, 3)),
    case("avg-pool1d", lambda m, x: F.avg_pool1d(x, 3), SEQ),
    case("avg-pool2d", lambda m, x: F.avg_pool2d(x, 2, 1, 1, False, False), IMG, 0.5),
    case("avg-pool2d-divisor", lambda m, x: F.avg_pool2d(x, 2, divisor_override=1), (1, 4, 4)),
    case("avg-pool3d", lambda m, x: F.avg_pool3d(x, 2, 2), (1, 2, 2, 4)),
    case("adaptive-avg1d", lambda m, x: F.adaptive_avg_pool1d(x, 3), SEQ),
    case("adaptive-avg2d", lambda m, x: F.adaptive_avg_pool2d(x, 1), IMG),
    case("adaptive-avg2d-uneven", lambda m, x: F.adaptive_avg_pool2d(x, (3, 4)), IMG, 0.5),
    case("adaptive-avg2d-none", lambda m, x: F.adaptive_avg_pool2d(x, (None, 1)), IMG),
    case("adaptive-avg3d", lambda m, x: F.adaptive_avg_pool3d(x, 2), (1, 2, 3, 4), 0.5),
    case("adaptive-max2d", lambda m, x: F.adaptive_max_pool2d(x, 2), (1, 4, 4)),
    case("adaptive-max2d-uneven", lambda m, x: F.adaptive_max_pool2d(x, 3), IMG, 0.5),
    # normalisations
    case("layer-norm", lambda m, x: F.layer_norm(x, (4,), eps=0.5), TOK, 0.5),
    case("layer-norm-affine", lambda m, x: F.layer_norm(x, (4,), m.g, m.b, 1.0), TOK, 0.5, g=normal(4), b=normal(4)),
    case("layer-norm-two", lambda m, x: F.layer_norm(x, (3, 4), eps=0.1), TOK, 0.5),
    case("rms-norm", lambda m, x: F.rms_norm(x, (4,), eps=0.5), TOK, 0.5),
    case("rms-norm-weight", lambda m, x: F.rms_norm(x, (4,), m.g, 2.0), TOK, 0.5, g=normal(4)),
    case("group-norm", lambda m, x: F.group_norm(x, 2, eps=0.5), (4, 3), 0.5),
    case("instance-norm", lambda m, x: F.instance_norm(x, eps=0.5), IMG, 0.3),
    case("normalize", lambda m, x: F.normalize(x, dim=-1, eps=0.5), TOK, 0.5),
    case("normalize-far", lambda m, x: F.normalize(x, dim=1, eps=9.0), TOK),
    case(
        "batch-norm",
        lambda m, x: F.batch_norm(x, m.u, m.v, m.g, m.b, eps=0.1),
        (2, 3),
        0.3,
        u=normal(2),
        v=normal(2).abs(),
        g=normal(2),
        b=normal(2),
    ),
    case("channel-shuffle", lambda m, x: F.channel_shuffle(x, 2), (4, 3, 3)),
    # the rest
    case("log-softmax", lambda m, x: F.log_softmax(x, 1), (2,), 0.3),
    case("log-softmax-rows", lambda m, x: x.log_softmax(-1), TOK, 0.3),
    case("softmin", lambda m, x: F.softmin(x, dim=1), (4,), 0.3),
    case("expand", lambda m, x: x.unsqueeze(1).expand(-1, 5, -1), (4,)),
    case("expand-batch", lambda m, x: x[:, None].expand(x.shape[0], 2, 4), (4,)),
    case("repeat", lambda m, x: x.repeat(1, 3), (4,)),
    case("repeat-two", lambda m, x: x.repeat(1, 2, 3), TOK),
    case("tile", lambda m, x: torch.tile(x, (2,)), TOK),
    case("interleave", lambda m, x: x.repeat_interleave(2, dim=1), TOK),
    case("flip", lambda m, x: x.flip(1), TOK),
    case("flip-two", lambda m, x: torch.flip(x, (1, 2)), TOK),
    case("roll", lambda m, x: torch.roll(x, 1, 1), TOK),
    case("roll-two", lambda m, x: x.roll((1, 2), dims=(1, 2)), TOK),
    case("narrow", lambda m, x: x.narrow(1, 1, 2), TOK),
    case("select", lambda m, x: torch.select(x, 1, 0), TOK),
    case("amax", lambda m, x: x.amax(1), TOK),
    case("amin-two", lambda m, x: torch.amin(x, (1, 2), keepdim=True), TOK),
    case("maximum", lambda m, x: torch.maximum(x, -x), (4,), 0.5),
    case("minimum", lambda m, x: torch.minimum(x[:, :2], x[:, 2:]), (4,), 0.4),
    case("where", lambda m, x: torch.where(m.c, x, 0.0), (3, 3), c=MASK),
    case("where-two", lambda m, x: torch.where(m.c, x, x * 2), (3, 3), 0.5, c=MASK),
    case("where-constant", lambda m, x: torch.where(m.c, m.d, x), (3, 3), 0.5, c=MASK, d=normal(3, 3)),
    case("masked-fill", lambda m, x: x.masked_fill(m.c, -0.3), (3, 3), 0.5, c=MASK),
    case("clamp", lambda m, x: torch.clamp(x, -0.1, 5.0), (4,)),
    case("clamp-far", lambda m, x: x.clamp(min=0.7, max=0.9), (4,), 0.7),
    case("clamp-above", lambda m, x: x.clamp(max=-0.5), (4,), 0.7),
    case("clamp-min", lambda m, x: x.clamp_min(0.0), (4,)),
    case("clip-max", lambda m, x: torch.clip(x, max=2.0), (4,)),
    case("prelu", lambda m, x: F.prelu(x, m.a), (4,), a=torch.tensor([-1.7])),
    case("glu", lambda m, x: F.glu(x, 1), (4,), 0.5),
    case("softshrink", lambda m, x: F.softshrink(x, 0.1), (4,), 0.8),
    case("nearest", lambda m, x: F.interpolate(x, scale_factor=2), IMG),
    case("nearest-mixed", lambda m, x: F.interpolate(x, scale_factor=(2, 3)), IMG),
    case("nearest-down", lambda m, x: F.interpolate(x, size=(2, 7), mode="nearest-exact"), IMG, 0.9),
    case("linear-1d", lambda m, x: F.interpolate(x, scale_factor=2.0, mode="linear"), SEQ, 0.9),
    case("bilinear", lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMG, 0.9),
    case("bilinear-corners", lambda m, x: F.interpolate(x, (7, 3), mode="bilinear", align_corners=True), IMG, 0.9),
    case("bilinear-odd-scale", lambda m, x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), IMG, 0.9),
    case("bilinear-recomputed", lambda m, x: _recomputed(x), IMG, 0.9),
    case("bicubic", lambda m, x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMG, 0.9),
    case("bicubic-corners", lambda m, x: F.interpolate(x, (7, 3), mode="bicubic", align_corners=True), IMG, 0.9),
    case("bicubic-odd-scale", lambda m, x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), IMG, 0.9),
    case("area", lambda m, x: F.interpolate(x, size=(3, 2), mode="area"), IMG, 0.7),
    case("trilinear", lambda m, x: F.interpolate(x, scale_factor=2, mode="trilinear"), (1, 2, 2, 2), 0.9),
]


def _recomputed(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)


@pytest.mark.parametrize(("function", "shape", "attributes", "least"), CASES)
def test_twins_hold_under_attack(function: Any, shape: Any, attributes: Any, least: float) -> None:
    model = Forward(function, **attributes)
    report = attack(model, 0.7, input_shape=shape, input_norm=1.3, steps=12, draws=2, starts=("random", "constant", "impulse"))
    outputs = [row for row in report.rows if row.kind == "activation"]
    assert max(outputs[-1].tightness, report.tightness("input")) >= least, str(report)
    if least >= 0.99:
        assert min(outputs[-1].tightness, report.tightness("input")) >= 0.98, str(report)


def trained(name: str, f: Any, shape: tuple[int, ...], expected: dict[str, float], **attributes: Any) -> Any:
    return pytest.param(f, shape, attributes, expected, id=name)


W, B, K = normal(2, 4), normal(2), normal(3, 2, 2, 2)
TRAINED = [
    trained("linear", lambda m, x: F.linear(x, m.w, m.b), TOK, {"w": 1.0, "b": math.sqrt(3)}, w=P(W.clone()), b=P(B.clone())),
    trained("linear-w", lambda m, x: F.linear(x, m.w, m.b), TOK, {"w": 1.0}, w=P(W.clone()), b=B),
    trained("linear-b", lambda m, x: F.linear(x, m.w, bias=m.b), TOK, {"b": math.sqrt(3)}, w=W, b=P(B.clone())),
    trained("conv", lambda m, x: F.conv2d(x, m.w, m.b, 2), (2, 4, 4), {"w": 1.0, "b": 2.0}, w=P(K.clone()), b=P(normal(3))),
    trained("conv-t", lambda m, x: F.conv_transpose2d(x, m.w, None, 2), (2, 2, 2), {"w": 1.0}, w=P(normal(2, 1, 2, 2))),
    trained("scale", lambda m, x: x * m.g, TOK, {"g": 1.0}, g=P(normal(4))),
    trained("scalar", lambda m, x: m.g * x, TOK, {"g": 1.0}, g=P(normal(1))),
    trained("scale-broadcast", lambda m, x: x * m.g, (3, 1), {"g": 1.0}, g=P(normal(4))),
    trained("prelu", lambda m, x: F.prelu(x, m.a), (3, 2), {"a": 1.0}, a=P(normal(3))),
    trained("rms", lambda m, x: F.rms_norm(x, (4,), m.g, 1.0), TOK, {"g": 1.0}, g=P(normal(4))),
]


@pytest.mark.parametrize(("function", "shape", "attributes", "expected"), TRAINED)
def test_parameters_in_functions_have_their_factor(function: Any, shape: Any, attributes: Any, expected: Any) -> None:
    model = Forward(function, **attributes)
    report = attack(model, 1.0, input_shape=shape, input_norm=1.0, steps=25)
    bounds = {row.name: row.bound for row in report.rows if row.kind == "parameter"}
    assert bounds == pytest.approx(expected, rel=1e-9)
    if "rms_norm" not in function.__code__.co_names:
        assert report.tightness("parameter") > 0.95, str(report)


def test_functions_agree_with_their_modules() -> None:
    pairs = [
        (T.Conv2d(2, 3, 3, padding=1), lambda m, x: F.conv2d(x, m.w, m.b, padding=1), IMG),
        (T.ConvTranspose2d(2, 3, 3, stride=2), lambda m, x: F.conv_transpose2d(x, m.w, m.b, stride=2), IMG),
        (T.Linear(4, 2), lambda m, x: F.linear(x, m.w, m.b), TOK),
        (T.LayerNorm(4, eps=0.3), lambda m, x: F.layer_norm(x, (4,), m.w, m.b, 0.3), TOK),
        (T.GroupNorm(2, 4, eps=0.3), lambda m, x: F.group_norm(x, 2, m.w, m.b, 0.3), (4, 3)),
        (T.RMSNorm(4, eps=0.3), lambda m, x: F.rms_norm(x, (4,), m.w, 0.3), TOK),
        (T.InstanceNorm2d(2, eps=0.3, affine=True), lambda m, x: F.instance_norm(x, weight=m.w, bias=m.b, eps=0.3), IMG),
        (T.PReLU(), lambda m, x: F.prelu(x, m.w), (4,)),
    ]
    for module, function, shape in pairs:
        twin = Forward(function, w=module.weight, b=getattr(module, "bias", None))
        ours, theirs = (analyse(m, 0.9, input_shape=shape, input_norm=1.7) for m in (twin, module))
        assert list(ours.sensitivities.values()) == pytest.approx(list(theirs.sensitivities.values()), rel=1e-12)
        frozen = [m.double().requires_grad_(False) for m in (twin, module)]
        first, second = (analyse(m, 0.9, input_shape=shape, input_norm=1.7) for m in frozen)
        assert first.output.norm == pytest.approx(second.output.norm, rel=1e-12)
        assert first.lipschitz == pytest.approx(second.lipschitz, rel=1e-12)


def test_frozen_batch_norm_agrees_with_its_module() -> None:
    module = T.BatchNorm2d(2).eval()
    module.running_mean.copy_(torch.tensor([0.3, -0.2]))
    module.running_var.copy_(torch.tensor([0.5, 2.0]))
    buffers = {"u": module.running_mean, "v": module.running_var}
    twin = Forward(lambda m, x: F.batch_norm(x, m.u, m.v, m.w, m.b), w=module.weight, b=module.bias, **buffers)
    ours, theirs = (analyse(m, 0.9, input_shape=IMG, input_norm=1.7) for m in (twin, module))
    assert list(ours.sensitivities.values()) == pytest.approx(list(theirs.sensitivities.values()), rel=1e-12)
    attack(torch.nn.Sequential(twin), 1.0, input_shape=IMG, input_norm=1.0, steps=8)


REFUSED = [
    case("rms-norm-without-eps", lambda m, x: F.rms_norm(x, (4,)), TOK),
    case("layer-norm-eps-0", lambda m, x: F.layer_norm(x, (4,), eps=0.0), TOK),
    case("normalize-p1", lambda m, x: F.normalize(x, p=1.0, dim=-1), TOK),
    case("linear-of-activations", lambda m, x: F.linear(m.w, x[:, 0]), TOK, w=normal(3, 4)),
    case("where-by-activation", lambda m, x: torch.where(x.abs() > 0, x, -x), TOK),
    case("where-infinite", lambda m, x: torch.where(m.c, x, -math.inf), (3, 3), c=MASK),
    case("masked-fill-infinite", lambda m, x: x.masked_fill(m.c, -math.inf), (3, 3), c=MASK),
    case("clamp-by-tensor", lambda m, x: torch.clamp(x, min=m.c), (3, 3), c=normal(3, 3)),
    case("clamp-empty", lambda m, x: torch.clamp(x, min=2.0, max=1.0), (3, 3)),
    case("antialias", lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True), IMG),
    case("max-pool-indices", lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], IMG),
    case("adaptive-indices", lambda m, x: F.adaptive_max_pool2d(x, 2, return_indices=True)[0], IMG),
    case("batch-norm-of-the-batch", lambda m, x: F.batch_norm(x, None, None, training=True), IMG),
    case("batch-norm-training", lambda m, x: F.batch_norm(x, m.c, m.c, training=True), IMG, c=torch.ones(2)),
    case("running-statistics", lambda m, x: F.instance_norm(x, m.c, m.c, use_input_stats=False), IMG, c=torch.ones(2)),
]


@pytest.mark.parametrize(("function", "shape", "attributes", "_"), REFUSED)
def test_forms_without_a_bound_are_refused(function: Any, shape: Any, attributes: Any, _: Any) -> None:
    with pytest.raises(UnsupportedError):
        analyse(Forward(function, **attributes), 1.0, input_shape=shape, input_norm=1.0)


def test_modules_that_would_keep_statistics_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="track_running_stats"):
        analyse(T.InstanceNorm2d(2, track_running_stats=True).eval(), 1.0, input_shape=IMG, input_norm=1.0)
    with pytest.raises(UnsupportedError, match="eps"):
        analyse(T.RMSNorm(4), 1.0, input_shape=TOK, input_norm=1.0)


def test_log_softmax_over_several_rows_counts_each_of_them() -> None:
    """At x = 0 every row is −ln K: R rows of K entries have the norm √(R·K)·ln K, √R times that of one."""
    model = Forward(lambda m, x: F.log_softmax(x, -1))
    found = float(model(torch.zeros(1, 3, 4, dtype=torch.float64)).norm())
    bound = analyse(model, 1.0, input_shape=(3, 4), input_norm=1e-6).output.norm
    assert found == pytest.approx(math.sqrt(12) * math.log(4))
    assert found <= bound <= found * 1.001
