"""Keys bound to everything a release depends on: the attacks of issue 15 on resumed, re-seeded, copied and rewound runs, again.

Each attack subtracts two releases that should have had the same noise. It wins if what is left is the difference of two gradients:
far below the noise. Where it fails, what is left is noise of √2 times the planned deviation. :func:`left_over` measures it, so
that 0 is a win and √2 a loss for the attacker; of some 100 to 200 numbers it is within 0.5 of √2 but with probability 1e-9.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import io
import multiprocessing
import os
import pickle
import time

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.data import RandomCrop
from lipdp.errors import BudgetError, CheckpointError, ConfigurationError, DataError, LipdpWarning
from lipdp.training import Callback, asking, positions, streams
from lipdp.training.batches import gather_lazily
from lipdp.training.run import Run
from lipdp.training.state import sealed
from tests.privacy.stand_in import draw_as_on_a_device

from .common import BATCH, SIZE, Spy, empty, engine_of, free, planned, same, small, toy, weights

SECRET = bytes(range(50, 82))
LOSS = losses.CrossEntropy(tau=4.0)


@pytest.fixture
def _same_secret(monkeypatch):
    """What "the same secret seed" means for private runs: the operating system gives the same bytes again."""
    monkeypatch.setattr(streams, "fresh_key", lambda: SECRET)


def left_over(one, two, plan):
    """Root mean square of the difference of two releases, in planned deviations; an attacker knows all gradients of others."""
    parts = [((one[n] - two[n]).double() * BATCH / plan.noise_stds[n]).flatten() for n in one]
    return float(torch.cat(parts).square().mean().sqrt())


def noise_apart(one, two, plan):
    return abs(left_over(one, two, plan) - 2**0.5) < 0.5


def new_process():
    """As if what follows ran in another process: its book is empty."""
    positions._runs.clear()


def engine_with(model=None, plan=None, **options):
    model = free() if model is None else model
    return lipdp.PrivacyEngine(
        model, LOSS, Spy(model, lr=options.pop("lr", 0.0)), planned(model) if plan is None else plan, **options
    )


def relabelled(data, record=7):
    x, y = (t.clone() for t in data.tensors)
    y[record] = (y[record] + 1) % 3
    return TensorDataset(x, y)


# ---------------------------------------------------------------- the same secret, something else different


MODES = [{}, {"seed": 5, "reproducible": True}]
both_modes = pytest.mark.parametrize("mode", MODES, ids=["private", "reproducible"])


def whole_run(data, model=None, steps=4, rate=1.0, **options):
    """All releases of a run at this sampling rate, with weights that stay where they are."""
    new_process()
    model = free() if model is None else model
    plan = planned(model, batch_size=SIZE if rate == 1 else BATCH, steps=steps)
    engine = engine_with(model=model, plan=plan, **options)
    for batch in engine.batches(data):
        engine.step(*batch)
    return engine.optimizer.seen, plan


@both_modes
@pytest.mark.usefixtures("_same_secret")
def test_one_label_corrected(mode):
    """At sampling rate 1 the difference of the two runs would be that record's gradient, without noise."""
    (one, plan), (again, _), (two, _) = (whole_run(data, **mode) for data in (toy(), toy(), relabelled(toy())))
    assert all(map(same, one, again))  # an exact repetition repeats
    plan_b = SIZE / BATCH  # releases are divided by the batch size
    for a, b in zip(one, two, strict=True):
        parts = [((a[n] - b[n]).double() * plan_b * BATCH / plan.noise_stds[n]).flatten() for n in a]
        assert abs(float(torch.cat(parts).square().mean().sqrt()) - 2**0.5) < 0.5


@both_modes
@pytest.mark.usefixtures("_same_secret")
def test_one_record_removed_or_moved(mode):
    x, y = toy().tensors
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
    base, plan = whole_run(toy(), **mode)
    for other in (TensorDataset(x[1:], y[1:]), TensorDataset(x[order], y[order]), TensorDataset(x.double().float() + 1e-7, y)):
        found, _ = whole_run(other, **mode)
        factor = SIZE / BATCH
        assert (
            abs(left_over({n: v * factor for n, v in base[0].items()}, {n: v * factor for n, v in found[0].items()}, plan) - 2**0.5)
            < 0.5
        )


