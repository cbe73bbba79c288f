"""Names of datasets, recipes, models and spaces, however they are typed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import data, models, recipes
from lipdp._checks import match
from lipdp.errors import ConfigurationError
from lipdp.recipes.spaces import default_space, get_space, space_names

LOOKUPS = {
    "dataset": (data.names, lambda name: data.info(name).name),
    "recipe": (recipes.names, lambda name: recipes.get(name).name),
    "model": (models.names, models.by_name.option_names),
    "space": (space_names, lambda name: get_space(name).name),
    "colour": (lambda: tuple(data.COLOUR_SPACES), lambda name: type(data.colour_space(name))),
}


@st.composite
def _typed(draw, name):
    """The name in other cases, with other signs between its words."""
    letters = []
    for letter in name:
        if letter in "-_/":
            letters.append(draw(st.sampled_from("-_/ ")))
        else:
            letters.append(letter.upper() if draw(st.booleans()) else letter)
    return "".join(letters)


@pytest.mark.parametrize("kind", LOOKUPS)
@settings(max_examples=40, deadline=None)
@given(chosen=st.data())
def test_case_dashes_and_underscores_do_not_matter(kind, chosen):
    names, look_up = LOOKUPS[kind]
    name = chosen.draw(st.sampled_from(names()))
    assert look_up(chosen.draw(_typed(name))) == look_up(name)


@pytest.mark.parametrize("kind", LOOKUPS)
def test_every_name_still_means_itself(kind):
    names, _ = LOOKUPS[kind]
    assert all(match(name, names()) == name for name in names())
    assert len({match(name.upper(), names()) for name in names()}) == len(names())  # no two are the same but for case


@pytest.mark.parametrize(
    ("kind", "typed", "near"),
    [
        ("dataset", "fashion-minst", "'fashion_mnist'"),
        ("dataset", "cifar", "'cifar10'"),
        ("dataset", "magic", "'adbench/magic'"),
        ("recipe", "Mnist-Lennet", "'mnist-lenet'"),
        ("model", "restnet18", "'resnet18'"),
        ("space", "cliples", "'clipless'"),
        ("colour", "grayscle", "'grayscale'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_the_choices(kind, typed, near):
    names, look_up = LOOKUPS[kind]
    with pytest.raises(ConfigurationError, match="there is no") as refused:
        look_up(typed)
    text = str(refused.value)
    assert repr(typed) in text
    assert f"Did you mean {near}" in text
    listed = names() if kind != "recipe" else ("digits", "mnist", "`lipdp recipes`")
    assert all(name in text for name in listed)


@pytest.mark.parametrize("name", ["", "?", 3, None, ["mnist"], ("mnist",)])
@pytest.mark.parametrize("kind", LOOKUPS)
def test_what_is_no_name_is_refused(kind, name):
    with pytest.raises(ConfigurationError, match="there is no"):
        LOOKUPS[kind][1](name)


def test_recipes_keep_the_listed_names():
    """What is stored with a run says the dataset by its one name: fronts and reports compare it."""
    for recipe in (recipes.get("mnist-mlp"), recipes.get("mnist")):
        assert recipe.but(dataset="Fashion-MNIST").dataset == "fashion_mnist"
    table = recipes.get("ADBENCH_yeast")
    assert default_space(table.but(dataset="AdBench-Yeast")).name == default_space(table).name == "tabular-small"
    assert recipes.get("mnist-mlp").but(model="LeNet").model == "lenet"
    assert recipes.get("Fashion-MNIST", 3.0).dataset == "fashion_mnist"
    assert models.create("Plain_CNN", input_shape=(1, 28, 28), classes=10).lipdp_config["name"] == "plain-cnn"
