"""What the data say in a step, computed by the model that was proved and by no other; nothing of it has left yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lipdp._checks import discreet
from lipdp.errors import ConfigurationError
from lipdp.graphs import is_large
from lipdp.privacy import noise_cuda
from lipdp.privacy.randomness import Claim
from lipdp.training.distributed import added_up
from lipdp.training.guards import Undoing
from lipdp.training.positions import Claims
from lipdp.training.query import Answer, Sample, Turn
from lipdp.training.run import Run
from lipdp.training.seats import Copies
from lipdp.training.step_mechanism import StepSettings
from lipdp.training.streams import Prepared
from lipdp.training.update import Moved
from lipdp.training.watch import Flag, ask_flags, read_flags

# Tensors of a microbatch: inputs, targets, mask.
_MICROBATCH = 3
# So often a model may turn out to be another one while a step is computed.
_ATTEMPTS = 3


class Asked(NamedTuple):
    """What a step is about to release.

    Attributes:
        answer: what the data say.
        settings: what holds in the step.
        prepared: what its noise depends on.
        noised: the answer with its noise, where it was drawn ahead.
        moved: all that follows from it, where that was begun as well.
        claims: what was drawn ahead.
    """

    answer: Answer
    settings: StepSettings
    prepared: Prepared
    noised: dict[str, torch.Tensor] | None = None
    moved: Moved | None = None
    claims: Claims = ()


def ask(run: Run, batch: Sample) -> Asked:
    """What the data say to all ranks together; what one of them refuses, all do."""
    undoing = Undoing()
    try:
        with run.ranks.together():
            asked, turn = _ask_alone(run, batch, undoing)
    except BaseException:
        undoing.finish()
        raise
    return asked._replace(answer=_over_ranks(run, asked, turn))


@discreet
def _ask_alone(run: Run, batch: Sample, undoing: Undoing) -> tuple[Asked, Turn]:
    """What the data say to this rank, asked again where the model turned out to be another one."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            run.prove_again()  # its settings have changed, or its weights were written to past torch's own bookkeeping
        asked, turn, unchanged = _ask_once(run, batch, undoing)
        if unchanged:
            return asked, turn
    raise ConfigurationError(
        "the model's weights or settings change while a step is computed (another thread, or a forward that writes to "
        "them), so nothing bounds what it computes. No step was taken."
    )


def _ask_once(run: Run, batch: Sample, undoing: Undoing) -> tuple[Asked, Turn, bool]:
    """What the data say, and whether it was the model that was proved that said it: to be released, and not before this returns.

    On CUDA a proved program is launched at once, and all that follows from its sums behind it (:mod:`lipdp.training.update`); the
    same behind clipped sums, or their noise alone. Everything else happens while they run: whether the model still is the one
    that was proved is looked at, on the host and, for the values of weights, on the device; so is whether the last projection
    found them finite, whether the sums are, and whether the forward pass left the model's state alone. The host waits once, for
    all of them, before it goes on; where one is no, what was computed is thrown away. It has to wait: a record whose gradient is
    not finite must be left out of the sum, and no other record with it, or it would change all that the others say.
    """
    number, runs_ahead = run.ledger.steps, _runs_ahead(run)
    recorded = runs_ahead and run.query.recorded
    unchanged: Flag = True
    if not runs_ahead and (unchanged := look(run)) is False:
        run.prove_again()
        unchanged = True
    alone = runs_ahead and not run.ranks.grouped
    beside = partial(_beside, run) if recorded and alone and run.on_one_device else None
    begin, restore = run.streams.model(number, on_host=not recorded)
    put_back = run.state.hold()
    with undoing:
        undoing.add(restore)
        undoing.add(put_back, only_after_errors=True)
        begun = None
        if beside is not None and run.augmentation is None:
            begin(0)
            begun = run.query.begin(batch)
        settings = run.mechanism.at(number)
        trained = run.trained(settings)
        copies = run.copies(number)
        turn = _turn(run, settings, number, begin, copies)
        looked = run.watch.settings
        sample = dataclasses.replace(batch, copies=copies, settings=looked, turn=turn, beside=beside, begun=begun)
        answer = run.query.ask(trained, sample, settings.clips)
        told = bool(answer.seen)  # digests of the weights are there already
        if runs_ahead:
            unchanged = run.watch.compare_there(answer.seen[0][:-_MICROBATCH]) if told else look(run)
        prepared = run.streams.prepare(number, run.optimizer, run.values, batch.inputs, batch.targets, answer.seen)
        read = ask_flags([unchanged, run.project.fine, answer.fine, *run.state.same()])
        noised, moved = None, None
        claims: list[tuple[int, Claim]] = []
        if told or (alone and unchanged is not False and _can_follow(run, answer)):
            stream = run.streams.noise(prepared, claims)
            moved = run.update.begin(run.mechanism.draw_on_device(answer, settings, stream), trained)
            if moved is not None:
                stream.claim_last(moved.tag)
        if alone:
            noised = run.mechanism.draw(answer, settings, run.streams.noise(prepared, claims)) if moved is None else None
            run.draw_ahead(number + 1)
        here = _stands_here(run) if told and runs_ahead else True
        unchanged, finite, fine, *same = read()
        unchanged = unchanged and here
        if not finite:
            run.project.check()
        run.state.refuse(same)
        if unchanged and not fine and answer.again is not None:
            answer, noised, moved, claims = answer.again(), None, None, []
            run.state.refuse(read_flags(run.state.same()))
    return Asked(answer, settings, prepared, noised, moved, claims), turn, unchanged


def _runs_ahead(run: Run) -> bool:
    """Whether a step's sums are launched before the host looks at anything."""
    return run.device.type == "cuda"


def look(run: Run) -> Flag:
    """Whether the model is the one that was proved; raises where it can't be any more."""
    same = run.watch.compare()
    run.watch.check_structure()
    return same if run.query.stands else False


def _can_follow(run: Run, answer: Answer) -> bool:
    """Whether the noised sums go to the optimiser as they are, and are worth a recording and the memory that it takes."""
    large = any(map(is_large, answer.sums.values()))
    return run.on_one_device and not (run.plan.clips or run.query.pulls_back or large)


def _stands_here(run: Run) -> bool:
    """The same, as far as the host knows it, while a device compares the values that it has."""
    same = run.watch.compare_here()
    run.watch.check_structure()
    return same and run.query.stands


def _beside(run: Run, microbatch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of the weights, all in the first rows, and of a microbatch behind them."""
    return torch.cat([run.watch.digest_elsewhere(), noise_cuda.words_of(microbatch, run.streams.words_key)])


def _turn(run: Run, settings: StepSettings, number: int, begin: Callable[[int], None], copies: Copies) -> Turn:
    """Which microbatches this process computes; each begins with random draws of its own."""

    def started(microbatch: int) -> None:
        begin(microbatch)
        if copies.generator is not None:
            run.streams.draw(number, "augment", copies.generator, microbatch)

    return run.ranks.turn(settings.stds, started)


def _over_ranks(run: Run, asked: Asked, turn: Turn) -> Answer:
    """The answer of all ranks together."""
    if turn.units is None:
        return asked.answer
    why = "Their weights, batches or settings have come apart: were all of them loaded with one state, on equal devices?"
    told = run.streams.told(asked.prepared, run.values)
    run.ranks.agree({f"what step {run.ledger.steps} depends on": told}, why)
    return added_up(run.ranks, asked.answer, turn.units, asked.settings.count_std)
