"""Sweeps: spaces, the search over a known landscape, resuming, pruning, workers, and private tuning."""

import dataclasses
import functools
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from lipdp.data import info
from lipdp.errors import BudgetError, ConfigurationError, UnsupportedError
from lipdp.privacy.tuning import Repetitions, tuning_epsilon
from lipdp.recipes import Recipe, Result, get, prepare, private_tuning, train
from lipdp.recipes import sweep as sweeps
from lipdp.recipes.pareto import read_dots
from lipdp.recipes.private_tuning import tune_privately
from lipdp.recipes.spaces import Choice, RandomSuggester, Range, Space, default_space, get_space, space_names
from lipdp.recipes.sweep import Sweep, final_test, search
from lipdp.training import History

optuna = pytest.importorskip("optuna")

RECIPE = get("digits-mlp").but(epochs=1, batch_size=512)
SPACE = Space("test", "here", (Range("learning_rate", 0.01, 100.0), Choice("options.hidden", ((16,), (32, 16)), model="mlp")))


def landscape(recipe: Any) -> float:
    """Best at a learning rate of 3, better with the wider network."""
    return 0.9 - 0.1 * abs(math.log10(recipe.learning_rate / 3)) - (0.0 if recipe.options["hidden"] == (32, 16) else 0.2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs that take no time: the landscape in the place of training. Returns what each was asked for."""
    asked: list[dict[str, Any]] = []

    def run(recipe: Any, **arguments: Any) -> Result:
        asked.append({"recipe": recipe, **arguments})
        if recipe.learning_rate > 50:
            raise BudgetError("too steep")
        history = History(1e-5, metrics={"step": [1.0], "epsilon": [1.0], "validation_accuracy": [landscape(recipe)]})
        return Result(recipe.name, landscape(recipe), 3.0, 1e-5, 1, 0.1, "clipless", None, history, torch.nn.Identity(), None)  # type: ignore[arg-type]

    monkeypatch.setattr(sweeps, "train", run)
    return asked


def test_the_search_finds_the_hill_and_never_asks_for_the_test_set(quick: list[dict[str, Any]], tmp_path: Path) -> None:
    sweep = Sweep(RECIPE, 3.0, SPACE, histories=str(tmp_path / "h.jsonl"), seed=4)
    progress: list[int] = []
    found = search(sweep, trials=40, progress=lambda done, best: progress.append(done))
    assert found.score > 0.88
    assert found.settings["options.hidden"] == (32, 16) == found.recipe.options["hidden"]
    assert found.recipe.options["clip"] == RECIPE.options["clip"]
    assert landscape(found.recipe) == found.score
    assert found.complete + found.failed == 40 == progress[-1]
    assert found.failed == 0 or (found.failure or "").startswith("BudgetError: too steep")
    assert {call["validation_fraction"] for call in quick} == {0.2}
    assert len(read_dots([tmp_path / "h.jsonl"])) == found.complete


def test_a_search_continues_where_its_storage_ends(quick: list[dict[str, Any]], tmp_path: Path) -> None:
    sweep = Sweep(RECIPE, 3.0, SPACE, storage=str(tmp_path / "new" / "journal"), seed=1)
    assert search(sweep, trials=4).complete <= 4
    before = len(quick)
    found = search(sweep, trials=4)  # there are enough
    assert len(quick) == before == 4
    again = search(sweep, trials=6)
    assert len(quick) == 6
    assert again.score >= found.score
    with pytest.raises(ConfigurationError, match="other settings"):
        search(dataclasses.replace(sweep, validation_fraction=0.3), trials=7)


def test_time_ends_a_search(quick: list[dict[str, Any]]) -> None:
    gentle = Space("gentle", "here", (Range("learning_rate", 0.1, 10.0, scale="linear"), *SPACE.parameters[1:]))
    assert search(Sweep(RECIPE, 3.0, gentle, sampler="random"), minutes=1e-6).complete == 1
    assert len(quick) == 1


def test_when_nothing_works_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: Any, **arguments: Any) -> Result:
        raise BudgetError("the purse is empty")

    monkeypatch.setattr(sweeps, "train", refuse)
    with pytest.raises(ConfigurationError, match=r"none of the 3 trials .*the purse is empty"):
        search(Sweep(RECIPE, 3.0, SPACE), trials=3)


def test_runs_that_fall_behind_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run against a trial that gives up at once."""

    class Impatient:
        number = 0
        reported: list[tuple[float, int]]

        def __init__(self) -> None:
            self.reported = []

        def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
            return low

        def suggest_categorical(self, name: str, choices: Any) -> Any:
            return choices[0]

        def report(self, value: float, step: int) -> None:
            self.reported.append((value, step))

        def should_prune(self) -> bool:
            return True

    monkeypatch.setattr(sweeps, "train", functools.partial(train, accountant="rdp"))
    trial = Impatient()
    sweep = Sweep(RECIPE.but(epochs=4), 3.0, SPACE, seed=0)
    with pytest.raises(optuna.TrialPruned):
        sweeps._objective(sweep, trial)
    assert len(trial.reported) == 1
    assert trial.reported[0][1] == 1


def test_two_workers_and_the_final_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(RECIPE, 3.0, SPACE, storage=str(tmp_path / "j"), histories=str(tmp_path / "h"), evaluations=1, radii=(0.01,))
    forked = multiprocessing.get_context("fork")  # quicker to start
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": forked}.__getitem__)
    found = search(sweep, trials=2, workers=2)
    assert 2 <= found.complete <= 3
    dots = read_dots([tmp_path / "h"])
    assert max(d.score for d in dots if d.radius == 0) == pytest.approx(found.score)
    assert {d.radius for d in dots} == {0.0, 0.01}
    monkeypatch.setattr(sweeps, "train", functools.partial(train, accountant="rdp"))
    figures = final_test(sweep, found.recipe, (1, 2))
    assert len(figures.scores) == 2
    assert figures.mean == pytest.approx(sum(figures.scores) / 2)
    assert figures.std == pytest.approx(abs(figures.scores[0] - figures.scores[1]) / math.sqrt(2))
    assert figures.epsilon <= 3.0


@pytest.mark.parametrize("name", space_names())
def test_spaces_give_recipes(name: str) -> None:
    space = get_space(name)
    recipe = get("mnist-dpsgd") if name in ("clipping", "paper-dpsgd") else get("mnist-mlp")
    if name.startswith(("tabular", "paper-tabular")):
        recipe = get("adbench-yeast" if name.endswith("small") else "adbench-magic")
    if name == "features":
        recipe = Recipe("f", "digits", "scattering-linear", {"scales": ((1, 2),)}, front="stored")
    settings = space.settings(RandomSuggester(3), recipe)
    assert settings.keys() == {p.name for p in space.fitting(recipe)}
    made = recipe.changed(settings)
    for key, value in settings.items():
        assert (made.options[key.removeprefix("options.")] if key.startswith("options.") else getattr(made, key)) == value
    for parameter in space.fitting(recipe):
        if isinstance(parameter, Range):
            drawn = [parameter.suggest(RandomSuggester(seed)) for seed in range(50)]
            assert parameter.low <= min(drawn) <= max(drawn) <= parameter.high
            if parameter.scale == "log":  # as many below the geometric mean as above it
                middle = math.sqrt(parameter.low * parameter.high)
                assert 10 <= sum(value < middle for value in drawn) <= 40


def test_default_spaces() -> None:
    assert default_space(get("mnist-mlp")).name == "clipless"
    assert default_space(get("mnist-dpsgd")).name == "clipping"
    assert "max_grad_norm" not in {p.name for p in get_space("clipping").fitting(get("mnist-mlp"))}
    assert {p.name for p in default_space(get("mnist-lenet")).fitting(get("mnist-lenet"))} >= {"options.channels", "options.clip"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"sampler": "grid"}, "sampler"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"space": Space("empty", "", (Range("options.none", 1.0, 2.0),))}, "no setting"),
    ],
)
def test_refusals(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Sweep(**{"recipe": RECIPE, "epsilon": 3.0, "space": SPACE, **change})


def test_refused_searches() -> None:
    sweep = Sweep(RECIPE, 3.0, SPACE)
    for arguments in ({}, {"trials": 0}, {"minutes": -1.0}, {"trials": 3, "workers": 2}):
        with pytest.raises(ConfigurationError):
            search(sweep, **arguments)
    with pytest.raises(ConfigurationError, match="paper-mnist"):
        get_space("moon")


# --- private tuning ---------------------------------------------------------------------------------------------------


def test_private_tuning_stays_within_its_budget() -> None:
    recipe = get("digits-mlp").but(epochs=3, batch_size=256)
    repetitions = Repetitions(2.0, 1.0)
    both = Space("both", "", (*SPACE.parameters, Choice("batch_size", (64,)), Choice("epochs", (50,))))
    found = tune_privately(Sweep(recipe, 4.0, both, seed=2), repetitions)
    assert found.settings.keys() == {"learning_rate", "options.hidden"}  # what changes a run's cost is not searched
    assert (found.recipe.batch_size, found.recipe.epochs) == (256, 3)
    assert found.run_epsilon < found.epsilon <= 4.0
    # The reported figure is that of the plan each run followed.
    size = 1438 - round(1438 * 0.2)
    planned = prepare(recipe, info("digits"), epsilon=found.run_epsilon, dataset_size=size, accountant="rdp").plan.run
    assert tuning_epsilon(planned, repetitions, recipe.delta) == pytest.approx(found.epsilon, rel=0.02)
    assert 0.2 < found.score < 1.1
    assert 0 < found.score_noise < 0.05
    assert found.private is False, "who knows the seed can subtract the noise"
    assert tune_privately(Sweep(recipe, 4.0, both), Repetitions(1.0001, 1.0)).private is True


def test_private_tuning_refuses_what_it_can_not_account_for() -> None:
    for change in ({"metric": "auroc"}, {"test_copies": "flip"}):
        with pytest.raises(UnsupportedError, match="count of correct"):
            tune_privately(Sweep(RECIPE.but(**change), 3.0, SPACE), Repetitions(2.0))
    with pytest.raises(ConfigurationError, match="no setting"):
        tune_privately(Sweep(RECIPE, 3.0, Space("sizes", "", (Choice("batch_size", (64,)),))), Repetitions(2.0))


def test_no_run_at_all_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repetitions, "draw", lambda self, generator: 0)
    monkeypatch.setattr(private_tuning, "affordable_run", lambda *arguments, **more: (2.0, 3.0))
    with pytest.raises(BudgetError, match="spend the budget again"):
        tune_privately(Sweep(RECIPE, 3.0, SPACE), Repetitions(2.0, math.inf))
