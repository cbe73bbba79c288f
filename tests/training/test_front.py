"""Fixed layers applied once: the same run, step for step, with bounds that do not rest on what is stored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.data import Flip, PrecomputedCopies, RandomCrop
from lipdp.errors import CheckpointError, ConfigurationError, DataError, UnsupportedError
from lipdp.features.front import fixed_layers
from lipdp.training.batches import gather_lazily
from lipdp.training.query import Sample

from .common import SIZE, engine_of, planned, weights


def head(seed=0, mode="sphere", hidden=False):
    torch.manual_seed(seed)
    layers = [nn.Standardize(4, radius=4.0), nn.BoundedInput((4, 3), mode=mode), nn.Flatten()]
    if hidden:
        layers += [torch.nn.Linear(12, 8), nn.Boundary(norm=1.0, cotangent=0.5), nn.GroupSort(2), torch.nn.Dropout(0.2)]
    return nn.Sequential(*layers, torch.nn.Linear(8 if hidden else 12, 3), nn.ClipGradient(0.5))


def records(count=SIZE, seed=0, copies=None):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *(() if copies is None else (copies,)), 4, 3, generator=draw)
    x = x * torch.tensor([0.1, 0.4, 0.2, 0.3])[:, None] + torch.tensor([0.5, 0.0, -0.5, 0.2])[:, None]
    return TensorDataset(x, x.reshape(count, -1)[:, :3].argmax(1))


def run(model, data, settle, plan=None, **options):
    plan = planned(model, epsilon=8.0, steps=10, statistics_budget=0.2) if plan is None else plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loss = losses.CrossEntropy(tau=4.0)
    return lipdp.fit(
        model, loss, optimizer, plan, data, seed=3, reproducible=True, scheduler=scheduler, ema_decay=0.8, settle=settle, **options
    )


@pytest.mark.parametrize(
    ("copies", "hidden", "mode"), [(None, True, "sphere"), (1, False, "ball"), (2, True, "ball"), (None, False, "ball")]
)
def test_the_run_is_the_same(copies, hidden, mode):
    """Same seed, same records, same noise, same weights to rounding: with a trained part of one layer, and of several."""
    augmentation = None if copies is None else PrecomputedCopies(copies)
    models, histories = [], []
    for settle in (False, True, "in_place"):
        data = records(copies=copies)
        models.append(head(mode=mode, hidden=hidden))
        histories.append(run(models[-1], data, settle, augmentation=augmentation, validation=records(seed=5), evaluations=2))
        assert torch.equal(data.tensors[0], records(copies=copies).tensors[0]) == (settle != "in_place")
    for model, history in zip(models[1:], histories[1:], strict=True):
        assert history.epsilon == histories[0].epsilon
        assert history.metrics["validation_accuracy"] == histories[0].metrics["validation_accuracy"]
        for name, value in models[0].state_dict().items():
            assert torch.allclose(model.state_dict()[name].double(), value.double(), atol=1e-5), name
    start = weights(head(mode=mode, hidden=hidden))
    assert all(float((value - start[name]).norm()) > 0.01 for name, value in weights(models[1]).items())


def test_clipping_methods_and_mixed_ones_too():
    data = TensorDataset(records().tensors[0] / 4, records().tensors[1])
    for settings in (
        {"method": "bookkeeping", "max_grad_norm": 0.3},
        {"method": "mixed", "max_grad_norm": 0.3, "clipping": lipdp.Clipping(clipped=["4"])},
    ):
        models = []
        for settle in (False, True):
            torch.manual_seed(0)
            layers = [nn.BoundedInput((4, 3)), nn.Flatten(), torch.nn.Linear(12, 8), nn.Boundary(norm=1.0, cotangent=0.5)]
            models.append(nn.Sequential(*layers, torch.nn.Linear(8, 3)))
            plan = planned(models[-1], **settings)
            run(models[-1], data, settle, plan=plan)
        first, second = (weights(model) for model in models)
        assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


def test_a_layer_may_come_twice():
    found = []
    for settle in (False, True):
        torch.manual_seed(0)
        sort = nn.GroupSort(2)
        model = nn.Sequential(sort, nn.BoundedInput((6,)), sort, nn.SpectralLinear(6, 8), sort, nn.SpectralLinear(8, 4), sort)
        x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
        run(model, TensorDataset(x, x[:, :3].argmax(1)), settle, plan=planned(model))
        found.append(weights(model))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])


def test_a_run_may_stop_settled_and_go_on_unsettled_and_the_other_way(tmp_path):
    class Stop(lipdp.training.Callback):
        def on_step(self, run):
            run.stop = run.engine.steps == 4

    whole = head()
    run(whole, records(), False)
    for first, then in ((True, True), (True, False), (False, True)):
        file = tmp_path / f"{first}{then}.pt"
        run(head(), records(), first, checkpoint=file, callbacks=[Stop()])
        resumed = head()
        history = run(resumed, records(), then, checkpoint=file, resume=True)
        assert history.epsilon == planned(whole, epsilon=8.0, steps=10, statistics_budget=0.2).epsilon
        for name, value in whole.state_dict().items():
            assert torch.allclose(resumed.state_dict()[name].double(), value.double(), atol=1e-5), (first, then, name)


def settled(model=None, data=None, **options):
    model = head() if model is None else model
    plan = planned(model, epsilon=8.0, steps=10, statistics_budget=0.2)
    engine = engine_of(model, plan, **options)
    data = records() if data is None else data
    engine.release_statistics(data)
    return engine, engine.settle(data)


def test_what_is_stored_is_not_trusted():
    """Rows a million times too long, as if someone had written over them: no gradient is longer than the plan's bound."""
    engine, stored = settled()
    assert stored.tensors[0].shape == (SIZE, 12)
    assert torch.allclose(stored.tensors[0].norm(dim=1), torch.ones(SIZE))
    settings = engine._run.mechanism.at(0)
    bound = engine.plan.sensitivities
    for scale in (1e-3, 1.0, 1e6, 1e30):
        for row in range(4):
            x = scale * torch.randn(1, 12, generator=torch.Generator().manual_seed(row))
            sample = Sample(x, torch.tensor([row % 3]), 4, torch.device("cpu"))
            answer = engine._run.query.ask(engine._run.parameters, sample, settings.clips)
            for name, total in answer.sums.items():
                assert float(total.norm()) <= bound[name] * (1 + 1e-5)


