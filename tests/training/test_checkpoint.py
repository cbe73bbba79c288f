"""Interrupted runs: resumed, they end where the uninterrupted one ends, bit for bit, and never spend more than the plan."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
import stat
from pathlib import Path

import pytest
import torch

import lipdp
from lipdp import losses
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.parametrize import Constrained
from lipdp.training import Callback, load_checkpoint, save_checkpoint
from lipdp.training.checkpoint import previous_path
from lipdp.training.state import STATE_FORMAT, sealed

from .common import empty, engine_of, free, planned, same, small, toy, weights

STEPS = 12


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])


class KilledError(Exception):
    pass


class KillAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.engine.steps == self.step:
            raise KilledError


class Count(Callback):
    def __init__(self):
        self.steps = []

    def on_step(self, run):
        self.steps.append(run.engine.steps)


def train(make_optimizer=sgd, make_scheduler=None, dropout=0.3, ema=0.9, seed=7, init=0, **options):
    model = small(seed=init, dropout=dropout)
    plan = planned(model, steps=STEPS)
    optimizer = make_optimizer(model)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    options = {"evaluations": 4, "checkpoint_every": 1e6, **options}  # saved at evaluations, however long a step takes
    history = lipdp.fit(
        model, losses.CrossEntropy(tau=4.0), optimizer, plan, toy(), toy(50, seed=1), seed=seed, scheduler=scheduler,
        ema_decay=ema, reproducible=seed is not None, **options,
    )  # fmt: skip
    return model, history


@functools.cache
def uninterrupted():
    return train()


@pytest.mark.parametrize("kill", [1, 2, 3, 4, 8, 11, 12])
def test_a_run_killed_at_any_step_ends_the_same(tmp_path, kill):
    expected, history = uninterrupted()
    file = tmp_path / "run"
    with pytest.raises(KilledError):
        train(checkpoint=file, callbacks=[KillAt(kill)])
    counter = Count()
    resumed, again = train(checkpoint=file, resume=True, callbacks=[counter])
    assert same(weights(expected), weights(resumed))
    assert again.metrics == history.metrics
    assert again.epsilon == history.epsilon == planned(small(dropout=0.3), steps=STEPS).epsilon
    assert counter.steps[-1] == STEPS
    assert counter.steps == list(range(counter.steps[0], STEPS + 1))


# Every two of them meet; more schedulers and optimisers are resumed in test_hostile_states.py.
@pytest.mark.parametrize(
    ("make_optimizer", "make_scheduler", "ema"),
    [
        (sgd, None, 0.5),
        (adam, None, None),
        (sgd, cosine, None),
        (adam, cosine, 0.5),
        (sgd, milestones, 0.5),
        (adam, milestones, None),
    ],
)
def test_with_any_optimiser_scheduler_and_average(tmp_path, make_optimizer, make_scheduler, ema):
    setting = {"make_optimizer": make_optimizer, "make_scheduler": make_scheduler, "ema": ema}
    expected, history = train(**setting)
    with pytest.raises(KilledError):
        train(**setting, checkpoint=tmp_path / "run", callbacks=[KillAt(8)])
    resumed, again = train(**setting, checkpoint=tmp_path / "run", resume=True)
    assert same(weights(expected), weights(resumed))
    assert again.metrics == history.metrics


def test_killed_again_and_again(tmp_path):
    expected, history = uninterrupted()
    for kill in (2, 5, 8, 11):
        with pytest.raises(KilledError):
            train(checkpoint=tmp_path / "run", resume=True, callbacks=[KillAt(kill)])
    resumed, again = train(checkpoint=tmp_path / "run", resume=True)
    assert same(weights(expected), weights(resumed))
    assert again.metrics == history.metrics


def test_without_a_seed_the_key_is_kept_from_the_first_moment(tmp_path):
    """A run that was killed before its first evaluation repeats its releases: it does not make new ones."""
    seen = []

    class Watch(Callback):
        def on_step(self, run):
            seen.append(weights(run.engine.model))
            if len(seen) == 2:
                raise KilledError

    with pytest.raises(KilledError):
        train(seed=None, checkpoint=tmp_path / "run", callbacks=[Watch()])
    train(seed=None, checkpoint=tmp_path / "run", resume=True, callbacks=[Watch()])
    assert same(seen[0], seen[2])
    assert same(seen[1], seen[3])


def test_a_finished_run_is_not_trained_further(tmp_path):
    expected, history = train(checkpoint=tmp_path / "run")
    counter = Count()
    model, again = train(checkpoint=tmp_path / "run", resume=True, callbacks=[counter], init=5)
    assert counter.steps == []
    assert same(weights(expected), weights(model))
    assert again.metrics == history.metrics
    assert again.epsilon == history.epsilon


def test_a_killed_process(tmp_path):
    """SIGKILL in the middle of a step's callback; nothing can tidy up."""
    file = tmp_path / "run"

    class Kill(Callback):
        def on_step(self, run):
            if run.engine.steps == 8:
                os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=train, kwargs={"checkpoint": file, "callbacks": [Kill()]})
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert load_checkpoint(file)["engine"]["steps"] == 6
    expected, history = uninterrupted()
    resumed, again = train(checkpoint=file, resume=True)
    assert same(weights(expected), weights(resumed))
    assert again.metrics == history.metrics


