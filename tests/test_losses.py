"""Losses: the constants of theory.md's section 4 attacked, values against torch, examples kept apart."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lipdp import losses
from lipdp.errors import ConfigurationError, DataError, LipdpError, UnsupportedError

B = 192


@dataclass(frozen=True)
class Case:
    """A loss, how to draw targets for it, and whether its constant is reached (within 1%)."""

    name: str
    loss: losses.Loss
    target: str  # "class", "probability", "binary", "real"
    outputs: tuple[int, ...]
    expected: Any  # K -> the table's constant
    exact: bool = True
    norm: float = math.inf
    tail: tuple[int, ...] = ()  # positions


def smoothed(K: int, e: float) -> float:
    q = torch.full((K,), e / K, dtype=torch.float64)
    q[0] += 1 - e
    p = torch.zeros(K, dtype=torch.float64)
    p[1] = 1
    return float((p - q).norm())


def hkr(alpha: float, mean: bool) -> Any:
    def constant(K: int) -> float:
        if K == 1:
            return 1 + alpha
        a = alpha / K if mean else alpha
        return math.sqrt((a + 1) ** 2 + (K - 1) * (a + 1 / (K - 1)) ** 2)

    return constant


R2 = math.sqrt(2)
MANY = (2, 3, 10)
ANY = (1, 2, 7)
CASES = [
    Case("ce", losses.CrossEntropy(), "class", MANY, lambda K: R2),
    Case("ce-soft", losses.CrossEntropy(tau=3.0), "probability", MANY, lambda K: R2),
    Case("ce-tau", losses.CrossEntropy(tau=20.0), "class", MANY, lambda K: R2),
    Case("ce-unscaled", losses.CrossEntropy(tau=5.0, scaled=False), "class", MANY, lambda K: 5 * R2),
    Case("ce-smooth", losses.CrossEntropy(label_smoothing=0.2), "class", MANY, lambda K: smoothed(K, 0.2)),
    Case("ce-smooth-soft", losses.CrossEntropy(label_smoothing=0.5), "probability", MANY, lambda K: smoothed(K, 0.5)),
    Case("ce-weights", losses.CrossEntropy(class_weights=[0.5, 3.0, 0.1]), "class", (3,), lambda K: 3 * R2),
    Case("ce-weights-soft", losses.CrossEntropy(class_weights=[0.5, 3.0, 0.1]), "probability", (3,), lambda K: 3 * R2),
    Case(
        "ce-weights-smooth",
        losses.CrossEntropy(class_weights=[0.5, 3.0, 0.1], label_smoothing=0.3),
        "class",
        (3,),
        lambda K: 3 * smoothed(3, 0.3),
        exact=False,
    ),
    Case("ce-positions-mean", losses.CrossEntropy(), "class", (3,), lambda K: math.sqrt(2 / 4), tail=(2, 2)),
    Case("ce-positions-sum", losses.CrossEntropy(reduction="sum"), "class", (3,), lambda K: math.sqrt(2 * 3), tail=(3,)),
    Case("bce", losses.BCE(tau=4.0), "binary", ANY, lambda K: 1 / math.sqrt(K)),
    Case("bce-sum", losses.BCE(reduction="sum"), "binary", ANY, lambda K: math.sqrt(K)),
    Case("bce-pos", losses.BCE(tau=2.0, pos_weight=3.0), "binary", (1,), lambda K: 3.0),
    Case("bce-pos-small", losses.BCE(pos_weight=0.3), "binary", (1,), lambda K: 1.0),
    Case("bce-pos-each", losses.BCE(pos_weight=[3.0, 0.5]), "binary", (2,), lambda K: math.hypot(3, 1) / 2),
    Case("kr", losses.KR(), "binary", (1,), lambda K: 1.0),
    Case("multiclass-kr", losses.MulticlassKR(), "class", MANY, lambda K: math.sqrt(1 + 1 / (K - 1))),
    Case("hinge", losses.Hinge(margin=2.0), "binary", (1,), lambda K: 1.0),
    Case("multiclass-hinge", losses.MulticlassHinge(margin=5.0), "class", MANY, lambda K: 1 / math.sqrt(K)),
    Case("multiclass-hinge-sum", losses.MulticlassHinge(2.0, reduction="sum"), "class", MANY, math.sqrt),
    Case("hkr", losses.HKR(10.0, 2.0), "class", MANY, hkr(10, True)),
    Case("hkr-small", losses.HKR(0.5), "class", MANY, hkr(0.5, True)),
    Case("hkr-sum", losses.HKR(3.0, 1.0, reduction="sum"), "class", MANY, hkr(3, False)),
    Case("hkr-binary", losses.HKR(3.0), "binary", (1,), hkr(3, True)),
    Case("cosine", losses.CosineSimilarity(0.25), "real", MANY, lambda K: 4.0),
    Case("cosine-class", losses.CosineSimilarity(2.0), "class", MANY, lambda K: 0.5),
    Case("mae", losses.MAE(), "real", ANY, lambda K: 1 / math.sqrt(K)),
    Case("mae-sum", losses.MAE(reduction="sum"), "real", ANY, math.sqrt),
    Case("huber", losses.Huber(0.5), "real", ANY, lambda K: 0.5 * math.sqrt(K)),
    Case("huber-mean", losses.Huber(3.0, reduction="mean"), "real", ANY, lambda K: 3 / math.sqrt(K)),
    Case("smooth-l1", losses.SmoothL1(0.3), "real", ANY, math.sqrt),
    Case("mse", losses.MSE(1.5), "real", ANY, lambda K: 2 * (3 + 1.5) / K, norm=3.0),
    Case("mse-sum", losses.MSE(1.5, reduction="sum"), "real", ANY, lambda K: 2 * (3 + 1.5), norm=3.0),
]
RUNS = [pytest.param(case, K, id=f"{case.name}-{K}") for case in CASES for K in case.outputs]


def positions(case: Case) -> int:
    return math.prod(case.tail)


def constant(case: Case, K: int) -> float:
    return case.loss.lipschitz_for(K, case.norm, positions=positions(case))


def draw_targets(case: Case, K: int, generator: torch.Generator, rows: int = B) -> Tensor:
    shape = (rows, K, *case.tail)
    if case.target == "class":
        return torch.randint(K, (rows, *case.tail), generator=generator)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.target == "probability":
        return torch.softmax(10 * noise, 1)
    if case.target == "binary":
        return (noise > 0).double()
    return noise * 10 ** (3 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1)


def draw_outputs(case: Case, K: int, generator: torch.Generator, rows: int = B) -> Tensor:
    z = torch.randn(rows, K, *case.tail, generator=generator, dtype=torch.float64)
    exponent = torch.rand(rows, generator=generator, dtype=torch.float64) * 5 - 2
    return ball(z * (10**exponent).view(-1, *[1] * (z.ndim - 1)), case.norm)


def ball(z: Tensor, norm: float) -> Tensor:
    if math.isinf(norm):
        return z
    size = z.flatten(1).norm(dim=1).view(-1, *[1] * (z.ndim - 1))
    return z * (norm / size).clamp(max=1)


def gradient_norms(loss: losses.Loss, z: Tensor, y: Tensor, graph: bool = False) -> Tensor:
    if not graph:
        z = z.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(z, y).sum(), z, create_graph=graph)
    return g.reshape(len(g), -1).norm(dim=1)


def attack(case: Case, K: int, y: Tensor, generator: torch.Generator, steps: int = 25) -> float:
    """The largest gradient found by random search, then by ascent on its norm from the same points."""
    z = draw_outputs(case, K, generator, rows=len(y))
    best = float(gradient_norms(case.loss, z, y).max())
    for _ in range(steps):
        z = z.detach().requires_grad_()
        norms = gradient_norms(case.loss, z, y, graph=True)
        best = max(best, float(norms.detach().max()))
        if not norms.requires_grad:  # piecewise linear: nothing to climb
            break
        (up,) = torch.autograd.grad(norms.sum(), z, allow_unused=True)
        if up is None:
            break
        up = torch.nan_to_num(up)
        size = up.flatten(1).norm(dim=1).clamp(min=1e-300).view(-1, *[1] * (z.ndim - 1))
        step = 0.3 * (1 + z.detach().flatten(1).norm(dim=1).view_as(size))
        z = ball(z.detach() + step * up / size, case.norm)
    return max(best, float(gradient_norms(case.loss, z, y).max()))


def directed(case: Case, K: int, y: Tensor) -> Tensor:
    """Outputs as wrong as can be for these targets: away from the truth, far or at the norm's bound."""
    far = case.norm if math.isfinite(case.norm) else 50.0
    if case.target == "class":
        truth = F.one_hot(y, K).double().movedim(-1, 1)
        z = -50.0 * truth
        z.narrow(1, 0, 1).add_(50.0 * (1 - truth.narrow(1, 0, 1)))
        z.narrow(1, K - 1, 1).add_(50.0 * truth.narrow(1, 0, 1))
        if isinstance(case.loss, losses.CosineSimilarity):
            return 1e-3 * torch.ones_like(z)
        if isinstance(case.loss, losses.MulticlassHinge | losses.HKR):
            z = far * (1 - 2 * truth)
        return z
    if case.target == "probability":
        return 50.0 * F.one_hot(y.argmin(1), K).double()
    if case.target == "binary":
        return far * (1 - 2 * y)
    return ball(-1e6 * y, case.norm) if not isinstance(case.loss, losses.CosineSimilarity) else 1e-6 * y


