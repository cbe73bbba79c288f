"""Examples that are not finite, masks, empty batches, arguments, and a model that is as it was afterwards."""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lipdp.clipping as clipping
from lipdp.clipping.record import recording
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from tests.clipping.helpers import METHODS, assert_close, check_all, quadratic


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4), nn.PReLU()
    )


def textnet():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.core, self.out = nn.Linear(3, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.core(self.scale(x))[0])

    return Model()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.booleans(), st.sampled_from(METHODS), st.sampled_from([math.inf, -math.inf, math.nan]), st.sets(st.integers(0, 4)))
def test_examples_that_are_not_finite_are_dropped_alone(image, method, value, bad):
    torch.manual_seed(0)
    model = convnet() if image else textnet()
    x = torch.randn(5, 1, 4, 4) if image else torch.randn(5, 3, 3)
    y = torch.zeros(5)
    clipping.clipped_gradients(model, quadratic, x, y, 1.0)  # verified with good data
    good = [i for i in range(5) if i not in bad]
    x[list(bad), ..., 0] = value
    expected = clipping.clipped_gradients(model, quadratic, x[good], y[good], 1.0, "naive")
    found = clipping.clipped_gradients(model, quadratic, x, y, 1.0, method)
    assert_close(found, expected, 1e-5, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_nothing_but_bad_examples(method):
    x = torch.full((3, 1, 4, 4), math.nan)
    found = clipping.clipped_gradients(convnet(), quadratic, x, torch.zeros(3), 1.0, method)
    assert all(not bool(value.any()) for value in found.values())


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_too_large_to_measure_is_dropped(method):
    """Finite, but its square is not."""
    model, x = nn.Linear(2, 1), torch.tensor([[1e25, 0.0], [1.0, 2.0]])
    found = clipping.clipped_gradients(model, lambda o, y: o[:, 0], x, torch.zeros(2), 1.0, method)
    alone = clipping.clipped_gradients(model, lambda o, y: o[:, 0], x[1:], torch.zeros(1), 1.0, method)
    assert_close(found, alone, 1e-6)


def test_norms_of_bad_examples_are_not_finite():
    x = torch.randn(3, 1, 4, 4)
    x[1] = math.nan
    norms = clipping.per_example_norms(convnet(), quadratic, x, torch.zeros(3))
    assert torch.isfinite(norms).tolist() == [True, False, True]


def test_bad_values_that_no_window_reads():
    """A pixel that a strided kernel never reads does no harm, and may not do any in the sum."""
    model, x = nn.Conv2d(1, 2, 1, stride=2), torch.randn(2, 1, 5, 5)
    clean = clipping.clipped_gradients(model, quadratic, x, torch.zeros(2), 1.0)
    x[0, 0, 1, 1] = math.inf
    for method in METHODS:
        assert_close(clipping.clipped_gradients(model, quadratic, x, torch.zeros(2), 1.0, method), clean, 1e-5, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clip", ["clip", "automatic"])
def test_masks(method, clip):
    torch.manual_seed(0)
    model, x, y = convnet(), torch.randn(5, 1, 4, 4), torch.zeros(5)
    mask = torch.tensor([True, False, True, False, True])
    expected = clipping.clipped_gradients(model, quadratic, x[mask], y[mask], 1.0, "naive", clip=clip)
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, 1.0, method, mask=mask, clip=clip), expected, 1e-5)
    x[1] = math.nan  # masked and not finite
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, 1.0, method, mask=mask, clip=clip), expected, 1e-5)
    nothing = clipping.clipped_gradients(model, quadratic, x, y, 1.0, method, mask=torch.zeros(5, dtype=torch.bool))
    assert not any(bool(value.any()) for value in nothing.values())


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(3), torch.ones(3, 1, dtype=torch.bool)])
def test_masks_that_can_not_be_meant(mask):
    with pytest.raises(DataError, match="mask must be"):
        clipping.clipped_gradients(nn.Linear(2, 1), quadratic, torch.randn(3, 2), torch.zeros(3), 1.0, mask=mask)


