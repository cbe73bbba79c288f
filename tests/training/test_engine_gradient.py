"""What the optimiser gets is (Σ_i g_i + noise)/b: against a loop over examples in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy import stats
from torch.nn import functional

import lipdp
from lipdp import losses, nn
from lipdp.bounds import Bound, Transfer, rule
from lipdp.errors import DataError, UnsupportedError
from lipdp.training.batches import microbatches

from .common import BATCH, Spy, empty, engine_of, first_gradient, free, planned, quiet, same, small, toy, weights


def reference_sum(model, x, y, tau=4.0):
    """Σ_i ∂(CE(τŷ_i)/τ)/∂θ, one example at a time, in float64."""
    wide = copy.deepcopy(model).double()
    total = {name: torch.zeros_like(p) for name, p in wide.named_parameters()}
    for i in range(len(x)):
        value = functional.cross_entropy(tau * wide(x[i : i + 1].double()), y[i : i + 1]) / tau
        for (name, _), g in zip(wide.named_parameters(), torch.autograd.grad(value, list(wide.parameters())), strict=True):
            total[name] += g
    return total


def clean_sum(model, batch, plan=None, **options):
    """The engine's gradient sum: what it hands over, hardly noised, times b."""
    found = first_gradient(model, quiet(model) if plan is None else plan, batch, **options)
    return {name: value.double() * BATCH for name, value in found.items()}


@pytest.mark.parametrize("count", [1, 7, BATCH, 57, 200])
@pytest.mark.parametrize("make", [free, small], ids=["free", "constrained"])
def test_the_sum_over_the_constant_batch_size(make, count):
    model = make()
    x, y = toy(count).tensors
    engine_of(model)  # projects
    expected, found = reference_sum(model, x, y), clean_sum(model, (x, y), microbatch_size=16)
    size = max(float(v.norm()) for v in expected.values())
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=3e-5 * max(1, size)), name
    if count != BATCH:  # the test sees a division by the realised batch size
        wrong = {name: value * BATCH / count for name, value in expected.items()}
        assert not all(torch.allclose(found[name], wrong[name], atol=1e-3 * size) for name in wrong)


def test_the_gradient_includes_planned_noise_and_the_constant_divisor():
    """What is left of it without the sum over b is noise of the planned size (chi-square at 1e-6)."""
    model, plan = free(), planned(free())
    batch = toy(40).tensors
    expected, found = reference_sum(model, *batch), first_gradient(model, plan, batch)
    left = torch.cat([((found[n].double() * BATCH - v) / plan.noise_stds[n]).flatten() for n, v in expected.items()])
    law = stats.chi2(left.numel())
    assert law.ppf(5e-7) < float(left.square().sum()) < law.isf(5e-7)


def test_one_example_never_moves_the_sum_by_more_than_its_sensitivity():
    model = free()
    plan, hardly_noised = planned(model), quiet(model)
    x, y = toy(60).tensors
    x = x * 100  # on the boundary of the ball
    for i in range(60):
        one = clean_sum(model, (x[i : i + 1], y[i : i + 1]), hardly_noised)
        for name, value in one.items():
            assert float(value.norm()) <= plan.sensitivities[name] * (1 + 1e-4)


def test_padding_rows_contribute_nothing():
    x, y = toy(5).tensors
    model, plan = free(), planned(free())
    padded, exact = (first_gradient(model, plan, (x, y), microbatch_size=size) for size in (128, 5))
    for name, value in padded.items():
        assert torch.allclose(value, exact[name], atol=1e-6)
    (rows, labels, mask), *rest = microbatches(x, y, 8, torch.device("cpu"))
    assert not rest
    assert rows.shape == (8, 6)
    assert labels.shape == (8,)
    assert mask.tolist() == [True] * 5 + [False] * 3
    assert not list(microbatches(*empty(), 8, torch.device("cpu")))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [[0], [3], [9], [0, 5, 9], list(range(10))])
