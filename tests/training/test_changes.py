"""What changes between two steps: each kind is noticed before anything is released, proved anew or refused."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.errors import LipdpError, UnsupportedError

from .common import planned, toy

T = torch.nn


class Scaled(T.Module):
    """Plain tensors, arrays, lists, closures and objects beside the layers."""

    def __init__(self):
        super().__init__()
        self.factor = 0.5
        self.plain = torch.full((8,), 0.5)
        self.array = np.full(8, 0.5, dtype=np.float32)
        self.listed = [torch.full((8,), 0.5), 2]
        self.nested = {"a": {"b": [torch.full((8,), 0.5)]}}
        self.note = types.SimpleNamespace(scale=0.5, tensor=torch.full((8,), 0.5))
        self.register_buffer("buffer", torch.full((8,), 0.5))

    def forward(self, x):
        x = x * self.factor * self.plain * torch.from_numpy(self.array) * self.listed[0] * self.nested["a"]["b"][0]
        return x * self.note.tensor * self.note.scale * self.buffer * 1e3


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((6,)),
        nn.SpectralLinear(6, 8),
        Scaled(),
        nn.GroupSort(2),
        T.Dropout(0.1),
        nn.Sequential(T.Unflatten(1, (1, 8)), T.AvgPool1d(2), T.Flatten()),
        nn.Normalize(0.0, 2.0),
        T.LeakyReLU(0.1),
        nn.Boundary(norm=1.0, cotangent=1.0),
        nn.SpectralLinear(4, 4, bias=False).requires_grad_(False),
        nn.SpectralLinear(4, 3, bias=False),
    )


def hook(*_):
    return None


def swap_entries(p):
    with torch.no_grad():
        flat = p.view(-1)
        flat[:2] = flat[:2].flip(0).clone()


def negate_pair(p):
    with torch.no_grad():
        p.view(-1)[:2] *= -1


def exchange_names(module, one, other):
    """Each has the other's value; all values are the same objects in the same order."""
    own, names = vars(module), {one: other, other: one}
    items = [(names.get(name, name), value) for name, value in own.items()]
    own.clear()
    own.update(items)


