"""The ε that is shown is spent: at every moment of a run, wherever it is shown, whatever was interrupted, rewound or given up.

Histories are drawn at random (LIPDP_HISTORIES=N draws N of each kind). What was released is noted where it leaves, by position;
dp-accounting composes it directly; nothing that is shown may be below that.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import json
import os
import random
import re
import warnings
from contextlib import contextmanager
from unittest import mock

import dp_accounting as dp
import pytest
import torch
from rich.console import Console

import lipdp
from lipdp import nn
from lipdp.errors import CheckpointError
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy import Budget
from lipdp.report.page import write_run
from lipdp.report.run import read_run
from lipdp.training import Callback, ProgressBar, load_checkpoint, positions
from lipdp.training.callbacks import Logger, Run
from lipdp.training.state import sealed
from lipdp.training.step_mechanism import StepMechanism

from .common import toy
from .test_run_budget import steps_paid

MANY = int(os.environ.get("LIPDP_HISTORIES", "2"))
STEPS = 10


class _Killed(BaseException):
    """The process ends here."""


def model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    between = [nn.Standardize(6, radius=4.0), nn.Boundary(norm=3.0)] if kind == "statistics" else []
    return nn.Sequential(nn.BoundedInput((6,)), *between, nn.SpectralLinear(6, 3))


LOSS = lipdp.losses.CrossEntropy(tau=2.0)


@functools.cache
def plan_of(kind: str) -> PrivacyPlan:
    settings = {"dataset_size": 120, "batch_size": 20, "delta": 1e-3, "noise_multiplier": 1.0, "steps": STEPS, "accountant": "rdp"}
    if kind == "phases":
        settings["schedule"] = lipdp.Schedule(noise=((0, 1), (0.4, 0.6), (0.7, 2.5)))
    if kind == "fixed size":
        settings |= {"sampling": "fixed_size", "adjacency": "replace_one"}
    if kind == "statistics":
        del settings["noise_multiplier"]
        settings |= {"epsilon": 3.0, "statistics_budget": 0.1}
    return lipdp.plan(model(kind), LOSS, **settings)


@functools.cache
def cost_of(kind: str, made: frozenset[int | str]) -> float:
    """ε of what was released at these positions, by dp-accounting alone."""
    plan = plan_of(kind)
    relation = dp.NeighboringRelation.REPLACE_ONE if kind == "fixed size" else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    ledger = dp.rdp.RdpAccountant(neighboring_relation=relation)
    for position in made:
        if isinstance(position, str):
            ledger.compose(dp.GaussianDpEvent(next(r.amount for r in plan.releases if r.name == position)))
            continue
        noise = dp.GaussianDpEvent(plan.noise_multiplier * plan.phase(position).noise)
        if kind == "fixed size":
            ledger.compose(dp.SampledWithoutReplacementDpEvent(120, 20, noise))
        else:
            ledger.compose(dp.PoissonSampledDpEvent(20 / 120, noise))
    return ledger.get_epsilon(plan.delta) * (1 - 1e-9) if made else 0.0


def numbers(text: str) -> list[float]:
    """What a text says of ε, but for what is asked for ("of 3.000")."""
    return [float(found) for found in re.findall(r"ε [=≤] ([0-9.]+)", text)]


class Shows(Logger):
    """Looks, whenever it is called, at all that shows an ε."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.bar = ProgressBar(Console(file=io.StringIO(), force_terminal=True))

    def look(self, run) -> None:
        least = self.world.least(run.engine)
        shown = {"engine": run.engine.epsilon, "history": run.history.epsilon, "state": run.history.state_dict()["epsilon"]}
        shown["bar"] = numbers(self.bar._figures(run))[0]
        assert all(value >= least for value in shown.values()), (least, shown)
        self.world.seen += 1

    def on_start(self, run) -> None:
        self.bar.on_start(run)
        self.look(run)

    def on_step(self, run) -> None:
        self.bar.on_step(run)
        self.look(run)
        if self.world.draw.random() < 0.08:
            raise _Killed
        if self.world.draw.random() < 0.03:
            run.stop = True

    def on_evaluation(self, run, row) -> None:
        super().on_evaluation(run, row)
        self.bar.on_evaluation(run, row)
        least = self.world.least(run.engine)
        assert row["epsilon"] >= least
        assert run.history.last["epsilon"] >= least
        assert float(str(run.history).splitlines()[-1].split()[2]) >= least
        self.look(run)

    def log(self, step, figures) -> None:
        self.world.logged = figures["epsilon"]

    def on_end(self, run) -> None:
        self.bar.on_end(run)
        assert self.world.logged is None or self.world.logged <= run.engine.epsilon


