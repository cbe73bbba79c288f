"""Examples that influence each other: somewhere in the batch, at some sizes, in some mode, forward or back: refused, or alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lipdp
import lipdp.clipping as clipping
from lipdp import losses
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import quadratic
from tests.many import examples


def refused_or_alone(model, loss, x, y, method="bookkeeping"):
    """A model that may mix is refused, or each of its records is taken by itself: the clipped sum is that of the loop."""
    try:
        found = clipping.clipped_gradients(model, loss, x, y, 1.0, method)
    except UnsupportedError:
        return
    expected = clipping.clipped_gradients(model, loss, x, y, 1.0, "naive")
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=0, atol=0)


class RolledBack(torch.autograd.Function):
    """Nothing forward; going back every example gets something of its neighbour's cotangent."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 0.1 * g.roll(1, 0)


def later(h, a, b):
    """Only from some example on."""
    first = min(a, len(h) - 1)
    return torch.cat([h[:first], h[first:] + h[:1]]) if first else h + h[:1] * 0.1


def one_of_another(h, a, b):
    """A single example gets a little of a single other one."""
    i, j = a % len(h), b % len(h)
    row = torch.arange(len(h)).unsqueeze(1) == i
    return h + 1e-2 * row * h[j if i != j else (j + 1) % len(h)]


MIXERS = {
    "later": later,
    "one of another": one_of_another,
    "mean": lambda h, a, b: h - 0.1 * h.mean(0, keepdim=True),
    "detached mean": lambda h, a, b: h - 0.1 * h.mean(0, keepdim=True).detach(),
    "deviation": lambda h, a, b: h / (1 + h.std(0, keepdim=True)),
    "neighbour": lambda h, a, b: h + 0.1 * h.roll(1 + a % (len(h) - 1), 0),
    "turned round": lambda h, a, b: h + 0.1 * h.flip(0) if len(h) % 2 == 0 else h + 0.1 * h.roll(1, 0),
    "running sum": lambda h, a, b: h.cumsum(0) / len(h),
    "sorted": lambda h, a, b: 0.5 * h + 0.5 * h.sort(0).values,
    "largest": lambda h, a, b: h - h.amax(0, keepdim=True),
    "rank": lambda h, a, b: h * (1 + 0.1 * h[:, :1].argsort(0).argsort(0)),
    "attention": lambda h, a, b: h + torch.softmax(h @ h.T, 1) @ h,
    "backward only": lambda h, a, b: RolledBack.apply(h),
}
WHEN = {
    "always": lambda model, h: True,
    "in large batches": lambda model, h: len(h) > 3,
    "in training": lambda model, h: model.training,
    "in batches of its size": lambda model, h: len(h) == model.size,
}


class Mixing(nn.Module):
    def __init__(self, mixer, when, a, b, size):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.mixer, self.when, self.a, self.b, self.size = mixer, when, a, b, size

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.mixer is not None and len(h) > 1 and WHEN[self.when](self, h):
            h = MIXERS[self.mixer](h, self.a, self.b)
        return self.second(h)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    st.sampled_from(list(MIXERS)),
    st.sampled_from(list(WHEN)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(4, 40),
    st.sampled_from(["bookkeeping", "ghost", "reweight", "multiloss"]),
)
def test_mixers_are_refused_or_taken_alone(mixer, when, a, b, size, method):
    torch.manual_seed(a)
    model, x = Mixing(mixer, when, a, b, size), torch.randn(size, 5)
    refused_or_alone(model, quadratic, x, torch.zeros(size), method)


@pytest.mark.parametrize("when", list(WHEN))
def test_a_size_that_mixes_is_found_after_one_that_does_not(when):
    torch.manual_seed(0)
    model = Mixing("later", when, 3, 0, 9)
    for size in (1, 2, 3):
        if when == "in batches of its size":
            clipping.clipped_gradients(model, quadratic, torch.randn(size, 5), torch.zeros(size), 1.0)
    with pytest.raises(UnsupportedError, match="mixes the examples"):
        clipping.clipped_gradients(model, quadratic, torch.randn(9, 5), torch.zeros(9), 1.0)


