"""Utility against privacy: every row of every run's history a dot, the front of what can be had, the best recipe for each ε.

Runs are read from histories: files with a line of JSON for each run, written by sweeps (:func:`append_history`), or folders that
``lipdp train --output`` has filled. Dots on validation records and on test records are never mixed in one front.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lipdp._checks import one_of
from lipdp._texts import brief, figure
from lipdp.errors import DataError, LipdpError
from lipdp.fields import Bound, Probability, Range, Size, parse_json, read
from lipdp.recipes.recipe import Recipe
from lipdp.recipes.run import Result

CERTIFIED = "certified "
"""A history's column of this name and a radius holds certified accuracies at that radius."""

_METRICS = ("accuracy", "auroc")
_LARGEST = 1e300
Share = Annotated[float, Range(least=0, most=1)]


@dataclass(frozen=True)
class Dot:
    """One (ε, score) pair: a run at the time of one evaluation.

    Attributes:
        epsilon: spent until then.
        score: accuracy or AUROC; certified accuracy where ``radius`` > 0.
        metric: which.
        radius: of the certificate, 0 for none.
        recipe: name of the recipe.
        model: the architecture.
        method: of bounding the sensitivity.
        dataset: name of the dataset.
        delta: δ.
        evaluated_on: "validation" or "test".
        step: of the run.
        settings: of the run, as JSON.
    """

    epsilon: float
    score: float
    metric: str
    radius: float
    recipe: str
    model: str
    method: str
    dataset: str
    delta: float
    evaluated_on: str
    step: int
    settings: str = dataclasses.field(default="{}", repr=False)


def history_line(
    recipe: Recipe, result: Result, *, evaluated_on: str, certified: Mapping[float, float] | None = None
) -> dict[str, Any]:
    """What is written down of a run. The seed stays out of it: results are published, seeds must not be."""
    settings = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.name not in ("name", "provenance")}
    return {
        "recipe": recipe.name,
        "dataset": recipe.dataset,
        "model": recipe.model,
        "method": result.method,
        "delta": result.delta,
        "epsilon": result.epsilon,
        "private": result.private,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "evaluated_on": evaluated_on,
        **{name: getattr(result, name) for name in _METRICS if getattr(result, name) is not None},
        "certified": {f"{radius:.6g}": share for radius, share in (certified or {}).items()},
        "history": result.history.metrics,
        "settings": settings,
    }


def append_history(
    file: str | Path, recipe: Recipe, result: Result, *, evaluated_on: str, certified: Mapping[float, float] | None = None
) -> None:
    """Add a line for this run."""
    line = history_line(recipe, result, evaluated_on=evaluated_on, certified=certified)
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One write of one line: processes that share the file don't tear each other's lines.
    with path.open("a", encoding="utf-8") as target:
        target.write(json.dumps(line, default=str) + "\n")


def read_dots(paths: Iterable[str | Path], metric: str = "accuracy") -> list[Dot]:
    """All dots of these history files and output folders."""
    one_of("metric", metric, _METRICS)
    dots: list[Dot] = []
    for path in map(Path, paths):
        runs = [_folder_run(path)] if path.is_dir() else _file_runs(path)
        for run in runs:
            dots += _dots_of(run, metric, path)
    if not dots:
        raise DataError(f"the histories hold no {metric}: give files of lipdp sweep, or folders of lipdp train --output")
    return dots


def _file_runs(path: Path) -> list[dict[str, Any]]:
    runs = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            run = parse_json(line, f"line {number} of '{path}'", constants=True)
        except LipdpError as error:
            raise DataError(f"{error}; it is not a history file, or it was cut off") from None
        if not isinstance(run, dict):
            raise DataError(f"line {number} of '{path}' is not a run")
        runs.append(run)
    return runs


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"there is no '{path}'") from None
    except (OSError, UnicodeError) as error:
        raise DataError(f"'{path}' can't be read: {error}") from None


def _folder_run(path: Path) -> dict[str, Any]:
    try:
        names = ("result.json", "history.json")
        result, history = (parse_json(_text(path / name), f"'{path / name}'", constants=True) for name in names)
        if not isinstance(result, dict) or not isinstance(history, dict) or "metrics" not in history:
            raise DataError("its files are none of a result and a history")
    except LipdpError as error:
        raise DataError(f"'{path}' is not a folder of lipdp train --output: {error}") from None
    return {**result, "history": history["metrics"]}


