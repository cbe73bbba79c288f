"""The catalogue: recipes as data. What is shipped can be planned and says where it comes from; files are checked field by field."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lipdp import data, recipes
from lipdp.data import Flip, RandomCrop, Shifts
from lipdp.errors import ConfigurationError
from lipdp.privacy import AdaptiveClip
from lipdp.recipes import Recipe, get, measured, names, prepare, read_recipes, save_recipe
from lipdp.recipes.files import nearest_budget, to_toml
from lipdp.recipes.recipe import settings_of
from lipdp.recipes.spaces import default_space

SHORT = ("cifar10", "digits", "fashion_mnist", "mnist")
NETWORKS = ("mlp", "lenet", "vgg", "resnet", "mixer")
METHODS = ("clipless", "boundaries", "bookkeeping")
# Runs of cifar10-lenet-boundaries differed by ten points: what isn't stable is no recipe.
UNSTABLE = ("cifar10", "lenet", "boundaries")
CELLS = [*itertools.product(("mnist", "cifar10"), NETWORKS, METHODS), *itertools.product(("fashion-mnist",), ("mlp",), METHODS)]
GRID = [cell for cell in CELLS if cell != UNSTABLE]


def grid_name(dataset: str, network: str, method: str) -> str:
    return f"{dataset}-{network}" + ("" if method == "clipless" else f"-{method}")


@pytest.mark.parametrize(("dataset", "network", "method"), GRID)
def test_every_cell_of_the_grid_has_a_recipe(dataset: str, network: str, method: str) -> None:
    recipe = get(grid_name(dataset, network, method))
    proved = method != "bookkeeping"
    assert (recipe.dataset, recipe.method) == (dataset.replace("-", "_"), "clipless" if proved else method)
    assert (recipe.max_grad_norm is None) == proved
    assert recipe.provenance.startswith("best of")


def test_twins_share_their_network() -> None:
    for dataset, network in {(dataset, network) for dataset, network, _ in GRID} - {UNSTABLE[:2]}:
        twins = [get(grid_name(dataset, network, method)) for method in METHODS[1:]]
        own = {"clip", "conv_clip", "activation"}
        shapes = [{name: value for name, value in recipe.options.items() if name not in own} for recipe in twins]
        assert shapes[0] == shapes[1]
        assert len({(recipe.batch_size, recipe.delta) for recipe in twins}) == 1


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_networks_are_planned_without_data(network: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("data were read"))
    dataset = "mnist" if ("cifar10", network, method) == UNSTABLE else "cifar10"
    recipe = get(grid_name(dataset, network, method))
    plan = prepare(recipe, data.info(dataset), noise_multiplier=2.0, accountant="rdp", seed=0).plan
    assert plan.method == recipe.method
    assert plan.batch_size == recipe.batch_size
    # The learning rate is in units of this.
    assert plan.sensitivity == recipe.max_grad_norm if method == "bookkeeping" else 0 < plan.sensitivity < 4


def test_what_is_shipped_was_tried_and_says_so() -> None:
    for name in names():
        recipe = get(name)
        assert recipe.provenance, name
        assert not recipe.provenance.startswith("untried"), name
        assert "not searched" not in recipe.provenance, name
        figures = measured(recipe.name)
        assert figures is not None, f"{name} has no figures: run benchmarks/accuracy/catalogue.py"
        assert figures.epsilon == recipe.epsilon
        assert default_space(recipe).fitting(recipe)
        assert recipe.batch_size <= data.info(recipe.dataset).train_size
        if "-eps" in name:
            assert recipe.epsilon == float(name.rpartition("eps")[2])


@pytest.mark.parametrize("dataset", SHORT)
def test_a_dataset_is_the_best_recipe_for_it_at_the_nearest_budget(dataset: str) -> None:
    assert get(dataset) is get(dataset, 3.0)
    for epsilon, nearest in ((0.1, 1.0), (1.7, 1.0), (1.8, 3.0), (4.8, 3.0), (5.0, 8.0), (100.0, 8.0)):
        recipe = get(dataset, epsilon)
        assert recipe.dataset == dataset
        assert recipe.epsilon == (3.0 if dataset == "digits" else nearest)
        assert get(recipe.name) is recipe
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="epsilon"):
            get(dataset, wrong)


def test_the_budget_of_a_run_is_the_recipes_own_where_none_is_given() -> None:
    for name in ("digits-mlp", "adbench-yeast"):
        recipe = get(name)
        plan = prepare(recipe, accountant="rdp").plan
        assert recipe.epsilon * 0.99 < plan.epsilon <= recipe.epsilon
    assert prepare("digits", epsilon=1.0, accountant="rdp").plan.epsilon <= 1.0
    with pytest.raises(ConfigurationError, match="no recipe"):
        prepare(3)  # type: ignore[arg-type]


# ------------------------------------------------------------------ files


def test_every_recipe_survives_being_written_and_read(tmp_path: Path) -> None:
    for name in names():
        recipe = get(name)
        if recipe.name == name:
            save_recipe(recipe, tmp_path / "all.toml")
    read = read_recipes(tmp_path / "all.toml")
    assert list(read) == [name for name in names() if get(name).name == name]
    assert all(settings_of(read[name]) == settings_of(get(name)) for name in read)


ODD = Recipe(
    'a "name" with ä.dots', "digits", "mlp", {"hidden": (8, 4), "clip": None, "deep": ({"a": 1.5, "b": (True, "x")},), "é": "ß\n"},
    augmentation=Shifts(((0, 0), (1, -1)), flip=True), test_copies="all", class_weights=(0.1, 1e-300), epochs=1 / 3,
    method="bookkeeping", max_grad_norm=1e22, adaptive=AdaptiveClip(quantile=0.3), clip_schedule=((0.0, 1.0), (0.5, 0.1)),
    freeze={"0.weight": 0.5}, provenance="here",
)  # fmt: skip


@pytest.mark.parametrize(
    "recipe", [ODD, ODD.but(augmentation=RandomCrop(2, 3), test_copies="flip"), ODD.but(augmentation=Flip(), test_copies="one")]
)
def test_the_round_trip_is_exact(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "new" / "one.toml"
    save_recipe(recipe, file)
    (back,) = read_recipes(file).values()
    for name in Recipe.__dataclass_fields__:
        mine, other = getattr(recipe, name), getattr(back, name)
        assert repr(mine) == repr(other) if name == "augmentation" else mine == other, name
    assert back.name == recipe.name
    before = file.read_text()
    with pytest.raises(ConfigurationError, match="already holds"):
        save_recipe(recipe, file)
    assert file.read_text() == before


def test_recipes_of_a_file_by_name(tmp_path: Path) -> None:
    file = tmp_path / "a.toml.d" / "mine.toml"
    one = ODD.but(name="one", augmentation=None, test_copies="one")
    save_recipe(one, file)
    assert get(str(file)) == get(f"{file}:one") == get(f"{file}:ONE", 1.0) == read_recipes(file)["one"]
    save_recipe(one.but(name="two"), file)
    for wrong in (f"{file}", f"{file}:", f"{file}:three"):
        with pytest.raises(ConfigurationError, match="'one', 'two'"):
            get(wrong)
    with pytest.raises(ConfigurationError, match="there is no file of recipes"):
        get(str(tmp_path / "none.toml"))


def test_what_a_file_can_not_hold_is_refused_before_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    for options in ({"layer": object()}, {"deep": (None,)}):
        with pytest.raises(ConfigurationError, match="hold"):
            save_recipe(ODD.but(options=options), file)
    with pytest.raises(ConfigurationError, match="can be written"):
        save_recipe(ODD.but(augmentation=data.Identity(), test_copies="one"), file)
    assert not file.exists()


GOOD = 'dataset = "digits"\nmodel = "mlp"\nprovenance = "here"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[one\n", "no TOML"),
        ("one = 3\n", "'one' is 3"),
        (f"[one]\n{GOOD}epoch = 3\n", "'epoch'"),
        (f"[one]\n{GOOD}name = 'two'\n", "'name'"),
        ('[one]\ndataset = "digits"\nmodel = "mlp"\n', "'provenance'"),
        (f"[one]\n{GOOD}epochs = 'many'\n", "epochs is 'many'"),
        (f"[one]\n{GOOD}epochs = nan\n", "epochs is nan"),
        (f"[one]\n{GOOD}batch_size = 1.5\n", "batch_size is 1.5"),
        (f"[one]\n{GOOD}batch_size = true\n", "batch_size is True"),
        (f"[one]\n{GOOD}momentum = 1\n", "momentum is 1"),
        (f"[one]\n{GOOD}schedule = 'sine'\n", "schedule is 'sine'"),
        (f"[one]\n{GOOD}options = 3\n", "options is 3"),
        (f"[one]\n{GOOD}class_weights = [1, 'x']\n", r"class_weights\[1\] is 'x'"),
        (f"[one]\n{GOOD}augmentation = {{kind = 'Mixup'}}\n", "augmentation.kind is 'Mixup'"),
        (f"[one]\n{GOOD}augmentation = {{kind = 'Flip', far = 3}}\n", "does not fit Flip"),
        (f"[one]\n{GOOD}adaptive = {{quantile = 2}}\n", "adaptive.quantile is 2"),
        (f"[one]\n{GOOD}clip_schedule = [[0, 1, 2]]\n", "clip_schedule"),
        (f"[one]\n{GOOD}without = 'clip'\n", "without is 'clip'"),
        (f"best = ['two']\n[one]\n{GOOD}", "best lists 'two'"),
    ],
)
def test_errors_name_the_file_the_recipe_and_the_field(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=told) as refused:
        read_recipes(file)
    assert "odd.toml" in str(refused.value)
    assert "'one'" in str(refused.value) or not text.startswith(f"[one]\n{GOOD}")


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none.toml", "there is no file"), ("bytes.toml", "can't be read"), ("", "can't be read")):
        with pytest.raises(ConfigurationError, match=said):
            read_recipes(tmp_path / name)


def test_defaults_are_not_written_and_units_are_one() -> None:
    plain = Recipe("plain", "digits", "mlp", provenance="here")
    assert settings_of(plain) == {"name": "plain", "dataset": "digits", "model": "mlp", "provenance": "here"}
    assert to_toml(plain) == '[plain]\ndataset = "digits"\nmodel = "mlp"\nprovenance = "here"\n'
    by_steps: dict[str, Any] = {"batch_size": 100, "steps": 7}
    assert plain.but(**by_steps).steps == 7
    assert plain.but(**by_steps).epochs == pytest.approx(700 / 1438)
    assert nearest_budget([plain, plain.but(epsilon=10.0)], 6.0).epsilon == 10.0
    assert recipes.get("digits-mlp").changed({"options.clip": 0.7, "momentum": 0.5}).options == {"hidden": (128,), "clip": 0.7}


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 3000,
        "a = " + "9" * 5000,
        "[x]\ndataset = 'digits'\nmodel = 'mlp'\nprovenance = 'p'\naugmentation = {kind = 'Shifts', offsets = 'a'}",
    ],
    ids=["nested too deep", "a number too long", "offsets that are none"],
)
def test_files_that_no_reader_likes(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"mine\.toml"):
        read_recipes(tmp_path / "mine.toml")


@pytest.mark.parametrize("name", ["a\0", 3, None])
def test_names_that_no_file_has(name):
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_recipes(name)
