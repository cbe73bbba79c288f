"""Reports: what they promise follows from the plan, what they show may be published, and a browser shows it."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lipdp._texts import upwards
from lipdp.cli import app
from lipdp.errors import ConfigurationError
from lipdp.report import figures, html, markdown, read_run, write
from lipdp.report.run import in_short
from lipdp.report.run import statement as paragraphs
from tests.report.browser import chromium, look_at, print_pdf

SHORT = ("--epochs", "2", "--batch-size", "256", "--delta", "1e-4", "--noise-multiplier", "5", "--set", "options.hidden=32")


def _train(folder: Path, *more: str) -> Path:
    done = CliRunner().invoke(app, ["train", "digits", *SHORT, "--output", str(folder), "--json", *more])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return _train(tmp_path_factory.mktemp("runs") / "held-out", "--validation-fraction", "0.2")


@pytest.fixture(scope="module")
def repeatable(tmp_path_factory) -> Path:
    return _train(tmp_path_factory.mktemp("runs") / "repeatable", "--reproducible", "7")


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def statement(record) -> str:
    return " ".join(paragraphs(record))


def _edit(folder: Path, file: str, **changes) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **changes}))


def test_train_writes_a_report(run) -> None:
    assert {"report.html", "report.md", "about.json"} <= {path.name for path in run.iterdir()}
    text = (run / "report.md").read_text()
    record = read_run(run)
    assert f"ε = {upwards(record.epsilon)}, δ = 0.0001" in text
    for part in (
        "adding or removing one record",
        "Poisson",
        "PLD",
        "proved from the architecture",
        "Confusion matrix (validation records",
        "Certified accuracy",
        "For the data-protection officer",
        "the checkpoint, which holds the run's secret key",
        "lipdp train digits-mlp --noise-multiplier 5 --delta 0.0001 --epochs 2 --batch-size 256 --validation-fraction 0.2 --set ",
    ):
        assert part in text, part  # fmt: skip
    assert "NOT PRIVATE" not in text
    assert in_short(record) in text
    digest = hashlib.sha256((run / "model.lipdp").read_bytes()).hexdigest()
    assert f"| model | model.lipdp, SHA-256 {digest} |" in text  # what is signed is this file
    assert f"A model was trained on {datetime.datetime.now(datetime.UTC).date().isoformat()} on 1,150 records" in text
    assert str(run.parent) not in text
    assert str(run.parent) not in (run / "report.html").read_text()


def test_who_signs_finds_all_of_it_before_the_details(run, repeatable) -> None:
    for file in ("report.html", "report.md"):
        text = (run / file).read_text()
        parts = [
            "In short",
            "What is promised",
            "declared public",
            "For the data-protection officer",
            "does not cover",
            "Sensitivity and",
        ]
        places = [text.index(part) for part in parts]
        assert places == sorted(places)
        assert "which records a step reads; drawn in secret" in text
        assert "does not cover" not in (repeatable / file).read_text()
    page = (run / "report.html").read_text()
    assert "`" not in page.replace("</style>", "").split("<body>")[1]
    promised = page.split('class="facts"')[1].split("</table>")[0]
    assert promised.count("<small>") == promised.count("<tr>") > 8  # each row says what it means


def test_the_confusion_matrix_counts_all_records_outside(run) -> None:
    judged = read_run(run).about.evaluation
    assert judged is not None
    assert sum(map(sum, judged.confusion)) == 288  # a fifth of the 1,438
    right = sum(judged.confusion[k][k] for k in range(10))
    assert right / 288 == pytest.approx(json.loads((run / "result.json").read_text())["accuracy"])
    assert judged.certified[0][1] <= right / 288 + 1e-9


def test_a_reproducible_run_is_not_private_and_says_so_loudly(repeatable) -> None:
    page, text = (repeatable / "report.html").read_text(), (repeatable / "report.md").read_text()
    assert '<p class="danger">NOT PRIVATE' in page
    assert "**NOT PRIVATE" in text
    assert "This run is not private" in statement(read_run(repeatable))
    assert "Nothing is promised" in page
    assert "does not cover" not in page
    assert "| guarantee | none:" in text
    assert "--reproducible SEED" in text
    assert "reproducible 7" not in page + text


def test_what_the_odds_change_by(run) -> None:
    """Adding and removing: what a record held is two steps away, so e^2ε. Replacing: one."""
    record = read_run(run)
    small = dataclasses.replace(record, epsilon=0.5)
    said = statement(small)
    assert "whether one given record was used, by a factor of at most e^ε = 1.65" in said
    assert (
        "what that record held, by a factor of at most e^2ε = 2.72, but for a probability of about (1 + e^ε)·δ = 0.00027" in said
    )  # 0.000265, upwards
    replaced = dataclasses.replace(small, plan=dataclasses.replace(record.plan, adjacency="replace_one"))
    assert "what one given record held, by a factor of at most e^ε = 1.65, but" in statement(replaced)
    assert "e^2ε" not in statement(replaced)
    assert "was used by a factor of at most e^ε = 1.65" in in_short(small)
    assert "record held by a factor of at most e^ε = 1.65" in in_short(replaced)
    for epsilon in (30.0, 1e4, math.inf):
        assert "next to no protection" in statement(dataclasses.replace(record, epsilon=epsilon))
    # Where factors are no longer written out, the chance is still the true one: 10⁻¹²·e²⁵ is 0.072, and 10⁻¹²·e³⁰ above 1.
    rare = dataclasses.replace(record.plan, delta=1e-12)
    for epsilon, words in ((25.0, "·δ = 0.073"), (30.0, "·δ, which may be all cases")):
        assert words in statement(dataclasses.replace(record, plan=rare, epsilon=epsilon))


def test_ranges_that_were_released_are_in_epsilon(copy) -> None:
    """Also where a result says the steps' ε alone."""
    before = read_run(copy).epsilon
    _edit(copy, "result.json", released=0.25)
    record = read_run(copy)
    assert record.epsilon == pytest.approx(before + 0.25)
    assert "pure ε = 0.2500; in the same ε" in markdown([record])