@pytest.mark.parametrize(("case", "K"), RUNS)
def test_constant_is_the_tables_holds_and_is_reached(case: Case, K: int) -> None:
    generator = torch.Generator().manual_seed(K)
    bound = constant(case, K)
    assert bound == pytest.approx(case.expected(K), rel=1e-12)
    y = draw_targets(case, K, generator)
    found = max(attack(case, K, y, generator), float(gradient_norms(case.loss, directed(case, K, y), y).max()))
    assert found <= bound * (1 + 1e-12)
    if case.exact:
        assert found >= 0.99 * bound


def hostile(case: Case, K: int, generator: torch.Generator) -> Tensor:
    """Targets outside what the proof assumes."""
    shape = (B, K, *case.tail)
    kinds = torch.tensor([0.0, -1.0, 2.0, 0.5, -1e300, 1e300, 1e-310, math.inf, -math.inf, math.nan, 1e-30, 37.0])
    kinds = kinds.double()
    mixed = kinds[torch.randint(len(kinds), shape, generator=generator)]
    same = kinds[torch.arange(B) % len(kinds)].view(B, *[1] * (len(shape) - 1)).expand(shape)
    return torch.where((torch.arange(B) % 2 == 0).view(B, *[1] * (len(shape) - 1)), mixed, same)


