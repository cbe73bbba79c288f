"""A step whose sums are begun before anything is looked at is the step that is not."""

import copy
import dataclasses

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.parametrize import project_
from lipdp.training import preparing
from lipdp.training.batches import Rows, gather_lazily
from lipdp.training.methods import ProvedQuery
from lipdp.training.query import Sample
from lipdp.training.seats import choose_seats
from tests.test_graphs import recorder  # noqa: F401  (a fixture)

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SEATS = 24


def network(*more: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((12,)), nn.SpectralLinear(12, 8), *more, nn.GroupSort(2), nn.SpectralLinear(8, 4))
    project_(model)
    return model


def engine_of(model: torch.nn.Module, device: str = "cpu", **settings: object) -> lipdp.PrivacyEngine:
    model, loss = model.to(device), losses.CrossEntropy(tau=2.0)
    sizes = {"dataset_size": 400, "batch_size": 20, "steps": 16}
    plan = lipdp.plan(model, loss, delta=1e-3, noise_multiplier=2.0, accountant="rdp", **{**sizes, **settings})
    return lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.2), plan, seed=1, reproducible=True)


def sample_of(seed: int, count: int = 20, stored: bool = False, given: torch.dtype = torch.float32) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 12, generator=draw).mul(50).to(given), torch.randint(0, 4, (count,), generator=draw)
    seats = choose_seats(count, SEATS, lipdp.privacy.Stream(bytes([seed]) * 32))
    inputs = Rows(torch.cat([x, x])[torch.randperm(2 * count, generator=draw)], torch.arange(1, count + 1)) if stored else x
    return Sample(inputs, y, SEATS, torch.device("cpu"), dtypes=(torch.float32, torch.int64), seats=seats)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_sums_that_were_begun_are_those_that_are_asked_for(stored, given):
    engine = engine_of(network())
    query, parameters = engine._run.query, engine._run.parameters
    assert query.begin(sample_of(0)) is None, "nothing is recorded yet"
    for seed in (0, 1):
        query.ask(parameters, sample_of(seed), {})
    for seed in range(2, 6):
        sample = sample_of(seed, 20 - seed, stored, given)
        expected = {name: total.clone() for name, total in query.ask(parameters, sample, {}).sums.items()}
        begun = query.begin(sample)
        assert begun is not None
        replays = query._graphed.replays
        answer = query.ask(parameters, dataclasses.replace(sample, begun=begun), {})
        assert query._graphed.replays == replays + 1
        assert all(torch.equal(answer.sums[name], expected[name]) for name in expected)
        assert answer.again is not None
        again = answer.again().sums
        assert all(torch.equal(again[name], expected[name]) for name in expected), "the batch is read again, not its buffers"


@pytest.mark.usefixtures("recorder")
def test_what_does_not_fit_is_not_begun():
    engine = engine_of(network())
    query, parameters = engine._run.query, engine._run.parameters
    for seed in (0, 1):
        query.ask(parameters, sample_of(seed), {})
    good = sample_of(2)
    assert query.begin(good) is not None
    assert query.begin(sample_of(2, 3 * SEATS)) is None, "several microbatches"
    assert query.begin(dataclasses.replace(good, dtypes=(torch.float64, torch.int64))) is None
    assert query.begin(dataclasses.replace(good, seats=None)) is None
    assert query.begin(dataclasses.replace(good, inputs=good.inputs[:, :6])) is None, "records of another shape"
    empty = dataclasses.replace(good, inputs=good.inputs[:0], targets=good.targets[:0], seats=torch.full((SEATS,), -1))
    assert query.begin(empty) is None


@pytest.mark.usefixtures("recorder")
def test_a_model_that_has_changed_since_is_asked_anew():
    engine = engine_of(network())
    query, parameters = engine._run.query, engine._run.parameters
    for seed in (0, 1):
        query.ask(parameters, sample_of(seed), {})
    sample = sample_of(2)
    begun = query.begin(sample)
    vars(engine.loss)["tau"] = 8.0
    answer = query.ask(parameters, dataclasses.replace(sample, begun=begun), {})
    expected = engine_of(network())
    vars(expected.loss)["tau"] = 8.0
    fresh = expected._run.query.ask(expected._run.parameters, sample, {})
    assert all(torch.equal(answer.sums[name], fresh.sums[name]) for name in fresh.sums)


