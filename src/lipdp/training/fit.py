"""The whole run in one call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from lipdp._dtypes import Types
from lipdp.data.augment import Augmentation
from lipdp.errors import CheckpointError
from lipdp.training.batches import check_dataset, check_finite, gather_lazily
from lipdp.training.callbacks import Callback, Run
from lipdp.training.checkpoint import load_checkpoint, save_checkpoint
from lipdp.training.engine import PrivacyEngine
from lipdp.training.evaluation import evaluate
from lipdp.training.history import History
from lipdp.training.optimizer_state import check_scheduler_state
from lipdp.training.plan import PrivacyPlan
from lipdp.training.planning import STATISTICS
from lipdp.training.statistics import find_standardize

__all__ = ["fit"]


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
    microbatch_size: int | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ema_decay: float | None = None,
    tail_average: float | None = None,
    augmentation: Augmentation | None = None,
    public: bool = False,
    evaluations: int = 10,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    input_shape: tuple[int, ...] | None = None,
    settle: bool | Literal["in_place"] = False,
) -> History:
    """Train ``model`` privately, exactly as ``plan`` says.

    Args:
        model: the model; trained in place.
        loss: the loss that was planned for.
        optimizer: any torch optimiser over the model's parameters.
        plan: from :func:`lipdp.plan`.
        train: a map-style dataset of (input, target) pairs. It is sampled by real Poisson sampling. Numbers of other types than
            the model's are converted (float64, pixels as bytes, booleans); token ids stay whole numbers.
        validation: a dataset for the metrics in the history. Its records are not protected by the guarantee.
        callbacks: :class:`~lipdp.training.Callback` objects, e.g. :class:`~lipdp.training.ProgressBar`.
        seed: for repeatable runs; a secret. See :class:`~lipdp.PrivacyEngine`.
        device: where to compute.
        microbatch_size: rows that go through the model at once.
        scheduler: a torch learning-rate scheduler, advanced after every step.
        ema_decay: average the weights; validation and the final model use the average.
        tail_average: average over this last fraction of the steps instead.
        augmentation: train on the mean over each example's augmented copies, see :mod:`lipdp.data`.
        public: declare the training data public; the history then shows the exact share of clipped examples.
        evaluations: about how many rows the history gets, evenly spread, the last one at the end.
        checkpoint: file to save the run in at the start and at every evaluation (atomically).
        resume: continue from ``checkpoint`` if it exists. Without it an existing file is an error, so nothing is lost.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        settle: apply the layers in front of the first trained one once, not in every step: the same run, faster, for the memory
            that their outputs take. "in_place" puts those over the inputs of ``train`` where they fit. See
            :meth:`lipdp.PrivacyEngine.settle`.

    Returns:
        The history; ``history.epsilon`` is what was really spent.
    """
    check_finite(train, types=Types(model, loss))
    if validation is not None:
        check_dataset(validation)
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists() and not resume:
        raise CheckpointError(f"the checkpoint '{file}' exists. Pass resume=True to continue from it, or choose another file.")
    engine = PrivacyEngine(
        model,
        loss,
        optimizer,
        plan,
        seed=seed,
        microbatch_size=microbatch_size,
        device=device,
        ema_decay=ema_decay,
        tail_average=tail_average,
        augmentation=augmentation,
        public=public,
        input_shape=input_shape,
    )
    pays_for_statistics = any(release.name == STATISTICS for release in plan.releases)
    if pays_for_statistics:
        find_standardize(model)
    history = History(delta=plan.delta)
    if file is not None and file.exists():
        history = _restore(file, engine, scheduler)
    elif file is not None:
        # With the run's key on disk, whatever is done again after an interruption is the same release.
        save_checkpoint(_state(engine, history, scheduler), file)
    if pays_for_statistics and STATISTICS not in engine.ledger.one_off:
        engine.release_statistics(train)
        if file is not None:
            save_checkpoint(_state(engine, history, scheduler), file)
    if settle:
        train = engine.settle(train, in_place=settle == "in_place")
    run = Run(engine, history)
    hooks = list(callbacks)
    before, started = history.seconds, time.monotonic()
    every = max(1, round(plan.steps / max(1, evaluations)))
    try:
        for hook in hooks:
            hook.on_start(run)
        for chosen in engine.samples(train):
            engine.step(*gather_lazily(train, chosen))
            if scheduler is not None:
                scheduler.step()
            for hook in hooks:
                hook.on_step(run)
            # The last row stands alone at the end; one shortly before it would only cost time.
            due = engine.steps % every == 0 and plan.steps - engine.steps >= every // 2
            if due or run.stop or engine.steps == plan.steps:
                history.epsilon = engine.epsilon
                history.seconds = before + time.monotonic() - started
                row = _row(engine, validation)
                history.add(row)
                for hook in hooks:
                    hook.on_evaluation(run, row)
                if file is not None:
                    save_checkpoint(_state(engine, history, scheduler), file)
            if run.stop:
                break
    finally:
        for hook in hooks:
            hook.on_end(run)
    history.epsilon = engine.epsilon
    engine.use_average()
    return history


def _row(engine: PrivacyEngine, validation: Any) -> dict[str, float]:
    row = {"step": float(engine.steps), "epoch": engine.steps * engine.plan.sampling_rate, "epsilon": engine.epsilon}
    clipping = engine.clipping
    row |= {f"clip {name}" if len(clipping) > 1 else "clip": value for name, value in clipping.items()}
    if (share := engine.clipped_fraction) is not None:
        row["clipped"] = share
    if validation is not None:
        with engine.averaged() as model:
            metrics = evaluate(model, engine.loss, validation, device=engine.device)
        row.update({f"validation_{name}": value for name, value in metrics.items()})
    return row


def _state(engine: PrivacyEngine, history: History, scheduler: Any) -> dict[str, Any]:
    return {
        "engine": engine.state_dict(),
        "history": history.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def _derive_costs(history: History, engine: PrivacyEngine) -> None:
    """What each row's steps cost, by the accountant: a file is not asked."""
    plan, steps = engine.plan, history.metrics.get("step", [])
    if any(step != int(step) or not 0 < step <= engine.steps for step in steps) or steps != sorted(set(steps)):
        raise CheckpointError(f"the history's steps {steps[:3]}… do not lead to the {engine.steps} steps that were taken")
    history.delta, history.epsilon = plan.delta, engine.epsilon
    if steps:
        ledgers = [dataclasses.replace(engine.ledger, releases=int(step)) for step in steps]
        history.metrics |= {"epoch": [step * plan.sampling_rate for step in steps], "epsilon": [own.epsilon for own in ledgers]}


def _restore(file: Path, engine: PrivacyEngine, scheduler: Any) -> History:
    state = load_checkpoint(file, engine.device)
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
