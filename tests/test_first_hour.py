"""The first hour of a new user, from a clean clone: each piece by itself, so that a failure says which. Set LIPDP_HOUR to run it.

``LIPDP_HOUR=1`` takes the environment that runs the tests, on the clone's source; ``LIPDP_HOUR=clean`` lets `make` build one in the
clone, as a new user would (it downloads). The report's screenshot is kept in LIPDP_SCREENSHOTS, if that is set.
"""

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

import lipdp

pytestmark = pytest.mark.skipif(not os.environ.get("LIPDP_HOUR"), reason="minutes: set LIPDP_HOUR to run it")

ROOT = Path(__file__).parent.parent
CLEAN = os.environ.get("LIPDP_HOUR") == "clean"
SEEDS = (0, 1, 2)

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

PICTURES = """
import sys, lipdp
model = lipdp.PrivateClassifier(epsilon=3.0).fit("pictures/train")
print(model.report())
accuracy = model.score("pictures/test")
assert accuracy > 0.9, accuracy
"""


MEANS = """
import contextlib, io, json, statistics, torch, lipdp
from lipdp import recipes
block, reached, demo = compile(open("block.py", encoding="utf-8").read(), "README.md", "exec"), [], []
for seed in range(100):
    torch.manual_seed(seed)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(block, {"__name__": "example"})
    reached.append(float(told.getvalue().splitlines()[-1].split()[1]))
    demo.append(recipes.train(recipes.get("digits"), epsilon=3.0, seed=seed).accuracy)
print(json.dumps([statistics.mean(reached), statistics.mean(demo)]))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a new user gets."""
    place = tmp_path_factory.mktemp("first") / "lipdp"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(place)], check=True, capture_output=True)
    return place


def _python(clone: Path) -> str:
    return str(clone / ".venv" / "bin" / "python") if CLEAN else sys.executable


def _environment(clone: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "" if CLEAN else str(clone / "src")}


