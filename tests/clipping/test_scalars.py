"""Parameters that are one number, and modules that hold plain tensors: all methods, against the loop, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import clipping

from .helpers import METHODS, assert_close, check_all, clipped, norm, quadratic, reference

pytestmark = pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")


def number(value):
    return torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))


class Scaled(torch.nn.Module):
    """A learned scale and shift, each one number; the scale is used twice."""

    def __init__(self, twice=True):
        super().__init__()
        self.scale, self.shift, self.twice = number(1.5), number(-0.2), twice
        self.inner = torch.nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        h = self.inner(x) * self.scale + self.shift
        return h * self.scale if self.twice else h


class Alone(torch.nn.Module):
    """One number is all there is."""

    def __init__(self):
        super().__init__()
        self.scale = number(0.7)

    def forward(self, x):
        return torch.tanh(x * self.scale)


class Listed(torch.nn.Module):
    """Numbers in lists and dicts, of lower and higher dimensions."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([number(0.5), torch.nn.Parameter(torch.randn(3, dtype=torch.float64)), number(2.0)])
        self.named = torch.nn.ParameterDict(
            {"temperature": number(1.3), "one": torch.nn.Parameter(torch.ones(1, dtype=torch.float64))}
        )

    def forward(self, x):
        return (x[:, :3] * self.parts[0] + self.parts[1]) / self.parts[2] * self.named["temperature"] - self.named["one"]


class PerExample(torch.nn.Module):
    """A module whose output has no dimension but the batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = number(1.5), number(0.1)

    def forward(self, x):
        return x.sum(1) * self.scale + self.bias


class Wide(torch.nn.Module):
    """Puts that number beside what follows."""

    def __init__(self):
        super().__init__()
        self.one, self.last = PerExample(), torch.nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.stack([self.one(x), x[:, 0]], 1))


class Tied(torch.nn.Module):
    """The same number in two modules, and in their parent."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Scaled(), Alone()
        self.b.scale = self.a.scale
        self.gain = self.a.scale

    def forward(self, x):
        return self.b(self.a(x)) * self.gain


class Branching(torch.nn.Module):
    """Control flow that reads values: vmap can't, so examples are done one by one."""

    def __init__(self):
        super().__init__()
        self.scale = number(1.2)

    def forward(self, x):
        return torch.stack([row * self.scale if float(row.sum()) > 0 else row * self.scale**2 for row in x])


MODELS = [Scaled, Alone, Listed, Wide, Tied, Branching]


def inputs(count=7):
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_every_method_is_the_loop(make):
    torch.manual_seed(0)
    check_all(make(), inputs())


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("method", ["naive", "multiloss", "bookkeeping"])
def test_layer_by_layer(make, method):
    """Each parameter clipped alone."""
    torch.manual_seed(0)
    model, x = make(), inputs()
    y = torch.zeros(len(x), dtype=torch.float64)
    rows = reference(model, quadratic, x, y)
    norms = {name: 0.8 * float(torch.stack([row[name].norm() for row in rows]).median()) for name in rows[0]}
    found = clipping.clipped_gradients(model, quadratic, x, y, norms, method, style="per_group")
    expected = {name: clipped([{name: row[name]} for row in rows], norms[name])[name] for name in norms}
    assert_close(found, expected)


@pytest.mark.parametrize("make", [Scaled, Alone, Listed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_copies_of_an_example_count_together(make, method):
    torch.manual_seed(0)
    model, x = make(), inputs(8)
    y = torch.linspace(-0.5, 0.5, 4, dtype=torch.float64).repeat_interleave(2)
    alone = reference(model, quadratic, x, y)
    rows = [{name: (alone[i][name] + alone[i + 1][name]) / 2 for name in alone[0]} for i in range(0, 8, 2)]
    c = float(torch.stack([norm(row) for row in rows]).median())
    found = clipping.clipped_gradients(model, quadratic, x, y, c, method, copies=2)
    assert_close(found, clipped(rows, c), label=method)


@pytest.mark.parametrize("method", METHODS)
def test_a_scale_without_a_finite_gradient_is_left_out(method):
    torch.manual_seed(0)
    model, x = Scaled(), inputs()
    x[2] = float("nan")
    y = torch.zeros(len(x), dtype=torch.float64)
    kept = [i for i in range(len(x)) if i != 2]
    expected = clipped(reference(model, quadratic, x[kept], y[kept]), 0.5)
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, 0.5, method), expected, label=method)


