"""The whole run in one call."""

from __future__ import annotations

import dataclasses
import secrets
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Subset

from lipdp._checks import instance, positive, whole
from lipdp.data.augment import Augmentation
from lipdp.errors import BudgetError, CheckpointError, ConfigurationError, Interrupted, LipdpError, LipdpWarning, RepeatedStepError
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import STATISTICS
from lipdp.planning.suggest import check_parts, check_scheduler
from lipdp.privacy.budget import AnyBudget
from lipdp.privacy.ledger import Furthest
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, check_finite
from lipdp.training.callbacks import Callback, History, Run
from lipdp.training.checkpoint import book_path, load_checkpoint, locked_checkpoint, previous_path, save_checkpoint
from lipdp.training.distributed import Ranks, check_unwrapped, present_ranks
from lipdp.training.engine import PrivacyEngine
from lipdp.training.evaluation import check_of_targets, evaluate, note_trained_records
from lipdp.training.guards import Interrupts
from lipdp.training.known import Progress, read_ahead
from lipdp.training.preparing import find_standardize
from lipdp.training.shards import Shards, put_aside, remove_shards, save_shards, shards_of_file, take_back
from lipdp.training.state import check_scheduler_state

_TRIED = 2  # records that are evaluated before the first step


def fit(
    model: torch.nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    plan: PrivacyPlan,
    train: Any,
    validation: Any = None,
    callbacks: Iterable[Callback] = (),
    seed: int | None = None,
    device: torch.device | str | None = None,
    *,
    reproducible: bool = False,
    microbatch_size: int | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ema_decay: float | None = None,
    tail_average: float | None = None,
    augmentation: Augmentation | None = None,
    public: bool = False,
    evaluations: int = 10,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: float = 60.0,
    budget: AnyBudget = None,
    input_shape: tuple[int, ...] | None = None,
    settle: bool | Literal["in_place"] = False,
    cache: str | Path | None = None,
    workers: int = 0,
) -> History:
    """Train ``model`` privately, exactly as ``plan`` says.

    Where torch.distributed has a process group (``torchrun``), its ranks train together: each calls this with the same arguments
    and data, the first one writes the checkpoint, pays the budget and calls the callbacks, and all return the same history.

    Args:
        model: the model; trained in place.
        loss: the loss that was planned for.
        optimizer: any torch optimiser over the model's parameters; :func:`lipdp.suggest_optimizer` makes one from the plan.
        plan: from :func:`lipdp.plan`.
        train: a map-style dataset of (input, target) pairs, or of dicts with a column "label" or "labels"; an input is a tensor, or
            a tuple or dict of them (the model's arguments, in order or by name), see :class:`lipdp.data.Columns`. It is sampled by
            real Poisson sampling. Numbers of other types than the model's are converted (float64, pixels as bytes, booleans); token
            ids stay whole numbers.
        validation: a dataset for the metrics in the history, of records that are not in ``train``: the guarantee does not
            protect them.
        callbacks: :class:`~lipdp.training.Callback` objects, e.g. :class:`~lipdp.training.ProgressBar`.
        seed: what a reproducible run is repeated from. Alone it decides nothing: the run's key is the operating system's.
        device: where to compute.
        reproducible: draw everything from ``seed``: the run can be repeated, and is *not private*. See
            :class:`~lipdp.PrivacyEngine`.
        microbatch_size: rows that go through the model at once.
        scheduler: a torch learning-rate scheduler, advanced after every step.
        ema_decay: average the weights; validation and the final model use the average.
        tail_average: average over this last fraction of the steps instead.
        augmentation: train on the mean over each example's augmented copies, see :mod:`lipdp.data`.
        public: declare the training data public; the history then shows the exact share of clipped examples.
        evaluations: about how many rows the history gets, evenly spread, the last one at the end.
        checkpoint: file to save the run in (atomically): at the start, at every evaluation, as time passes, and when SIGINT or
            SIGTERM ends the run. It is locked: one run writes it at a time. Beside it lies the run's book (``FILE.book``), in which
            every step is noted before it is released; both belong together.
        resume: continue from ``checkpoint`` if it exists. Without it an existing file is an error, so nothing is lost.
        checkpoint_every: save the run every so many seconds, after a whole step (less often where saving takes long).
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file. The whole run is reserved there
            before its first release, once, however often it is resumed; a run that ends early gives back the rest. Without one, a
            second run over the same data in a process warns.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        settle: apply the layers in front of the first trained one once, not in every step: the same run, faster, for the memory
            that their outputs take. "in_place" puts those over the inputs of ``train`` where they fit. Fixed copies of the
            augmentation go through them too. See :mod:`lipdp.training.front`.
        cache: with ``settle``, a folder that keeps those outputs from one run to the next, as far as they rest on no released
            statistics. The files hold private data in another form: keep them as safe as the data.
        workers: processes that read the batches of the next steps while one is computed, for datasets that read files
            (:class:`lipdp.data.Stored`, Arrow); on a GPU through pinned memory. It changes no result.

    Returns:
        The history; ``history.epsilon`` is what was really spent.
    """
    check_parts(model, plan, optimizer)
    check_scheduler(scheduler, optimizer)
    if resume and checkpoint is None:
        raise ConfigurationError("resume=True continues from a file: give checkpoint=FILE, too")
    ranks, hooks = present_ranks(), _checked(callbacks)
    hooks = hooks if ranks.is_first else []
    with ranks.together():
        check_unwrapped(model)
    asked = Shards(model).model  # a whole one: what it computes is asked of it before an engine is there
    with ranks.together():
        labels = check_of_targets(asked, loss, train)
        check_finite(train, types=Types(asked, loss), progress=_told_to(hooks), check_targets=labels)
        if validation is not None:
            check_dataset(validation)
            if not (public or reproducible):
                note_trained_records(train, validation)
        positive("checkpoint_every", checkpoint_every)
        if cache is not None and not settle:
            raise ConfigurationError("cache keeps the outputs of the fixed layers, and nothing is stored of them: pass settle=True")
        whole("workers", workers, least=0)
    del asked
    given = [evaluations, bool(resume), str(settle), checkpoint is None, validation is None, scheduler is None, cache is None]
    ranks.agree({"an argument of fit": given})  # ranks that write, evaluate or store at other times would wait for each other
    with _checkpoint_of_first(ranks, None if checkpoint is None else Path(checkpoint), resume) as file:
        engine = PrivacyEngine(
            model,
            loss,
            optimizer,
            plan,
            seed=seed,
            reproducible=reproducible,
            microbatch_size=microbatch_size,
            device=device,
            ema_decay=ema_decay,
            tail_average=tail_average,
            augmentation=augmentation,
            public=public,
            input_shape=input_shape,
            budget=budget,
            book=None if checkpoint is None else book_path(checkpoint),
        )
        try:
            saved = _Saved(file, engine, scheduler, checkpoint_every, ranks)
            history = _run(engine, saved, train, validation, hooks, max(1, evaluations), _Storing(settle, cache), workers)
        except BaseException:
            with suppress(LipdpError):  # then all of it stays reserved
                engine.close(keep=file is not None and file.exists())  # what is on disk can go on, and needs it for that
            raise
        engine.close()
        return history


