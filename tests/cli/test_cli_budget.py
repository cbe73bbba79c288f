"""`lipdp budget`, and the commands that charge one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lipdp.privacy import Budget, PrivateRun
from lipdp.recipes.private_tuning import tune_privately
from tests.mechanisms.common import compared

SHORT = ("--batch-size", "256", "--delta", "1e-4", "--set", "options.hidden=64", "--epochs", "1", "--noise-multiplier", "2.5")


@pytest.fixture
def file(lipdp, tmp_path):
    path = tmp_path / "digits.budget"
    done = lipdp("budget", "create", path, "--epsilon", "1", "--delta", "1e-5", "--dataset", "digits", "--json")
    assert done.code == 0, done.stderr
    assert done.json["spent"] == 0
    assert done.json["remaining"] == 1
    return path


def test_create_show_check_export(lipdp, file, tmp_path):
    again = lipdp("budget", "create", file, "--epsilon", "9", "--delta", "1e-5", "--dataset", "digits")
    assert again.code == 2
    assert "begun once" in again.stderr
    Budget(file).charge(0.25, "a [mean] of ages")
    shown = lipdp("budget", "show", file)
    assert shown.code == 0
    assert "a [mean] of ages" in shown.stdout
    assert "ε = 0.25" in shown.stdout
    assert "adding or removing one record" in shown.stdout
    assert lipdp("budget", "show", file, "--json").json["charges"] == 1
    assert lipdp("budget", "check", file).stdout.startswith(f"'{file}' is whole: 1 entries")
    assert lipdp("budget", "check", file, "--json").json["whole"] is True
    exported = lipdp("budget", "export", file).json
    assert exported["entries"][0]["what"] == "a [mean] of ages"
    assert exported["events"] == [{"event": {"type": "pure", "epsilon": "1/4", "adjacency": None}, "count": 1}]
    target = tmp_path / "export.json"
    assert lipdp("budget", "export", file, "--output", target).code == 0
    assert json.loads(target.read_text())["dataset"] == "digits"
    assert lipdp("budget", "export", file, "--output", target).code == 2


def test_a_run_that_was_resumed_is_one_charge(lipdp, file):
    run = PrivateRun(0.01, ((50.0, 10),))
    for released in (4, 7, 10):
        Budget(file).reserve("a", run, "a training run").close(released)
    Budget(file).reserve("b", run, "another run").close(3)
    assert lipdp("budget", "show", file, "--json").json["charges"] == 2
    shown = lipdp("budget", "show", file).stdout
    assert [shown.count(text) for text in ("a training run", "10 released", "another run", "3 released")] == [1, 1, 1, 1]


def test_damage_is_an_exit_code(lipdp, file):
    Budget(file).charge(0.25)
    file.write_bytes(b"\n".join(file.read_bytes().splitlines()[:1]) + b"\n")
    for command in ("show", "check", "export"):
        refused = lipdp("budget", command, file, "--json")
        assert refused.code == 2
        assert refused.json["kind"] == "DataError"
        assert "damaged" in refused.stderr
    missing = lipdp("budget", "show", file.parent / "none")
    assert missing.code == 2
    assert "lipdp budget create" in missing.stderr


def test_training_pays_until_it_is_spent(lipdp, file):
    common = ("train", "digits-mlp", *SHORT, "--json", "--budget", file)
    first = lipdp(*common).json
    assert first["budget"]["spent"] == pytest.approx(Budget(file).spent)
    assert 0 < first["budget"]["spent"] < 1
    Budget(file).charge(0.98 * first["budget"]["remaining"], "a mean")
    done = lipdp(*common)
    assert done.code == 3
    assert done.json["kind"] == "BudgetError"
    assert "dataset 'digits' has" in done.stderr
    assert [entry["kind"] for entry in Budget(file).entries()] == ["run", "end", "charge"]
    shown = lipdp("budget", "show", file).stdout
    assert "a training run" in shown
    assert "6 steps, 6 released" in shown


def test_mechanisms_pay_the_same_account(lipdp, file, tmp_path):
    compared("mean").chosen.save(tmp_path / "mean.mechanism")
    (tmp_path / "data.csv").write_text("age\n" + "".join(f"{i % 10}\n" for i in range(20)))
    words = ("mechanism", "release", tmp_path / "mean.mechanism", tmp_path / "data.csv", "--column", "age", "--json")
    said = lipdp(*words, "--budget", file).json
    assert said["remaining"] == pytest.approx(1 - said["epsilon"], abs=1e-4)
    assert lipdp(*words, "--budget", file).code == 3
    assert lipdp(*words).code == 2
    assert lipdp(*words, "--budget", file, "--no-budget").code == 2
    assert lipdp(*words, "--no-budget").code == 0
    assert lipdp(*words, "--budget", tmp_path / "none").code == 2
    assert lipdp(*words, "--ledger", tmp_path / "l", "--budget", "many", "--dataset", "d").code == 2
    assert lipdp(*words, "--budget", file, "--dataset", "d").code == 2
    assert len(Budget(file).entries()) == 1


def test_private_tuning_pays_before_its_first_run(lipdp, file, monkeypatch):
    refused = lipdp("sweep", "digits", "--trials", "2", "--budget", file)
    assert refused.code == 2
    assert "--private-tuning" in refused.stderr
    import lipdp.recipes.private_tuning as tuning

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_accuracy", stop)
    monkeypatch.setattr(tuning.Repetitions, "draw", lambda self, generator: 1)
    common = ("sweep", "digits-mlp", "--private-tuning", "--trials", "2", "--budget", file, "--set", "delta=1e-6")
    assert lipdp(*common, "--epsilon", "0.8").code == 130
    (entry,) = Budget(file).entries()
    assert entry["what"] == "private tuning of digits-mlp"
    assert entry["events"][0][0]["type"] == "approximate"
    assert 0.5 < Budget(file).spent <= 0.8
    assert lipdp(*common, "--epsilon", "0.8").code == 3
    assert tune_privately.__kwdefaults__["budget"] is None


def waits_for(process: int, number: int) -> bool:
    """Whether it has a handler of its own for this signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc, which tells when the handler is there")
def test_a_signal_ends_the_run_with_the_command_that_continues_it(tmp_path: Path):
    """The whole way: a process of its own, a signal in the middle, and the command that it prints."""
    number = signal.SIGTERM
    steps = ("--batch-size", "64", "--delta", "1e-4", "--epochs", "600", "--noise-multiplier", "5", "--seed", "3", "--json")
    command = [sys.executable, "-m", "lipdp", "train", "digits-mlp", *steps, "--checkpoint", "run.ckpt"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    while started.poll() is None and not ((tmp_path / "run.ckpt").exists() and waits_for(started.pid, number)):
        time.sleep(0.05)
    os.kill(started.pid, number)
    stdout, stderr = started.communicate(timeout=600)
    assert started.returncode == 128 + number, stderr
    said = json.loads(stdout.splitlines()[-1])
    assert said["kind"] == "KeyboardInterrupt"
    assert "train digits-mlp" in said["error"]
    assert said["error"].endswith("--checkpoint run.ckpt --resume")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left in (["run.ckpt", "run.ckpt.book"], ["run.ckpt", "run.ckpt.book", "run.ckpt.previous"])