def test_what_was_not_judged_and_numbers_that_are_no_classes(copy) -> None:
    _edit(copy, "result.json", evaluated_on=None, accuracy=None)
    _edit(copy, "about.json", evaluation=None)
    text = markdown([read_run(copy)])
    assert "None" not in text
    assert "the set of classes" not in text
    assert "judged on no records" in text


def test_an_audit_that_found_more_than_is_promised(copy) -> None:
    for refuted, lower, said in ((False, 0.5, "nothing refutes"), (True, 0.5, "REFUTED"), (False, 5.0, "REFUTED")):
        _edit(copy, "result.json", audit={"refuted": refuted, "epsilon": {"epsilon": lower, "claimed": 1.0}})
        assert said in markdown([read_run(copy)])


def test_epsilon_is_the_accountants_whatever_the_files_say(copy) -> None:
    true = read_run(copy).epsilon
    _edit(copy, "result.json", epsilon=true / 10)
    _edit(copy, "plan.json", epsilon=true / 10)
    changed = read_run(copy)
    assert changed.epsilon == pytest.approx(true)
    assert "result.json says" in changed.contradictions[0]
    assert '<p class="danger">The files contradict' in html([changed])


def test_a_run_that_ended_early_spent_less(copy) -> None:
    whole = read_run(copy)
    history = json.loads((copy / "history.json").read_text())
    history["metrics"] = {name: column[:3] for name, column in history["metrics"].items()}
    (copy / "history.json").write_text(json.dumps(history | {"epsilon": 0.01}))
    assert read_run(copy).epsilon == whole.epsilon  # result.json says otherwise, and who says less is not believed
    assert read_run(copy).steps == whole.steps
    result = json.loads((copy / "result.json").read_text())
    early = result | {"steps": int(history["metrics"]["step"][-1])}
    (copy / "result.json").write_text(json.dumps(early))
    assert read_run(copy).epsilon == whole.epsilon  # it says so still, and who says more is believed
    (copy / "result.json").write_text(json.dumps(early | {"epsilon": 0.01}))
    part = read_run(copy)
    assert 0 < part.epsilon < whole.epsilon
    assert part.steps < whole.steps
    (copy / "history.json").write_text(json.dumps(history | {"epsilon": 2 * part.epsilon}))
    assert read_run(copy).epsilon == 2 * part.epsilon  # of a run that was rewound, say