def test_examples_that_are_not_finite_are_dropped_alone(bad, rows):
    x, y = toy(10).tensors
    spoilt = x.clone()
    for row in rows:
        spoilt[row, row % 6] = bad
    keep = [i for i in range(10) if i not in rows]
    model, plan = free(), quiet(free())
    found = first_gradient(model, plan, (spoilt, y), microbatch_size=4)
    expected = first_gradient(model, plan, (x[keep], y[keep]), microbatch_size=4)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6)
        assert torch.isfinite(found[name]).all()


def test_targets_that_are_not_finite_are_dropped_alone():
    model = nn.Sequential(nn.BoundedInput((6,)), torch.nn.Linear(6, 2))
    loss = losses.MAE()
    x = toy(8).tensors[0]
    y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    spoilt = y.clone()
    spoilt[2, 0], spoilt[5, 1] = float("nan"), float("inf")
    keep = [0, 1, 3, 4, 6, 7]
    plan = quiet(model, loss)
    found = first_gradient(model, plan, (x, spoilt), loss=loss)
    expected = first_gradient(model, plan, (x[keep], y[keep]), loss=loss)
    assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)


class Explosive(torch.nn.Module):
    """Multiplies by a huge number, twice: finite going in, NaN going back, for large entries only."""

    def forward(self, x):
        return torch.where(x.abs() > 0.9, x * 1e30 * 1e30 - x * 1e30 * 1e30, x)


@rule(Explosive)
def _explosive(layer, call):
    return Transfer(Bound(float("inf"), call.inputs[0].shape), (float("inf"),))


def test_an_example_whose_gradient_overflows_is_dropped_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), Explosive(), nn.Boundary(norm=1.0), torch.nn.Linear(6, 3))
    x = torch.full((9, 6), 0.1)
    y = torch.arange(9) % 3
    spoilt = x.clone()
    spoilt[4, 0] = 5.0  # projected to 0.99…: overflows
    assert not torch.isfinite(model(spoilt[4:5])).all()
    keep = [i for i in range(9) if i != 4]
    plan = quiet(model)
    for size in (4, 9, 64):
        found = first_gradient(model, plan, (spoilt, y), microbatch_size=size)
        expected = first_gradient(model, plan, (x[keep], y[keep]), microbatch_size=size)
        assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)


def test_an_overflowing_first_row_that_is_also_the_padding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), Explosive(), nn.Boundary(norm=1.0), torch.nn.Linear(6, 3))
    x = torch.full((3, 6), 0.1)
    x[0, 0] = 5.0
    plan, y = quiet(model), torch.arange(3)
    found = first_gradient(model, plan, (x, y), microbatch_size=8)
    expected = first_gradient(model, plan, (x[1:], y[1:]), microbatch_size=8)
    assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)


def test_gradients_left_behind_are_not_used():
    """Neither for trained parameters, nor for frozen ones, whose stale gradient an optimiser would apply."""
    model = free()
    model[1].requires_grad_(False)
    plan = planned(model)
    clean = first_gradient(model, plan, toy(20).tensors)
    dirty = copy.deepcopy(model)
    for p in dirty.parameters():
        p.grad = torch.full_like(p, 1e3)
    optimizer = Spy(dirty, lr=0.1)
    engine = engine_of(dirty, plan, optimizer)
    before = weights(dirty[1])
    engine.step(*toy(20).tensors, sample="own")
    assert set(optimizer.seen[0]) == {"3.weight", "3.bias"}
    assert same(weights(dirty[1]), before)
    assert float(max(g.abs().max() for g in optimizer.seen[0].values())) < 100
    assert set(clean) == set(optimizer.seen[0])
    assert all(p.grad is None for p in dirty.parameters())


def test_an_autograd_graph_of_the_caller_does_not_matter():
    model = free()
    plan, (x, y) = planned(model), toy(20).tensors
    expected = first_gradient(model, plan, (x, y))
    x = (x.clone().requires_grad_(True) * 1.0).requires_grad_(True)
    assert same(first_gradient(model, plan, (x, y)), expected)


