"""Training that pays: the whole run before its first release, once however often it is resumed, and the rest comes back."""

from __future__ import annotations

import copy
import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from dp_accounting import dp_event, pld
from dp_accounting.pld import common, privacy_loss_distribution

import lipdp
from lipdp import losses, nn
from lipdp.errors import BudgetError, CheckpointError, ConfigurationError
from lipdp.privacy import Budget, Pure
from lipdp.training import Callback
from tests.failpoints import Failpoint, die, in_child, points

from .common import BATCH, SIZE, Restless, engine_of, free, planned, same, small, toy, weights

EVERYTHING = os.environ.get("LIPDP_KILLS", "") == "all"
LOSS = losses.CrossEntropy(tau=4.0)
STEPS = 12


def begun(path: Path, epsilon: float = 10.0, delta: float = 1e-4) -> Budget:
    return Budget(path, epsilon=epsilon, delta=delta, dataset="toy")


def fit(budget, model=None, callbacks=(), seed=3, steps=STEPS, **options):
    model = small() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    plan = planned(model, steps=steps)
    options = {"evaluations": 2, "reproducible": True, **options}
    return lipdp.fit(model, LOSS, optimizer, plan, toy(), seed=seed, callbacks=callbacks, budget=budget, **options)


def steps_paid(budget: Budget) -> int:
    return sum(count for event, count in budget.events() if isinstance(event, dp_event.PoissonSampledDpEvent))


class Stop(Callback):
    def __init__(self, at, error=None):
        self.at, self.error = at, error

    def on_step(self, run):
        if run.engine.steps == self.at:
            if self.error is not None:
                raise self.error
            run.stop = True


class CrashError(Exception):
    pass


def test_a_run_costs_what_dp_accounting_says(tmp_path):
    budget = begun(tmp_path / "a")
    history = fit(budget)
    assert history.metrics["step"][-1] == STEPS
    event = dp_event.PoissonSampledDpEvent(BATCH / SIZE, dp_event.GaussianDpEvent(1.0))
    assert budget.events() == [(event, STEPS)]
    assert budget.spent == pytest.approx(pld.PLDAccountant().compose(event, STEPS).get_epsilon(1e-4), abs=1e-9)
    assert [entry["kind"] for entry in budget.entries()] == ["run", "end"]
    fit(str(tmp_path / "a"))  # a second run, by the path: a new charge, also under the same seed
    assert steps_paid(budget) == 2 * STEPS


