"""The self-check: what would make norms too small without a sound is found before anything is released."""

from __future__ import annotations

import itertools
import math
import random
import weakref

import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
import lipdp.nn
from lipdp.clipping import verify as module_under_test
from lipdp.clipping.verify import verify
from lipdp.errors import LipdpNotice, UnsupportedError
from tests.clipping.helpers import METHODS, check_all, quadratic

CHECKED = tuple(method for method in METHODS if method != "naive")


class ByHand(nn.Module):
    """The decoder is the embedding's weight, used by hand."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.T


class HiddenAdapter(nn.Module):
    """A weight used by hand, multiplied by zeros at the start: its gradient is 0 until the other factor has moved."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(x @ self.down.weight.T)


class Centred(nn.Module):
    """Batch statistics, in every mode or in training only; with the mean detached the gradients show nothing of it."""

    def __init__(self, only_in_training, detached):
        super().__init__()
        self.layer, self.only, self.detached = nn.Linear(4, 4), only_in_training, detached

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if self.training or not self.only:
            mean = h.mean(0, keepdim=True)
            h = h - (mean.detach() if self.detached else mean)
        return h


class Running(nn.Module):
    """A buffer that learns the mean of the data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.layer(x)


class OnlyInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        return h @ self.layer.weight if self.training else h


class Transposed(nn.Module):
    """Examples in the second dimension of an inner layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


CASES = {
    "mixing": (lambda: Centred(False, False), torch.randn(4, 4), "mixes the examples"),
    "mixing in evaluation": (lambda: Centred(False, False).eval(), torch.randn(4, 4), "mixes the examples"),
    "detached mixing": (lambda: Centred(False, True), torch.randn(4, 4), "mixes the examples"),
    "mixing in training only": (lambda: Centred(True, False), torch.randn(4, 4), "mixes the examples"),
    "detached mixing in training only": (lambda: Centred(True, True), torch.randn(4, 4), "mixes the examples"),
    "statistics kept": (Running, torch.randn(4, 4), r"buffer 'mean'.*from the data"),
}


# What layers don't show, a larger module does, evaluated for one example at a time.
SHOWN_ELSEWHERE = {
    "weight by hand": (ByHand, torch.randint(5, (4, 6))),
    "weight by hand behind zeros": (HiddenAdapter, torch.randn(4, 3, 4)),
    "weight by hand in training only": (OnlyInTraining, torch.randn(4, 4)),
    "transposed": (Transposed, torch.randn(4, 6, 4)),
    "transposed, square": (Transposed, torch.randn(3, 3, 4)),
}


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("case", list(SHOWN_ELSEWHERE))
def test_what_layers_do_not_show_is_right_all_the_same(case):
    torch.manual_seed(0)
    make, x = SHOWN_ELSEWHERE[case]
    check_all(make().double(), x.double() if x.is_floating_point() else x)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("method", CHECKED)
def test_found(case, method):
    torch.manual_seed(0)
    make, x, match = CASES[case]
    with pytest.raises(UnsupportedError, match=match):
        clipping.clipped_gradients(make(), quadratic, x, torch.zeros(len(x)), 1.0, method)


@pytest.mark.parametrize("case", list(CASES))
def test_found_where_gradients_are_too_large_to_hold_together(case, monkeypatch):
    """Of large models, those of one example are made at a time: the comparisons are the same."""
    monkeypatch.setattr(module_under_test, "_HELD", 0)
    test_found(case, "reweight")


def test_a_large_model_is_held_one_example_at_a_time(monkeypatch):
    """At no time do the gradients of more than a few examples live together, other than those that are small."""
    model, x = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 2)), torch.randn(3, 600)
    alive, most = weakref.WeakSet(), []
    one = module_under_test._Shown.one

    def counted(self, name, example):
        found = one(self, name, example)
        if found.numel() == 600 * 700:
            assert found._base is None  # a view would keep the gradients of all three
            alive.add(found)
        most.append(len(alive))
        return found

    monkeypatch.setattr(module_under_test._Shown, "one", counted)
    assert verify(model, quadratic, x, torch.zeros(3))
    assert 1 <= max(most) <= 2  # two where two passes are compared