@pytest.mark.usefixtures("_same_secret")
def test_samples_of_other_data_are_other_samples():
    """Two runs with the same coins on two versions of the data are not what composition is about."""
    chosen = [next(engine_with().samples(data)) for data in (toy(), toy(), relabelled(toy()))]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


class Bent(torch.nn.Module):
    """An activation that no text tells."""

    def __init__(self, function):
        super().__init__()
        self.inner = nn.GroupSort(2)
        self.function = function

    def forward(self, x):
        return self.function(self.inner(x))


@both_modes
@pytest.mark.usefixtures("_same_secret")
def test_other_programs_augmentations_and_optimisers(mode):
    images = torch.rand(16, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16) % 3

    def release(layer, augmentation=None, lr=0.0, loss=None):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.BoundedInput((1, 6, 6)),
            nn.Flatten(),
            torch.nn.Linear(36, 4),
            nn.Boundary(norm=1.0, cotangent=1.0),
            layer,
            torch.nn.Linear(4, 3),
        )
        plan = planned(model, loss)
        engine = lipdp.PrivacyEngine(model, loss or LOSS, Spy(model, lr=lr), plan, augmentation=augmentation, **mode)
        engine.step(images, labels, sample="own")
        return engine.optimizer.seen[0], plan

    base, plan = release(torch.nn.Tanh())
    assert same(base, release(torch.nn.Tanh())[0])
    others = [
        release(torch.nn.Sigmoid()),
        release(torch.nn.Tanh(), RandomCrop(1, 2)),
        release(torch.nn.Tanh(), RandomCrop(2, 2)),
        release(torch.nn.Tanh(), lr=0.1),
        release(torch.nn.Tanh(), loss=losses.CrossEntropy(tau=4.1)),
    ]
    for number, (one, _) in enumerate(others):
        for two in (base, *(other for other, _ in others[:number])):
            assert noise_apart(one, two, plan)


@pytest.mark.usefixtures("_same_secret")
def test_weights_changed_by_hand_get_other_noise():
    """Also in a reproducible run, whose noise does not depend on the rounding of sums."""
    for mode in MODES:
        releases = []
        for change in (None, 1e-3):
            new_process()
            engine = engine_with(**mode)
            engine.step(*empty(), sample="own")
            if change is not None:
                with torch.no_grad():
                    engine.model[1].weight[0, 0] += change
            engine.step(*empty(), sample="own")
            releases.append(engine.optimizer.seen)
        assert same(releases[0][0], releases[1][0])
        assert noise_apart(releases[0][1], releases[1][1], engine.plan)


@pytest.mark.usefixtures("_same_secret")
def test_private_noise_depends_on_the_sums_themselves():
    """The same batch in another order of summation: even rounding differs under other noise, so that it can't be read off."""
    batch = toy(100).tensors
    first, again, other = (engine_with(microbatch_size=size) for size in (100, 100, 7))
    for engine in (first, again, other):
        new_process()
        engine.step(*batch, sample="own")
    assert same(first.optimizer.seen[0], again.optimizer.seen[0])
    assert noise_apart(first.optimizer.seen[0], other.optimizer.seen[0], first.plan)


# ---------------------------------------------------------------- resumed on other data


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.engine.steps == self.step:
            raise KeyboardInterrupt


def interrupted(file, data):
    model = small()
    with pytest.raises(KeyboardInterrupt):
        lipdp.fit(model, LOSS, Spy(model, lr=0.1), planned(model), data, checkpoint=file, callbacks=[StopAt(5)], evaluations=4)


