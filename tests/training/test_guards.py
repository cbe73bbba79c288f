"""Ways around the engine: steps of the optimiser that are not the engine's, and batches that are used twice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import gc
import itertools
import os
import signal
import threading
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, privacy
from lipdp.errors import BudgetError, CheckpointError, ConfigurationError, DataError, LipdpWarning
from lipdp.training import asking, guards, positions

from .common import Spy, engine_of, free, planned, same, small, toy, weights

LOSS = losses.CrossEntropy(tau=4.0)


def ordinary_step(model, optimizer, batch):
    x, y = batch
    LOSS(model(x), y).mean().backward()
    optimizer.step()


def test_an_ordinary_training_loop_on_the_engines_batches_is_refused():
    """It would train without noise, and the engine's ε would say 0."""
    model = free()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = engine_of(model, None, optimizer)
    before = weights(model)
    for batch, _ in zip(engine.batches(toy()), range(3), strict=False):
        with pytest.raises(ConfigurationError, match=r"SGD\.step\(\) was called on parameters that a PrivacyEngine trains"):
            ordinary_step(model, optimizer, batch)
    assert same(weights(model), before)
    engine.step(*next(engine.batches(toy())))
    assert not same(weights(model), before)
    with pytest.raises(ConfigurationError, match="PrivacyEngine"):
        optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS])
def test_so_is_any_other_optimiser_over_any_of_its_parameters(make):
    model = free()
    engine = engine_of(model)
    for parameters in (model.parameters(), [model[3].bias]):
        with pytest.raises(ConfigurationError, match="PrivacyEngine"):
            make(parameters, lr=0.1).step(lambda: 0.0)
    other = free()
    ordinary_step(other, torch.optim.SGD(other.parameters(), lr=0.1), toy(20).tensors)  # nobody's
    engine.step(*toy(20).tensors, sample="own")


def test_the_parameters_are_free_after_the_engine():
    for end in ("close", "with", "gone", "fit"):
        model = free()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if end == "fit":
            lipdp.fit(model, LOSS, optimizer, planned(model), toy())
        elif end == "with":
            with engine_of(model, None, optimizer) as engine:
                engine.step(*toy(20).tensors, sample="own")
        else:
            engine = engine_of(model, None, optimizer)
            with pytest.raises(ConfigurationError, match="PrivacyEngine"):
                optimizer.step()
            if end == "close":
                engine.close()
            else:
                del engine
                gc.collect()
        ordinary_step(model, optimizer, toy(20).tensors)


def test_a_failed_run_lets_go_too():
    model = free()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    class Fail(lipdp.training.Callback):
        def on_step(self, run):
            raise KeyError

    with pytest.raises(KeyError):
        lipdp.fit(model, LOSS, optimizer, planned(model), toy(), callbacks=[Fail()])
    optimizer.step()


def test_a_closed_engine_that_goes_on_holds_again():
    model = free()
    engine = engine_of(model)
    engine.close()
    engine.optimizer.step()
    engine.step(*toy(20).tensors, sample="own")
    with pytest.raises(ConfigurationError, match="PrivacyEngine"):
        engine.optimizer.step()


def test_an_optimiser_that_calls_another_one():
    class Lookahead(torch.optim.SGD):
        def __init__(self, inner):
            super().__init__(inner.param_groups[0]["params"], lr=0.1)
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    model = free()
    engine = engine_of(model, None, Lookahead(Spy(model)))
    engine.step(*toy(20).tensors, sample="own")
    with pytest.raises(ConfigurationError, match="PrivacyEngine"):
        engine.optimizer.inner.step()


