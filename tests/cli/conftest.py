import json
from typing import Any

import pytest
from typer.testing import CliRunner

from lipdp.cli import app


class Outcome:
    """What a command did: its exit code and its two streams."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        return found


@pytest.fixture
def lipdp(monkeypatch):
    """Run a command in this process, at 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("LIPDP_DEBUG", raising=False)

    def run(*arguments: Any) -> Outcome:
        result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="lipdp")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run
