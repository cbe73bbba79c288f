"""`lipdp sweep`, on the embedded digits."""

import pytest
import torch

from lipdp.recipes import get, read_recipes, spaces
from lipdp.recipes.spaces import Choice, Range, Space

pytest.importorskip("optuna")

FIXED = ("--set", "batch_size=512", "--set", "epochs=1")


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    """A space whose runs are short, on digits."""
    space = Space("small", "here", (Range("learning_rate", 0.1, 3.0), Choice("options.hidden", ((16,), (32,)), model="mlp")))
    monkeypatch.setitem(spaces._BY_NAME, "small", space)


def test_sweep_in_json_and_its_histories(lipdp, tmp_path):
    storage = tmp_path / "j"
    arguments = ("sweep", "digits", *FIXED, "--space", "small", "--no-prune", "--storage", storage, "--json")
    first = lipdp(*arguments, "--trials", 1)
    assert first.code == 0, first.stderr
    assert (first.json["complete"], first.json["failed"], first.json["epsilon"]) == (1, 0, 3.0)
    assert first.json["histories"] == f"{storage}.jsonl"
    assert set(first.json["settings"]) == {"learning_rate", "options.hidden"}
    assert "1/1" in first.stderr
    second = lipdp(*arguments, "--trials", 2)
    assert second.json["complete"] == 2
    assert second.json["score"] >= first.json["score"]
    report = lipdp("pareto", f"{storage}.jsonl", "--epsilons", 3, "--json").json
    assert report["best"]["3"]["score"] >= second.json["score"]


def test_a_search_has_an_end(lipdp):
    told = lipdp("sweep", "digits")
    assert told.code == 2
    assert "--trials 20, --minutes 30" in told.stderr
    assert "trials ━" not in told.stderr  # before anything begins


def test_sweep_then_test(lipdp):
    done = lipdp(
        "sweep", "digits", *FIXED, "--space", "small", "--trials", 1, "--test", "--seeds", 2, "--validation-fraction", 0.25
    )
    assert done.code == 0, done.stderr
    assert "over 2 runs, each with (ε = 3.000, δ = 0.0001)" in " ".join(done.stdout.split())
    assert "not paid for" in done.stdout


def test_what_was_found_is_saved_as_a_recipe_and_can_be_run(lipdp, tmp_path):
    file = tmp_path / "mine.toml"
    search = ("sweep", "digits", *FIXED, "--epsilon", 5, "--space", "small", "--trials", 1, "--no-prune", "--save", file)
    done = lipdp(*search, "--json")
    assert done.code == 0, done.stderr
    assert done.json["saved"] == {"file": str(file), "recipe": "digits-mlp-found"}
    (saved,) = read_recipes(file).values()
    changes = {**done.json["settings"], "options.hidden": tuple(done.json["settings"]["options.hidden"])}
    found = get("digits").but(batch_size=512, epochs=1).changed(changes)
    assert saved == found.but(name="digits-mlp-found", epsilon=5.0, provenance=saved.provenance)
    assert "best of 1 trials of lipdp sweep digits-mlp" in saved.provenance
    assert "held out" in saved.provenance
    again = lipdp(*search)  # refused before anything is trained
    assert again.code == 2
    assert "another --name" in again.stderr
    assert lipdp(*search, "--name", "other").code == 0
    assert list(read_recipes(file)) == ["digits-mlp-found", "other"]
    run = lipdp("train", f"{file}:other", "--json")
    assert run.code == 0, run.stderr
    assert (run.json["recipe"], run.json["epsilon"] <= 5) == ("other", True)
    assert run.json["epsilon"] > 4.9  # the recipe's own budget
    assert "'other'" in lipdp("train", f"{file}:othr").stderr


def test_private_tuning(lipdp, tmp_path):
    weights = tmp_path / "chosen.pt"
    done = lipdp(
        "sweep",
        "digits",
        *FIXED,
        "--epsilon",
        6,
        "--trials",
        2,
        "--space",
        "small",
        "--private-tuning",
        "--weights",
        weights,
        "--test",
        "--json",
    )
    assert done.code == 0, done.stderr
    report = done.json
    assert report["run_epsilon"] < report["epsilon"] <= 6
    assert "trials" not in report  # a secret
    assert 0 <= report["test"]["accuracy"] <= 1
    assert all(isinstance(tensor, torch.Tensor) for tensor in torch.load(weights, weights_only=True).values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digits",), "when the search ends"),
        (("digits", "--trials", "2", "--workers", "2"), "storage"),
        (("digits", "--trials", "2", "--space", "moon"), "paper-cifar10"),
        (("digits", "--trials", "2", "--private-tuning", "--storage", "x"), "random and secret"),
        (("digits", "--private-tuning"), "--trials"),
        (("digits", "--trials", "2", "--private-tuning", "--save", "x.toml"), "secret"),
        (("digits", "--trials", "2", "--name", "mine"), "--save"),
        (("digits", "--trials", "2", "--private-tuning", "--repetitions", "uniform"), "geometric"),
        (("digits", "--trials", "2", "--weights", "x"), "--private-tuning"),
        (("digits", "--trials", "2", "--radii", "a"), "--radii"),
        (("digits", "--trials", "2", "--sampler", "grid"), "sampler"),
    ],
)
def test_refusals(lipdp, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = lipdp("sweep", *arguments)
    assert done.code == 2
    assert words in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