@pytest.mark.parametrize("method", METHODS)
def test_empty_batches(method):
    model = convnet()
    found = clipping.clipped_gradients(model, quadratic, torch.randn(0, 1, 4, 4), torch.zeros(0), 1.0, method)
    assert {name: v.shape for name, v in found.items()} == {name: p.shape for name, p in model.named_parameters()}
    assert not any(bool(value.any()) for value in found.values())
    assert clipping.per_example_norms(model, quadratic, torch.randn(0, 1, 4, 4), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("c", [0.0, -1.0, math.inf, math.nan, "1", None, True])
def test_bounds_that_can_not_be_meant(c):
    with pytest.raises(ConfigurationError, match="max_norm"):
        clipping.clipped_gradients(nn.Linear(2, 1), quadratic, torch.randn(3, 2), torch.zeros(3), c)


@pytest.mark.parametrize(
    "arguments", [{"method": "magic"}, {"clip": "hard"}, {"form": "fast"}, {"style": "round"}, {"stability": 0.0}]
)
def test_arguments_that_are_not_known(arguments):
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        clipping.clipped_gradients(nn.Linear(2, 1), quadratic, torch.randn(3, 2), torch.zeros(3), 1.0, **arguments)


def test_data_that_do_not_fit():
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    with pytest.raises(DataError, match="3 inputs but 2 targets"):
        clipping.clipped_gradients(model, quadratic, x, torch.zeros(2), 1.0)
    with pytest.raises(DataError, match="one value per example"):
        clipping.clipped_gradients(model, lambda o, y: o.sum(), x, torch.zeros(3), 1.0)
    with pytest.raises(DataError, match="does not depend on any trainable parameter"):
        clipping.clipped_gradients(model, lambda o, y: o.detach()[:, 0], x, torch.zeros(3), 1.0)
    with pytest.raises(ConfigurationError, match="no trainable parameters"):
        clipping.clipped_gradients(model.requires_grad_(False), quadratic, x, torch.zeros(3), 1.0)


def _bag(**arguments):
    return nn.EmbeddingBag(5, 2, **arguments)


@pytest.mark.parametrize(
    ("make", "x", "match"),
    [
        (lambda: nn.BatchNorm1d(3), torch.randn(4, 3), r"BatchNorm1d.*GroupNorm"),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(), torch.randn(4, 3), "statistics of the batch"),
        (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), torch.randn(4, 3, 2), "track_running_stats=False"),
        (lambda: nn.Embedding(5, 2, max_norm=1.0), torch.zeros(4, 2, dtype=torch.long), "max_norm=None"),
        (lambda: nn.Embedding(5, 2, scale_grad_by_freq=True), torch.zeros(4, 2, dtype=torch.long), "scale_grad_by_freq=False"),
        (lambda: nn.Embedding(5, 2, sparse=True), torch.zeros(4, 2, dtype=torch.long), "sparse=False"),
        (lambda: _bag(mode="max"), torch.zeros(4, 2, dtype=torch.long), 'mode="sum"'),
        (lambda: nn.LazyLinear(3), torch.randn(4, 3), "lazy"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), torch.randn(4, 3), "complex"),
        (lambda: nn.DataParallel(nn.Linear(3, 2)), torch.randn(4, 3), r"DataParallel.*\.module"),
        (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), torch.randn(4, 3), "remove_weight_norm"),
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), torch.randn(4, 3), "remove_spectral_norm"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), torch.randn(4, 3), "remove_parametrizations"),
        (lambda: torch.jit.script(nn.Linear(3, 2)), torch.randn(4, 3), "scripted"),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["naive", "bookkeeping"])
def test_refused_by_name_with_the_fix(make, x, match, method):
    with pytest.raises(UnsupportedError, match=match):
        clipping.clipped_gradients(make(), quadratic, x, torch.zeros(4), 1.0, method)


def test_lazy_layers_after_a_first_pass():
    model = nn.LazyLinear(3)
    model(torch.randn(1, 4))
    clipping.clipped_gradients(model, quadratic, torch.randn(3, 4), torch.zeros(3), 1.0)


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
def test_parametrised_weights_are_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    check_all(model, torch.randn(4, 3, dtype=torch.float64))


