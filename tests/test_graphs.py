"""Recording and replaying: when it is done, when it is done again, and when it is refused.

The logic is tested with a stand-in for CUDA that replays by calling the function again on the recorded buffers; what CUDA itself
does, where there is one.
"""

from __future__ import annotations

import random
import warnings
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
import lipdp.graphs as graphs
from lipdp.errors import ConfigurationError, LipdpNotice, UnsupportedError
from lipdp.graphs import GraphedFunction, fingerprint

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: what a real graph replays")


def stand_in(function, inputs, state, pool):
    """As :func:`lipdp.graphs._record`, with copies in the place of kernels."""
    buffers = [part.clone() for part in inputs]

    def call():
        token = graphs._recording.set(True)
        early = []
        try:
            return early, graphs._run(function, buffers, early.append)
        finally:
            graphs._recording.reset(token)

    with graphs._repeatable(state):
        made = call()
    leaves = [part for part in torch.utils._pytree.tree_leaves(made) if isinstance(part, torch.Tensor)]

    def replay():
        for mine, again in zip(leaves, torch.utils._pytree.tree_leaves(call()), strict=True):
            mine.copy_(again)

    early, outputs = made
    replays = [replay, lambda: None] if early else [replay]
    return graphs._Recorded(buffers, early[0] if early else None, outputs, replays)


def repeat(graphed, times, device="cpu"):
    return [float(graphed(torch.ones(1, device=device))) for _ in range(times)]


@pytest.fixture
def recorder(monkeypatch):
    """Counts recordings made by the stand-in."""
    made = []

    def record(*arguments):
        made.append(arguments[1])
        return stand_in(*arguments)

    monkeypatch.setattr(graphs, "_can_record", lambda inputs: True)
    monkeypatch.setattr(graphs, "_new_pool", object)
    monkeypatch.setattr(graphs, "_record", record)
    return made


def test_on_the_cpu_it_is_the_function():
    calls = []
    graphed = GraphedFunction(lambda x: calls.append(1) or x + 1, state=lambda: 0)
    for value in range(4):
        assert float(graphed(torch.tensor(float(value)))) == value + 1
    assert len(calls) == 4
    assert graphed.recordings == 0
    assert graphed.refused is None


def test_the_second_call_records_and_the_third_replays(recorder):
    graphed = GraphedFunction(lambda x: {"double": 2 * x}, state=lambda: 0)
    first = graphed(torch.ones(2))["double"]
    assert not recorder
    second = graphed(torch.full((2,), 3.0))["double"]
    assert len(recorder) == 1
    assert second.tolist() == [6.0, 6.0]
    third = graphed(torch.full((2,), 5.0))["double"]
    assert len(recorder) == 1
    assert third is second  # static: overwritten by the next call
    assert third.tolist() == [10.0, 10.0]
    assert first.tolist() == [2.0, 2.0]


def test_what_is_large_is_not_copied_into_a_recording():
    small, large = torch.empty(1000), torch.empty(2**24, device="meta")
    assert not graphs.is_large(small)
    assert graphs.is_large(large)


@on_cuda
def test_large_inputs_are_not_recorded(monkeypatch):
    monkeypatch.setattr(graphs, "_LARGE", 64)
    x = torch.randn(32, device="cuda")
    doubled = GraphedFunction(lambda x: 2 * x, state=lambda: None)
    for _ in range(3):
        torch.testing.assert_close(doubled(x), 2 * x)
    assert doubled.recordings == 0
    assert doubled.refused is None


def test_two_stages(recorder):
    """What the first yields is there before the second is asked for."""

    def stages(x):
        yield x.sum()
        return 2 * x

    graphed, seen = GraphedFunction(stages, state=lambda: 0), []
    for value in range(4):
        result = graphed(torch.full((2,), float(value)), between=lambda early: seen.append(float(early)))
        assert result.tolist() == [2.0 * value] * 2
    assert seen == [0.0, 2.0, 4.0, 6.0]
    assert len(recorder) == 1

    def thrice(x):
        yield x
        yield x

    with pytest.raises(TypeError, match="yields once"):
        GraphedFunction(thrice, state=lambda: 0)(torch.ones(1))


def test_shapes_state_and_arithmetic_are_the_key(recorder):
    setting = {"value": 0}
    graphed = GraphedFunction(lambda x: x + setting["value"], state=lambda: setting["value"])

    def thrice(*inputs):
        return [graphed(*inputs) for _ in range(3)][-1]

    thrice(torch.ones(2))
    thrice(torch.ones(3))
    thrice(torch.ones(2, dtype=torch.float64))
    assert len(recorder) == 3
    setting["value"] = 7
    assert thrice(torch.ones(2)).tolist() == [8.0, 8.0]
    assert len(recorder) == 4
    with torch.no_grad():
        thrice(torch.ones(2))
    assert len(recorder) == 5
    setting["value"] = 0
    assert graphed(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]  # still known
    assert len(recorder) == 5
    assert graphed.recordings == 4  # the limit; the oldest was given up


