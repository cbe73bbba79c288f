"""Recipes: names, changes, preparation without data, and whole runs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from lipdp import data, recipes
from lipdp.data.published import DIGITS, MNIST
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.training import Callback

FOLDER = os.environ.get("LIPDP_DATA")
needs_mnist = pytest.mark.skipif(
    FOLDER is None or not (Path(FOLDER) / "mnist").is_dir(), reason="LIPDP_DATA names no folder that holds MNIST"
)
INFOS = {"digits": DIGITS.info, "mnist": MNIST.info}


def test_names_and_short_names():
    assert {"digits", "mnist", "digits-mlp", "mnist-mlp", "mnist-lenet"} <= set(recipes.names())
    assert len(set(recipes.names())) == len(recipes.names())
    for name in recipes.names():
        recipe = recipes.get(name)
        assert recipe.dataset in data.names()
        assert recipe.name in recipes.names()
        assert recipe.provenance
    assert recipes.get("digits").dataset == "digits"
    assert recipes.get("mnist").dataset == "mnist"


@pytest.mark.parametrize("name", ["", "nonsense", "MNIST2"])
def test_unknown_names(name):
    with pytest.raises(ConfigurationError, match="digits"):
        recipes.get(name)


def test_changes():
    recipe = recipes.get("digits")
    changed = recipe.but(epochs=3, learning_rate=0.5)
    assert (changed.epochs, changed.learning_rate, changed.model) == (3, 0.5, recipe.model)
    assert recipe.epochs != 3
    with pytest.raises(ConfigurationError, match="learning_rat"):
        recipe.but(learning_rat=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 3


@pytest.mark.parametrize("name", ["digits-mlp", "mnist-mlp", "mnist-lenet"])
def test_preparing_reads_no_data(name, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise AssertionError("data were read")

    monkeypatch.setattr(data, "load", fail)
    monkeypatch.setenv("LIPDP_DATA", str(tmp_path))
    recipe = recipes.get(name)
    ready = recipes.prepare(recipe.but(epochs=1), INFOS[recipe.dataset], noise_multiplier=2.0)
    assert ready.plan.dataset_size == INFOS[recipe.dataset].train_size
    assert ready.plan.batch_size == recipe.batch_size
    assert ready.plan.delta < 1 / ready.plan.dataset_size
    assert not list(tmp_path.iterdir())


def test_preparing_with_a_seed_repeats_and_leaves_the_random_state_alone():
    recipe = recipes.get("digits")
    state = torch.get_rng_state()
    same = [recipes.prepare(recipe, DIGITS.info, noise_multiplier=2.0, seed=seed) for seed in (1, 1, 2, None, None)]
    assert torch.equal(state, torch.get_rng_state())
    first = [next(ready.model.parameters()) for ready in same]
    assert torch.equal(first[0], first[1])
    assert not any(torch.equal(first[i], first[j]) for i, j in ((0, 2), (3, 4), (0, 3)))


def test_a_budget_and_a_multiplier_give_the_length():
    recipe = recipes.get("digits")
    ready = recipes.prepare(recipe, DIGITS.info, epsilon=1.0, noise_multiplier=3.0)
    assert ready.plan.noise_multiplier == 3.0
    assert ready.plan.epsilon <= 1.0
    assert ready.plan.epochs != recipe.epochs


def test_the_learning_rate_is_in_units_of_the_sensitivity():
    recipe = recipes.get("digits")
    for clip in (0.1, 1.0):
        ready = recipes.prepare(recipe.but(options={"hidden": (8,), "clip": clip}), DIGITS.info, noise_multiplier=2.0)
        assert ready.optimizer.param_groups[0]["lr"] == pytest.approx(recipe.learning_rate / ready.plan.sensitivity)


# Settings of its own: the catalogue's are tuned from time to time.
QUICK = recipes.Recipe(
    "quick", "digits", "mlp", {"hidden": (16,), "clip": 0.5}, batch_size=256, epochs=2.0, delta=1e-4, schedule="cosine"
)


def test_digits_end_to_end_and_reproducible():
    recipe = QUICK.but(ema_decay=0.8)
    runs = [recipes.train(recipe, epsilon=3.0, seed=seed, reproducible=True) for seed in (5, 5, 6)]
    assert runs[0].accuracy == runs[1].accuracy
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(runs[0].model.parameters()), next(runs[2].model.parameters()))
    summary = runs[0].summary()
    assert {"accuracy", "epsilon", "delta", "steps", "seconds", "method"} <= set(summary)
    assert summary["epsilon"] == runs[0].plan.epsilon <= 3.0
    assert summary["steps"] == runs[0].plan.steps == 12
    assert summary["method"] == "clipless"
    assert 0.3 < summary["accuracy"] <= 1.0
    assert runs[0].history.epsilon == runs[0].plan.epsilon


def test_the_short_name_trains_too():
    run = recipes.train(recipes.get("digits").but(epochs=2.0), epsilon=3.0, seed=1, reproducible=True, evaluations=1)
    assert run.epsilon == run.plan.epsilon <= 3.0
    assert run.recipe == "digits-mlp"


def test_a_validation_part_of_the_training_set():
    run = recipes.train(QUICK, epsilon=3.0, seed=1, reproducible=True, validation_fraction=0.2, evaluations=2)
    assert run.plan.dataset_size == 1438 - 288
    assert run.history.last["validation_accuracy"] == pytest.approx(run.accuracy)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        run.stop = run.engine.steps == self.step


def test_a_run_that_was_stopped_reports_what_it_did_and_goes_on(tmp_path):
    recipe, file = QUICK, tmp_path / "run"
    part = recipes.train(recipe, epsilon=3.0, seed=2, reproducible=True, checkpoint=file, callbacks=[StopAt(4)])
    assert part.steps == 4
    assert part.epsilon < part.plan.epsilon
    with pytest.raises(CheckpointError):
        recipes.train(recipe, epsilon=3.0, seed=2, reproducible=True, checkpoint=file)
    rest = recipes.train(recipe, epsilon=3.0, seed=2, reproducible=True, checkpoint=file, resume=True)
    whole = recipes.train(recipe, epsilon=3.0, seed=2, reproducible=True)
    assert (rest.accuracy, rest.epsilon, rest.steps) == (whole.accuracy, whole.epsilon, whole.steps)


@needs_mnist
def test_mnist_in_two_epochs():
    run = recipes.train(recipes.get("mnist-mlp").but(epochs=2.0), epsilon=3.0, seed=0, reproducible=True, evaluations=1)
    assert run.accuracy > 0.7
    assert run.epsilon == run.plan.epsilon <= 3.0


@needs_mnist
def test_mnist_convolutions_in_a_few_steps():
    """A smaller network and batch than the recipe's own: it is the way that is tested."""
    options = {"channels": (4, 4), "kernel_size": 3, "hidden": None, "clip": 0.5}
    recipe = recipes.Recipe("quick", "mnist", "lenet", options, batch_size=300, epochs=0.1)
    run = recipes.train(recipe, epsilon=8.0, seed=0, reproducible=True, evaluations=1)
    assert run.accuracy > 0.2
    assert run.steps == 20