def _run(clone: Path, *command: str, folder: Path | None = None, **changes: str) -> str:
    environment = _environment(clone) | changes
    done = subprocess.run(command, cwd=folder or clone, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def _make(clone: Path, target: str, **changes: str) -> str:
    """`make TARGET` of the clone; without building an environment, where there is one."""
    ready = Path(sys.executable).parent.parent
    given = [] if CLEAN else [f"VENV={ready}", "-o", f"{ready}/.core", "-o", f"{ready}/.dev"]
    return _run(clone, "make", target, *given, **changes)


def _lipdp(clone: Path, folder: Path, *words: str) -> dict:
    return json.loads(_run(clone, _python(clone), "-m", "lipdp", *words, "--json", folder=folder).splitlines()[-1])


def test_make_demo(clone) -> None:
    told = re.search(r"test accuracy ([\d.]+)%", _make(clone, "demo"))
    assert told is not None
    assert float(told.group(1)) > 90


def test_make_test(clone) -> None:
    """The command works; all of what it runs is what runs this test."""
    assert "passed" in _make(clone, "test", JOBS="0", PYTEST_ADDOPTS="-p no:cacheprovider tests/test_names.py tests/test_fields.py")


def test_the_example_of_the_readme(clone, tmp_path) -> None:
    """Within a point of the demo. Three seeds as a user would run both; the means over 100 seeds each, in one process.

    One seed has a deviation of 0.010 for both, and 40 seeds gave 0.9437 (example) and 0.9491 (demo): a gap of 0.0054 ± 0.0022. Were
    that the true gap, the means of three would be more than a point apart in 3 cases of 10 by chance, those of 100 in less than
    1 of 1,000.
    """
    (block,) = re.findall(r"^```python\n(.*?)^```", (clone / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = f"import sys, torch\ntorch.manual_seed(int(sys.argv[1]))\n{block}"
    last = [_run(clone, _python(clone), "-c", script, str(seed), folder=tmp_path).splitlines()[-1] for seed in SEEDS]
    demo = [_lipdp(clone, tmp_path, "train", "digits", "--epsilon", "3", "--seed", str(seed))["accuracy"] for seed in SEEDS]
    assert all(float(line.split()[0]) <= 3 for line in last)
    assert min(demo + [float(line.split()[1]) for line in last]) > 0.9
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    found = json.loads(_run(clone, _python(clone), "-W", "ignore", "-c", MEANS, folder=tmp_path).splitlines()[-1])
    print("means over 100 seeds, example and demo:", found)  # shown by pytest -s
    assert found[0] > found[1] - 0.01, found


def test_a_csv_with_mixed_columns(clone, tmp_path) -> None:
    assert "**Guarantee**: ε = 1" in _run(clone, _python(clone), "-c", TABLE, folder=tmp_path)


def test_a_folder_of_images(clone, tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, records in zip(("train", "test"), lipdp.data.load("digits")[:2], strict=True):
        for number, (pixels, label) in enumerate(zip(*records.tensors, strict=True)):
            if int(label) < 3:
                folder = tmp_path / "pictures" / part / f"class {int(label)}"
                folder.mkdir(parents=True, exist_ok=True)
                image.fromarray((pixels[0] * 255 / pixels.max()).byte().numpy()).save(folder / f"{number}.png")
    assert "a private linear head on fixed public features" in _run(clone, _python(clone), "-c", PICTURES, folder=tmp_path)


def test_a_resnet_with_batch_normalisation(clone, tmp_path) -> None:
    told = _run(clone, _python(clone), str(clone / "examples" / "batchnorm_resnet.py"), folder=tmp_path)
    assert "as it is: layer '1' (BatchNorm2d) can't be trained" in told
    assert "GroupNorm" in told
    assert float(re.search(r"test accuracy ([\d.]+) %", told).group(1)) > 75


def test_the_mnist_example_of_opacus_ported(clone, tmp_path) -> None:
    if not any("mnist" in folder.name for folder in Path(os.environ.get("LIPDP_DATA", ".")).iterdir()):
        pytest.skip("MNIST is not in LIPDP_DATA")
    words = ["--records", "12000", "--batch-size", "600", "--steps", "80"]
    told = _run(clone, _python(clone), str(clone / "examples" / "opacus_mnist.py"), *words, folder=tmp_path)
    assert "ε = 3" in told
    assert float(re.search(r"test accuracy ([\d.]+) %", told).group(1)) > 85


def test_interrupted_and_resumed(clone, tmp_path) -> None:
    settings = ["--noise-multiplier", "20", "--epochs", "600", "--checkpoint", "run.ckpt"]
    words = [_python(clone), "-m", "lipdp", "train", "digits", *settings]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=_environment(clone),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where a shell runs this in the background
    )
    while not (tmp_path / "run.ckpt.lock").exists() and process.poll() is None:  # it has begun
        time.sleep(0.05)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 130, told[-2000:]
    assert "--resume" in told
    again = _run(clone, *words, "--resume", folder=tmp_path)
    resumed = re.search(r"resumed after (\d+) of (\d+) steps", again)
    assert resumed is not None
    done, planned = map(int, resumed.groups())
    assert 0 < done < planned
    assert _lipdp(clone, tmp_path, "train", "digits", *settings, "--resume")["steps"] == planned


def test_the_report_in_a_browser(clone, tmp_path) -> None:
    from tests.report.browser import chromium, look_at, screenshot

    _lipdp(clone, tmp_path, "train", "digits", "--epsilon", "3", "--output", "run")
    assert _lipdp(clone, tmp_path, "report", "run")["files"] == ["report.html", "report.md"]
    chromium()
    page = tmp_path / "run" / "report.html"
    seen = look_at(page.read_text(encoding="utf-8"), tmp_path, 400)
    assert seen["errors"] == []
    picture = Path(os.environ.get("LIPDP_SCREENSHOTS", str(tmp_path))).resolve() / "report.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    screenshot(page, picture)
    assert picture.stat().st_size > 20_000
