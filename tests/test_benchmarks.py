"""benchmarks/run.py knows all that is there, and draws from committed results what docs/ shows."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from tests.doc_tools import load_tool

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    if not BENCHMARKS.exists():
        pytest.skip("a distribution without benchmarks")
    spec = importlib.util.spec_from_file_location("benchmarks_run", BENCHMARKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_answers_a_question_and_says_what_it_does(runner: ModuleType) -> None:
    folders = {path.parent.name for path in BENCHMARKS.glob("*/*.py")}
    assert folders == set(runner.QUESTIONS)
    assert [path.name for path in BENCHMARKS.glob("*.py")] == ["run.py"]
    page = (BENCHMARKS / "README.md").read_text(encoding="utf8")
    for name, about in runner.scripts().items():
        assert len(about) > 20, name
        assert f"{name.split('/')[0]}/" in page
        end = name.rpartition("_")[2]  # `out_of_the_box.py`, `…_pilots.py`
        assert f"`{name.split('/')[1]}.py`" in page or f"/{name.split('/')[1]}.py`" in page or f"…_{end}.py`" in page, name


def test_figures_have_their_data_and_their_place(runner: ModuleType) -> None:
    for script, *arguments in runner.FIGURES:
        assert (ROOT / script).exists(), script
        for argument in arguments:
            assert "/" not in argument or (ROOT / argument).exists(), argument
    for names in runner.FRONTS.values():
        assert all((ROOT / "docs" / "pareto" / name).exists() for name in names.values())
    assert all(path.exists() for path in runner.TRIALS)


def test_the_first_figure_is_of_logged_readings() -> None:
    """Of docs/results.svg: the README's table says the same, to its last digit."""
    if not (ROOT / "docs").exists() or not BENCHMARKS.exists():
        pytest.skip("a distribution without docs or benchmarks")
    tool = load_tool("make_results")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for dataset, by_epsilon in tool.reached().items():
        digits = 2 if dataset == "MNIST" else 1
        rows = [line for line in readme.splitlines() if line.startswith((f"| {dataset}, ", f"| {dataset} |"))]
        means = [f"{statistics.mean(seeds):.{digits}f}" for seeds in by_epsilon.values()]
        assert any(all(f"| {mean} " in row for mean in means) for row in rows), (dataset, means)


def test_figures_of_mechanisms_are_drawn_from_committed_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not BENCHMARKS.exists():
        pytest.skip("a distribution without benchmarks")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "learned"))
    import mechanisms_figures as figures

    monkeypatch.setattr(figures, "DOCS", tmp_path)
    results = BENCHMARKS / "results" / "mechanisms"
    figures.plot(results)
    drawn = sorted(tmp_path.iterdir())
    assert [path.stem for path in drawn] == [path.stem for path in sorted([*results.glob("fig*.json"), results / "sizes.json"])]
    for path in drawn:
        assert json.loads((results / f"{path.stem}.json").read_text())
        assert path.read_text() == (ROOT / "docs" / "mechanisms" / path.name).read_text(), path.name
