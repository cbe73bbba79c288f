"""Search for a recipe's best settings: Optuna proposes them, a held-out part of the *training* set judges them.

Nothing looks at the test set until :func:`final_test` is called, once, with the settings that were chosen. The search is not
private towards the records it is judged on, and its many runs each spend their ε: see :mod:`lipdp.recipes.private_tuning` for a
search that is paid for.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

from lipdp.errors import ConfigurationError
from lipdp.recipes.running import AnyRecipe, metric, score, train
from lipdp.recipes.spaces import Space, changed, default_space
from lipdp.recipes.studies import Progress, best_trial, claim, finished, open_study, work, work_together
from lipdp.training.repeats import several_runs

__all__ = ["FinalFigures", "Finding", "Progress", "Sweep", "final_test", "search"]


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

    recipe: AnyRecipe
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
        if self.sampler not in ("tpe", "random"):
            raise ConfigurationError(f"sampler must be 'tpe' or 'random', not {self.sampler!r}")
        if not self.epsilon > 0:
            raise ConfigurationError(f"epsilon must be positive, not {self.epsilon!r}")
        self.chosen_space.fitting(self.recipe)

    @property
    def chosen_space(self) -> Space:
        """The space, or the default one."""
        return self.space if self.space is not None else default_space(self.recipe)

    @property
    def study(self) -> str:
        """The name in the storage: one file can hold many searches."""
        return f"{self.recipe.name}/{self.chosen_space.name}/epsilon={self.epsilon:g}"

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

    recipe: AnyRecipe
    settings: dict[str, Any]
    score: float
    metric: str
    complete: int
    pruned: int
    failed: int
    failure: str | None
    seconds: float


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
    study = open_study(sweep)
    claim(study, sweep)
    # Wall-clock time, as it is the same in all processes.
    end = None if minutes is None else time.time() + 60 * minutes
    if workers == 1:
        work(sweep, trials, end, 0, progress, study)
    else:
        work_together(sweep, trials, end, workers, progress)
    return _finding(sweep, study, time.monotonic() - started)


@several_runs()  # the figures say that each run has its own epsilon
def final_test(sweep: Sweep, recipe: AnyRecipe, seeds: tuple[int, ...] | int = 3) -> FinalFigures:
    """Train with the chosen settings on the whole training set, and look at the test set: once, when all is chosen.

    Seeds that are given are those of the initial weights; with a number of them these are drawn too. Noise is always secret.
    """
    drawn: tuple[int | None, ...] = (None,) * seeds if isinstance(seeds, int) else seeds
    if len(drawn) < 1:
        raise ConfigurationError("testing needs at least one seed; three or more show the spread")
    results = [train(recipe, epsilon=sweep.epsilon, seed=s, device=sweep.device, root=sweep.root, evaluations=1) for s in drawn]
    return FinalFigures(
        tuple(score(recipe, result) for result in results), max(result.epsilon for result in results), results[0].delta
    )


def _finding(sweep: Sweep, study: Any, seconds: float) -> Finding:
    done = finished(study)
    states = [trial.state.name for trial in done]
    best, failure = best_trial(study), study.user_attrs.get("failure")
    if best is None:
        why = f": {failure}" if failure else ""
        raise ConfigurationError(f"none of the {len(done)} trials of {sweep.study} came to an end{why}")
    # Choices are stored by their texts.
    parameters = sweep.chosen_space.fitting(sweep.recipe)
    settings = {p.name: p.restore(best.params[p.name]) for p in parameters if p.name in best.params}
    return Finding(
        recipe=changed(sweep.recipe, settings),
        settings=settings,
        score=float(best.value),
        metric=metric(sweep.recipe),
        complete=states.count("COMPLETE"),
        pruned=states.count("PRUNED"),
        failed=states.count("FAIL"),
        failure=failure,
        seconds=seconds,
    )
