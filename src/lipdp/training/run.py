"""What a run is made of: the parts of an engine, and what must hold between its steps."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipdp._checks import known_device
from lipdp._numerics import keep_freed_memory
from lipdp._texts import downwards, upwards
from lipdp.data.augment import Augmentation
from lipdp.errors import ConfigurationError
from lipdp.inputs import leaves, rows_of
from lipdp.parametrize import project_
from lipdp.planning.grouping import check_plan_fits, clip_layers
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import STATISTICS, describe_loss, usual_seats
from lipdp.planning.suggest import check_optimizer
from lipdp.privacy.accounting import run_epsilon
from lipdp.privacy.budget import AnyBudget, open_budget
from lipdp.privacy.ledger import Ledger
from lipdp.privacy.sampling import sample_indices
from lipdp.program import find_input_shape
from lipdp.program.dtypes import Types
from lipdp.training.account import RunAccount, RunRecord, record_run
from lipdp.training.batches import Rows, divided, even_rows
from lipdp.training.book import BookFile
from lipdp.training.distributed import Ranks, check_unwrapped, present_ranks
from lipdp.training.front import Settled
from lipdp.training.guards import Held
from lipdp.training.held import HeldState, refuse_foreign_state
from lipdp.training.known import copied_sample
from lipdp.training.methods import query_of
from lipdp.training.positions import close_book, is_book_open, know_draws, open_book, sync_book
from lipdp.training.seats import Copies, Seating
from lipdp.training.shards import Shards
from lipdp.training.step_mechanism import StepMechanism, StepSettings
from lipdp.training.streams import Streams, derive_run_key, parts_of_run, secret_of
from lipdp.training.update import Update, make_average
from lipdp.training.watch import ModelWatch, Projection


class KeptBook:
    """A run's book on disk (:mod:`lipdp.training.book`), or none where ``path`` is None.

    Attributes:
        path: its file.
        since: how far it had come when the run was saved.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self.since: str | None = None
        self._opened: bytes | None = None  # the run whose book is open
        self._file: BookFile | None = None  # where this rank writes it

    def open(self, run: bytes, ranks: Ranks) -> None:
        """Keep the run's book in its file from here on; on all ranks what it says is known."""
        path = self.path
        if path is None or (self._opened == run and is_book_open(run)):
            return

        def read() -> bytes:
            self._file = open_book(run, path, self.since)
            return json.dumps([[*draw, tag.hex()] for draw, tag in self._file.draws.items()]).encode()

        told = ranks.shared(ranks.by_first(read) or b"")
        know_draws(run, {(position, number): bytes.fromhex(tag) for position, number, tag in json.loads(told)})
        self._opened = run

    def begin(self, run: bytes, ranks: Ranks) -> None:
        """Open the file of a run that is saved before its first release: a state has to say how far its book had come."""
        if self.path is not None and self.since is None and ranks.is_first:
            self._file = open_book(run, self.path, self.since)

    def sync(self, run: bytes) -> str | None:
        """Have all of it on disk; how far it has come."""
        self.since = sync_book(run) or self.since
        return self.since

    def seen(self, run: bytes) -> BookFile | None:
        """The file, all of it on disk, for who remembers how far it has come; ``None`` where none is written here."""
        self.sync(run)
        if self._file is not None and self.path is not None:  # a copy of the engine may have closed it, and opened it again
            self._file = open_book(run, self.path, self.since)
        return self._file

    def close(self, run: bytes) -> None:
        """Let the file go."""
        self.since = close_book(run) or self.since
        self._opened = self._file = None


# The same accountant on another machine may round otherwise; more than this is another budget.
_SAME_EPSILON = 1 + 1e-6
_RECENT = 16  # batches around the next one, and those drawn last, by which copies are known


