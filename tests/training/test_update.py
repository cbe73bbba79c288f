"""What follows the sums of a step, computed ahead: as the optimiser and the projection would have it, and in memory of its own."""

import itertools
import math

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp._numerics import deferred_checks
from lipdp.parametrize import project_
from lipdp.privacy import AdaptiveClip
from lipdp.privacy.mechanism import Draw
from lipdp.training.update import Update
from lipdp.training.watch import ModelWatch, project_trained

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.3, "weight_decay": 0.01},
    {"lr": 0.05, "momentum": 0.9},
    {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"lr": 0.05, "momentum": 0.8, "nesterov": True, "maximize": True},
]


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = nn.SpectralLinear(12, 8), nn.GroupSort(2), nn.SpectralLinear(8, 4, bias=False)
    model = nn.Sequential(nn.BoundedInput((12,)), *layers)
    project_(model)
    return model


def project_without_waiting(model: torch.nn.Module) -> None:
    with deferred_checks() as conditions:
        project_trained(model)
    assert all(map(bool, conditions))


def watch_of(model: torch.nn.Module) -> ModelWatch:
    watch = ModelWatch(model)
    watch.remember()
    watch.digest_elsewhere = lambda instead=None: torch.zeros(1, 2, dtype=torch.int64)  # type: ignore[method-assign]
    return watch


def draw_of(sums: dict[str, torch.Tensor]) -> Draw:
    return Draw(lambda *parts: (dict(zip(sums, parts, strict=True)), None), tuple(sums.values()), None)


def sums_for(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=draw, dtype=torch.float64) * 20 for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_a_step_of_sgd_and_the_projection(settings):
    ahead, plain = network(), network()
    one, other = torch.optim.SGD(ahead.parameters(), **settings), torch.optim.SGD(plain.parameters(), **settings)
    update = Update(ahead, one, watch_of(ahead), dict(ahead.named_parameters()), 10)
    for step in range(4):
        sums = sums_for(ahead, step)
        for name, p in plain.named_parameters():
            p.grad = (sums[name] / 10).to(p.dtype)
        other.step()
        project_without_waiting(plain)
        before = [p.detach().clone() for p in ahead.parameters()]
        moved = update.begin(draw_of(sums), sums)
        if step == 0 and settings.get("momentum"):
            assert moved is None  # torch's own step makes the momenta
            for name, p in ahead.named_parameters():
                p.grad = (sums[name] / 10).to(p.dtype)
            one.step()
            project_without_waiting(ahead)
            continue
        assert all(map(torch.equal, before, ahead.parameters())), "nothing moves before it is committed"
        assert bool(moved.fine)
        update.commit(moved)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(ahead.get_parameter(name), p, rtol=2e-6, atol=2e-6)
            if settings.get("momentum"):
                mine = one.state[ahead.get_parameter(name)]["momentum_buffer"]
                torch.testing.assert_close(mine, other.state[p]["momentum_buffer"], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("where", ["project_trained", "copies"])
def test_weights_are_back_whatever_ends_it(where, monkeypatch):
    model = network()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.5), watch_of(model), dict(model.named_parameters()), 10)
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def interrupted(*given):
        calls.append(1)
        if where == "copies" and len(calls) == 1:
            return [p.detach().clone() for p in given[0]]
        raise KeyboardInterrupt

    monkeypatch.setattr(f"lipdp.training.update.{where}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        update.begin(draw_of(sums_for(model, 0)), sums_for(model, 0))
    assert calls
    assert all(map(torch.equal, before, model.parameters()))


def test_half_precision_is_left_to_the_optimiser():
    model = network().to(torch.bfloat16)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.5), watch_of(model), dict(model.named_parameters()), 10)
    assert update.begin(draw_of(sums_for(model, 0)), sums_for(model, 0)) is None


def test_groups_have_rates_of_their_own_and_frozen_parameters_stay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.01, "momentum": 0.5}])
    update = Update(model, optimizer, watch_of(model), dict(model.named_parameters()), 10)
    for p in rest:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    names = [name for name, _ in model.named_parameters()]
    sums = {name: torch.full(model.get_parameter(name).shape, 1e-3, dtype=torch.float64) for name in names[:2]}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update.commit(update.begin(draw_of(sums), sums))
    for name, rate in zip(names, (0.5, 0.01, 0.0), strict=True):  # the third is frozen
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - rate * 1e-4, rtol=0, atol=1e-7)
    optimizer.param_groups[0]["lr"] = 0.25  # a scheduler's doing
    now = model.get_parameter(names[0]).detach().clone()
    update.commit(update.begin(draw_of(sums), sums))
    torch.testing.assert_close(model.get_parameter(names[0]).detach(), now - 0.25e-4, rtol=0, atol=1e-7)