@pytest.mark.parametrize("other", ["label", "order", "size", "type", "another"])
def test_a_resume_on_other_data_is_refused_and_says_how_to_go_on(tmp_path, other):
    interrupted(tmp_path / "run", toy())
    x, y = toy().tensors
    data = {
        "label": relabelled(toy()),
        "order": TensorDataset(x.flip(0), y.flip(0)),
        "size": TensorDataset(x[1:], y[1:]),
        "type": TensorDataset(x.double(), y),
        "another": toy(seed=9),
    }[other]
    model = small()
    content = (tmp_path / "run").read_bytes()
    with pytest.raises(CheckpointError, match="fresh key"):
        lipdp.fit(model, LOSS, Spy(model, lr=0.1), planned(model), data, checkpoint=tmp_path / "run", resume=True)
    assert (tmp_path / "run").read_bytes() == content
    fresh = small()
    lipdp.fit(fresh, LOSS, Spy(fresh, lr=0.1), planned(fresh), data, checkpoint=tmp_path / "other")


def test_a_resume_on_the_same_records_goes_on(tmp_path):
    interrupted(tmp_path / "run", toy())
    model = small()
    x, y = toy().tensors
    with pytest.raises(CheckpointError, match="another kind of dataset"):
        lipdp.fit(
            model, LOSS, Spy(model, lr=0.1), planned(model), list(zip(x, y, strict=True)), checkpoint=tmp_path / "run", resume=True
        )
    lipdp.fit(model, LOSS, Spy(model, lr=0.1), planned(model), TensorDataset(x, y), checkpoint=tmp_path / "run", resume=True)


class Drawn(Dataset):
    """Augments on its own: no two readings are the same."""

    def __init__(self):
        self.data = toy()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return x + 0.01 * torch.randn(6), y


def test_records_that_change_are_said_to():
    with pytest.warns(LipdpWarning, match="change from one reading"):
        next(engine_with().samples(Drawn()))


def test_other_records_in_one_run_are_refused():
    engine = engine_with()
    list(zip(range(2), engine.batches(toy()), strict=False))
    next(engine.samples(toy()))  # the same records in another object
    with pytest.raises(DataError, match="fresh key"):
        next(engine.samples(relabelled(toy())))
    data = toy()
    next(engine.samples(data))
    data.tensors[1][3] += 1  # in place
    with pytest.raises(DataError, match="fresh key"):
        next(engine.samples(data))


def test_the_data_are_read_once_and_progress_is_told():
    class Counted(Dataset):
        reads = 0

        def __len__(self):
            return 40

        def __getitem__(self, i):
            Counted.reads += 1
            return toy().tensors[0][i], toy().tensors[1][i]

    told, data = [], Counted()
    engine = engine_with(plan=planned(free(), dataset_size=40))
    engine.bind(data, lambda done, total: told.append((done, total)))
    reads = Counted.reads
    assert told[-1] == (40, 40)
    assert 40 <= reads <= 50
    engine.bind(data)
    assert Counted.reads == reads
    next(engine.samples(data))
    assert Counted.reads <= reads + 40 + 16  # by which another run over them would be recognised: of few records, all


# ---------------------------------------------------------------- copied and rewound engines


def test_a_copy_repeats_or_is_refused():
    model = free()
    engine = lipdp.PrivacyEngine(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), planned(model))
    batches = list(zip(range(4), engine.batches(toy()), strict=False))
    engine.step(*batches[0][1])
    twin = copy.deepcopy(engine)
    engine.step(*batches[1][1])
    twin.step(*(part.clone() for part in batches[1][1]), sample="own")  # the same release
    assert same(weights(engine.model), weights(twin.model))
    engine.step(*batches[2][1])
    spent = twin.epsilon
    with pytest.raises(BudgetError, match="step 2 of this run was made before"):
        twin.step(*batches[3][1])
    assert twin.epsilon == spent
    assert twin.steps == 2


def test_a_copy_of_an_engine_is_no_copy_of_the_data():
    data = toy()
    engine = engine_with()
    next(engine.samples(data))
    assert copy.deepcopy(engine)._run.streams._dataset is data


