"""Commands of the first hour: doctor, new, completion; a plan that can't learn says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lipdp.cli import start


def test_the_doctor_finds_all_that_is_needed(lipdp, tmp_path, monkeypatch):
    monkeypatch.setenv("LIPDP_DATA", str(tmp_path))
    told = lipdp("doctor", "--json").json
    assert told["broken"] == []
    verdicts = {finding["what"]: finding for finding in told["findings"]}
    assert verdicts["noise"]["verdict"] == verdicts["accounting"]["verdict"] == verdicts["training"]["verdict"] == "ok"
    assert "digits" in verdicts["datasets"]["detail"]


def test_the_doctor_says_what_is_broken(lipdp, monkeypatch):
    def bad() -> str:
        raise RuntimeError("no coins left")

    monkeypatch.setitem(start._CHECKS, "noise", bad)
    monkeypatch.setattr(start, "_CORE", ("torch", "no-such-package"))
    done = lipdp("doctor")
    assert done.code == 2
    assert "RuntimeError: no coins left" in done.stdout
    assert "broken: no-such-package, noise" in done.stdout


def test_a_new_experiment_runs(lipdp, tmp_path):
    folder = tmp_path / "my-experiment"
    assert lipdp("new", folder).code == 0
    done = subprocess.run([sys.executable, "train.py", "1"], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "my-experiment: a private network" in (folder / "train.py").read_text()
    assert "run.ckpt" in {path.name for path in folder.iterdir()}
    assert f"cd '{tmp_path / 'two words'}'" in lipdp("new", tmp_path / "two words").stdout
    refused = lipdp("new", folder)
    assert refused.code == 2
    assert "nothing is overwritten" in refused.stderr


@pytest.mark.parametrize("shell", ["bash"])
def test_completion_for_shells(shell):
    script = subprocess.run(
        [sys.executable, "-c", "from lipdp.cli import main; import sys; sys.argv=['lipdp']; main()"],
        env={"_LIPDP_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin", **_python_path()},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert "lipdp" in script.stdout
    assert "_LIPDP_COMPLETE" in script.stdout


def _python_path() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}


def test_set_errors_name_the_choices(lipdp):
    for setting, wanted in (
        ("schedule=cosin", "constant, cosine, linear"),
        ("momentumm=0.5", "momentum"),
        ("options.hiden=3", "hidden"),
        ("momentum=much", "momentum must be a number"),
        ("momentum", "KEY=VALUE"),
    ):
        done = lipdp("plan", "digits", "--set", setting)
        assert done.code == 2, setting
        assert wanted in done.stderr, (setting, done.stderr)


def test_a_plan_prints_its_signal_to_noise(lipdp):
    assert "signal to noise over the run, at best" in " ".join(lipdp("plan", "digits", "--epsilon", "3").stdout.split())