# ---------------------------------------------------------------------------------------------------- states that do not fit


def spent_engine(ema=None, optimizer=sgd, steps=3, **plan):
    model = small()
    engine = engine_of(model, planned(model, **plan), optimizer(model), ema_decay=ema)
    for _ in range(steps):
        engine.step(*toy(20).tensors, sample="own")
    return engine


@functools.cache
def averaged(steps):
    """One for all tests that only look at it, or have it refuse (and :func:`refuses` looks whether that leaves it as it was)."""
    return spent_engine(ema=0.9, steps=steps)


def refuses(engine, state, match=None):
    before, values = engine.state_dict(), weights(engine.model)
    with pytest.raises(CheckpointError, match=match):
        engine.load_state_dict(state)
    assert same(values, weights(engine.model))
    assert str(engine.state_dict()) == str(before)


def test_a_state_of_another_run_is_refused_and_changes_nothing():
    engine = spent_engine()
    other = engine_of(free())
    refuses(engine, other.state_dict(), "another plan")
    refuses(engine, spent_engine(noise_multiplier=1.1).state_dict(), "another plan")
    refuses(engine, spent_engine(steps=1, delta=1e-5).state_dict(), "another plan")
    refuses(engine, spent_engine(ema=0.9).state_dict(), "ema_decay")
    refuses(spent_engine(ema=0.9), engine.state_dict(), "ema_decay")
    refuses(spent_engine(ema=0.9), spent_engine(ema=0.8).state_dict(), "ema_decay")
    refuses(engine, spent_engine(optimizer=adam).state_dict(), "another optimiser")
    refuses(spent_engine(optimizer=adam), engine.state_dict(), "another optimiser")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("key"),
        lambda s: s.update(key="not hexadecimal"),
        lambda s: s.update(key=None),
        lambda s: s.update(steps="many"),
        lambda s: s.update(steps=10**6),
        lambda s: s.update(steps=-1),
        lambda s: s.update(format=0),
        lambda s: s.update(plan="{}"),
        lambda s: s.update(plan=None),
        lambda s: s.update(model=None),
        lambda s: s["model"].pop("1.weight"),
        lambda s: s["model"].update(extra=torch.zeros(1)),
        lambda s: s["model"].update({"1.weight": torch.zeros(2, 2)}),
        lambda s: s["model"].update({"1.weight": "text"}),
        lambda s: s.update(optimizer={}),
        lambda s: s["optimizer"].update(param_groups=[]),
        lambda s: s["optimizer"].pop("state"),
        lambda s: s["average"]["weights"].pop("3.weight"),
        lambda s: s["average"]["weights"].update({"3.weight": torch.zeros(7, 7)}),
        lambda s: s["average"].update(updates="x"),
        lambda s: s.update(average={}),
        lambda s: s.update(trail=None),
        lambda s: s.update(unknown=None),
        lambda s: s.clear(),
    ],
)
def test_a_half_bad_state_is_refused_as_a_whole(spoil):
    state = averaged(3).state_dict()
    spoil(state)
    refuses(averaged(5), state)


@pytest.mark.parametrize(("version", "age"), [(STATE_FORMAT - 1, "an older version"), (STATE_FORMAT + 1, "a newer version")])
def test_a_state_of_another_version_is_refused_with_what_to_do(version, age):
    refuses(averaged(5), {**averaged(3).state_dict(), "format": version}, rf"format {version}.*{age}.*into a new run")


@pytest.mark.parametrize("state", [None, 3, "state", [], {}])
def test_what_is_no_state_is_refused(state):
    refuses(averaged(5), state)


def test_a_state_is_a_copy():
    """Otherwise the counter would go back and the weights would not: steps that nobody paid for."""
    engine = spent_engine(ema=0.9, optimizer=adam)
    state = engine.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(4):
        engine.step(*toy(20).tensors, sample="own")
    assert str(state) == str(kept)
    ends = []
    for _ in range(2):
        engine.load_state_dict(state)
        assert engine.steps == 3
        for batch in engine.batches(toy()):
            engine.step(*batch)
        ends.append(weights(engine.model))
        assert str(state) == str(kept)
    assert same(*ends)


def test_an_unprojected_state_is_projected_when_it_is_loaded():
    engine = spent_engine()
    state = engine.state_dict()
    state["model"] = {name: 40 * value for name, value in state["model"].items()}
    refuses(engine, state, "does not match its digest")
    engine.load_state_dict(sealed(state))
    assert all(module.is_inside() for module in engine.model.modules() if isinstance(module, Constrained))
    engine.step(*empty(), sample="own")
    assert all(float(torch.linalg.matrix_norm(p.double(), 2)) <= 1 for p in weights(engine.model).values() if p.ndim == 2)


