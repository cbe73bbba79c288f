"""Where the examples are: windows, tokens, length first, tables that all share; and what is evaluated again for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipdp import clipping
from lipdp.clipping.adoption import place_of_gradients
from lipdp.clipping.layouts import FIRST, SECOND, layouts_of
from lipdp.clipping.looking import look_at
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import check_all, quadratic

pytestmark = pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
X = torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Positions(nn.Module):
    """A table of positions that sees (1, length), in a network that does nothing else with it."""

    def __init__(self, rows=True):
        super().__init__()
        self.table, self.head, self.rows = nn.Embedding(6, 4), nn.Linear(4, 3), rows

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.head(torch.tanh(x + self.table(places[None] if self.rows else places)))


class Windows(nn.Module):
    """(batch · 3, 2, 4): windows of each example, one after another."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        h = self.norm(self.inner(x.reshape(-1, 2, 4)))
        return torch.tanh(h).reshape(x.shape)


class Interleaved(nn.Module):
    """Windows of all examples in turn: rows of an example do not lie together, though their number says so."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        parts = x.reshape(len(x), 3, 8).transpose(0, 1).reshape(-1, 8)
        return torch.tanh(self.inner(parts)).reshape(3, len(x), 8).transpose(0, 1)


class LengthFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 5), nn.LayerNorm(5)

    def forward(self, x):
        return torch.tanh(self.norm(self.inner(x.transpose(0, 1)))).transpose(0, 1)


class Experts(nn.Module):
    """Each token goes to one of two layers: how many they get depends on the data."""

    def __init__(self):
        super().__init__()
        self.block = _Block()

    def forward(self, x):
        return x + self.block(x)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        rows = x.reshape(-1, 4)
        chosen, out = (rows[:, 0] > 0).long(), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at = torch.nonzero(chosen == number).flatten()
            out = out.index_add(0, at, torch.tanh(expert(rows[at])))
        return out.reshape(x.shape)


MODELS = {
    "positions": Positions,
    "positions without a batch": lambda: Positions(rows=False),
    "windows": Windows,
    "interleaved": Interleaved,
    "length first": LengthFirst,
    "experts": Experts,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 4, 6])  # 6: as many examples as positions
def test_sums_are_those_of_a_loop(name, batch):
    torch.manual_seed(0)
    x = torch.randn(batch, 6, 4, dtype=torch.float64)
    check_all(MODELS[name]().double(), x, methods=("bookkeeping", "ghost"), forms=("auto",))


def _place(model, layer):
    model = model.double()
    clipping.per_example_norms(model, quadratic, X, torch.zeros(4))
    return place_of_gradients(model, layer, model.get_submodule(layer), layouts_of(model, X))


def test_what_is_evaluated_again():
    """Nothing, where a rule can be used; else the smallest module that sees the examples."""
    for model, layer in ((Positions(), "table"), (LengthFirst(), "norm")):
        assert _place(model, layer) is None
    assert _place(Windows(), "inner") is None  # several rows of each example, one after another: each pass shows whose they are
    assert _place(Experts(), "block.experts.1") == "block"
    assert _place(Positions(rows=False), "table") == ""
    assert _place(Interleaved(), "inner") == ""


def test_dimensions_that_grow_hold_the_examples():
    calls = look_at(LengthFirst().double(), X).calls
    assert calls["inner"][0].place == SECOND
    assert look_at(Windows().double(), X).calls["norm"][0].place not in (FIRST, SECOND)
    assert look_at(Positions().double(), X).calls["head"][0].place == FIRST
    assert look_at(Positions().double(), X).repeated == {"table"}


def test_a_mask_that_some_batches_do_without():
    """Modules that get an argument more in some runs: of the others all is known that was."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.inner = Positions(), _Scaled()

        def forward(self, x, mask):
            return self.inner(self.places(x), None if bool(mask.all()) else mask)

    class _Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, h, mask):
            return self.head(h if mask is None else h * mask[..., None])

    torch.manual_seed(0)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[2, 3:] = 0  # the third is the first with padding: two examples are run without a mask, three with one
    model = Masked().double()
    found = clipping.clipped_gradients(model, quadratic, (X, mask), torch.zeros(4), 0.5)
    expected = clipping.clipped_gradients(model, quadratic, (X, mask), torch.zeros(4), 0.5, "naive")
    assert all(torch.allclose(found[name], g) for name, g in expected.items())
    assert not look_at(model, (X, mask)).calls["inner"]


