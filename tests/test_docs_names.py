"""What the pages name is there: commands with their options, scripts, names in lipdp, files."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import lipdp
from lipdp.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"))]
EARLIER = {f"earlier/{name}.jsonl" for name in ("cpu", "cpu_cifar10", "unfinished_lenet_cifar10")}  # beside the table they tell of
MADE_UP = {"run/report.md", "found/grid.toml", *EARLIER}  # a reader's own


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _commands(text: str, first: str) -> Iterator[list[str]]:
    """The words of what starts with ``first``, in blocks and in lines."""
    blocks = [line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for line in block.splitlines()]
    inline = re.findall(rf"`({first} [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [*blocks, *inline]:
        for part in re.split(r"&&|;", re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ")):
            if part.strip().startswith(f"{first} "):
                yield shlex.split(part.replace("'", "").replace('"', ""))[1:]


def _wrong_options(words: list[str]) -> list[str]:
    """Of a command of lipdp: its name, or options that it has not."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[:1]
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("--") and word.split("=")[0] not in {*known, "--install-completion"}]


def test_commands_are_as_written() -> None:
    found = [(page.name, words) for page in PAGES for words in _commands(_text(page), "lipdp")]
    assert len(found) > 60
    assert not {(page, *wrong) for page, words in found if (wrong := _wrong_options(words))}


@pytest.mark.parametrize("words", ["train digits --epsilom 3", "trian digits", "budget creat x"])
def test_what_would_be_wrong_is_found(words: str) -> None:
    assert _wrong_options(words.split())


def test_scripts_take_the_options_that_are_written() -> None:
    seen, wrong = 0, set()
    for page in PAGES:
        for name, rest in re.findall(r"python3? ((?:\w+/)+\w+\.py)([^`\n#]*)", _text(page)):
            script = next((place / name for place in (ROOT, ROOT / "benchmarks") if (place / name).exists()), None)
            if script is None:
                wrong.add((page.name, name))
                continue
            code = "".join(file.read_text(encoding="utf-8") for file in (script, *script.parent.glob("_*.py")))
            wrong |= {
                (page.name, name, option) for option in re.findall(r"(?<!\S)--[\w-]+", rest) if option not in (code + "--help")
            }
            seen += 1
    assert seen > 50
    assert not wrong


def _is_there(name: str) -> bool:
    value, parts = lipdp, name.split(".")
    for place, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(".".join(parts[:place]))
        except ImportError:
            return False
    return True


def test_names_are_there() -> None:
    named = {(page.name, name) for page in PAGES for name in re.findall(r"(?<![\w/])lipdp(?:\.[A-Za-z_]\w*)+", _text(page))}
    assert len(named) > 150
    assert not {(page, name) for page, name in named if not _is_there(name) and name != "lipdp.md"}


def test_files_are_there() -> None:
    places = [ROOT / part for part in ("", "tests", "benchmarks", "benchmarks/results", "src", "src/lipdp", "docs")]
    pattern = re.compile(r"(?<![\w./-])(?!\.)[\w-]+(?:/[\w.-]+)+\.(?:py|jsonl|json|md|toml)\b")
    named = {(page.name, name) for page in PAGES for name in pattern.findall(_text(page)) if name not in MADE_UP}
    assert len(named) > 80
    assert not {(page, name) for page, name in named if not any((place / name).exists() for place in places)}
