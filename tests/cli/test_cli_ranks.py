"""``lipdp train --nproc``: one command, several processes, one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lipdp.cli.options import start_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def test_the_command_of_the_ranks_is_this_one_without_nproc(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["lipdp", "train", "digits", "--nproc", "3", "--epsilon", "2", "--nproc=3"])
    monkeypatch.setattr(subprocess, "run", lambda command, check: seen.append(command) or subprocess.CompletedProcess(command, 7))
    assert start_ranks(3) == 7
    launcher, words = seen[0][: seen[0].index("lipdp")], seen[0][seen[0].index("lipdp") :]
    assert "--nproc-per-node=3" in launcher
    assert words == ["lipdp", "train", "digits", "--epsilon", "2"]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lipdp", "train", "digits", "--device", "cpu", "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)


@pytest.mark.skipif(not os.environ.get("LIPDP_SLOW"), reason="starts five processes; set LIPDP_SLOW=1")
def test_two_processes_train_what_one_does(tmp_path):
    settings = ["--noise-multiplier", "1", "--epochs", "0.3", "--reproducible", "1", "--batch-size", "64"]
    together = _run("--nproc", "2", *settings, "--checkpoint", str(tmp_path / "run"))
    assert together.returncode == 0, together.stderr
    lines = [line for line in together.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, "only the first rank prints"
    report = json.loads(lines[0])
    assert report["processes"] == 2
    assert (tmp_path / "run").exists()
    alone = json.loads(_run(*settings).stdout.splitlines()[-1])
    assert report["epsilon"] == alone["epsilon"]
    assert report["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
