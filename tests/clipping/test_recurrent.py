"""nn.RNN, nn.LSTM, nn.GRU as the user wrote them: same outputs, same state_dict, right gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lipdp.clipping as clipping
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import check_all, quadratic
from tests.many import examples

KINDS = {
    "rnn": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "projected": lambda *a, **k: nn.LSTM(*a, proj_size=2, **k),
}


class Tagger(nn.Module):
    """Every output and every final state matter."""

    def __init__(self, core, batch_first=True):
        super().__init__()
        self.core, self.batch_first = core, batch_first

    def forward(self, x):
        output, state = self.core(x if self.batch_first else x.transpose(0, 1))
        output = output if self.batch_first else output.transpose(0, 1)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([output.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(st.sampled_from(list(KINDS)), st.integers(1, 2), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 4))
def test_against_the_loop(kind, layers, bidirectional, bias, batch_first, length):
    torch.manual_seed(0)
    core = KINDS[kind](3, 4, num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first).double()
    x = torch.randn(3, length, 3, dtype=torch.float64)
    check_all(Tagger(core, batch_first), x, methods=("reweight", "bookkeeping"), forms=("materialise", "gram"))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("sorted_", [False, True])
def test_packed_sequences(kind, sorted_):
    lengths = [4, 2, 1] if sorted_ else [2, 4, 1]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = KINDS[kind](3, 4, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x):
            n = x[:, 0, 0].long()
            packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=sorted_)
            output, state = self.core(packed)
            if not isinstance(output, nn.utils.rnn.PackedSequence) or not torch.equal(output.batch_sizes, packed.batch_sizes):
                raise TypeError("not packed as it came")  # no assert: pytest's own functions would be looked into
            padded, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
            states = state if isinstance(state, tuple) else (state,)
            return torch.cat([padded.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)

    torch.manual_seed(0)
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor(lengths)
    model = Model().double()
    expected = model(x)
    with recording(model, 3):
        assert torch.allclose(model(x), expected, atol=1e-12)
    check_all(model, x)


@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_data_keeps_its_order(kind):
    """Equal lengths may be sorted in any order; the twin must keep the very order of the packed input."""
    torch.manual_seed(0)
    core = KINDS[kind](2, 3, batch_first=True).double()
    packed = pack_padded_sequence(torch.randn(6, 3, 2).double(), torch.tensor([2, 3, 2, 3, 2, 2]), True, enforce_sorted=False)
    expected = core(packed)[0]
    with recording(core, 6):
        found = core(packed)[0]
    assert torch.allclose(found.data, expected.data, atol=1e-12)
    assert torch.equal(found.unsorted_indices, expected.unsorted_indices)


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
def test_initial_state_that_is_learned_by_the_input(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.start = nn.Linear(3, 4)
            self.core = KINDS[kind](3, 4, batch_first=True)

        def forward(self, x):
            h = self.start(x[:, 0])[None]
            return self.core(x, (h, torch.tanh(h)) if kind == "lstm" else h)[0]

    torch.manual_seed(0)
    check_all(Model().double(), torch.randn(3, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell, lambda a, b: nn.RNNCell(a, b, nonlinearity="relu", bias=False)]
)
def test_cells_called_step_by_step(cell):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(3, 4)

        def forward(self, x):
            state, outputs = None, []
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
                outputs.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(outputs, 1)

    torch.manual_seed(0)
    check_all(Model().double(), torch.randn(3, 4, 3, dtype=torch.float64))


def test_a_subclass_has_the_same_twin():
    class Mine(nn.LSTM):
        pass

    torch.manual_seed(0)
    check_all(Tagger(Mine(2, 3, batch_first=True).double()), torch.randn(3, 3, 2, dtype=torch.float64))


def test_gru_needs_two_cotangents():
    """One cotangent for both sides, as for an RNN, would give another (wrong) norm: the recurrent bias shows it."""
    torch.manual_seed(0)
    model = Tagger(nn.GRU(2, 3, batch_first=True).double())
    with torch.enable_grad(), recording(model, 2) as recorded:
        x = torch.randn(2, 4, 2, dtype=torch.float64)
        parts = recorded.contributions(quadratic(model(x), torch.zeros(2)).sum())
    assert not torch.allclose(parts["core.bias_ih_l0"].materialise(), parts["core.bias_hh_l0"].materialise())


def test_batch_second_by_mistake_is_refused():
    """nn.RNN(batch_first=False) fed with (batch, time, …): it would run through the examples as if they were time."""
    torch.manual_seed(0)
    for length in (2, 3, 5):
        model = Tagger(nn.RNN(2, 3))  # batch_first=False
        with pytest.raises(UnsupportedError, match="batch"):
            clipping.clipped_gradients(model, quadratic, torch.randn(3, length, 2), torch.zeros(3), 1.0)


def test_state_dict_is_untouched_by_twins():
    model = Tagger(nn.LSTM(2, 3, batch_first=True))
    before = {key: (id(value), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    clipping.clipped_gradients(model, quadratic, torch.randn(3, 2, 2), torch.zeros(3), 1.0)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(id(after[key]) == before[key][0] and torch.equal(after[key], before[key][1]) for key in before)
    assert "forward" not in vars(model.core)
