"""Signals end a run after a whole step, saved; checkpoints are written as time passes, by one run at a time."""

from __future__ import annotations

import inspect
import io
import json
import multiprocessing
import os
import re
import signal
import threading
import time

import pytest
import torch
from rich.console import Console

import lipdp
from lipdp import losses
from lipdp.errors import CheckpointError, Interrupted
from lipdp.training import Callback, ProgressBar, load_checkpoint, save_checkpoint
from lipdp.training.checkpoint import lock_path, locked_checkpoint

from .common import planned, same, small, toy, weights
from .test_checkpoint import STEPS, train


class Signal(Callback):
    def __init__(self, number, at, times=1):
        self.number, self.at, self.times, self.after = number, at, times, []

    def on_step(self, run):
        if run.engine.steps == self.at:
            for _ in range(self.times):
                signal.raise_signal(self.number)
                self.after.append(run.engine.steps)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 5, STEPS])
def test_a_signal_ends_the_run_after_the_step_and_it_resumes_bit_for_bit(tmp_path, number, at):
    expected, history = train()
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    caller = Signal(number, at)
    with pytest.raises(KeyboardInterrupt, match=rf"after step {at} of 12 and saved in .*resume=True") as caught:
        train(checkpoint=tmp_path / "run", callbacks=[caller])
    assert isinstance(caught.value, Interrupted)
    assert caught.value.signal == number
    assert caller.after == [at]  # the signal did not cut the callback short
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert load_checkpoint(tmp_path / "run")["engine"]["steps"] == at
    resumed, again = train(checkpoint=tmp_path / "run", resume=True)
    assert same(weights(expected), weights(resumed))
    if at < STEPS:
        assert again.metrics == history.metrics


def test_without_a_checkpoint_it_says_so():
    with pytest.raises(Interrupted, match="nothing was saved"):
        train(callbacks=[Signal(signal.SIGINT, 3)])


def test_the_second_ctrl_c_is_at_once(tmp_path):
    caller = Signal(signal.SIGINT, 5, times=3)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(checkpoint=tmp_path / "run", callbacks=[caller])
    assert not isinstance(caught.value, Interrupted)
    assert caller.after == [5]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    expected, _ = train()
    assert same(weights(expected), weights(train(checkpoint=tmp_path / "run", resume=True)[0]))