CHANGES = {
    "two settings' names": lambda m: exchange_names(m[7], "negative_slope", "inplace"),
    "a setting": lambda m: setattr(m[0], "norm", 0.5),
    "a plain number": lambda m: setattr(m[2], "factor", 0.4),
    "a plain tensor's values": lambda m: m[2].plain.mul_(0.9),
    "a plain tensor": lambda m: setattr(m[2], "plain", torch.full((8,), 0.4)),
    "an array's values": lambda m: m[2].array.__imul__(np.float32(0.9)),
    "a tensor in a list": lambda m: m[2].listed[0].mul_(0.9),
    "an item of a list": lambda m: m[2].listed.__setitem__(0, torch.full((8,), 0.4)),
    "a tensor deep inside": lambda m: m[2].nested["a"]["b"][0].mul_(0.9),
    "an item deep inside": lambda m: m[2].nested["a"].update(b=[torch.full((8,), 0.4)]),
    "an attribute of an object": lambda m: setattr(m[2].note, "scale", 0.4),
    "a tensor of an object": lambda m: m[2].note.tensor.mul_(0.9),
    "a buffer's values": lambda m: m[2].buffer.mul_(0.9),
    "another buffer": lambda m: m[2].register_buffer("buffer", torch.full((8,), 0.4)),
    "weights": lambda m: m[1].weight.data.mul_(1.5),
    "weights, in place under no_grad": lambda m: torch.nn.init.constant_(m[1].weight, 0.2),
    "weights, other storage": lambda m: setattr(m[1].weight, "data", m[1].weight.data.clone() * 1.1),
    "weights permuted": lambda m: swap_entries(m[1].weight),
    "two signs": lambda m: negate_pair(m[1].weight),
    "one bit of a weight": lambda m: m[1].weight.data.view(-1)[:1].view(torch.int32).add_(1),
    "a bias": lambda m: m[1].bias.data.add_(1.0),
    "a frozen weight": lambda m: m[9].weight.data.mul_(0.5),
    "a replaced frozen parameter": lambda m: setattr(m[9], "weight", T.Parameter(torch.eye(4), requires_grad=False)),
    "a forward hook": lambda m: m[1].register_forward_hook(hook),
    "a forward hook deep inside": lambda m: m[5][1].register_forward_hook(hook),
    "a forward pre-hook": lambda m: m[1].register_forward_pre_hook(hook),
    "a backward hook": lambda m: m[1].register_full_backward_hook(hook),
    "a backward pre-hook": lambda m: m[1].register_full_backward_pre_hook(hook),
    "a hook on the model": lambda m: m.register_forward_hook(hook),
    "a parameter's hook": lambda m: m[1].weight.register_hook(hook),
    "a parameter's last hook": lambda m: m[1].weight.register_post_accumulate_grad_hook(hook),
    "an instance's forward": lambda m: setattr(m[3], "forward", lambda x: 9 * x),
    "an instance's method": lambda m: setattr(m[1], "effective", lambda name: 9 * m[1].weight),
    "the model's forward": lambda m: setattr(m, "forward", lambda x: x),
    "another class": lambda m: setattr(m[3], "__class__", type("Evil", (nn.GroupSort,), {"forward": lambda self, x: 9 * x})),
    "what a window is divided by": lambda m: setattr(m[5][1], "count_include_pad", False),
    "a negative slope": lambda m: setattr(m[7], "negative_slope", 4.0),
    "in place": lambda m: setattr(m[7], "inplace", True),
    "a limit on cotangents": lambda m: setattr(m[8], "cotangent", 5.0),
    "a limit on activations": lambda m: setattr(m[8], "norm", 5.0),
    "the rate of dropout": lambda m: setattr(m[4], "p", 0.9),
    "a layer replaced": lambda m: m.__setitem__(3, T.Identity()),
    "a layer replaced inside": lambda m: m[5].__setitem__(1, T.Identity()),
    "a layer appended": lambda m: m.append(T.Identity()),
    "a layer removed": lambda m: m.__delitem__(3),
    "a parameter replaced": lambda m: setattr(m[1], "weight", T.Parameter(m[1].weight.detach().clone())),
    "a parameter frozen": lambda m: m[1].weight.requires_grad_(False),
    "a parameter unfrozen": lambda m: m[9].weight.requires_grad_(True),
    "a parameter added": lambda m: m.register_parameter("extra", T.Parameter(torch.zeros(1))),
    "a parametrisation": lambda m: torch.nn.utils.parametrize.register_parametrization(m[10], "weight", T.Identity(), unsafe=True),
    "half precision": lambda m: m[1].half(),
    "an attribute added": lambda m: setattr(m[1], "extra", 3),
}


@functools.cache
def plan_of(method):
    """Every ``make()`` gives the same model, so that a plan of one is a plan of all."""
    return planned(make(), losses.CrossEntropy(tau=4.0), method=method, max_grad_norm=None if method == "clipless" else 1.0)


def engine_and_proofs(method="clipless", records=5):
    model = make()
    loss = losses.CrossEntropy(tau=4.0)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), plan_of(method))
    engine.step(*toy(records).tensors, sample="own")
    proofs = []
    prove = engine._run.query.prove
    engine._run.query.prove = lambda: proofs.append(1) or prove()
    return model, loss, engine, proofs


def noticed(engine, proofs):
    try:
        engine.step(*toy(5).tensors, sample="own")
    except LipdpError:
        assert engine.steps == 1
        return True
    return bool(proofs)


def test_there_are_enough_kinds():
    assert len(CHANGES) >= 40


