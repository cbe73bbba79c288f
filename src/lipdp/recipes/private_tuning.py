"""Choosing settings inside the privacy budget: the best of a random number of runs, see :mod:`lipdp.privacy.tuning`.

What the reported (ε, δ) covers: every record of the training set, those trained on and those held out to judge alike, and all that
comes back: the chosen settings, the model, its noised score. What it does not cover, and must not be published: the number of runs,
the other runs, an ordinary sweep over the same data, and how long it took.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.errors import BudgetError, ConfigurationError, UnsupportedError
from lipdp.privacy import Approximate, add_noise, derive_key, derive_seed, fresh_seed, generator
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.tuning import Repetitions, affordable_run, record_coins, score_multiplier
from lipdp.recipes.recipe import Recipe
from lipdp.recipes.run import Prepared, fit_prepared, prepare
from lipdp.recipes.spaces import RandomSuggester
from lipdp.recipes.sweep import Sweep
from lipdp.training import evaluate
from lipdp.training.account import several_runs

# What decides how much a run releases: the same for all runs, so that one curve holds for each of them.
_FIXED = frozenset(
    ("batch_size", "epochs", "method", "statistics_budget", "adaptive", "clip_schedule", "noise_schedule", "freeze", "delta")
)


@dataclass(frozen=True)
class PrivateFinding:
    """The best run; all of it may be published.

    Attributes:
        recipe: with the chosen settings.
        settings: those, by name.
        score: correct held-out records, noised, over how many are expected to be held out: about its accuracy.
        epsilon: of the whole choice.
        delta: δ.
        run_epsilon: what one run alone would cost, by Rényi divergences as the whole.
        repetitions: the distribution of the number of runs.
        score_noise: standard deviation of the noise in ``score``.
        model: trained.
        private: whether all that is secret came from the operating system. With a seed for the sweep the choice can be repeated,
            and whoever knows the seed can subtract the noise of the scores: it is *not private*, whatever ``epsilon`` says.
    """

    recipe: Recipe
    settings: dict[str, Any]
    score: float
    epsilon: float
    delta: float
    run_epsilon: float
    repetitions: Repetitions
    score_noise: float
    model: torch.nn.Module = field(repr=False)
    private: bool


def tune_privately(
    sweep: Sweep,
    repetitions: Repetitions,
    *,
    budget: AnyBudget = None,
) -> PrivateFinding:
    """Train K times with random settings of the space, K drawn from ``repetitions``, and return the best.

    Batch size, epochs and all else that decides how much a run releases stay as in the recipe. ``sweep.epsilon`` is the budget of
    the whole; the noise of each run follows from it. It is not resumed: a second call is a second release.

    Args:
        sweep: recipe, space, budget, held-out share, device. Its storage, sampler and pruning are not used: a run may not depend
            on the results of others.
        repetitions: the distribution of the number of runs.
        budget: the account of the training set, charged for the whole before the first run: see :class:`lipdp.privacy.Budget`.
    """
    recipe = _counted(sweep.recipe)
    space = sweep.chosen_space.without(_FIXED)
    space.fitting(recipe)
    key = fresh_seed() if sweep.seed is None else sweep.seed
    learn, held_out, info = _parts(sweep, recipe, derive_key(f"{key}".encode(), "coins"))
    # How many there are on either side depends on the records; what is expected does not.
    scored = max(1, round(sweep.validation_fraction * info.train_size))
    trained = info.train_size - scored

    def ready(settings: dict[str, Any], epsilon: float, seed: int | None = None) -> Prepared:
        return prepare(recipe.changed(settings), info, epsilon=epsilon, dataset_size=trained, accountant="rdp", seed=seed)

    one, total = affordable_run(lambda e: ready({}, e).plan.run, repetitions, epsilon=sweep.epsilon, delta=recipe.delta)
    reference = ready({}, one).plan.run
    noise = score_multiplier(reference) / scored
    best: PrivateFinding | None = None
    charge(budget, Approximate(total, recipe.delta, "add_remove"), f"private tuning of {recipe.name}")
    for number in range(repetitions.draw(generator(key, 0, "repetitions"))):
        settings = space.settings(RandomSuggester(derive_seed(key, number, "settings")), recipe)
        trial = ready(settings, one, derive_seed(key, number, "weights"))
        if trial.plan.run != reference:
            raise BudgetError(f"the settings {settings} change what a run releases: its curve is not the one accounted for")
        figure = _accuracy(trial, learn, held_out, sweep.device, derive_seed(key, number, "run"))
        # The count of correct records is a whole number, so it lies on the noise's grid.
        correct = {"score": torch.tensor(float(round(figure * len(held_out))), dtype=torch.float64)}
        noised = add_noise(correct, {"score": noise * scored}, generator(key, number, "score"))
        score = float(noised["score"]) / scored
        if best is None or score > best.score:
            figures = trial.recipe, settings, score, total, recipe.delta, one, repetitions, noise, trial.model
            best = PrivateFinding(*figures, private=sweep.seed is None)
    if best is None:
        raise BudgetError("the Poisson draw gave no run at all: that is this release. Trying again would spend the budget again.")
    return best


def _counted(recipe: Recipe) -> Recipe:
    if recipe.metric != "accuracy" or recipe.views is not None:
        raise UnsupportedError(
            f"private tuning judges runs by a count of correct records, to which one record adds at most 1; {recipe.name} is "
            f"judged by its {recipe.metric}{'' if recipe.views is None else ' over copies'}. Use a recipe with metric='accuracy' "
            "and test_copies='one'."
        )
    return recipe


def _parts(sweep: Sweep, recipe: Recipe, key: bytes) -> tuple[TensorDataset, TensorDataset, data.DatasetInfo]:
    train, _, info = data.load(recipe.dataset, root=sweep.root)
    coins = record_coins(train.tensors, sweep.validation_fraction, key)
    learn, held_out = (TensorDataset(*(tensor[side] for tensor in train.tensors)) for side in (~coins, coins))
    if len(held_out) == 0 or len(learn) == 0:
        raise ConfigurationError(f"a share of {sweep.validation_fraction} of {len(train)} records leaves one side empty")
    return learn, held_out, info


@several_runs()  # they are accounted for together
def _accuracy(ready: Prepared, learn: TensorDataset, held_out: TensorDataset, device: str | None, seed: int) -> float:
    with warnings.catch_warnings():
        # The plan is for as many records as are expected, and the learning rate is one of those that are tried.
        warnings.filterwarnings("ignore", message="the dataset has")
        fit_prepared(ready, learn, seed=seed, device=device, evaluations=1)
    return evaluate(ready.model, ready.loss, held_out, device=device)["accuracy"]