@pytest.mark.parametrize("case", ["mixing", "detached mixing", "detached mixing in training only", "mixing in evaluation"])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("same", [False, True])
def test_mixing_is_found_in_small_batches_and_among_equal_examples(case, batch, same):
    """One example is its own mean, and so are equal ones: mixing must show all the same, or be looked for again later."""
    torch.manual_seed(0)
    make, x, match = CASES[case]
    x = x[:1].expand(batch, -1).clone() if same else x[:batch]
    with pytest.raises(UnsupportedError, match=match):
        clipping.clipped_gradients(make(), quadratic, x, torch.zeros(batch), 1.0)


def test_a_loss_that_mixes_or_regularises():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2), torch.randn(4, 4), torch.zeros(4)

    def relative(outputs, targets):
        return quadratic(outputs, targets) / quadratic(outputs, targets).mean()

    def decaying(outputs, targets):
        return quadratic(outputs, targets) + model.weight.square().sum()

    clipping.clipped_gradients(model, quadratic, x, y, 1.0, "reweight")  # verified, with another loss
    for loss in (relative, decaying):
        with pytest.raises(UnsupportedError, match="differs"):
            clipping.clipped_gradients(model, loss, x, y, 1.0, "reweight")


def test_tiny_losses_hide_nothing():
    with pytest.raises(UnsupportedError):
        clipping.clipped_gradients(
            Centred(False, False), lambda o, y: 1e-9 * quadratic(o, y), torch.randn(4, 4), torch.zeros(4), 1.0, "reweight"
        )


def test_once_per_model_mode_and_shape(monkeypatch):
    calls = []
    monkeypatch.setattr(module_under_test, "verify", lambda *a: calls.append(1) or True)
    model, y = nn.Sequential(nn.Linear(4, 2)), torch.zeros(4)
    for _ in range(3):
        clipping.clipped_gradients(model, quadratic, torch.randn(4, 4), y, 1.0)
        clipping.clipped_gradients(model, quadratic, torch.randn(2, 4), y[:2], 1.0, "multiloss")
        clipping.clipped_gradients(model, quadratic, torch.randn(4, 4), y, 1.0, "reweight")
        clipping.per_example_norms(model, quadratic, torch.randn(4, 4), y)
    assert len(calls) == 1
    clipping.clipped_gradients(model, quadratic, torch.randn(4, 3, 4), y, 1.0)
    assert len(calls) == 2
    clipping.clipped_gradients(model.eval(), quadratic, torch.randn(4, 4), y, 1.0)
    assert len(calls) == 3
    model[0].bias.requires_grad_(False)
    clipping.clipped_gradients(model, quadratic, torch.randn(4, 4), y, 1.0)
    assert len(calls) == 4
    model[0] = nn.Linear(4, 2)
    clipping.clipped_gradients(model, quadratic, torch.randn(4, 4), y, 1.0)
    assert len(calls) == 5


def test_what_could_not_be_compared_is_compared_again():
    model = Centred(False, False)
    clipping.clipped_gradients(model, quadratic, torch.full((3, 4), float("nan")), torch.zeros(3), 1.0)
    with pytest.raises(UnsupportedError):
        clipping.clipped_gradients(model, quadratic, torch.randn(3, 4), torch.zeros(3), 1.0)