@pytest.mark.parametrize(("case", "K"), [run for run in RUNS if run.values[0].target != "class"])
def test_hostile_targets_buy_no_larger_gradient(case: Case, K: int) -> None:
    generator = torch.Generator().manual_seed(1)
    y = hostile(case, K, generator)
    for _ in range(3):
        norms = gradient_norms(case.loss, draw_outputs(case, K, generator), y)
        assert torch.isfinite(norms).all()
        assert float(norms.max()) <= constant(case, K) * (1 + 1e-12)


@pytest.mark.parametrize(
    "loss", [case.loss for case in CASES if case.target == "class" and not case.loss.__dict__.get("class_weights")]
)
@pytest.mark.parametrize("wrong", [-1, 4, 255, -100])
def test_class_out_of_range_is_refused(loss: losses.Loss, wrong: int) -> None:
    with pytest.raises(DataError, match="0 to 3"):
        loss(torch.zeros(3, 4), torch.tensor([0, wrong, 3]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lipschitz_covers_every_number_of_outputs(case: Case) -> None:
    weights = getattr(case.loss, "class_weights", None) or getattr(case.loss, "pos_weight", None)
    if isinstance(case.loss, losses.KR | losses.Hinge):
        counts = [1]
    elif isinstance(weights, tuple):
        counts = [len(weights)]
    else:
        low = 1 if case.target in ("binary", "real") or isinstance(case.loss, losses.HKR) else 2
        counts = [*range(low, 40), 1000, 10**6]
    values = [case.loss.lipschitz_for(K, norm) for K in counts for norm in (0.0, 1.0, math.inf)]
    assert max(values) <= case.loss.lipschitz
    if not isinstance(case.loss, losses.MSE) and not getattr(case.loss, "label_smoothing", 0):
        assert math.isinf(case.loss.lipschitz) or max(values) == pytest.approx(case.loss.lipschitz, rel=1e-12)


def test_lipschitz_in_closed_form() -> None:
    assert losses.CrossEntropy(label_smoothing=0.1).lipschitz == R2
    assert losses.CrossEntropy(tau=7.0, scaled=False).lipschitz == pytest.approx(7 * R2)
    assert losses.CrossEntropy(reduction="sum").lipschitz == math.inf
    assert losses.CrossEntropy(reduction="sum").lipschitz_for(10) == math.inf
    assert losses.BCE(tau=9.0).lipschitz == losses.KR().lipschitz == losses.Hinge().lipschitz == 1
    assert losses.MulticlassKR().lipschitz == R2
    assert losses.MulticlassHinge(reduction="sum").lipschitz == losses.MAE(reduction="sum").lipschitz == math.inf
    assert losses.MSE(1.0).lipschitz == losses.MSE(1.0).lipschitz_for(3) == math.inf
    assert losses.MSE(math.inf).lipschitz_for(3, 1.0) == math.inf
    assert losses.HKR(10.0).lipschitz == 11  # one output is the worst
    assert losses.HKR(0.5).lipschitz == pytest.approx(math.sqrt(0.125 + 1 + 2))  # two outputs are
    assert losses.HKR(1.0, reduction="sum").lipschitz == math.inf


@given(st.floats(0, 100), st.integers(2, 500))
def test_hkr_mean_in_its_expanded_form_falls_with_the_number_of_outputs(alpha: float, K: int) -> None:
    value = losses.HKR(alpha).lipschitz_for(K)
    assert value == pytest.approx(math.sqrt(alpha**2 / K + 4 * alpha / K + 1 + 1 / (K - 1)), rel=1e-12)
    assert losses.HKR(alpha).lipschitz_for(K + 1) < value


# ------------------------------------------------------------------------------------------------------------ values

Z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 3, 4, 0])
T = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
W = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.5], dtype=torch.float64)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weight", [None, W])
def test_cross_entropy_equals_torch(smoothing: float, weight: Tensor | None) -> None:
    options: dict[str, Any] = {"label_smoothing": smoothing, "weight": weight, "reduction": "none"}
    loss = losses.CrossEntropy(4.0, smoothing, weight)
    same(loss(Z, Y), F.cross_entropy(4 * Z, Y, **options) / 4)
    same(losses.CrossEntropy(4.0, smoothing, weight, scaled=False)(Z, Y), F.cross_entropy(4 * Z, Y, **options))
    same(loss(Z, T.softmax(1)), F.cross_entropy(4 * Z, T.softmax(1), **options) / 4)
    same(loss(Z, Y), loss(Z, F.one_hot(Y, 5).double()))
    z, y = torch.stack([Z, T, Z + T], 2), torch.stack([Y, Y.flip(0), Y], 1)
    expected = F.cross_entropy(z, y, **options)
    same(losses.CrossEntropy(1.0, smoothing, weight)(z, y), expected.mean(1))
    same(losses.CrossEntropy(1.0, smoothing, weight, reduction="sum")(z, y), expected.sum(1))
    y[0, 1] = -100
    expected = F.cross_entropy(z, y, **options)
    same(losses.CrossEntropy(1.0, smoothing, weight, ignore_index=-100)(z, y), expected.mean(1))