class World:
    """A folder with a checkpoint and its book, and processes that train there one after another."""

    def __init__(self, folder, kind: str, seed: int) -> None:
        self.folder, self.kind, self.draw = folder, kind, random.Random(seed)
        self.released: dict[bytes, set[int | str]] = {}
        self.machine, self.seen, self.repeated, self.ends = 0, 0, 0, 0
        self.logged: float | None = None

    def least(self, engine) -> float:
        return cost_of(self.kind, frozenset(self.released.get(engine._run.streams.run, ())))

    @contextmanager
    def watched(self):
        noised, draw, moments = lipdp.PrivacyEngine._noised, StepMechanism.draw, lipdp.training.engine.release_statistics

        def leaving(engine, asked):
            given = noised(engine, asked)
            made = self.released.setdefault(engine._run.streams.run, set())
            if asked.prepared.position in made:
                self.repeated += 1
            made.add(asked.prepared.position)
            assert engine.epsilon >= self.least(engine)
            if self.draw.random() < 0.06:  # between the release and the weights
                raise _Killed
            return given

        def drawn(mechanism, answer, settings, stream):
            sums = {name: value * (1 + self.machine * 1e-13) for name, value in answer.sums.items()}
            return draw(mechanism, dataclasses.replace(answer, sums=sums), settings, stream)

        def statistics(run, train):
            moments(run, train)
            self.released.setdefault(run.streams.run, set()).add("statistics")
            if self.draw.random() < 0.4:
                raise _Killed

        with (
            mock.patch.object(lipdp.PrivacyEngine, "_noised", leaving),
            mock.patch.object(StepMechanism, "draw", drawn),
            mock.patch.object(lipdp.training.engine, "release_statistics", statistics),
        ):
            yield

    def process(self) -> lipdp.History | None:
        """One process: it trains until it is killed, stopped or done."""
        positions._runs.clear()
        self.machine, self.logged = int(self.draw.random() < 0.3), None
        plan, network = plan_of(self.kind), model(self.kind)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        try:
            return lipdp.fit(
                network,
                LOSS,
                optimizer,
                plan,
                toy(120),
                toy(12, seed=1),
                callbacks=[Shows(self)],
                checkpoint=self.folder / "run",
                resume=True,
                evaluations=4,
            )
        except _Killed:
            gc.collect()
            return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(MANY))
@pytest.mark.parametrize("kind", ["steps", "phases", "fixed size", "statistics"])
def test_what_a_run_shows_is_spent(tmp_path, kind, seed):
    world = World(tmp_path, kind, seed)
    history = None
    with world.watched():
        for _ in range(40):
            history = world.process()
            least = cost_of(kind, frozenset(next(iter(world.released.values()), ())))
            kept = load_checkpoint(tmp_path / "run")
            if history is not None:
                world.ends += 1
                assert history.epsilon >= least
                assert history.last["epsilon"] >= least
                assert kept["history"]["epsilon"] >= least
                assert kept["engine"]["charged"] >= len(next(iter(world.released.values())) - {"statistics"})
                folder = tmp_path / f"report {world.ends}"
                folder.mkdir()
                summary = {"epsilon": history.epsilon, "delta": 1e-3, "steps": int(history.last["step"]), "private": True}
                write_run(folder, plan_of(kind), history, summary, lipdp.report.About())
                run = read_run(folder)
                assert run.epsilon >= least
                assert not run.contradictions
                assert json.loads((folder / "history.json").read_text())["epsilon"] >= least
                if history.last["step"] == STEPS:
                    break
    assert world.seen
    assert len(world.released) == 1
    assert history is not None
    assert history.epsilon == plan_of(kind).epsilon


# ----------------------------------------------------------------------------------------------------------------- each by itself


def engine(**options) -> lipdp.PrivacyEngine:
    network = model("steps")
    return lipdp.PrivacyEngine(network, LOSS, torch.optim.SGD(network.parameters(), lr=0.1), plan_of("steps"), **options)


