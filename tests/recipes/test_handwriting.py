"""The recipes for handwritten digits: found by name, whole batches, proved bounds, and a run on small digits."""

from __future__ import annotations

import pytest

from lipdp import data, recipes
from lipdp.errors import ConfigurationError
from lipdp.losses import Squares
from lipdp.recipes.catalog import best_recipe
from lipdp.recipes.features import prepare_head, train_on_features
from lipdp.recipes.handwriting import HANDWRITING, handwriting_recipe


def test_found_by_name_and_budget() -> None:
    for (dataset, epsilon), recipe in HANDWRITING.items():
        assert recipe.name == f"{dataset}-straight-eps{epsilon:g}"
        assert recipes.get(recipe.name) is recipe
        assert recipes.get(dataset, epsilon) is recipe
        assert recipe.batch_size == data.info(dataset).train_size
        assert isinstance(recipe.make_loss(), Squares)
        assert recipe.provenance
    assert best_recipe("mnist", 0.2) is HANDWRITING["mnist", 1.0]
    assert handwriting_recipe("mnist", 20.0) is HANDWRITING["mnist", 8.0]
    with pytest.raises(ConfigurationError, match="no recipe"):
        handwriting_recipe("cifar10", 1.0)


def test_its_sensitivity_is_the_clip() -> None:
    """Nothing is measured on data: the plan follows from the layers."""
    recipe = HANDWRITING["mnist", 3.0]
    ready = prepare_head(recipe, data.info("mnist"), epsilon=3.0, accountant="rdp", seed=0)
    assert list(ready.plan.sensitivities.values()) == pytest.approx([recipe.options["clip"]])
    assert [release.name for release in ready.plan.releases] == ["statistics"]
    assert ready.plan.steps == recipe.steps


def test_a_run_on_small_digits() -> None:
    """The same layers on 8 × 8 images; so few of them need a larger budget."""
    recipe = HANDWRITING["mnist", 8.0].but(dataset="digits", batch_size=1438, steps=60, delta=1e-4, learning_rate=2.0)
    result = train_on_features(recipe, epsilon=20.0, seed=0, reproducible=True, accountant="rdp")
    assert result.accuracy > 0.93
    assert result.epsilon <= 20
