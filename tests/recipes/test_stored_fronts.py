"""Recipes on fixed features: from the dataset to the accuracy, through plan, engine and fit, the front computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lipdp import data, losses, recipes
from lipdp.data import DatasetInfo, RandomCrop, Shifts
from lipdp.errors import ConfigurationError
from lipdp.recipes import Recipe, get, prepare, train

SMALL: dict[str, Any] = {"scales": ((1, 2),), "order": 1}
TINY = Recipe(
    "tiny", "digits", "scattering-linear", SMALL, front="stored", temperature=1.0, batch_size=256, learning_rate=15.0,
    schedule="cosine", ema_decay=0.95, allocation="per_layer", delta=1e-4,
).but(steps=40)  # fmt: skip
TWO, FOUR = Shifts(((0, 0), (1, 0))), Shifts(((0, 0), (1, 0)), flip=True)
REPEATED: dict[str, Any] = {"reproducible": True, "accountant": "rdp", "evaluations": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"augmentation": TWO, "test_copies": "all"},
        {"augmentation": FOUR, "test_copies": "flip"},
        {"options": {**SMALL, "statistics": "private", "weights": (1, 2, 1, 1)}, "statistics_budget": 0.1},
        {"options": {**SMALL, "compress": "log", "shifts": ((0, 0), (0, 1)), "whiten": 0.3}},
        {"options": {"scales": ((1, 2), (2, 2)), "compress": "root", "whiten": 0.1, "corner": 0.5, "flip": True}},
        {"options": {"scales": ((2, 2), (1, 2)), "statistics": "private", "weights": (1, 1, 2, 1)}, "statistics_budget": 0.1},
        {"model": "scattering-mlp", "options": {**SMALL, "hidden": (16,)}, "temperature": 8.0, "learning_rate": 6.0},
        {"model": "scattering-mlp", "options": {**SMALL, "hidden": (16,), "normalise": True}, "learning_rate": 6.0},
    ],
    ids=lambda c: "-".join(c) or "linear",
)
def test_a_run(changes: dict[str, Any]) -> None:
    result = train(TINY.but(**changes), epsilon=8.0, seed=0, **REPEATED)
    assert result.accuracy > 0.7
    assert result.epsilon <= 8
    assert result.steps == 40
    assert result.method == "clipless"
    assert result.plan.dataset_size == 1438
    assert bool(result.plan.releases) == ("statistics_budget" in changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"augmentation": TWO},
        {"augmentation": FOUR, "options": {**SMALL, "statistics": "private"}, "statistics_budget": 0.1},
        {"options": {"scales": ((2, 2), (1, 2)), "statistics": "private"}, "statistics_budget": 0.1},
    ],
    ids=lambda c: "-".join(c),
)
def test_a_stored_front_is_the_same_run_as_one_computed_in_every_step(changes: dict[str, Any]) -> None:
    """Copies and statistics too: what is released is the same, so are noise, batches and weights, to rounding."""
    recipe = TINY.but(**changes).but(steps=6)
    stored, computed = (train(recipe.but(front=front), epsilon=8.0, seed=3, **REPEATED) for front in ("stored", "computed"))
    assert stored.epsilon == computed.epsilon
    for name, value in computed.model.state_dict().items():
        assert torch.allclose(stored.model.state_dict()[name].double(), value.double(), atol=2e-4), name
    assert any(float(p.detach().norm()) > 0.1 for p in stored.model.parameters())


def test_random_copies_are_not_stored() -> None:
    with pytest.raises(ConfigurationError, match="every step"):
        train(TINY.but(augmentation=RandomCrop(1, 2)), epsilon=3.0, seed=0, **REPEATED)


def final_weight(recipe: Recipe, epsilon: float, **options: Any) -> torch.Tensor:
    model = train(recipe, epsilon=epsilon, seed=5, **options, **REPEATED).model
    return [p.detach() for p in model.parameters()][-1]


@pytest.mark.parametrize("private", [False, True])
def test_runs_repeat_and_the_cache_changes_nothing(tmp_path: Path, private: bool) -> None:
    """Statistics are no part of what is kept: with another budget they are others."""
    changes = {"options": {**SMALL, "statistics": "private"}, "statistics_budget": 0.1} if private else {}
    recipe = TINY.but(**changes).but(steps=3)
    first, again, alone = (final_weight(recipe, 3.0, cache=cache) for cache in (tmp_path, tmp_path, None))
    assert torch.equal(first, again)
    assert torch.equal(first, alone)
    assert len(list(tmp_path.iterdir())) == 1
    if private:
        other, cached = (final_weight(recipe, 30.0, cache=cache) for cache in (None, tmp_path))
        assert torch.equal(other, cached)
        assert not torch.allclose(other, first, atol=1e-3)


def test_a_part_of_the_training_set_is_held_out_and_watched() -> None:
    result = train(TINY.but(augmentation=TWO).but(steps=4), epsilon=3.0, seed=0, validation_fraction=0.25, **REPEATED)
    assert result.plan.dataset_size == 1078
    assert result.history.last["validation_accuracy"] == pytest.approx(result.accuracy)


def test_rates_are_in_units_of_the_sensitivity() -> None:
    options = {**SMALL, "hidden": (4,), "clip": 0.4, "hidden_clip": 0.3}
    recipe = TINY.but(model="scattering-mlp", options=options, learning_rate=2.0, hidden_rate=3.0, schedule="linear")
    ready = prepare(recipe, epsilon=3.0, accountant="rdp", seed=0)
    assert ready.plan.sensitivity == pytest.approx(0.5)
    assert [group["lr"] for group in ready.optimizer.param_groups] == pytest.approx([12.0, 4.0])
    assert ready.scheduler is not None
    ready.optimizer.step()
    ready.scheduler.step()
    assert [group["lr"] for group in ready.optimizer.param_groups] == pytest.approx([12.0 * 39 / 40, 4.0 * 39 / 40])


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"schedule": "steps"},
        {"test_copies": "two"},
        {"test_copies": "all"},
        {"augmentation": "flip"},
        {"loss": "hinge"},
        {"front": "cached"},
        {"rate": 1.0},
        {"steps": 0},
        {"ema_decay": 1.0},
        {"momentum": True},
    ],
    ids=str,
)
def test_settings_that_can_not_be_meant(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        TINY.but(**changes)


def test_a_clipped_head_trains_as_the_proved_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind features of norm 1 and without copies, clipping the example's gradient is clipping the logits'."""
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.rand(160, 1, 8, 8, generator=draw), torch.arange(160) % 3
    images[labels == 1, :, :4] += 1.0
    images[labels == 2, :, :, :4] += 1.0
    parts = TensorDataset(images[:120], labels[:120]), TensorDataset(images[120:], labels[120:])
    info = DatasetInfo("toy", 3, (1, 8, 8), 120, 40, ("a", "b", "c"), "none", "none", "none")
    monkeypatch.setattr(data, "load", lambda *_, **__: (*parts, info))
    options = {"scales": ((1, 4),), "clip": 0.4}
    changes: dict[str, Any] = {"dataset": "toy", "options": options, "batch_size": 60, "epochs": 6.0, "allocation": "global"}
    proved = TINY.but(**changes, learning_rate=5.0)
    clipped = proved.but(options={**options, "clip": None}, max_grad_norm=0.4, method="bookkeeping")
    runs = [train(recipe, noise_multiplier=0.05, seed=1, **REPEATED) for recipe in (proved, clipped)]
    assert [run.method for run in runs] == ["clipless", "bookkeeping"]
    assert [run.steps for run in runs] == [12, 12]
    assert runs[0].plan.sensitivity == pytest.approx(runs[1].plan.sensitivity, rel=1e-4)
    assert all(run.accuracy > 0.9 for run in runs)
    hidden = clipped.but(model="scattering-mlp", options={**clipped.options, "hidden_clip": None, "hidden": (8,)})
    assert train(hidden, noise_multiplier=0.05, seed=1, **REPEATED).method == "bookkeeping"


