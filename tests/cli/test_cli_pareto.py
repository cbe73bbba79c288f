"""`lipdp pareto`, from histories written here."""

import json

import pytest


@pytest.fixture
def histories(tmp_path):
    """Two architectures, three evaluations each, one certificate."""
    file = tmp_path / "runs.jsonl"
    lines = []
    for model, scores in (("mlp", [0.5, 0.7, 0.8]), ("lenet", [0.2, 0.75, 0.95])):
        lines.append(
            {
                "recipe": f"digits-{model}",
                "dataset": "digits",
                "model": model,
                "method": "clipless",
                "delta": 1e-5,
                "epsilon": 4.0,
                "steps": 30,
                "evaluated_on": "validation",
                "accuracy": scores[-1],
                "certified": {"0.1": scores[-1] / 2},
                "history": {"epsilon": [0.5, 2.0, 4.0], "step": [10, 20, 30], "validation_accuracy": scores},
                "settings": {"learning_rate": 1.0},
            }
        )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_json(lipdp, histories):
    report = lipdp("pareto", histories, "--epsilons", "1,3,8", "--json").json
    assert {budget: (dot["score"], dot["model"]) for budget, dot in report["best"].items()} == {
        "1": (0.5, "mlp"),
        "3": (0.75, "lenet"),
        "8": (0.95, "lenet"),
    }
    assert [dot["score"] for dot in report["hull"]] == [0.5, 0.75, 0.95]
    assert [dot["score"] for dot in report["by"]["model"]["mlp"]] == [0.5, 0.7, 0.8]
    assert report["certified"] == {"0.1": {"8": 0.475}}
    assert report["dots"] == 8


def test_files_and_plots(lipdp, histories, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "out"
    done = lipdp("pareto", histories, "--output", folder)
    assert done.code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["by_model.svg", "certified.svg", "dots.csv", "front.csv", "front.svg"]
    assert len((folder / "dots.csv").read_text().splitlines()) == 9
    assert "digits-lenet" in done.stdout
    assert "<svg" in (folder / "certified.svg").read_text()


def test_a_folder_of_train_counts_as_a_run(lipdp, tmp_path):
    folder = tmp_path / "run"
    arguments = ("--batch-size", 256, "--noise-multiplier", 5, "--epochs", 1, "--seed", 1, "--json", "--output", folder)
    result = lipdp("train", "digits", *arguments).json
    report = lipdp("pareto", folder, "--evaluated-on", "test", "--epsilons", 50, "--json").json
    assert report["best"]["50"]["score"] == result["accuracy"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--by", "colour"), "--by"), (("--epsilons", "x"), "--epsilons"), (("--dataset", "mnist"), "no dots of mnist"),
     (("--evaluated-on", "test"), "there are those of digits (validation)"), (("--metric", "auroc"), "hold no auroc")],
)  # fmt: skip
def test_refusals(lipdp, histories, arguments, words):
    done = lipdp("pareto", histories, *arguments)
    assert done.code == 2
    assert words in " ".join(done.stderr.split())
