"""A report as HTML and as Markdown, of one run or of several side by side.

Figures are inline SVG: no scripts, no fonts from elsewhere, as wide as the page lets them be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lipdp._texts import REPRODUCIBLE, bound, brief, guarantee, number, percent, upwards
from lipdp.errors import ConfigurationError
from lipdp.report.run import (
    HISTORY,
    PLAN,
    RESULT,
    About,
    RunRecord,
    declared_public,
    in_plain_words,
    in_short,
    not_covered,
    promises,
    read_run,
    statement,
    together,
    write_about,
)
from lipdp.training import History, PrivacyPlan

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
    chart = lines(series, x="ε spent", y="validation accuracy", title="Validation accuracy against ε, all runs")
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
    return explained + bars(values, y="Δ of each layer", title="Sensitivity of each layer, proved or clipped", notes=notes)


def _over_the_run(run: RunRecord, name: str) -> list[tuple[float, float]]:
    metrics = run.history.metrics
    return list(zip(metrics.get("epsilon", []), metrics.get(name, []), strict=False))


def _run_figures(run: RunRecord) -> str:
    metrics = run.history.metrics
    steps = metrics.get("step", [])
    spent = list(zip(steps, metrics.get("epsilon", []), strict=False))
    parts = [lines({"ε": spent}, x="step", y="ε spent", title="ε over the run")] if len(spent) > 1 else []
    for name in metrics:
        if name not in _COUNTED and (name.startswith(_SHOWN) or name == "clip"):
            label = name.replace("_", " ")
            parts.append(lines({label: _over_the_run(run, name)}, x="ε spent", y=label, title=f"{label} against ε"))
    return "".join(parts)


def _evaluation_figures(run: RunRecord) -> str:
    judged = run.about.evaluation
    if judged is None:
        return ""
    parts = [f"<p>Computed as they are on the {escape(judged.records)} records, which the guarantee does not protect.</p>"]
    if judged.confusion:
        parts.append(matrix(judged.confusion, judged.classes, title="Confusion matrix"))
    if judged.certified:
        parts.append(
            f"<p>Certified accuracy: the share of {judged.examples:,} examples that stay right whatever moves them by less than a "
            "radius (L2, in the units of the inputs).</p>"
        )
        parts.append(
            lines({"certified": judged.certified}, x="radius", y="certified accuracy", title="Certified accuracy by radius")
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


COLOURS = ("#0b5fa5", "#b3480f", "#2d7d46", "#7a3e9d", "#8a6d00", "#5b5b5b")
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 16, 44


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, title: str) -> str:
    """Lines through points, one for each name; points that are no numbers are left out.

    Args:
        series: (x, y) by name.
        x: what the horizontal axis is.
        y: what the vertical axis is.
        title: for those who can't see the figure.
    """
    kept = {name: [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)] for name, points in series.items()}
    everything = [point for points in kept.values() for point in points]
    if not everything:
        return ""
    across, up = (_ticks([point[axis] for point in everything]) for axis in (0, 1))
    parts = [_axes(across, up, x, y)]
    for place, (name, points) in enumerate(kept.items()):
        colour = COLOURS[place % len(COLOURS)]
        spots = [(_place(a, across, _LEFT, _WIDTH - _RIGHT), _place(b, up, _HEIGHT - _BOTTOM, _TOP)) for a, b in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in spots]
        if len(kept) > 1:
            parts.append(_text(_LEFT + 8, _TOP + 14 + 16 * place, name, anchor="start", fill=colour))
    return _figure(parts, title, _HEIGHT)


def bars(values: Mapping[str, float], *, y: str, title: str, notes: Mapping[str, str] | None = None) -> str:
    """A horizontal bar for each name, with its value beside it.

    Args:
        values: by name, not negative.
        y: what the values are.
        title: for those who can't see the figure.
        notes: what to write behind a value.
    """
    finite = {name: value for name, value in values.items() if math.isfinite(value) and value >= 0}
    if not finite:
        return ""
    largest = max(finite.values()) or 1.0
    parts = [_text(_LEFT, 14, y, anchor="start")]
    for place, (name, value) in enumerate(finite.items()):
        top = 26 + 34 * place
        length = max(1.0, value / largest * (_WIDTH - 2 * _RIGHT - 150))
        note = f" {notes[name]}" if notes and name in notes else ""
        parts += [
            _text(_RIGHT, top + 10, _short(name), anchor="start"),
            f'<rect x="{_RIGHT}" y="{top + 14}" width="{length:.1f}" height="12" fill="{COLOURS[0]}"/>',
            _text(_RIGHT + length + 6, top + 24, f"{value:.3g}{note}", anchor="start"),
        ]
    return _figure(parts, title, 34 + 34 * len(finite))


def matrix(counts: Sequence[Sequence[int]], names: Sequence[str], *, title: str) -> str:
    """A confusion matrix: true classes down, predicted ones across, darker where there are more of a row.

    Args:
        counts: by true and predicted class.
        names: of the classes.
        title: for those who can't see the figure.
    """
    size = len(names)
    if not size or len(counts) != size:
        return ""
    cell = min(48.0, (_WIDTH - 120) / size)
    letters = max(9.0, min(13.0, cell / 2.6))
    parts = []
    for row, (name, own) in enumerate(zip(names, counts, strict=True)):
        total = sum(own) or 1
        y = 34 + row * cell
        parts.append(_text(112, y + cell / 2 + 4, _short(name, 14), anchor="end"))
        for column, count in enumerate(own):
            share, x = count / total, 118 + column * cell
            shade = round(255 - 185 * share)
            tint = f"rgb({shade},{shade},255)"
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}" fill="{tint}" stroke="#fff"/>')
            if count:
                ink = "#fff" if share > 0.6 else "#111"
                parts.append(_text(x + cell / 2, y + cell / 2 + letters / 3, str(count), fill=ink, size=letters))
    for column, name in enumerate(names):
        parts.append(_text(118 + (column + 0.5) * cell, 26, _short(name, max(2, int(cell / 7))), size=letters))
    parts.append(_text(118, 12, "predicted →, true ↓", anchor="start"))
    return _figure(parts, title, math.ceil(40 + size * cell))


def _figure(parts: Sequence[str], title: str, height: int) -> str:
    return (
        f'<svg class="figure" role="img" viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = "#333", size: float = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:.0f}" fill="{fill}">{escape(text)}</text>'


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else name[: max(1, most - 1)] + "…"


def _axes(across: Sequence[float], up: Sequence[float], x: str, y: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in up:
        place = _place(value, up, bottom, _TOP)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, place + 4, f"{value:g}", anchor="end"))
    for value in across:
        place = _place(value, across, _LEFT, right)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#333"/>')
        parts.append(_text(place, bottom + 18, f"{value:g}"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, x))
    middle = (_TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, y)}</g>')
    return "".join(parts)


def _place(value: float, ticks: Sequence[float], start: float, stop: float) -> float:
    low, high = ticks[0], ticks[-1]
    return start + (value - low) / (high - low) * (stop - start)


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers that enclose the values."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = (0.0, 2 * high) if high > 0 else (low - 1, low + 1)
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= min((factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (factor * step) <= 5), default=10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]