def test_a_function_that_is_different_every_time_is_given_up(recorder):
    count = iter(range(1000))
    graphed = GraphedFunction(lambda x: x, state=lambda: next(count) // 2, limit=2)
    with pytest.warns(LipdpNotice, match="different in every call") as seen:
        repeat(graphed, 60)
    assert len(seen) == 1
    assert len(recorder) <= 6


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_random_numbers_of_the_host_are_refused(recorder, draw):
    graphed = GraphedFunction(lambda x: x * float(draw() > 2), state=lambda: 0)
    with pytest.warns(LipdpNotice, match="random numbers on the host") as seen:
        repeat(graphed, 5)
    assert len(seen) == 1
    assert graphed.recordings == 0
    assert "host" in graphed.refused


def test_a_function_with_state_of_its_own_is_refused(recorder):
    made = nn.Module()
    made.calls = 0

    def count(x):
        made.calls += 1
        return x * made.calls

    graphed = GraphedFunction(count, state=lambda: fingerprint(made) if made.calls > 2 else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LipdpNotice)
        assert [float(graphed(torch.ones(()))) for _ in range(2)] == [1.0, 3.0]
    made.calls = 1
    changing = GraphedFunction(count, state=lambda: made.calls // 3)
    with pytest.warns(LipdpNotice, match="settings"):
        repeat(changing, 12)


def test_trouble_while_recording_is_no_trouble(recorder, monkeypatch):
    def failing(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "_record", failing)
    graphed = GraphedFunction(lambda x: x + 1, state=lambda: 0)
    with pytest.warns(LipdpNotice, match="not permitted"):
        results = [float(graphed(torch.ones(()))) for _ in range(4)]
    assert results == [2.0] * 4


def test_errors_of_ours_are_errors(recorder, monkeypatch):
    def failing(*_):
        raise UnsupportedError("no")

    monkeypatch.setattr(graphs, "_record", failing)
    graphed = GraphedFunction(lambda x: x, state=lambda: 0)
    graphed(torch.ones(1))
    with pytest.raises(UnsupportedError):
        graphed(torch.ones(1))


def test_recordings_can_be_forgotten(recorder):
    graphed = GraphedFunction(lambda x: x, state=lambda: 0)
    for _ in range(3):
        graphed(torch.ones(1))
    assert graphed.recordings == 1
    graphed.forget()
    assert graphed.recordings == 0


def test_a_replay_that_differs_is_noticed():
    assert graphs._agree({"a": torch.ones(3)}, {"a": torch.ones(3)})
    assert not graphs._agree({"a": torch.ones(3)}, {"a": torch.ones(3) + 0.1})
    assert graphs._agree((torch.tensor([float("nan")]), 1), (torch.tensor([float("nan")]), 1))


# ------------------------------------------------------------------ clipping, recorded


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def same(found, expected):
    assert found.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        assert torch.allclose(found.sums[name], value, rtol=1e-4, atol=1e-6), name
    assert torch.allclose(found.norms, expected.norms, rtol=1e-4, equal_nan=True)
    assert torch.allclose(found.factors, expected.factors, rtol=1e-4)
    assert torch.equal(found.within, expected.within)


@pytest.mark.parametrize("method", ["bookkeeping", "reweight", "ghost", "naive", "multiloss"])
def test_captured_clipping_is_clipping(recorder, method):
    model = network()
    captured = clipping.Clipper(model, cross_entropy, method)
    for call in range(5):
        x, y = torch.randn(4, 1, 4, 4), torch.randint(4, (4,))
        mask = torch.arange(4) < 4 - call % 2
        c = torch.tensor(0.1 * (call + 1))
        same(captured(x, y, c, mask=mask), clipping.clip_batch(model, cross_entropy, x, y, c, method, mask=mask))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert len(recorder) == (1 if method in ("bookkeeping", "reweight", "ghost") else 0)  # one C after another, one recording


def test_captured_clipping_by_groups_and_copies(recorder):
    model = network()
    x, y = torch.randn(6, 1, 4, 4), torch.randint(4, (3,))
    for norms, style in ((1.0, "per_layer"), ({"0": 0.1, "3": torch.tensor(0.4)}, "per_group")):
        captured = clipping.Clipper(model, cross_entropy, style=style, copies=2)
        for _ in range(3):
            same(captured(x, y, norms), clipping.clip_batch(model, cross_entropy, x, y, norms, style=style, copies=2))
    assert len(recorder) == 2


def test_an_example_that_is_not_finite_in_a_replay(recorder):
    model = network()
    for method in ("bookkeeping", "reweight"):
        captured = clipping.Clipper(model, cross_entropy, method)
        for call in range(4):
            x, y = torch.randn(4, 1, 4, 4), torch.randint(4, (4,))
            x[call, 0, 0, 0] = float("inf")
            found = captured(x, y, 0.2)
            same(found, clipping.clip_batch(model, cross_entropy, x, y, 0.2, method))
            assert all(bool(torch.isfinite(value).all()) for value in found.sums.values())
            assert float(found.factors[call, 0]) == 0.0


def test_a_model_that_changes_is_recorded_again(recorder):
    model = network()
    captured = clipping.Clipper(model, cross_entropy)
    x, y = torch.randn(4, 1, 4, 4), torch.randint(4, (4,))

    def thrice():
        for _ in range(3):
            same(captured(x, y, 0.3), clipping.clip_batch(model, cross_entropy, x, y, 0.3))

    thrice()
    model[3].weight.data = model[3].weight.data.clone()
    thrice()
    model[0].weight.requires_grad_(False)
    thrice()
    model[1] = nn.ReLU()
    thrice()
    assert len(recorder) == 4


class Scaled(nn.Module):
    """A parameter of its own, of which no copies for each example can be made: for torch.func to do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.tanh(x * self.scale / self.scale.norm())


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
def test_modules_without_a_rule_are_recorded_too(recorder, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3))
    captured = clipping.Clipper(model, cross_entropy)
    for _ in range(4):
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        same(captured(x, y, 0.3), clipping.clip_batch(model, cross_entropy, x, y, 0.3))
    assert len(recorder) == 1

    def off(again, before):
        return torch.arange(len(before)) == 1

    monkeypatch.setattr("lipdp.clipping.fallback._off", off)  # as if one example's output were another than in the batch
    with pytest.raises(UnsupportedError, match="one example at a time"):
        captured(x, y, 0.3)


def test_settings_are_checked_at_once():
    with pytest.raises(ConfigurationError, match="method"):
        clipping.Clipper(network(), cross_entropy, "clipless")


# ------------------------------------------------------------------ CUDA itself


@on_cuda
@pytest.mark.parametrize("method", ["bookkeeping", "reweight"])
def test_replays_on_cuda_are_eager_results(method):
    model = network().cuda()
    captured = clipping.Clipper(model, cross_entropy, method)
    for call in range(5):
        x, y = torch.randn(4, 1, 4, 4, device="cuda"), torch.randint(4, (4,), device="cuda")
        if call == 3:
            x[0] = float("nan")
        same(captured(x, y, 0.1 + call), clipping.clip_batch(model, cross_entropy, x, y, 0.1 + call, method))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert captured.refused is None


@on_cuda
def test_reading_a_value_on_cuda_is_refused_and_harmless():
    graphed = GraphedFunction(lambda x: x * float(x.sum()), state=lambda: 0)
    with pytest.warns(LipdpNotice):
        results = repeat(graphed, 4, device="cuda")
    assert results == [1.0] * 4
    assert torch.rand(2, device="cuda").shape == (2,)  # the generator still works


@on_cuda
def test_dropout_on_cuda_follows_the_seed():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).cuda()
    x, y = torch.randn(4, 8, device="cuda"), torch.randint(4, (4,), device="cuda")
    captured, results = clipping.Clipper(model, cross_entropy), []
    for seed in (0, 0, 0, 1):
        torch.manual_seed(seed)
        results.append(captured(x, y, 1.0).sums["0.weight"])
    assert torch.allclose(results[1], results[2])
    assert torch.allclose(results[0], results[2], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(results[2], results[3])


def test_constants_are_asked_in_the_rehearsal_and_answered_so_in_the_recording(monkeypatch):
    """Two dimensions as long as the batch: which of them counts the records is not to be guessed while a graph is recorded."""
    numbers = torch.arange(3)
    asked = [(numbers[:, None].expand(3, 3), True), (numbers.expand(3, 3), False), (numbers[:, None].expand(3, 3), True)]
    expected = numbers[:, None].expand(3, 3)
    answers = graphs._rehearsed.set(deque())
    try:
        assert [graphs.holds(part, expected) for part, _ in asked] == [answer for _, answer in asked]
        monkeypatch.setattr(graphs, "_is_captured", lambda tensor: True)
        assert [graphs.holds(part, expected) for part, _ in asked] == [answer for _, answer in asked]
        assert not graphs.holds(expected, expected)  # nobody asked before
    finally:
        graphs._rehearsed.reset(answers)


def test_what_was_begun_is_gone_by_if_it_still_is_the_recording(recorder):
    asked, settings = [], [0]
    graphed = GraphedFunction(lambda x: asked.append(1) or x * 2, state=lambda: settings[0])
    assert graphed.buffers() == []
    graphed.begin()  # nothing is recorded: nothing happens
    for value in (1.0, 2.0):
        graphed(torch.tensor([value]))
    buffer = graphed.buffers()[0]
    buffer.fill_(7.0)
    graphed.begin()
    before = len(asked)
    assert graphed(buffer).tolist() == [14.0]
    assert len(asked) == before, "its result was there"
    assert graphed(torch.tensor([9.0])).tolist() == [18.0]
    buffer.fill_(5.0)
    graphed.begin()
    assert graphed(torch.tensor([6.0])).tolist() == [12.0], "others were asked for"
    buffer.fill_(5.0)
    graphed.begin()
    settings[0] = 1
    assert graphed.buffers() == []
    assert graphed(buffer).tolist() == [10.0]
    assert graphed.recordings == 1, "of another state there is no recording yet"
    buffer.fill_(4.0)
    assert graphed(buffer).tolist() == [8.0], "and what was begun before is forgotten"