@pytest.mark.parametrize("mixer", ["later", "sorted", "attention"])
def test_the_engine_takes_no_step(mixer):
    """It sees the microbatch as it is, padding included, before anything is released."""
    torch.manual_seed(0)
    model = Mixing(mixer, "in large batches", 5, 2, 0)
    loss = losses.CrossEntropy()
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=40,
        batch_size=20,
        delta=1e-3,
        noise_multiplier=1.0,
        steps=3,
        method="bookkeeping",
        max_grad_norm=1.0,
    )
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match="mixes the examples"):
        engine.step(torch.randn(20, 5), torch.randint(3, (20,)), sample="own")
    assert engine.steps == 0
    assert all(map(torch.equal, before, model.parameters()))


ORDINARY = {
    "none": lambda: Mixing(None, "always", 0, 0, 0),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)),
    "frozen statistics": lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8).eval(), nn.SiLU(), nn.Linear(8, 3)),
    "sines": lambda: nn.Sequential(nn.Linear(5, 7), Sines(), nn.Linear(7, 3)),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), nn.GRU(1, 4, batch_first=True), Last(), nn.Linear(4, 3)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)),
        nn.Linear(1, 8),
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
        nn.Flatten(),
        nn.Linear(40, 3),
    ),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 3)), nn.GroupNorm(2, 4), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 3)
    ),
    "deep": lambda: nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(5, 5), nn.ReLU(), nn.LayerNorm(5))]),
    "sorted within": lambda: nn.Sequential(nn.Linear(5, 6), SortedWithin(), nn.Linear(6, 3)),
}


class Sines(nn.Module):
    """Vectorised sines take a slower way where a neighbour is large: off by a unit in the last place."""

    def forward(self, x):
        return torch.sin(1e4 * x) + torch.cos(x)


class Last(nn.Module):
    def forward(self, x):
        return x[0][:, -1]


class SortedWithin(nn.Module):
    def forward(self, x):
        return x.sort(1).values


@pytest.mark.parametrize("name", list(ORDINARY))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 33, 64])
def test_ordinary_models_are_accepted(name, size):
    torch.manual_seed(size)
    model, x = ORDINARY[name](), torch.randn(size, 5)
    if name == "sines":
        x[::3] *= 1e6
    clipping.clipped_gradients(model, quadratic, x, torch.zeros(size), 1.0)


def test_a_model_that_wants_its_batch_in_order_is_accepted():
    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            if bool((x[1:, 0] > x[:-1, 0]).any()):
                raise ValueError("not in order")
            return self.layer(x)

    x = torch.randn(9, 5)
    x[:, 0] = torch.arange(9, 0, -1)
    clipping.clipped_gradients(Ordered(), quadratic, x, torch.zeros(9), 1.0)


def test_a_model_that_takes_no_other_examples_is_taken_one_by_one():
    class Particular(nn.Module):
        def __init__(self, x):
            super().__init__()
            self.layer, self.known = nn.Linear(5, 3), {tuple(row.tolist()) for row in x.double()}
            self.rows = len(x)

        def forward(self, x):
            if len(x) == self.rows and len({tuple(row.tolist()) for row in x.double()} & self.known) < self.rows:
                raise RuntimeError("only its own examples")
            return self.layer(x)

    x = torch.randn(9, 5)
    model = Particular(x)
    with pytest.warns(lipdp.errors.LipdpNotice, match="tolist"):
        clipping.clipped_gradients(model, quadratic, x, torch.zeros(9), 1.0)
    clipping.clipped_gradients(model, quadratic, x, torch.zeros(9), 1.0, "naive")