def test_a_handler_of_ones_own_stays(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        train(callbacks=[Signal(signal.SIGTERM, 5)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_other_threads_train_without_handlers():
    ends = []
    thread = threading.Thread(target=lambda: ends.append(train()))
    thread.start()
    thread.join()
    assert same(weights(ends[0][0]), weights(train()[0]))


# ------------------------------------------------------------------------------------------------------------- as time passes


def test_a_run_is_saved_as_time_passes(tmp_path, monkeypatch):
    """A clock of our own: 25 seconds a step, so every third step is a minute or more."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saved = []

    class Clock(Callback):
        def on_step(self, run):
            now[0] += 25.0
            saved.append(load_checkpoint(tmp_path / "run")["engine"]["steps"])

    default = inspect.signature(lipdp.fit).parameters["checkpoint_every"].default
    train(checkpoint=tmp_path / "run", callbacks=[Clock()], evaluations=1, checkpoint_every=default)
    assert saved == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    for setting, expected in ((1000.0, [0] * STEPS), (10.0, list(range(STEPS)))):
        saved.clear()
        (tmp_path / "run").unlink()
        train(checkpoint=tmp_path / "run", callbacks=[Clock()], evaluations=1, checkpoint_every=setting)
        assert saved == expected


@pytest.mark.parametrize("every", [0.0, -1.0, float("nan"), "often"])
def test_bad_intervals(every):
    with pytest.raises(lipdp.errors.ConfigurationError, match="checkpoint_every"):
        train(checkpoint_every=every)


# ------------------------------------------------------------------------------------------------------------ one at a time


class Waiting(Callback):
    """Whoever trains goes on when the others have ended, however slow they are."""

    def __init__(self, refused):
        self.refused = refused

    def on_step(self, run):
        if run.engine.steps == 1:
            assert all(self.refused.acquire(timeout=600) for _ in range(3))


def start(file, go, refused, ends):
    torch.set_num_threads(1)
    go.wait()
    try:
        train(checkpoint=file, resume=True, callbacks=[Waiting(refused)], seed=None)
        ends.put((os.getpid(), "done"))
    except CheckpointError as error:
        ends.put((os.getpid(), str(error)))
        refused.release()


def test_two_starts_of_one_checkpoint_and_exactly_one_goes_on(tmp_path):
    """Four of them, at once; each says how it ended."""
    file, context = str(tmp_path / "run"), multiprocessing.get_context("fork")
    go, refused, queue = context.Barrier(4), context.Semaphore(0), context.Queue()
    started = [context.Process(target=start, args=(file, go, refused, queue)) for _ in range(4)]
    for process in started:
        process.start()
    ends = dict(queue.get(timeout=900) for _ in started)
    for process in started:
        process.join()
    winners = [pid for pid, end in ends.items() if end == "done"]
    assert len(winners) == 1
    for pid, end in ends.items():
        if pid != winners[0]:
            assert f"is being written by process {winners[0]} on {os.uname().nodename}, since 2" in end
    assert load_checkpoint(file)["engine"]["steps"] == STEPS
    assert not lock_path(file).exists()


def test_the_lock_ends_with_the_run(tmp_path):
    file = tmp_path / "run"
    with locked_checkpoint(file):
        who = json.loads(lock_path(file).read_text())
        assert who["pid"] == os.getpid()
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
            train(checkpoint=file)
        lock_path(file).write_text("")  # just starting
        with pytest.raises(CheckpointError, match="another process"):
            train(checkpoint=file)
    assert not file.exists()
    train(checkpoint=file)
    with pytest.raises(BlockingIOError), locked_checkpoint(file):  # an error of the block is not about the lock
        raise BlockingIOError
    assert not lock_path(file).exists()


def test_what_killed_runs_have_left_is_removed(tmp_path):
    file = tmp_path / "run[1]"
    save_checkpoint({"n": 1}, tmp_path / "run[1]b")
    for name in ("run[1].abc.tmp", "run[1].def.tmp", "run[1].lock", "run1.abc.tmp", "other.tmp"):
        (tmp_path / name).write_bytes(b"half")
    train(checkpoint=file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.tmp", "run1.abc.tmp", "run[1]", "run[1].previous", "run[1]b"]


# --------------------------------------------------------------------------------------------------------- ε shown is ε spent


def test_the_history_is_never_stale():
    seen = []

    class Look(Callback):
        def on_step(self, run):
            seen.append((run.history.epsilon, run.engine.epsilon))

    _, history = train(callbacks=[Look()], evaluations=1)
    assert all(shown == spent > 0 for shown, spent in seen)
    assert history.epsilon == seen[-1][1]


@pytest.mark.parametrize(("accountant", "steps"), [("rdp", 30), ("pld", 5)])
def test_the_bar_never_shows_less_than_was_spent(accountant, steps):
    model, shown = small(), []
    plan = planned(model, steps=steps, noise_multiplier=4.0, accountant=accountant)

    class Look(Callback):
        def __init__(self, bar):
            self.bar = bar

        def on_step(self, run):
            (task,) = self.bar._progress.tasks
            relation, value = task.fields["figures"].split()[1:3]
            shown.append((relation, float(value), run.engine.epsilon))

    text = io.StringIO()
    bar = ProgressBar(Console(file=text, force_terminal=True, width=150))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lipdp.fit(model, losses.CrossEntropy(tau=4.0), optimizer, plan, toy(), callbacks=[bar, Look(bar)], evaluations=1)
    assert len(shown) == steps
    assert all(value >= spent for _, value, spent in shown)
    assert all(value <= spent + 0.001 for relation, value, spent in shown if relation == "=")
    assert max(value for _, value, _ in shown) <= plan.epsilon + 0.001
    last, planned_epsilon = re.findall(r"ε = ([0-9.]+) of ([0-9.]+)", text.getvalue())[-1]
    assert last == planned_epsilon
    assert plan.epsilon <= float(last) < plan.epsilon + 0.001


def test_rows_hold_what_was_spent_at_their_step():
    _, history = train(evaluations=4)
    run = {"noise_multiplier": 1.0, "sampling_rate": 32 / 256, "delta": 1e-4, "accountant": "rdp"}
    for step, epsilon in zip(history.metrics["step"], history.metrics["epsilon"], strict=True):
        assert epsilon == lipdp.privacy.epsilon(steps=int(step), **run)