def trained(monkeypatch, begins: bool, *more: torch.nn.Module, **settings: object):
    begun = []
    if begins:
        inner = ProvedQuery.begin
        monkeypatch.setattr(ProvedQuery, "begin", lambda self, batch: begun.append(inner(self, batch)) or begun[-1])
    else:
        monkeypatch.setattr(ProvedQuery, "begin", lambda self, batch: None)
    engine = engine_of(network(*more), "cuda", **settings)
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(400, 12, generator=draw), torch.randint(0, 4, (400,), generator=draw)
    x[5], x[7, 3] = float("nan"), float("inf")
    data = torch.utils.data.TensorDataset(x.cuda(), y.cuda())
    for number, batch in enumerate(engine.batches(data)):
        if number == 6:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.05
        if number == 9:
            with torch.no_grad():
                next(engine.model.parameters()).mul_(1.5)  # outside of its set: projected before the step
        if number == 12:
            engine.load_state_dict(engine.state_dict())
        engine.step(*batch)
    monkeypatch.undo()
    return engine, begun


@cuda
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("settings", [{}, {"schedule": lipdp.Schedule(noise=((0, 1), (0.5, 1.5)), freeze={"1": 0.4})}], ids=str)
def test_on_cuda_a_run_that_begins_early_is_the_run_that_does_not(monkeypatch, drops, settings):
    more = [torch.nn.Dropout(0.5)] if drops else []
    one, begun = trained(monkeypatch, True, *more, **settings)
    other, _ = trained(monkeypatch, False, *more, **settings)
    assert sum(batch is not None for batch in begun) >= 6, "not in the first steps, nor where what it reads has changed"
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert one.steps == other.steps == 16


@cuda
@pytest.mark.parametrize("part", [False, True])
def test_on_cuda_inputs_are_placed_there_and_the_run_is_the_same(part):
    """Also with which digests its noise is bound to: a run that is resumed where they don't fit repeats its steps."""
    draw = torch.Generator().manual_seed(3)
    whole = torch.utils.data.TensorDataset(torch.randn(500, 12, generator=draw), torch.randint(0, 4, (500,), generator=draw))
    train = torch.utils.data.Subset(whole, range(50, 450)) if part else whole
    engines = [engine_of(network(), "cuda", dataset_size=400 if part else 500) for _ in range(2)]
    placed = engines[0].placed(train)
    assert [tensor.is_cuda for tensor in placed[0]] == [True, False]
    engines[1].bind(train)
    for engine, records in zip(engines, (placed, train), strict=True):
        for numbers in engine.samples(records):
            engine.step(*gather_lazily(records, numbers), sample=numbers)
    assert engines[0]._run.streams.trail == engines[1]._run.streams.trail
    for p, q in zip(engines[0].model.parameters(), engines[1].model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    whole.tensors[0].add_(1)
    with pytest.raises(lipdp.errors.DataError, match="not the records"):
        engines[0].placed(train)


class OfItsOwn(torch.utils.data.TensorDataset):
    def __init__(self, path: str) -> None:
        super().__init__(torch.zeros(30, 12), torch.zeros(30, dtype=torch.long))


@pytest.mark.parametrize("kind", [OfItsOwn, lambda path: [(torch.zeros(12), 1)] * 30])
def test_other_datasets_stay_where_they_are(kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pytest.fail("nobody asks"))
    data = kind("x")
    assert preparing._on(torch.device("cuda"), data) is None
    assert preparing._on(torch.device("cuda"), torch.utils.data.Subset(data, [1, 2])) is None


@pytest.mark.usefixtures("recorder")
def test_another_microbatch_size_or_other_memory_is_not_begun_with():
    engine = engine_of(network())
    query, parameters = engine._run.query, engine._run.parameters
    for seed in (0, 1):
        query.ask(parameters, sample_of(seed), {})
    good = sample_of(2)
    assert query.begin(dataclasses.replace(good, microbatch_size=SEATS // 2)) is None
    assert query.begin(good) is not None
    for p in engine.model.parameters():
        p.data = p.data.clone()
    assert query.begin(good) is None


@pytest.mark.usefixtures("recorder")
def test_a_copy_has_nothing_recorded():
    engine = engine_of(network())
    for seed in (0, 1):
        engine._run.query.ask(engine._run.parameters, sample_of(seed), {})
    assert engine._run.query._graphed.recordings == 1
    twin = copy.deepcopy(engine)
    assert twin._run.query._graphed.recordings == 0
    assert twin._run.query._graphed.function.__self__ is twin._run.query
    assert twin._run.watch._words._graphed.function.__self__ is twin._run.watch._words