class Options(NamedTuple):
    """What a user may say of a run besides model, loss, optimiser and plan; see :class:`lipdp.PrivacyEngine`."""

    seed: int | None
    reproducible: bool
    microbatch_size: int | None
    device: torch.device | str | None
    ema_decay: float | None
    tail_average: float | None
    augmentation: Augmentation | None
    public: bool
    input_shape: tuple[int, ...] | None
    budget: AnyBudget
    book: str | os.PathLike[str] | None

    def check(self) -> None:
        """Refuse what nothing could be made of."""
        size, book = self.microbatch_size, self.book
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigurationError(f"microbatch_size must be a whole number of at least 1, not {size!r}")
        if book is not None and not isinstance(book, str | os.PathLike):
            raise ConfigurationError(f"book is {book!r}: the path of a file in which the run's releases are noted")

    def shared(self) -> list[Any]:
        """What has to be the same on all ranks, of those that the run's key does not depend on."""
        seed = self.seed if self.reproducible else None
        averages = [self.ema_decay, self.tail_average]
        given = [bool(self.public), self.budget is None, self.book is None]
        return [self.reproducible, seed, self.microbatch_size, *averages, *given]


class Run:
    """The parts of one run. The model is analysed, projected and watched from here on; nothing is read of the data.

    Attributes:
        ranks: the processes that train together.
        shards: how the model is divided among them.
        model: the whole model.
        parameters: its trainable parameters, by name.
        input_shape: of one example, as steps take it.
        query: what a step asks of the data, and why its sensitivity is what the plan says.
        mechanism: noise and clipping norms, step by step.
        types: how records are converted.
        settled: fixed layers that have been applied, with the stored rows.
        account: what pays.
        streams: all that is random.
        watch: whether the model is the one that was proved.
        state: what a pass may not change.
        held: the optimiser, of which only the engine lets steps through.
        microbatch_size: rows that go through the model at once.
        data: what the data are known by, until the next release.
        drawn: batches drawn so far.
        used: the number behind the last batch that a step was made with.
        has_own_records: whether a step was made with records that no engine has drawn, which was said then.
        resumed: whether it goes on from a saved state.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Any, optimizer: torch.optim.Optimizer, plan: PrivacyPlan, options: Options
    ) -> None:
        self.ranks = present_ranks()
        with self.ranks.together():
            check_unwrapped(model)
        self.shards = Shards(model)
        with self.ranks.together():  # what one rank refuses, all do
            self.account = RunAccount(open_budget(options.budget) if self.ranks.is_first else None)
            options.check()
            secret = secret_of(options.seed, options.reproducible)
            self.model, self.optimizer, self.plan = self.shards.model, optimizer, plan
            self._prove(loss, options)
        self._draw_key(self.ranks.shared(secret), options)
        self.watch = ModelWatch(self.model, self.loss, lambda: self.streams.words_key, self.query.watched)
        self.project = Projection(self.model, self.watch)
        self.update = Update(self.model, optimizer, self.watch, self.parameters, plan.batch_size)
        self.book = KeptBook(None if options.reproducible else options.book)  # what a seed repeats is no second release
        self.paid, self.public, self.resumed = options.budget is not None, bool(options.public), False
        self.seating = Seating(self._seats)
        self.drawn = self.used = 0
        self._sampled: int | None = None  # records that batches are drawn from
        self._ahead: tuple[bytes, int, torch.Tensor] | None = None
        self.has_own_records = False
        self.clipped_share: float | None = None
        self.data: tuple[str, ...] = ()
        self.held = Held(iter([*self.parameters.values(), *self.shards.parameters.values()]), optimizer)
        self._look_at_values()
        self.watch.remember()

    def _prove(self, loss: Any, options: Options) -> None:
        """All that the plan says of this model and loss, and the model where it computes, inside of its sets."""
        model, plan = self.model, self.plan
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.input_shape = find_input_shape(model) if options.input_shape is None else tuple(options.input_shape)
        check_plan_fits(plan, model)
        refuse_foreign_state(model)
        self.query = query_of(model, loss, plan, self.input_shape)
        self.loss = self.query.loss
        self.mechanism = StepMechanism(plan, self.query)
        self.augmentation = options.augmentation
        self.settled: Settled | None = None
        self.types = Types(model, self.loss)
        self.ledger = Ledger(
            run=plan.run,
            delta=plan.delta,
            planned_epsilon=plan.epsilon,
            accountant=plan.accountant,
            adjacency=plan.adjacency,
        )
        self.check_plan()
        check_optimizer(self.optimizer, self.shards.given)
        if options.device is not None:
            model.to(known_device(options.device))
        self.device = next(iter(self.parameters.values())).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self._seats = usual_seats(plan.batch_size, whole=plan.sampling_rate == 1)
        size, copies = options.microbatch_size, 1 if self.augmentation is None else self.augmentation.copies
        self.asked_rows = None if size is None else min(size, copies * divided(self._seats, max(1, size // copies)))
        self.rows = self.asked_rows
        self.choose_microbatch_size()
        self.query.rehearse(self.microbatch_size)
        if isinstance(self.loss, torch.nn.Module):
            self.loss.to(self.device)
        project_(model)
        self.shards.scatter()
        self.apply_clips()
        self.average = make_average(self.shards.parameters, plan.steps, options.ema_decay, options.tail_average)

    def _draw_key(self, secret: bytes, options: Options) -> None:
        """The run's key, which depends on all of its parts; the same ones on all ranks."""
        about = (self.plan, self.model, self.loss, self.optimizer, self.augmentation)
        if self.ranks.grouped:
            modes = [module.training for module in self.model.modules()]
            given = {"an argument of the engine": options.shared(), "the mode (training or evaluation) of a layer": modes}
            self.ranks.agree_on_run(self.plan, {**parts_of_run(secret, *about), **given}, self.microbatch_size)
        self.streams = Streams(derive_run_key(secret, *about), self.device, private=not options.reproducible)
        self.ledger.furthest = self.streams.furthest

    def open_book(self) -> None:
        """Keep the book on disk from here on, where there is one."""
        self.book.open(self.streams.run, self.ranks)

    def reserve(self) -> None:
        """Pay the budget for all that is planned, once; what is released next is noted as one about these data."""
        self.open_book()
        if not self.streams.steady:
            self.account.begin_anew()
        if self.data and self.ranks.is_first:
            secret = hashlib.sha256(f"{self.streams.key!r}".encode()).hexdigest()
            record_run(self.data, RunRecord(secret, copy.copy(self.ledger), self.account.name))  # this one may become another run's
        self.data = ()
        if self.paid:
            self.ranks.by_first(lambda: self.account.reserve(self.ledger, self.streams.key, self.book.seen(self.streams.run)))

    # ------------------------------------------------------------------ what holds between steps

    def check_plan(self) -> None:
        """Trust nothing in the plan but what follows from the model, the loss and the accountant."""
        plan = self.plan
        if describe_loss(self.loss) != plan.loss:
            raise ConfigurationError(
                f"the plan was made for the loss {plan.loss}, not {describe_loss(self.loss)}. Make a new plan."
            )
        if self.settled is not None:
            self.settled.check()
        self.query.prove()
        self.mechanism.forget()
        for phase in (*plan.phases, plan.phase(self.next_step)):  # the present one last: it is kept
            self.mechanism.at(phase.start)
        spent = run_epsilon(plan.run, plan.delta, plan.accountant, plan.adjacency)
        if not spent <= plan.epsilon * _SAME_EPSILON:
            raise ConfigurationError(
                f"the plan's {plan.steps} steps cost epsilon {upwards(spent, 6)}, not the {downwards(plan.epsilon, 6)} it says. "
                "Make a new plan."
            )

    def prove_again(self) -> None:
        """The model is not the one that was proved: analyse and project it as it is now."""
        self.check_plan()
        project_(self.model)
        self.shards.scatter()
        self.watch.remember()
        self._look_at_values()

    def _look_at_values(self) -> None:
        self.values = [*self.model.parameters(), *self.model.buffers()]  # all that it computes with
        self.state = HeldState(self.model, trained=not self.query.recorded)
        self.on_one_device = all(t.device == self.device for t in self.values)

    @property
    def next_step(self) -> int:
        """The number of the step that comes next; behind the last one, that one's."""
        return min(self.ledger.steps, self.plan.steps - 1)

    @property
    def clipping(self) -> dict[str, float]:
        """The clipping norms that change during the run, as they are now."""
        phase = self.plan.phase(self.next_step)
        return {name: value * phase.clip for name, value in self.mechanism.clips.items()}

    def apply_clips(self) -> None:
        """The layers that clip show the norm of the next step."""
        layers, present = clip_layers(self.model), self.clipping
        for name in present.keys() & layers.keys():
            layers[name].max_norm = present[name]

    @property
    def trained_part(self) -> torch.nn.Module:
        """What steps run: the model, or what is left of it behind the layers that were applied."""
        return self.model if self.settled is None else self.settled.rest

    @property
    def awaits_statistics(self) -> bool:
        """Whether the plan pays for statistics that are still to be released."""
        return any(release.name == STATISTICS for release in self.plan.releases) and STATISTICS not in self.ledger.one_off

    # ------------------------------------------------------------------ how a step is laid out

    def trained(self, settings: StepSettings) -> dict[str, torch.nn.Parameter]:
        """The parameters that a step moves: those of the plan that its phase does not freeze."""
        return {name: p for name, p in self.parameters.items() if name in settings.stds}

    def copies(self, number: int) -> Copies:
        """How the records of a step are augmented."""
        if self.augmentation is None:
            return Copies()
        return Copies(self.augmentation, self.streams.draw(number, "augment"), self.input_shape)

    def seats(self, inputs: Any, number: int) -> torch.Tensor:
        """Where each record of the batch sits: what is computed for it depends on no other record."""
        stored = not isinstance(inputs, torch.Tensor)
        shuffled = stored and all(isinstance(part, Rows) and part.shuffled for part in leaves(inputs))
        return self.seating(rows_of(inputs), self.streams.seats(number), shuffled=shuffled)

    def sample(self, size: int, number: int) -> torch.Tensor:
        """The numbers of the records of batch ``number``, of ``size`` records."""
        draw, ahead = self.streams.sample(number), self._ahead
        self._sampled, self._ahead = size, None
        if ahead is not None and ahead[:2] == (draw.key, size):
            return ahead[2]
        return sample_indices(size, self.plan.sampling_rate, draw, self.plan.sampler)

    def draw_ahead(self, number: int) -> None:
        """Draw seats and sample of the next step, while a device computes this one; the sample only if nobody has drawn it yet."""
        self.seating.draw_ahead(self.streams.seats(number))
        if self._sampled is not None and self.drawn == number < self.plan.steps:
            draw = self.streams.sample(number)
            key = draw.key
            self._ahead = key, self._sampled, sample_indices(self._sampled, self.plan.sampling_rate, draw, self.plan.sampler)

    def copied_sample(self, inputs: Any, targets: torch.Tensor) -> int | None:
        """The number of the batch that these records are a copy of, of those near; ``None`` where they are none."""
        dataset, plan, streams = self.streams.dataset, self.plan, self.streams
        if dataset is None or not len(targets) or not streams.steady:  # what changes at every reading is not read once more
            return None
        end, first = max(self.drawn, streams.batches_end), max(self.ledger.steps, self.used)
        if plan.sampling_rate == 1 and plan.sampling != "truncated_poisson":  # all are alike: it is the next one, drawn or not
            numbers = [first] if first < plan.steps else []
        else:  # of those that are alike, one that no step was made with
            near = {*range(max(0, first - _RECENT), min(end, first + _RECENT)), *range(max(0, end - _RECENT), end)}
            numbers = sorted(near, key=lambda number: (number < first, number))
        drawn = (
            (number, sample_indices(len(dataset), plan.sampling_rate, streams.sample(number), plan.sampler)) for number in numbers
        )
        return copied_sample(inputs, targets, dataset, drawn)

    def choose_microbatch_size(self) -> None:
        """As many rows as were asked for, else as many as the device computes best."""
        query, whole = self.query, self.plan.sampling_rate == 1
        rows = self.rows or even_rows(
            self.plan.batch_size, self.device, query.entries, query.products, whole=whole, ranks=self.ranks.count
        )
        self.microbatch_size = min(rows, query.most_rows)
