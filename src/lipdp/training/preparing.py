"""What happens to the records before the first step: the run is bound to them, statistics are released, fixed layers applied."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from lipdp import nn
from lipdp.bounds import program_of
from lipdp.data.augment import Augmentation, PrecomputedCopies, is_fixed
from lipdp.errors import CheckpointError, ConfigurationError, DataError
from lipdp.planning.settings import STATISTICS, usual_seats
from lipdp.privacy.moments import Moments, private_moments
from lipdp.privacy.randomness import Stream
from lipdp.program import Program
from lipdp.program.dtypes import Types
from lipdp.training.account import data_marks
from lipdp.training.batches import gather_tensors, rows_at_once, slices
from lipdp.training.front import settle
from lipdp.training.known import Progress, layout
from lipdp.training.methods import query_of
from lipdp.training.run import Run
from lipdp.training.seats import Shuffled, shuffle

# Of a device's memory, what records may take there.
_SHARE = 8


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
    if train is run.streams.dataset:
        run.streams.know(train)
        return
    if run.streams.kept not in ("", layout(train)):
        raise (CheckpointError if run.resumed else DataError)(
            "these are the records that this run has been trained on, in another kind of dataset: its batches are told apart "
            "in another way, so that steps that are done again would not be repetitions. Pass the same kind (rows of a "
            "TensorDataset, a Subset of the same rows, or other records), on the same kind of device."
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
    run.account.check_paid()
    moments = _release_moments(
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


def place_records(run: Run, train: Any) -> Any:
    """The records with their inputs on the device that steps are computed on, where they are rows of tensors that fit there.

    Targets stay: the noise depends on a digest of theirs that the host takes, and of inputs on their rows' numbers.
    """
    bind(run, train)  # on all ranks, whatever the room is there
    placed = _on(run.device, train) if run.device.type == "cuda" else None
    if placed is None:
        return train
    run.data += data_marks(train)
    if run.settled is not None and train is run.settled.dataset:
        run.settled = dataclasses.replace(run.settled, dataset=placed)
    run.streams.know(placed)
    return placed


def _on(device: torch.device, dataset: Any) -> Any:
    """``None`` where it is none of ours and torch's datasets of tensors, or would take more of the device's memory than a share."""
    if type(dataset) is Subset:
        inside = _on(device, dataset.dataset)
        return None if inside is None else Subset(inside, dataset.indices)
    if type(dataset) not in (TensorDataset, Shuffled):
        return None
    *inputs, targets = dataset.tensors
    if sum(tensor.nbytes for tensor in inputs) > torch.cuda.get_device_properties(device).total_memory // _SHARE:
        return None
    return type(dataset)(*(tensor.to(device) for tensor in inputs), targets)


def find_standardize(model: torch.nn.Module) -> nn.Standardize:
    """The model's one Standardize layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Standardize)]
    if len(layers) != 1:
        raise ConfigurationError(
            f"statistics are released for one lipdp.nn.Standardize layer; this model has {len(layers)}. "
            + (
                "Put one into it, or leave statistics_budget out."
                if not layers
                else "Statistics behind another would need its own first."
            )
        )
    return layers[0]


def _release_moments(
    program: Program,
    layer: nn.Standardize,
    dataset: Any,
    *,
    multiplier: float,
    dataset_size: int,
    draw: Stream,
    device: torch.device,
    rows: int,
    copies: Augmentation | None,
    shape: tuple[int, ...] | None,
) -> Moments:
    """Mean (and variance) of each channel of what reaches ``layer``, by one Gaussian mechanism of this multiplier.

    What lies in front of the layer is run as the program says (a frozen feature extractor, or nothing). A record's moments are the
    means of its copies', where the copies are fixed; where they are drawn in every step, they are those of the record itself.
    """
    fixed = copies if is_fixed(copies) else None
    entries, types = math.prod(gather_tensors(dataset, torch.arange(1))[0].shape), Types(program.model)
    front = program.reaching(layer)

    def features() -> Iterator[torch.Tensor]:
        for inputs, _ in slices(dataset, min(rows, rows_at_once(entries, device))):
            assert isinstance(inputs, torch.Tensor)
            x = types.inputs(inputs.to(device))
            with torch.no_grad():
                reached = front(x if fixed is None else fixed(x).flatten(0, 1))
            yield reached.reshape(len(inputs), 1 if fixed is None else fixed.copies, *reached.shape[1:])

    return private_moments(
        features(),
        radius=layer.radius,
        multiplier=multiplier,
        dataset_size=dataset_size,
        mean_share=layer.mean_share,
        generator=draw,
        copies=True,
        device=device,
    )