def test_the_model_is_untouched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4).eval(), nn.LSTM(4, 2, batch_first=True))
    pointers = [p.data_ptr() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    model[2].weight.grad = torch.ones(4)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            h = model[1](model[0](x))
            return model[3](model[2](h.transpose(1, 2)).transpose(1, 2))[0]

    whole = Flat()
    whole.training = True
    assert verify(whole, quadratic, torch.randn(3, 5, 4), torch.zeros(3))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [p._version for p in model.parameters()] == versions
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert torch.equal(model[2].weight.grad, torch.ones(4))
    torch.set_rng_state(state)


def test_random_numbers_are_not_used_up():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    before = torch.get_rng_state()
    assert verify(model, quadratic, x, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_zero_initialised_models_are_accepted():
    """Nothing has a gradient at first but the last layer: no reason to refuse."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    nn.init.zeros_(model[2].weight)
    check_all(model, torch.randn(3, 4).double())


def test_a_key_bias_without_gradient_is_accepted():
    """Softmax does not see a key's bias: its gradient is rounding, which no relative comparison should see."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
    clipping.clipped_gradients(model, quadratic, torch.randn(4, 6, 8), torch.zeros(4), 1.0)


@pytest.mark.parametrize("name", ["mobile", "text"])
def test_ordinary_models_in_float32_are_accepted(name):
    torch.manual_seed(0)
    if name == "mobile":
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 1))
            for _ in range(6)
        ]
        model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        x = torch.rand(8, 3, 32, 32)
    else:
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        model = nn.Sequential(nn.Embedding(50, 16), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(16, 5))
        x = torch.randint(50, (8, 12))
    clipping.clipped_gradients(model, quadratic, x, torch.zeros(8), 1.0)


class Clamped(nn.Module):
    """Cotangents are clamped on their way back: by a hook, as recurrent networks often have it."""

    def __init__(self, limit):
        super().__init__()
        self.a, self.b, self.limit = nn.Linear(4, 4), nn.Linear(4, 2), limit

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-self.limit, self.limit))
        return self.b(torch.tanh(h))


@pytest.mark.parametrize("method", ["reweight", "ghost", "bookkeeping"])
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_a_backward_pass_that_is_not_linear(method, limit):
    """A loss weighted by ν would come back clamped all the same, larger than ν·g: what is released is what was measured."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.zeros(4)
    boundary = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), lipdp.nn.ClipGradient(limit), nn.Linear(4, 2))
    for model in (Clamped(limit), boundary):
        for i in range(4):
            mask = torch.arange(4) == i
            found = clipping.clipped_gradients(model, quadratic, x, y, 1e-4, method, mask=mask)
            assert math.hypot(*(float(value.norm()) for value in found.values())) <= 1e-4 * (1 + 1e-5)


def test_a_backward_pass_that_grows_from_call_to_call(monkeypatch):
    """As a second backward pass would see it, but not the one that was measured: there is none here."""
    torch.manual_seed(0)
    calls = itertools.count(1)  # a list would be put back behind a batch of one

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x)
            if h.requires_grad and self.training:
                h.register_hook(lambda g: g * 2.0 ** next(calls))
            return self.b(torch.tanh(h))

    model, x, y = Growing().eval(), torch.randn(1, 4), torch.zeros(1)
    for method in ("reweight", "ghost", "bookkeeping"):
        clipping.clipped_gradients(model, quadratic, x, y, 1e-4, method)
        model.train()
        with monkeypatch.context() as unnoticed:  # the self-check would see it
            unnoticed.setattr("lipdp.clipping.clipper.verify_once", lambda *_: None)
            with pytest.raises(UnsupportedError, match="changes while it runs"):
                clipping.clipped_gradients(model, quadratic, x, y, 1e-4, method)
        model.eval()


@pytest.mark.parametrize("method", ["naive", "multiloss", "bookkeeping"])
def test_cotangents_clamped_on_their_way_are_fine_for_the_others(method):
    torch.manual_seed(0)
    check_all(Clamped(1e-2).double(), torch.randn(4, 4).double(), methods=(method,))


def test_layers_dropped_by_pythons_random_numbers_are_accepted():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                if not self.training or random.random() < 0.5:
                    x = x + torch.tanh(layer(x))
            return x

    state = random.getstate()
    clipping.clipped_gradients(
        Sometimes(), quadratic, torch.randn(4, 4), torch.zeros(4), 1.0, mask=torch.zeros(4, dtype=torch.bool)
    )
    after = random.getstate()
    random.setstate(state)
    for _ in range(8):
        random.random()  # the real pass alone has drawn
    assert random.getstate() == after


def test_backward_hooks_of_the_users():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(), torch.randn(3, 5, 4).double()
    handle = model[2].register_full_backward_hook(lambda module, gi, go: (2 * gi[0],))
    check_all(model, x)
    with pytest.warns(LipdpNotice, match="BackwardHookFunction"):
        clipping.clipped_gradients(model, quadratic, x, torch.zeros(3), 1.0)
    handle.remove()
    seen = []  # what one record leaves there could reach the next
    model[2].register_full_backward_hook(lambda module, gi, go: seen.append(go[0].shape))
    with pytest.raises(UnsupportedError, match="changes while it runs"):
        clipping.clipped_gradients(model, quadratic, x, torch.zeros(3), 1.0)


def _deep():
    """Narrow, deep, with kinks: float32 gradients of a batch and of an example alone differ by more than a thousandth."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(24)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(4 * 64, 2))


