"""Search for a recipe's best settings: Optuna proposes them, a held-out part of the *training* set judges them.

Nothing looks at the test set until :func:`final_test` is called, once, with the settings that were chosen. The search is not
private towards the records it is judged on, and its many runs each spend their ε: see :mod:`lipdp.recipes.private_tuning` for a
search that is paid for.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lipdp import data
from lipdp._checks import one_of, positive
from lipdp._texts import brief
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.recipes.pareto import append_history
from lipdp.recipes.recipe import Metric, Recipe
from lipdp.recipes.run import train
from lipdp.recipes.spaces import Space, default_space
from lipdp.training import Callback
from lipdp.training.account import several_runs
from lipdp.training.callbacks import Run

Progress = Callable[[int, float | None], None]
"""Told how many trials a study has, and the best score so far."""

# At three rows of a run's history, at nine …: the rungs where Hyperband lets the better third go on.
_REDUCTION = 3


@dataclass(frozen=True)
class Sweep:
    """What is searched, for what, and where it is written down.

    Attributes:
        recipe: where to start from; what the space does not name stays as it is.
        epsilon: ε of every run.
        space: of settings; ``None`` takes :func:`~lipdp.recipes.spaces.default_space`.
        storage: a file (Optuna's journal; several processes, or machines that share the file system, can work on it at once), an
            RDB url, or ``None`` for memory only. A search goes on where its storage ends.
        histories: a file that gets a line of JSON for each run, for :mod:`lipdp.recipes.pareto`; ``None`` for none.
        validation_fraction: share of the training set that judges.
        sampler: "tpe", or "random".
        prune: stop runs early that fall behind (Hyperband on the history's rows).
        evaluations: rows of each history.
        radii: certified accuracies at these radii are added to the histories.
        seed: of the proposals and the runs, for tests; the runs are then reproducible, not private.
        device: where to compute.
        root: of the datasets.
    """

    recipe: Recipe
    epsilon: float
    space: Space | None = None
    storage: str | None = None
    histories: str | None = None
    validation_fraction: float = 0.2
    sampler: Literal["tpe", "random"] = "tpe"
    prune: bool = True
    evaluations: int = 9
    radii: tuple[float, ...] = ()
    seed: int | None = None
    device: str | None = None
    root: str | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        if not 0 < self.validation_fraction < 1:
            raise ConfigurationError(f"validation_fraction must lie between 0 and 1, not {self.validation_fraction!r}; try 0.2")
        one_of("sampler", self.sampler, ("tpe", "random"))
        positive("epsilon", self.epsilon)
        self.chosen_space.fitting(self.recipe)

    @property
    def chosen_space(self) -> Space:
        """The space, or the default one."""
        return self.space if self.space is not None else default_space(self.recipe)

    @property
    def study(self) -> str:
        """The name in the storage: one file can hold many searches."""
        return f"{self.recipe.name}/{self.chosen_space.name}/epsilon={brief(self.epsilon)}"

    @property
    def identity(self) -> str:
        """Everything that has to be the same for results to be compared."""
        parts = {
            "recipe": dataclasses.asdict(self.recipe),
            "epsilon": self.epsilon,
            "space": {"name": self.chosen_space.name, "parameters": self.chosen_space.fitting(self.recipe)},
            "validation_fraction": self.validation_fraction,
            "evaluations": self.evaluations,
        }
        return json.dumps(parts, sort_keys=True, default=str)


@dataclass(frozen=True)
class Finding:
    """What a search found.

    Attributes:
        recipe: with the best settings.
        settings: those, by name.
        score: of the best run, on the held-out part: as the best of many it is optimistic.
        metric: what the score is.
        complete: runs that went to their end.
        pruned: runs that were stopped early.
        failed: runs that were refused (a batch larger than the dataset, say), with the first reason.
        failure: that reason.
        seconds: this call took.
    """

    recipe: Recipe
    settings: dict[str, Any]
    score: float
    metric: Metric
    complete: int
    pruned: int
    failed: int
    failure: str | None
    seconds: float

    def to_recipe(self, sweep: Sweep, name: str) -> Recipe:
        """What was found as a recipe of its own, for the sweep's ε, which says where its settings come from."""
        trials = self.complete + self.pruned
        provenance = (
            f"best of {trials} trials of lipdp sweep {sweep.recipe.name} (space {sweep.chosen_space.name}, {sweep.sampler}, "
            f"epsilon={brief(sweep.epsilon)}) on a share of {sweep.validation_fraction:g} of the training set, held out: "
            f"{self.metric} {100 * self.score:.2f} % there"
        )
        return self.recipe.but(name=name, epsilon=sweep.epsilon, provenance=provenance)


@dataclass(frozen=True)
class FinalFigures:
    """The chosen settings on the test set, one run for each seed."""

    scores: tuple[float, ...]
    epsilon: float
    delta: float

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.scores)

    @property
    def std(self) -> float:
        """Sample standard deviation over the seeds."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0


def search(
    sweep: Sweep,
    *,
    trials: int | None = None,
    minutes: float | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Finding:
    """Run the search until the study holds this many trials, or this much time has passed.

    Args:
        sweep: what to search.
        trials: stop when the study has so many, those of earlier calls included.
        minutes: stop after so long; runs that are under way are finished.
        workers: processes. More than one needs a storage.
        progress: told after each trial how many the study has, and the best score so far.
    """
    if trials is None and minutes is None:
        raise ConfigurationError("say when the search ends: give trials=, minutes=, or both")
    if (trials is not None and trials < 1) or (minutes is not None and not minutes > 0) or workers < 1:
        raise ConfigurationError(f"trials={trials}, minutes={minutes} and workers={workers} must be positive")
    if workers > 1 and sweep.storage is None:
        raise ConfigurationError("several workers meet in a storage: give a file, or an RDB url")
    started = time.monotonic()
    study = _open_study(sweep)
    _claim(study, sweep)
    # Wall-clock time, as it is the same in all processes.
    end = None if minutes is None else time.time() + 60 * minutes
    if workers == 1:
        _work(sweep, trials, end, 0, progress, study)
    else:
        _work_together(sweep, trials, end, workers, progress)
    return _finding(sweep, study, time.monotonic() - started)


@several_runs()  # the figures say that each run has its own epsilon
def final_test(sweep: Sweep, recipe: Recipe, seeds: tuple[int, ...] | int = 3) -> FinalFigures:
    """Train with the chosen settings on the whole training set, and look at the test set: once, when all is chosen.

    Seeds that are given are those of the initial weights; with a number of them these are drawn too. Noise is always secret.
    """
    drawn: tuple[int | None, ...] = (None,) * seeds if isinstance(seeds, int) else seeds
    if len(drawn) < 1:
        raise ConfigurationError("testing needs at least one seed; three or more show the spread")
    results = [train(recipe, epsilon=sweep.epsilon, seed=s, device=sweep.device, root=sweep.root, evaluations=1) for s in drawn]
    return FinalFigures(tuple(result.score for result in results), max(result.epsilon for result in results), results[0].delta)


def _finding(sweep: Sweep, study: Any, seconds: float) -> Finding:
    done = _finished(study)
    states = [trial.state.name for trial in done]
    best, failure = _best_trial(study), study.user_attrs.get("failure")
    if best is None:
        why = f": {failure}" if failure else ""
        raise ConfigurationError(f"none of the {len(done)} trials of {sweep.study} came to an end{why}")
    # Choices are stored by their texts.
    parameters = sweep.chosen_space.fitting(sweep.recipe)
    settings = {p.name: p.restore(best.params[p.name]) for p in parameters if p.name in best.params}
    return Finding(
        recipe=sweep.recipe.changed(settings),
        settings=settings,
        score=float(best.value),
        metric=sweep.recipe.metric,
        complete=states.count("COMPLETE"),
        pruned=states.count("PRUNED"),
        failed=states.count("FAIL"),
        failure=failure,
        seconds=seconds,
    )


# ------------------------------------------------------------------ Optuna's studies, the trials, the processes that work on them


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

    recipe = sweep.recipe.changed(sweep.chosen_space.settings(trial, sweep.recipe))
    report = _Report(trial, f"validation_{recipe.metric}")
    result = train(
        recipe,
        epsilon=sweep.epsilon,
        seed=None if sweep.seed is None else sweep.seed + trial.number,
        reproducible=sweep.seed is not None,
        device=sweep.device,
        root=sweep.root,
        validation_fraction=sweep.validation_fraction,
        callbacks=(report,) if sweep.prune else (),
        evaluations=sweep.evaluations,
    )
    if sweep.histories is not None:
        certified = _certified(sweep, recipe, result.model)
        append_history(sweep.histories, recipe, result, evaluated_on="validation", certified=certified)
    if report.stopped:
        raise optuna.TrialPruned
    return result.score


def _certified(sweep: Sweep, recipe: Recipe, model: Any) -> dict[float, float]:
    if not sweep.radii:
        return {}
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


def _open_study(sweep: Sweep, worker: int = 0) -> Any:
    """The sweep's study in its storage, made where there is none."""
    optuna = _optuna()
    seed = None if sweep.seed is None else sweep.seed + 1000 * worker
    sampler = optuna.samplers.RandomSampler(seed=seed)
    if sweep.sampler == "tpe":
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=sweep.storage is not None)
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