def test_nothing_is_noticed_where_nothing_changes():
    _, _, engine, proofs = engine_and_proofs()
    assert not noticed(engine, proofs)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_noticed(change):
    model, _, engine, proofs = engine_and_proofs()
    CHANGES[change](model)
    assert noticed(engine, proofs)


class ProvedAnewError(LipdpError):
    pass


@pytest.mark.parametrize("change", CHANGES)
def test_clipping_notices_too(change):
    model, _, engine, _ = engine_and_proofs("bookkeeping", records=2)

    def prove():  # before anything is computed: what would be computed then is no concern here
        raise ProvedAnewError

    engine._run.query.prove = prove
    CHANGES[change](model)
    assert noticed(engine, [])


@pytest.mark.parametrize("method", ["clipless", "bookkeeping"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_all_modules_are_noticed(kind, method):
    _, _, engine, proofs = engine_and_proofs(method)
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(hook)
    try:
        assert noticed(engine, proofs)
        with pytest.raises(LipdpError, match="all modules"):
            lipdp.sensitivities(make(), losses.CrossEntropy())
    finally:
        handle.remove()
    engine.step(*toy(20).tensors, sample="own")


def test_a_class_whose_functions_are_replaced_is_noticed(monkeypatch):
    _, _, engine, proofs = engine_and_proofs()
    original = nn.GroupSort.forward
    monkeypatch.setattr(nn.GroupSort, "forward", lambda self, x: 7 * original(self, x))
    assert noticed(engine, proofs)


def test_the_loss_is_watched():
    _, loss, engine, proofs = engine_and_proofs()
    loss.forward = lambda outputs, targets: 100 * outputs.sum(1)
    assert noticed(engine, proofs)
    _, loss, engine, proofs = engine_and_proofs()
    loss.register_forward_hook(lambda module, inputs, output: 100 * output)
    assert noticed(engine, proofs)


class Keeping(T.Module):
    """Writes a record of the batch into its state, from some call on."""

    def __init__(self, where, first):
        super().__init__()
        self.lin, self.other = T.Linear(6, 3), T.Linear(6, 3)
        self.secret = T.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(6))
        self.where, self.left = where, [first]

    def forward(self, x):
        self.left[0] -= 1
        outputs = self.lin(x) + self.other(x)
        if self.left[0] < 0 and self.training:
            record = x[0].detach()
            match self.where:
                case "frozen":
                    self.secret.data.copy_(record)
                case "weight":
                    self.lin.weight.data[0].copy_(record)
                case "bias":
                    self.other.bias.data.copy_(record[:3])
                case "buffer":
                    self.buffer.copy_(record)
                case "another buffer":
                    self._buffers["buffer"] = record.clone()
                case "another weight":
                    self.lin.weight = T.Parameter(record.repeat(3, 1))
                case "a new buffer":
                    self.register_buffer("leak", record.clone())
                case "a new parameter":
                    self.leak = T.Parameter(record.clone(), requires_grad=False)
                case "a new module":
                    self.leak = T.Linear(6, 1)
                    self.leak.weight.data.copy_(record)
        return outputs


@pytest.mark.parametrize(
    ("method", "first"), [("bookkeeping", 0), ("bookkeeping", 60), ("ghost", 60), ("multiloss", 0), ("naive", 60)]
)
@pytest.mark.parametrize(
    "where",
    ["frozen", "weight", "bias", "buffer", "another buffer", "another weight", "a new buffer", "a new parameter", "a new module"],
)
def test_a_record_written_into_the_state_in_forward_is_refused_and_does_not_stay(where, method, first):
    model, loss = Keeping(where, first), losses.CrossEntropy()
    plan = planned(model, loss, method=method, max_grad_norm=1.0)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), plan)
    names = set(model.state_dict())
    inputs, targets = toy(20).tensors

    def steps():
        for _ in range(30):
            engine.step(100 * inputs, targets, sample="own")

    with pytest.raises(LipdpError):
        steps()
    assert set(model.state_dict()) == names
    assert all(value.abs().max() < 2 for value in model.state_dict().values())
    assert set(model.parameters()) == set(engine.optimizer.param_groups[0]["params"])