@dataclass(frozen=True)
class _Run:
    """What a line or a folder says of a run."""

    recipe: str
    model: str
    method: str
    dataset: str
    evaluated_on: Literal["validation", "test"]
    delta: Probability
    epsilon: Bound
    steps: Size
    history: dict[str, list[Any]]
    certified: dict[str, Share] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    accuracy: Any = None
    auroc: Any = None

    def column(self, name: str) -> list[float]:
        """A column of the history; an undefined figure is NaN there."""
        values = self.history.get(name, [])
        strange = [value for value in values if type(value) not in (int, float) or _LARGEST < abs(value) < math.inf]
        if strange:
            raise DataError(f"its history's column {name!r} holds {strange[0]!r}, which is no number")
        return [float(value) for value in values]

    @property
    def radii(self) -> dict[float, float]:
        """Certified accuracies by radius, as they were in the end."""
        try:
            return {float(radius): share for radius, share in self.certified.items()}
        except ValueError as error:
            raise DataError(f"it was certified at a radius that is no number: {error}") from None


def _dots_of(content: dict[str, Any], metric: str, path: Path) -> list[Dot]:
    known = {field.name for field in dataclasses.fields(_Run)}
    try:
        run: _Run = read(_Run, {name: value for name, value in content.items() if name in known}, "the run")
        dots = _curves(run, metric)
    except LipdpError as error:
        raise DataError(f"a run in '{path}' is not one of a history of this library: {error}") from None
    return [dot for dot in dots if math.isfinite(dot.epsilon) and math.isfinite(dot.score)]


def _curves(run: _Run, metric: str) -> list[Dot]:
    common: dict[str, Any] = {
        name: getattr(run, name) for name in ("recipe", "model", "method", "dataset", "evaluated_on", "delta")
    }
    common |= {"metric": metric, "settings": json.dumps(run.settings, sort_keys=True)}
    last: dict[str, Any] = {"epsilon": run.epsilon, "step": run.steps}

    def curve(column: str, radius: float) -> list[Dot]:
        rows = zip(run.column("epsilon"), run.column(column), run.column("step"), strict=False)
        kept = [row for row in rows if all(map(math.isfinite, row))]
        for epsilon, score, _ in kept:
            read(Annotated[float, Range(least=0)], epsilon, "the history's epsilon")
            read(Share, score, f"the history's {column}")
        return [Dot(epsilon, score, radius=radius, step=int(step), **common) for epsilon, score, step in kept]

    dots = curve(f"validation_{metric}", 0.0) if run.evaluated_on == "validation" else []
    score = getattr(run, metric)
    if not dots and score is not None and score == score:
        dots = [Dot(score=read(Share, score, f"the run's {metric}"), radius=0.0, **last, **common)]
    if metric == "accuracy":
        names = [column.removeprefix(CERTIFIED) for column in run.history if column.startswith(CERTIFIED)]
        try:
            radii = {float(name) for name in names}
        except ValueError as error:
            raise DataError(f"its history was certified at a radius that is no number: {error}") from None
        dots += [dot for radius in sorted(radii - run.radii.keys()) for dot in curve(f"{CERTIFIED}{radius:g}", radius)]
        dots += [Dot(score=share, radius=radius, **last, **common) for radius, share in run.radii.items() if 0 < radius < math.inf]
    return dots


def grouped(dots: Iterable[Dot], key: Callable[[Dot], str]) -> dict[str, list[Dot]]:
    """Dots by a label, labels in order."""
    groups: dict[str, list[Dot]] = {}
    for dot in dots:
        groups.setdefault(key(dot), []).append(dot)
    return dict(sorted(groups.items()))


def front(dots: Iterable[Dot]) -> list[Dot]:
    """The dots that no other dominates: none has at most their ε and at least their score (and one of the two better)."""
    kept: list[Dot] = []
    for dot in sorted(dots, key=lambda d: (d.epsilon, -d.score)):
        if not kept or dot.score > kept[-1].score:
            kept.append(dot)
    return kept


def hull(dots: Iterable[Dot]) -> list[Dot]:
    """The corners of the upper convex hull of the front (the papers' blue line): slopes fall from each to the next."""
    corners: list[Dot] = []
    for dot in front(dots):
        while len(corners) > 1 and _above_or_on(corners[-2], dot, corners[-1]):
            corners.pop()
        corners.append(dot)
    return corners