@pytest.mark.parametrize("change", ["batch", "label", "weights", "learning rate"])
def test_a_rewound_engine_repeats_or_is_refused(change):
    engine = engine_with(lr=0.1)
    x, y = toy(50).tensors
    engine.step(x, y, sample="own")
    state = engine.state_dict()
    engine.step(x, y, sample="own")
    after = weights(engine.model)
    engine.load_state_dict(state)
    engine.step(x, y, sample="own")
    assert same(after, weights(engine.model))  # the same release
    engine.load_state_dict(state)
    if change == "batch":
        x = x[:-1]
        y = y[:-1]
    elif change == "label":
        y = (y + (torch.arange(50) == 3)) % 3
    elif change == "weights":
        with torch.no_grad():
            engine.model[1].bias[0] += 1
    else:
        engine.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(BudgetError, match="step 1 of this run was made before"):
        engine.step(x, y, sample="own")


def test_two_engines_from_one_state_are_one_run():
    state = engine_with().state_dict()
    engines = [engine_with(), engine_with()]
    for engine in engines:
        engine.load_state_dict(state)
    engines[0].step(*toy(20).tensors, sample="own")
    with pytest.raises(BudgetError, match="step 0"):
        engines[1].step(*toy(21).tensors, sample="own")
    engines[1].step(*toy(20).tensors, sample="own")


def test_statistics_are_released_once_for_each_data():
    def standardised():
        torch.manual_seed(0)
        layers = [nn.Standardize(4, radius=4.0), nn.BoundedInput((4, 3), mode="sphere"), nn.Flatten(), torch.nn.Linear(12, 3)]
        return nn.Sequential(*layers)

    x = torch.rand(64, 4, 3, generator=torch.Generator().manual_seed(0))
    data, other = TensorDataset(x, torch.arange(64) % 3), TensorDataset(x + 0.01, torch.arange(64) % 3)
    model = standardised()
    plan = planned(model, dataset_size=64, epsilon=8.0, statistics_budget=0.2)
    engine = engine_with(model=model, plan=plan)
    twin, third = copy.deepcopy(engine), copy.deepcopy(engine)
    engine.release_statistics(data)
    twin.release_statistics(data)
    assert torch.equal(engine.model[0].mean, twin.model[0].mean)
    with pytest.raises(BudgetError, match="statistics of this run was made before"):
        third.release_statistics(other)


