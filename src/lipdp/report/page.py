"""A report as HTML and as Markdown, of one run or of several side by side.

Its parts are put together once, each in both forms; a figure of HTML is a table of its numbers in Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from lipdp._texts import REPRODUCIBLE, bound, brief, guarantee, number, percent, upwards
from lipdp.errors import ConfigurationError
from lipdp.report.figures import bars, lines, matrix
from lipdp.report.run import (
    HISTORY,
    PLAN,
    RESULT,
    About,
    RunRecord,
    declared_public,
    in_short,
    not_covered,
    promises,
    read_run,
    statement,
    write_about,
)
from lipdp.training import History, PrivacyPlan

HTML, MARKDOWN = "report.html", "report.md"
_COUNTED = ("step", "epoch", "epsilon")
# Of a history, what may be shown: what the ledger counts, what was released, and metrics of records outside the guarantee.
_SHOWN = ("validation_", "clip ", "certified ")

# What each row of the promises means, for who does not know the field.
_IN_PLAIN_WORDS = {
    "guarantee": "ε: how much the model may tell of one record; smaller is safer. δ: how rarely that may fail",
    "model": "the file that this report is about",
    "neighbouring datasets": "nobody can tell well from which of two such datasets the model comes",
    "accountant": "how ε follows from steps and noise: it is never below the true one",
    "sampling": "which records a step reads; drawn in secret",
    "steps": "each reads a batch and adds noise once",
    "noise": "how large it is beside the most that one record can change a step by",
    "method": "why one record can change a step by no more than that",
    "released beside the steps": "computed from the records as well, and noised",
    "account of the dataset": "the file that adds up all that is released about these records",
    "audit": "attacks on the training itself: they bound ε from below, as the accountant does from above",
}
_STYLE = files("lipdp.report").joinpath("style.css").read_text(encoding="utf-8")


def write(runs: Sequence[RunRecord], folder: str | Path) -> list[str]:
    """Both reports of these runs into a folder; returns the files' names.

    Args:
        runs: of :func:`~lipdp.report.read_run`.
        folder: where to; made if it is not there.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / HTML).write_text(html(runs), encoding="utf-8")
    (place / MARKDOWN).write_text(markdown(runs), encoding="utf-8")
    return [HTML, MARKDOWN]


def write_run(folder: Path, plan: PrivacyPlan, history: History, result: Mapping[str, Any], about: About) -> list[str]:
    """Fill a run's folder with all that is published of it but the model, both reports too; returns the files' names.

    Args:
        folder: of the run.
        plan: what was decided.
        history: what happened.
        result: figures, as plain data; of a seed among them nothing is written.
        about: command, environment, evaluation.
    """
    public = {name: value for name, value in result.items() if name != "seed"}
    texts = {PLAN: plan.to_json(), HISTORY: json.dumps(history.state_dict(), indent=2), RESULT: json.dumps(public, indent=2)}
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return [*texts, write_about(about, folder), *write([read_run(folder)], folder)]


class _Part(NamedTuple):
    """A part of a report, written twice."""

    html: str
    markdown: str


def _heading(text: str, level: int = 2) -> _Part:
    return _Part(f"<h{level}>{escape(text)}</h{level}>", f"{'#' * level} {_plain(text)}")


def _paragraph(text: str, kind: str = "") -> _Part:
    marks = {"danger": "**{}**", "note": "> {}"}.get(kind, "{}")
    return _Part(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>", marks.format(_plain(text)))


def _list(items: Iterable[str]) -> _Part:
    told = list(items)
    return _Part(f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in told)}</ul>", "\n".join(f"- {_plain(i)}" for i in told))


def _facts(facts: Iterable[tuple[str, ...]]) -> _Part:
    """Names, values and, where there are any, what they mean."""
    rows, told = [], list(facts)
    for name, value, *meaning in told:
        words = "".join(f"<small>{escape(text)}</small>" for text in meaning)
        rows.append(f"<tr><th>{escape(name)}</th><td>{escape(value)}{words}</td></tr>")
    header = ("", "", "in plain words")[: max(map(len, told), default=2)]
    return _Part(f'<table class="facts">{"".join(rows)}</table>', _pipes(header, told))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> _Part:
    """``right``: columns of numbers."""
    numbers = set(right)

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if place in numbers else ''}>{escape(value)}</{tag}>" for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    grid = f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"
    return _Part(f'<div class="wide">{grid}</div>', _pipes(header, rows))


