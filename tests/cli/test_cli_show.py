"""`lipdp plan`, `bounds`, `data` and `recipes`."""

import dataclasses
import itertools
import math

import pytest

from lipdp import data, recipes
from lipdp.training import PrivacyPlan


@pytest.fixture
def no_data(monkeypatch):
    def load(*_, **__):
        raise AssertionError("data were read")

    monkeypatch.setattr(data, "load", load)


@pytest.mark.usefixtures("no_data")
def test_plan(lipdp, tmp_path):
    file = tmp_path / "plan.json"
    common = ("plan", "mnist-mlp", "--noise-multiplier", "2", "--epochs", "1", "--batch-size", "2048", "--set", "options.hidden=64")
    plain = lipdp(*common, "--output", file)
    assert plain.code == 0
    assert "for adding or removing one record (PLD)" in plain.stdout
    assert "50,176" in plain.stdout  # 784 × 64 weights
    assert max(map(len, plain.stdout.splitlines())) <= 100
    plan = PrivacyPlan.from_json(file.read_text())
    assert (plan.steps, plan.batch_size, plan.dataset_size) == (30, 2048, 60_000)
    assert lipdp(*common, "--json").json["epsilon"] == plan.epsilon


@pytest.mark.usefixtures("no_data")
def test_plan_of_a_part_and_other_settings(lipdp):
    plan = lipdp(
        *(
            "plan",
            "digits",
            "--noise-multiplier",
            "2",
            "--epochs",
            "9",
            "--validation-fraction",
            "0.5",
            "--delta",
            "1e-6",
            "--batch-size",
            "300",
        ),
        *("--set", "allocation=optimal", "--set", "options.clip=none", "--set", "ema_decay=none", "--json"),
    ).json
    assert (plan["dataset_size"], plan["allocation"], plan["delta"]) == (719, "optimal", 1e-6)
    assert plan["groups"][0]["sensitivity"] == pytest.approx(math.sqrt(2))


def test_plan_warns_of_a_large_delta(lipdp):
    warned = lipdp("plan", "digits", "--noise-multiplier", "2", "--delta", "0.1", "--epochs", "1", "--json")
    assert warned.code == 0
    assert warned.stderr.startswith("warning: delta=0.1 is not below")
    assert warned.stderr.count("\n") == 1


def test_plan_into_a_missing_folder(lipdp, tmp_path):
    refused = lipdp("plan", "digits", "--noise-multiplier", "2", "--epochs", "1", "--output", tmp_path / "no" / "plan.json")
    assert refused.code == 2
    assert "does not exist" in refused.stderr


@pytest.mark.usefixtures("no_data")
def test_bounds(lipdp):
    plain = lipdp("bounds", "digits-mlp", "--set", "options.clip=0.5")
    assert plain.code == 0
    for text in ("(BoundedInput)", "(ClipGradient)", "3.weight", "at most 0.7071"):
        assert text in plain.stdout
    found = lipdp("bounds", "digits-mlp", "--set", "options.clip=0.25", "--json").json
    assert [row["sensitivity"] for row in found["parameters"]] == pytest.approx([0.25, 0.25])
    assert found["sensitivity"] == pytest.approx(0.25 * math.sqrt(2))
    assert found["layers"][0]["norm"] is None  # ∞: before the input is bounded
    assert found["layers"][-1]["output"] == [10]


def test_recipes(lipdp):
    plain = lipdp("recipes")
    assert plain.code == 0
    for name in recipes.names():
        if recipes.get(name).name == name:
            assert any(name in line.split() for line in plain.stdout.splitlines()), name  # whole, on one line, into a pipe
    rows = {row["name"]: row for row in lipdp("recipes", "--json").json["recipes"]}
    assert rows["digits-mlp"]["alias"] == "digits"
    assert rows["digits-mlp"]["options"]["hidden"] == list(recipes.get("digits-mlp").options["hidden"])