def _claim(study: Any, sweep: Sweep) -> None:
    """Only searches for the same thing are continued."""
    known = study.user_attrs.get("identity")
    if known is None:
        study.set_user_attr("identity", sweep.identity)
    elif known != sweep.identity:
        raise ConfigurationError(
            f"the storage '{sweep.storage}' holds a search named {sweep.study!r} with other settings (recipe, space, validation "
            "part or evaluations): their results can't be compared. Choose another --storage."
        )


def _finished(study: Any) -> list[Any]:
    """Trials that came to an end: complete, pruned or refused."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def _best_trial(study: Any) -> Any | None:
    """The complete trial of the highest score."""
    done = [trial for trial in _finished(study) if trial.state.name == "COMPLETE"]
    return max(done, key=lambda trial: trial.value, default=None)


def _work(sweep: Sweep, trials: int | None, end: float | None, worker: int, progress: Progress | None, study: Any) -> None:
    """Trial after trial, until there are enough or the time is up."""

    def over(study: Any, trial: Any) -> None:
        if trial.state.name == "FAIL":
            study.set_user_attr("failure", trial.user_attrs.get("failure", "unknown"))
        done = _finished(study)
        if progress is not None:
            best = _best_trial(study)
            progress(len(done), None if best is None else best.value)
        if (trials is not None and len(done) >= trials) or (end is not None and time.time() >= end):
            study.stop()

    def objective(trial: Any) -> float:
        try:
            return _objective(sweep, trial)
        except LipdpError as error:
            trial.set_user_attr("failure", f"{type(error).__name__}: {error}")
            raise

    if trials is None or len(_finished(study)) < trials:
        study.optimize(objective, n_trials=None, callbacks=[over], catch=(LipdpError,))


def _worker(sweep: Sweep, trials: int | None, end: float | None, worker: int) -> None:
    torch.set_num_threads(1)
    _work(sweep, trials, end, worker, None, _open_study(sweep, worker))


def _work_together(sweep: Sweep, trials: int | None, end: float | None, workers: int, progress: Progress | None) -> None:
    """The same in several processes. Trials under way when there are enough are finished, so there may be a few more."""
    # Spawned, not forked: a forked process can't use CUDA.
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_worker, args=(sweep, trials, end, number)) for number in range(1, workers + 1)]
    for process in processes:
        process.start()
    study = _open_study(sweep)
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(0.5)
            if progress is not None:
                best = _best_trial(study)
                progress(len(_finished(study)), None if best is None else best.value)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
    broken = [process.exitcode for process in processes if process.exitcode]
    if broken:
        raise RuntimeError(f"{len(broken)} of {workers} workers ended with an error; what they did is in the storage")
