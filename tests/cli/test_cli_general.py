"""Help, version, start-up and the ways in which a command fails."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import lipdp as library
from lipdp import recipes
from lipdp.errors import LipdpWarning

COMMANDS = ("train", "plan", "bounds", "epsilon", "calibrate", "data", "recipes")
PACKAGE = Path(library.__file__).parent


def test_help_lists_the_commands(lipdp):
    shown = lipdp("--help")
    assert shown.code == 0
    assert all(command in shown.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example_and_json(lipdp, command):
    shown = lipdp(command, "--help")
    assert shown.code == 0
    assert f"Example: lipdp {command}" in shown.stdout
    assert "--json" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100


def test_version(lipdp):
    assert lipdp("--version").stdout == f"lipdp {library.__version__}\n"


def test_the_command_line_itself_does_not_import_torch():
    """With a bare package in place of lipdp/__init__.py, so that only what lipdp.cli imports counts."""
    code = f"""
import sys, types
package = types.ModuleType("lipdp")
package.__path__, package.__version__ = [{str(PACKAGE)!r}], "0"
sys.modules["lipdp"] = package
from lipdp.cli import app
try:
    app(["--help"])
except SystemExit as stop:
    assert stop.code == 0
heavy = {{"torch", "numpy", "scipy", "sklearn", "dp_accounting"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=600)


def test_python_dash_m(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lipdp", "train", "nope", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no recipe named 'nope'. cifar10, digits, fashion_mnist, mnist mean the best")
    assert "Traceback" not in done.stderr
    assert '"kind": "ConfigurationError"' in done.stdout


@pytest.mark.parametrize("arguments", [("plan", "digits", "--epsilon", "three"), ("plan",), ("trian", "digits"), ("plan", "--foo")])
def test_usage_errors(lipdp, arguments):
    plain, with_json = lipdp(*arguments), lipdp(*arguments, "--json")
    assert plain.code == with_json.code == 2
    assert "Usage:" in plain.stderr
    assert plain.stdout == ""
    assert with_json.json["kind"] == "UsageError"


def test_a_typing_error_gets_a_suggestion(lipdp):
    assert "Did you mean 'train'" in lipdp("trian").stderr


def _raise(error):
    def train(*_, **__):
        raise error

    return train


def test_interruption(lipdp, monkeypatch):
    monkeypatch.setattr(recipes, "train", _raise(KeyboardInterrupt()))
    stopped = lipdp("train", "digits", "--json")
    assert stopped.code == 130
    assert stopped.stderr == "interrupted\n"
    assert stopped.json == {"error": "interrupted", "kind": "KeyboardInterrupt"}


def test_unexpected_errors_are_one_line_unless_debugging(lipdp, monkeypatch):
    monkeypatch.setattr(recipes, "train", _raise(ZeroDivisionError("a\nb")))
    failed = lipdp("train", "digits")
    assert failed.code == 1
    assert failed.stderr.startswith("error: unexpected ZeroDivisionError: a b (LIPDP_DEBUG=1 shows")
    monkeypatch.setenv("LIPDP_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        lipdp("train", "digits")


def test_warnings_are_shown_once_as_a_line(lipdp, monkeypatch):
    def train(*_, **__):
        for _ in range(2):
            warnings.warn("look out", LipdpWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes, "train", train)
    assert lipdp("train", "digits").stderr == "warning: look out\ninterrupted\n"
