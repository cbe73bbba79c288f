"""`lipdp train`, end to end on the embedded digits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lipdp import models
from lipdp.cli.output import make_run_folder
from lipdp.errors import ConfigurationError
from lipdp.training import PrivacyPlan, ProgressBar

# The recipe as these tests know it, however it may be tuned.
FIXED = ("--batch-size", "256", "--delta", "1e-4", "--set", "options.hidden=64", "--set", "options.clip=0.5", "--epochs", "2")
# Given noise needs no search, and a short run is enough to see that all parts are connected.
SHORT = (*FIXED, "--noise-multiplier", "5")


def test_train_prints_the_plan_and_the_accuracy(lipdp):
    done = lipdp("train", "digits-mlp", *FIXED, "--epochs", "0.5", "--epsilon", "1", "--seed", "1")
    assert done.code == 0
    assert "Privacy plan" in done.stdout
    assert "3.weight" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    last = done.stdout.splitlines()[-1]
    assert last.startswith("test accuracy ")
    assert "% with (ε = 1.000, δ = 0.0001), 3 steps in" in last
    assert last.endswith(", clipless")
    assert "3/3" in done.stderr  # the bar
    assert "3/3" not in done.stdout


def test_train_from_the_shell_in_json(tmp_path):
    command = [sys.executable, "-m", "lipdp", "train", "digits", *SHORT, "--seed", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing else
    assert 0.15 < result["accuracy"] <= 1
    assert 0 < result["epsilon"] < 10
    expected = {
        "delta": 1e-4,
        "steps": 12,
        "method": "clipless",
        "recipe": "digits-mlp",
        "seed": 3,
        "noise_multiplier": 5.0,
        "private": True,
    }
    assert result.items() >= expected.items()
    assert result["seconds"] > 0
    assert (result["dataset"], result["evaluated_on"]) == ("digits", "test")
    assert list(tmp_path.iterdir()) == []


def test_settings_seed_and_output(lipdp, tmp_path):
    common = ("train", "digits-mlp", *SHORT, "--reproducible", "5", "--set", "options.hidden=32", "--set", "momentum=0.5", "--json")
    folder = tmp_path / "a" / "run"
    first = lipdp(*common, "--output", folder).json
    again = lipdp(*common).json
    assert first["accuracy"] == again["accuracy"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(first["files"])
    plan = PrivacyPlan.from_json((folder / "plan.json").read_text())
    assert plan.steps == 12
    assert json.loads((folder / "history.json").read_text())["metrics"]["step"][-1] == 12
    saved = json.loads((folder / "result.json").read_text())
    assert saved["accuracy"] == first["accuracy"]
    assert "seed" not in saved
    assert saved["private"] is first["private"] is False
    model = models.create("mlp", input_shape=(1, 8, 8), classes=10, hidden=(32,), clip=0.5)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    refused = lipdp(*common, "--output", folder)
    assert refused.code == 2
    assert "already holds plan.json" in refused.stderr


def test_a_seed_is_of_the_weights_and_a_reproducible_run_says_that_it_is_not_private(lipdp):
    common = ("train", "digits-mlp", *SHORT)
    said = lipdp(*common, "--reproducible", "5").stdout
    assert "NOT PRIVATE" in said.splitlines()[-1]
    first, again = (lipdp(*common, "--seed", "5", "--json").json for _ in range(2))
    assert first["private"] is again["private"] is True
    assert "NOT PRIVATE" not in lipdp(*common, "--seed", "5").stdout


def test_validation_fraction_leaves_the_test_set_alone(lipdp):
    done = lipdp("train", "digits-mlp", *SHORT, "--validation-fraction", "0.2", "--batch-size", "200", "--epochs", "0.5")
    assert done.code == 0
    assert "on 1,150 records of digits" in done.stdout
    assert "Poisson batches of 200 expected out of 1,150" in done.stdout
    assert "validation accuracy" in done.stdout.splitlines()[-1]


def test_both_budget_and_noise_give_the_longest_run(lipdp):
    done = lipdp("train", "digits", "--epsilon", "0.6", "--noise-multiplier", "4", "--batch-size", "256", "--json").json
    assert done["epsilon"] <= 0.6
    assert 1 <= done["steps"] < 30


def test_interrupted_and_resumed_is_the_same_run(lipdp, tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    common = ("train", "digits-mlp", *SHORT, "--reproducible", "7", "--json")
    whole = lipdp(*common).json

    def interrupt(self, run, row):
        if row["step"] > 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "on_evaluation", interrupt)
        stopped = lipdp(*common, "--checkpoint", file)
    assert stopped.code == 130
    assert f"the same command with --resume continues from '{file}'" in stopped.stderr
    refused = lipdp(*common, "--checkpoint", file)
    assert refused.code == 2
    assert refused.json["kind"] == "CheckpointError"
    resumed = lipdp(*common[:-1], "--checkpoint", file, "--resume")
    assert resumed.code == 0
    assert "resumed after 4 of 12 steps" in resumed.stdout
    finished = lipdp(*common, "--checkpoint", file, "--resume")  # nothing is left to do
    same = ("accuracy", "epsilon", "steps")
    assert [finished.json[key] for key in same] == [whole[key] for key in same]
    other = lipdp("train", "digits-mlp", *SHORT, "--epochs", "3", "--checkpoint", file, "--resume")
    assert other.code == 2
    assert "another plan" in other.stderr


def test_corrupt_checkpoint(lipdp, tmp_path):
    file = tmp_path / "run.ckpt"
    file.write_bytes(b"lipdp checkpoint 1\n" + bytes(100))
    refused = lipdp("train", "digits-mlp", *SHORT, "--checkpoint", file, "--resume")
    assert refused.code == 2
    assert refused.stderr.startswith(f"error: the checkpoint '{file}' is damaged")
    assert file.stat().st_size == 119


def test_resume_without_a_checkpoint_says_so(lipdp, tmp_path):
    assert "--resume needs --checkpoint" in lipdp("train", "digits", "--resume").stderr
    started = lipdp("train", "digits-mlp", *SHORT, "--resume", "--checkpoint", tmp_path / "new.ckpt", "--json")
    assert started.code == 0
    assert started.stderr.startswith("warning: there is no checkpoint at")
    assert (tmp_path / "new.ckpt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epsilon", "0"), "epsilon is 0.0: it has to be a finite number above 0"),
        (("--epsilon", "-1"), "epsilon is -1.0: it has to be a finite number above 0"),
        (("--epsilon", "nan"), "epsilon is nan: it has to be a finite number above 0"),
        (("--noise-multiplier", "inf"), "noise_multiplier is inf: it has to be a finite number above 0"),
        (("--delta", "2"), "delta is 2.0: it has to be a finite number, above 0 and below 1"),
        (("--epochs", "-3"), "epochs is -3.0: it has to be a finite number, above 0"),
        (("--batch-size", "5000"), "larger than the 1438 training records"),
        (("--set", "batch_size=1439"), "larger than the 1438 training records"),
        (("--batch-size", "0"), "batch_size is 0: it has to be a whole number, at least 1"),
        (("--learning-rate", "nan"), "learning_rate is nan: it has to be a finite number, above 0"),
        (("--set", "momentum=1"), "momentum is 1.0: it has to be a finite number, at least 0 and below 1"),
        (("--set", "momentum"), "--set takes KEY=VALUE"),
        (("--set", "speed=3"), "a recipe has no setting speed"),
        (("--set", "epochs=many"), "epochs must be a number, not 'many'"),
        (("--set", "schedule=steps"), "schedule must be one of constant, cosine, linear"),
        (("--set", "options=3"), "one by one"),
        (("--set", "options.width=3"), "does not accept these options"),
        (("--set", "options.hidden=63"), "hidden widths must be even"),
        (("--set", "dataset=cats"), "there is no dataset named 'cats'"),
        (("--epsilon", "3", "--noise-multiplier", "1", "--epochs", "2"), "give two of"),
        (("--validation-fraction", "1.5"), "--validation-fraction must lie between 0 and 1"),
        (("--device", "abacus"), "--device abacus can't be used here: "),
        (("--set", "options.hidden=abc"), "a value is not of the option's type (hidden: "),
        (("--output", str(Path(__file__))), "a file is in its place"),
        (("--microbatch-size", "0", *SHORT), "microbatch_size must be"),
        (("--seed", str(2**70)), "--seed must be below"),
        (("--reproducible", str(2**70)), "--reproducible must be below"),
        (("--reproducible", "1", "--seed", "1"), "leave --seed out"),
        (("--output", "/dev/null/run"), "a file is in its place"),
    ],
)
def test_refusals(lipdp, arguments, message):
    refused = lipdp("train", "digits-mlp", *arguments, "--json")
    assert refused.code == 2
    assert refused.stderr.startswith("error: ")
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert message in refused.json["error"]


def test_missing_data(lipdp, tmp_path, monkeypatch):
    from lipdp.data import published

    def offline(dataset, remote, path, **_):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(published, "ensure", offline)
    refused = lipdp("train", "mnist", "--data", tmp_path)
    assert refused.code == 2
    assert "Network is unreachable" in refused.stderr


def test_budget_too_small(lipdp):
    refused = lipdp("train", "digits", "--epsilon", "0.01", "--noise-multiplier", "0.5", "--json")
    assert refused.code == 3
    assert refused.json["kind"] == "BudgetError"
    assert "Even one step costs" in refused.stderr


@pytest.mark.parametrize("name", ["model.pt", "schema.json", "about.json", "report.html", "report.md"])
def test_no_file_is_overwritten(name, tmp_path):
    (tmp_path / name).write_text("somebody's own")
    with pytest.raises(ConfigurationError, match=f"already holds {name}"):
        make_run_folder(tmp_path)
    make_run_folder(tmp_path, resume=True)
    assert (tmp_path / name).read_text() == "somebody's own"