def test_copies_hold_their_own_parameters():
    model = free()
    engine = engine_of(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    twin = copy.deepcopy(engine)
    with pytest.raises(ConfigurationError, match="PrivacyEngine"):
        twin.optimizer.step()
    del twin
    gc.collect()
    with pytest.raises(ConfigurationError, match="PrivacyEngine"):
        engine.optimizer.step()


def test_nothing_is_left_behind_for_other_peoples_optimisers(monkeypatch):
    monkeypatch.setattr(guards, "_held", weakref.WeakSet())  # engines of other tests may be alive
    monkeypatch.setattr(guards, "_hook", [])
    others = set(_global_optimizer_pre_hooks)
    engine = engine_of(free())
    assert set(_global_optimizer_pre_hooks) - others
    engine.close()
    del engine
    gc.collect()
    other = free()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert set(_global_optimizer_pre_hooks) == others


# ---------------------------------------------------------------------------------------------------------------- batches


def test_a_batch_is_for_one_step():
    engine = engine_of(free())
    batches = engine.batches(toy())
    x, y = first = next(batches)
    engine.step(*first)
    before = weights(engine.model)
    for again in (first, (x, y.clone()), (x.clone(), y), (x[1:], y[1:]), (x.flip(0)[:0], y[:0]), (x.view_as(x), y.view_as(y))):
        with pytest.raises(ConfigurationError, match="used in a step before"):
            engine.step(*again, sample="own")
    assert engine.steps == 1
    assert same(weights(engine.model), before)
    del first, x, y, again
    for batch in batches:
        engine.step(*batch)
    assert engine.steps == engine.plan.steps


def test_the_same_loop_twice_over_a_list_of_batches():
    engine = engine_of(free())
    drawn = [batch for batch, _ in zip(engine.batches(toy()), range(3), strict=False)]
    for batch in drawn:
        engine.step(*batch)
    with pytest.raises(ConfigurationError, match="used in a step before"):
        engine.step(*drawn[0])


def test_a_batch_of_another_engine_is_refused():
    first, second = engine_of(free()), engine_of(free(), planned(free(), batch_size=16))
    batch = next(first.batches(toy()))
    with pytest.raises(ConfigurationError, match="another engine"):
        second.step(*batch)
    first.step(*batch)
    with pytest.raises(ConfigurationError, match="used in a step before"):
        second.step(*batch)


def test_a_step_that_was_refused_has_not_used_its_batch():
    engine = engine_of(small())
    x, y = next(engine.batches(toy()))
    with pytest.raises(DataError):
        engine.step(x[:, :3], y)
    engine.model[0].norm = 5.0
    with pytest.raises(ConfigurationError, match="another model"):
        engine.step(x, y)
    engine.model[0].norm = 1.0
    engine.step(x, y)
    assert engine.steps == 1


def fetched(engine, count):
    return [batch for batch, _ in zip(engine.batches(toy()), range(count), strict=False)]


@pytest.mark.parametrize("where", ["here", "in a new process", "in a new process, with a book"])
def test_a_sample_that_was_used_is_drawn_by_no_engine_that_goes_on(tmp_path, where):
    """Batches 0 and 1 were left out: the first step was made with batch 2. No later step may have that sample."""
    book = {"book": tmp_path / "book"} if "book" in where else {}
    engine = engine_of(free(), seed=None, **book)
    used = fetched(engine, 3)[2]
    engine.step(*used)
    state = engine.state_dict()
    engine.close()
    if "new" in where:
        positions._runs.clear()
    again = engine_of(free(), seed=None, **book)
    again.load_state_dict(state)
    rest = list(again.batches(toy()))
    assert len(rest) == again.plan.steps - 3
    assert all(x.shape != used[0].shape or not torch.equal(x, used[0]) for x, _ in rest)
    for batch in rest:
        again.step(*batch)


def test_a_batch_that_was_passed_over_is_for_no_step():
    """Rewound, the engine draws it a second time: of two copies of one sample the later one comes too late."""
    engine = engine_of(free(), seed=None)
    engine.bind(toy())
    begun = engine.state_dict()
    first = fetched(engine, 3)
    engine.load_state_dict(begun)
    again = fetched(engine, 3)
    engine.step(*first[2])
    for late in (again[0], again[2], first[1]):
        before = engine.steps
        with pytest.raises(ConfigurationError, match="was passed over"):
            engine.step(*late)
        assert engine.steps == before
    engine.load_state_dict(begun)
    engine.step(*again[2])  # that step again: the same release
    engine.step(*fetched(engine, 1)[0])
    assert engine.steps == 2


def test_steps_that_are_given_up_take_their_batches_along(tmp_path):
    """A killed process has left batches out, and no state says so: the book does."""
    engine = engine_of(free(), seed=None, book=tmp_path / "book")
    state = engine.state_dict()
    drawn = fetched(engine, 6)
    for used in (drawn[0], drawn[3], drawn[5]):
        engine.step(*used)
    engine.close()
    positions._runs.clear()
    again = engine_of(free(), seed=None, book=tmp_path / "book")
    again.load_state_dict(state)
    assert again.give_up() == 3
    rest = list(again.batches(toy()))
    assert len(rest) == again.plan.steps - 6
    assert not any(x.shape == y.shape and torch.equal(x, y) for x, _ in rest for y, _ in drawn)


class Slow(torch.nn.Module):
    """Somewhere in the middle of it the other threads have their turn."""

    def forward(self, x):
        time.sleep(0.003)
        return x.clone()


def test_threads_step_one_after_another():
    """Nobody computes with weights that somebody else is just moving, and each step is one release."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), Slow(), torch.nn.Linear(8, 3))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    plan = planned(model, loss, method="bookkeeping", max_grad_norm=1.0, input_shape=(6,), steps=24)
    engine = engine_of(model, plan, loss=loss, seed=None, input_shape=(6,))
    at_work, most, real = [], [], asking.ask

    def ask(*arguments):
        at_work.append(1)
        most.append(len(at_work))
        try:
            return real(*arguments)
        finally:
            at_work.pop()

    def train(_):
        for batch in engine.batches(toy()):
            with contextlib.suppress(ConfigurationError):  # another thread was faster with a later batch
                engine.step(*batch)

    with mock.patch("lipdp.training.engine.ask", ask), concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(train, range(3)))
    assert set(most) == {1}
    assert 8 <= engine.steps == len(engine.optimizer.seen) <= 24


def test_an_engine_that_is_closed_in_the_middle_of_a_step_releases_nothing(tmp_path, monkeypatch):
    """By a signal handler, a hook, another thread with a copy: what would leave is neither paid for nor in the book."""
    budget = privacy.Budget(tmp_path / "budget", epsilon=100.0, delta=1e-4, dataset="toy")
    release = lipdp.PrivacyEngine._release
    for options, error in (({"budget": budget}, BudgetError), ({"book": tmp_path / "book"}, CheckpointError)):
        engine = engine_of(free(), seed=None, **options)
        engine.step(*next(engine.batches(toy())))
        before = weights(engine.model)
        with monkeypatch.context() as patch:
            patch.setattr(type(engine), "_release", lambda self, asked: (self.close(), release(self, asked)))
            with pytest.raises(error, match="closed"):
                engine.step(*next(engine.batches(toy())))
        assert same(weights(engine.model), before)
        engine.step(*next(engine.batches(toy())))
        engine.close()
    assert sum(count for _, count in budget.events()) == engine.steps + 1  # the step that was refused had been charged


def test_many_batches_leave_no_memory_behind():
    from lipdp.training import guards

    engine = engine_of(free(), planned(free(), steps=700))
    for batch, _ in zip(engine.batches(toy()), range(600), strict=False):
        assert len(batch) == 2
    assert len(guards._batches) < 300


def test_two_threads_that_fetch_batches_get_no_number_twice():
    class Slow(lipdp.PrivacyEngine):
        @property
        def steps(self):
            found = super().steps
            time.sleep(0.002)
            return found

    model = free()
    engine = Slow(model, LOSS, Spy(model), planned(model))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        drawn = [one for part in pool.map(lambda _: list(engine.samples(toy())), range(3)) for one in part]
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn) == engine.plan.steps


def test_many_batches_may_be_fetched_ahead_by_several_threads(monkeypatch):
    """They were looked through whenever one more was drawn: slow, and an error from inside of a dictionary with two threads."""
    model, looks = free(), []
    engine = engine_of(model, planned(model, steps=600), seed=None)
    monkeypatch.setattr(guards, "_batches", {})
    monkeypatch.setattr(guards, "_look_at", guards._MANY)

    class Ref(guards._weak):
        def expired(self):
            looks.append(1)
            time.sleep(0)
            return super().expired()

    monkeypatch.setattr(guards, "_weak", Ref)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        kept = [one for part in pool.map(lambda _: list(engine.batches(toy())), range(2)) for one in part]
    assert len(kept) == 600
    assert len(guards._batches) == 1200
    assert len(looks) < 2500


def test_inputs_and_targets_of_two_batches_are_refused():
    engine = engine_of(free(), seed=None)
    drawn = engine.batches(toy())
    (x, _), (_, y) = next(drawn), next(drawn)
    count = min(len(x), len(y))
    with pytest.raises(ConfigurationError, match="parts of two batches, number 0 and number 1"):
        engine.step(x[:count], y[:count])
    assert engine.steps == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_beside_a_step_does_not_wait_for_the_step_of_its_parent():
    stepping, go = threading.Event(), threading.Event()

    class Waiting(torch.optim.SGD):
        def step(self, closure=None):
            stepping.set()
            go.wait(60)
            return super().step(closure)

    model = free()
    engine = engine_of(model, None, Waiting(model.parameters(), lr=0.1), seed=None)
    batch = next(engine.batches(toy()))
    thread = threading.Thread(target=engine.step, args=batch)
    thread.start()
    assert stepping.wait(60)
    child = os.fork()
    if not child:  # the child: nothing of the tests' may go on here
        with contextlib.suppress(BudgetError):
            engine.step(*batch)
            os._exit(1)
        engine.close()
        os._exit(0)
    ended = (0, 0)
    for _ in range(600):
        ended = os.waitpid(child, os.WNOHANG)
        if ended[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    go.set()
    thread.join()
    assert ended == (child, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BudgetError("closed")])
def test_what_is_saved_behind_a_step_that_was_charged_and_not_made_can_be_loaded(error):
    model = free()
    engine = engine_of(model, seed=None)
    drawn = engine.batches(toy())
    engine.step(*next(drawn))
    with (
        mock.patch.object(type(engine._run.account), "check_paid", side_effect=error),
        pytest.raises((KeyboardInterrupt, BudgetError)),
    ):
        engine.step(*next(drawn))
    assert engine.steps == 2
    state = engine.state_dict()
    other = engine_of(free(seed=1), engine.plan, seed=None)
    other.load_state_dict(state)
    assert same(weights(other.model), weights(model))
    other.step(*next(other.batches(toy())))
    assert other.steps == 3


# ---------------------------------------------------------------------------------------------------------------- samples


def transformed(batch):
    """As loops do it to batches, each time in other memory."""
    x, y = batch
    return {
        "cloned": (x.clone(), y.clone()),
        "inputs cloned": (x.clone(), y),
        "targets cloned": (x, y.clone()),
        "converted": (x.double(), y.int()),
        "moved": (x.to("cpu", copy=True), y.to("cpu", copy=True)),
        "through numpy": (torch.from_numpy(x.numpy()), torch.from_numpy(y.numpy())),
        "collated anew": torch.utils.data.default_collate(list(zip(x, y, strict=True))),
        "deep copy": copy.deepcopy(batch),
        "scaled": (x / 2, y),
    }


@pytest.mark.parametrize("what", ["scaled", "a loader's", "rows", "of two batches"])
def test_records_of_which_nobody_knows_how_they_were_drawn_are_said_to_be_the_callers(what):
    engine = engine_of(free(), seed=None)
    batches = engine.batches(toy())
    data, drawn = toy(), next(batches)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    unknown = {"scaled": (drawn[0] / 2, drawn[1].clone()), "a loader's": next(iter(loader)), "rows": data[:32]}
    unknown["of two batches"] = tuple(torch.cat(parts) for parts in zip(drawn, next(batches), strict=True))
    with pytest.warns(LipdpWarning, match="nobody but you knows"):
        engine.step(*unknown[what])
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        engine.step(*unknown[what])
        other = engine_of(free(), seed=None)
        other.step(*next(other.batches(data)))
        other.step(*unknown[what], sample="own")
    assert (engine.steps, other.steps) == (2, 2)


COPIES = ["cloned", "converted", "moved", "through numpy", "collated anew", "deep copy"]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("what", COPIES)
def test_a_copied_batch_is_known_by_its_values(what, reproducible):
    """Without a word of the caller's: two steps with one sample are refused, in whichever order, also by an engine that goes on."""
    engine = engine_of(free(), seed=3, reproducible=reproducible)
    batches = engine.batches(toy())
    first, second, third = next(batches), next(batches), next(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(*transformed(second)[what])
        with pytest.raises(ConfigurationError, match="used in a step before"):
            engine.step(*second)
        if not reproducible:
            for late in (first, second):
                with pytest.raises(ConfigurationError, match="was passed over"):
                    engine.step(*transformed(late)[what])
        assert engine.steps == 1
        state = engine.state_dict()
        assert state["batches"] == 2
        engine.step(*transformed(third)[what])
        again = engine_of(free(), seed=3, reproducible=reproducible)
        again.load_state_dict(state)
        again.step(*transformed(next(again.batches(toy())))[what])
    assert (engine.steps, again.steps) == (2, 2)


@pytest.mark.parametrize("how", [{}, {"sampling": "fixed_size", "adjacency": "replace_one"}])
@pytest.mark.parametrize("given", ["copies", "one copy", "the records"])
def test_full_batches_are_steps_one_after_another(given, how):
    """All samples are alike; the next one is meant, drawn or not."""
    engine = engine_of(free(), planned(free(), batch_size=256, dataset_size=256, steps=5, **how), seed=None)
    batches = engine.batches(toy())
    first = next(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in {
            "copies": [first, *batches] if given == "copies" else [],
            "one copy": 5 * [first],
            "the records": 5 * [toy().tensors],
        }[given]:
            engine.step(*(part.clone() for part in batch))
    assert engine.steps == 5


def test_copies_of_batches_that_are_alike_are_those_that_no_step_was_made_with():
    """Small batches of records that are all the same, by a loop that leaves empty ones out."""
    data = torch.utils.data.TensorDataset(torch.zeros(256, 6), torch.zeros(256, dtype=torch.long))
    engine = engine_of(free(), planned(free(), batch_size=1, steps=60), seed=None)
    full = [batch for batch in engine.batches(data) if len(batch[1])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in full:
            engine.step(*(part.clone() for part in batch))
        with pytest.raises(ConfigurationError, match=r"was passed over"):
            engine.step(*(part.clone() for part in full[-1]))
    assert engine.steps == len(full)


@pytest.mark.parametrize("how", ["a loader's", "flattened", "all drawn before"])
def test_copies_in_another_shape_or_of_batches_drawn_long_before_are_known(how):
    data, engine = toy(), engine_of(free(), planned(free(), steps=40), seed=None)
    if how == "flattened":
        data = torch.utils.data.TensorDataset(data.tensors[0].reshape(-1, 1, 2, 3), data.tensors[1])
    if how == "a loader's":
        numbers = [chosen.tolist() for chosen in engine.samples(data)]
        drawn = list(torch.utils.data.DataLoader(data, batch_sampler=numbers))
    else:
        drawn = [(x.clone().flatten(1), y.clone()) for x, y in engine.batches(data)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in drawn[:3]:
            engine.step(*batch)
        with pytest.raises(ConfigurationError, match="was passed over"):
            engine.step(*drawn[2])
    assert engine.steps == 3


class Counting(torch.utils.data.Dataset):
    """Records that are read one by one, from files perhaps."""

    def __init__(self):
        self.records, self.read = toy(), 0

    def __len__(self):
        return len(self.records)

    def __getitem__(self, number):
        self.read += 1
        return self.records[number]


def test_whose_copy_it_is_is_not_asked_by_reading_all_batches():
    data = Counting()
    plan = planned(free(), sampling="fixed_size", adjacency="replace_one", steps=40)
    engine = engine_of(free(), plan, seed=None)
    drawn = list(engine.batches(data))
    before = data.read
    with pytest.warns(LipdpWarning, match="nobody but you knows"):
        engine.step(drawn[0][0] / 2, drawn[0][1].clone())
    assert data.read - before <= 40  # one of each; a batch has 32


def test_copies_of_gathered_records_and_of_several_inputs_are_known():
    data, engine = toy(), engine_of(free(), seed=None)
    samples = engine.samples(data)
    first, second = next(samples), next(samples)
    engine.step(*data[first])
    with pytest.raises(ConfigurationError, match="was passed over"):
        engine.step(*data[first])
    engine.step(*data[second])
    assert engine.steps == 2


@pytest.mark.parametrize("what", list(transformed(toy(2).tensors)))
def test_what_was_made_of_a_batch_is_one_step_with_it(what):
    engine = engine_of(free(), seed=None)
    batches = engine.batches(toy())
    drawn = next(batches)
    other = next(batch for batch in batches if len(batch[1]) != len(drawn[1]))
    given = transformed(drawn)[what]
    with pytest.raises(ConfigurationError, match=r"two batches|number of records"):
        engine.step(*given, sample=other)
    engine.step(*given, sample=drawn)
    for again in (drawn, given, transformed(drawn)[what]):
        with pytest.raises(ConfigurationError, match="used in a step before"):
            engine.step(*again, sample=drawn)
    engine.step(*other)
    assert engine.steps == 2


def test_a_loop_that_gathers_its_samples_makes_one_step_with_each():
    """Also one that leaves some out and goes on from a state."""
    data, engine = toy(), engine_of(free(), seed=None)
    samples = engine.samples(data)
    first, second, third = next(samples), next(samples), next(samples)
    engine.step(*data[second], sample=second)
    with pytest.raises(ConfigurationError, match="used in a step"):
        engine.step(*data[second], sample=second)
    with pytest.raises(ConfigurationError, match="was passed over"):
        engine.step(*data[first], sample=first)
    with pytest.raises(ConfigurationError, match="another number of records"):
        engine.step(*data[third[1:]], sample=third)
    with pytest.raises(ConfigurationError, match="the very object"):
        engine.step(*data[third], sample=third.clone())
    again = engine_of(free(), seed=None)
    again.load_state_dict(engine.state_dict())
    assert len(list(again.samples(data))) == again.plan.steps - 2
    engine.step(*data[third], sample=third)
    assert engine.steps == 2


def test_a_part_of_a_batch_and_one_with_records_twice_are_refused():
    engine = engine_of(free(), seed=None)
    x, y = next(engine.batches(toy()))
    twice = (x.repeat(2, 1), y.repeat(2))
    for given in ((x[1:], y[1:]), (x[::2], y[::2]), (x[:-1], y[:-1])):
        with pytest.raises(ConfigurationError, match="another number of records"):
            engine.step(*given)
    with pytest.raises(ConfigurationError, match="another number of records"):
        engine.step(*twice, sample=(x, y))
    for given in ((x[:1].expand(len(x), -1), y), (x, y[:1].expand(len(y))), (x.as_strided(x.shape, (1, 6)), y)):
        with pytest.raises(ConfigurationError, match="others in its rows"):
            engine.step(*given)
    engine.step(x.reshape(len(x), 2, 3).flatten(1), y[:, None].squeeze(1))  # views of all of it
    empty = next(engine.batches(toy()))
    engine.step(*(part[:0] for part in empty))  # that none are in it depends on no record


@pytest.mark.parametrize("wrong", ["mine", 3, torch.arange(4), (torch.zeros(4, 6), torch.zeros(4)), [], {}, {1: 2, "a": 3}])
def test_a_sample_that_is_none_is_refused(wrong):
    engine = engine_of(free(), seed=None)
    x, y = next(engine.batches(toy()))
    with pytest.raises((ConfigurationError, DataError), match=r"sample|names for keys"):
        engine.step(x, y, sample=wrong)
    assert engine.steps == 0


def test_samples_of_ones_own_are_declared():
    engine = engine_of(free(), seed=None)
    engine.step(*toy(20).tensors, sample="own")
    drawn = next(engine.batches(toy()))
    engine.step(*drawn, sample="own")  # it is known all the same
    with pytest.raises(ConfigurationError, match="used in a step before"):
        engine.step(*drawn, sample="own")
    assert engine.steps == 2


def test_a_copy_is_known_by_all_of_its_records():
    """At a high sampling rate many samples begin with the same records, and are as long."""
    data = TensorDataset(torch.randn(256, 6), torch.arange(256) % 3)
    engine = engine_of(free(), planned(free(), batch_size=250, dataset_size=256, steps=40), seed=None)
    batches = list(itertools.islice(engine.batches(data), 30))
    drawn = next(
        one
        for one, other in itertools.combinations(batches, 2)
        if len(one[1]) == len(other[1]) and torch.equal(one[0][:16], other[0][:16]) and not torch.equal(one[0], other[0])
    )
    engine.step(*drawn)
    with pytest.raises(ConfigurationError, match=r"used in a step before|was passed over"):
        engine.step(drawn[0].clone(), drawn[1].clone())
    assert engine.steps == 1
