"""Groups of parameters that are clipped together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
from lipdp.clipping.kernels import choices, forget_choices
from lipdp.clipping.outer import OuterSum
from lipdp.errors import ConfigurationError
from tests.clipping.helpers import METHODS, assert_close, quadratic, reference

ONE_PASS = tuple(method for method in METHODS if method not in ("reweight", "ghost"))


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4), nn.Linear(4, 2)).double()
    return model, torch.randn(5, 2, 4, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64)


def by_groups(rows, groups, clip="clip", stability=0.01):
    total = {name: torch.zeros_like(g) for name, g in rows[0].items()}
    for row in rows:
        for names, c in groups:
            norm = math.sqrt(sum(float(row[n].square().sum()) for n in names))
            factor = c / (norm + stability) if clip == "automatic" else min(1.0, c / norm)
            for n in names:
                total[n] += factor * row[n]
    return total


@pytest.mark.parametrize("method", ONE_PASS)
@pytest.mark.parametrize("clip", ["clip", "automatic"])
def test_per_layer(problem, method, clip):
    model, x, y = problem
    layers = [["0.weight", "0.bias"], ["3.weight", "3.bias"], ["4.weight", "4.bias"]]
    rows = reference(model, quadratic, x, y)
    expected = by_groups(rows, [(names, 0.7 / math.sqrt(3)) for names in layers], clip)
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, 0.7, method, style="per_layer", clip=clip), expected)
    bounds = {"0": 0.1, "3": 0.2, "4": 5.0}
    expected = by_groups(rows, list(zip(layers, bounds.values(), strict=True)), clip)
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, bounds, method, style="per_layer", clip=clip), expected)


@pytest.mark.parametrize("method", ONE_PASS)
def test_per_group(problem, method):
    model, x, y = problem
    rows = reference(model, quadratic, x, y)
    with pytest.raises(ConfigurationError, match=r"'4\.weight' is in none"):
        clipping.clipped_gradients(model, quadratic, x, y, {"0": 0.1, "3": 0.3}, method, style="per_group")
    bounds = {"0": 0.1, "3": 0.3, "3.bias": 0.2, "4": 0.4}
    expected = by_groups(
        rows, [(["0.weight", "0.bias"], 0.1), (["3.weight"], 0.3), (["3.bias"], 0.2), (["4.weight", "4.bias"], 0.4)]
    )
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, bounds, method, style="per_group"), expected)
    shared = clipping.clipped_gradients(model, quadratic, x, y, 1.0, method, style="per_group", groups=["0", "3", "4"])
    assert_close(shared, clipping.clipped_gradients(model, quadratic, x, y, 1.0, "naive", style="per_layer"))


def test_one_number_keeps_the_whole_bound(problem):
    model, x, y = problem
    for style in ("flat", "per_layer"):
        for i in range(len(x)):
            found = clipping.clipped_gradients(model, quadratic, x[i : i + 1], y[i : i + 1], 0.01, style=style)
            assert math.sqrt(sum(float(g.square().sum()) for g in found.values())) == pytest.approx(0.01, rel=1e-6)


def test_a_name_is_no_prefix_of_a_longer_name():
    groups = clipping.clipping_groups(["a.weight", "ab.weight"], {"a": 1.0, "ab": 2.0}, "per_group")
    assert [(group.name, group.parameters, group.max_norm) for group in groups] == [
        ("a", ("a.weight",), 1.0),
        ("ab", ("ab.weight",), 2.0),
    ]


@pytest.mark.parametrize(
    ("max_norm", "style", "groups", "match"),
    [
        ({"a": 1.0}, "flat", None, "one number"),
        ({"a": 1.0}, "per_layer", None, "max_norm names a"),
        (1.0, "per_group", None, "needs the groups"),
        (1.0, "per_layer", ["0"], "only used by"),
        ({"0": 1.0, "3": 1.0, "4": 0.0}, "per_layer", None, "positive"),
        (1.0, "per_group", ["0", "3", "4", "nowhere"], "'nowhere' has no trainable parameter"),
        ({"0": 1.0, "3": 1.0}, "per_group", ["0", "3", "4"], "max_norm names"),
    ],
)
def test_groups_that_can_not_be_meant(problem, max_norm, style, groups, match):
    model, x, y = problem
    with pytest.raises(ConfigurationError, match=match):
        clipping.clipped_gradients(model, quadratic, x, y, max_norm, style=style, groups=groups)


@pytest.mark.parametrize("method", ["reweight", "ghost"])
def test_two_passes_clip_the_whole_only(problem, method):
    model, x, y = problem
    with pytest.raises(ConfigurationError, match=r"style='flat'.*bookkeeping"):
        clipping.clipped_gradients(model, quadratic, x, y, 1.0, method, style="per_layer")


def test_an_example_bad_in_one_group_is_dropped_from_all():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return torch.cat([self.a(x[:, :1]), self.b(x[:, 1:])], 1)

    model, x = Two(), torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    for method in ONE_PASS:
        found = clipping.clipped_gradients(model, lambda o, y: o.sum(1), x, torch.zeros(2), 1.0, method, style="per_layer")
        alone = clipping.clipped_gradients(model, lambda o, y: o.sum(1), x[1:], torch.zeros(1), 1.0, method, style="per_layer")
        assert_close(found, alone, 1e-6)


def test_what_is_behind_the_sum(problem):
    model, x, y = problem
    found = clipping.clip_batch(model, quadratic, x, y, 0.7, style="per_layer")
    naive = clipping.clip_batch(model, quadratic, x, y, 0.7, "naive", style="per_layer")
    assert found.norms.shape == found.factors.shape == (5, 3)
    assert torch.allclose(found.norms, naive.norms, rtol=1e-9)
    assert torch.allclose(found.factors, naive.factors, rtol=1e-9)
    assert [group.name for group in found.groups] == ["0", "3", "4"]
    assert torch.all(found.factors * found.norms <= 0.7 / math.sqrt(3) * (1 + 1e-12))


def test_automatic_clipping_normalises(problem):
    model, x, y = problem
    for i in range(len(x)):
        one = clipping.clip_batch(model, quadratic, x[i : i + 1], y[i : i + 1], 1.0, clip="automatic", stability=0.5)
        assert float(one.factors * (one.norms + 0.5)) == pytest.approx(1.0)


def test_the_cost_model_and_the_measured_choice():
    forget_choices()
    long = OuterSum(torch.randn(2, 300, 4), torch.randn(2, 300, 4), (4, 4))
    wide = OuterSum(torch.randn(16, 2, 700), torch.randn(16, 2, 700), (700, 700))
    assert not long.prefers_gram
    assert wide.prefers_gram
    for part, choice in ((long, "materialise"), (wide, "gram")):
        assert torch.allclose(part.squared_norms("measure"), part.squared_norms("materialise"), rtol=1e-2)
        assert choice in choices().values()
    assert len(choices()) == 2
    long.squared_norms("measure")
    assert len(choices()) == 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 4))
    expected = clipping.clipped_gradients(model, quadratic, torch.randn(3, 2, 4), torch.zeros(3), 1.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 4))
    found = clipping.clipped_gradients(model, quadratic, torch.randn(3, 2, 4), torch.zeros(3), 1.0, form="measure")
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)
    forget_choices()


@pytest.mark.parametrize("method", ["naive", "multiloss", "reweight", "ghost", "bookkeeping"])
def test_a_bound_on_the_device(method):
    model, x, y = _model(), torch.randn(5, 4), torch.zeros(5)
    found, expected = (clipping.clip_batch(model, quadratic, x, y, c, method) for c in (torch.tensor(0.7), 0.7))
    assert_close(found.sums, expected.sums, 1e-6)
    assert found.bounds.tolist() == pytest.approx([0.7])
    named = {"0": torch.tensor(0.3), "2": 0.4}
    if method in ("naive", "bookkeeping"):
        one = clipping.clip_batch(model, quadratic, x, y, named, method, style="per_group")
        other = clipping.clip_batch(model, quadratic, x, y, {"0": 0.3, "2": 0.4}, method, style="per_group")
        assert_close(one.sums, other.sums, 1e-6)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("clip", ["clip", "automatic"])
def test_a_bound_that_can_not_be_meant_releases_nothing(bad, clip):
    """On a device it can't be checked without waiting; it must not let a gradient through."""
    model, x, y = _model(), torch.randn(5, 4), torch.zeros(5)
    found = clipping.clip_batch(model, quadratic, x, y, torch.tensor(bad), clip=clip)
    assert all(bool((value == 0).all()) for value in found.sums.values())
    with pytest.raises(ConfigurationError, match="max_norm"):
        clipping.clip_batch(model, quadratic, x, y, bad, clip=clip)


def test_a_bound_is_one_number():
    model, x, y = _model(), torch.randn(5, 4), torch.zeros(5)
    for bad in (torch.ones(2), torch.tensor(1), torch.tensor(True)):
        with pytest.raises(ConfigurationError, match="one real number"):
            clipping.clip_batch(model, quadratic, x, y, bad)


@pytest.mark.parametrize("method", ["naive", "bookkeeping"])
def test_how_many_are_within(method):
    """Masked examples don't count, nor do those that are not finite."""
    model, x, y = _model(), torch.randn(8, 4), torch.zeros(8)
    norms = clipping.per_example_norms(model, quadratic, x, y)
    c = float(norms.sort().values[4])
    mask = torch.tensor([True] * 6 + [False] * 2)
    found = clipping.clip_batch(model, quadratic, x, y, c * 1.001, method, mask=mask)
    assert found.within.tolist() == [int((norms[:6] <= c * 1.001).sum())]
    assert torch.equal(found.kept, mask)
    x[0] = float("nan")
    found = clipping.clip_batch(model, quadratic, x, y, 1e9, method, mask=mask)
    assert found.within.tolist() == [5]
    assert found.within.dtype == torch.int64


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