def _above_or_on(left: Dot, right: Dot, middle: Dot) -> bool:
    """Whether the line from left to right passes above the middle or through it."""
    return (right.score - left.score) * (middle.epsilon - left.epsilon) >= (middle.score - left.score) * (
        right.epsilon - left.epsilon
    )


def best_by_epsilon(dots: Sequence[Dot], budgets: Iterable[float]) -> dict[float, Dot]:
    """For each budget the best dot that it pays for; budgets that pay for none are left out."""
    chosen = {}
    for budget in budgets:
        affordable = [dot for dot in dots if dot.epsilon <= budget]
        if affordable:
            chosen[budget] = max(affordable, key=lambda dot: (dot.score, -dot.epsilon))
    return chosen


def write_csv(dots: Iterable[Dot], path: str | Path) -> None:
    """One line for each dot."""
    names = [f.name for f in dataclasses.fields(Dot)]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(dot, name) for name in names] for dot in dots)


# ------------------------------------------------------------------ pictures; they need matplotlib


def plot_dots(dots: Sequence[Dot], path: str | Path) -> None:
    """All dots and their convex hull."""
    plain = [dot for dot in dots if dot.radius == 0]
    drawn, axes = _axes(plain)
    axes.scatter(
        [d.epsilon for d in plain], [100 * d.score for d in plain], s=6, color="tab:green", alpha=0.4, label="one evaluation"
    )
    corners = hull(plain)
    axes.plot([d.epsilon for d in corners], [100 * d.score for d in corners], color="tab:blue", marker=".", label="convex hull")
    _save(drawn, axes, path)


def plot_by(dots: Sequence[Dot], field: str, path: str | Path) -> None:
    """The hull of each architecture, method or recipe; dashed where gradients were clipped, dotted between boundaries.

    Twins of a network (``plain-lenet``, ``boundary-lenet``) have its colour.
    """
    plain = [dot for dot in dots if dot.radius == 0]
    drawn, axes = _axes(plain)
    colours: dict[str, str] = {}
    for label, group in grouped(plain, lambda dot: str(getattr(dot, field))).items():
        corners = hull(group)
        style = "--" if all(d.method != "clipless" for d in group) else ":" if label.startswith("boundary-") else "-"
        colour = colours.setdefault(label.removeprefix("plain-").removeprefix("boundary-"), f"C{len(colours)}")
        epsilons, scores = [d.epsilon for d in corners], [100 * d.score for d in corners]
        axes.plot(epsilons, scores, style, marker=".", label=label, color=colour)
        axes.scatter([d.epsilon for d in group], [100 * d.score for d in group], s=5, alpha=0.25, color=colour)
    _save(drawn, axes, path)


def plot_radii(dots: Sequence[Dot], path: str | Path) -> None:
    """The front of certified accuracy at each radius: what is had at some ε is had at every larger one."""
    drawn, axes = _axes(dots)
    axes.set_ylabel("certified accuracy in %")
    last = max(dot.epsilon for dot in dots)
    for radius in sorted({dot.radius for dot in dots}):
        kept = front(dot for dot in dots if dot.radius == radius)
        label = "no certificate" if radius == 0 else f"radius {radius:.4g}"
        epsilons, scores = [d.epsilon for d in kept], [100 * d.score for d in kept]
        axes.step([*epsilons, last], [*scores, scores[-1]], where="post", marker=".", label=label)
    _save(drawn, axes, path)


def _axes(dots: Sequence[Dot]) -> tuple[Any, Any]:
    drawn = figure("a plot (--no-plots leaves it out)", 6, 4)
    axes = drawn.add_subplot()
    deltas = sorted({dot.delta for dot in dots})
    axes.set_xlabel(f"ε spent (δ = {', '.join(map(brief, deltas))})")
    where = ", ".join(sorted({dot.evaluated_on for dot in dots}))
    axes.set_ylabel(f"{where} {'AUROC' if dots[0].metric == 'auroc' else 'accuracy'} in %")
    axes.set_title(", ".join(sorted({dot.dataset for dot in dots})))
    axes.grid(alpha=0.3)
    return drawn, axes


def _save(drawn: Any, axes: Any, path: str | Path) -> None:
    from matplotlib import rc_context

    # Many entries would cover the lines.
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(axes.get_legend_handles_labels()[1]) > 6 else {}
    axes.legend(fontsize="small", **beside)
    # The same dots give the same file, byte for byte: no date, no random names inside.
    with rc_context({"svg.hashsalt": "lipdp"}):
        drawn.savefig(path, dpi=150, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
