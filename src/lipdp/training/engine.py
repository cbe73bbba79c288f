"""The engine: one private step after another, as planned and never more."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from lipdp._discreet import discreet
from lipdp._numerics import keep_freed_memory
from lipdp.bounds import program_of
from lipdp.data.augment import Augmentation, PrecomputedCopies
from lipdp.errors import CheckpointError, ConfigurationError, DataError, LipdpWarning, UnsupportedError
from lipdp.inputs import leaves, plain, rows_of
from lipdp.parametrize import project_, project_outside_
from lipdp.planning.decide import STATISTICS
from lipdp.planning.grouping import check_plan_fits, clip_layers
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import describe_loss, usual_seats
from lipdp.planning.suggest import check_optimizer
from lipdp.privacy import noise_cuda
from lipdp.privacy.accounting import run_epsilon
from lipdp.privacy.budget import AnyBudget, open_budget
from lipdp.privacy.ledger import Ledger
from lipdp.privacy.randomness import Claim
from lipdp.privacy.sampling import sample_indices
from lipdp.program import find_input_shape
from lipdp.program.dtypes import Types
from lipdp.training.account import RunAccount, RunRecord, data_marks, record_run
from lipdp.training.averaging import make_average
from lipdp.training.batches import Batch, Rows, check_batch, check_dataset, divided, even_rows, gather
from lipdp.training.book import BookFile
from lipdp.training.distributed import added_up, check_unwrapped, present_ranks
from lipdp.training.front import Settled, applicable_layers, settle
from lipdp.training.guards import Held, claim_batch, note_batch, spend_all, spend_batch
from lipdp.training.held import HeldState, refuse_foreign_state
from lipdp.training.positions import (
    Claims,
    Progress,
    close_book,
    is_book_open,
    know_draws,
    layout,
    open_book,
    refuse_forked,
    sync_book,
)
from lipdp.training.query import Answer, Sample, query_of
from lipdp.training.seats import Copies, Seating, shuffle
from lipdp.training.shards import Places, Shards
from lipdp.training.state import STATE_FORMAT, EngineState, check_seal, read_state, sealed, try_optimizer
from lipdp.training.statistics import find_standardize, release_moments
from lipdp.training.step_mechanism import StepMechanism, StepSettings
from lipdp.training.streams import Prepared, Streams, derive_run_key, parts_of_run, secret_of
from lipdp.training.totals import Turn
from lipdp.training.update import Moved, Update
from lipdp.training.watch import Flag, ModelWatch, Projection, ask_flags, project_trained, read_flags

__all__ = ["PrivacyEngine"]

# Tensors of a microbatch: inputs, targets, mask.
_MICROBATCH = 3
# The same accountant on another machine may round otherwise; more than this is another budget.
_SAME_EPSILON = 1 + 1e-6


class _Asked(NamedTuple):
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


class PrivacyEngine:
    """Private training as a loop of your own::

        engine = lipdp.PrivacyEngine(model, loss, optimizer, plan)
        for batch in engine.batches(train):     # real Poisson batches, as many as the plan pays for
            engine.step(*batch)
        engine.epsilon

    A step sums the per-example gradients over fixed-shape microbatches, adds the planned noise once, divides by the constant
    expected batch size, and hands the result to the optimiser; then weights go back into their constraint sets. ``step``
    returns nothing: a training loss would be another query about the private data.

    The engine analyses the model again and refuses a plan that promises smaller sensitivities than it finds, less noise than
    its multiplier says, or a smaller ε than its steps cost. Weights or layers' settings that are changed between steps are
    noticed: the model is then analysed and projected again before anything is computed.

    While the engine lives, other steps of any optimiser over its parameters are refused: they would train without noise.
    :meth:`close` (or the end of a ``with`` block) lets the parameters go.

    Args:
        model: the model; its constrained weights are projected at once.
        loss: the loss that was planned for.
        optimizer: any torch optimiser over the model's parameters (but LBFGS, which evaluates the loss several times a step).
        plan: from :func:`lipdp.plan`.
        seed: with ``reproducible=True``, what the run is repeated from. Alone it decides nothing here: noise, samples, dropout and
            augmentation come from a secret key of the operating system, and no two runs are the same.
        reproducible: draw everything from ``seed``, so that the run can be repeated. It is then *not private*: whoever knows or
            guesses the seed can subtract the noise. :attr:`private`, histories and reports say so. For tests and benchmarks.
        microbatch_size: rows that go through the model at once, at most; caps the memory. It changes no result but rounding. (A
            step of 1,024 records on average has 1,088 seats: at most 1,024 at once are two microbatches of 544.)
        device: where to compute; by default where the model is.
        ema_decay: keep an exponential moving average of the weights (post-processing, free); see :meth:`averaged`.
        tail_average: average the weights of this last fraction of the run instead, each with the same weight.
        augmentation: each example's gradient is the mean over its augmented copies (:mod:`lipdp.data`); no bound changes.
        public: declare the training data public: :attr:`clipped_fraction` then shows the exact share of clipped examples.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file. The whole plan is reserved there
            before the first release; what was never released is given back by :meth:`close`, or when the engine is gone.
        book: the file of the run's book: what stands for each release is written there before it is handed out, so that a process
            that goes on from a state knows which steps were made since, and refuses to make others in their place
            (:meth:`give_up`). Give it from the start of a run on; one run writes it at a time. :func:`lipdp.fit` keeps one beside
            its checkpoint. A reproducible run needs none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        *,
        seed: int | None = None,
        reproducible: bool = False,
        microbatch_size: int | None = None,
        device: torch.device | str | None = None,
        ema_decay: float | None = None,
        tail_average: float | None = None,
        augmentation: Augmentation | None = None,
        public: bool = False,
        input_shape: tuple[int, ...] | None = None,
        budget: AnyBudget = None,
        book: str | os.PathLike[str] | None = None,
    ) -> None:
        self._ranks = present_ranks()
        with self._ranks.together():
            check_unwrapped(model)
        self._shards = Shards(model)
        model = self._shards.model
        with self._ranks.together():  # what one rank refuses, all do
            account = RunAccount(open_budget(budget) if self._ranks.is_first else None)
            if microbatch_size is not None and (not isinstance(microbatch_size, int) or microbatch_size < 1):
                raise ConfigurationError(f"microbatch_size must be a whole number of at least 1, not {microbatch_size!r}")
            if book is not None and not isinstance(book, str | os.PathLike):
                raise ConfigurationError(f"book is {book!r}: the path of a file in which the run's releases are noted")
            secret = secret_of(seed, reproducible)
            self.model = model
            self.optimizer = optimizer
            self.plan = plan
            self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            self._input_shape = find_input_shape(model) if input_shape is None else tuple(input_shape)
            check_plan_fits(plan, model)
            refuse_foreign_state(model)
            self._query = query_of(model, loss, plan, self._input_shape)
            self._mechanism = StepMechanism(plan, self._query)
            self._augmentation = augmentation
            self._settled: Settled | None = None
            self.loss = self._query.loss
            self._types = Types(model, self.loss)
            self.ledger = Ledger(
                run=plan.run,
                delta=plan.delta,
                planned_epsilon=plan.epsilon,
                accountant=plan.accountant,
                adjacency=plan.adjacency,
            )
            self._check_plan()
            check_optimizer(optimizer, self._shards.given)
            if device is not None:
                model.to(_known_device(device))
            self.device = next(iter(self._parameters.values())).device
            if self.device.type == "cpu":
                keep_freed_memory()
            seats = usual_seats(plan.batch_size, whole=plan.sampling_rate == 1)
            copies = 1 if augmentation is None else augmentation.copies
            self._asked_rows = (
                None
                if microbatch_size is None
                else min(microbatch_size, copies * divided(seats, max(1, microbatch_size // copies)))
            )
            self._rows = self._asked_rows
            self.microbatch_size = self._microbatch_size()
            self._query.rehearse(self.microbatch_size)
            if isinstance(self.loss, torch.nn.Module):
                self.loss.to(self.device)
            project_(model)
            self._shards.scatter()
            self._apply_clips()
            self.average = make_average(self._shards.parameters, plan.steps, ema_decay, tail_average)
        secret = self._ranks.shared(secret)
        if self._ranks.grouped:
            parts = parts_of_run(secret, plan, model, self.loss, optimizer, augmentation)
            modes = [module.training for module in model.modules()]
            settings = [
                reproducible,
                seed if reproducible else None,
                microbatch_size,
                ema_decay,
                tail_average,
                bool(public),
                budget is None,
                book is None,
            ]
            given = {"an argument of the engine": settings, "the mode (training or evaluation) of a layer": modes}
            self._ranks.agree_on_run(plan, {**parts, **given}, self.microbatch_size)
        key = derive_run_key(secret, plan, model, self.loss, optimizer, augmentation)
        self._streams = Streams(key, self.device, private=not reproducible)
        self._watch = ModelWatch(model, self.loss, lambda: self._streams.words_key, self._query.watched)
        self._project = Projection(model, self._watch)
        self._update = Update(model, optimizer, self._watch, self._parameters, plan.batch_size)
        self._state = HeldState(model, trained=not self._query.recorded)
        self._resumed = False
        self._book = None if reproducible else book  # what a seed repeats is no second release
        self._since: str | None = None  # how far it had come when the run was saved
        self._opened: bytes | None = None  # the run whose book is open
        self._file: BookFile | None = None  # where this rank writes it
        self._values = [*model.parameters(), *model.buffers()]  # all that it computes with
        self._on_one_device = all(t.device == self.device for t in self._values)
        self._seating = Seating(seats)
        self._drawn = 0  # batches drawn so far
        self._public = bool(public)
        self._clipped_share: float | None = None
        self._account, self._paid = account, budget is not None
        self._data: tuple[str, ...] = ()  # what the data are known by, until the next release
        self._held = Held(iter([*self._parameters.values(), *self._shards.parameters.values()]), optimizer)
        weakref.finalize(self, account.abandon)
        self._watch.remember()

    # ------------------------------------------------------------------ what was spent

    @property
    def steps(self) -> int:
        """Steps taken so far (charged to the budget)."""
        return self.ledger.steps

    @property
    def epsilon(self) -> float:
        """ε spent so far, at the plan's δ."""
        return self.ledger.epsilon

    def reserve(self) -> None:
        """Pay the budget for all that is planned, once. It is done before the first release, if not earlier by hand.

        A resumed run has paid already, unless its records change from one reading to the next. BudgetError where it is
        too much; then nothing was charged or released.
        """
        self._open_book()
        if not self._streams.steady:
            self._account.begin_anew()
        if self._data and self._ranks.is_first:
            secret = hashlib.sha256(f"{self._streams.key!r}".encode()).hexdigest()
            record_run(self._data, RunRecord(secret, self.ledger, self._account.name))
        self._data = ()
        if self._paid:
            self._ranks.by_first(lambda: self._account.reserve(self.ledger, self._streams.key))

    def close(self, *, keep: bool = False) -> None:
        """End the run: its parameters may be trained otherwise, and the budget gets back what was never released.

        A step after it takes both again.

        Args:
            keep: keep the rest of the plan reserved, for a run that will be resumed from its :meth:`state_dict`.
        """
        self._held.release()
        try:
            self._account.close(keep=keep)
        finally:
            self._since = close_book(self._streams.run) or self._since
            self._opened = self._file = None

    def give_up(self) -> int:
        """Go on behind the steps that this run is known to have made, where they can't be repeated: they are paid for, and lost.

        A step that was made before, by an engine that was rewound or by a process that was killed, is the same release where its
        sums are the same to the last bit, and refused by RepeatedStepError where they are not (another machine, another
        ``microbatch_size``). Batches that were drawn until now are refused: they were those of other steps.

        Returns:
            The number of steps that are done now.
        """
        self._open_book()
        self.ledger.steps = self._drawn = max(self.steps, min(self._streams.end, self.plan.steps))
        self._account.note(self.ledger)
        spend_all(self._account.nonce)
        return self.steps

    def _open_book(self) -> None:
        """Keep the run's book in its file from here on; on all ranks what it says is known."""
        run, path = self._streams.run, self._book
        if path is None or (self._opened == run and is_book_open(run)):
            return

        def read() -> bytes:
            self._file = open_book(run, path, self._since)
            return json.dumps([[*draw, tag.hex()] for draw, tag in self._file.draws.items()]).encode()

        told = self._ranks.shared(self._ranks.by_first(read) or b"")
        know_draws(run, {(position, number): bytes.fromhex(tag) for position, number, tag in json.loads(told)})
        self._opened = run

    def __enter__(self) -> PrivacyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def private(self) -> bool:
        """Whether the run's key came from the operating system. A reproducible run is not private, whatever its ε says."""
        return self._streams.private

    # ------------------------------------------------------------------ the loop

    def bind(self, train: Any, progress: Progress | None = None) -> None:
        """Bind the run to these records: its samples and noise depend on a digest of them, under the run's key.

        Every record is read once; ``progress(done, total)`` is told as it goes. :meth:`batches`, :meth:`samples`, :meth:`settle`
        and :meth:`release_statistics` do it where it was not done. Other records, in a resumed run too, are refused.
        """
        self._open_book()
        if self._settled is not None and train is self._settled.dataset:
            return
        with self._ranks.together():
            digest = self._streams.digest(train, progress)
        if self._streams.data not in (None, digest):
            raise (CheckpointError if self._resumed else DataError)(
                "these are not the records that this run has been trained on: one of them, their order or their types differ. Its "
                "key is bound to those: the same noise on others would give their differences away. Pass the same records to go "
                "on; or train on these with a new PrivacyEngine (in fit: without resume, to another checkpoint file), which has a "
                "fresh key, and whose epsilon is to be added to what this run has spent."
            )
        if self._streams.kept not in ("", layout(train)):
            raise (CheckpointError if self._resumed else DataError)(
                "these are the records that this run has been trained on, in another kind of dataset: its batches are told apart "
                "in another way, so that steps that are done again would not be repetitions. Pass the same kind (rows of a "
                "TensorDataset, a Subset of the same rows, or other records)."
            )
        self._ranks.agree({"the training data": digest}, "Let every rank read the same records, in the same order.")
        self._streams.bind(train, digest)

    def batches(self, train: Any) -> Iterator[Batch]:
        """Batches of ``train`` for the steps that are left, drawn as the plan's ``sampling`` says: by default every record enters
        each with probability q.

        Each batch is for one step. It is a function of the run's secret key and its number, so a resumed run sees the same
        ones, and no number is drawn twice: batches may be fetched ahead or left out. With Poisson sampling ``train`` may differ in
        size from ``plan.dataset_size`` (neighbouring datasets do): q stays the plan's.
        """
        for chosen in self.samples(train):
            batch = gather(train, chosen)
            note_batch(batch, self._account.nonce)
            yield batch

    def samples(self, train: Any) -> Iterator[torch.Tensor]:
        """The numbers of the records of each of the :meth:`batches`."""
        size, sampler = check_dataset(train), self.plan.sampler
        sampler.check_size(size, self.plan.adjacency)
        self.bind(train)
        self._data += data_marks(train)
        if abs(size - self.plan.dataset_size) > 0.01 * self.plan.dataset_size:
            warnings.warn(
                f"the dataset has {size} records, the plan says {self.plan.dataset_size}: batches will have "
                f"{self.plan.sampling_rate * size:.0f} records on average instead of {self.plan.batch_size}. The guarantee holds, "
                "but the learning rate was probably chosen for the other size.",
                LipdpWarning,
                stacklevel=2,
            )
        while (number := max(self._drawn, self.steps)) < self.plan.steps:
            self._drawn = number + 1
            yield sample_indices(size, self.plan.sampling_rate, self._streams.sample(number), sampler)

    def step(self, inputs: Any, targets: torch.Tensor) -> None:
        """One private step on a Poisson batch (of any size, 0 included).

        Inputs and targets may be of other types than the model's: floating-point numbers of any precision, whole numbers,
        booleans; they are converted a microbatch at a time. Token ids stay whole numbers. Several inputs are a tuple (the model's
        arguments) or a dict (its arguments by name) of tensors.
        """
        if self.private:
            refuse_forked(self._streams.run)  # before torch computes, whose threads a fork has not
        with self._ranks.together():
            if self.ledger.remaining == 0:
                self.ledger.charge()  # raises
            inputs = plain(inputs)
            check_batch(inputs, targets, None if self._augmentation else self._input_shape)
            self._check_inputs(inputs)
            self._check_size(len(targets))
            dtypes = self._types.of_inputs(inputs), self._types.of_targets(targets)
            claim_batch((inputs, targets), self._account.nonce)
            self._watch.restore_modes()
            number = self.steps
            batch = Sample(inputs, targets, self.microbatch_size, self.device, dtypes=dtypes, seats=self._seats(inputs, number))
        self._shards.gather()
        asked = self._ask(batch)
        if self._public and asked.answer.clipped is not None:
            self._clipped_share = float(asked.answer.clipped[0]) / max(1, asked.answer.clipped[1])
        self.reserve()  # a run that is refused takes no position
        with self._ranks.together():  # the book is the first rank's: it is written before any of them goes on
            self._release(asked)
            spend_batch((inputs, targets))
            noised = self._noised(asked) if asked.moved is None else {}
        with self._ranks.together():  # where one rank fails, none goes on with weights that the others don't have
            # From here on it is post-processing: nothing below reads data. Gradients that someone left behind may have.
            self._drop_gradients()
            self._watch.forget()  # until the projection is done, in case something below fails
            self._held.hold()
            if asked.moved is None:
                self._move(noised, asked.settings)
            else:
                self._update.commit(asked.moved)
                self._project.fine, self._project.words = asked.moved.fine, asked.moved.words
        if asked.moved is None:
            self._shards.gather()
            self._project()
            self._shards.scatter()
        if self.plan.clips:
            self._apply_clips()
            self._watch.remember()
        else:
            self._watch.remember_values(self._project.words)
        self._streams.step_done(self._values)
        if self.average is not None:
            self.average.update(self._shards.parameters)

    def _move(self, noised: Mapping[str, torch.Tensor], settings: StepSettings) -> None:
        """Hand what was released to the optimiser."""
        means = torch._foreach_div(list(noised.values()), float(self.plan.batch_size))
        gradients = self._query.gradients(dict(zip(noised, means, strict=True)))
        self._shards.set_gradients({name: gradients[name] for name in self._trained(settings)})
        self._held.step(self.optimizer)
        self._drop_gradients()

    def _trained(self, settings: StepSettings) -> dict[str, torch.nn.Parameter]:
        """The parameters that a step moves: those of the plan that its phase does not freeze."""
        return {name: p for name, p in self._parameters.items() if name in settings.stds}

    def _check_inputs(self, inputs: Any) -> None:
        """Refuse several inputs where there is a proof: it is of a program of one."""
        if self.plan.method in ("clipless", "mixed") and isinstance(inputs, tuple | dict):
            raise UnsupportedError(
                f"method={self.plan.method!r} proves bounds of models of one input tensor, and these records have several. Use a "
                "clipping method, e.g. method='bookkeeping'; or join the inputs into one tensor."
            )

    def _check_size(self, records: int) -> None:
        """Refuse a batch that the planned sampling can't have drawn."""
        plan = self.plan
        if plan.sampling == "fixed_size" and records != plan.batch_size:
            raise DataError(f"a batch of {records} records: the plan draws exactly {plan.batch_size}. Use engine.batches.")
        if plan.largest_batch is not None and records > plan.largest_batch:
            raise DataError(f"a batch of {records} records: the plan cuts them at {plan.largest_batch}. Use engine.batches.")

    def _prove_again(self) -> None:
        """The model is not the one that was proved: analyse and project it as it is now."""
        self._check_plan()
        project_(self.model)
        self._shards.scatter()
        self._watch.remember()
        self._values = [*self.model.parameters(), *self.model.buffers()]
        self._state = HeldState(self.model, trained=not self._query.recorded)
        self._on_one_device = all(t.device == self.device for t in self._values)

    def _look(self) -> Flag:
        """Whether the model is the one that was proved; raises where it can't be any more."""
        same = self._watch.compare()
        self._watch.check_structure()
        return same if self._query.stands else False

    def _stands_here(self) -> bool:
        """The same, as far as the host knows it, while a device compares the values that it has."""
        same = self._watch.compare_here()
        self._watch.check_structure()
        return same and self._query.stands

    def _beside(self, microbatch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Digests of the weights, all in the first rows, and of a microbatch behind them."""
        return torch.cat([self._watch.digest_elsewhere(), noise_cuda.words_of(microbatch, self._streams.words_key)])

    @property
    def _runs_ahead(self) -> bool:
        """Whether a step's sums are launched before the host looks at anything."""
        return self.device.type == "cuda"

    def _ask(self, batch: Sample) -> _Asked:
        """What the data say to all ranks together; what one of them refuses, all do."""
        with self._ranks.together():
            asked, turn = self._ask_alone(batch)
        return asked._replace(answer=self._over_ranks(asked.answer, turn, asked.settings, asked.prepared))

    @discreet
    def _ask_alone(self, batch: Sample, attempts: int = 2) -> tuple[_Asked, Turn]:
        """What the data say, computed by the model that was proved: to be released, and not before this returns.

        On CUDA a proved program is launched at once, and all that follows from its sums behind it (:mod:`lipdp.training.update`);
        behind clipped sums, their noise. Everything else happens while they run: whether the model still is the one that was proved
        is looked at, on the host and, for the values of weights, on the device; so is whether the last projection found them
        finite, whether the sums are, and whether the forward pass left the model's state alone. The host waits once, for all of
        them, before it goes on; where one is no, what was computed is thrown away. It has to wait: a record whose gradient is not
        finite must be left out of the sum, and no other record with it, or it would change all that the others say.
        """
        number, runs_ahead = self.steps, self._runs_ahead
        recorded = runs_ahead and self._query.recorded
        unchanged: Flag = True
        if not runs_ahead and (unchanged := self._look()) is False:
            self._prove_again()
            unchanged = True
        settings = self._mechanism.at(number)
        trained = self._trained(settings)
        with self._streams.model(number, on_host=not recorded) as begin, self._state.held():
            copies = self._copies(number)
            turn = self._turn(settings, number, begin, copies)
            asked = dataclasses.replace(batch, copies=copies, settings=self._watch.settings, turn=turn)
            alone = runs_ahead and not self._ranks.grouped
            if recorded and alone and self._on_one_device:
                asked = dataclasses.replace(asked, beside=self._beside)
            answer = self._query.ask(trained, asked, settings.clips)
            told = bool(answer.seen)  # digests of the weights are there already
            if runs_ahead:
                unchanged = self._watch.compare_there(answer.seen[0][:-_MICROBATCH]) if told else self._look()
            prepared = self._streams.prepare(number, self.optimizer, self._values, batch.inputs, batch.targets, answer.seen)
            read = ask_flags([unchanged, self._project.fine, answer.fine, *self._state.same()])
            noised, moved = None, None
            claims: list[tuple[int, Claim]] = []
            if alone and told:
                stream = self._streams.noise(prepared, claims)
                moved = self._update.begin(self._mechanism.draw_on_device(answer, settings, stream), trained)
                if moved is not None:
                    stream.claim_last(moved.tag)
            if alone:
                noised = self._mechanism.draw(answer, settings, self._streams.noise(prepared, claims)) if moved is None else None
                self._seating.draw_ahead(self._streams.seats(number + 1))
            here = self._stands_here() if told and runs_ahead else True
            unchanged, finite, fine, *same = read()
            unchanged = unchanged and here
            if not finite:
                self._project.check()
            self._state.refuse(same)
            if unchanged and not fine and answer.again is not None:
                answer, noised, moved, claims = answer.again(), None, None, []
                self._state.refuse(read_flags(self._state.same()))
        if unchanged:
            return _Asked(answer, settings, prepared, noised, moved, claims), turn
        if attempts == 0:
            raise ConfigurationError(
                "the model's weights or settings change while a step is computed (another thread, or a forward that writes to "
                "them), so nothing bounds what it computes. No step was taken."
            )
        self._prove_again()  # its settings have changed, or its weights were written to past torch's own bookkeeping
        return self._ask_alone(batch, attempts - 1)

    def _turn(self, settings: StepSettings, number: int, begin: Callable[[int], None], copies: Copies) -> Turn:
        """Which microbatches this process computes; each begins with random draws of its own."""

        def started(microbatch: int) -> None:
            begin(microbatch)
            if copies.generator is not None:
                self._streams.draw(number, "augment", copies.generator, microbatch)

        return self._ranks.turn(settings.stds, started)

    def _over_ranks(self, answer: Answer, turn: Turn, settings: StepSettings, prepared: Prepared) -> Answer:
        """The answer of all ranks together."""
        if turn.units is None:
            return answer
        why = "Their weights, batches or settings have come apart: were all of them loaded with one state, on equal devices?"
        self._ranks.agree({f"what step {self.steps} depends on": self._streams.told(prepared, self._values)}, why)
        return added_up(self._ranks, answer, turn.units, settings.count_std)

    def _release(self, asked: _Asked) -> None:
        """The one place where something about the data begins to leave in a step: it is charged, and its position is taken.

        In this order: an interrupt between the two leaves a step that was paid for and not made; the next goes on behind it.
        """
        self._streams.refuse_taken(asked.prepared, asked.claims)
        self.ledger.charge()
        self._account.note(self.ledger)
        self._streams.take(asked.prepared, asked.claims)

    def _noised(self, asked: _Asked) -> dict[str, torch.Tensor]:
        """What leaves: the answer with its noise, unless it was drawn already."""
        noised = asked.noised
        if noised is None:
            noised = self._mechanism.draw(asked.answer, asked.settings, self._streams.noise(asked.prepared))
        return self._mechanism.follow(noised)

    def _copies(self, number: int) -> Copies:
        if self._augmentation is None:
            return Copies()
        return Copies(self._augmentation, self._streams.draw(number, "augment"), self._input_shape)

    def _seats(self, inputs: Any, number: int) -> torch.Tensor:
        """Where each record of the batch sits: what is computed for it depends on no other record."""
        shuffled = all(isinstance(part, Rows) and part.shuffled for part in leaves(inputs))
        return self._seating(rows_of(inputs), self._streams.seats(number), shuffled=shuffled)

    def _drop_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def fix_microbatches(self) -> None:
        """Keep the size that microbatches have, in states too: steps that are done again elsewhere then give the same bits."""
        self._rows = self.microbatch_size

    def _microbatch_size(self) -> int:
        whole = self.plan.sampling_rate == 1
        query = self._query
        rows = self._rows or even_rows(
            self.plan.batch_size, self.device, query.entries, query.products, whole=whole, ranks=self._ranks.count
        )
        return min(rows, query.most_rows)

    def release_statistics(self, train: Any) -> None:
        """Release the statistics of each channel, as planned, and set the model's :class:`~lipdp.nn.Standardize` with them.

        Once, before the first step. It is a Gaussian mechanism over all of ``train``; the plan has paid for it.
        """
        layer = find_standardize(self.model)
        planned = {release.name: release.amount for release in self.plan.releases}
        if STATISTICS not in planned:
            raise ConfigurationError("the plan does not pay for statistics: make one with plan(…, statistics_budget=0.05)")
        if self.steps > 0:
            raise ConfigurationError("statistics are released before the first step: the weights were trained without them")
        self._data += data_marks(train)
        self.bind(train)
        self.reserve()
        noise = self._streams.release_noise(STATISTICS, str(self.model))
        self.ledger.charge_release(STATISTICS)
        self._account.note(self.ledger)
        moments = release_moments(
            program_of(self.trained_part, self._input_shape),
            layer,
            train,
            multiplier=planned[STATISTICS],
            dataset_size=self.plan.dataset_size,
            draw=noise,
            device=self.device,
            rows=self.microbatch_size,
            copies=self._augmentation,
            shape=self._input_shape,
        )
        layer.set_statistics(moments.mean, moments.variance)
        self._check_plan()
        self._watch.remember()

    @property
    def has_front(self) -> bool:
        """Whether :meth:`settle` has fixed layers to apply now. Those behind a Standardize wait for its statistics."""
        return applicable_layers(self.model, self._settled, waiting=self._awaits_statistics) > 0

    @property
    def _awaits_statistics(self) -> bool:
        return any(release.name == STATISTICS for release in self.plan.releases) and STATISTICS not in self.ledger.one_off

    @property
    def trained_part(self) -> torch.nn.Module:
        """What steps run: the model, or what is left of it behind the layers that :meth:`settle` has applied."""
        return self.model if self._settled is None else self._settled.rest

    def settle(self, train: Any, *, in_place: bool = False, cache: str | os.PathLike[str] | None = None) -> TensorDataset:
        """Apply the layers in front of the first trained one to all of ``train``, once: steps are then on batches of the result.

        The model, the plan, the noise and the cost stay what they are; a step gets cheaper. See :mod:`lipdp.training.front`. With
        statistics to release, the layers before the Standardize come first; call it again with its result when they are released.

        Args:
            train: the records; the second time, what the first call gave.
            in_place: put the result over the inputs of a TensorDataset, where it fits.
            cache: a folder that keeps what rests on no released statistics from one run to the next.
        """
        before = self._settled
        again = before is not None and train is before.dataset
        if before is not None and not again:
            raise ConfigurationError("this run is settled already: its steps are on the dataset that engine.settle() gave")
        self.bind(train)
        if not again:
            self._data += data_marks(train)
        waiting = self._awaits_statistics
        settled = settle(
            self.model,
            train,
            input_shape=self._input_shape,
            device=self.device,
            before=before,
            waiting=waiting,
            copies=self._augmentation,
            in_place=in_place or again,
            seats=usual_seats(self.plan.dataset_size, whole=True),
            draw=self._streams.seats(0 if before is None else len(before.stages), "seats at the front"),
            cache=cache if waiting or not self.ledger.one_off else None,
        )
        query = query_of(settled.rest, self.loss, self.plan, settled.shape, self._watch.watched)
        query.prove()  # before anything is taken over
        self._settled, self._input_shape = settled, settled.shape
        if self._augmentation is not None:
            self._augmentation = PrecomputedCopies(self._augmentation.copies)
        self._streams.know(settled.dataset)
        self._query = self._mechanism.query = query
        self._types = Types(settled.rest, self.loss)
        self._check_plan()
        self.microbatch_size = self._microbatch_size()
        return settled.dataset

    def through_front(self, dataset: Any) -> Any:
        """Other records (a validation set) as :attr:`trained_part` takes them."""
        return dataset if self._settled is None else self._settled.rows_of(dataset)

    def shuffle(self) -> TensorDataset:
        """Put the rows of :meth:`settle` into a secret random order, in their memory, so that batches of all need no gathering.

        Where all records are in every batch (sampling rate 1), their order is drawn anew in each step unless they lie in one.
        """
        if self._settled is None:
            raise ConfigurationError("only rows that engine.settle() has stored are put into another order: call it first")
        shuffled = shuffle(self._settled.dataset, self._streams.seats(0, "order of all"))
        self._settled = dataclasses.replace(self._settled, dataset=shuffled)
        self._streams.know(shuffled)
        return shuffled

    @property
    def noise_stds(self) -> dict[str, float]:
        """Noise on the gradient sum in the next step, by parameter; the plan's, unless clipping norms or phases have changed."""
        return dict(self._mechanism.at(min(self.steps, self.plan.steps - 1)).stds)

    @property
    def clipping(self) -> dict[str, float]:
        """The clipping norms that change during the run, as they are now: private by construction, so free to look at."""
        phase = self.plan.phase(min(self.steps, self.plan.steps - 1))
        return {name: value * phase.clip for name, value in self._mechanism.clips.items()}

    def _apply_clips(self) -> None:
        """The layers that clip show the norm of the next step."""
        layers, present = clip_layers(self.model), self.clipping
        for name in present.keys() & layers.keys():
            layers[name].max_norm = present[name]

    @property
    def clipped_fraction(self) -> float | None:
        """Share of examples clipped in the last step: the released estimate with adaptive clipping; exact for public data."""
        if self._public:
            return self._clipped_share
        shares = self._mechanism.shares.values()
        return 1 - sum(shares) / len(shares) if shares else None

    @property
    def apart(self) -> str:
        """How it is known that no record's gradient depends on the others of its batch: "proved", by the program or by following
        every operation of a clipped pass; "alone": each record is taken by itself; "" before clipping has seen a batch.
        """
        return self._query.apart

    # ------------------------------------------------------------------ weights to use

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """The model with its averaged weights (projected into their sets) inside the block; itself where none are kept."""
        if self.average is None or self.steps == 0:
            yield self.model
            return
        with self.average.applied_to(self._shards.parameters):
            self._shards.gather()
            project_trained(self.model)
            yield self.model
        self._shards.gather()

    def use_average(self) -> None:
        """Replace the weights by their average for good (at the end of a run)."""
        if self.average is not None and self.steps > 0:
            self.average.copy_to(self._shards.parameters)
            self._shards.gather()
            project_trained(self.model)
            self._shards.scatter()

    # ------------------------------------------------------------------ state

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "an engine can't be pickled (torch.save, processes): it holds the run's secret key and its account. "
            "Save engine.state_dict(), make an engine of the same model and plan, and give it that by load_state_dict; "
            "lipdp.fit(…, checkpoint=…) does so."
        )

    def __copy__(self) -> PrivacyEngine:
        return self._copied(dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivacyEngine:
        """Weights and optimiser of its own; positions of the noise and the account stay those of both."""
        return self._copied(lambda attributes: copy.deepcopy(attributes, memo), memo)

    def _copied(self, how: Callable[[dict[str, Any]], dict[str, Any]], memo: dict[int, Any] | None = None) -> PrivacyEngine:
        twin = object.__new__(type(self))
        if memo is not None:
            memo[id(self)] = twin
        twin.__dict__.update(how(self.__dict__))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs, as a copy. It holds the run's secret key: keep it as safe as the data.

        Of a model that ``fully_shard`` has divided it holds this rank's part, and all ranks have to ask for it.
        """
        if self._book is not None and self._since is None and self._ranks.is_first:
            self._file = open_book(self._streams.run, self._book, self._since)
        return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        self._project.check()
        self._since = sync_book(self._streams.run) or self._since
        # A copy, for a step counter that went back over weights that did not would allow steps nobody paid for.
        content = copy.deepcopy(
            {
                "format": STATE_FORMAT,
                "plan": self.plan.to_json(),
                "steps": self.steps,
                "one_off": list(self.ledger.one_off),
                "rows": self.microbatch_size if self.steps or self._rows is not None else None,
                "run": self._account.nonce,
                "budget": self._account.name,
                "book": self._since,
                **self._streams.state_dict(),
                "clips": dict(self._mechanism.clips),
                "model": self._shards.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": None if self.average is None else self.average.state_dict(),
            }
        )
        return sealed(content)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A state that does not fit is an error, and then nothing has changed.

        What a step rests on is not read but derived: weights that are not certainly inside their sets are projected, and all
        bounds and noise are proved anew.
        """
        with self._ranks.together():
            state = self.places().divided(state)
            given = read_state(state, self.plan, self._shards.state_dict(), self.optimizer, self.average)
        check_seal(state)
        with self._ranks.together():
            self._check_resumed(given)
            proved = not self._watch.changed
        before = EngineState(**self._state_dict())
        try:
            with self._ranks.together():
                self._load(given)
                try_optimizer(self.optimizer)
            self._shards.gather()
            with self._ranks.together():
                project_outside_(self.model)
                self._shards.scatter()
                self._check_plan()
                self._watch.remember()
        except BaseException as error:
            self._load(before)
            self._shards.gather()
            self._watch.remember() if proved else self._watch.forget()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(f"this state does not fit the engine: {error}. Nothing was changed.") from error

    def _check_resumed(self, state: EngineState) -> None:
        """Refuse what would make steps behind the state again as other releases, or releases that nobody pays for."""
        if self._ranks.is_first:
            self._account.check_resumed(state.budget)
        if state.book is not None and self._book is None:
            raise CheckpointError(
                "this run keeps a book, which tells what it has released since this state was saved: pass its file as book= to "
                "PrivacyEngine (lipdp.fit keeps it beside the checkpoint)."
            )
        rows = None if self._asked_rows is None else min(self._asked_rows, self._query.most_rows)
        # A book that is begun now knows nothing of what was made since.
        exact = None in (self._book, state.book) and state.private and state.steps < self.plan.steps
        if exact and rows is not None and rows != state.rows:
            before, instead = f"microbatches of {state.rows} rows", f"Leave microbatch_size out, or pass {state.rows}"
            if state.rows is None:
                before, instead = "microbatches of the size that lipdp chooses", "Leave microbatch_size out"
            raise CheckpointError(
                f"this state was saved with {before}, and here microbatch_size makes them {rows}: steps that were made after it "
                f"was saved would be made again with other sums, as releases that nobody pays for. {instead}; or keep a book "
                "(book=FILE, from the start of a run on): it knows them."
            )

    @property
    def divided(self) -> bool:
        """Whether ``fully_shard`` has divided the model: each rank then has a part of the state."""
        return self._shards.divided

    def places(self) -> Places:
        """How the tensors of the state are divided among the ranks."""
        return Places(self._shards, self.optimizer)

    def _load(self, state: EngineState) -> None:
        self._shards.load_state_dict(state.model)
        self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))
        if self.average is not None and state.average is not None:
            self.average.load_state_dict(state.average)
        self.ledger.steps = self._drawn = state.steps
        self.ledger.one_off = list(state.one_off)
        self._rows = self._asked_rows or state.rows  # the same microbatches give the same bits, on any number of ranks
        self.microbatch_size = self._microbatch_size()
        self._mechanism.clips = {name: state.clips[name] for name, _ in self.plan.clips}
        self._apply_clips()
        self._account.adopt(state.run)
        self._streams.load_state_dict(vars(state))
        self._resumed, self._since = True, state.book

    # ------------------------------------------------------------------ checks

    def _check_plan(self) -> None:
        """Trust nothing in the plan but what follows from the model, the loss and the accountant."""
        plan = self.plan
        if describe_loss(self.loss) != plan.loss:
            raise ConfigurationError(
                f"the plan was made for the loss {plan.loss}, not {describe_loss(self.loss)}. Make a new plan."
            )
        if self._settled is not None:
            self._settled.check()
        self._query.prove()
        self._mechanism.forget()
        for phase in (*plan.phases, plan.phase(min(self.steps, plan.steps - 1))):  # the present one last: it is kept
            self._mechanism.at(phase.start)
        spent = run_epsilon(plan.run, plan.delta, plan.accountant, plan.adjacency)
        if not spent <= plan.epsilon * _SAME_EPSILON:
            raise ConfigurationError(
                f"the plan's {plan.steps} steps cost epsilon {spent:.6g}, not the {plan.epsilon:.6g} it says. Make a new plan."
            )


def _known_device(device: torch.device | str) -> torch.device:
    """The device of this name; torch lists all that it was ever built for where there is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"there is no device {device!r}: take 'cpu', 'cuda' or 'cuda:1', or leave device out") from error
