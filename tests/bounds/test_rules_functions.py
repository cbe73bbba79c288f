"""What people write in ``forward``: each form attacked, and held to 99% where its rule is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.bounds import analyse
from tests.soundness.functions import Forward
from tests.soundness.harness import attack

C = torch.tensor([0.3, -0.7, 0.2, 0.5], dtype=torch.float64)
V, IMG = (4,), (2, 3, 4)  # a vector and an image
Case = tuple[str, Callable[[Any, torch.Tensor], Any], tuple[int, ...]]


def exact(name: str, f: Callable[[Any, torch.Tensor], Any], shape: tuple[int, ...] = V, **attributes: Any) -> Any:
    return pytest.param(f, shape, attributes, (0.99, 0.99), id=name)


def joined(name: str, f: Callable[[Any, torch.Tensor], Any], shape: tuple[int, ...] = V, **attributes: Any) -> Any:
    """Copies of one activation side by side: X is exact; their cotangents are disjoint, which the sum over uses ignores."""
    return pytest.param(f, shape, attributes, (0.99, 0.5), id=name)


def loose(name: str, f: Callable[[Any, torch.Tensor], Any], shape: tuple[int, ...] = V, **attributes: Any) -> Any:
    return pytest.param(f, shape, attributes, (0.0, 0.0), id=name)


def kaiming(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(-1, 2, math.prod(shape), dtype=torch.float64).reshape(shape)


LINEAR = [
    exact("identity", lambda m, x: x),
    exact("scalar", lambda m, x: x * 3.0),
    exact("scalar-left", lambda m, x: -0.25 * x),
    exact("scalar-method", lambda m, x: x.mul(2)),
    exact("scalar-kwargs", lambda m, x: torch.mul(x, other=2.5)),
    exact("scalar-all-kwargs", lambda m, x: torch.mul(input=x, other=2.5)),
    exact("divide", lambda m, x: x / 0.4),
    exact("divide-kwargs", lambda m, x: torch.div(x, other=0.4)),
    exact("divide-method", lambda m, x: x.div(-3)),
    exact("times-buffer", lambda m, x: x * m.c, c=C),
    exact("buffer-times", lambda m, x: m.c * x, c=C),
    exact("times-frozen", lambda m, x: x * m.c, c=torch.nn.Parameter(C.clone(), requires_grad=False)),
    exact("over-buffer", lambda m, x: x / m.c, c=C),
    exact("over-float32-buffer", lambda m, x: x / m.c.float(), c=torch.tensor([3.0, 7.0, 11.0, 0.1])),
    exact("times-broadcast-buffer", lambda m, x: x * m.c, (2, 3, 4), c=C),
    exact("times-buffer-with-batch-of-one", lambda m, x: x * m.c, c=C[None]),
    exact("times-buffer-that-expands", lambda m, x: x * m.c, (3, 1), c=torch.ones(4)),
    exact("neg", lambda m, x: -x),
    exact("x+x", lambda m, x: x + x),
    exact("x+alpha·x", lambda m, x: torch.add(x, x, alpha=2.5)),
    exact("x-(-alpha)·x", lambda m, x: torch.sub(x, x, alpha=-2.5)),
    exact("x.sub", lambda m, x: x.sub(-x)),
    exact("add-all-kwargs", lambda m, x: torch.add(input=x, other=x)),
    exact("add-other-kwarg", lambda m, x: torch.add(x, other=x, alpha=3)),
    exact("double-fan-out", lambda m, x: (x + x) + (x + x)),
    joined("cat-self", lambda m, x: torch.cat([x, x], 1)),
    joined("cat-kwargs", lambda m, x: torch.cat(tensors=[x, x, x], dim=-1)),
    joined("concat-tuple", lambda m, x: torch.concat((x, -x), dim=1), IMG),
    joined("cat-images", lambda m, x: torch.cat([x, x], dim=-2), IMG),
    joined("stack-last", lambda m, x: torch.stack([x, x], -1)),
    joined("stack-1", lambda m, x: torch.stack([x, x, x], dim=1), IMG),
    joined("stack-2", lambda m, x: torch.stack((x, x), 2), IMG),
    exact("flatten", lambda m, x: torch.flatten(x, 1), IMG),
    exact("flatten-some", lambda m, x: x.flatten(-2), IMG),
    exact("flatten-kwargs", lambda m, x: torch.flatten(x, start_dim=2, end_dim=3), IMG),
    exact("reshape", lambda m, x: x.reshape(-1, 6, 4), IMG),
    exact("view-size", lambda m, x: x.view(x.size(0), -1), IMG),
    exact("view-shape", lambda m, x: x.view(x.shape[0], 4, 6), IMG),
    exact("reshape-list", lambda m, x: torch.reshape(x, (x.shape[0], -1)), IMG),
    exact("unflatten", lambda m, x: x.unflatten(1, (2, 2))),
    exact("unflatten-negative", lambda m, x: torch.unflatten(x, -1, (2, 2)), IMG),
    exact("unsqueeze", lambda m, x: x.unsqueeze(-1)),
    exact("squeeze", lambda m, x: x.unsqueeze(2).squeeze(2), IMG),
    exact("squeeze-dims", lambda m, x: torch.squeeze(x, (1, 3)), (1, 3, 1)),
    exact("contiguous", lambda m, x: x.permute(0, 2, 1, 3).contiguous(), IMG),
    exact("clone", lambda m, x: x.clone()),
    exact("permute", lambda m, x: x.permute(0, 3, 1, 2), IMG),
    exact("permute-kwargs", lambda m, x: torch.permute(x, dims=(0, -1, 1, 2)), IMG),
    exact("transpose", lambda m, x: x.transpose(1, -1), IMG),
    exact("transpose-kwargs", lambda m, x: torch.transpose(x, dim0=1, dim1=2), IMG),
    exact("swapaxes", lambda m, x: torch.swapaxes(x, axis0=1, axis1=2), IMG),
    exact("pixel-shuffle", lambda m, x: F.pixel_shuffle(x, 2), (4, 2, 2)),
    exact("pixel-unshuffle", lambda m, x: F.pixel_unshuffle(x, 2), (1, 4, 4)),
    exact("mean", lambda m, x: x.mean(1)),
    exact("mean-keepdim", lambda m, x: x.mean(-1, keepdim=True), IMG),
    exact("mean-two", lambda m, x: torch.mean(x, (2, 3)), IMG),
    exact("mean-two-positional-keepdim", lambda m, x: torch.mean(x, (-1, 1), True), IMG),
    exact("mean-kwargs", lambda m, x: torch.mean(input=x, dim=[1, 2, 3]), IMG),
    exact("sum", lambda m, x: x.sum(1)),
    exact("sum-keepdim", lambda m, x: torch.sum(x, dim=-2, keepdim=True), IMG),
    exact("sum-two", lambda m, x: x.sum((1, 3)), IMG),
    exact("slice", lambda m, x: x[:, 1:3]),
    exact("slice-step", lambda m, x: x[:, ::2, :, 1], IMG),
    exact("slice-int-none", lambda m, x: x[:, None, 0], IMG),
    exact("slice-ellipsis", lambda m, x: x[..., 1:], IMG),
    exact("slice-ellipsis-last", lambda m, x: x[..., 0]),
    exact("pad", lambda m, x: F.pad(x, (1, 2))),
    exact("pad-image", lambda m, x: F.pad(x, (1, 0, 2, 1), "constant", 0.0), IMG),
    exact("pad-crop", lambda m, x: F.pad(input=x, pad=(-1, 1)), IMG),
    loose("split-and-join", lambda m, x: torch.cat(x.chunk(2, 1), 1)[:, :2]),
    exact("take-one-chunk", lambda m, x: x.chunk(2, dim=1)[0]),
    exact("take-last-of-split", lambda m, x: torch.split(x, [1, 3], dim=1)[-1]),
    exact("take-one-of-split-size", lambda m, x: x.split(3, -1)[0], IMG),
    exact("unbind", lambda m, x: x.unbind(1)[1], IMG),
    exact("unbind-last", lambda m, x: torch.unbind(x, dim=-1)[0]),
    exact("expand-by-adding-zeros", lambda m, x: x.unsqueeze(1) + m.z, z=torch.zeros(5, 4)),
    exact("x+x+x", lambda m, x: x + x + x),
    loose("halves-added", lambda m, x: x[:, :2] + x[:, 2:]),
    loose("broadcast-activations", lambda m, x: x + x.mean((2, 3), keepdim=True), IMG),
    loose("broadcast-first-row", lambda m, x: x[:, :1] + x, IMG),
    loose("broadcast-both", lambda m, x: x[:, :, None] + x[:, None, :]),
    loose("broadcast-sub-alpha", lambda m, x: torch.sub(x[:, :1], x, alpha=4.0), IMG),
    loose("chunks-recombined", lambda m, x: x.chunk(2, 1)[0] * 2 + x.chunk(2, 1)[1]),
    loose("chunk-parts-joined", lambda m, x: _join(torch.chunk(x, 2, 1))),
    loose("chunk-whole-and-part", lambda m, x: _whole_and_part(x.chunk(2, 1))),
    loose("stack-of-unbind", lambda m, x: torch.stack(x.unbind(1), -1), IMG),
    loose("nested-splits", lambda m, x: x.chunk(2, 3)[0].split([1, 2], 2)[1].unbind(1)[0], IMG),
    loose("gate-by-mean", lambda m, x: x * x.mean(1, keepdim=True)),
    loose("outer-product", lambda m, x: x[:, :, None] * x[:, None, :]),
    loose("matmul", lambda m, x: torch.matmul(x, x.transpose(2, 3)), IMG),
    loose("matmul-kwargs", lambda m, x: torch.matmul(other=x, input=x.transpose(2, 3)), IMG),
    loose("matmul-operator", lambda m, x: x @ x.transpose(1, 2), (3, 4)),
    loose("bmm", lambda m, x: torch.bmm(x * 0.5, x.transpose(1, 2)), (3, 4)),
    loose("bmm-method", lambda m, x: x.bmm(x.transpose(1, 2)), (3, 4)),
    loose("softmax", lambda m, x: torch.softmax(x, 1)),
    loose("softmax-kwargs", lambda m, x: F.softmax(input=x, dim=-1), IMG),
    loose("softmax-method", lambda m, x: x.softmax(dim=2), IMG),
    loose("attention", lambda m, x: torch.softmax(x @ x.transpose(1, 2) * 0.5, -1) @ x, (3, 4)),
]


def _join(parts: Any) -> torch.Tensor:
    a, b = parts
    return torch.cat([b * 3.0, a, a], dim=1)


def _whole_and_part(parts: Any) -> torch.Tensor:
    return torch.cat([torch.cat(parts, dim=1), parts[0], parts[-1] * 2], 1)


@pytest.mark.parametrize(("function", "shape", "attributes", "least"), LINEAR)
def test_function_rules_hold_under_attack(function: Any, shape: Any, attributes: Any, least: tuple[float, float]) -> None:
    model = Forward(function, **attributes)
    report = attack(model, 0.7, input_shape=shape, input_norm=1.3, steps=12, draws=3)
    outputs = [row for row in report.rows if row.kind == "activation"]
    assert not outputs or outputs[-1].tightness >= least[0], str(report)
    assert report.tightness("input") >= least[1], str(report)


@pytest.mark.parametrize(
    ("function", "least"),
    [
        pytest.param(lambda m, x: x * x, 0.99, id="square"),
        pytest.param(lambda m, x: torch.mul(x, other=x), 0.99, id="square-kwargs"),
        pytest.param(lambda m, x: (x * x) * x, 0.99, id="cube"),
    ],
)
def test_products_of_activations_are_reached_by_impulses(function: Any, least: float) -> None:
    report = attack(Forward(function), 1.0, input_shape=V, input_norm=1.3)
    assert report.tightness("activation") >= least
    assert report.tightness("input") >= least


@pytest.mark.parametrize(
    ("function", "shape", "constant"),
    [
        pytest.param(lambda m, x: x + 0.5, V, {}, id="number"),
        pytest.param(lambda m, x: torch.add(x, other=0.5), V, {}, id="number-kwarg"),
        pytest.param(lambda m, x: torch.add(x, other=0.25, alpha=-2), V, {}, id="number-alpha"),
        pytest.param(lambda m, x: 1 - x, V, {}, id="rsub"),
        pytest.param(lambda m, x: x - m.c, V, {"c": C}, id="buffer"),
        pytest.param(lambda m, x: x.sub(m.c, alpha=3), V, {"c": C}, id="buffer-alpha"),
        pytest.param(lambda m, x: m.c + x, IMG, {"c": C}, id="buffer-broadcast"),
        pytest.param(lambda m, x: torch.add(x, other=m.c), IMG, {"c": kaiming((2, 1, 1))}, id="buffer-kwarg-channels"),
        pytest.param(lambda m, x: x + m.c, IMG, {"c": kaiming((1, 2, 3, 4))}, id="buffer-batch-of-one"),
        pytest.param(lambda m, x: x + m.c, IMG, {"c": torch.tensor(0.5)}, id="buffer-scalar"),
        pytest.param(lambda m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), V, {}, id="tensor-made-in-forward"),
    ],
)
def test_adding_constants_shifts_by_their_norm_over_the_whole_example(function: Any, shape: Any, constant: Any) -> None:
    """Exact: x aligned with the constant. A constant that is dropped, or counted once for all its copies, fails here."""
    model = Forward(function, **constant)
    bound = analyse(model.double(), 1.0, input_shape=shape, input_norm=0.5).output.norm
    zero = model(torch.zeros(1, *shape, dtype=torch.float64)).norm()
    assert float(zero) + 0.5 == pytest.approx(bound, rel=1e-9)
    attack(model, 1.0, input_shape=shape, input_norm=0.5, steps=10, draws=2)


P = torch.nn.Parameter


@pytest.mark.parametrize(
    ("function", "parameter", "factor"),
    [
        pytest.param(lambda m, x: x + m.p, (4,), math.sqrt(6), id="last-dimension"),
        pytest.param(lambda m, x: m.p + x, (2, 3, 4), 1.0, id="full"),
        pytest.param(lambda m, x: x - m.p, (2, 1, 1), math.sqrt(12), id="channels"),
        pytest.param(lambda m, x: m.p - x, (1, 2, 3, 4), 1.0, id="batch-of-one"),
        pytest.param(lambda m, x: torch.add(x, other=m.p), (3, 1), math.sqrt(8), id="kwarg"),
        pytest.param(lambda m, x: torch.add(x, m.p, alpha=-3), (4,), 3 * math.sqrt(6), id="alpha"),
        pytest.param(lambda m, x: torch.sub(x, other=m.p, alpha=2), (), 2 * math.sqrt(24), id="scalar-kwarg-alpha"),
        pytest.param(lambda m, x: (x + m.p) + m.p, (4,), 2 * math.sqrt(6), id="used-twice"),
        pytest.param(lambda m, x: x.sum(1) + m.p, (1, 4), math.sqrt(3), id="after-a-sum"),
    ],
)
def test_parameters_added_by_themselves_count_all_their_copies(function: Any, parameter: Any, factor: float) -> None:
    model = Forward(function, p=P(torch.zeros(parameter, dtype=torch.float64)))
    report = attack(model, 0.7, input_shape=IMG, input_norm=1.0, steps=15, draws=3)
    (row,) = [row for row in report.rows if row.kind == "parameter"]
    assert row.bound == pytest.approx(0.7 * factor, rel=1e-12)
    assert row.tightness >= 0.99


def test_a_parameter_shared_by_a_module_and_a_function_counts_both_uses() -> None:
    linear = torch.nn.Linear(4, 4)
    model = Forward(lambda m, x: m.cap(m.linear(x)) + m.linear.bias, linear=linear, cap=nn.Boundary(norm=1.0))
    report = attack(model, 1.0, input_shape=V, input_norm=2.0)
    (bias,) = [row for row in report.rows if row.kind == "parameter" and row.name == "linear.bias"]
    assert bias.bound == pytest.approx(2.0)
    assert bias.tightness > 0.9


def test_tied_weights_and_repeated_modules_add_up_and_reach_their_sum() -> None:
    """Δ = Σ over the uses: y = W·W·x has the gradient 2·G·X at a rank-one W aligned with x and v."""
    layer = nn.SpectralLinear(4, 4, bias=False)
    for uses in (2, 3):
        report = attack(nn.Sequential(nn.BoundedInput((4,)), *[layer] * uses), 1.0)
        (row,) = [row for row in report.rows if row.kind == "parameter"]
        assert row.bound == pytest.approx(uses)
        assert row.tightness > 0.99
    tied = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 4), nn.SpectralLinear(4, 4))
    tied[2].weight = tied[1].weight
    report = attack(tied, 1.0)
    (row,) = [row for row in report.rows if row.kind == "parameter" and row.name == "1.weight"]
    assert row.bound == pytest.approx(1.0 + 1.1)
    assert row.tightness > 0.99


def test_fan_out_to_two_branches_sums_their_cotangents() -> None:
    model = Forward(
        lambda m, x: _two(m, m.stem(x)),
        stem=nn.SpectralLinear(4, 4),
        a=nn.SpectralLinear(4, 3),
        b=nn.SpectralLinear(4, 3),
    )
    report = attack(model, 1.0, input_shape=V, input_norm=1.0)
    assert report.tightness("parameter") > 0.99
    stem = next(row for row in report.rows if row.name == "stem.weight")
    assert stem.bound == pytest.approx(2.0)


def _two(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.a(h) + m.b(h)


def test_disjoint_split_combines_cotangents_as_squares() -> None:
    """Two halves of one tensor, each used once: √(G²+G²), reached; the plain sum would be √2 too large."""
    model = Forward(lambda m, x: _halves(m.stem(x).chunk(2, 1)), stem=nn.SpectralLinear(4, 4, bias=False))
    report = attack(model, 1.0, input_shape=V, input_norm=1.0)
    (row,) = [row for row in report.rows if row.kind == "parameter"]
    assert row.bound == pytest.approx(math.sqrt(2))
    assert row.tightness > 0.99


def _halves(parts: Any) -> torch.Tensor:
    a, b = parts
    return a + b