def _signed(parts: Iterable[_Part]) -> _Part:
    """What somebody puts their name under."""
    told = list(parts)
    signature = '<div class="line"><span>place, date</span><span>name</span><span>signature</span></div>'
    return _Part(f'<div class="sign">{"".join(part.html for part in told)}{signature}</div>', _joined(told))


def _joined(parts: Iterable[_Part]) -> str:
    return "\n\n".join(part.markdown for part in parts if part.markdown)


def _pipes(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """One line of text that is no markup: files are hostile."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'").replace("](", "] (")


def html(runs: Sequence[RunRecord]) -> str:
    """The report as one HTML file: style and figures inside, no scripts, nothing fetched from anywhere.

    Args:
        runs: one, or several to compare.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="robots" content="noindex"><title>{escape(_title(runs))}</title><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(part.html for part in _report(runs))}</body></html>\n"
    )


def markdown(runs: Sequence[RunRecord]) -> str:
    """The same as Markdown, without figures.

    Args:
        runs: one, or several to compare.
    """
    return _joined(_report(runs)) + "\n"


def _title(runs: Sequence[RunRecord]) -> str:
    if not runs:
        raise ConfigurationError("a report is of one run at least: give the folder of one")
    own = "dataset" if len(runs) == 1 else "recipe"  # a table of one's own has no recipe; several runs on it have folders
    names = ", ".join(str(run.result.get("recipe", run.result.get(own, run.name))) for run in runs[:3])
    return f"Privacy report: {names}{' …' if len(runs) > 3 else ''}"


def _report(runs: Sequence[RunRecord]) -> Iterator[_Part]:
    yield _heading(_title(runs), 1)
    if len(runs) == 1:
        yield from _run(runs[0], 2)
        return
    yield _heading("Side by side")
    yield from (_paragraph(text, "note") for text in _together(runs))
    yield _summary(runs)
    series = {f"{number + 1}. {run.name}": _over_the_run(run, "validation_accuracy") for number, run in enumerate(runs)}
    yield _Part(lines(series, x="ε spent", y="validation accuracy", title="Validation accuracy against ε, all runs"), "")
    for run in runs:
        yield _heading(run.name)
        yield from _run(run, 3)


def _together(runs: Sequence[RunRecord]) -> Iterator[str]:
    """What several runs on one dataset cost together, at most: ε and δ add up."""
    for dataset in dict.fromkeys(str(run.result.get("dataset")) for run in runs):
        every = [run for run in runs if str(run.result.get("dataset")) == dataset]
        same = [run for run in every if run.private]
        if len(same) > 1:
            epsilon, delta = sum(run.epsilon for run in same), sum(run.plan.delta for run in same)
            yield (
                f"{len(same)} private runs on {dataset}: whoever publishes all of them spends up to ε = {upwards(epsilon)} at δ = "
                f"{brief(delta, 2)} (basic composition; an account, --budget FILE, composes them more tightly)."
            )
        if same and len(same) < len(every):
            yield (
                f"{len(every) - len(same)} of the {len(every)} runs on {dataset} are not private: whoever publishes one of those "
                "too takes back what the others promise."
            )


def _summary(runs: Sequence[RunRecord]) -> _Part:
    header = ["run", "dataset", "method", "ε", "δ", "accuracy", "steps", "private"]
    rows = [
        [
            run.name,
            str(run.result.get("dataset", "–")),
            run.plan.method,
            upwards(run.epsilon) if run.private else "none",
            brief(run.plan.delta),
            percent(run.figure("accuracy")),
            f"{run.steps:,}",
            "yes" if run.private else "NO",
        ]
        for run in runs
    ]
    return _table(header, rows, range(3, 7))


def _run(run: RunRecord, level: int) -> Iterator[_Part]:
    if not run.private:
        yield _paragraph(REPRODUCIBLE, "danger")
    yield from (_paragraph(f"The files contradict each other: {text}.", "danger") for text in run.contradictions)
    yield _paragraph(_headline(run))
    yield _paragraph(in_short(run), "short")
    yield _heading("What is promised", level)
    yield _facts((name, value, _IN_PLAIN_WORDS[name.split(":")[0]]) for name, value in promises(run))
    yield _heading("What was declared public", level)
    yield _list(declared_public(run))
    yield _heading("For the data-protection officer", level)
    outside = [_paragraph("The guarantee does not cover:"), _list(not_covered(run))] if run.private else []
    yield _signed([*map(_paragraph, statement(run)), *outside])
    yield _heading("Sensitivity and noise, layer by layer", level)
    yield from _layers(run)
    for title, parts in (("Over the run", _history(run)), ("On records outside the guarantee", _judged(run))):
        if parts:
            yield _heading(title, level)
            yield from parts
    yield _heading("To run it again", level)
    command = run.about.command or "(not stored)"
    yield _Part(f"<pre>{escape(command)}</pre>", f"    {_plain(command)}")
    if run.private:
        yield _paragraph("Noise and samples are drawn anew: such a run is another one, and spends its own ε.")
    yield _facts(run.about.environment.items())


