"""The first hour of a new user, from outside: commands in a folder of their own. Run where LIPDP_HOUR is set (minutes).

`make demo` is `lipdp train digits --epsilon 3` in an environment of its own; the README's example has its test in
test_markdown_examples.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("LIPDP_HOUR"), reason="minutes: set LIPDP_HOUR to run it")

TABLE = """
import csv, numpy as np, lipdp
from lipdp.estimators import categorical, numeric
draw = np.random.default_rng(0)
rows = [[int(draw.integers(18, 90)), draw.choice(["clerk", "nurse"]), float(draw.uniform(0, 60))] for _ in range(1000)]
with open("people.csv", "w", newline="") as file:
    csv.writer(file).writerows([["age", "job", "hours"], *rows])
with open("people.csv", newline="") as file:
    header, *read = csv.reader(file)
x = np.array(read, dtype=object)
y = np.array(["old" if row[0] > 54 else "young" for row in rows])
schema = [numeric(18, 90), categorical(["clerk", "nurse"]), numeric(0, 60)]
model = lipdp.PrivateClassifier(1.0, schema=schema).fit(x[:800], y[:800])
assert model.score(x[800:], y[800:]) > 0.8, model.score(x[800:], y[800:])
print(model.report())
"""


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _lipdp(folder: Path, *words: str) -> dict:
    return json.loads(_run(folder, sys.executable, "-m", "lipdp", *words, "--json").splitlines()[-1])


def test_the_demo_and_its_report(tmp_path) -> None:
    demo = _lipdp(tmp_path, "train", "digits", "--epsilon", "3", "--output", "run")
    assert demo["accuracy"] > 0.9
    assert demo["epsilon"] <= 3
    assert _lipdp(tmp_path, "report", "run")["files"] == ["report.html", "report.md"]
    assert _lipdp(tmp_path, "certify", "run")
    if not any(map(shutil.which, ("chromium", "google-chrome"))):
        pytest.skip("no Chromium is installed: the report was not looked at in a browser")
    from tests.report.browser import screenshot

    picture = Path(os.environ.get("LIPDP_SCREENSHOTS", str(tmp_path))).resolve() / "report.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    screenshot(tmp_path / "run" / "report.html", picture)
    assert picture.stat().st_size > 20_000


def test_a_csv_with_mixed_columns(tmp_path) -> None:
    assert "**Guarantee**: ε = 1" in _run(tmp_path, sys.executable, "-c", TABLE)


def test_interrupted_and_resumed(tmp_path) -> None:
    words = [
        sys.executable,
        "-m",
        "lipdp",
        "train",
        "digits",
        "--noise-multiplier",
        "20",
        "--epochs",
        "1000",
        "--checkpoint",
        "run.ckpt",
    ]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if (tmp_path / "run.ckpt").exists():
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told[-2000:]
    assert "--resume" in told
    resumed = subprocess.run([*words, "--resume", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    result = json.loads(resumed.stdout.splitlines()[-1])
    assert result["steps"] == 1438
