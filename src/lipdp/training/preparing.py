"""What happens to the records before the first step: the run is bound to them, statistics are released, fixed layers applied."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch.utils.data import TensorDataset

from lipdp.bounds import program_of
from lipdp.data.augment import PrecomputedCopies
from lipdp.errors import CheckpointError, ConfigurationError, DataError
from lipdp.planning.decide import STATISTICS
from lipdp.planning.settings import usual_seats
from lipdp.program.dtypes import Types
from lipdp.training.account import data_marks
from lipdp.training.front import settle
from lipdp.training.positions import Progress, layout
from lipdp.training.query import query_of
from lipdp.training.run import Run
from lipdp.training.seats import shuffle
from lipdp.training.statistics import find_standardize, release_moments

__all__ = ["bind", "release_statistics", "settle_records", "shuffle_records"]


def bind(run: Run, train: Any, progress: Progress | None = None) -> None:
    """Bind the run to these records, and refuse others than those that it was bound to."""
    run.open_book()
    if run.settled is not None and train is run.settled.dataset:
        return
    with run.ranks.together():
        digest = run.streams.digest(train, progress)
    if run.streams.data not in (None, digest):
        raise (CheckpointError if run.resumed else DataError)(
            "these are not the records that this run has been trained on: one of them, their order or their types differ. Its "
            "key is bound to those: the same noise on others would give their differences away. Pass the same records to go "
            "on; or train on these with a new PrivacyEngine (in fit: without resume, to another checkpoint file), which has a "
            "fresh key, and whose epsilon is to be added to what this run has spent."
        )
    if run.streams.kept not in ("", layout(train)):
        raise (CheckpointError if run.resumed else DataError)(
            "these are the records that this run has been trained on, in another kind of dataset: its batches are told apart "
            "in another way, so that steps that are done again would not be repetitions. Pass the same kind (rows of a "
            "TensorDataset, a Subset of the same rows, or other records)."
        )
    run.ranks.agree({"the training data": digest}, "Let every rank read the same records, in the same order.")
    run.streams.bind(train, digest)


def release_statistics(run: Run, train: Any) -> None:
    """Release the statistics of each channel, as planned, and set the model's Standardize with them."""
    layer = find_standardize(run.model)
    planned = {release.name: release.amount for release in run.plan.releases}
    if STATISTICS not in planned:
        raise ConfigurationError("the plan does not pay for statistics: make one with plan(…, statistics_budget=0.05)")
    if run.ledger.steps > 0:
        raise ConfigurationError("statistics are released before the first step: the weights were trained without them")
    run.data += data_marks(train)
    bind(run, train)
    run.reserve()
    noise = run.streams.release_noise(STATISTICS, str(run.model))
    run.ledger.charge_release(STATISTICS)
    run.account.note(run.ledger)
    moments = release_moments(
        program_of(run.trained_part, run.input_shape),
        layer,
        train,
        multiplier=planned[STATISTICS],
        dataset_size=run.plan.dataset_size,
        draw=noise,
        device=run.device,
        rows=run.microbatch_size,
        copies=run.augmentation,
        shape=run.input_shape,
    )
    layer.set_statistics(moments.mean, moments.variance)
    run.check_plan()
    run.watch.remember()


def settle_records(run: Run, train: Any, *, in_place: bool, cache: str | os.PathLike[str] | None) -> TensorDataset:
    """Apply the fixed layers in front to all records, once; from here on steps are on what they give."""
    before = run.settled
    again = before is not None and train is before.dataset
    if before is not None and not again:
        raise ConfigurationError("this run is settled already: its steps are on the dataset that engine.settle() gave")
    bind(run, train)
    if not again:
        run.data += data_marks(train)
    waiting = run.awaits_statistics
    settled = settle(
        run.model,
        train,
        input_shape=run.input_shape,
        device=run.device,
        before=before,
        waiting=waiting,
        copies=run.augmentation,
        in_place=in_place or again,
        seats=usual_seats(run.plan.dataset_size, whole=True),
        draw=run.streams.seats(0 if before is None else len(before.stages), "seats at the front"),
        cache=cache if waiting or not run.ledger.one_off else None,
    )
    query = query_of(settled.rest, run.loss, run.plan, settled.shape, run.watch.watched)
    query.prove()  # before anything is taken over
    run.settled, run.input_shape = settled, settled.shape
    if run.augmentation is not None:
        run.augmentation = PrecomputedCopies(run.augmentation.copies)
    run.streams.know(settled.dataset)
    run.query = run.mechanism.query = query
    run.types = Types(settled.rest, run.loss)
    run.check_plan()
    run.choose_microbatch_size()
    return settled.dataset


def shuffle_records(run: Run) -> TensorDataset:
    """Put what :func:`settle_records` gave into a secret random order."""
    if run.settled is None:
        raise ConfigurationError("only rows that engine.settle() has stored are put into another order: call it first")
    shuffled = shuffle(run.settled.dataset, run.streams.seats(0, "order of all"))
    run.settled = dataclasses.replace(run.settled, dataset=shuffled)
    run.streams.know(shuffled)
    return shuffled