class Coin(torch.nn.Module):
    """A forward that draws random numbers where nobody can repeat them."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x) * (1 + Coin.face)

    @staticmethod
    def toss():
        Coin.face = int.from_bytes(os.urandom(4), "big") / 2**32


@pytest.fixture(params=["processor", "device"])
def _drawn_by(request, monkeypatch):
    """Noise as it is drawn here, and as it is drawn on a device: with kernels, whose results nobody waits for."""
    if request.param == "device":
        draw_as_on_a_device(monkeypatch)


def coin_engine(device="cpu"):
    torch.manual_seed(0)
    model = Coin().to(device)
    plan = planned(model, method="naive", max_grad_norm=1.0, input_shape=(6,))
    return lipdp.PrivacyEngine(model, LOSS, Spy(model), plan, input_shape=(6,))


def assert_released_once(engine, again, x, y):
    """A second release of the same step is refused where its sums are others, and leaves the weights as they are."""
    state, twin = engine.state_dict(), copy.deepcopy(engine)
    Coin.toss()
    engine.step(x, y, sample="own")
    Coin.toss()  # for all records of a step
    other = twin if again == "copied" else engine
    if again == "rewound":
        engine.load_state_dict(state)
    before = weights(other.model)
    with pytest.raises(BudgetError, match="step 0 of this run was made before, with other sums"):
        other.step(x.clone(), y.clone(), sample="own")
    assert same(before, weights(other.model))


@pytest.mark.parametrize("again", ["rewound", "copied"])
@pytest.mark.usefixtures("_drawn_by")
def test_the_same_inputs_with_other_sums_are_another_release(again):
    """Noise is bound to the sums, so each would be a release of its own, at a position that was paid for once."""
    assert_released_once(coin_engine(), again, *toy(50).tensors)


@pytest.mark.usefixtures("_drawn_by")
def test_rows_written_to_behind_torch_are_other_sums():
    """Rows of a dataset that the run is bound to are told by their numbers alone; a write by numpy is seen in their sum."""
    x, y = toy().tensors
    stored = x.numpy().copy()
    data = TensorDataset(torch.from_numpy(stored), y)
    engine = engine_with()
    chosen = next(engine.samples(data))
    twin = copy.deepcopy(engine)
    engine.step(*gather_lazily(data, chosen), sample="own")
    stored[int(chosen[0])] *= -3
    with pytest.raises(BudgetError, match="step 0 of this run was made before, with other sums"):
        twin.step(*gather_lazily(data, chosen), sample="own")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_engine_rewound_inside_its_loop_makes_the_same_release(optimizer):
    """It still knows which dataset the rows are of."""
    data, model = toy(), free()
    engine = lipdp.PrivacyEngine(model, LOSS, optimizer(model.parameters(), lr=0.01), planned(model))
    for number, chosen in enumerate(engine.samples(data)):
        state = engine.state_dict()
        engine.step(*gather_lazily(data, chosen), sample="own")
        after = weights(model)
        engine.load_state_dict(state)
        engine.step(*gather_lazily(data, chosen), sample="own")
        assert same(after, weights(model)), "the same release"
        if number == 2:
            break


@pytest.mark.usefixtures("_drawn_by")
def test_noise_that_is_drawn_ahead_is_claimed_when_it_leaves(monkeypatch):
    """A draw that is thrown away, for the model was proved anew meanwhile, claims nothing; one that leaves does."""
    monkeypatch.setattr(asking, "_runs_ahead", lambda run: run.query.recorded)
    apart = property(lambda self: False, lambda self, value: None)  # digests of values come from the watch, as on a processor
    monkeypatch.setattr(Run, "on_one_device", apart, raising=False)
    x, y = toy(50).tensors
    engine = engine_with(lr=0.1)
    drawn, draw, look = [], engine._run.mechanism.draw, asking.look
    state = engine.state_dict()

    def counted(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    def changed_once(run):
        monkeypatch.setattr(asking, "look", look)
        with torch.no_grad():
            engine.model[1].bias[0] += 1
        return False

    monkeypatch.setattr(engine._run.mechanism, "draw", counted)
    monkeypatch.setattr(asking, "look", changed_once)
    engine.step(x, y, sample="own")
    assert len(drawn) == 2, "the first one was thrown away, with its sums"
    with torch.no_grad():
        state["model"]["1.bias"][0] += 1
    engine.load_state_dict(sealed({name: value for name, value in state.items() if name != "digest"}))
    engine.step(x, y, sample="own")
    assert len(drawn) == 3
    assert same(drawn[1], drawn[2]), "the same release"


def book_of(run=b"a run"):
    new_process()
    return functools.partial(positions.take_position, run), functools.partial(positions.claim_draw, run)


TAGS = {"bytes": [bytes([n] * 32) for n in (1, 2)], "words": [torch.tensor([n, -5, 0, 2**62]) for n in (1, 2)]}
NO_WORDS = torch.zeros(0, 2, dtype=torch.int64)


@pytest.mark.parametrize("kind", TAGS)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("position", [0, 70, "statistics"])
def test_the_book_knows_each_draw(kind, ahead, position):
    take, claim = book_of()
    one, two = TAGS[kind]
    words = torch.tensor([[3, 4]])

    def release(*tags):
        """Draws ahead of the position, or behind it: both are claimed."""
        if ahead:
            take(position, bytes([9] * 32), words, list(enumerate(tags)))
        else:
            take(position, bytes([9] * 32), words)
            for number, tag in enumerate(tags):
                claim(position, number, tag)

    release(one, two)
    release(one, two)
    for others in ((two, two), (one, one), (two, one)):
        with pytest.raises(BudgetError, match="with other sums"):
            release(*others)
    mixed = TAGS["words" if kind == "bytes" else "bytes"][0]
    with pytest.raises(BudgetError, match="with other sums"):
        release(mixed, two)  # the same step on another device: other noise
    with pytest.raises(BudgetError, match="from other inputs"):
        take(position, bytes(range(32)), words)
    release(one, two)


def test_the_book_does_not_keep_a_recordings_memory():
    take, _ = book_of()
    tag, words = torch.tensor([1, 2, 3, 4]), torch.tensor([[3, 4]])
    for number in range(200):  # rows are added as they are needed
        tag.fill_(number + 1)
        take(number, bytes([7] * 32), words, [(0, tag), (1, tag)])
    for number in (0, 63, 64, 199):
        take(number, bytes([7] * 32), words, [(0, torch.full((4,), number + 1)), (1, torch.full((4,), number + 1))])
        for claims in ([(0, torch.full((4,), 999))], [(1, torch.full((4,), 999))]):
            with pytest.raises(BudgetError, match=f"step {number} .*other sums"):
                take(number, bytes([7] * 32), words, claims)


def test_words_that_were_seen_are_compared_where_both_are_known():
    take, _ = book_of()
    words = torch.tensor([[3, 4], [5, 6]])
    take(0, bytes([7] * 32), words)
    take(0, bytes([7] * 32), words)
    for others in (words.flip(0), words + 1):
        with pytest.raises(BudgetError, match="from other inputs"):
            take(0, bytes([7] * 32), others)


def _in_a_fork(engine, told):
    try:
        engine.step(*toy(20).tensors, sample="own")
        told.put("released")
    except BudgetError as error:
        told.put(str(error))


@pytest.mark.skipif(not hasattr(os, "fork") or torch.cuda.is_available(), reason="needs os.fork, which CUDA does not survive")
def test_a_fork_does_not_go_on_with_the_run_of_its_parent():
    engine = engine_with()
    engine.step(*toy(20).tensors, sample="own")  # torch has its threads by now: what a copy computes with them may never end
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=_in_a_fork, args=(engine, told))
    child.start()
    assert "another process" in told.get(timeout=600)
    child.join()
    engine.step(*toy(20).tensors, sample="own")


def test_a_state_has_all_that_a_resumed_run_needs_and_no_less():
    engine = engine_of(free(), seed=None)
    state = engine.state_dict()
    assert state["private"] is True
    assert len(bytes.fromhex(state["key"])) == 32
    for name in ("key", "trail", "private", "data", "kept", "left"):
        for bad in ({k: v for k, v in state.items() if k != name}, {**state, name: 3}):
            with pytest.raises(CheckpointError):
                engine.load_state_dict(bad)


# ---------------------------------------------------------------- on a GPU, where digests are not waited for


def test_a_step_that_is_made_again_in_other_microbatches_is_refused_by_name(tmp_path):
    """Other microbatches round otherwise: other sums, other noise, a release that nobody has paid for."""
    first, again = (free() for _ in range(2))
    data, settings = toy(), {"method": "bookkeeping", "max_grad_norm": 0.5}
    engines = [
        lipdp.PrivacyEngine(
            model,
            LOSS,
            torch.optim.SGD(model.parameters(), lr=0.1),
            planned(model, LOSS, **settings),
            microbatch_size=rows,
            book=tmp_path / "book",
        )
        for model, rows in ((first, 32), (again, 8))
    ]
    engines[1].load_state_dict(engines[0].state_dict())
    engines[0].step(*data.tensors, sample="own")
    with pytest.raises(BudgetError, match=r"step 0 of this run was made before.*another microbatch_size,"):
        engines[1].step(*data.tensors, sample="own")
    assert same(weights(again), weights(free()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("_same_secret")
def test_on_a_gpu_other_batches_and_weights_get_other_noise():
    x, y = (t.cuda() for t in toy(50).tensors)
    relabelled_y = (y + (torch.arange(50, device="cuda") == 3)) % 3

    def release(inputs, targets, nudge=0.0):
        new_process()
        model = free().cuda()
        engine = engine_with(model=model)
        with torch.no_grad():
            model[1].bias[0] += nudge
        engine.step(inputs, targets, sample="own")
        return engine.optimizer.seen[0], engine.plan

    base, plan = release(x, y)
    assert same(base, release(x, y)[0])
    none = x[:0], y[:0]
    for one, two in (((x, y), (x, relabelled_y)), ((x, y), (x[:49], y[:49])), (none, (x[:1], y[:1]))):
        assert noise_apart(release(*one)[0], release(*two)[0], plan)
    assert noise_apart(release(*none)[0], release(*none, nudge=1e-3)[0], plan)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_rewound_engine_repeats_or_is_refused():
    x, y = (t.cuda() for t in toy(50).tensors)
    engine = engine_with(model=free().cuda(), lr=0.1)
    engine.step(x, y, sample="own")
    state = engine.state_dict()
    engine.step(x, y, sample="own")
    after = weights(engine.model)
    engine.load_state_dict(state)
    engine.step(x, y, sample="own")
    assert same(after, weights(engine.model))
    engine.load_state_dict(state)
    with pytest.raises(BudgetError, match="step 1 of this run was made before"):
        engine.step(x, (y + (torch.arange(50, device="cuda") == 3)) % 3, sample="own")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("again", ["rewound", "copied"])
def test_on_a_gpu_the_same_inputs_with_other_sums_are_another_release(again):
    assert_released_once(coin_engine("cuda"), again, *(t.cuda() for t in toy(50).tensors))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=["update", "noise"])
def test_on_a_gpu_rows_written_to_behind_torch_are_other_sums(optimizer):
    """Drawn ahead with all that follows (SGD), or by itself; the position is claimed for the very sums, and nobody waits for it."""
    x, y = (t.cuda() for t in toy().tensors)
    data = TensorDataset(x, y)
    model = free().cuda()
    engine = lipdp.PrivacyEngine(model, LOSS, optimizer(model.parameters(), lr=0.01), planned(model))
    for number, chosen in enumerate(engine.samples(data)):
        state = engine.state_dict()
        engine.step(*gather_lazily(data, chosen), sample="own")
        after = weights(model)
        engine.load_state_dict(state)
        engine.step(*gather_lazily(data, chosen), sample="own")
        assert same(after, weights(model)), "the same release"
        if number == 5:  # recordings are replayed by now
            break
    engine.load_state_dict(state)
    row = int(chosen[0])
    pointed = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))  # past torch's count of writes
    pointed[row] *= -3
    assert x._version == 0
    with pytest.raises(BudgetError, match="step 5 of this run was made before, with other sums"):
        engine.step(*gather_lazily(data, chosen), sample="own")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_claim_does_not_wait():
    take, claim = book_of()
    words, tag = torch.tensor([[3, 4]], device="cuda"), torch.arange(4, device="cuda")
    take(0, bytes([7] * 32), words, [(0, tag)])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 200):
            take(number, bytes([7] * 32), words, [(0, tag)] if number % 2 else [])
            if number % 2 == 0:
                claim(number, 0, tag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(BudgetError, match=r"step 7 .*other sums"):
        take(7, bytes([7] * 32), words, [(0, tag + 1)])


@pytest.mark.parametrize("how", [pickle.dumps, lambda engine: torch.save(engine, io.BytesIO())])
def test_an_engine_is_not_pickled_and_says_what_to_do(how):
    engine = engine_with()
    with pytest.raises(ConfigurationError, match="state_dict"):
        how(engine)
    assert copy.copy(engine).plan is engine.plan


@pytest.mark.parametrize("drawn", [True, False])
def test_of_two_threads_at_one_position_one_is_the_first(drawn, monkeypatch):
    take, claim = book_of()
    words = torch.tensor([[3, 4]])
    name = "same_draw" if drawn else "before"
    look = getattr(positions._Run, name)

    def slow_look(*about):
        found = look(*about)
        time.sleep(0.05)  # the other thread's turn, between looking and writing
        return found

    monkeypatch.setattr(positions._Run, name, slow_look)

    def release(number):
        try:
            if drawn:
                claim(0, 0, TAGS["bytes"][number])
            else:
                take(0, bytes([9 + number] * 32), words)
        except BudgetError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(release, range(2))) == [False, True]
