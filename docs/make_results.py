"""What private training reaches, beside what others have published: docs/results.svg, for the home page and the README.

python docs/make_results.py        (needs matplotlib)

Every figure of ours is read from benchmarks/results/lockbox.jsonl: readings of test sets, logged as they were made, after the
settings had been committed. Of a recipe and seed that were read twice (with the large network built again) the later one counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCKBOX = HERE.parent / "benchmarks" / "results" / "lockbox.jsonl"
FIGURE = HERE / "results.svg"
EPSILONS = (1, 3, 8)

# Dataset → ε → recipe: one family for each.
OURS = {
    "MNIST": {epsilon: f"mnist-drawn-small-eps{epsilon}" for epsilon in EPSILONS},
    "Fashion-MNIST": {
        1: "fashion-mnist-drawn-small-eps1",
        3: "fashion-mnist-drawn-small-fading-eps3",
        8: "fashion-mnist-drawn-small-fading-eps8",
    },
    "CIFAR-10": {1: "cifar10-drawn-eps1", 3: "cifar10-drawn-fading-eps3", 8: "cifar10-drawn-fading-eps8"},
}
# Strongest figures without real extra data that we know of, as published (docs/accuracy.md has the sources).
PUBLISHED = {
    "MNIST": {"DPSUR": {1: 97.93, 3: 98.88}, "scattering": {3: 98.7}},
    "Fashion-MNIST": {"DPSUR": {1: 88.38, 3: 89.71}, "scattering": {3: 89.7}},
    "CIFAR-10": {
        "DP-RandP": {1: 72.3},
        "DPSUR": {1: 64.4, 3: 70.8},
        "De et al.": {1: 56.8, 3: 70.7, 8: 81.4},
        "scattering": {3: 69.3},
    },
}
_RED = "#c1272d"
_STYLES = {"DP-RandP": ("s", "#b5651d"), "DPSUR": ("^", "#7a7a7a"), "De et al.": ("D", "#4a6fa5"), "scattering": ("v", "#9a8fb0")}


def reached() -> dict[str, dict[int, list[float]]]:
    """Test accuracy in % by dataset and ε, one number for each seed."""
    last: dict[tuple[str, int], float] = {}
    for line in LOCKBOX.read_text(encoding="utf-8").splitlines():
        reading = json.loads(line)
        last[reading["recipe"], reading["seed"]] = 100 * reading["accuracy"]

    def of(recipe: str) -> list[float]:
        return [accuracy for (name, _), accuracy in sorted(last.items()) if name == recipe]

    return {dataset: {epsilon: of(recipe) for epsilon, recipe in family.items()} for dataset, family in OURS.items()}


def figure(results: Mapping[str, Mapping[int, list[float]]], place: Path) -> None:
    """Draw it there; the same bytes for the same numbers."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "lipdp", "font.size": 9}):
        drawn = Figure(figsize=(8.4, 3.1), layout="constrained")
        for panel, (dataset, by_epsilon) in zip(drawn.subplots(1, len(results)), results.items(), strict=True):
            places = {epsilon: number for number, epsilon in enumerate(EPSILONS)}
            means = [statistics.mean(by_epsilon[epsilon]) for epsilon in EPSILONS]
            spread = [statistics.stdev(by_epsilon[epsilon]) for epsilon in EPSILONS]
            x = list(places.values())
            panel.errorbar(x, means, spread, color=_RED, marker="o", linewidth=2, capsize=3, label="lipdp, every Δ proved")
            for place_of, mean in zip(x, means, strict=True):
                panel.annotate(f"{mean:.1f}", (place_of, mean), (0, 9), textcoords="offset points", ha="center", color=_RED)
            for name, points in PUBLISHED[dataset].items():
                marker, colour = _STYLES[name]
                known = [places[epsilon] for epsilon in points]
                panel.plot(known, list(points.values()), marker=marker, color=colour, linestyle=":", label=name)
            panel.set_title(dataset)
            panel.set_xticks(x, [f"ε = {epsilon}" for epsilon in EPSILONS])
            panel.set_xlim(-0.35, len(EPSILONS) - 0.65)
            panel.margins(y=0.16)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        drawn.axes[0].set_ylabel("test accuracy in %")
        drawn.axes[-1].legend(loc="lower right", fontsize=7.5, frameon=False)
        drawn.savefig(place, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    figure(reached(), FIGURE)
    print(FIGURE)
