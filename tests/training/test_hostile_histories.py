"""What may happen to a run, in any order: saved, loaded, copied, rewound, killed, gone on with elsewhere, its book damaged.

Histories are drawn at random; LIPDP_HISTORIES=N draws N of each kind. After every action of each of them:

- what left at a position of a run is one release, whoever made it, on whichever machine;
- no two steps were made with one sample of the run;
- the budget was charged for every release before it left, and an engine shows no less than what its run has released.

An action is carried out or refused by an error of the library.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import hashlib
import json
import os
import random
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import dp_accounting
import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp.digest import content_digest
from lipdp.errors import CheckpointError, LipdpError, LipdpWarning
from lipdp.privacy import Budget
from lipdp.training import load_checkpoint, positions, save_checkpoint
from lipdp.training.step_mechanism import StepMechanism
from tests.failpoints import Failpoint, die, in_child, points
from tests.privacy.stand_in import draw_as_on_a_device

from .test_run_budget import steps_paid

EVERYTHING = os.environ.get("LIPDP_KILLS", "") == "all"
MANY = int(os.environ.get("LIPDP_HISTORIES", "6"))
LENGTH, STEPS, SIZE = 60, 9, 64


def records(seed: int = 0) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(SIZE, 5, generator=draw), torch.randint(0, 3, (SIZE,), generator=draw))


def made() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3), torch.nn.CrossEntropyLoss(reduction="none")


def plan() -> lipdp.PrivacyPlan:
    settings = {"method": "bookkeeping", "max_grad_norm": 1.0, "input_shape": (5,), "accountant": "rdp"}
    return lipdp.plan(*made(), dataset_size=SIZE, batch_size=20, delta=1e-3, noise_multiplier=1.0, steps=STEPS, **settings)


PLAN = plan()


@functools.cache
def cost_of(multipliers: tuple[float, ...]) -> float:
    """ε of so many steps of the plan, by dp-accounting alone."""
    ledger = dp_accounting.rdp.RdpAccountant()
    for sigma in multipliers:
        ledger.compose(dp_accounting.PoissonSampledDpEvent(PLAN.sampling_rate, dp_accounting.GaussianDpEvent(sigma)))
    return ledger.get_epsilon(PLAN.delta) * (1 - 1e-9) if multipliers else 0.0


class World:
    """One folder, and the processes that come and go over it: one at a time, for what another one leaves are files.

    Attributes:
        kept: whether runs keep books. Without them nothing is promised across processes, and none is killed.
        released: by run and position, digests of what left there.
        samples: by run and batch, the positions of the steps that were made with it.
        present: the batch that a step is just made with, where an engine has drawn it.
        refused: how often the library said no.
    """

    def __init__(self, folder: Path, seed: int, *, kept: bool) -> None:
        self.folder, self.kept, self.draw = folder, kept, random.Random(seed)
        self.budget = Budget(folder / "budget", epsilon=1e6, delta=1e-3, dataset="d")
        self.engines: list[lipdp.PrivacyEngine] = []
        self.hands: list[tuple[lipdp.PrivacyEngine, tuple[torch.Tensor, torch.Tensor]]] = []
        self.states: list[tuple[Path, Path | None]] = []
        self.backups: list[tuple[Path, Path, bytes]] = []
        self.released: dict[tuple[bytes, int], set[bytes]] = {}
        self.samples: dict[tuple[bytes, bytes], set[int]] = {}
        self.machine, self.refused, self.books, self.noticed, self.data = 0, 0, 0, 0, records()
        self.present: bytes | None = None
        self.log: list[str] = []

    # ------------------------------------------------------------------ what is seen of it

    @contextmanager
    def watched(self):
        """Notes what leaves; sums are those of a machine, which adds up in an order of its own."""
        noised, draw = lipdp.PrivacyEngine._noised, StepMechanism.draw

        def leaving(engine, asked):
            given = noised(engine, asked)
            run, position = engine._run.streams.run, asked.prepared.position
            digest = content_digest(*(given[name] for name in sorted(given)))
            self.released.setdefault((run, position), set()).add(digest)
            if self.present is not None:
                self.samples.setdefault((run, self.present), set()).add(position)
            assert steps_paid(Budget(self.budget.path)) >= len(self.released), "paid before it leaves"
            return given

        def drawn(mechanism, answer, settings, stream):
            sums = {name: value * (1 + self.machine * 1e-13) for name, value in answer.sums.items()}
            return draw(mechanism, dataclasses.replace(answer, sums=sums), settings, stream)

        with mock.patch.object(lipdp.PrivacyEngine, "_noised", leaving), mock.patch.object(StepMechanism, "draw", drawn):
            yield

    def check(self) -> None:
        assert all(len(digests) == 1 for digests in self.released.values()), "one release at a position"
        assert all(len(places) == 1 for places in self.samples.values()), "one step with a sample"
        assert steps_paid(self.budget) >= len(self.released)
        for engine in self.engines:
            own = sum(run == engine._run.streams.run for run, _ in self.released)
            least = cost_of((PLAN.noise_multiplier,) * own)
            assert engine.epsilon >= least, "what an engine shows is spent"
            assert engine.ledger.charged >= own

    # ------------------------------------------------------------------ what may happen

    def engine(self) -> lipdp.PrivacyEngine:
        """One of them; mostly the one that was there last, so that something comes of it."""
        return self.engines[-1] if self.draw.random() < 0.8 else self.draw.choice(self.engines)

    def new(self, book: Path | None = None) -> lipdp.PrivacyEngine:
        if book is None and self.kept:
            self.books += 1
            book = self.folder / f"book {self.books}"
        model, loss = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        rows = self.draw.choice([None, None, 8]) if self.kept else None
        engine = lipdp.PrivacyEngine(
            model, loss, optimizer, PLAN, budget=self.budget.path, book=book, input_shape=(5,), microbatch_size=rows
        )
        self.engines.append(engine)
        return engine

    def step(self) -> None:
        engine = self.engine()
        self.made_with(engine, next(engine.batches(self.data), None))

    def made_with(self, engine, batch) -> None:
        """As it was drawn, or copied: it may be said what it is a copy of. Of a copy that an engine does not know it warns."""
        if batch is None:
            return
        self.present = content_digest(*batch)
        copied = tuple(part.clone() for part in batch)
        how = self.draw.random()
        if how < 0.8:
            engine.step(*batch) if how < 0.6 else engine.step(*copied, sample=batch)
            return
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="these records are not a batch")
                engine.step(*copied)
        except LipdpWarning:  # before anything was released
            engine._run.has_own_records = False

    def several(self) -> None:
        for _ in range(3):
            self.step()

    def fetch(self) -> None:
        """Ahead, to be used later, or never."""
        engine = self.engine()
        batch = next(engine.batches(self.data), None)
        if batch is not None:
            self.hands.append((engine, batch))

    def late(self) -> None:
        """A batch that was fetched some time ago, with the engine that drew it or another one."""
        if self.hands:
            engine, batch = self.draw.choice(self.hands)
            self.made_with(self.draw.choice([engine, self.engine()]), batch)

    def own(self) -> None:
        self.own_step(self.engine())

    def own_step(self, engine) -> None:
        self.present = None
        engine.step(*records(self.draw.randrange(2)).tensors, sample="own")

    def save(self) -> None:
        engine = self.engine()
        file = self.folder / f"state {len(self.states)}"
        save_checkpoint(engine.state_dict(), file)
        book = engine._run.book.path
        self.states.append((file, book))
        if book is not None:
            self.backups.append((file, book, book.read_bytes()))

    def load(self) -> None:
        """Into an engine of its own, or into one that has come further."""
        if self.states:
            file, book = self.draw.choice(self.states[-3:])
            engine = self.new(book) if self.draw.random() < 0.7 else self.engine()
            engine.load_state_dict(load_checkpoint(file))

    def copied(self) -> None:
        self.engines.append(copy.deepcopy(self.engine()))

    def closed(self) -> None:
        self.engine().close(keep=self.draw.random() < 0.5)

    def given_up(self) -> None:
        self.engine().give_up()

    def gone(self) -> None:
        """An engine that nobody has any longer."""
        engine = self.engine()
        self.engines.remove(engine)
        self.hands = [(other, batch) for other, batch in self.hands if other is not engine]
        del engine
        gc.collect()

    def killed(self) -> None:
        """The process is gone, with all that it knew, and nothing was told to anyone; another one begins."""
        if not self.kept:
            return
        while self.engines:  # no name of them is left, so that nobody holds their books
            self.engines.pop()._run.account._reserved = None
        self.hands = []
        gc.collect()
        positions._runs.clear()
        self.machine = self.draw.randrange(2)

    def other_weights(self) -> None:
        with torch.no_grad():
            next(self.engine().model.parameters()).add_(0.01)

    def other_rate(self) -> None:
        self.engine().optimizer.param_groups[0]["lr"] *= 0.5

    def other_data(self) -> None:
        self.data = records(self.draw.randrange(2))

    def same_data(self) -> None:
        self.data = records()

    def harmed_book(self) -> None:
        """A book that lacks what a state says it had: nothing goes on by it. It is put back then."""
        known = [(file, book) for file, book in self.states if book is not None and book.exists()]
        if not known:
            return
        file, book = self.draw.choice(known)
        self.killed()
        whole = book.read_bytes()
        least = int(load_checkpoint(file)["book"].split()[0])
        lines = whole[: least - 1].rfind(b"\n") + 1
        harmed = self.draw.choice([None, b"", whole[:lines], whole[: least - 1], whole.replace(b"book 1", b"book 2", 1)])
        book.unlink()
        if harmed is not None:
            book.write_bytes(harmed)
        engine = self.new(book)
        with pytest.raises(CheckpointError, match=r"is not there|is not the one|not the book of this run"):
            engine.load_state_dict(load_checkpoint(file))
        self.killed()
        book.write_bytes(whole)

    def put_back(self) -> None:
        """A state and its book from a backup: the budget knows better, if it has seen more of the book. The newest is put back."""
        known = [(file, book, content) for file, book, content in self.backups if book.exists()]
        if not known:
            return
        self.killed()
        marks = [entry["book"].split() for entry in Budget(self.budget.path).entries() if entry.get("book")]

        def seen_of(book: Path) -> int:
            whole = book.read_bytes()
            sizes = [int(size) for size, digest in marks if hashlib.sha256(whole[: int(size)]).hexdigest() == digest]
            return max(sizes, default=0)

        older = [one for one in known if seen_of(one[1]) > len(one[2])]
        file, book, content = self.draw.choice(older or known)
        whole, seen = book.read_bytes(), seen_of(book)
        self.noticed += bool(older)
        book.write_bytes(content)
        engine = self.new(book)
        engine.load_state_dict(load_checkpoint(file))
        if seen > len(content):
            with pytest.raises(CheckpointError, match="put back from a backup"):
                engine.reserve()
        else:
            engine.reserve()
        self.killed()
        book.write_bytes(whole)

    def torn_book(self) -> None:
        """A line that was not finished was never promised."""
        if self.books:
            self.killed()
            with (self.folder / f"book {self.draw.randrange(self.books) + 1}").open("ab") as file:
                file.write(b'[3, 0, "00')

    def replaced_book(self) -> None:
        """In the place of the file that is written another one appears, which others would read."""
        engine = self.engine()
        engine.bind(records())
        book = engine._run.book.path
        if book is None or engine.steps == STEPS:
            return
        aside = self.folder / "aside"
        book.rename(aside)
        if self.draw.random() < 0.5:
            shutil.copy(aside, book)
        with pytest.raises(LipdpError):
            self.own_step(engine)
        aside.rename(book)

    # ------------------------------------------------------------------

    def go_on(self) -> None:
        """One more action."""
        if not self.engines:
            self.new()
        if len(self.engines) > 4:
            self.gone()
        usual = [self.step] * 5 + [self.several, self.fetch, self.fetch, self.late, self.save, self.save, self.load, self.load]
        rare = [self.own, self.copied, self.closed, self.given_up, self.gone, self.killed, self.new, self.other_weights]
        rare += [self.other_rate, self.other_data, self.same_data, self.same_data]
        rare += [self.harmed_book, self.torn_book, self.replaced_book, self.put_back] if self.kept else []
        action = self.draw.choice(usual if self.draw.random() < 0.75 else rare)
        self.log.append(action.__name__)
        try:
            action()
        except LipdpError as error:
            self.refused += 1
            self.log.append(f"  {type(error).__name__}: {str(error)[:90]}")
        self.check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(MANY))
@pytest.mark.parametrize("kind", ["with books", "with books, as on a device", "without"])
def test_whatever_happens_nothing_is_released_twice_or_unpaid(tmp_path, monkeypatch, kind, seed):
    if "device" in kind:
        draw_as_on_a_device(monkeypatch)
    world = World(tmp_path, seed, kept=kind != "without")
    try:
        with world.watched():
            for _ in range(LENGTH):
                world.go_on()
        world.budget.check()
        assert world.released
        assert world.refused < LENGTH
    except BaseException:
        print("\n".join(world.log))
        raise
    finally:
        world.killed()


# ----------------------------------------------------------------------------------------------------------------- kill -9


def trained(folder: Path, say, *, machine: int = 0) -> None:
    """A private run that is begun, or gone on with; what leaves is said."""
    noised, draw = lipdp.PrivacyEngine._noised, StepMechanism.draw

    def leaving(engine, asked):
        given = noised(engine, asked)
        say(f"{asked.prepared.position} {content_digest(*(given[name] for name in sorted(given))).hex()}")
        return given

    def drawn(mechanism, answer, settings, stream):
        sums = {name: value * (1 + machine * 1e-13) for name, value in answer.sums.items()}
        return draw(mechanism, dataclasses.replace(answer, sums=sums), settings, stream)

    budget = Budget(folder / "budget", epsilon=1e6, delta=1e-3, dataset="d")
    model, loss = made()
    options = {"checkpoint": folder / "run", "resume": True, "evaluations": 3, "budget": budget, "input_shape": (5,)}
    with (
        mock.patch.object(lipdp.PrivacyEngine, "_noised", leaving),
        mock.patch.object(StepMechanism, "draw", drawn),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), PLAN, records(), **options)


def test_a_private_run_killed_anywhere_makes_each_step_once(tmp_path):
    """In a charge, a step, a line of its book, a checkpoint, a rename; gone on with on the same machine, and on another one."""
    torch.set_num_threads(1)
    (tmp_path / "count").mkdir()
    cases = points(lambda: trained(tmp_path / "count", lambda _: None))
    assert len(cases) >= 100
    killed, repeated = 0, 0
    for number, (at, when) in enumerate(cases if EVERYTHING else cases[5::29]):
        folder, machine = tmp_path / f"{at}-{when}", number % 2
        folder.mkdir()
        before, code = in_child(functools.partial(trained, folder), Failpoint(at, when, die))
        assert code in (-9, 0)
        killed += code == -9
        assert steps_paid(Budget(folder / "budget", epsilon=1e6, delta=1e-3, dataset="d")) >= len(before)
        after, code = in_child(functools.partial(trained, folder, machine=machine), Failpoint())
        assert code == 0, (at, when)
        first, then = (dict(line.split() for line in said) for said in (before, after))
        assert (len(first), len(then)) == (len(before), len(after))
        again = first.keys() & then.keys()
        assert all(first[position] == then[position] for position in again), (at, when)
        assert not (machine and again), "other sums: those steps are given up"
        repeated += len(again)
        book = [json.loads(line) for line in (folder / "run.book").read_text().splitlines()[1:]]
        assert sorted(line[0] for line in book) == list(range(STEPS)), (at, when)
        budget = Budget(folder / "budget")
        budget.check()
        assert steps_paid(budget) == STEPS
    assert killed >= 0.9 * len(cases[5::29])
    assert repeated, "steps behind the checkpoint, to the bit"