def test_stored_rows_are_inside_and_pass_without_a_copy():
    """Where P's outputs lie on the sphere, half of them are a rounding error outside; they are stored a little inside."""
    for mode in ("sphere", "ball"):
        engine, stored = settled(head(mode=mode))
        inner = engine._run.settled.rest[0]
        rows = stored.tensors[0]
        for part in (rows, rows[:1], rows[3:70], rows[::3]):
            assert inner(part) is part
        assert float(rows.norm(dim=1).max()) > 1 - 2e-6


def test_one_row_outside_is_brought_in_and_no_other_changes():
    engine, stored = settled()
    inner, rows = engine._run.settled.rest[0], stored.tensors[0]
    for factor in (1 + 1e-5, 2.0, 1e10):
        mixed = rows.clone()
        mixed[7] *= factor
        found = inner(mixed)
        assert torch.equal(found[:7], rows[:7])
        assert torch.equal(found[8:], rows[8:])
        assert float(found[7].double().norm()) <= 1 + 1e-6
        assert torch.allclose(found[7], rows[7], atol=1e-5)
    assert torch.equal(torch.vmap(inner, in_dims=0)(rows.unsqueeze(1)).squeeze(1), rows)
    with pytest.raises(DataError, match="shape"):
        inner(rows[:, :5])


class WritesOver(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(torch.nn.functional.relu(x, inplace=True))


def test_layers_that_work_in_place_do_not_write_over_stored_rows():
    """At sampling rate 1 a microbatch is a view of them. A layer that says so gets a copy; where one doesn't, the proof refuses."""
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(nn.BoundedInput((6,)), torch.nn.Dropout(0.2, inplace=True), torch.nn.Linear(6, 3), nn.ClipGradient(0.5))
    engine = engine_of(model, planned(model, dataset_size=32, batch_size=32))
    stored = engine.settle(data)
    before = stored.tensors[0].clone()
    engine.step(*gather_lazily(stored, next(engine.samples(stored))), sample="own")
    assert torch.equal(stored.tensors[0], before)
    model = nn.Sequential(nn.BoundedInput((6,)), WritesOver(), nn.ClipGradient(0.5))
    engine = engine_of(model, planned(model, dataset_size=32, batch_size=32))
    with pytest.raises(UnsupportedError, match="in place"):
        engine.settle(data)
    engine.step(*next(engine.batches(data)))  # as if nothing had been tried
    assert engine.steps == 1


def test_steps_take_settled_rows_and_nothing_else():
    engine, stored = settled()
    with pytest.raises(DataError, match="examples of shape"):
        engine.step(*next(engine.batches(records())))
    before = weights(engine.model)
    engine.step(*next(engine.batches(stored)))
    assert engine.steps == 1
    assert weights(engine.model).keys() == before.keys()


def test_the_release_is_noised_and_charged_as_before():
    """Fails if settling loses the noise: on an empty batch the gradient is the planned noise, with the plan's deviation."""
    engine, _ = settled(optimizer=None)
    spent = engine.epsilon
    for _ in range(10):
        engine.step(torch.empty(0, 12), torch.empty(0, dtype=torch.long), sample="own")
    seen = torch.cat([gradients["3.weight"].flatten() for gradients in engine.optimizer.seen]) * engine.plan.batch_size
    assert float(seen.std()) == pytest.approx(engine.plan.noise_stds["3.weight"], rel=0.15)
    assert spent < engine.epsilon == engine.plan.epsilon


def test_layers_that_change_afterwards_are_noticed():
    engine, stored = settled()
    engine.step(*next(engine.batches(stored)))
    engine.model[0].mean.add_(0.5)
    with pytest.raises(ConfigurationError, match="settle"):
        engine.step(*next(engine.batches(stored)))
    assert engine.steps == 1
    engine.model[0].mean.sub_(0.5)
    state = engine.state_dict()
    other, _ = settled(seed=8)  # other statistics
    with pytest.raises(CheckpointError, match="settle"):
        other.load_state_dict(state)
    assert other.steps == 0


def test_when_a_run_can_not_be_settled():
    model = head()
    engine = engine_of(model, planned(model, epsilon=8.0, steps=10, statistics_budget=0.2))
    with pytest.raises(ConfigurationError, match="release the statistics"):
        engine.settle(records())
    engine, stored = settled()
    with pytest.raises(ConfigurationError, match="already"):
        engine.settle(stored)
    with pytest.raises(ConfigurationError, match="PrecomputedCopies"):
        settled(augmentation=RandomCrop(0, 2))
    trained = nn.Sequential(torch.nn.Linear(6, 3), nn.ClipGradient(1.0))
    clipped = planned(trained, method="bookkeeping", max_grad_norm=1.0)
    with pytest.raises(ConfigurationError, match="'0'"):
        engine_of(trained, clipped, input_shape=(6,)).settle(records())

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.BoundedInput((6,)), torch.nn.Linear(6, 3))

        def forward(self, x):
            return self.inner(x)

    wrapped = Wrapped()
    with pytest.raises(ConfigurationError, match="Sequential"):
        engine_of(wrapped, planned(wrapped)).settle(records())


