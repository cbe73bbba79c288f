"""Ways around the engine: steps of the optimiser that are not the engine's, and batches that are used twice."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import lipdp
from lipdp import losses
from lipdp.errors import ConfigurationError, DataError
from lipdp.training import guards

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
    engine.step(*toy(20).tensors)


def test_the_parameters_are_free_after_the_engine():
    for end in ("close", "with", "gone", "fit"):
        model = free()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if end == "fit":
            lipdp.fit(model, LOSS, optimizer, planned(model), toy())
        elif end == "with":
            with engine_of(model, None, optimizer) as engine:
                engine.step(*toy(20).tensors)
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
    engine.step(*toy(20).tensors)
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
    engine.step(*toy(20).tensors)
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
            engine.step(*again)
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


def test_many_batches_leave_no_memory_behind():
    from lipdp.training import guards

    engine = engine_of(free(), planned(free(), steps=700))
    for batch, _ in zip(engine.batches(toy()), range(600), strict=False):
        assert len(batch) == 2
    assert len(guards._batches) < 300