def test_other_values_equal_their_references() -> None:
    y01 = (T > 0).double()
    elements = F.binary_cross_entropy_with_logits(3 * Z, y01, reduction="none") / 3
    same(losses.BCE(3.0)(Z, y01), elements.mean(1))
    far = 30 * Z.sign()
    same(losses.BCE()(far, y01), F.binary_cross_entropy_with_logits(far, y01, reduction="none").mean(1))
    same(losses.BCE(3.0, reduction="sum")(Z, 2 * y01 - 1), elements.sum(1))
    elements = F.binary_cross_entropy_with_logits(Z, T.sigmoid(), pos_weight=W, reduction="none")
    same(losses.BCE(pos_weight=W)(Z, T.sigmoid()), elements.mean(1))
    z, y = Z[:, 0], y01[:, 0]
    for targets in (y, 2 * y - 1, y.long(), y.bool(), y[:, None]):
        same(losses.KR()(z, targets), -(2 * y - 1) * z)
        same(losses.Hinge(3.0)(z[:, None], targets), (1.5 - (2 * y - 1) * z).clamp(min=0))
        same(losses.HKR(2.0, 3.0)(z, targets), 2 * losses.Hinge(3.0)(z, y) + losses.KR()(z, y))
        same(losses.BCE()(z[:, None], targets), F.binary_cross_entropy_with_logits(z, y, reduction="none"))
    kr = torch.stack([-Z[i, c] + (Z[i].sum() - Z[i, c]) / 4 for i, c in enumerate(Y.tolist())])
    same(losses.MulticlassKR()(Z, Y), kr)
    signs = 2 * F.one_hot(Y, 5) - 1
    same(losses.MulticlassHinge(2.0)(Z, Y), (1 - signs * Z).clamp(min=0).mean(1))
    same(losses.HKR(7.0, 2.0)(Z, Y), 7 * losses.MulticlassHinge(2.0)(Z, Y) + kr)
    same(
        losses.HKR(7.0, 2.0, reduction="sum")(Z, Y),
        7 * losses.MulticlassHinge(2.0, reduction="sum")(Z, Y) + kr,
    )
    same(losses.CosineSimilarity(1e-3)(Z, T), -F.cosine_similarity(Z, T))
    same(losses.CosineSimilarity(1e3)(Z, Y), -Z.gather(1, Y[:, None])[:, 0] / 1e3)
    same(losses.MAE()(Z, T), (Z - T).abs().mean(1))
    same(losses.Huber(0.7)(Z, T), F.huber_loss(Z, T, delta=0.7, reduction="none").sum(1))
    same(losses.SmoothL1(0.7, "mean")(Z, T), F.smooth_l1_loss(Z, T, beta=0.7, reduction="none").mean(1))
    same(losses.MSE(100.0)(Z, T), (Z - T).square().mean(1))
    same(losses.MSE(100.0, "sum")(Z[:, 0], T[:, :1]), (Z - T)[:, 0].square())


