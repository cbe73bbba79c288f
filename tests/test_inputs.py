"""The structure of a record's input: leaves, rows, calls."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

from lipdp import inputs
from lipdp.errors import DataError

ONE, TWO = torch.arange(6).reshape(3, 2), torch.arange(3.0)


def test_going_over_leaves_keeps_the_structure():
    x = {"b": (ONE, TWO), "a": TWO}
    assert [name for name, _ in inputs.named_leaves(x)] == ["a", "b.0", "b.1"]
    doubled = inputs.mapped(lambda leaf: 2 * leaf, x)
    assert torch.equal(doubled["b"][0], 2 * ONE)
    parts, structure = inputs.flattened(x)
    again = inputs.rebuilt(parts, structure)
    assert again["a"] is TWO
    assert again["b"][0] is ONE
    assert inputs.flattened({"a": TWO, "b": (ONE, TWO)})[1] == structure
    assert inputs.flattened((TWO, ONE))[1] != inputs.flattened({"0": TWO, "1": ONE})[1]


def test_a_tensor_is_its_own_leaf():
    assert inputs.leaves(ONE)[0] is ONE
    assert inputs.flattened(ONE)[1] is None
    assert inputs.call(lambda x: x, ONE) is ONE


def test_other_mappings_and_lists_become_plain():
    assert inputs.plain(UserDict({"b": [ONE, TWO], "a": TWO})).keys() == {"a", "b"}
    with pytest.raises(DataError, match="names for keys, not an int"):
        inputs.plain({3: ONE})


def test_rows_are_those_of_every_leaf():
    assert inputs.rows_of({"a": ONE, "b": TWO}) == 3
    chosen = inputs.select({"a": ONE, "b": TWO}, torch.tensor([2, 0]))
    assert chosen["a"].tolist() == [[4, 5], [0, 1]]
    assert chosen["b"].tolist() == [2, 0]
    for bad, text in (
        ((ONE, TWO[:2]), "'0' 3, '1' 2"),
        ((ONE, torch.tensor(1)), "'1' of a batch has no dim"),
        ((), "no tensor at all"),
    ):
        with pytest.raises(DataError, match=text):
            inputs.rows_of(bad)
    with pytest.raises(DataError, match="'mask' of a batch is a str, not a tensor"):
        inputs.rows_of({"ids": ONE, "mask": "text"})


def test_arguments_in_order_and_by_name():
    def model(ids, mask=None):
        return ids if mask is None else ids * mask

    assert torch.equal(inputs.call(model, (ONE, ONE)), ONE * ONE)
    assert torch.equal(inputs.call(model, {"mask": ONE, "ids": ONE}), ONE * ONE)


def test_a_loss_gets_logits_or_all_that_it_asks_for():
    outputs = SimpleNamespace(logits=ONE.float(), hidden=TWO)
    assert inputs.loss_of(lambda o, y: o.sum(1), outputs, TWO).tolist() == [1, 5, 9]
    assert inputs.loss_of(lambda o, y: o.logits.sum(1) + o.hidden, outputs, TWO).tolist() == [1, 6, 11]
    assert inputs.loss_of(lambda o, y: o["logits"].sum(1), {"logits": ONE.float()}, TWO).tolist() == [1, 5, 9]
    assert inputs.logits_of((ONE, TWO)) == (ONE, TWO)


def test_what_a_model_gives_of_many_rows_leaves_each_part_in_its_mode():
    """A part that was frozen in evaluation mode inside a model that trains stays there."""
    frozen, live = torch.nn.BatchNorm1d(2).eval(), torch.nn.Dropout(0.9)
    model = torch.nn.Sequential(frozen, live)
    frozen.eval()
    assert (model.training, frozen.training, live.training) == (True, False, True)
    outputs = inputs.outputs_in_parts(model, ONE, 2, torch.Tensor.float)
    assert outputs.dtype == torch.float64
    assert torch.equal(outputs, frozen(ONE.float()).detach().double())
    assert (model.training, frozen.training, live.training) == (True, False, True)

    def failing():
        with inputs.evaluating(model):
            raise RuntimeError(live.training)

    with pytest.raises(RuntimeError, match="False"):
        failing()
    assert (model.training, frozen.training, live.training) == (True, False, True)