# ----------------------------------------------------------------------------------------------------------------- files


def test_files_are_the_owners_alone(tmp_path):
    file = tmp_path / "deep" / "er" / "run"
    for number in range(2):
        save_checkpoint({"a": torch.arange(3), "n": number}, file)
    for path in (file, previous_path(file)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_checkpoint(file)["n"] == 1
    assert load_checkpoint(previous_path(file))["n"] == 0
    assert sorted(p.name for p in file.parent.iterdir()) == ["run", "run.previous"]


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_save_leaves_the_old_one(tmp_path, monkeypatch, place, error):
    file = tmp_path / "run"
    save_checkpoint({"n": 0}, file)
    save_checkpoint({"n": 1}, file)

    def fail(*_, **__):
        raise error("the disk is full")

    if place == "write":
        monkeypatch.setattr(os, "fdopen", lambda handle, mode: os.close(handle) or fail())
    elif place == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(error):
        save_checkpoint({"n": 2}, file)
    monkeypatch.undo()
    assert load_checkpoint(file)["n"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.previous"]
    save_checkpoint({"n": 3}, file)
    assert load_checkpoint(file)["n"] == 3


def test_a_save_that_fails_during_fit_leaves_the_last_one(tmp_path, monkeypatch):
    file = tmp_path / "run"
    expected, _ = train()

    class Full(Callback):
        def on_step(self, run):
            if run.engine.steps == 5:
                monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError("no space")))

    with pytest.raises(OSError, match="no space"):
        train(checkpoint=file, callbacks=[Full()])
    monkeypatch.undo()
    assert load_checkpoint(file)["engine"]["steps"] == 3
    resumed, _ = train(checkpoint=file, resume=True)
    assert same(weights(expected), weights(resumed))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The file of a run that was killed, and the one before it."""
    file = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(KilledError):
        train(checkpoint=file, callbacks=[KillAt(10)])
    return file.read_bytes(), previous_path(file).read_bytes()


def damages():
    yield "truncated", lambda content: content[: len(content) // 2]
    yield "headless", lambda content: content[5:]
    yield "empty", lambda content: b""
    yield "only the magic", lambda content: content[:19]
    yield "one bit", lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    yield "text", lambda content: b"hello"
    yield "longer", lambda content: content + b"\0"


@pytest.mark.parametrize(("name", "damage"), damages())
def test_damaged_files_are_refused_and_kept(tmp_path, killed, name, damage):
    file = tmp_path / "run"
    last, previous = killed
    content = damage(last)
    file.write_bytes(content)
    previous_path(file).write_bytes(previous)
    with pytest.raises(CheckpointError, match="previous"):
        train(checkpoint=file, resume=True)
    assert file.read_bytes() == content
    assert previous_path(file).read_bytes() == previous
    previous_path(file).replace(file)  # the advice of the message
    expected, _ = uninterrupted()
    resumed, _ = train(checkpoint=file, resume=True)
    assert same(weights(expected), weights(resumed))


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("should-not-exist",))


def test_a_checkpoint_never_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint({"x": Malicious()}, tmp_path / "run")
    with pytest.raises(CheckpointError, match="plain data"):
        load_checkpoint(tmp_path / "run")
    assert not Path("should-not-exist").exists()


def test_other_content_is_refused(tmp_path):
    for content in ([1, 2], torch.zeros(3)):
        save_checkpoint(content, tmp_path / "run")
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / "run")
    save_checkpoint({"weights": torch.zeros(3)}, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"not one of lipdp\.fit"):
        train(checkpoint=tmp_path / "run", resume=True)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match="can't be read"):
            load_checkpoint(path)


def test_an_existing_file_is_not_overwritten(tmp_path):
    file = tmp_path / "run"
    file.write_bytes(b"precious")
    model = small()
    before = weights(model)
    with pytest.raises(CheckpointError, match="resume=True"):
        lipdp.fit(model, losses.CrossEntropy(tau=4.0), sgd(model), planned(model), toy(), checkpoint=file)
    assert file.read_bytes() == b"precious"
    assert same(before, weights(model))


def test_resuming_as_something_else_is_refused(tmp_path):
    file = tmp_path / "run"
    with pytest.raises(KilledError):
        train(checkpoint=file, callbacks=[KillAt(8)], make_scheduler=cosine)
    content = file.read_bytes()
    for change in (
        {"make_scheduler": None},
        {"make_scheduler": milestones},
        {"ema": None},
        {"ema": 0.5},
        {"make_optimizer": adam},
        {"dropout": 0.0},
    ):
        with pytest.raises((CheckpointError, ConfigurationError)):
            train(**{"make_scheduler": cosine, **change}, checkpoint=file, resume=True)
        assert file.read_bytes() == content