@pytest.mark.parametrize("method", [*METHODS, "mixed"])
def test_a_model_with_a_learned_scale_trains(method):
    torch.manual_seed(0)
    tail = Scaled(twice=False).float()
    model = lipdp.nn.Sequential(lipdp.nn.BoundedInput((4,)), tail) if method != "mixed" else _mixed(tail)
    x, y = inputs(64).float(), torch.arange(64) % 3
    loss = lipdp.losses.CrossEntropy()
    plan = lipdp.plan(
        model, loss, dataset_size=64, batch_size=16, delta=1e-3, noise_multiplier=1.0, steps=2, method=method, max_grad_norm=1.0
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lipdp.fit(model, loss, torch.optim.Adam(model.parameters(), lr=0.1), plan, TensorDataset(x, y), seed=0, reproducible=True)
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.shape == before[name].shape for name, p in model.named_parameters())


def _mixed(tail):
    """The first layer proved, the rest clipped."""
    return lipdp.nn.Sequential(
        lipdp.nn.BoundedInput((4,)), lipdp.nn.SpectralLinear(4, 4), tail.inner, lipdp.nn.Boundary(norm=1.0, cotangent=0.5), Gain()
    )


class Gain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.last = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.last(x) * self.gain


# ---------------------------------------------------------------------------------------------- plain tensors in a module


class Holder(torch.nn.Module):
    """A module with something of its own that is no parameter and no buffer."""

    def __init__(self, held, use, dtype=torch.float64):
        super().__init__()
        self.held, self.use = held, use
        self.inner = torch.nn.Linear(4, 3, dtype=dtype)

    def forward(self, x):
        return self.use(self.inner(x), self.held)


HELD = {
    "number": (torch.tensor(2.0), lambda h, t: h * t),
    "zero": (torch.tensor(0.0), lambda h, t: h + t),
    "vector": (torch.tensor([2.0, 1.0, 3.0]), lambda h, t: h * t),
    "matrix": (torch.arange(9.0).reshape(3, 3), lambda h, t: h @ t.to(h.dtype)),
    "indices": (torch.tensor([0, 2, 1]), lambda h, t: h[:, t]),
    "mask": (torch.tensor([True, False, True]), lambda h, t: h.masked_fill(t, 0.0)),
    "empty": (torch.empty(0), lambda h, t: h),
    "array": (np.array([1.0, 2.0, 3.0]), lambda h, t: h * float(t.sum())),
    "list": ([torch.tensor([1.0, 2.0, 3.0])], lambda h, t: h * t[0]),
    "dict": ({"a": torch.tensor([1.0, 2.0, 3.0])}, lambda h, t: h * t["a"]),
    "not a leaf": (torch.tensor([2.0, 3.0, 4.0], requires_grad=True) * 2, lambda h, t: h * t.detach()),
}


@pytest.mark.parametrize("kind", HELD)
def test_modules_with_plain_tensors(kind):
    torch.manual_seed(0)
    check_all(Holder(*HELD[kind]), inputs())


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("method", ["naive", "bookkeeping"])
def test_modules_with_plain_tensors_train(kind, method):
    torch.manual_seed(0)
    model = Holder(*HELD[kind], dtype=torch.float32)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    plan = lipdp.plan(
        model, loss, dataset_size=32, batch_size=16, delta=1e-3, noise_multiplier=1.0, steps=1, method=method, max_grad_norm=1.0
    )
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0, reproducible=True)
    engine.step(inputs(16).float(), torch.arange(16) % 3, sample="own")
    assert engine.steps == 1
