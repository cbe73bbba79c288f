"""Search spaces and held-out parts on small data: no batch is larger than what there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import data
from lipdp.cli.options import training_size
from lipdp.errors import ConfigurationError
from lipdp.recipes import get, names, prepare
from lipdp.recipes.spaces import Choice, RandomSuggester, Range, Space, default_space, get_space, space_names
from lipdp.recipes.sweep import Sweep, search


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=5, unique=True), st.integers(1, 30_000))
@settings(max_examples=200, deadline=None)
def test_choices_fit(values, records):
    fitted = Choice("batch_size", tuple(values)).at_most(records).values
    assert all(1 <= value <= records for value in fitted)
    assert len(set(fitted)) == len(fitted)
    assert set(fitted) >= {value for value in values if value <= records} or len({min(v, records) for v in values}) == 1
    if max(values) <= records:
        assert fitted == tuple(values)
    elif len(values) > 1 and records >= 40_000 / min(v for v in values):
        assert len(fitted) > 1  # there is still something to choose
    assert max(fitted) == min(records, max(values))


@given(st.integers(1, 5_000), st.integers(1, 20_000), st.integers(1, 30_000))
@settings(max_examples=200, deadline=None)
def test_ranges_fit(low, width, records):
    whole = Range("batch_size", low, low + width, whole=True)
    fitted = whole.at_most(records)
    assert 1 <= fitted.low <= fitted.high == min(low + width, records)
    if low + width <= records:
        assert fitted == whole
    elif 2 * low <= records:
        assert fitted.low == low
    assert fitted.low <= fitted.suggest(RandomSuggester(0)) <= fitted.high


@pytest.mark.parametrize("space", [None, *space_names()])
def test_every_recipe_with_every_space_gets_batches_that_there_are(space):
    for name in names():
        recipe = get(name)
        chosen = default_space(recipe) if space is None else get_space(space)
        records = data.info(recipe.dataset).train_size
        try:
            chosen.fitting(recipe)
        except ConfigurationError:
            continue  # it has no setting of this recipe
        sizes = set()
        for seed in range(8):
            trial = recipe.changed(chosen.settings(RandomSuggester(seed), recipe))
            assert 1 <= trial.batch_size <= records, (name, chosen.name)
            for held_out in (None, 0.2, 0.5):
                left = training_size(data.info(recipe.dataset), held_out)
                assert trial.batch_for(left, records) == min(trial.batch_size, left)
            sizes.add(trial.batch_size)
        assert len(sizes) > 1 or all(p.name != "batch_size" for p in chosen.fitting(recipe)), (name, chosen.name)


def test_the_default_space_of_large_data_is_as_written():
    for name in ("mnist-mlp", "cifar10-vgg-bookkeeping", "mnist"):
        recipe = get(name)
        space = default_space(recipe)
        assert set(space.fitting(recipe)) <= set(space.parameters)
    sizes = {p.name: p for p in get_space("clipless").fitting(get("digits"))}["batch_size"].values
    assert sizes == (360, 719, 1438)


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_recipes_plan_with_a_part_held_out(name):
    """Recipes whose batch is the whole training set, or nearly, take all that is left of it."""
    recipe = get(name)
    info = data.info(recipe.dataset)
    left = training_size(info, 0.4)
    plan = prepare(recipe, info, dataset_size=left, epsilon=3.0, accountant="rdp").plan
    assert plan.batch_size == min(recipe.batch_size, left)


def test_a_batch_that_no_part_of_the_data_gives_is_still_refused():
    recipe = get("digits").but(batch_size=1439)
    with pytest.raises(ConfigurationError, match="larger than"):
        prepare(recipe, data.info("digits"), epsilon=3.0)


def test_a_search_on_small_data_has_no_refused_trial():
    pytest.importorskip("optuna")
    recipe = get("digits")
    space = default_space(recipe).without({"epochs"})
    found = search(Sweep(recipe.but(epochs=1), 3.0, space, seed=0, sampler="random", prune=False, evaluations=1), trials=2)
    assert (found.complete, found.failed) == (2, 0)
    assert found.recipe.batch_size <= data.info(recipe.dataset).train_size


def test_a_space_of_words_is_left_for_the_recipe_to_refuse():
    odd = Space("odd", "here", (Choice("batch_size", ("many", "few")),))
    assert odd.fitting(get("digits"))[0].values == ("many", "few")
