"""What a model may hold beside its parameters: tensors of all kinds, in whatever they lie. A change is noticed before a step, or
they are refused by name; nothing fails raw.
"""

from __future__ import annotations

import collections
import dataclasses
import types

import pytest
import torch

from lipdp.errors import UnsupportedError

from .common import engine_of, free, planned, toy


@dataclasses.dataclass
class Data:
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    tensor: torch.Tensor


class Plain:
    def __init__(self, tensor):
        self.tensor = tensor


TENSOR = torch.ones(3)
Named = collections.namedtuple("Named", "tensor")


def ones():
    return torch.ones(3)


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=layout)


def with_default():
    def function(tensor=TENSOR):
        return tensor

    return function


def itself():
    found = [ones()]
    found.append(found)
    return found


# How it is made, and how to its tensor.
HELD = {
    "list": (lambda: [ones()], lambda v: v[0]),
    "lists of lists": (lambda: [[[ones()]]], lambda v: v[0][0][0]),
    "a list that holds itself": (itself, lambda v: v[0]),
    "dict": (lambda: {"a": ones()}, lambda v: v["a"]),
    "key of a dict": (lambda: {ones(): 1}, lambda v: next(iter(v))),
    "ordered": (lambda: collections.OrderedDict(a=ones()), lambda v: v["a"]),
    "default": (lambda: collections.defaultdict(ones, a=ones()), lambda v: v["a"]),
    "proxy": (lambda: types.MappingProxyType({"a": ones()}), lambda v: v["a"]),
    "deque": (lambda: collections.deque([ones()]), lambda v: v[0]),
    "set": (lambda: {ones()}, lambda v: next(iter(v))),
    "named tuple": (lambda: Named(ones()), lambda v: v.tensor),
    "dataclass": (lambda: Data(ones()), lambda v: v.tensor),
    "frozen, with slots": (lambda: Frozen(ones()), lambda v: v.tensor),
    "object": (lambda: Plain(ones()), lambda v: v.tensor),
    "objects in objects": (lambda: Plain(Plain(Plain(ones()))), lambda v: v.tensor.tensor.tensor),
    "namespace": (lambda: types.SimpleNamespace(tensor=ones()), lambda v: v.tensor),
    "module in a list": (lambda: [torch.nn.Linear(2, 2)], lambda v: v[0].weight.data),
    "distribution": (lambda: torch.distributions.Normal(ones(), ones()), lambda v: v.loc),
    "packed": (lambda: torch.nn.utils.rnn.pack_sequence([ones(), torch.ones(2)]), lambda v: v.data),
    "closure": (lambda: (lambda tensor: lambda: tensor)(ones()), lambda v: v()),
    "default argument": (with_default, lambda v: v()),
    "nested": (nested, lambda v: v),
    "jagged": (lambda: nested(torch.jagged), lambda v: v.values()),
    "nested in an object": (lambda: Plain(nested()), lambda v: v.tensor),
    "jagged in a list": (lambda: [nested(torch.jagged)], lambda v: v[0].values()),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda v: v._values()),
    "compressed rows": (lambda: torch.eye(3).to_sparse_csr(), lambda v: v.values()),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64).conj(), lambda v: v),
    "half": (lambda: ones().bfloat16(), lambda v: v),
    "expanded": (lambda: torch.ones(1).expand(5), lambda v: v[:1]),
    "leaf": (lambda: torch.ones(3, requires_grad=True), lambda v: v.data),
}
UNCHANGING = {
    "range": lambda: range(10**12),
    "meta": lambda: torch.empty(3, device="meta"),
    "nothing": lambda: torch.empty(0),
    "opaque": lambda: ones().to_mkldnn(),
}


@pytest.mark.parametrize("method", [{}, {"method": "bookkeeping", "max_grad_norm": 1.0}])
def test_a_tensor_that_changes_in_whatever_holds_it_is_noticed(method):
    model = free()
    for number, make in enumerate([*(make for make, _ in HELD.values()), *UNCHANGING.values()]):
        setattr(model, f"held_{number}", make())
    engine = engine_of(model, planned(model, steps=40, **method), seed=None)
    batches = engine.batches(toy())
    engine.step(*next(batches))
    for number, (name, (_, tensor_of)) in enumerate(HELD.items()):
        assert not engine._run.watch.changed, name
        tensor_of(getattr(model, f"held_{number}")).mul_(2)
        assert engine._run.watch.changed, name
        engine.step(*next(batches))


class SaysNothing:
    @property
    def __dict__(self):
        raise RuntimeError("no attributes")


class HasNoItems(collections.abc.Sequence):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        raise KeyError("no items")


class HasNoValues(dict):
    def values(self):
        raise ValueError("no values")


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (SaysNothing, "RuntimeError", "no attributes"),
        (HasNoItems, "KeyError", "no items"),
        (lambda: HasNoValues(a=1), "ValueError", "no values"),
    ],
)
@pytest.mark.parametrize("method", [{}, {"method": "bookkeeping", "max_grad_norm": 1.0}])
def test_what_cannot_be_looked_at_is_refused_with_its_reason(make, kind, text, method, shows, monkeypatch):
    """By its type; its text may tell of a record, and is shown to who asks for it."""
    monkeypatch.setenv("LIPDP_DEBUG", str(int(shows)))
    model = free()
    model.held = make()
    with pytest.raises(UnsupportedError, match=f"can't be looked at.*raises {kind}") as refusal:
        engine_of(model, planned(model, **method), seed=None)
    assert (text in str(refusal.value)) == shows
