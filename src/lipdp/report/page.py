"""A report as HTML and as Markdown, of one run or of several side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lipdp._texts import REPRODUCIBLE, bound, brief, guarantee, number, percent, upwards
from lipdp.errors import ConfigurationError
from lipdp.report import figures
from lipdp.report.run import HISTORY, PLAN, RESULT, About, RunRecord, read_run, write_about
from lipdp.report.words import declared_public, in_plain_words, in_short, not_covered, promises, statement, together
from lipdp.training import History, PrivacyPlan

__all__ = ["HTML", "MARKDOWN", "html", "markdown", "write", "write_run"]

HTML, MARKDOWN = "report.html", "report.md"
_COUNTED = ("step", "epoch", "epsilon")
# Of a history, what may be shown: what the ledger counts, what was released, and metrics of records outside the guarantee.
_SHOWN = ("validation_", "clip ", "certified ")

_OFFICER, _OUTSIDE = "For the data-protection officer", "The guarantee does not cover:"
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


# --- HTML ---


def html(runs: Sequence[RunRecord]) -> str:
    """The report as one HTML file: style and figures inside, no scripts, nothing fetched from anywhere.

    Args:
        runs: one, or several to compare.
    """
    title = _title(runs)
    body = [f"<h1>{escape(title)}</h1>"]
    if len(runs) > 1:
        body.append(_comparison(runs))
    body += [_run(run, alone=len(runs) == 1) for run in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="robots" content="noindex"><title>{escape(title)}</title><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _title(runs: Sequence[RunRecord]) -> str:
    if not runs:
        raise ConfigurationError("a report is of one run at least: give the folder of one")
    own = "dataset" if len(runs) == 1 else "recipe"  # a table of one's own has no recipe; several runs on it have folders
    names = ", ".join(str(run.result.get("recipe", run.result.get(own, run.name))) for run in runs[:3])
    return f"Privacy report: {names}{' …' if len(runs) > 3 else ''}"


def _comparison(runs: Sequence[RunRecord]) -> str:
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in together(list(runs)))
    series = {f"{number + 1}. {run.name}": _over_the_run(run, "validation_accuracy") for number, run in enumerate(runs)}
    chart = figures.lines(series, x="ε spent", y="validation accuracy", title="Validation accuracy against ε, all runs")
    header, rows = _summary(runs)
    return f"<h2>Side by side</h2>{notes}{_table(header, rows, numbers=range(3, 7))}{chart}"


def _summary(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
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
    return header, rows


def _run(run: RunRecord, *, alone: bool) -> str:
    parts = [] if alone else [f"<h2>{escape(run.name)}</h2>"]
    parts += [f'<p class="danger">{escape(text)}</p>' for text in _alarms(run)]
    parts.append(f'<p>{escape(_headline(run))}</p><p class="short">{escape(in_short(run))}</p>')
    heading: Callable[[str], str] = (lambda text: f"<h2>{text}</h2>") if alone else (lambda text: f"<h3>{text}</h3>")
    parts += [heading("What is promised"), _facts((name, value, in_plain_words(name)) for name, value in promises(run))]
    parts += [heading("What was declared public"), _list(declared_public(run))]
    signature = '<div class="line"><span>place, date</span><span>name</span><span>signature</span></div>'
    said = "".join(f"<p>{escape(text)}</p>" for text in statement(run))
    outside = f"<p>{_OUTSIDE}</p>{_list(not_covered(run))}" if run.private else ""
    parts += [heading(_OFFICER), f'<div class="sign">{said}{outside}{signature}</div>']
    parts += [heading("Sensitivity and noise, layer by layer"), _table(*_layers(run), numbers=range(1, 6)), _layer_figure(run)]
    if over := _run_figures(run):
        parts += [heading("Over the run"), over]
    if judged := _evaluation_figures(run):
        parts += [heading("On records outside the guarantee"), judged]
    parts += [heading("To run it again"), _again(run)]
    return f"<section>{''.join(parts)}</section>"


def _alarms(run: RunRecord) -> list[str]:
    return [*([] if run.private else [REPRODUCIBLE]), *(f"The files contradict each other: {text}." for text in run.contradictions)]


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


def _layers(run: RunRecord) -> tuple[list[str], list[list[str]]]:
    header = ["parameters", "X", "G", "Δ", "noise std", "numbers", "Δ is"]
    rows = [
        [group.name, *(bound(v) for v in (group.input_norm, group.cotangent_norm, group.sensitivity)), number(group.noise_std),
         f"{group.size:,}", group.source]
        for group in run.plan.groups
    ]  # fmt: skip
    return header, rows


def _layer_figure(run: RunRecord) -> str:
    values = {group.name: group.sensitivity for group in run.plan.groups[:40]}
    notes = {group.name: group.source for group in run.plan.groups}
    explained = (
        "<p>X and G bound activations and cotangents, Δ one record's gradient; noise is added to the sum over the batch.</p>"
    )
    return explained + figures.bars(values, y="Δ of each layer", title="Sensitivity of each layer, proved or clipped", notes=notes)


def _over_the_run(run: RunRecord, name: str) -> list[tuple[float, float]]:
    metrics = run.history.metrics
    return list(zip(metrics.get("epsilon", []), metrics.get(name, []), strict=False))


def _run_figures(run: RunRecord) -> str:
    metrics = run.history.metrics
    steps = metrics.get("step", [])
    spent = list(zip(steps, metrics.get("epsilon", []), strict=False))
    parts = [figures.lines({"ε": spent}, x="step", y="ε spent", title="ε over the run")] if len(spent) > 1 else []
    for name in metrics:
        if name not in _COUNTED and (name.startswith(_SHOWN) or name == "clip"):
            label = name.replace("_", " ")
            parts.append(figures.lines({label: _over_the_run(run, name)}, x="ε spent", y=label, title=f"{label} against ε"))
    return "".join(parts)


def _evaluation_figures(run: RunRecord) -> str:
    judged = run.about.evaluation
    if judged is None:
        return ""
    parts = [f"<p>Computed as they are on the {escape(judged.records)} records, which the guarantee does not protect.</p>"]
    if judged.confusion:
        parts.append(figures.matrix(judged.confusion, judged.classes, title="Confusion matrix"))
    if judged.certified:
        parts.append(
            f"<p>Certified accuracy: the share of {judged.examples:,} examples that stay right whatever moves them by less than a "
            "radius (L2, in the units of the inputs).</p>"
        )
        parts.append(
            figures.lines({"certified": judged.certified}, x="radius", y="certified accuracy", title="Certified accuracy by radius")
        )
    return "".join(parts)


def _again(run: RunRecord) -> str:
    about = run.about
    command = f"<pre>{escape(about.command)}</pre>" if about.command else "<p>The command was not stored.</p>"
    again = "<p>Noise and samples are drawn anew: such a run is another one, and spends its own ε.</p>" if run.private else ""
    return command + again + _facts(about.environment.items())


def _facts(facts: Iterable[tuple[str, ...]]) -> str:
    """A table of names, values and, where there are any, what they mean."""
    rows = []
    for name, value, *meaning in facts:
        words = "".join(f"<small>{escape(text)}</small>" for text in meaning)
        rows.append(f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}{words}</td></tr>")
    return f'<table class="facts">{"".join(rows)}</table>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if place in right else ''}>{escape(str(value))}</{tag}>" for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", header)}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


# --- Markdown ---


def markdown(runs: Sequence[RunRecord]) -> str:
    """The same as Markdown, without figures.

    Args:
        runs: one, or several to compare.
    """
    parts = [f"# {_plain(_title(runs))}", ""]
    if len(runs) > 1:
        parts += ["## Side by side", "", *(f"> {_plain(text)}\n" for text in together(list(runs))), *_pipes(*_summary(runs)), ""]
    for run in runs:
        parts += _markdown_run(run, "##" if len(runs) == 1 else "###", named=len(runs) > 1)
    return "\n".join(parts).rstrip() + "\n"


def _markdown_run(run: RunRecord, level: str, *, named: bool) -> list[str]:
    facts = [[name, value, in_plain_words(name)] for name, value in promises(run)]
    parts = [f"## {_plain(run.name)}", ""] if named else []
    parts += [f"**{_plain(text)}**\n" for text in _alarms(run)]
    parts += [
        _plain(_headline(run)),
        "",
        _plain(in_short(run)),
        "",
        f"{level} What is promised",
        "",
        *_pipes(["", "", "in plain words"], facts),
        "",
    ]
    parts += [f"{level} What was declared public", "", *(f"- {_plain(item)}" for item in declared_public(run)), ""]
    parts += [f"{level} {_OFFICER}", ""]
    for text in statement(run):
        parts += [_plain(text), ""]
    if run.private:
        parts += [_OUTSIDE, "", *(f"- {_plain(item)}" for item in not_covered(run)), ""]
    parts += [f"{level} Sensitivity and noise", "", *_pipes(*_layers(run)), ""]
    if history := _history_rows(run):
        parts += [f"{level} Over the run", "", *_pipes(*history), ""]
    judged = run.about.evaluation
    if judged is not None and judged.confusion:
        rows = [[name, *map(str, own)] for name, own in zip(judged.classes, judged.confusion, strict=False)]
        parts += [
            f"{level} Confusion matrix ({judged.records} records; rows are the true classes)",
            "",
            *_pipes(["", *judged.classes], rows),
            "",
        ]
    if judged is not None and judged.certified:
        rows = [[f"{radius:g}", percent(share)] for radius, share in judged.certified]
        parts += [f"{level} Certified accuracy ({judged.examples} examples)", "", *_pipes(["radius (L2)", "certified"], rows), ""]
    parts += [f"{level} To run it again", "", f"    {_plain(run.about.command) or '(not stored)'}", ""]
    return [*parts, *(f"- {_plain(name)}: {_plain(value)}" for name, value in run.about.environment.items()), ""]


def _history_rows(run: RunRecord) -> tuple[list[str], list[list[str]]] | None:
    names = [name for name in run.history.metrics if name in _COUNTED or name == "clip" or name.startswith(_SHOWN)]
    if not names:
        return None
    columns = [run.history.metrics[name] for name in names]
    return [name.replace("_", " ") for name in names], [[number(value) for value in row] for row in zip(*columns, strict=True)]


def _pipes(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_plain(str(cell)).replace("|", "\\|") for cell in line) + " |" for line in lines]


def _plain(text: str) -> str:
    """One line of text that is no markup: files are hostile."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'").replace("](", "] (")
