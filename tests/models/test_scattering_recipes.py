"""Feature recipes: from the dataset to the accuracy, through plan, engine and fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lipdp import models
from lipdp.errors import ConfigurationError
from lipdp.features.front import split_front
from lipdp.recipes.features import FeatureRecipe, head_optimizer, plan_head, train_on_features

SMALL: dict[str, Any] = {"scales": ((1, 2),), "order": 1}
TINY = FeatureRecipe("tiny", "digits", "scattering-linear", SMALL, batch_size=256, steps=40, delta=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shifts": ((0, 0), (1, 0)), "test_copies": "all"},
        {"shifts": ((0, 0), (1, 0)), "flip": True, "test_copies": "flip"},
        {"options": {**SMALL, "statistics": "private", "weights": (1, 2, 1, 1)}, "statistics_budget": 0.1},
        {"options": {**SMALL, "compress": "log", "shifts": ((0, 0), (0, 1)), "whiten": 0.3}},
        {"options": {"scales": ((1, 2), (2, 2)), "compress": "root", "whiten": 0.1, "corner": 0.5, "flip": True}},
        {"options": {"scales": ((2, 2), (1, 2)), "statistics": "private", "weights": (1, 1, 2, 1)}, "statistics_budget": 0.1},
        {"model": "scattering-mlp", "options": {**SMALL, "hidden": (16,)}, "temperature": 8.0, "learning_rate": 4.0},
        {"model": "scattering-mlp", "options": {**SMALL, "hidden": (16,), "normalise": True}, "learning_rate": 4.0},
    ],
    ids=lambda c: "-".join(c) or "linear",
)
def test_a_run(changes: dict[str, Any]) -> None:
    result = train_on_features(TINY.but(**changes), epsilon=8.0, seed=0, reproducible=True, accountant="rdp")
    assert result.accuracy > 0.7
    assert result.epsilon <= 8
    assert result.steps == 40
    assert result.method == "clipless"
    assert result.plan.dataset_size == 1438
    assert bool(result.plan.releases) == ("statistics_budget" in changes)


def test_runs_repeat_and_the_cache_changes_nothing(tmp_path: Path) -> None:
    first, again = (
        train_on_features(TINY, epsilon=3.0, seed=5, reproducible=True, accountant="rdp", cache=tmp_path) for _ in range(2)
    )
    other = train_on_features(TINY, epsilon=3.0, seed=6, reproducible=True, accountant="rdp")
    weights = [[p.detach() for p in r.model.parameters()][-1] for r in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert len(list(tmp_path.iterdir())) == 2  # training and test set


def test_features_in_a_store_serve_many_runs() -> None:
    """A run alone may write over its features, one of many must not; both are the same run."""
    changes = {"options": {**SMALL, "statistics": "private"}, "statistics_budget": 0.1, "steps": 10}
    alone = train_on_features(TINY.but(**changes), epsilon=3.0, seed=5, reproducible=True, accountant="rdp")
    store: dict[str, Any] = {}
    for _ in range(2):
        shared = train_on_features(TINY.but(**changes), epsilon=3.0, seed=5, reproducible=True, accountant="rdp", store=store)
        assert len(store) == 1
        for mine, theirs in zip(alone.model.parameters(), shared.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_part_of_the_training_set_is_held_out() -> None:
    result = train_on_features(
        TINY.but(steps=2), epsilon=3.0, seed=0, reproducible=True, accountant="rdp", validation_fraction=0.25
    )
    assert result.plan.dataset_size == 1078


def test_rates_are_in_units_of_sensitivities() -> None:
    model = models.create("scattering-mlp", input_shape=(1, 8, 8), classes=10, hidden=(4,), clip=0.5, hidden_clip=0.1, **SMALL)
    assert isinstance(model, torch.nn.Sequential)
    head = split_front(model)[1]
    recipe = TINY.but(learning_rate=2.0, hidden_rate=3.0, schedule="linear")
    made = plan_head(recipe, head, 1438, epsilon=3.0, accountant="rdp")
    optimizer, scheduler = head_optimizer(recipe, head, made)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([60.0, 4.0])
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([60.0 * 39 / 40, 4.0 * 39 / 40])


@pytest.mark.parametrize(
    "changes",
    [{"learning_rate": 0.0}, {"schedule": "steps"}, {"test_copies": "two"}, {"shifts": ((1, 0),)}, {"shifts": ()}, {"rate": 1.0}],
)
def test_settings_that_can_not_be_meant(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TINY.but(**changes)