def test_recipes_come_with_what_they_gave_and_the_record_first(lipdp):
    rows = lipdp("recipes", "--json").json["recipes"]
    for row in rows:
        figures = row["measured"]
        assert figures is not None, f"{row['name']} was never tried"
        assert figures["epsilon"] == row["epsilon"]
        assert 0 < figures["score"] <= 100
    groups = [place for place, _ in itertools.groupby((row["dataset"], row["epsilon"]) for row in rows)]
    assert len(groups) == len(set(groups))  # what can be compared stands together
    for row, after in itertools.pairwise(rows):
        if (row["dataset"], row["epsilon"]) == (after["dataset"], after["epsilon"]):
            first, second = ((figures["part"] == "test", figures["score"]) for figures in (row["measured"], after["measured"]))
            assert first >= second  # held-out figures are too good to stand before those on the test set
    best = lipdp("recipes", "cifar10-mixture-eps1", "--json").json
    assert best["measured"] == dataclasses.asdict(recipes.measured("cifar10-mixture-eps1"))
    line = next(line for line in lipdp("recipes", "mixture").stdout.splitlines() if "mixture-eps1" in line)
    assert f"{best['measured']['score']:.1f} ± {best['measured']['deviation']:.1f}" in line


def test_recipes_by_words(lipdp):
    plain = lipdp("recipes", "cifar10-", "VGG")
    assert plain.code == 0
    for name in ("cifar10-vgg ", "cifar10-vgg-boundaries ", "cifar10-vgg-bookkeeping "):  # whole, on one line
        assert name in plain.stdout
    assert "lenet" not in plain.stdout
    listed = lipdp("recipes", "cifar10-", "vgg", "--json").json["recipes"]
    assert {row["name"] for row in listed} == {"cifar10-vgg", "cifar10-vgg-boundaries", "cifar10-vgg-bookkeeping"}
    unknown = lipdp("recipes", "cats", "--json")
    assert (unknown.code, unknown.json["kind"]) == (2, "ConfigurationError")


def test_one_recipe(lipdp):
    plain = lipdp("recipes", "digits")
    assert plain.code == 0
    for text in ("digits-mlp, also digits", "temperature", "20.0", "options.clip", "best of 40 random trials"):
        assert text in plain.stdout
    assert "max_grad_norm" not in plain.stdout  # it has none
    assert lipdp("recipes", "digits-mlp", "--json").json["options"]["clip"] == recipes.get("digits-mlp").options["clip"]


def test_data_list(lipdp, tmp_path):
    plain = lipdp("data", "--data", tmp_path)
    assert plain.code == 0
    assert "comes with scikit-learn" in plain.stdout
    rows = {row["name"]: row for row in lipdp("data", "--data", tmp_path, "--json").json["datasets"]}
    assert rows["digits"]["on_disk"] is True
    assert rows["mnist"]["on_disk"] is False
    assert rows["mnist"]["path"] == str(tmp_path / "mnist")


def test_data_of_one(lipdp, tmp_path):
    plain = lipdp("data", "digits")
    assert plain.code == 0
    assert "1,438 to train, 359 to test" in plain.stdout
    found = lipdp("data", "digits", "--json").json
    assert found["verified"] is True
    assert found["shape"] == [1, 8, 8]
    unknown = lipdp("data", "cats", "--json")
    assert (unknown.code, unknown.json["kind"]) == (2, "ConfigurationError")
    missing = lipdp("data", "mnist", "--data", tmp_path, "--no-download", "--json")
    assert (missing.code, missing.json["kind"]) == (2, "DataError")


@pytest.mark.usefixtures("no_data")
def test_names_as_their_publishers_write_them(lipdp):
    arguments = ("--noise-multiplier", "2", "--epochs", "1", "--batch-size", "2048", "--json")
    assert lipdp("plan", "Fashion-MNIST-MLP", *arguments).json == lipdp("plan", "fashion_mnist_mlp", *arguments).json
    for typed in ("fashion-mnist", "Fashion_MNIST", "FASHION MNIST"):
        assert lipdp("recipes", typed, "--json").json["dataset"] == "fashion_mnist"


def test_an_unknown_dataset_is_refused_with_the_nearest(lipdp):
    refused = lipdp("data", "fashion-minst")
    assert refused.code == 2
    assert "Did you mean 'fashion_mnist'? Choose one of 'digits', 'mnist', 'fashion_mnist'" in refused.stderr