def _headline(run: RunRecord) -> str:
    promise = guarantee(run.epsilon, run.plan.delta) if run.private else "no guarantee"
    area = run.figure("auroc")
    also = "" if area is None else f", AUROC {percent(area)}"
    what = f"{run.result.get('model', 'A model')} on {run.result.get('dataset', 'a dataset')}"
    part, explained = run.result.get("evaluated_on", "test"), run.figure("r2")
    if part is None:
        return f"{what}: judged on no records, with {promise}."
    if explained is not None:
        return f"{what}: {part} R² {percent(explained)} with {promise}."
    return f"{what}: {part} accuracy {percent(run.figure('accuracy'))}{also} with {promise}."


def _layers(run: RunRecord) -> Iterator[_Part]:
    yield _paragraph("X and G bound activations and cotangents, Δ one record's gradient; noise is added to the sum over the batch.")
    header = ["parameters", "X", "G", "Δ", "noise std", "numbers", "Δ is"]
    rows = [
        [group.name, *(bound(v) for v in (group.input_norm, group.cotangent_norm, group.sensitivity)), number(group.noise_std),
         f"{group.size:,}", group.source]
        for group in run.plan.groups
    ]  # fmt: skip
    yield _table(header, rows, range(1, 6))
    values = {group.name: group.sensitivity for group in run.plan.groups[:40]}
    notes = {group.name: group.source for group in run.plan.groups}
    yield _Part(bars(values, y="Δ of each layer", title="Sensitivity of each layer, proved or clipped", notes=notes), "")


def _over_the_run(run: RunRecord, name: str) -> list[tuple[float, float]]:
    metrics = run.history.metrics
    return list(zip(metrics.get("epsilon", []), metrics.get(name, []), strict=False))


def _history(run: RunRecord) -> list[_Part]:
    metrics = run.history.metrics
    shown = [name for name in metrics if name == "clip" or name.startswith(_SHOWN)]
    names = [name for name in metrics if name in _COUNTED or name in shown]
    if not names:
        return []
    spent = list(zip(metrics.get("step", []), metrics.get("epsilon", []), strict=False))
    drawn = [lines({"ε": spent}, x="step", y="ε spent", title="ε over the run")] if len(spent) > 1 else []
    for name in shown:
        label = name.replace("_", " ")
        drawn.append(lines({label: _over_the_run(run, name)}, x="ε spent", y=label, title=f"{label} against ε"))
    rows = [[number(value) for value in row] for row in zip(*(metrics[name] for name in names), strict=True)]
    grid = _table([name.replace("_", " ") for name in names], rows)
    return [grid._replace(html="".join(drawn) or grid.html)]


def _judged(run: RunRecord) -> list[_Part]:
    judged = run.about.evaluation
    if judged is None:
        return []
    parts: list[_Part] = [
        _paragraph(f"Computed as they are on the {judged.records} records, which the guarantee does not protect.")
    ]
    if judged.confusion:
        rows = [[name, *map(str, own)] for name, own in zip(judged.classes, judged.confusion, strict=False)]
        parts.append(_paragraph(f"Confusion matrix ({judged.records} records; rows are the true classes)."))
        drawn = matrix(judged.confusion, judged.classes, title="Confusion matrix")
        parts.append(_table(["", *judged.classes], rows)._replace(html=drawn))
    if judged.certified:
        parts.append(
            _paragraph(
                f"Certified accuracy: the share of {judged.examples:,} examples that stay right whatever moves them by less than a "
                "radius (L2, in the units of the inputs)."
            )
        )
        rows = [[f"{radius:g}", percent(share)] for radius, share in judged.certified]
        drawn = lines({"certified": judged.certified}, x="radius", y="certified accuracy", title="Certified accuracy by radius")
        parts.append(_table(["radius (L2)", "certified"], rows)._replace(html=drawn))
    return parts