def test_mse_projects_large_targets_only() -> None:
    y = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    same(losses.MSE(1.0, "sum")(torch.zeros(3, 2), y), torch.tensor([1.0, 0.25, 0.0]))


def test_probabilities_that_are_none_are_brought_back() -> None:
    loss = losses.CrossEntropy()
    same(loss(Z, 3 * F.one_hot(Y, 5).double()), loss(Z, Y))
    same(loss(Z, torch.zeros(6, 5)), torch.zeros(6, dtype=torch.float64))


# ------------------------------------------------------------------------------------------- examples are kept apart


@pytest.mark.parametrize(("case", "K"), RUNS)
def test_an_example_does_not_change_the_others(case: Case, K: int) -> None:
    generator = torch.Generator().manual_seed(2)
    z, y = draw_outputs(case, K, generator, 6), draw_targets(case, K, generator, 6)
    before = case.loss(z, y)
    assert before.shape == (6,)
    z2, y2 = z.clone(), y.clone()
    z2[3], y2[3] = draw_outputs(case, K, generator, 1)[0], draw_targets(case, K, generator, 1)[0]
    kept = [0, 1, 2, 4, 5]
    assert torch.equal(case.loss(z2, y2)[kept], before[kept])
    same(torch.cat([case.loss(z[i : i + 1], y[i : i + 1]) for i in range(6)]), before)
    assert case.loss(z[:0], y[:0]).shape == (0,)


