"""The engine: one private step after another, as planned and never more."""

from __future__ import annotations

import copy
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import TensorDataset

from lipdp.data.augment import Augmentation
from lipdp.errors import ConfigurationError, DataError, LipdpWarning, UnsupportedError
from lipdp.inputs import plain
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.suggest import check_parts
from lipdp.privacy.budget import AnyBudget
from lipdp.training.account import data_marks
from lipdp.training.asking import Asked, ask
from lipdp.training.batches import Batch, check_batch, check_dataset, gather
from lipdp.training.continuing import load_state, places_of, state_of
from lipdp.training.front import applicable_layers
from lipdp.training.guards import claim_batch, note_batch, spend_all, spend_batch, tell_of_own_records
from lipdp.training.known import Progress
from lipdp.training.positions import refuse_forked
from lipdp.training.preparing import bind, place_records, release_statistics, settle_records, shuffle_records
from lipdp.training.query import Sample
from lipdp.training.run import Options, Run
from lipdp.training.shards import Places
from lipdp.training.step_mechanism import StepSettings
from lipdp.training.watch import project_trained

Method = TypeVar("Method", bound=Callable[..., Any])
_numbering = threading.RLock()  # batches may be fetched by several threads, while a step is computed
_engines: weakref.WeakSet[PrivacyEngine] = weakref.WeakSet()