def _checked(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks, each of them one."""
    advice = "objects of lipdp.training.Callback or of a class made from it, in a list: callbacks=[lipdp.training.ProgressBar()]"
    instance("callbacks", callbacks, Iterable, advice)
    hooks = list(callbacks)
    for hook in hooks:
        instance("a callback", hook, Callback, advice)
    return hooks


@contextmanager
def _checkpoint_of_first(ranks: Ranks, file: Path | None, resume: bool) -> Iterator[Path | None]:
    """The file, locked by the first rank, which alone reads and writes it; ``None`` on the others."""
    with ExitStack() as stack:

        def lock() -> None:
            if file is not None:
                stack.enter_context(locked_checkpoint(file))
                if file.exists() and not resume:
                    raise CheckpointError(
                        f"the checkpoint '{file}' exists. Pass resume=True (--resume) to continue from it, or choose another file."
                    )
                if not file.exists():
                    _remove_book(file)  # of a run whose checkpoint somebody removed

        ranks.by_first(lock)
        yield file if ranks.is_first else None


def _remove_book(file: Path) -> None:
    try:
        book_path(file).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"the book of an earlier run can't be removed: {error}. Remove it, or choose another checkpoint file."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Storing:
    """Whether the outputs of the fixed layers are stored, and the folder that keeps them."""

    settle: bool | Literal["in_place"]
    cache: str | Path | None


class _Saved:
    """The checkpoint of a run, if it has one."""

    def __init__(self, file: Path | None, engine: PrivacyEngine, scheduler: Any, every: float, ranks: Ranks) -> None:
        self.file, self.scheduler, self.ranks, self.is_new = file, scheduler, ranks, False
        self.history = History(delta=engine.plan.delta)
        self._engine, self._every = engine, every
        self._last, self._cost = time.monotonic(), 0.0
        if ranks.most([file is not None and file.exists()])[0]:
            self.history = _restore(file, engine, scheduler, ranks)
        self._before, self._started = self.history.seconds, time.monotonic()
        self.history.follow(engine.ledger)

    @property
    def is_due(self) -> bool:
        """Whether it is time to save: saving takes a twentieth of the time at most. The first rank decides, where all have to."""
        due = self.file is not None and time.monotonic() - self._last >= max(self._every, 20 * self._cost)
        return bool(self.ranks.most([due])[0])

    @property
    def is_missing(self) -> bool:
        """Whether there should be a file, and is none yet."""
        missing = self.file is not None and not self.file.exists()
        return bool(self.ranks.most([missing])[0])

    def add(self, row: dict[str, float]) -> None:
        """One more row of the history."""
        self.history.add(row)
        self.history.seconds = self._before + time.monotonic() - self._started

    def reserve(self) -> None:
        """Pay for the run; where that is refused, nothing is left of one that has only just begun."""
        try:
            self._engine.reserve()
        except BudgetError:
            if self.is_new and self.file is not None:
                self.file.unlink(missing_ok=True)
                _remove_book(self.file)
                remove_shards(self.file, ())
            raise

    def save(self) -> None:
        """Write it. All ranks have to call it; where it can't be written, all are told."""
        started = time.monotonic()
        self.history.seconds = self._before + started - self._started
        if self._engine.divided:
            self._save_divided()
        else:
            with self.ranks.together():
                self._save_whole()
        self._last = time.monotonic()
        self._cost = self._last - started

    def _save_whole(self) -> None:
        if self.file is not None:
            save_checkpoint(_state(self._engine, self.history, self.scheduler), self.file)
            remove_shards(self.file, {_folder_of(previous_path(self.file))})  # of a run that was divided before

    def _save_divided(self) -> None:
        """Every rank writes its tensors into a folder beside the file, which names it once it is complete; all have to call it."""
        told = self.ranks.shared(b"" if self.file is None else f"{self.file.absolute()}\n{secrets.token_hex(8)}".encode()).decode()
        if not told:
            return
        path, _, mark = told.partition("\n")
        file = Path(path)
        state, tensors = put_aside(_state(self._engine, self.history, self.scheduler))
        folder = file.with_name(f"{file.name}.shards-{mark}")
        save_shards(tensors, folder)

        def name_it() -> None:
            folder.chmod(0o700)
            before = _folder_of(file)
            save_checkpoint({**state, "shards": folder.name}, file)
            remove_shards(file, {folder.name, before})

        self.ranks.by_first(name_it)


def _run(
    engine: PrivacyEngine,
    saved: _Saved,
    train: Any,
    validation: Any,
    hooks: list[Callback],
    evaluations: int,
    storing: _Storing,
    workers: int,
) -> History:
    plan, history = engine.plan, saved.history
    pays_for_statistics = any(release.name == STATISTICS for release in plan.releases)
    if pays_for_statistics:
        find_standardize(engine.model)

    if validation is not None and not pays_for_statistics and engine.steps < plan.steps:
        # What can't be evaluated is found out before anything is released, not after the first steps.
        few = Subset(validation, range(min(_TRIED, len(validation))))
        evaluate(engine.model, engine.loss, few, device=engine.device)
    engine.bind(train, _told_to(hooks))
    history.private = engine.private
    if saved.is_missing:
        # With the run's key on disk, whatever is done again after an interruption is the same release, paid for once.
        saved.save()
        saved.is_new = True
    if engine.steps < plan.steps:
        saved.reserve()
    if storing.settle and engine.has_front:
        train = engine.settle(train, in_place=storing.settle == "in_place", cache=storing.cache)
    if pays_for_statistics and STATISTICS not in engine.ledger.one_off:
        engine.release_statistics(train)
        saved.save()
    if storing.settle and (engine.has_front or engine.trained_part is engine.model):
        train = engine.settle(train, in_place=storing.settle == "in_place")
    if storing.settle and plan.sampling_rate == 1:
        train = engine.shuffle()
    train = engine.placed(train)
    if saved.ranks.grouped and engine.steps == 0:
        engine.fix_microbatches()
        saved.save()
    validation = None if validation is None else engine.through_front(validation)
    run = Run(engine, history)
    every = max(1, round(plan.steps / evaluations))

    def evaluated() -> None:
        with saved.ranks.together():
            row = _row(engine, validation)
            saved.add(row)
            for hook in hooks:
                hook.on_evaluation(run, row)
        saved.save()

    try:
        for hook in hooks:
            hook.on_start(run)
        with Interrupts() as interrupts:
            for _ in _steps(engine, train, workers):
                with saved.ranks.together():
                    if saved.scheduler is not None:
                        saved.scheduler.step()
                    for hook in hooks:
                        hook.on_step(run)
                received, stop = saved.ranks.most([interrupts.received or 0, run.stop])
                run.stop = bool(stop)
                if received:
                    saved.save()
                    raise Interrupted(_how_to_go_on(engine, saved.file), received)
                # The last row stands alone at the end; one shortly before it would only cost time.
                due = engine.steps % every == 0 and plan.steps - engine.steps >= every // 2
                if due or run.stop or engine.steps == plan.steps:
                    evaluated()
                elif saved.is_due:
                    saved.save()
                if run.stop:
                    break
        if not run.stop and history.last.get("step") != engine.steps:  # the last ones were given up
            evaluated()
    finally:
        for hook in hooks:
            hook.on_end(run)
    history.epsilon = engine.epsilon
    engine.use_average()
    return history


def _steps(engine: PrivacyEngine, train: Any, workers: int) -> Iterator[None]:
    """The steps that are left. Those that a killed process has made, and that can't be repeated here, are given up."""
    while True:
        first, ahead = engine.steps, deque[torch.Tensor]()
        try:
            for batch in read_ahead(train, _noted(engine.samples(train), ahead), workers, engine.device):
                first = engine.steps
                engine.step(*batch, sample=ahead.popleft())
                yield
            return
        except RepeatedStepError as error:
            after = engine.give_up()
            if after == first:
                raise
            warnings.warn(
                f"steps {first} to {after - 1} were made before this run was interrupted, and are given up: they are paid for, and "
                f"can't be repeated here to the last bit. The model is that of {after - first} steps less. ({error})",
                LipdpWarning,
                stacklevel=4,
            )


def _noted(samples: Iterator[torch.Tensor], ahead: deque[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The samples, put beside until their batches, which are read ahead, are there."""
    for chosen in samples:
        ahead.append(chosen)
        yield chosen


def _told_to(hooks: list[Callback]) -> Progress:
    """Passes on how many records were read."""

    def read(done: int, total: int) -> None:
        for hook in hooks:
            hook.on_reading(done, total)

    return read


def _how_to_go_on(engine: PrivacyEngine, file: Path | None) -> str:
    done = f"the run was interrupted after step {engine.steps} of {engine.plan.steps}"
    if file is None:
        return f"{done}; nothing was saved. With checkpoint=FILE it could go on."
    return f"{done} and saved in '{file}': the same call with checkpoint='{file}', resume=True continues it."


def _row(engine: PrivacyEngine, validation: Any) -> dict[str, float]:
    row = {"step": float(engine.steps), "epoch": engine.steps * engine.plan.sampling_rate, "epsilon": engine.epsilon}
    clipping = engine.clipping
    row |= {f"clip {name}" if len(clipping) > 1 else "clip": value for name, value in clipping.items()}
    if (share := engine.clipped_fraction) is not None:
        row["clipped"] = share
    if validation is not None:
        with engine.averaged():
            metrics = evaluate(engine.trained_part, engine.loss, validation, device=engine.device)
        row.update({f"validation_{name}": value for name, value in metrics.items()})
    return row


def _state(engine: PrivacyEngine, history: History, scheduler: Any) -> dict[str, Any]:
    return {
        "engine": engine.state_dict(),
        "history": history.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def _derive_costs(history: History, engine: PrivacyEngine) -> None:
    """What each row's steps cost, by the accountant, at least: a file is not believed that says less."""
    plan, steps = engine.plan, history.metrics.get("step", [])
    if any(step != int(step) or not 0 < step <= engine.steps for step in steps) or steps != sorted(set(steps)):
        raise CheckpointError(f"the history's steps {steps[:3]}… do not lead to the {engine.steps} steps that were taken")
    history.delta, history.epsilon = plan.delta, engine.epsilon
    if steps:
        ledgers = [dataclasses.replace(engine.ledger, steps=int(step), furthest=Furthest()) for step in steps]
        # A row of a run that was rewound or resumed says more than its steps cost. Less is not believed.
        said = history.metrics.get("epsilon", [0.0] * len(steps))
        costs = [max(own.epsilon, min(value, plan.epsilon)) for own, value in zip(ledgers, said, strict=True)]
        history.metrics |= {"epoch": [step * plan.sampling_rate for step in steps], "epsilon": costs}


def _folder_of(file: Path) -> str:
    """The folder that this checkpoint names, if any: it stays as long as the file does."""
    try:
        return str(load_checkpoint(file).get("shards", "")) if any(file.parent.glob("*.shards-*")) else ""
    except CheckpointError:
        return ""


def _read(file: Path | None, engine: PrivacyEngine, ranks: Ranks) -> dict[str, Any]:
    """The state in the file, whichever number of ranks has written it; of a divided engine, this rank's part."""

    def read() -> dict[str, Any]:
        state = load_checkpoint(file or "", engine.device)
        folder = shards_of_file(state, file) if file is not None else None
        if folder is None:
            return state
        if engine.divided:
            return {**state, "shards": str(folder.absolute())}
        kept = {name: value for name, value in state.items() if name != "shards"}
        return {**kept, "engine": take_back(kept.get("engine", {}), folder, None, together=False)}

    state: dict[str, Any] = ranks.state_of_first(read)
    if "shards" not in state:
        return state
    folder = Path(state.pop("shards"))
    return {**state, "engine": take_back(state.get("engine", {}), folder, engine.places(), together=True)}


def _restore(file: Path | None, engine: PrivacyEngine, scheduler: Any, ranks: Ranks) -> History:
    state = _read(file, engine, ranks)
    if set(state) != {"engine", "history", "scheduler"}:
        raise CheckpointError(f"'{file}' is a checkpoint, but not one of lipdp.fit")
    if (state["scheduler"] is None) != (scheduler is None):
        raise CheckpointError(f"'{file}' was made {'without' if scheduler else 'with'} a learning-rate scheduler; pass the same")
    if scheduler is not None:
        check_scheduler_state(scheduler, state["scheduler"])
    history = History.from_state(state["history"])
    engine.load_state_dict(state["engine"])
    _derive_costs(history, engine)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    return history