@pytest.mark.parametrize(
    "loss", [losses.KR(), losses.HKR(5.0), losses.MulticlassKR(), losses.CrossEntropy(class_weights=[1.0, 9.0])]
)
def test_trap_5_class_counts_of_the_batch_do_not_matter(loss: losses.Loss) -> None:
    """A lone positive among many negatives weighs what it weighs among positives."""
    K = 1 if isinstance(loss, losses.KR) else 2
    z = torch.randn(64, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lone, crowd = torch.zeros(64, dtype=torch.long), torch.ones(64, dtype=torch.long)
    lone[0] = 1
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    loss(a, lone).sum().backward()
    loss(b, crowd).sum().backward()
    assert torch.equal(a.grad[0], b.grad[0])  # type: ignore[index]
    assert float(a.grad[0].norm()) <= loss.lipschitz_for(K) * (1 + 1e-12)  # type: ignore[index]


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 20.0), st.floats(0.05, 3.0), st.floats(0.05, 1.0), st.integers(0, 2**31))
def test_proposition_2_clipped_bce_steps_along_kr(tau: float, bound: float, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    C = share * float(torch.sigmoid(torch.tensor(-tau * bound, dtype=torch.float64)))
    z = (bound * (2 * torch.rand(32, generator=generator, dtype=torch.float64) - 1)).requires_grad_()
    y = torch.randint(2, (32,), generator=generator)
    (g,) = torch.autograd.grad(losses.BCE(tau)(z, y).sum(), z)
    (kr,) = torch.autograd.grad(losses.KR()(z, y).sum(), z)
    clipped = g * (C / g.abs()).clamp(max=1)
    torch.testing.assert_close(clipped, C * kr, rtol=1e-9, atol=0)


# ------------------------------------------------------------------------------------------------- shapes, types, torch


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_low_precision_is_promoted_and_inputs_are_left_alone(case: Case) -> None:
    K = case.outputs[-1]
    generator = torch.Generator().manual_seed(3)
    y = draw_targets(case, K, generator, 8)
    for dtype in (torch.float16, torch.bfloat16):
        z = draw_outputs(case, K, generator, 8).clamp(-100, 100).to(dtype)
        z0, y0 = z.clone(), y.clone()
        values = case.loss(z, y)
        assert values.dtype == torch.float32
        assert torch.equal(z, z0)
        assert torch.equal(y, y0)
        torch.testing.assert_close(values, case.loss(z.float(), y), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vmap_of_grad_gives_the_per_example_gradients(case: Case) -> None:
    K = case.outputs[-1]
    generator = torch.Generator().manual_seed(4)
    z, y = draw_outputs(case, K, generator, 5), draw_targets(case, K, generator, 5)

    def one(z: Tensor, y: Tensor) -> Tensor:
        return case.loss(z[None], y[None])[0]

    each = torch.func.vmap(torch.func.grad(one))(z, y)
    z = z.requires_grad_()
    (whole,) = torch.autograd.grad(case.loss(z, y).sum(), z)
    same(each, whole)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (losses.BCE(), torch.zeros(3), torch.zeros(4)),
        (losses.BCE(), torch.zeros(3, 2), torch.zeros(3)),
        (losses.BCE(pos_weight=[1.0, 2.0]), torch.zeros(3, 3), torch.zeros(3, 3)),
        (losses.MAE(), torch.zeros(3, 1), torch.zeros(1, 3)),
        (losses.KR(), torch.zeros(3, 2), torch.zeros(3, 2)),
        (losses.MulticlassKR(), torch.zeros(3, 1), torch.zeros(3).long()),
        (losses.HKR(1.0), torch.zeros(3, 2, 2), torch.zeros(3, 2).long()),
        (losses.MulticlassHinge(), torch.zeros(3, 2), torch.zeros(3)),
        (losses.CrossEntropy(), torch.zeros(3), torch.zeros(3).long()),
        (losses.CrossEntropy(), torch.zeros(3, 1), torch.zeros(3).long()),
        (losses.CrossEntropy(), torch.zeros(3, 2), torch.zeros(3)),
        (losses.CrossEntropy(), torch.zeros(3, 2), torch.zeros(2).long()),
        (losses.CrossEntropy(), torch.zeros(3, 2).long(), torch.zeros(3).long()),
        (losses.CrossEntropy(reduction="none"), torch.zeros(3, 2, 4), torch.zeros(3, 4).long()),
        (losses.CrossEntropy(class_weights=[1.0, 2.0]), torch.zeros(3, 3), torch.zeros(3).long()),
        (losses.CosineSimilarity(1.0), torch.zeros(3, 2, 2), torch.zeros(3, 2).long()),
    ],
)
def test_wrong_shapes_are_refused_never_broadcast(loss: losses.Loss, outputs: Tensor, targets: Tensor) -> None:
    with pytest.raises(DataError):
        loss(outputs, targets)