def _forked() -> None:
    """Another thread of the parent's may have held their locks: it is not here to let them go."""
    global _numbering
    _numbering = threading.RLock()
    for engine in _engines:
        engine._turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _alone(method: Method) -> Method:
    """One at a time: a step is computed with weights that no other thread moves meanwhile. The others wait for it."""

    @wraps(method)
    def waiting(self: PrivacyEngine, *arguments: Any, **options: Any) -> Any:
        with self._turn:
            return method(self, *arguments, **options)

    return cast(Method, waiting)


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
        check_parts(model, plan, optimizer)
        options = Options(
            seed, reproducible, microbatch_size, device, ema_decay, tail_average, augmentation, public, input_shape, budget, book
        )
        self._turn = threading.RLock()
        run = self._run = Run(model, loss, optimizer, plan, options)
        self.model, self.loss, self.optimizer, self.plan = run.model, run.loss, run.optimizer, run.plan
        self.ledger, self.average, self.device = run.ledger, run.average, run.device
        run.account.belong_to(self)
        _engines.add(self)

    @property
    def microbatch_size(self) -> int:
        """Rows that go through the model at once."""
        return self._run.microbatch_size

    # ------------------------------------------------------------------ what was spent

    @property
    def steps(self) -> int:
        """Steps that led to the present weights; all of them were charged."""
        return self.ledger.steps

    @property
    def epsilon(self) -> float:
        """ε spent by the run, at the plan's δ: of all that is known to have been charged, the :attr:`steps` behind the present ones
        included, where the engine was rewound or resumed and its book (or another engine of the run in this process) knows of more.
        """
        return self.ledger.epsilon

    @_alone
    def reserve(self) -> None:
        """Pay the budget for all that is planned, once. It is done before the first release, if not earlier by hand.

        A resumed run has paid already, unless its records change from one reading to the next. BudgetError where it is
        too much; then nothing was charged or released.
        """
        self._run.reserve()

    @_alone
    def close(self, *, keep: bool = False) -> None:
        """End the run: its parameters may be trained otherwise, and the budget gets back what was never released.

        A step after it takes both again.

        Args:
            keep: keep the rest of the plan reserved, for a run that will be resumed from its :meth:`state_dict`.
        """
        run = self._run
        run.held.release()
        try:
            run.account.close(keep=keep)
        finally:
            run.book.close(run.streams.run)

    @_alone
    def give_up(self) -> int:
        """Go on behind the steps that this run is known to have made, where they can't be repeated: they are paid for, and lost.

        A step that was made before, by an engine that was rewound or by a process that was killed, is the same release where its
        sums are the same to the last bit, and refused by RepeatedStepError where they are not (another machine, another
        ``microbatch_size``). Batches that were drawn until now are refused: they were those of other steps. (What
        :meth:`samples` has given ahead is to be thrown away.)

        Returns:
            The number of steps that are done now.
        """
        run = self._run
        run.open_book()
        self.ledger.steps = max(self.steps, min(run.streams.end, self.plan.steps))
        run.drawn = run.used = max(run.used, self.steps, run.streams.batches_end)
        spend_all(run.account.nonce)
        return self.steps

    def __enter__(self) -> PrivacyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def private(self) -> bool:
        """Whether the run's key came from the operating system. A reproducible run is not private, whatever its ε says."""
        return self._run.streams.private

    # ------------------------------------------------------------------ the loop

    @_alone
    def bind(self, train: Any, progress: Progress | None = None) -> None:
        """Bind the run to these records: its samples and noise depend on a digest of them, under the run's key.

        Every record is read once; ``progress(done, total)`` is told as it goes. :meth:`batches`, :meth:`samples`, :meth:`settle`
        and :meth:`release_statistics` do it where it was not done. Other records, in a resumed run too, are refused.
        """
        bind(self._run, train, progress)

    def batches(self, train: Any) -> Iterator[Batch]:
        """Batches of ``train`` for the steps that are left, drawn as the plan's ``sampling`` says: by default every record enters
        each with probability q.

        Each batch is for one step. It is a function of the run's secret key and its number, so a resumed run sees the same
        ones, and no number is drawn twice: batches may be fetched ahead or left out (from a state it goes on behind the last one
        that a step was made with). Hand steps the batches as they are: they are moved and converted there. With Poisson sampling
        ``train`` may differ in size from ``plan.dataset_size`` (neighbouring datasets do): q stays the plan's.
        """
        for number, chosen in self._draws(train):
            batch = gather(train, chosen)
            note_batch(batch, self._run.account.nonce, number)
            yield batch

    def samples(self, train: Any) -> Iterator[torch.Tensor]:
        """Of each of the :meth:`batches` the numbers of its records, to be gathered: ``step(inputs, targets, sample=numbers)``."""
        for number, chosen in self._draws(train):
            note_batch(chosen, self._run.account.nonce, number)
            yield chosen

    def _draws(self, train: Any) -> Iterator[tuple[int, torch.Tensor]]:
        run = self._run
        size, sampler = check_dataset(train), self.plan.sampler
        sampler.check_size(size, self.plan.adjacency)
        self.bind(train)
        run.data += data_marks(train)
        if abs(size - self.plan.dataset_size) > 0.01 * self.plan.dataset_size:
            warnings.warn(
                f"the dataset has {size} records, the plan says {self.plan.dataset_size}: batches will have "
                f"{self.plan.sampling_rate * size:.3g} records on average instead of {self.plan.batch_size}. The guarantee holds, "
                "but the learning rate was probably chosen for the other size.",
                LipdpWarning,
                stacklevel=3,
            )
        while True:
            with _numbering:
                number = max(run.drawn, run.used, self.steps)
                run.drawn = max(run.drawn, min(number + 1, self.plan.steps))
            if number >= self.plan.steps:
                return
            yield number, run.sample(size, number)

    @_alone
    def step(self, inputs: Any, targets: torch.Tensor, *, sample: Any = None) -> None:
        """One private step on a Poisson batch (of any size, 0 included).

        Inputs and targets may be of other types than the model's: floating-point numbers of any precision, whole numbers,
        booleans; they are converted a microbatch at a time. Token ids stay whole numbers. Several inputs are a tuple (the model's
        arguments) or a dict (its arguments by name) of tensors.

        Args:
            inputs: of a batch of :meth:`batches`.
            targets: of the same one.
            sample: which sample these records are, where they are not the very tensors that :meth:`batches` has given: the batch
                that they were made of, record by record, or the numbers of :meth:`samples` that they were gathered by. "own": the
                caller has drawn them, for this step alone and as the plan's ``sampling`` says; the guarantee rests on that. Where
                nobody says so, a warning does.
        """
        run = self._run
        if run.streams.private:
            refuse_forked(run.streams.run)  # before torch computes, whose threads a fork has not
        with run.ranks.together():
            if self.ledger.remaining == 0:
                self.ledger.charge()  # raises
            inputs = plain(inputs)
            check_batch(inputs, targets, None if run.augmentation else run.input_shape)
            self._check_sample(inputs, len(targets))
            dtypes = run.types.of_inputs(inputs), run.types.of_targets(targets)
            drawn = claim_batch((inputs, targets), run.account.nonce, sample)
            unknown = drawn is None and sample is None and len(targets) > 0 and not run.has_own_records
            copied = run.copied_sample(inputs, targets) if unknown else None
            drawn = copied if drawn is None else drawn
            if unknown and drawn is None:
                run.has_own_records = True  # nothing is looked for any more: it would cost every step
                if not run.public:
                    tell_of_own_records()
            run.watch.restore_modes()
            seats = run.seats(inputs, self.ledger.steps)
            batch = Sample(inputs, targets, run.microbatch_size, self.device, dtypes=dtypes, seats=seats)
        run.shards.gather()
        asked = ask(run, batch)
        asked = asked._replace(prepared=asked.prepared._replace(batch=drawn))
        if run.public and asked.answer.clipped is not None:
            run.clipped_share = float(asked.answer.clipped[0]) / max(1, asked.answer.clipped[1])
        run.reserve()  # a run that is refused takes no position
        with run.ranks.together():  # the book is the first rank's: it is written before any of them goes on
            self._release(asked)
            spend_batch((inputs, targets), sample)
            if copied is not None:
                spend_all(run.account.nonce, copied)
            noised = self._noised(asked) if asked.moved is None else {}
        with run.ranks.together():  # where one rank fails, none goes on with weights that the others don't have
            # From here on it is post-processing: nothing below reads data. Gradients that someone left behind may have.
            self._drop_gradients()
            run.watch.forget()  # until the projection is done, in case something below fails
            run.held.hold()
            if asked.moved is None:
                self._move(noised, asked.settings)
            else:
                run.update.commit(asked.moved)
                run.project.fine, run.project.words = asked.moved.fine, asked.moved.words
        if asked.moved is None:
            run.shards.gather()
            run.project()
            run.shards.scatter()
        if self.plan.clips:
            run.apply_clips()
            run.watch.remember()
        else:
            run.watch.remember_values(run.project.words)
        run.streams.step_done(run.values)
        if self.average is not None:
            self.average.update(run.shards.parameters)

    def _move(self, noised: Mapping[str, torch.Tensor], settings: StepSettings) -> None:
        """Hand what was released to the optimiser: means, in the memory of the sums."""
        run = self._run
        torch._foreach_div_(list(noised.values()), float(self.plan.batch_size))
        gradients = run.query.gradients(noised)
        run.shards.set_gradients({name: gradients[name] for name in run.trained(settings)})
        run.held.step(self.optimizer)
        self._drop_gradients()

    def _check_sample(self, inputs: Any, records: int) -> None:
        """Refuse several inputs where there is a proof, which is of a program of one; and what the planned sampling can't draw."""
        plan = self.plan
        if plan.method in ("clipless", "mixed") and isinstance(inputs, tuple | dict):
            raise UnsupportedError(
                f"method={plan.method!r} proves bounds of models of one input tensor, and these records have several. Use a "
                "clipping method, e.g. method='bookkeeping'; or join the inputs into one tensor."
            )
        if plan.sampling == "fixed_size" and records != plan.batch_size:
            raise DataError(f"a batch of {records} records: the plan draws exactly {plan.batch_size}. Use engine.batches.")
        if plan.largest_batch is not None and records > plan.largest_batch:
            raise DataError(f"a batch of {records} records: the plan cuts them at {plan.largest_batch}. Use engine.batches.")

    def _release(self, asked: Asked) -> None:
        """The one place where something about the data begins to leave in a step: it is charged, and its position is taken.

        In this order: an interrupt between the two leaves a step that was paid for and not made; the next goes on behind it.
        """
        run = self._run
        run.streams.refuse_taken(asked.prepared, asked.claims)
        self.ledger.charge()
        run.account.check_paid()
        run.used = max(run.used, self.steps, 0 if asked.prepared.batch is None else asked.prepared.batch + 1)
        run.streams.take(asked.prepared, asked.claims)

    def _noised(self, asked: Asked) -> dict[str, torch.Tensor]:
        """What leaves: the answer with its noise, unless it was drawn already."""
        run = self._run
        noised = asked.noised
        if noised is None:
            noised = run.mechanism.draw(asked.answer, asked.settings, run.streams.noise(asked.prepared))
        return run.mechanism.follow(noised)

    def _drop_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def placed(self, train: Any) -> Any:
        """For :func:`lipdp.fit`, which hands steps rows of it: the records, with inputs on the engine's device if they fit."""
        return place_records(self._run, train)

    def fix_microbatches(self) -> None:
        """Keep the size that microbatches have, in states too: steps that are done again elsewhere then give the same bits."""
        self._run.rows = self.microbatch_size

    @_alone
    def release_statistics(self, train: Any) -> None:
        """Release the statistics of each channel, as planned, and set the model's :class:`~lipdp.nn.Standardize` with them.

        Once, before the first step. It is a Gaussian mechanism over all of ``train``; the plan has paid for it.
        """
        release_statistics(self._run, train)

    @property
    def has_front(self) -> bool:
        """Whether :meth:`settle` has fixed layers to apply now. Those behind a Standardize wait for its statistics."""
        run = self._run
        return applicable_layers(self.model, run.settled, waiting=run.awaits_statistics) > 0

    @property
    def trained_part(self) -> torch.nn.Module:
        """What steps run: the model, or what is left of it behind the layers that :meth:`settle` has applied."""
        return self._run.trained_part

    @_alone
    def settle(self, train: Any, *, in_place: bool = False, cache: str | os.PathLike[str] | None = None) -> TensorDataset:
        """Apply the layers in front of the first trained one to all of ``train``, once: steps are then on batches of the result.

        The model, the plan, the noise and the cost stay what they are; a step gets cheaper. See :mod:`lipdp.training.front`. With
        statistics to release, the layers before the Standardize come first; call it again with its result when they are released.

        Args:
            train: the records; the second time, what the first call gave.
            in_place: put the result over the inputs of a TensorDataset, where it fits.
            cache: a folder that keeps what rests on no released statistics from one run to the next.
        """
        return settle_records(self._run, train, in_place=in_place, cache=cache)

    def through_front(self, dataset: Any) -> Any:
        """Other records (a validation set) as :attr:`trained_part` takes them."""
        run = self._run
        return dataset if run.settled is None else run.settled.rows_of(dataset)

    @_alone
    def shuffle(self) -> TensorDataset:
        """Put the rows of :meth:`settle` into a secret random order, in their memory, so that batches of all need no gathering.

        Where all records are in every batch (sampling rate 1), their order is drawn anew in each step unless they lie in one.
        """
        return shuffle_records(self._run)

    @property
    def noise_stds(self) -> dict[str, float]:
        """Noise on the gradient sum in the next step, by parameter; the plan's, unless clipping norms or phases have changed."""
        return dict(self._run.mechanism.at(self._run.next_step).stds)

    @property
    def clipping(self) -> dict[str, float]:
        """The clipping norms that change during the run, as they are now: private by construction, so free to look at."""
        return self._run.clipping

    @property
    def clipped_fraction(self) -> float | None:
        """Share of examples clipped in the last step: the released estimate with adaptive clipping; exact for public data."""
        run = self._run
        if run.public:
            return run.clipped_share
        shares = run.mechanism.shares.values()
        return 1 - sum(shares) / len(shares) if shares else None

    @property
    def apart(self) -> str:
        """How it is known that no record's gradient depends on the others of its batch: "proved", by the program or by following
        every operation of a clipped pass; "alone": each record is taken by itself; "" before clipping has seen a batch.
        """
        return self._run.query.apart

    # ------------------------------------------------------------------ weights to use

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """The model with its averaged weights (projected into their sets) inside the block; itself where none are kept."""
        run = self._run
        if self.average is None or self.steps == 0:
            yield self.model
            return
        with self._turn, self.average.applied_to(run.shards.parameters):
            run.shards.gather()
            project_trained(self.model)
            yield self.model
        run.shards.gather()

    @_alone
    def use_average(self) -> None:
        """Replace the weights by their average for good (at the end of a run)."""
        run = self._run
        if self.average is not None and self.steps > 0:
            self.average.copy_to(run.shards.parameters)
            run.shards.gather()
            project_trained(self.model)
            run.shards.scatter()

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
            memo[id(self)], memo[id(self._turn)] = twin, threading.RLock()  # its weights are its own
        twin.__dict__.update(how(self.__dict__))
        twin._run.account.belong_to(twin)
        _engines.add(twin)
        return twin

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs, as a copy. It holds the run's secret key: keep it as safe as the data.

        Of a model that ``fully_shard`` has divided it holds this rank's part, and all ranks have to ask for it.
        """
        run = self._run
        run.book.begin(run.streams.run, run.ranks)
        return state_of(run)

    @_alone
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A state that does not fit is an error, and then nothing has changed.

        What a step rests on is not read but derived: weights that are not certainly inside their sets are projected, and all
        bounds and noise are proved anew.
        """
        load_state(self._run, state)

    @property
    def divided(self) -> bool:
        """Whether ``fully_shard`` has divided the model: each rank then has a part of the state."""
        return self._run.shards.divided

    def places(self) -> Places:
        """How the tensors of the state are divided among the ranks."""
        return places_of(self._run)
