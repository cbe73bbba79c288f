"""The machinery of a sweep: Optuna's studies, the trials, the processes that work on them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipdp.errors import ConfigurationError, LipdpError
from lipdp.recipes.features import FeatureRecipe
from lipdp.recipes.pareto import append_history
from lipdp.recipes.running import AnyRecipe, metric, score, train
from lipdp.recipes.spaces import changed
from lipdp.training import Callback
from lipdp.training.callbacks import Run
from lipdp.training.repeats import several_runs

if TYPE_CHECKING:
    from lipdp.recipes.sweep import Sweep

__all__ = ["Progress", "best_trial", "claim", "finished", "open_study", "work", "work_together"]

# At three rows of a run's history, at nine …: the rungs where Hyperband lets the better third go on.
_REDUCTION = 3

Progress = Callable[[int, float | None], None]
"""Told how many trials a study has, and the best score so far."""


class _Report(Callback):
    """Tells the trial how the run is doing; stops the run where the trial is not worth its time."""

    def __init__(self, trial: Any, figure: str) -> None:
        self._trial, self._figure = trial, figure
        self._rows = 0
        self.stopped = False

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """Rungs are counted in rows of the history."""
        self._rows += 1
        self._trial.report(row[self._figure], self._rows)
        if run.engine.steps < run.engine.plan.steps and self._trial.should_prune():
            self.stopped = run.stop = True


@several_runs()  # the command says that a search is not paid for
def _objective(sweep: Sweep, trial: Any) -> float:
    import optuna

    recipe = changed(sweep.recipe, sweep.chosen_space.settings(trial, sweep.recipe))
    report = _Report(trial, f"validation_{metric(recipe)}")
    result = train(
        recipe,
        epsilon=sweep.epsilon,
        seed=None if sweep.seed is None else sweep.seed + trial.number,
        reproducible=sweep.seed is not None,
        device=sweep.device,
        root=sweep.root,
        validation_fraction=sweep.validation_fraction,
        callbacks=(report,) if sweep.prune and not isinstance(recipe, FeatureRecipe) else (),
        evaluations=sweep.evaluations,
    )
    if sweep.histories is not None:
        certified = _certified(sweep, recipe, result.model)
        append_history(sweep.histories, recipe, result, evaluated_on="validation", certified=certified)
    if report.stopped:
        raise optuna.TrialPruned
    return score(recipe, result)


def _certified(sweep: Sweep, recipe: AnyRecipe, model: Any) -> dict[float, float]:
    if not sweep.radii:
        return {}
    from lipdp import data
    from lipdp.certify import certified_accuracy, certify

    held_out = data.split(data.load(recipe.dataset, root=sweep.root)[0], sweep.validation_fraction)[1]
    inputs, labels = held_out.tensors
    place = next(p.device for p in model.parameters())
    return certified_accuracy(certify(model, inputs.to(place), labels.to(place)), sweep.radii)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigurationError("sweeps need Optuna: pip install 'lipdp[sweep]'") from None
    # A refused trial is counted and its reason told; Optuna would print the traceback of each.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_study(sweep: Sweep, worker: int = 0) -> Any:
    """The sweep's study in its storage, made where there is none."""
    optuna = _optuna()
    seed = None if sweep.seed is None else sweep.seed + 1000 * worker
    parallel = sweep.storage is not None
    sampler = (
        optuna.samplers.TPESampler(seed=seed, constant_liar=parallel)
        if sweep.sampler == "tpe"
        else optuna.samplers.RandomSampler(seed=seed)
    )
    pruner = optuna.pruners.HyperbandPruner(1, sweep.evaluations, _REDUCTION) if sweep.prune else optuna.pruners.NopPruner()
    return optuna.create_study(
        storage=_storage(optuna, sweep.storage),
        study_name=sweep.study,
        sampler=sampler,
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )


def _storage(optuna: Any, where: str | None) -> Any:
    if where is None:
        return None
    if "://" in where:
        return where
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(where))


def claim(study: Any, sweep: Sweep) -> None:
    """Only searches for the same thing are continued."""
    known = study.user_attrs.get("identity")
    if known is None:
        study.set_user_attr("identity", sweep.identity)
    elif known != sweep.identity:
        raise ConfigurationError(
            f"the storage '{sweep.storage}' holds a search named {sweep.study!r} with other settings (recipe, space, validation "
            "part or evaluations): their results can't be compared. Choose another --storage."
        )


def finished(study: Any) -> list[Any]:
    """Trials that came to an end: complete, pruned or refused."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def best_trial(study: Any) -> Any | None:
    """The complete trial of the highest score."""
    done = [trial for trial in finished(study) if trial.state.name == "COMPLETE"]
    return max(done, key=lambda trial: trial.value, default=None)


def work(sweep: Sweep, trials: int | None, end: float | None, worker: int, progress: Progress | None, study: Any) -> None:
    """Trial after trial, until there are enough or the time is up."""

    def over(study: Any, trial: Any) -> None:
        if trial.state.name == "FAIL":
            study.set_user_attr("failure", trial.user_attrs.get("failure", "unknown"))
        done = finished(study)
        if progress is not None:
            best = best_trial(study)
            progress(len(done), None if best is None else best.value)
        if (trials is not None and len(done) >= trials) or (end is not None and time.time() >= end):
            study.stop()

    def objective(trial: Any) -> float:
        try:
            return _objective(sweep, trial)
        except LipdpError as error:
            trial.set_user_attr("failure", f"{type(error).__name__}: {error}")
            raise

    if trials is None or len(finished(study)) < trials:
        study.optimize(objective, n_trials=None, callbacks=[over], catch=(LipdpError,))


def _worker(sweep: Sweep, trials: int | None, end: float | None, worker: int) -> None:
    import torch

    torch.set_num_threads(1)
    work(sweep, trials, end, worker, None, open_study(sweep, worker))


def work_together(sweep: Sweep, trials: int | None, end: float | None, workers: int, progress: Progress | None) -> None:
    """The same in several processes. Trials under way when there are enough are finished, so there may be a few more."""
    # Spawned, not forked: a forked process can't use CUDA.
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_worker, args=(sweep, trials, end, number)) for number in range(1, workers + 1)]
    for process in processes:
        process.start()
    study = open_study(sweep)
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(0.5)
            if progress is not None:
                best = best_trial(study)
                progress(len(finished(study)), None if best is None else best.value)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
    broken = [process.exitcode for process in processes if process.exitcode]
    if broken:
        raise RuntimeError(f"{len(broken)} of {workers} workers ended with an error; what they did is in the storage")