def steps(engine, count: int) -> None:
    for _, batch in zip(range(count), engine.batches(toy(120)), strict=False):
        engine.step(*batch)


@pytest.mark.parametrize("reproducible", [False, True])
def test_an_engine_that_is_rewound_or_copied_shows_what_the_run_has_spent(reproducible):
    first = engine(seed=3, reproducible=reproducible)
    steps(first, 2)
    state, twin, early = first.state_dict(), copy.deepcopy(first), first.epsilon
    steps(first, 3)
    spent = first.epsilon
    assert spent > early
    assert twin.epsilon == spent  # of the same run
    first.load_state_dict(state)
    assert first.steps == 2
    assert first.epsilon == first.ledger.epsilon == spent
    steps(first, 3)
    assert first.epsilon == spent  # the same releases
    steps(first, 1)
    assert twin.epsilon == first.epsilon > spent
    assert engine(seed=3, reproducible=reproducible).epsilon == 0  # another run


def test_a_state_of_a_rewound_engine_says_what_was_spent_behind_it():
    """In a process that knows nothing else of the run, too."""
    first = engine()
    steps(first, 1)
    early = first.state_dict()
    steps(first, 4)
    first.load_state_dict(early)
    state = first.state_dict()
    assert (state["steps"], state["charged"]) == (1, 5)
    positions._runs.clear()
    other = engine()
    other.load_state_dict(state)
    assert other.epsilon == first.ledger.epsilon_at(5) > plan_of("steps").epsilon / 3
    for wrong in (0, STEPS + 1):
        with pytest.raises(CheckpointError, match="were charged"):
            engine().load_state_dict({**state, "charged": wrong})


def test_an_engine_knows_what_its_book_says_as_soon_as_it_is_loaded(tmp_path):
    first = engine(book=tmp_path / "book")
    steps(first, 1)
    state = first.state_dict()
    steps(first, 4)
    spent = first.epsilon
    first.close()
    positions._runs.clear()
    other = engine(book=tmp_path / "book")
    other.load_state_dict(state)
    assert other.steps == 1
    assert other.epsilon == spent


