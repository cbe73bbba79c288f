"""The grid: every dataset, network and method has a recipe that says where it comes from, and that can be planned."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import TensorDataset

from lipdp import data, recipes
from lipdp.data import DatasetInfo
from lipdp.recipes.features import FeatureRecipe
from lipdp.recipes.grid import DATASETS, GRID, NETWORKS, base_recipe, grid_name
from lipdp.recipes.grid_found import FOUND
from lipdp.recipes.running import prepare
from lipdp.recipes.spaces import changed, default_space

HEADS = ("scattering-linear", "scattering-mlp")
METHODS = ("clipless", "boundaries", "bookkeeping")
HEAD_METHODS = ("clipless", "bookkeeping")


CELLS = [*itertools.product(DATASETS, NETWORKS, METHODS), *itertools.product(DATASETS, HEADS, HEAD_METHODS)]


@pytest.mark.parametrize(("dataset", "network", "method"), CELLS)
def test_every_cell_has_a_recipe(dataset: str, network: str, method: str) -> None:
    recipe = recipes.get(grid_name(dataset, network, method))
    proved = method != "bookkeeping"
    assert (recipe.dataset, recipe.method) == (dataset, "clipless" if proved else method)
    assert recipe.name in recipes.names()
    assert (recipe.max_grad_norm is None) == proved
    assert recipe.provenance.startswith(("untried", "best of", "the settings of", "head: best of"))
    assert default_space(recipe).fitting(recipe)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_networks_are_planned_without_data(network: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("data were read"))
    recipe = recipes.get(grid_name("cifar10", network, method))
    plan = prepare(recipe, data.info("cifar10"), noise_multiplier=2.0, accountant="rdp", seed=0).plan
    assert plan.method == recipe.method
    assert plan.batch_size == recipe.batch_size
    # The learning rate is in units of this.
    assert plan.sensitivity == recipe.max_grad_norm if method == "bookkeeping" else 0 < plan.sensitivity < 4


def test_twins_share_their_network() -> None:
    for dataset, network in itertools.product(DATASETS, NETWORKS):
        made = [base_recipe(dataset, network, method) for method in METHODS]
        own = {"clip", "conv_clip", "activation"}
        shapes = [{name: value for name, value in recipe.options.items() if name not in own} for recipe in made]
        assert shapes[0] == shapes[1] == shapes[2]
        assert len({(recipe.batch_size, recipe.epochs, recipe.delta) for recipe in made}) == 1


def test_found_settings_are_those_of_the_recipes() -> None:
    by_name = {recipe.name: recipe for recipe in GRID}
    assert FOUND.keys() <= by_name.keys()
    for dataset, network, method in itertools.product(DATASETS, NETWORKS, METHODS):
        base, shipped = base_recipe(dataset, network, method), by_name[grid_name(dataset, network, method)]
        if base.name in FOUND:
            provenance, settings = FOUND[base.name]
            assert shipped == changed(base, settings).but(provenance=provenance)
        else:
            assert shipped.provenance.startswith("untried")
            like = by_name.get(grid_name("mnist", network, method), base) if dataset == "fashion_mnist" else base
            assert shipped == like.but(name=shipped.name, dataset=dataset, provenance=shipped.provenance)
    assert all("untried" not in provenance for provenance, _ in FOUND.values())


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
    proved = FeatureRecipe(
        "toy", "toy", "scattering-linear", options, batch_size=60, steps=12, learning_rate=5.0, allocation="global"
    )
    clipped = proved.but(options={**options, "clip": None}, max_grad_norm=0.4)
    runs = [
        recipes.train(recipe, epsilon=None, noise_multiplier=0.05, accountant="rdp", seed=1, reproducible=True)
        for recipe in (proved, clipped)
    ]
    assert [run.method for run in runs] == ["clipless", "bookkeeping"]
    assert runs[0].plan.sensitivity == pytest.approx(runs[1].plan.sensitivity, rel=1e-4)
    assert all(run.accuracy > 0.9 for run in runs)
    hidden = clipped.but(model="scattering-mlp", options={**clipped.options, "hidden_clip": None, "hidden": (8,)})
    assert (
        recipes.train(hidden, epsilon=None, noise_multiplier=0.05, accountant="rdp", seed=1, reproducible=True).method
        == "bookkeeping"
    )
