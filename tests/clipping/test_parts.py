"""A batch that does not fit into memory is clipped in parts, with the same result."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

from lipdp.clipping import Clipper
from lipdp.clipping.batch import even_part
from lipdp.clipping.loops import Loops
from lipdp.errors import LipdpNotice
from tests.clipping.helpers import METHODS, quadratic


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect():
    """Every attempt that does not fit collects garbage: not among all that the tests before have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def memory(monkeypatch):
    """A GPU on which so many rows fit; and the sizes that were tried."""
    limit, tried = {"rows": 10**9}, []

    def limited(function):
        def call(self, x, *arguments, **settings):
            tried.append(len(x))
            if len(x) > limit["rows"]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return function(self, x, *arguments, **settings)

        return call

    monkeypatch.setattr(Clipper, "_stages", limited(Clipper._stages))
    for name in ("naive", "multiloss"):
        monkeypatch.setattr(Loops, name, limited(getattr(Loops, name)))
    return limit, tried


def problem(copies=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    return model, torch.randn(11 * copies, 4).double(), torch.linspace(-1, 1, 11).double(), torch.arange(11) != 4


def same(found, expected):
    for name, total in expected.sums.items():
        assert torch.allclose(found.sums[name], total, rtol=1e-9, atol=1e-12), name
    for name in ("norms", "factors"):
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12, equal_nan=True), name
    assert torch.equal(found.kept, expected.kept)
    assert torch.equal(found.within, expected.within)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 3, 6, 10])
def test_the_same_result(memory, method, rows):
    model, x, y, mask = problem()
    expected = Clipper(model, quadratic, method)(x, y, 0.5, mask=mask)
    memory[0]["rows"] = rows
    with pytest.warns(LipdpNotice, match="in parts"):
        found = Clipper(model, quadratic, method)(x, y, 0.5, mask=mask)
    same(found, expected)


@pytest.mark.parametrize("kind", [Clipper])
@pytest.mark.parametrize("per_row", [False, True])
def test_copies_stay_together(memory, kind, per_row):
    model, x, y, mask = problem(copies=3)
    y = y.repeat_interleave(3) if per_row else y
    expected = kind(model, quadratic, copies=3)(x, y, 0.5, mask=mask)
    memory[0]["rows"] = 12
    with pytest.warns(LipdpNotice, match="in parts"):
        same(kind(model, quadratic, copies=3)(x, y, 0.5, mask=mask), expected)
    assert all(rows % 3 == 0 for rows in memory[1])


@pytest.mark.parametrize("settings", [{"style": "per_layer"}, {"clip": "automatic"}])
def test_styles(memory, settings):
    model, x, y, mask = problem()
    expected = Clipper(model, quadratic, **settings)(x, y, 0.5, mask=mask)
    memory[0]["rows"] = 4
    with pytest.warns(LipdpNotice, match="in parts"):
        same(Clipper(model, quadratic, **settings)(x, y, 0.5, mask=mask), expected)


def test_examples_without_a_finite_gradient(memory):
    model, x, y, mask = problem()
    x[2], x[9] = float("inf"), float("nan")
    expected = Clipper(model, quadratic)(x, y, 0.5, mask=mask)
    memory[0]["rows"] = 4
    with pytest.warns(LipdpNotice, match="in parts"):
        same(Clipper(model, quadratic)(x, y, 0.5, mask=mask), expected)


@pytest.mark.parametrize("method", ["bookkeeping", "reweight"])
@pytest.mark.parametrize("copies", [1, 3])
def test_a_repair_that_does_not_fit(monkeypatch, method, copies):
    """Leaving an example out takes copies of what is held: a batch that has just fitted may not fit then."""
    model, x, y, mask = problem(copies)
    x[2 * copies], x[9 * copies] = float("inf"), float("nan")
    expected = Clipper(model, quadratic, method, copies=copies)(x, y, 0.5, mask=mask)
    repair, tried = Clipper._repair, []

    def limited(self, batch, *arguments):
        tried.append(len(batch.x))
        if len(batch.x) > 3 * copies:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return repair(self, batch, *arguments)

    monkeypatch.setattr(Clipper, "_repair", limited)
    same(Clipper(model, quadratic, method, copies=copies)(x, y, 0.5, mask=mask), expected)
    assert tried[0] == 11 * copies
    assert len(tried) > 4


def test_tried_in_vain_once(memory):
    limit, tried = memory
    model, x, y, _ = problem()
    clip = Clipper(model, quadratic)
    limit["rows"] = 6
    with pytest.warns(LipdpNotice, match="11 examples does not fit.*parts of 6"):
        clip(x, y, 0.5)
    assert tried == [11, 6, 5]
    tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = clip.start(x, y, 0.5)  # the first part is done, the last launched
        assert tried == [6, 5]
        first.finish()
        clip(x[:6], y[:6], 0.5)
    assert tried == [6, 5, 6]


def test_one_example_that_does_not_fit(memory):
    memory[0]["rows"] = 0
    model, x, y, _ = problem()
    with pytest.warns(LipdpNotice), pytest.raises(torch.OutOfMemoryError):
        Clipper(model, quadratic)(x, y, 0.5)
    with pytest.raises(torch.OutOfMemoryError):
        Clipper(model, quadratic)(x[:1], y[:1], 0.5)


@pytest.mark.parametrize(("examples", "most", "size"), [(11, 6, 6), (12, 6, 6), (13, 6, 5), (7, 1, 1), (9, 4, 3)])
def test_even_parts(examples, most, size):
    assert even_part(examples, most) == size