class Smuggling(T.Module):
    """Keeps records in a list, and lets them out by how its ``state_dict`` is made."""

    def __init__(self, how):
        super().__init__()
        self.lin, self.how, self.kept = T.Linear(6, 3), how, []
        if how == "a hook from the start":
            self._register_state_dict_hook(lambda module, state, *_: state.update(leak=module.kept[-1]) if module.kept else None)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.how == "a method" and self.kept:
            destination["leak"] = self.kept[-1]

    def forward(self, x):
        record = x.detach().clone()
        self.kept.append(record)
        match self.how:
            case "a hook":
                self._register_state_dict_hook(lambda module, state, *_: state.update(leak=record))
            case "a hook before":
                self.register_state_dict_pre_hook(lambda module, prefix, _: module.lin._buffers.update(leak=record))
            case "a version":
                self.lin._version = record
            case "no longer passing":
                self.register_buffer("leak", record, persistent=False)
                self._non_persistent_buffers_set.discard("leak")
        return self.lin(x)


SMUGGLING = ["a hook from the start", "a method", "a hook", "a hook before", "a version", "no longer passing"]


@pytest.mark.parametrize("method", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("how", SMUGGLING)
def test_a_state_dict_that_comes_to_hold_a_record_is_refused(how, method):
    model, loss = Smuggling(how), losses.CrossEntropy()
    plan = planned(model, loss, method=method, max_grad_norm=1.0)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), plan)
    inputs, targets = toy(20).tensors
    with pytest.raises(UnsupportedError, match=r"release that nothing accounts for|nor a buffer"):
        engine.step(100 * inputs, targets, sample="own")
    assert engine.steps == 0


@pytest.mark.parametrize("how", ["a hook from the start", "a method", "a hook", "no longer passing"])
def test_evaluating_a_model_leaves_nothing_in_its_state(how):
    class Untraceable(Smuggling):
        def forward(self, x):
            return super().forward(x) if x.sum() < 1e9 else super().forward(-x)  # so its own code sees the data

    with pytest.raises(UnsupportedError):
        lipdp.evaluate(Untraceable(how), losses.CrossEntropy(), toy(20))


@pytest.mark.parametrize("method", ["clipless", "bookkeeping"])
def test_a_model_with_a_state_of_its_own_is_refused_before_data_are_read(method):
    class Own(nn.Sequential):
        def get_extra_state(self):
            return {"note": 1}

    model, loss = Own(nn.BoundedInput((6,)), nn.SpectralLinear(6, 3, bias=False)), losses.CrossEntropy()
    plan = planned(model, loss, **({} if method == "clipless" else {"method": method, "max_grad_norm": 1.0}))
    with pytest.raises(UnsupportedError, match="_extra_state"):
        lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), plan)


def test_a_state_dict_with_other_names_is_fine():
    model, loss = T.Sequential(T.Linear(6, 3)), losses.CrossEntropy()
    model._register_state_dict_hook(lambda module, state, *_: state.update(other=state.pop("0.weight")))
    plan = planned(model, loss, method="bookkeeping", max_grad_norm=1.0)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), plan)
    engine.step(*toy(20).tensors, sample="own")
    assert engine.steps == 1


def test_no_record_is_shown_to_a_clipless_model_for_the_shape_of_its_outputs():
    """fit asks the loss whether it takes the labels: on zeros, of the shape that zeros in place of a record give."""
    seen = []

    class Looking(T.Module):
        def __init__(self):
            super().__init__()
            self.bound, self.lin = nn.BoundedInput((6,)), nn.SpectralLinear(6, 3, bias=False)

        def forward(self, x):
            if type(x) is torch.Tensor:
                seen.append(x.detach().clone())
            return self.lin(self.bound(x))

    data, model, loss = toy(20), Looking(), losses.CrossEntropy()
    lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), planned(model, loss, dataset_size=20, batch_size=10), data)
    records = {tuple(row.tolist()) for row in data.tensors[0]}
    assert not any(tuple(row.tolist()) in records for x in seen for row in x.reshape(-1, 6))