def test_a_step_that_was_charged_and_not_made_stays_spent():
    first = engine()
    steps(first, 2)
    state = first.state_dict()
    batch = next(first.batches(toy(120)))
    with (
        mock.patch.object(type(first._run.streams), "take", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        first.step(*batch)
    spent = first.epsilon
    assert spent == first.ledger.epsilon_at(3)
    first.load_state_dict(state)
    assert first.epsilon == spent


def test_a_checkpoint_is_believed_where_it_says_more_of_a_row_and_not_where_it_says_less(tmp_path):
    class Stops(Callback):
        def on_step(self, run):
            run.stop = run.engine.steps == 4

    def fitted(*callbacks):
        network = model("steps")
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        options = {"callbacks": callbacks, "checkpoint": tmp_path / "run", "resume": True, "evaluations": STEPS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lipdp.fit(network, LOSS, optimizer, plan_of("steps"), toy(120), **options)

    whole = fitted(Stops()).metrics["epsilon"]
    state = load_checkpoint(tmp_path / "run")
    state["history"]["metrics"]["epsilon"] = [0.0, whole[3], 1e9, 0.5 * whole[3]]
    lipdp.training.save_checkpoint(state, tmp_path / "run")
    assert fitted().metrics["epsilon"][:4] == [whole[0], whole[3], plan_of("steps").epsilon, whole[3]]


def test_a_bar_shows_what_a_copy_spends_meanwhile():
    one = engine()
    steps(one, 1)
    bar, run = ProgressBar(Console(file=io.StringIO())), Run(one, lipdp.History(1e-3))
    bar.on_start(run)
    twin = copy.deepcopy(one)
    steps(twin, 6)
    bar.on_step(run)
    assert numbers(bar._figures(run))[0] >= twin.epsilon
    bar.on_end(run)


# ----------------------------------------------------------------------------------------------- put back from a backup, or copied


def test_a_budget_counts_what_the_book_of_a_run_knows(tmp_path):
    """Steps that were made before it paid, behind the state that the run goes on from."""
    first = engine(book=tmp_path / "book")
    steps(first, 1)
    state = first.state_dict()
    steps(first, 4)
    first.close()
    positions._runs.clear()
    budget = Budget(tmp_path / "budget", epsilon=100, delta=1e-3, dataset="d")
    other = engine(book=tmp_path / "book", budget=budget)
    other.load_state_dict(state)
    steps(other, 1)
    other.close()
    assert steps_paid(budget) == 5
    assert other.epsilon == other.ledger.epsilon_at(5)


def kept_by(folder, **options):
    return engine(book=folder / "book", budget=folder / "budget", **options)


@pytest.mark.parametrize("killed", [False, True])
def test_a_budget_notices_a_checkpoint_and_book_from_an_old_backup(tmp_path, killed):
    Budget(tmp_path / "budget", epsilon=100, delta=1e-3, dataset="d")
    first = kept_by(tmp_path)
    steps(first, 2)
    old, book = first.state_dict(), (tmp_path / "book").read_bytes()
    steps(first, 3)
    later = first.state_dict()
    steps(first, 1)
    if killed:
        first._run.account._reserved = None
    first.close()
    positions._runs.clear()
    whole = (tmp_path / "book").read_bytes()
    (tmp_path / "book").write_bytes(book)
    again = kept_by(tmp_path)
    again.load_state_dict(old)
    with pytest.raises(CheckpointError, match="put back from a backup"):
        steps(again, 1)
    assert again.steps == 2
    again.close()
    (tmp_path / "book").unlink()
    positions._runs.clear()
    other = engine(budget=tmp_path / "budget")
    other.load_state_dict(sealed({**old, "book": None}))
    with pytest.raises(CheckpointError, match="engine has none"):
        steps(other, 1)
    positions._runs.clear()
    (tmp_path / "book").write_bytes(whole)
    right = kept_by(tmp_path)
    right.load_state_dict(later)
    steps(right, 2)
    assert right.epsilon == right.ledger.epsilon_at(7)
    right.close()
    assert steps_paid(Budget(tmp_path / "budget")) == (STEPS if killed else 7)


def test_a_budget_sees_the_book_that_a_copy_of_the_engine_has_opened_again(tmp_path):
    """Not the one that was closed: it would say less, and so would who remembers it."""
    budget = Budget(tmp_path / "budget", epsilon=100, delta=1e-3, dataset="d")
    first = kept_by(tmp_path)
    steps(first, 2)
    twin = copy.deepcopy(first)
    twin.close()
    old, book = first.state_dict(), (tmp_path / "book").read_bytes()
    twin.give_up()
    steps(first, 2)
    first.close()
    assert budget.entries()[-1]["book"] == first.state_dict()["book"] != old["book"]
    positions._runs.clear()
    (tmp_path / "book").write_bytes(book)
    again = kept_by(tmp_path)
    again.load_state_dict(old)
    with pytest.raises(CheckpointError, match="put back from a backup"):
        steps(again, 1)


@pytest.mark.parametrize("machines", [(0, 0), (0, 1)])
def test_two_processes_with_copies_of_one_run_do_not_both_go_on(tmp_path, machines):
    """Unless what they release is the same."""
    draw = StepMechanism.draw

    def drawn(mechanism, answer, settings, stream):
        sums = {name: value * (1 + machine * 1e-13) for name, value in answer.sums.items()}
        return draw(mechanism, dataclasses.replace(answer, sums=sums), settings, stream)

    Budget(tmp_path / "budget", epsilon=100, delta=1e-3, dataset="d")
    first = kept_by(tmp_path)
    steps(first, 2)
    state = first.state_dict()
    first.close(keep=True)
    engines = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "book").write_bytes((tmp_path / "book").read_bytes())
        positions._runs.clear()
        own = engine(book=tmp_path / name / "book", budget=tmp_path / "budget")
        own.load_state_dict(state)
        own.reserve()
        engines.append((own, dict(positions._runs)))
    for number, (machine, (own, runs)) in enumerate(zip(machines, engines, strict=True)):
        positions._runs.clear()
        positions._runs.update(runs)
        with mock.patch.object(StepMechanism, "draw", drawn):
            steps(own, 1 + number)
        if machine == 0:
            own.state_dict()
            continue
        with pytest.raises(CheckpointError, match="processes go on from copies"):
            own.state_dict()
    positions._runs.clear()
