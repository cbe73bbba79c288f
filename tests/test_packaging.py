"""What is shipped: one version everywhere, and a wheel that works where nothing else is. The build is run where "
"LIPDP_PACKAGING is set."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lipdp

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert project["version"] == lipdp.__version__ == cited.group(1)


@pytest.mark.skipif(not os.environ.get("LIPDP_PACKAGING"), reason="builds and installs: set LIPDP_PACKAGING to run it")
def test_a_wheel_and_a_source_archive_work_in_a_clean_environment(tmp_path) -> None:
    def run(*command: str) -> str:
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing of this checkout
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1200, env=alone)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("lipdp-*.whl")
    run(sys.executable, "-m", "venv", str(tmp_path / "env"))
    python = str(tmp_path / "env" / "bin" / "python")
    install = (python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))  # the versions of every other test
    run(*install, str(wheel))
    told = run(str(tmp_path / "env" / "bin" / "lipdp"), "train", "digits", "--epsilon", "3", "--output", "run")
    assert "test accuracy" in told
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")  # style.css is in the wheel
    assert "lipdp[plots]" in run(str(tmp_path / "env" / "bin" / "lipdp"), "doctor", "--json")  # without extras, and it says so

    # The source archive, with extras, in the place of the wheel.
    run(*install, "build", "hatchling")
    run(python, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (archive,) = tmp_path.glob("lipdp-*.tar.gz")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "lipdp")
    run(*install, f"lipdp[plots,sweep] @ {archive.as_uri()}")
    told = run(str(tmp_path / "env" / "bin" / "lipdp"), "doctor", "--json")
    assert "lipdp[plots]" not in told
    assert "lipdp[sweep]" not in told
    run(python, "-c", "import lipdp, matplotlib, optuna; assert 'env' in lipdp.__file__")