def test_a_model_is_the_same_after_it_was_looked_at():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    before = torch.get_rng_state().clone()
    clipping.support(model, X)
    assert model.training
    assert all(module.training for module in model)
    assert not model[0]._forward_hooks
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_that_is_taken_for_all_is_noticed():
    """Repeated, (1, …) gives the same outputs here; but only the first row is used, and has all of the gradient."""

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x):
            return torch.tanh(x @ self.table(torch.arange(4)[None])[0])

    torch.manual_seed(0)
    model = Weight().double()
    assert look_at(model, X).repeated == {"table"}
    check_all(model, X, methods=("bookkeeping",), forms=("auto",))


# ---------------------------------------------------------------------------------------------------------- support


def test_support_says_what_is_fast_slow_and_refused():
    found = clipping.support(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(6)), X.float())
    assert [row.speed for row in found.layers] == ["fast", "refused"]
    assert "per_example_norms" in found.layers[1].note
    assert not found.works
    experts = clipping.support(Experts().double(), X, torch.zeros(4), quadratic)
    assert experts.works
    assert {row.speed for row in experts.layers} == {"slow"}
    assert "'block' (_Block) is evaluated for each example" in str(experts)


def test_support_tells_what_the_self_check_says():
    class Mixes(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0, keepdim=True))

    found = clipping.support(nn.Sequential(Mixes(4, 4)), X.float(), torch.zeros(4), quadratic)
    assert not found.works
    assert "mixes the examples" in str(found)
    with pytest.raises(UnsupportedError):
        clipping.clipped_gradients(nn.Sequential(Mixes(4, 4)), quadratic, X.float(), torch.zeros(4), 1.0)


# ---------------------------------------------------------------------------------------------------------- other things people do


def test_compiled_models_run_as_they_are():
    torch.manual_seed(0)
    model = Windows().double()
    expected = clipping.clipped_gradients(model, quadratic, X, torch.zeros(4), 1.0)
    found = clipping.clipped_gradients(torch.compile(model), quadratic, X, torch.zeros(4), 1.0)
    assert all(torch.allclose(found[f"_orig_mod.{name}"], g) for name, g in expected.items())


def test_checkpointed_activations():
    class Checkpointed(LengthFirst):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    check_all(Checkpointed().double(), X, methods=("bookkeeping",), forms=("auto",))


def test_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    expected = clipping.clipped_gradients(model, quadratic, x, torch.zeros(4), 1.0)
    laid = model.to(memory_format=torch.channels_last)
    found = clipping.clipped_gradients(laid, quadratic, x.to(memory_format=torch.channels_last), torch.zeros(4), 1.0)
    assert all(torch.allclose(found[name], g) for name, g in expected.items())


def test_bfloat16_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(torch.bfloat16)
    x = X[:, 0].to(torch.bfloat16)
    found = clipping.clip_batch(model, quadratic, x, torch.zeros(4), 0.1)
    exact = clipping.clip_batch(model.double(), quadratic, x.double(), torch.zeros(4), 0.1)
    whole = torch.stack([g.square().sum() for g in found.sums.values()]).sum().sqrt()
    assert float(whole) <= 4 * 0.1 * 1.01
    assert all((found.sums[n] - g).norm() <= 0.05 * 0.4 for n, g in exact.sums.items())