def test_rounding_of_deep_networks_is_no_reason_to_refuse(monkeypatch):
    model, x, y = _deep(), torch.rand(3, 3, 8, 8), torch.zeros(3)
    pointers = [p.data_ptr() for p in model.parameters()]
    failures = []
    found_in_single = module_under_test._compare

    def coarse(a, b):
        """As if float32 were too coarse for this model."""
        if next(iter(a.values())).dtype == torch.float32:
            failures.append(a)
            return True, list(a)
        return found_in_single(a, b)

    monkeypatch.setattr(module_under_test, "_compare", coarse)
    assert verify(model, quadratic, x, y)
    assert failures
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_what_is_real_is_refused_in_float64_too():
    for case in ("mixing", "detached mixing", "mixing in training only"):
        make, x, match = CASES[case]
        model = make()
        with pytest.raises(UnsupportedError, match=match):
            verify(model, quadratic, x, torch.zeros(len(x)))
        assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_model_that_float64_breaks_is_judged_by_float32(monkeypatch):
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            h = self.layer(x)
            return h - h.mean(0, keepdim=True)

    with pytest.raises(UnsupportedError, match="mixes the examples"):
        verify(Single(), quadratic, torch.randn(3, 4), torch.zeros(3))


class Gated(nn.Module):
    """A gate that no gradient moves decides whether examples are mixed: a buffer, a frozen parameter or a plain attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, gate = nn.Linear(4, 3), torch.zeros(2)
        if kind == "buffer":
            self.register_buffer("gate", gate)
        else:
            self.gate = nn.Parameter(gate, requires_grad=False) if kind == "frozen" else gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return torch.where(self.gate[1] == 0, h, h + self.gate[1] * h.roll(1, 0))  # 0·NaN would mix too


@pytest.mark.parametrize("method", ["bookkeeping", "ghost", "reweight", "multiloss"])
@pytest.mark.parametrize("kind", ["buffer", "frozen", "attribute"])
@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
def test_a_gate_that_is_opened_past_all_versions(kind: str, method: str) -> None:
    """Writing through ``.data`` between two batches: whether it is open or not, records are taken one by one."""
    model = Gated(kind)
    clipper = clipping.Clipper(model, torch.nn.CrossEntropyLoss(reduction="none"), method=method)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    for gate in (0.0, 0.5, 0.0):
        model.gate.data[1] = gate
        try:
            found = clipper(x, y, 1.0)
        except UnsupportedError:
            assert gate
            continue
        expected = clipping.clip_batch(model, torch.nn.CrossEntropyLoss(reduction="none"), x, y, 1.0, "naive")
        torch.testing.assert_close(found.sums, expected.sums, rtol=0, atol=0)