@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.CrossEntropy(tau=0.0),
        lambda: losses.CrossEntropy(tau=math.inf),
        lambda: losses.CrossEntropy(tau=math.nan),
        lambda: losses.CrossEntropy(tau="1"),  # type: ignore[arg-type]
        lambda: losses.CrossEntropy(label_smoothing=1.1),
        lambda: losses.CrossEntropy(label_smoothing=-0.1),
        lambda: losses.CrossEntropy(class_weights=[1.0, -1.0]),
        lambda: losses.CrossEntropy(class_weights=[1.0, math.inf]),
        lambda: losses.CrossEntropy(class_weights=[0.0, 0.0]),
        lambda: losses.CrossEntropy(class_weights=[1.0]),
        lambda: losses.CrossEntropy(class_weights="balanced"),  # type: ignore[arg-type]
        lambda: losses.CrossEntropy(reduction="batchmean"),  # type: ignore[arg-type]
        lambda: losses.BCE(pos_weight=-1.0),
        lambda: losses.BCE(reduction="none"),  # type: ignore[arg-type]
        lambda: losses.HKR(-1.0),
        lambda: losses.HKR(1.0, margin=0.0),
        lambda: losses.CosineSimilarity(0.0),
        lambda: losses.Huber(0.0),
        lambda: losses.MSE(-1.0),
        lambda: losses.CrossEntropy().lipschitz_for(1),
        lambda: losses.CrossEntropy().lipschitz_for(0),
        lambda: losses.CrossEntropy().lipschitz_for(2, -1.0),
        lambda: losses.CrossEntropy().lipschitz_for(2, positions=0),
        lambda: losses.CrossEntropy(class_weights=[1.0, 2.0]).lipschitz_for(3),
        lambda: losses.CrossEntropy(reduction="none").lipschitz_for(3, positions=2),
        lambda: losses.BCE(pos_weight=[1.0, 2.0]).lipschitz_for(3),
        lambda: losses.KR().lipschitz_for(2),
        lambda: losses.MulticlassKR().lipschitz_for(1),
        lambda: losses.MulticlassKR().lipschitz_for(4, positions=3),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_hyperparameters_are_fixed_and_shown() -> None:
    loss = losses.HKR(2.0, margin=0.5)
    with pytest.raises(ConfigurationError, match="alpha is fixed"):
        loss.alpha = 100.0
    assert repr(loss) == "HKR(alpha=2.0, margin=0.5)"
    assert "class_weights=(1.0, 2.0)" in repr(losses.CrossEntropy(class_weights=torch.tensor([1, 2])))
    assert not losses.CrossEntropy(class_weights=[1.0, 2.0]).state_dict()
    assert repr(copy.deepcopy(loss)) == repr(pickle.loads(pickle.dumps(loss))) == repr(loss)