def test_what_is_computed_from_private_records_is_not_shown(copy) -> None:
    """Shares of clipped examples are exact counts of the training records (for data that were declared public)."""
    history = json.loads((copy / "history.json").read_text())
    rows = len(history["metrics"]["step"])
    history["metrics"] |= {"clipped": [0.987654] * rows, "train_loss": [0.654321] * rows, "clip": [0.777] * rows}
    (copy / "history.json").write_text(json.dumps(history))
    record = read_run(copy)
    for text in (html([record]), markdown([record])):
        assert "0.9877" not in text  # no loss or accuracy of so short a run is near it
        assert "train loss" not in text
        assert "train_loss" not in text
    assert "0.777" in markdown([record])  # a released value


def test_hostile_files_are_refused_or_escaped(copy) -> None:
    _edit(copy, "result.json", dataset="<script>alert(1)</script>", model="a|b`c`\n# d", recipe="<img src=x onerror=y>")
    record = read_run(copy)
    page, text = html([record]), markdown([record])
    for bad in ("<script", "<img"):
        assert bad not in page
        assert bad not in text
    assert "\n# d" not in text
    _edit(copy, "about.json", command=3)
    with pytest.raises(ConfigurationError, match="can't be read as a run"):
        read_run(copy)
    (copy / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        read_run(copy)
    with pytest.raises(ConfigurationError, match=r"no folder of a run: it has no plan.json, history.json, result.json"):
        read_run(copy.parent)


def test_several_runs_side_by_side(run, copy, repeatable, tmp_path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), str(copy), str(repeatable), "--output", str(tmp_path / "all"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert [own["private"] for own in told["runs"]] == [True, True, False]
    total = sum(own["epsilon"] for own in told["runs"][:2])
    text = (tmp_path / "all" / "report.md").read_text()
    assert f"2 private runs on digits: whoever publishes all of them spends up to ε = {upwards(total)} at δ = 0.0002" in text
    assert "1 of the 3 runs on digits are not private" in text
    refused = CliRunner().invoke(app, ["report", str(run), str(copy)])
    assert refused.exit_code == 2


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "srcset", "action", "data")]
        self.outside += [tag] if tag in ("script", "link", "iframe", "object", "embed", "img") else []


def test_the_page_needs_nothing_from_outside(run) -> None:
    page = (run / "report.html").read_text()
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert "url(" not in page
    assert "@import" not in page


def test_a_browser_shows_it_on_a_phone_on_a_desk_and_on_paper(run, repeatable, tmp_path) -> None:
    chromium()
    record = read_run(run)
    page = html([record, read_run(repeatable)])
    for width in (390, 1100):
        seen = look_at(page, tmp_path, width)
        assert seen["errors"] == []
        assert seen["fetched"] == []
        assert seen["inner"] == width
        assert seen["scroll"] <= width, "it has to be scrolled sideways"
        assert seen["wide"] == []
        assert seen["smallest"] >= 13
        assert len(seen["figures"]) >= 8
        assert all(f["drawn"] > 0 and f["marks"] > 0 and 100 < f["width"] <= width for f in seen["figures"]), seen["figures"]
        assert seen["text"] > 2000
    write([record], tmp_path)
    print_pdf(tmp_path / "report.html", tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_browser_notices_what_is_wrong(tmp_path) -> None:
    """The look itself can fail: a script error, an empty figure, a page too wide."""
    bad = '<html><head></head><body><script>nowhere()</script><svg></svg><p style="width:900px;font-size:5px">x</p></body></html>'
    seen = look_at(bad, tmp_path, 390)
    assert seen["errors"]
    assert seen["wide"] == ["P"]
    assert seen["smallest"] == 5
    assert seen["figures"][0]["marks"] == 0


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [([0.0, 1.0], 0, 1), ([3.0], 0, 6), ([-2.0], -3, -1), ([0.91, 0.97], 0.9, 0.98), ([1e-9, 2e-9], 1e-9, 2e-9), ([0.0], -1, 1)],
)
def test_ticks_enclose_the_values(values, least, most) -> None:
    ticks = figures._ticks(values)
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)
    assert (ticks[0], ticks[-1]) == pytest.approx((least, most))
    assert 2 <= len(ticks) <= 8


def test_figures_without_numbers_are_left_out() -> None:
    assert figures.lines({"a": [(float("nan"), 1.0)]}, x="x", y="y", title="t") == ""
    assert figures.bars({"a": float("inf")}, y="y", title="t") == ""
    assert figures.matrix([], [], title="t") == ""