def test_a_table_that_grows_in_forward_is_not_state():
    class Positions(T.Module):
        def __init__(self):
            super().__init__()
            self.lin = T.Linear(6, 3)

        def forward(self, x):
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.arange(6.0), persistent=False)
            return self.lin(x + self.table)

    model, loss = Positions(), losses.CrossEntropy()
    plan = planned(model, loss, method="bookkeeping", max_grad_norm=1.0)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), plan)
    for _ in range(3):
        engine.step(*toy(20).tensors, sample="own")


def test_a_parameter_of_sensitivity_0_is_not_even_differentiated():
    class Past(T.Module):
        def __init__(self):
            super().__init__()
            self.bound, self.lin, self.unused = nn.BoundedInput((6,)), nn.SpectralLinear(6, 3), T.Parameter(torch.ones(3))

        def forward(self, x):
            return self.lin(self.bound(x))

    model, loss = Past(), losses.CrossEntropy()
    plan = planned(model, loss)
    assert plan.sensitivities["unused"] == 0 == plan.noise_stds["unused"]
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1.0), plan)
    engine.step(*toy(20).tensors, sample="own")
    assert torch.equal(model.unused.detach(), torch.ones(3))


class Kept(T.Module):
    """A name that is registered, and what a forward pass does to it."""

    def __init__(self, value, write=None, register="register_buffer"):
        super().__init__()
        self.inner, self.write = T.Linear(6, 3), write
        getattr(self, register)("kept", value)

    def forward(self, x):
        if self.write is not None:
            self.write(self, x.detach()[0])
        return self.inner(x)


def step_once(model, method="bookkeeping"):
    loss = losses.CrossEntropy(tau=4.0)
    plan = planned(model, loss, method=method, max_grad_norm=1.0)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    batches = engine.batches(toy())
    for _ in range(2):
        engine.step(*next(batches))


def set_buffer(model, record):
    model.kept = record.clone()


def set_parameter(model, record):
    model.kept = T.Parameter(record.clone(), requires_grad=False)


def set_signs(model, record):
    model.kept.data.copy_(torch.where(record > 0, 0.0, -0.0))


@pytest.mark.parametrize("method", ["bookkeeping", "naive"])
@pytest.mark.parametrize(
    ("value", "write", "register"),
    [
        (None, set_buffer, "register_buffer"),
        (None, set_parameter, "register_parameter"),
        (torch.zeros(6), set_signs, "register_buffer"),
    ],
    ids=["a buffer that was None", "a parameter that was None", "signs of zeros"],
)
def test_a_record_stays_in_no_name_that_was_there(method, value, write, register):
    model = Kept(None if value is None else value.clone(), write, register)
    with pytest.raises(UnsupportedError, match="changes"):
        step_once(model, method)
    if value is None:
        assert model.kept is None
    else:
        assert not torch.signbit(model.kept).any()


@pytest.mark.parametrize(
    "make_value",
    [
        lambda: torch.full((6,), torch.nan),
        lambda: torch.eye(6).to_sparse(),
        lambda: torch.eye(6).to_sparse_csr(),
        lambda: torch.eye(6).to(torch.complex64).conj(),
        lambda: torch.eye(6)[::2, 1:],
        lambda: torch.empty(0, 3),
        lambda: torch.quantize_per_tensor(torch.eye(6), 0.1, 0, torch.qint8),
    ],
    ids=["nan", "sparse", "csr", "conjugate", "view", "empty", "quantised"],
)
def test_buffers_of_any_kind_that_nobody_writes_to(make_value):
    step_once(Kept(make_value()))