def test_constant_survives_a_low_precision_copy_of_the_weights() -> None:
    loss = losses.CrossEntropy(class_weights=[0.1, 1.0001]).half()
    y = torch.ones(4, dtype=torch.long)
    z = torch.tensor([[80.0, -80.0]], dtype=torch.float64).repeat(4, 1)
    assert float(gradient_norms(loss, z, y).max()) <= loss.lipschitz


# ------------------------------------------------------------------------------------------------------ torch's losses


@pytest.mark.parametrize(
    ("theirs", "z", "y"),
    [
        (nn.CrossEntropyLoss(reduction="none"), Z, Y),
        (nn.CrossEntropyLoss(weight=W, label_smoothing=0.1, reduction="none"), Z, Y),
        (nn.CrossEntropyLoss(reduction="none", ignore_index=2), Z, Y),
        (nn.CrossEntropyLoss(reduction="none"), Z, T.softmax(1)),
        (nn.BCEWithLogitsLoss(reduction="none"), Z, T.sigmoid()),
        (nn.BCEWithLogitsLoss(reduction="none", pos_weight=W), Z, T.sigmoid()),
        (nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor(2.0)), Z[:, 0], T[:, 0].sigmoid()),
        (nn.L1Loss(reduction="none"), Z, T),
        (nn.SmoothL1Loss(reduction="none", beta=0.4), Z, T),
        (nn.SmoothL1Loss(reduction="none", beta=0.0), Z, T),
        (nn.HuberLoss(reduction="none", delta=0.4), Z[:, 0], T[:, 0]),
        (nn.MSELoss(reduction="none"), Z, 1e3 * T),
    ],
)
def test_as_loss_equals_torch(theirs: nn.Module, z: Tensor, y: Tensor) -> None:
    ours = losses.as_loss(theirs)
    expected = theirs(z, y)
    same(ours(z, y), expected.sum(1) if expected.ndim > 1 else expected)
    K = z.shape[1] if z.ndim > 1 else 1
    assert float(gradient_norms(ours, 1e3 * z, y).max()) <= ours.lipschitz_for(K) * (1 + 1e-12)
    assert losses.as_loss(ours) is ours


def test_as_loss_of_plain_cross_entropy_has_a_constant_without_positions() -> None:
    assert losses.as_loss(nn.CrossEntropyLoss(reduction="none")).lipschitz_for(10) == pytest.approx(R2)
    assert losses.as_loss(nn.MSELoss(reduction="none")).lipschitz_for(1, 1.0) == math.inf


@pytest.mark.parametrize(
    ("theirs", "error", "says"),
    [
        (nn.CrossEntropyLoss(), ConfigurationError, "reduction='none'"),
        (nn.MSELoss(reduction="sum"), ConfigurationError, "sums over examples itself"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(2), reduction="none"), UnsupportedError, "pos_weight"),
        (nn.PoissonNLLLoss(reduction="none"), UnsupportedError, "subclass"),
        (F.cross_entropy, UnsupportedError, "cross_entropy"),
        (nn.CrossEntropyLoss, UnsupportedError, "instance"),
        (None, UnsupportedError, "subclass"),
    ],
)
def test_as_loss_refuses_with_the_way_out(theirs: object, error: type[LipdpError], says: str) -> None:
    with pytest.raises(error, match=says):
        losses.as_loss(theirs)


def test_as_loss_refuses_a_subclass_of_torchs() -> None:
    class Mixing(nn.CrossEntropyLoss):
        pass

    with pytest.raises(UnsupportedError):
        losses.as_loss(Mixing(reduction="none"))


def test_a_loss_of_ones_own() -> None:
    class Half(losses.Loss):
        @property
        def lipschitz(self) -> float:
            return 0.5

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 0.5 * outputs[:, 0]

    assert losses.as_loss(Half()).lipschitz_for(3) == 0.5
    with pytest.raises(UnsupportedError, match="does not define"):
        _ = losses.Loss().lipschitz