class Odd(torch.optim.SGD):
    pass


def _hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _replaced(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: Odd(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1)),
        _hooked,
        _replaced,
    ],
)
def test_optimisers_that_do_something_else_are_left_to_themselves(make):
    model = network()
    update = Update(model, make(list(model.parameters())), watch_of(model), dict(model.named_parameters()), 10)
    sums = sums_for(model, 0)
    assert update.begin(draw_of(sums), sums) is None


def test_a_scheduler_finds_its_optimiser_called(recwarn):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    update = Update(model, optimizer, watch_of(model), dict(model.named_parameters()), 10)
    sums = sums_for(model, 0)
    update.commit(update.begin(draw_of(sums), sums))
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_weights_that_diverge_are_told():
    model = network()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), watch_of(model), dict(model.named_parameters()), 10)
    sums = sums_for(model, 0)
    next(iter(sums.values()))[0, 0] = math.nan
    assert not bool(update.begin(draw_of(sums), sums).fine)


# --- on CUDA, through the engine -------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="computed ahead on CUDA alone")


def trained(monkeypatch, ahead: bool, settings: dict, spoil: bool = False, clipped: bool = False, **planned):
    if not ahead:
        monkeypatch.setattr(Update, "begin", lambda self, draw, trained: None)
    begun = []
    if ahead:
        inner = Update.begin
        monkeypatch.setattr(Update, "begin", lambda self, *args: begun.append(inner(self, *args)) or begun[-1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)) if clipped else network()
    model, loss = model.to("cuda"), torch.nn.CrossEntropyLoss(reduction="none") if clipped else losses.CrossEntropy()
    sizes = {"dataset_size": 400, "batch_size": 100, "steps": 12}
    shape = {"input_shape": (12,)} if clipped else {}
    if clipped:
        planned = {"method": "bookkeeping", "max_grad_norm": 0.5, **shape, **planned}
    plan = lipdp.plan(model, loss, delta=1e-3, noise_multiplier=2.0, accountant="rdp", **sizes, **planned)
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    engine = lipdp.PrivacyEngine(model, loss, optimizer, plan, seed=1, reproducible=True, **shape)
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(400, 12, generator=draw), torch.randint(0, 4, (400,), generator=draw)
    if spoil:
        x[7] = math.nan
    data = torch.utils.data.TensorDataset(x.cuda(), y.cuda())
    for batch in engine.batches(data):
        engine.step(*batch)
    monkeypatch.undo()
    return model, optimizer, engine, begun


@cuda
@pytest.mark.parametrize(("settings", "spoil"), list(itertools.product(SETTINGS, [False, True])), ids=str)
def test_on_cuda_a_run_ahead_is_the_run_that_waits(settings, spoil, monkeypatch):
    one, _, engine, begun = trained(monkeypatch, True, settings, spoil)
    other, _, waiting, _ = trained(monkeypatch, False, settings, spoil)
    assert sum(moved is not None for moved in begun) >= 11
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert engine.epsilon == waiting.epsilon
    assert engine.steps == 12


@cuda
@pytest.mark.parametrize(("settings", "spoil"), list(itertools.product(SETTINGS, [False, True])), ids=str)
def test_on_cuda_a_clipped_run_ahead_is_the_run_that_waits(settings, spoil, monkeypatch):
    one, _, engine, begun = trained(monkeypatch, True, settings, spoil, clipped=True)
    other, _, waiting, _ = trained(monkeypatch, False, settings, spoil, clipped=True)
    assert sum(moved is not None for moved in begun) >= 11
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert engine.steps == waiting.steps == 12
    assert not engine._run.watch.changed


@cuda
def test_on_cuda_norms_that_adapt_are_left_to_the_engine(monkeypatch):
    changing = {"clipping": lipdp.Clipping(adaptive=AdaptiveClip(quantile=0.9, rate=0.3))}
    _, _, engine, begun = trained(monkeypatch, True, {"lr": 0.1}, clipped=True, **changing)
    assert not begun
    assert engine.clipping


@cuda
def test_on_cuda_a_change_that_is_noticed_throws_it_away(monkeypatch):
    model, _, engine, _ = trained(monkeypatch, True, {"lr": 0.1})
    assert not engine._run.watch.changed
    with torch.no_grad():
        next(model.parameters()).mul_(100)  # outside of its set
    assert engine._run.watch.changed