def test_tied_parameters_are_counted_once_and_bounded_for_both_uses():
    torch.manual_seed(0)
    shared = nn.SpectralLinear(6, 6, bias=False)
    tied = nn.Sequential(nn.BoundedInput((6,)), shared, nn.GroupSort(2), shared)
    single = nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 6, bias=False))
    assert planned(tied).sensitivities.keys() == {"1.weight"}
    assert planned(tied).sensitivities["1.weight"] == pytest.approx(2 * planned(single).sensitivities["1.weight"])
    x, y = toy(20).tensors
    engine_of(tied)
    found, expected = clean_sum(tied, (x, y)), reference_sum(tied, x, y)
    assert torch.allclose(found["1.weight"], expected["1.weight"], atol=1e-4)


class Remembering(torch.nn.Module):
    """Keeps a running sum of what it sees: a leak, and invisible on zeros."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.total += x.sum(0)
        return x


@rule(Remembering)
def _remembering(layer, call):
    return Transfer(call.inputs[0])


def test_a_buffer_that_the_forward_pass_updates_is_refused_before_anything_is_spent():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), Remembering(), torch.nn.Linear(6, 3))
    with pytest.raises(UnsupportedError, match="total"):
        engine_of(model, planned(model)).step(*toy(20).tensors, sample="own")
    assert torch.equal(model[1].total, torch.zeros(6))


class Averaging(losses.Loss):
    lipschitz = 1.0

    def forward(self, outputs, targets):
        return outputs.mean()


def test_a_loss_that_reduces_is_refused_at_the_step():
    model = free()
    engine = engine_of(model, planned(model, Averaging()), loss=Averaging())
    with pytest.raises(DataError, match="one value per example"):
        engine.step(*toy(20).tensors, sample="own")
    assert engine.steps == 0


@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
def test_coarser_arithmetic_as_planned(precision):
    model = small()
    engine = engine_of(model, planned(model, precision=precision))
    engine.step(*toy(20).tensors, sample="own")
    assert all(torch.isfinite(g).all() for g in engine.optimizer.seen[0].values())


def test_an_autocast_of_the_caller_does_not_coarsen_the_arithmetic():
    model, batch = free(), toy(50).tensors
    plan = planned(model)
    expected = first_gradient(model, plan, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(first_gradient(model, plan, batch), expected)
    coarse = quiet(model, precision="bfloat16")
    rough = clean_sum(model, batch, plan=coarse)
    fine = clean_sum(model, batch)
    assert any((rough[n] - fine[n]).abs().max() > 1e-3 for n in fine)


@pytest.mark.parametrize("bad", [3e38, float("nan"), float("inf")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_record_that_overflows_takes_nobody_with_it(bad, device):
    """Finite or not on its way in, its gradient is not: the sum over all others is released, so neighbours differ by nothing."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerCentering(), nn.BoundedInput((6,), mode="sphere"), nn.SpectralLinear(6, 3, bias=False)).to(device)
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=40, batch_size=20, delta=1e-3, noise_multiplier=1.0, steps=30, accountant="rdp")
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), plan, device=device)
    sums = []
    release = engine._release
    engine._release = lambda asked: (sums.append(asked.answer.sums["2.weight"].cpu()), release(asked))[1]
    for number in range(6):  # recorded and replayed, where there is CUDA
        x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)), torch.arange(8) % 3
        with_it = torch.cat([x, torch.full((1, 6), bad)]), torch.cat([y, y[:1]])
        for inputs, targets in ((x, y), with_it):
            engine.step(inputs.to(device), targets.to(device), sample="own")
        assert torch.allclose(sums[-1], sums[-2], atol=1e-5)
        assert float(sums[-1].norm()) > 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_finite_is_told_from_what_is_not(bad: float) -> None:
    """Entries whose sum overflows are finite; one that is not, at any place, is seen, and two that cancel to NaN are."""
    from lipdp.training.gradients import _are_all_finite

    here = torch.device("cpu")
    huge = torch.full((3, 5), 1.7e308, dtype=torch.float64)
    assert bool(_are_all_finite([torch.zeros(4, dtype=torch.float64), huge, -huge], here))
    assert bool(_are_all_finite([], here))
    for place in range(15):
        one = torch.ones(15, dtype=torch.float64)
        one[place] = bad
        assert not bool(_are_all_finite([huge, one], here))
        one[(place + 1) % 15] = -bad
        assert not bool(_are_all_finite([one], here))
