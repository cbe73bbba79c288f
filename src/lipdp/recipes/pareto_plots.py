"""Pictures of fronts; they need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lipdp.errors import ConfigurationError
from lipdp.recipes.pareto import Dot, front, grouped, hull

__all__ = ["plot_by", "plot_dots", "plot_radii"]


def plot_dots(dots: Sequence[Dot], path: str | Path) -> None:
    """All dots and their convex hull."""
    plain = [dot for dot in dots if dot.radius == 0]
    figure, axes = _axes(plain)
    axes.scatter(
        [d.epsilon for d in plain], [100 * d.score for d in plain], s=6, color="tab:green", alpha=0.4, label="one evaluation"
    )
    corners = hull(plain)
    axes.plot([d.epsilon for d in corners], [100 * d.score for d in corners], color="tab:blue", marker=".", label="convex hull")
    _save(figure, axes, path)


def plot_by(dots: Sequence[Dot], field: str, path: str | Path) -> None:
    """The hull of each architecture, method or recipe; dashed where gradients were clipped, dotted between boundaries.

    Twins of a network (``plain-lenet``, ``boundary-lenet``) have its colour.
    """
    plain = [dot for dot in dots if dot.radius == 0]
    figure, axes = _axes(plain)
    colours: dict[str, str] = {}
    for label, group in grouped(plain, lambda dot: str(getattr(dot, field))).items():
        corners = hull(group)
        style = "--" if all(d.method != "clipless" for d in group) else ":" if label.startswith("boundary-") else "-"
        colour = colours.setdefault(label.removeprefix("plain-").removeprefix("boundary-"), f"C{len(colours)}")
        epsilons, scores = [d.epsilon for d in corners], [100 * d.score for d in corners]
        axes.plot(epsilons, scores, style, marker=".", label=label, color=colour)
        axes.scatter([d.epsilon for d in group], [100 * d.score for d in group], s=5, alpha=0.25, color=colour)
    _save(figure, axes, path)


def plot_radii(dots: Sequence[Dot], path: str | Path) -> None:
    """The front of certified accuracy at each radius: what is had at some ε is had at every larger one."""
    figure, axes = _axes(dots)
    axes.set_ylabel("certified accuracy in %")
    last = max(dot.epsilon for dot in dots)
    for radius in sorted({dot.radius for dot in dots}):
        kept = front(dot for dot in dots if dot.radius == radius)
        label = "no certificate" if radius == 0 else f"radius {radius:.4g}"
        epsilons, scores = [d.epsilon for d in kept], [100 * d.score for d in kept]
        axes.step([*epsilons, last], [*scores, scores[-1]], where="post", marker=".", label=label)
    _save(figure, axes, path)


def _axes(dots: Sequence[Dot]) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("plots need matplotlib: pip install 'lipdp[plots]', or pass --no-plots") from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    deltas = sorted({dot.delta for dot in dots})
    axes.set_xlabel(f"ε spent (δ = {', '.join(f'{delta:g}' for delta in deltas)})")
    where = ", ".join(sorted({dot.evaluated_on for dot in dots}))
    axes.set_ylabel(f"{where} {'AUROC' if dots[0].metric == 'auroc' else 'accuracy'} in %")
    axes.set_title(", ".join(sorted({dot.dataset for dot in dots})))
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: str | Path) -> None:
    # Many entries would cover the lines.
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(axes.get_legend_handles_labels()[1]) > 6 else {}
    axes.legend(fontsize="small", **beside)
    figure.savefig(path, dpi=150)