class MixesByMasks(torch.nn.Module):
    """Each example is divided by how many places the batch has on average: not seen while all masks are full."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes, self.head = mixes, torch.nn.Linear(4, 3)

    def forward(self, x, mask):
        places = mask.to(x.dtype).sum(1, keepdim=True)
        return self.head((x * mask.unsqueeze(-1)).sum(1) / (places.mean() if self.mixes else places))


@pytest.mark.parametrize("kind", [torch.long, torch.bool])
def test_mixing_by_masks_is_seen_in_a_batch_whose_masks_are_full(kind):
    torch.manual_seed(0)
    x = {"x": torch.randn(6, 5, 4), "mask": torch.ones(6, 5, dtype=kind)}
    y, loss = torch.arange(6) % 3, torch.nn.CrossEntropyLoss(reduction="none")
    assert clipping.clipped_gradients(MixesByMasks(False), loss, x, y, 1.0)
    with pytest.raises(UnsupportedError, match="mixes"):
        clipping.clipped_gradients(MixesByMasks(True), loss, x, y, 1.0)


class ToTheLongest(nn.Module):
    """Texts are cut to the longest of the batch, and averaged over its length."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, padding_idx=3), nn.Linear(4, 3)

    def forward(self, tokens):
        longest = int((tokens != 3).sum(1).max())
        return self.head(self.table(tokens[:, :longest]).mean(1))


class ByLengths(nn.Module):
    """The same with lengths beside the inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, lengths):
        longest = int(lengths.max())
        inside = torch.arange(longest) < lengths.unsqueeze(1)
        return self.head((self.first(x[:, :longest]) * inside.unsqueeze(-1)).mean(1))


class Scaled(nn.Module):
    """What looks like bytes is divided by 255; or what looks as if it had been is multiplied by it."""

    def __init__(self, divides):
        super().__init__()
        self.divides, self.head = divides, nn.Linear(4, 3)

    def forward(self, x):
        bytes_ = bool(x.max() > 1)
        if self.divides:
            return self.head(x / 255 if bytes_ else x)
        return self.head(x if bytes_ else x * 255)


class TouchesAll(nn.Module):
    """An output that is not used, times 0, so that its parameters have gradients; a record that is not finite spoils all."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.head(h) + 0 * self.unused(h).sum()


class FirstFew(nn.Module):
    """Each of two experts takes six at most."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x):
        chosen = (x[:, :1] > 0).long()
        parts = [expert(x) * ((chosen == k) & ((chosen == k).cumsum(0) <= 6)) for k, expert in enumerate(self.experts)]
        return self.head(sum(parts))


def numbers(*shape):
    return 0.1 + 0.8 * torch.rand(*shape)


ONLY_LATER = {
    "cut to the longest": (ToTheLongest, lambda: torch.randint(4, 20, (8, 6))),
    "lengths": (ByLengths, lambda: (numbers(8, 6, 4), torch.full((8,), 6))),
    "divided if bytes": (lambda: Scaled(True), lambda: numbers(8, 4)),
    "multiplied if not bytes": (lambda: Scaled(False), lambda: 100 * numbers(8, 4)),
    "times zero": (TouchesAll, lambda: numbers(8, 4)),
    "places at experts": (FirstFew, lambda: numbers(8, 4) * torch.tensor([1, -1] * 4).unsqueeze(1)),
}


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("name", list(ONLY_LATER))
def test_mixing_that_only_other_contents_show(name):
    torch.manual_seed(0)
    model, x = ONLY_LATER[name][0](), ONLY_LATER[name][1]()
    refused_or_alone(model, nn.CrossEntropyLoss(reduction="none"), x, torch.arange(8) % 3)


def by_rarity(outputs, targets):
    """Errors weighted by how rare the target is in the batch."""
    counts = torch.bincount(targets.long(), minlength=20).to(outputs.dtype)
    return (outputs.mean(1) - targets).square() * counts.max() / counts[targets.long()]


@pytest.mark.parametrize("targets", [torch.arange(8), torch.zeros(8), torch.full((8,), 4.0)])
def test_losses_that_mix_by_targets(targets):
    with pytest.warns(lipdp.errors.LipdpNotice, match="bincount"):
        refused_or_alone(nn.Linear(4, 3), by_rarity, torch.randn(8, 4), targets)
