"""The stages for a lent GPU end at once where something is missing; readings of the lock-box are counted by what they are of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lipdp import recipes

ACCURACY = Path(__file__).parents[2] / "benchmarks/accuracy"
pytestmark = pytest.mark.skipif(not ACCURACY.exists(), reason="a distribution without benchmarks")
READ = "fashion-mnist-drawn-small-fading-eps3"


@pytest.fixture
def session(tmp_path):
    """Calls the script where python3 is ``python`` (a line of shell), with folders of its own."""

    def call(*stages: str, python: str = "exit 7") -> subprocess.CompletedProcess[str]:
        programs = tmp_path / "programs"
        programs.mkdir(exist_ok=True)
        fake = programs / "python3"
        fake.write_text(f"#!/bin/sh\n{python}\n")
        fake.chmod(0o755)
        folders = {"KEEP": tmp_path / "keep", "OUT": tmp_path / "out", "LIPDP_DATA": tmp_path / "data"}
        surroundings = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LIMIT": "60"}
        surroundings |= {name: str(folder) for name, folder in folders.items()}
        command = ["bash", str(ACCURACY / "session.sh"), *stages]
        return subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=50, check=False)

    return call


@pytest.mark.parametrize("stage", ["learn", "learned", "search", "cifar10", "clothes", "digits", "small", "own"])
def test_a_stage_refuses_a_machine_that_was_not_begun_on(session, tmp_path, stage):
    done = session(stage, python=f"touch {tmp_path}/called")
    assert done.returncode == 3
    assert "'begin' has not been run here" in done.stderr
    assert not (tmp_path / "called").exists()


def test_another_machine_with_the_same_folder_is_refused(session, tmp_path):
    assert session("begin", python="exit 0").returncode == 0
    (tmp_path / "keep/machine").write_text("another\n")
    assert session("small", python="exit 0").returncode == 3


def test_what_is_missing_ends_the_call_before_the_next_stage(session, tmp_path):
    bare = session("begin", "small")
    assert bare.returncode == 1
    assert "lacks something" in bare.stderr
    assert not (tmp_path / "keep/machine").exists()
    assert session("begin", python="exit 0").returncode == 0
    for stages in (("learn", "learned", "cifar10"), ("cifar10",), ("small", "own"), ("digits", "own"), ("search", "own"), ("own",)):
        failed = session(*stages)  # every program exits with 7
        assert failed.returncode == 1, stages
        assert "FAILED" in failed.stderr
        assert "own done" not in failed.stdout
    assert "without a network" in session("learned", python="exit 0").stderr  # a lesson that says it is done and is not


def test_seeds_count_as_read_with_these_settings_and_networks_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ACCURACY))
    monkeypatch.delitem(sys.modules, "lockbox", raising=False)
    import lockbox

    recipe = recipes.get(READ)
    assert lockbox.seeds_in(lockbox.LOG, recipe) == {0, 1, 2}
    assert lockbox.seeds_in(lockbox.LOG, recipe.but(learning_rate=1.0)) == set()
    line = next(line for line in map(json.loads, lockbox.LOG.read_text().splitlines()) if line["recipe"] == READ)
    for change in ({"networks": {"small": "another"}}, {"settings": "others"}, {"recipe": "another"}):
        (tmp_path / "log").write_text(json.dumps(line | change) + "\n")
        assert lockbox.seeds_in(tmp_path / "log", recipe) == set()
    assert lockbox.seeds_in(tmp_path / "none", recipe) == set()