def test_a_cache_is_for_stored_outputs_of_tensors(tmp_path):
    with pytest.raises(ConfigurationError, match="settle=True"):
        run(head(), records(), False, cache=tmp_path)
    model = nn.Sequential(nn.BoundedInput((12,)), torch.nn.Linear(12, 3), nn.ClipGradient(0.5))
    listed = [(x.flatten(), y) for x, y in records()]
    with pytest.raises(ConfigurationError, match="TensorDataset"):
        run(model, listed, True, plan=planned(model), cache=tmp_path)
    assert not list(tmp_path.iterdir())


class _Doubled(torch.nn.Module):
    """Fixed, in front of a Standardize: what a first stage applies."""

    def forward(self, x):
        return 2 * x


def test_two_stages_are_the_same_run_and_both_are_watched(tmp_path):
    def staged():
        return nn.Sequential(_Doubled(), *head())

    models = []
    for settle, cache in ((False, None), (True, None), (True, tmp_path), (True, tmp_path)):
        models.append(staged())
        run(models[-1], records(), settle, cache=cache, input_shape=(4, 3), plan=plan_of(models[-1]))
    for model in models[1:]:
        for name, value in models[0].state_dict().items():
            assert torch.allclose(model.state_dict()[name].double(), value.double(), atol=1e-5), name
    (file,) = tmp_path.iterdir()
    assert torch.equal(torch.load(file, weights_only=True), 2 * records().tensors[0])  # nothing of the statistics
    model, data = staged(), records()
    engine = engine_of(model, plan_of(model), input_shape=(4, 3))
    first = engine.settle(data)
    assert first.tensors[0].shape == (SIZE, 4, 3)
    with pytest.raises(ConfigurationError, match="release the statistics"):
        engine.settle(first)
    with pytest.raises(ConfigurationError, match="already"):
        engine.settle(data)
    engine.release_statistics(first)
    second = engine.settle(first)
    assert second.tensors[0].shape == (SIZE, 12)
    assert second.tensors[0].data_ptr() == first.tensors[0].data_ptr()  # the library's own memory is used again
    engine.step(*next(engine.batches(second)))
    engine.model[1].mean.add_(0.5)
    with pytest.raises(ConfigurationError, match="has changed"):
        engine.step(*next(engine.batches(second)))


def plan_of(model):
    return planned(model, epsilon=8.0, steps=10, statistics_budget=0.2, input_shape=(4, 3))


def test_fixed_copies_go_through_the_front_once():
    models = []
    for settle in (False, True):
        model = nn.Sequential(
            nn.Standardize(4, radius=4.0), nn.BoundedInput((4, 3)), nn.Flatten(), torch.nn.Linear(12, 3), nn.ClipGradient(0.5)
        )
        torch.nn.init.zeros_(model[3].weight)
        torch.nn.init.zeros_(model[3].bias)
        run(model, records(), settle, augmentation=Flip())
        models.append(model)
    for name, value in models[0].state_dict().items():
        assert torch.allclose(models[1].state_dict()[name].double(), value.double(), atol=1e-5), name
    assert float((models[0][3].weight - head()[3].weight).detach().norm()) > 0.01


def test_what_is_fixed():
    hooked = head()
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ConfigurationError, match="hooks"):
        fixed_layers(hooked)
    assert fixed_layers(head()) == 3
    assert fixed_layers(head(hidden=True)) == 3
    model = head(hidden=True)
    model[3].requires_grad_(False)
    assert fixed_layers(model) == 6  # up to the dropout, which is random while it trains
    assert fixed_layers(copy.deepcopy(model).eval()) == 7
    clipping = nn.Sequential(nn.BoundedInput((6,)), nn.ClipGradient(1.0), torch.nn.Linear(6, 3))
    assert fixed_layers(clipping) == 1