def test_patches_on_digits() -> None:
    options = {"blocks": [{"kind": "patches", "patch": 3, "filters": 20, "grid": 3, "mirror": False}], "centre": "private"}
    tiny = TINY.but(model="patches-linear", options=options, batch_size=1438, statistics_budget=0.1, learning_rate=30.0)
    result = train(tiny.but(steps=30), epsilon=8.0, seed=0, **REPEATED)
    assert result.accuracy > 0.85
    assert result.epsilon <= 8
    assert [release.name for release in result.plan.releases] == ["statistics"]


def test_straightened_digits_through_random_relus() -> None:
    """The layers of the recipes for MNIST on 8 × 8 images; so few of them need a larger budget."""
    recipe = get("mnist", 8.0).but(dataset="digits", batch_size=1438, delta=1e-4, learning_rate=2.0).but(steps=40)
    assert isinstance(recipe.make_loss(), losses.Squares)
    result = train(recipe, epsilon=20.0, seed=0, **REPEATED)
    assert result.accuracy > 0.93
    assert result.epsilon <= 20


def test_their_sensitivity_is_the_clip() -> None:
    """Nothing is measured on data: the plan follows from the layers."""
    recipe = get("mnist-straight-eps3")
    ready = prepare(recipe, epsilon=3.0, accountant="rdp", seed=0)
    assert list(ready.plan.sensitivities.values()) == pytest.approx([recipe.options["clip"]])
    assert [release.name for release in ready.plan.releases] == ["statistics"]
    assert ready.plan.steps == recipe.steps == 100
    with pytest.raises(ConfigurationError, match="share of epsilon"):
        recipes.prepare(recipe, noise_multiplier=1.0)