def test_examples_folded_into_rows():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    check_all(Folded().double(), torch.randn(3, 4, 3, dtype=torch.float64))
    check_all(Folded().double(), torch.randn(4, 1, 3, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="batch dimension"):
        clipping.clipped_gradients(nn.Sequential(nn.Conv1d(3, 3, 1)), quadratic, torch.randn(3, 4), torch.zeros(3), 1.0)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.drop, self.armed = nn.LSTM(3, 3, batch_first=True), nn.Dropout(0.5), True

    def forward(self, x):
        h = self.drop(self.core(x)[0])
        if self.armed:
            raise ArithmeticError("in the middle")
        return h


def _state(model):
    return [
        (module.training, "forward" in vars(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_failing_forward_leaves_the_model_as_it_was(method):
    model = Failing()
    model.drop.eval()
    before, values = _state(model), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            clipping.clipped_gradients(model, quadratic, torch.randn(3, 2, 3), torch.zeros(3), 1.0, method)
        assert _state(model) == before
        assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    model.armed = False
    clipping.clipped_gradients(model, quadratic, torch.randn(3, 2, 3), torch.zeros(3), 1.0, method)
    assert _state(model) == before
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())


def test_a_failing_loss_leaves_the_model_as_it_was():
    model = Failing()
    model.armed = False
    before = _state(model)

    def loss(outputs, targets):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        clipping.clipped_gradients(model, loss, torch.randn(3, 2, 3), torch.zeros(3), 1.0)
    assert _state(model) == before


@pytest.mark.parametrize("method", ["reweight", "ghost", "bookkeeping"])
def test_dropout_is_the_same_with_the_same_seed(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.TransformerEncoderLayer(6, 2, 7, dropout=0.3, batch_first=True))
    x, y = torch.randn(4, 3, 6), torch.zeros(4)
    results = []
    for name in ("bookkeeping", method):  # the first call verifies: that must not use up random numbers
        torch.manual_seed(7)
        results.append(clipping.clipped_gradients(model, quadratic, x, y, 1.0, name))
    assert_close(*results, 1e-5)
    torch.manual_seed(8)
    other = clipping.clipped_gradients(model, quadratic, x, y, 1.0, method)
    assert any(not torch.allclose(other[name], value, atol=1e-4) for name, value in results[0].items())


def test_outer_no_grad_does_not_matter():
    model, x = convnet(), torch.randn(3, 1, 4, 4)
    expected = clipping.clipped_gradients(model, quadratic, x, torch.zeros(3), 1.0)
    with torch.no_grad():
        found = clipping.clipped_gradients(model, quadratic, x, torch.zeros(3), 1.0)
    assert_close(found, expected, 1e-6)
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_models_run_uncompiled(method, how):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    expected = clipping.clipped_gradients(model, quadratic, x, torch.zeros(3), 1.0)
    compiled = model
    if how == "wrapped":
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    compiled(x)  # compiled before anything is watched
    found = clipping.clipped_gradients(compiled, quadratic, x, torch.zeros(3), 1.0, method)
    assert_close({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected, 1e-5)


def test_models_are_not_kept_alive():
    model = convnet()
    clipping.clipped_gradients(model, quadratic, torch.randn(3, 1, 4, 4), torch.zeros(3), 1.0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_recording_sees_the_loss_too():
    """A loss that calls the model once more (consistency between two views) is recorded like the rest."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()

    def loss(outputs, targets):
        return (outputs - model(targets)).square().sum(1)

    y = torch.randn(4, 3).double()
    expected = clipping.clipped_gradients(model, loss, x, y, 1.0, "naive")
    for method in METHODS:
        assert_close(clipping.clipped_gradients(model, loss, x, y, 1.0, method), expected)


def test_taps_are_not_added_after_the_backward_pass_began():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.enable_grad(), recording(model, 4) as recorded:
        recorded.contributions(model(x).sum())
        model(x)
        assert len(recorded.taps) == 1


def test_inside_a_compiled_step():
    """torch.compile on the whole step: the pass that is watched runs as it is, the rest is compiled."""
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LSTM(4, 2, batch_first=True)), torch.randn(3, 5, 4), torch.zeros(3)
    clip = clipping.Clipper(model, quadratic)
    expected = clipping.clipped_gradients(model, quadratic, x, y, 0.5)

    @torch.compile(backend="eager")
    def step(inputs, targets):
        sums = clip(inputs * 1.0, targets, 0.5).sums
        return {name: value / 3 for name, value in sums.items()}

    for _ in range(2):
        assert_close(step(x, y), {name: value / 3 for name, value in expected.items()}, 1e-6)


class Elsewhere:
    """Where a forward may keep a number."""

    last = 0.0


class Remembering(torch.nn.Module):
    """A record's outputs are larger after a record of larger numbers: kept outside of the model, where nobody looks."""

    def __init__(self, place, name):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.place = lambda: (place, name)

    def forward(self, x):
        place, name = self.place()
        before = float(getattr(place, name, 0.0))
        setattr(place, name, float(x.detach().abs().max()))
        return self.inner(x) * (1 + before)


def test_records_that_are_taken_one_by_one_do_not_meet_by_a_number_kept_elsewhere():
    model, draw = Remembering(warnings, "last_of_a_test"), torch.Generator().manual_seed(0)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    try:
        with pytest.raises(UnsupportedError, match="remembers"):
            clipping.clipped_gradients(model, loss, torch.randn(5, 4, generator=draw), torch.arange(5) % 3, 1.0, "naive")
    finally:
        del warnings.last_of_a_test


def test_what_is_kept_on_a_class_that_a_closure_names_is_refused_like_everything_that_is_named():
    model, draw = Remembering(Elsewhere, "last_of_a_test"), torch.Generator().manual_seed(0)
    loss, x, y = torch.nn.CrossEntropyLoss(reduction="none"), torch.randn(5, 4, generator=draw), torch.arange(5) % 3
    try:
        with pytest.raises(UnsupportedError, match="changes while it runs"):
            clipping.clip_batch(model, loss, x, y, 1.0, "naive")
    finally:
        del Elsewhere.last_of_a_test


def test_what_can_not_be_repeated_can_not_be_told_from_what_remembers():
    class Coin(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + int.from_bytes(os.urandom(4), "big") / 2**32)

    loss = torch.nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(UnsupportedError, match="drawn from elsewhere"):
        clipping.clipped_gradients(Coin(4, 3), loss, torch.randn(5, 4), torch.arange(5) % 3, 1.0, "naive")


class Kept(torch.nn.Module):
    """A linear map times 1 + (a number that ``step`` gives for a record), which it may have made of earlier ones."""

    def __init__(self, step, **attributes):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.step = step
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.inner(x) * (1 + self.step(self, x))


class Outside:
    """Where nobody looks: :meth:`clear` for every test."""

    @classmethod
    def clear(cls):
        cls.count, cls.total, cls.most, cls.seen = 0, 0.0, 0.0, []


def counted(model, x):
    Outside.count += 1
    return Outside.count


def counted_in_twos(model, x):
    Outside.count += 1
    return Outside.count % 2


def counted_in_threes(model, x):
    Outside.count += 1
    return Outside.count % 3 == 0


def running_mean(model, x):
    Outside.count, Outside.total = Outside.count + 1, Outside.total + float(x.detach().sum())
    return Outside.total / Outside.count


def largest_so_far(model, x):
    Outside.most = max(Outside.most, float(x.detach().abs().max()))
    return Outside.most


def before_it(model, x):
    Outside.seen.append(float(x.detach().sum()))
    return Outside.seen[-2] if len(Outside.seen) > 1 else 0.0


HOSTILE = {
    "a counter outside": (counted, {}),
    "a counter outside, even or odd": (counted_in_twos, {}),
    "a counter outside, every third": (counted_in_threes, {}),
    "a running mean outside": (running_mean, {}),
    "the largest number so far": (largest_so_far, {}),
    "the record before it": (before_it, {}),
    "torch's generator": (
        lambda model, x: torch.rand((), generator=model.own).item(),
        lambda: {"own": torch.Generator().manual_seed(0)},
    ),
    "Python's generator": (lambda model, x: model.own.random(), lambda: {"own": random.Random(0)}),
    "numpy's generator": (lambda model, x: model.own.random(), lambda: {"own": np.random.default_rng(0)}),
    "numpy's old generator": (lambda model, x: model.own.rand(), lambda: {"own": np.random.RandomState(0)}),
    "a rare draw": (lambda model, x: model.own.random() < 1e-3, lambda: {"own": random.Random(0)}),
    "itertools.count": (lambda model, x: next(model.own), lambda: {"own": itertools.count()}),
    "a dictionary": (lambda model, x: model.own.update(n=model.own["n"] + 1) or model.own["n"], lambda: {"own": {"n": 0}}),
    "a generator function": (lambda model, x: next(model.own), lambda: {"own": (n for n in range(10**6))}),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("count", [2, 5, 6])
def test_records_that_are_taken_one_by_one_are_functions_of_themselves(kind, count):
    """Counters, means and generators: what moves from record to record is refused in the batch in which it moves."""
    Outside.clear()
    step, attributes = HOSTILE[kind]
    torch.manual_seed(0)
    model, loss = Kept(step, **(attributes() if attributes else {})), torch.nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(UnsupportedError, match=r"remembers|changes while it runs"):
        clipping.clipped_gradients(model, loss, torch.randn(count, 4), torch.arange(count) % 3, 1.0, "naive")


def first_of_all(model, x):
    if not Outside.seen:
        Outside.seen.append(float(x.detach().abs().max()))
    return Outside.seen[0]


@pytest.mark.parametrize("method", ["naive", "bookkeeping"])
def test_the_first_record_that_a_model_ever_sees_is_nobodys(method):
    """A scale that is set by the first record: it is that of a made-up one, whoever is in the batch."""
    torch.manual_seed(0)
    loss, kept = torch.nn.CrossEntropyLoss(reduction="none"), []
    for x in (torch.randn(5, 4), torch.randn(5, 4)):
        Outside.clear()
        clipping.clipped_gradients(Kept(first_of_all), loss, x, torch.arange(5) % 3, 1.0, method)
        kept.append(Outside.seen)
    assert kept[0] == kept[1]
    assert 0 < kept[0][0] < 1


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()], ids=["random", "numpy", "torch"])
def test_random_numbers_are_a_seats_own(draw):
    """How many of them a record draws changes no other record's, nor what is drawn afterwards."""
    loss, found = torch.nn.CrossEntropyLoss(reduction="none"), []
    model = Kept(lambda model, x: [draw() for _ in range(1 + int(x.max() > 50))][-1])
    torch.manual_seed(1)
    x = torch.randn(5, 4)
    for first in (1.0, 100.0):
        x[0] = first
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        found.append((clipping.clip_batch(model, loss, x, torch.arange(5) % 3, 1.0, "naive").norms[1:], draw()))
    (norms, behind), (norms_then, behind_then) = found
    assert torch.equal(norms, norms_then)
    assert len(set(norms.flatten().tolist())) == 4
    assert behind == behind_then


@pytest.mark.parametrize("method", ["naive", "multiloss", "bookkeeping"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_a_nested_tensor_among_the_attributes(method, layout):
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.randn(5, 4)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    expected = clipping.clipped_gradients(model, loss, x, torch.arange(5) % 3, 1.0, method)
    model.lengths = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=layout)
    assert_close(clipping.clipped_gradients(model, loss, x, torch.arange(5) % 3, 1.0, method), expected, 1e-6)


@pytest.mark.parametrize("copies", [1, 2])
def test_what_a_model_remembers_is_looked_for_among_records_that_count(copies):
    """Empty seats have copies of one record, and between two copies of it the order shows nothing."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, generator=draw)
    x[0] = x[-1] = x[1]
    keep = torch.tensor([False, True, True, True, True, False, False])
    rows, targets = x.repeat_interleave(copies, 0), torch.arange(7 * copies) % 3
    model, loss = Remembering(warnings, "last_of_a_test"), torch.nn.CrossEntropyLoss(reduction="none")
    clipper = clipping.Clipper(model, loss, "naive", copies=copies)
    try:
        clipper(rows, targets, 1.0, mask=torch.zeros(7, dtype=torch.bool))  # nobody to look at
        with pytest.raises(UnsupportedError, match="remembers"):
            clipper(rows, targets, 1.0, mask=keep)
    finally:
        del warnings.last_of_a_test
