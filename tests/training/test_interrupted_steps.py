"""A step that ends anywhere (Ctrl-C, SystemExit, an error): never more released than charged, and the engine goes on.

One engine is interrupted at one point after another: every line, call and return of lipdp's code that a step passes, and every
instruction between the answer and the end of the charge. By default some of the points, with LIPDP_INTERRUPTIONS=all all of them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from lipdp import Clipping, nn, privacy
from lipdp.errors import LipdpError
from lipdp.privacy import AdaptiveClip, Budget
from lipdp.training import load_checkpoint, save_checkpoint
from lipdp.training.step_mechanism import StepMechanism
from tests.interruptions import Interruption, Point

from .common import BATCH, SIZE, Spy, engine_of, free, planned, quiet, same, small, toy, weights
from .test_run_budget import steps_paid

ALL = os.environ.get("LIPDP_INTERRUPTIONS", "") == "all"
KINDS = (KeyboardInterrupt, SystemExit, MemoryError, RuntimeError)
# What a step does with the account, the book and the weights: here every instruction is a point.
FINELY = (
    "step", "_release", "charge", "note", "take", "_take", "take_position", "write", "write_draw", "claim_draw", "spend_batch",
    "_move", "follow", "commit", "held", "_put_back", "model",
)  # fmt: skip
MANY = 10**6


@pytest.fixture(autouse=True)
def _what_was_interrupted_is_thrown_away_here():
    """Not in the middle of another test."""
    yield
    gc.collect()


@dataclass
class Watcher:
    """Counts what leaves: draws of noise by the position that they were made for, and what an optimiser was given."""

    engine: object
    drawn: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict)

    def watching(self):
        real = StepMechanism.draw

        def draw(mechanism, answer, settings, stream):
            noised = real(mechanism, answer, settings, stream)
            position = stream.claim.args[1]  # (run, position): whom it is claimed for
            self.drawn.setdefault(position, []).append(noised)
            return noised

        return mock.patch.object(StepMechanism, "draw", draw)

    def check(self):
        """What left was charged before, and each position is one release."""
        steps = self.engine.steps
        assert all(position < steps for position in self.drawn)
        assert len(self.drawn) <= steps
        assert self.each_once()

    def each_once(self):
        """Each position was released for one set of sums."""
        return all(same(draws[0], other) for draws in self.drawn.values() for other in draws[1:])


# Where a step is let through and comes to count: tried whole, line by line.
WHOLE = ("_release", "_refuse", "take_position", "finish", "recording", "__exit__")


def chosen(points: list[Point], part: int, entire: tuple[str, ...] = WHOLE) -> list[Point]:
    """Every ``part``-th, and those of the places where it matters most."""
    whole = [p for number, p in enumerate(points) if number % part == 0 or (p.place[1] in entire and p.event != "opcode")]
    return points if ALL else whole


def clipless():
    return small(), {}


def bookkeeping():
    return free(), {"method": "bookkeeping", "max_grad_norm": 1.0}


def naive():
    return free(), {"method": "naive", "max_grad_norm": 1.0}


def adaptive():
    model = nn.Sequential(*small(), nn.ClipGradient(0.5, adaptive=True))
    return model, {"clipping": Clipping(adaptive=AdaptiveClip())}


def made(build, plan=quiet, steps=MANY, optimizer=None, **options):
    """An engine with hardly any noise, whose optimiser leaves the weights where they are: equal batches have equal gradients."""
    model, method = build()
    optimizer = Spy(model) if optimizer is None else optimizer(model.parameters())
    return engine_of(model, plan(model, steps=steps, **method), optimizer, seed=None, **options)


def points_of(work, files=("",)) -> list[Point]:
    counted = Interruption(files=files, finely=FINELY)
    counted.during(work)
    return counted.points()


def interrupted(point, kind, work, files=("",)) -> None:
    """Do the work, ended there."""
    interruption = Interruption(point, kind("here"), files, FINELY)
    try:
        interruption.during(work)
    except (kind, LipdpError):
        assert interruption.raised, point


def near(one, other):
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-4) for name in other)


FIXED = tuple(tensor[:BATCH].clone() for tensor in toy().tensors)


@pytest.mark.parametrize("build", [clipless, bookkeeping, naive, adaptive])
def test_a_step_that_ends_anywhere_releases_no_more_than_was_charged(build):
    engine, reference = made(build), made(build)
    reference.step(*FIXED, sample="own")
    expected = reference.optimizer.seen[-1]
    batches, watcher, random_state = engine.batches(toy()), Watcher(engine), torch.get_rng_state()
    with watcher.watching():
        for _ in range(2):
            engine.step(*next(batches))
        points = points_of(lambda: engine.step(*next(batches)))
        assert len(points) > 1000
        # Records that are taken alone come to count by the very lines of bookkeeping: those need not be tried twice.
        for point, kind in zip(chosen(points, 97, () if build is naive else WHOLE), itertools.cycle(KINDS), strict=False):
            before, values, given = engine.steps, weights(engine.model), len(engine.optimizer.seen)
            batch = next(batches)
            interrupted(point, kind, lambda batch=batch: engine.step(*batch))
            watcher.check()
            assert len(engine.optimizer.seen) <= engine.steps
            assert engine.steps in (before, before + 1)
            if engine.steps == before:  # nothing has left, and nothing stays behind
                assert same(weights(engine.model), values), point
                assert len(engine.optimizer.seen) == given, point
                assert all(p.grad is None for p in engine.model.parameters()), point
            assert torch.equal(torch.get_rng_state(), random_state), point
            with pytest.raises(LipdpError, match="PrivacyEngine trains"):
                engine.optimizer.step()
            engine.step(*FIXED, sample="own")
            watcher.check()
            if build is not adaptive:  # whose norm follows the counts
                assert near(engine.optimizer.seen[-1], expected), point
    assert engine.epsilon >= privacy.epsilon(
        noise_multiplier=1e-6, sampling_rate=BATCH / SIZE, steps=len(watcher.drawn), delta=1e-4, accountant="rdp"
    )


ROOMS = "account", "asking", "continuing", "engine", "kept_book", "positions", "run", "streams"
ACCOUNT = ("/privacy/", *(f"/training/{room}.py" for room in ROOMS))


def account_points(work) -> list[Point]:
    """Those of the account, the budget's file, the engine, the run's key and its book."""
    return [point for point in points_of(work) if point.place[0].startswith(ACCOUNT)]


@pytest.mark.parametrize("build", [clipless, bookkeeping])
@pytest.mark.parametrize("first", [True, False])
def test_with_a_budget_nothing_leaves_that_is_not_paid_for(build, first, tmp_path):
    """Ended anywhere in the first step, which pays for the run, or in a later one, or in closing: what was released counts."""
    numbers = itertools.count()

    def begun():
        budget = Budget(tmp_path / f"{next(numbers)}", epsilon=1000.0, delta=1e-4, dataset="toy")
        engine = made(build, planned, steps=6, budget=budget)
        if not first:
            engine.step(*FIXED, sample="own")
        return budget, engine

    def pay_and_close(engine):
        engine.step(*FIXED, sample="own")
        engine.close()

    counted = begun()[1]
    points = account_points(lambda: pay_and_close(counted))
    assert len(points) > 500
    for point, kind in zip(chosen(points, 211 if first else 127), itertools.cycle(KINDS), strict=False):
        budget, engine = begun()
        watcher = Watcher(engine, {0: []} if not first else {})
        with watcher.watching():
            interrupted(point, kind, lambda engine=engine: pay_and_close(engine))
            watcher.check()
            assert steps_paid(budget) >= len(watcher.drawn), point
            engine.step(*FIXED, sample="own")
            watcher.check()
            assert steps_paid(budget) == 6, point
            engine.close()
        budget.check()
        assert len(watcher.drawn) <= engine.steps <= steps_paid(budget), point
        assert steps_paid(Budget(budget.path)) == steps_paid(budget)


def test_a_save_that_ends_anywhere_leaves_a_checkpoint_that_goes_on(tmp_path):
    """The old one or the new one, whole; what it goes on with are the same releases, or steps that were never made."""
    engine, file = made(clipless, planned, steps=500), tmp_path / "run"
    engine.step(*FIXED, sample="own")
    save_checkpoint(engine.state_dict(), file)
    watcher = Watcher(engine)
    watcher.drawn[0] = []

    def work():
        engine.step(*FIXED, sample="own")
        save_checkpoint(engine.state_dict(), file)

    def saving(points):
        return [
            p
            for p in points
            if p.place[0].startswith("/training/checkpoint") or p.place[1] in ("state_dict", "state_of", "sealed", "__deepcopy__")
        ]

    with watcher.watching():
        points = saving(points_of(work))
        assert len(points) > 30
        for point, kind in zip(chosen(points, 7), itertools.cycle(KINDS), strict=False):
            before, saved = engine.steps, load_checkpoint(file)["steps"]
            interrupted(point, kind, work)
            assert engine.steps == before + 1, point
            state = load_checkpoint(file)
            assert state["steps"] in (saved, before + 1), point
            assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".previous") == ["run"], point
            engine.load_state_dict(state)
            engine.step(*FIXED, sample="own")  # the release that was made before, or the next one
            assert watcher.each_once(), point


def test_a_state_that_is_loaded_and_ended_anywhere_is_no_way_to_steps_that_nobody_pays_for():
    engine = made(clipless, planned, steps=500)
    engine.step(*FIXED, sample="own")
    state = engine.state_dict()
    engine.step(*FIXED, sample="own")
    watcher = Watcher(engine)
    watcher.drawn |= {0: [], 1: []}
    known = {(each["steps"], each["trail"]) for each in (state, engine.state_dict())}
    with watcher.watching():
        points = account_points(lambda: engine.load_state_dict(state))
        for point, kind in zip(chosen(points, 7), itertools.cycle(KINDS), strict=False):
            interrupted(point, kind, lambda: engine.load_state_dict(state))
            now = engine.state_dict()
            assert (now["steps"], now["trail"]) in known, point
            with contextlib.suppress(LipdpError):
                engine.step(*FIXED, sample="own")
            made_before = len(watcher.drawn)
            assert watcher.each_once(), point
            engine.load_state_dict(state)
            engine.step(*FIXED, sample="own")
            assert len(watcher.drawn) == made_before