def test_training_statistics_and_two_mechanisms_in_one_account(tmp_path):
    """What the issue asks for: one budget, everything charged, dp-accounting's own number to 1e-9."""
    from tests.mechanisms.common import compared

    budget = begun(tmp_path / "a", epsilon=20.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), nn.Standardize(6, radius=1.0), nn.Boundary(norm=2.0), torch.nn.Linear(6, 3))
    plan = planned(model, noise_multiplier=None, epsilon=2.0, steps=8, statistics_budget=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lipdp.fit(model, LOSS, optimizer, plan, toy(), budget=budget)
    rows = torch.linspace(0, 10, 20)
    mechanism = compared("mean").chosen
    mechanism.release(rows, budget=budget)
    mechanism.release(rows, budget=str(tmp_path / "a"))
    accountant = pld.PLDAccountant()
    gaussian = dp_event.GaussianDpEvent
    for sigma, steps in plan.run.segments:
        accountant.compose(dp_event.PoissonSampledDpEvent(plan.sampling_rate, gaussian(sigma)), steps)
    for release in plan.run.releases:
        accountant.compose(dp_event.PoissonSampledDpEvent(1.0, gaussian(release.amount)))
    distribution = accountant._pld
    stated = privacy_loss_distribution.from_privacy_parameters(common.DifferentialPrivacyParameters(mechanism.epsilon, 0))
    direct = distribution.compose(stated).compose(stated).get_epsilon_for_delta(1e-4)
    assert plan.releases
    assert budget.spent == pytest.approx(direct, abs=1e-9)
    assert dict(budget.events())[Pure(mechanism.epsilon, "replace_one")] == 2


def test_too_dear_and_nothing_has_happened(tmp_path):
    budget, model = begun(tmp_path / "a", epsilon=0.5), free()  # weights that no projection moves
    before = weights(model)
    with pytest.raises(BudgetError, match=r"dataset 'toy' has 0\.5 of its epsilon 0\.5 left"):
        fit(budget, model, checkpoint=tmp_path / "run")
    assert budget.entries() == []
    assert same(weights(model), before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.head"]
    with pytest.raises(ConfigurationError, match="lipdp budget create"):
        fit(tmp_path / "none")
    engine = engine_of(small(), budget=budget)
    with pytest.raises(BudgetError):
        engine.step(*next(engine.batches(toy())))
    assert engine.steps == 0
    assert engine.epsilon == 0.0


def test_a_run_that_ends_early_gives_back_the_rest(tmp_path):
    for stop, end in ((Stop(5), None), (Stop(5, CrashError()), CrashError), (Stop(5, KeyboardInterrupt()), KeyboardInterrupt)):
        budget = begun(tmp_path / repr(end))
        if end is None:
            fit(budget, callbacks=[stop])
        else:
            with pytest.raises(end):
                fit(budget, callbacks=[stop])
        assert steps_paid(budget) == 5
        assert budget.runs().popitem()[1] == {"steps": STEPS, "released": 5, "reserved": False}


def test_an_interrupted_run_keeps_its_reservation_and_resumes_on_it(tmp_path):
    expected = small()
    fit(None, expected)
    budget, file = begun(tmp_path / "a"), tmp_path / "run"
    for stop in (3, 4, 9):
        with pytest.raises(CrashError):
            fit(budget, callbacks=[Stop(stop, CrashError())], checkpoint=file, resume=True, checkpoint_every=1e-9)
        assert steps_paid(budget) == STEPS
        (run,) = budget.runs().values()
        assert run == {"steps": STEPS, "released": stop, "reserved": True}
    model = small()
    fit(budget, model, checkpoint=file, resume=True)
    assert steps_paid(budget) == STEPS
    (run,) = budget.runs().values()
    assert run == {"steps": STEPS, "released": STEPS, "reserved": False}
    assert same(weights(expected), weights(model))
    before = len(budget.entries())
    fit(budget, small(), checkpoint=file, resume=True)  # it is finished: nothing to pay for
    assert len(budget.entries()) == before


def test_resumed_runs_that_end_early_give_back_what_nobody_released(tmp_path):
    budget, file = begun(tmp_path / "a"), tmp_path / "run"
    with pytest.raises(CrashError):
        fit(budget, callbacks=[Stop(8, CrashError())], checkpoint=file, checkpoint_every=1e-9)
    older = file.with_name("run.previous").read_bytes()
    fit(budget, callbacks=[Stop(9)], checkpoint=file, resume=True)
    assert steps_paid(budget) == 9
    file.write_bytes(older)  # from step 7 on, once more: the same releases
    fit(budget, callbacks=[Stop(8)], checkpoint=file, resume=True)
    assert steps_paid(budget) == 9


def test_a_run_that_began_without_a_budget_is_paid_for_whole(tmp_path):
    budget, file = begun(tmp_path / "a"), tmp_path / "run"
    with pytest.raises(CrashError):
        fit(None, callbacks=[Stop(8, CrashError())], checkpoint=file, checkpoint_every=1e-9)
    fit(budget, callbacks=[Stop(9)], checkpoint=file, resume=True)
    assert steps_paid(budget) == 9


@pytest.mark.filterwarnings("ignore:the records of this Restless change")
def test_a_resumed_run_over_records_that_change_is_another_run(tmp_path):
    """What it does again are other releases: nobody has paid for those."""
    budget, file, data = begun(tmp_path / "a"), tmp_path / "run", Restless()

    def train(stop):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        options = {"checkpoint": file, "resume": True, "callbacks": [stop], "evaluations": 4}
        return lipdp.fit(model, LOSS, optimizer, planned(model, steps=STEPS), data, budget=budget, **options)

    class Signal(Callback):
        def on_step(self, run):
            if run.engine.steps == 5:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(Signal())
    assert steps_paid(budget) == STEPS
    train(Stop(7))
    assert steps_paid(budget) == STEPS + 7
    assert len(budget.runs()) == 2


def test_a_run_with_a_budget_does_not_go_on_without(tmp_path):
    """It gave back what it had not released: that would now be released unpaid."""
    budget, file = begun(tmp_path / "a"), tmp_path / "run"
    fit(budget, callbacks=[Stop(5)], checkpoint=file)
    model = small()
    with pytest.raises(CheckpointError, match="paid for by the budget"):
        fit(None, model, checkpoint=file, resume=True)
    fit(begun(tmp_path / "b"), model, checkpoint=file, resume=True)  # another account pays for all of it
    assert steps_paid(Budget(tmp_path / "b")) == STEPS


# -------------------------------------------------------------------------------------------------------- loops of your own


def loop(engine, steps):
    for _, batch in zip(range(steps), engine.batches(toy()), strict=False):
        engine.step(*batch)


def test_an_engine_pays_before_its_first_step_and_gives_back_when_it_ends(tmp_path):
    budget = begun(tmp_path / "a")
    with engine_of(small(), budget=budget) as engine:
        assert budget.entries() == []
        loop(engine, 1)
        assert steps_paid(budget) == STEPS
        loop(engine, 3)
        assert len(budget.entries()) == 1
    assert steps_paid(budget) == 4
    loop(engine, 2)  # after all
    assert steps_paid(budget) == STEPS
    engine.close()
    assert steps_paid(budget) == 6
    engine = engine_of(small(), budget=budget)
    loop(engine, 2)
    del engine
    gc.collect()
    assert steps_paid(budget) == 8


def test_states_carry_the_run(tmp_path):
    budget = begun(tmp_path / "a")
    engine = engine_of(small(), budget=budget)
    loop(engine, 3)
    state = engine.state_dict()
    loop(engine, 2)
    engine.close()
    other = engine_of(small(), budget=budget)
    loop(other, 1)
    other.load_state_dict(state)  # its own run ends here
    assert steps_paid(budget) == 6
    loop(other, 1)
    assert steps_paid(budget) == STEPS + 1
    other.close()
    assert steps_paid(budget) == 6  # five of the one, though this copy came to the fourth, and one of the other
    assert len(budget.runs()) == 2


def test_copies_of_an_engine_are_one_run(tmp_path):
    budget = begun(tmp_path / "a")
    engine = engine_of(small(), budget=budget)
    loop(engine, 2)
    assert copy.deepcopy(engine).ledger.furthest is engine.ledger.furthest
    twin = copy.deepcopy(engine._run.account)
    assert twin is engine._run.account
    assert len(budget.runs()) == 1


def test_a_copy_that_lives_keeps_the_run_paid(tmp_path):
    budget = begun(tmp_path / "a")
    engine = engine_of(small(), budget=budget)
    loop(engine, 2)
    twin = copy.deepcopy(engine)
    del engine
    gc.collect()
    assert steps_paid(budget) == STEPS
    del twin
    gc.collect()
    assert steps_paid(budget) == 2


@pytest.mark.parametrize("account", ["the same object", "the same file"])
def test_an_engine_that_is_found_to_be_gone_in_the_middle_of_a_charge_is_given_back_behind_it(tmp_path, monkeypatch, account):
    """Garbage is collected anywhere. What it gives back must not wait for a lock that the charge has."""
    budget = begun(tmp_path / "a")
    engine = engine_of(small(), budget=budget if account == "the same object" else tmp_path / "a")
    loop(engine, 2)
    engine.itself = engine  # only the collector finds it
    afford, collected = Budget._afford, []

    def collecting(*arguments):
        if not collected:
            collected.append(gc.collect())
        return afford(*arguments)

    monkeypatch.setattr(Budget, "_afford", collecting)
    del engine
    budget.charge(0.1, "meanwhile")
    assert collected
    assert [entry["kind"] for entry in budget.entries()] == ["run", "charge", "end"]
    assert steps_paid(budget) == 2


def test_a_charge_that_interrupts_another_one_is_refused_and_waits_for_nobody(tmp_path, monkeypatch):
    """As in a handler of a signal: the call that was interrupted can't go on while this one waits for it."""
    budget, inner = begun(tmp_path / "a"), []
    afford = Budget._afford

    def interrupted(*arguments):
        if not inner:
            inner.append("once")
            for account in (budget, Budget.__new__(Budget)):
                account.__dict__.update(budget.__dict__)
                with pytest.raises(BudgetError, match="has interrupted another one"):
                    account.charge(0.2, "inner")
        return afford(*arguments)

    monkeypatch.setattr(Budget, "_afford", interrupted)
    budget.charge(0.1, "outer")
    budget.charge(0.1, "outer")
    assert [entry["what"] for entry in budget.entries()] == ["outer", "outer"]


@pytest.mark.parametrize("given_up", [True, False])
def test_steps_that_were_made_without_the_budget_count_once_it_pays(tmp_path, given_up):
    """Nothing comes back of what was released, whoever released it, also where the engine that pays makes no step."""
    engine = engine_of(small(), seed=None, book=tmp_path / "book")
    states = [engine.state_dict()]
    loop(engine, 5)
    states.append(engine.state_dict())
    engine.close()
    budget = begun(tmp_path / "a")
    paying = engine_of(small(), seed=None, book=tmp_path / "book", budget=budget)
    paying.load_state_dict(states[not given_up])
    if given_up:
        paying.give_up()
    paying.reserve()
    paying.close()
    assert steps_paid(budget) == paying.steps == 5


def test_another_key_is_another_run(tmp_path):
    budget = begun(tmp_path / "a")
    engine = engine_of(small(), budget=budget)
    account, ledger = engine._run.account, engine.ledger
    account.reserve(ledger, "key")
    account.reserve(ledger, "key")
    assert len(budget.entries()) == 1
    account.reserve(ledger, "other key")
    assert len(budget.runs()) == 2


def test_a_forked_process_does_not_close_its_parents_run(tmp_path):
    budget = begun(tmp_path / "a")
    engine = engine_of(small(), budget=budget)
    loop(engine, 2)
    _, code = in_child(lambda _: engine.close(), Failpoint())
    assert code == 0
    assert steps_paid(budget) == STEPS
    assert [entry["kind"] for entry in budget.entries()] == ["run"]


def test_a_budget_that_can_not_be_written_at_the_end_keeps_all_reserved(tmp_path, monkeypatch):
    class Break(Callback):
        def on_step(self, run):
            if run.engine.steps == 2:
                monkeypatch.setattr(Budget, "_write", lambda *_: (_ for _ in ()).throw(BudgetError("full")))
                raise CrashError

    budget = begun(tmp_path / "a")
    with pytest.raises(CrashError):
        fit(budget, callbacks=[Break()])
    monkeypatch.undo()
    assert steps_paid(Budget(tmp_path / "a")) == STEPS


# ----------------------------------------------------------------------------------------------------------------- kill -9


class Say(Callback):
    def __init__(self, say):
        self.say = say

    def on_step(self, run):
        self.say(str(run.engine.steps))


def test_killed_anywhere_in_a_run_and_resumed_to_the_same_end(tmp_path):
    """In a step, a checkpoint, a rename, a charge: the budget covers what was released, and the resumed run is bit-equal."""
    steps = 8
    torch.set_num_threads(1)

    def work(folder, say, model=None):
        budget = begun(folder / "a")
        fit(budget, model, [Say(say)], steps=steps, checkpoint=folder / "run", resume=True, evaluations=steps)

    def fresh(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    expected = small()
    work(fresh("reference"), lambda _: None, expected)
    cost = begun(tmp_path / "reference" / "a").spent
    cases = points(lambda: work(fresh("count"), lambda _: None))
    assert len(cases) >= 120
    chosen, killed = cases if EVERYTHING else cases[3::23], 0
    for at, when in chosen:
        folder = fresh(f"{at}-{when}")
        said, code = in_child(lambda say, folder=folder: work(folder, say), Failpoint(at, when, die))
        assert code in (-9, 0)  # a call more or less, at the very end
        killed += code == -9
        released = max((int(word) for word in said), default=0)
        paid = steps_paid(begun(folder / "a"))
        assert paid >= released
        assert paid in (0, steps)
        model = small()
        work(folder, lambda _: None, model)
        assert same(weights(expected), weights(model))
        budget = begun(folder / "a")
        budget.check()
        assert len(budget.runs()) == 1
        assert budget.spent == cost
        assert sorted(p.name for p in folder.iterdir()) == ["a", "a.head", "run", "run.previous"]
    assert killed >= 0.95 * len(chosen)
