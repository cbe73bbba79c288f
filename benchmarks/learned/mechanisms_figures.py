"""The paper's figures beside the improved ones: their numbers (jobs of ``mechanisms.py run``) and their plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lipdp.mechanisms import Mixture, OpenPlan, Problem, Settings, learn
from lipdp.mechanisms.distributions import draw
from lipdp.mechanisms.experts import grid
from lipdp.mechanisms.learn_parts import UtilitySettings, learn_utility
from lipdp.mechanisms.networks import L1Linear, LaplaceNetwork
from lipdp.mechanisms.paper import (
    Training,
    blind_loss,
    laplace_erl,
    paper_responses,
    train_laplace,
    train_utility,
    utility_erl,
    utility_mechanism,
)

DOCS = Path(__file__).parents[2] / "docs" / "mechanisms"
N, BOUNDS = 100, (0.0, 10.0)
KS = (0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
FIG5 = (("mean", "squared"), ("variance", "squared"), ("median", "quantile"), ("p10", "quantile"))
FIG1 = (("relu", 3, 100), ("groupsort", 6, 32))
FIG1_KS = (0.5, 1.0, 2.0, 5.0, 10.0)
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
SIZES_FOR, SIZES = ("mean", "variance", "median", "p10"), (25, 50, 100, 200, 500, 2000)
Line = tuple[str, list[float], list[float], str]


def figure1(scale: int = 1) -> dict[str, Any]:
    """Fits of sin x + ½cos 10x by k-Lipschitz networks: three layers of ReLU, as in the paper, and six of GroupSort.

    A layer of GroupSort folds the line at full slope, and the fast wave needs many folds: depth, not width, is what helps.
    """
    x = torch.linspace(0, 6.28, 400)[:, None]
    y = torch.sin(x) + 0.5 * torch.cos(10 * x)
    made: dict[str, Any] = {"x": x[:, 0].tolist(), "target": y[:, 0].tolist(), "fits": {}, "mse": {}}
    for activation, depth, width in FIG1:
        for k in FIG1_KS:
            torch.manual_seed(0)
            sizes = [1, *[width] * (depth - 1), 1]
            layers = [L1Linear(a, b, k ** (1 / depth)) for a, b in pairwise(sizes)]
            with torch.no_grad():  # kinks spread over the range, not all at 0
                layers[0].bias.copy_(-layers[0].weight[:, 0] * torch.rand(width) * 6.28)
            between = torch.nn.ReLU if activation == "relu" else Sort
            parts = [part for layer in layers[:-1] for part in (layer, between())]
            network = torch.nn.Sequential(*parts, layers[-1])
            steps = max(3000 // scale, 20)
            optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
            for _ in range(steps):
                optimiser.zero_grad()
                loss = ((network(x) - y) ** 2).mean()
                loss.backward()
                optimiser.step()
                schedule.step()
            with torch.no_grad():
                made["fits"][f"{activation} k={k:g}"] = network(x)[:, 0].tolist()
            made["mse"][f"{activation} k={k:g}"] = float(loss.detach())
    return made


def figure4(scale: int = 1) -> dict[str, Any]:
    """Response distributions for the median on fresh datasets: the paper's network (k = 10), and permute-and-flip, learned."""
    problem = Problem.of("median", 1.0, N, BOUNDS, "quantile")
    train = draw(Mixture(4, *BOUNDS), problem, 10_000 // scale, 5)
    fresh = draw(Mixture(4, *BOUNDS), problem, 4, 6)
    check = draw(Mixture(4, *BOUNDS), problem, 2000, 7)
    paper = utility_mechanism(problem, train_utility(problem, 10.0, train, 0, Training(epochs=6, rate=3e-3)))
    ours = learn_utility(problem, train, UtilitySettings() if scale == 1 else UtilitySettings(steps=30), 0)
    made: dict[str, Any] = {"datasets": (fresh * 10).tolist(), "median": (problem.query(fresh) * 10).tolist()}
    grids = {"paper": paper_responses(), "ours": grid(ours.values.shape[0])}
    for name, mechanism in (("paper", paper), ("ours", ours)):
        made[name] = {"responses": mechanism.responses.tolist(), "probabilities": mechanism.table(fresh).tolist()}
        made[name] |= {"grid": grids[name].tolist(), "title": mechanism.title}
        made[name]["expected_loss"] = float(mechanism.losses(check).mean())
    return made


def points() -> list[tuple[str, str, float]]:
    """The points of Fig. 5: (query, method, k)."""
    return [(query, method, k) for query, _ in FIG5 for method in ("laplace", "utility") for k in KS]


def figure5_point(query: str, method: str, k: float, runs: int, scale: int = 1) -> dict[str, Any]:
    """ERL at one k, on 4- and 2-component datasets, ε = 1, with the data-blind baseline."""
    loss = dict(FIG5)[query] if method == "utility" else "squared"
    problem = Problem.of(query, 1.0, N, BOUNDS, loss)
    train = draw(Mixture(4, *BOUNDS), problem, 10_000 // scale, 5)
    tests = {c: draw(Mixture(c, *BOUNDS), problem, 2000, 8 + c) for c in (4, 2)}
    responses = paper_responses()
    blind = blind_loss(problem, tests[4], responses if method == "utility" else None) * problem.loss_scale
    found: dict[int, list[float]] = {4: [], 2: []}
    for run in range(runs):
        how = Training(epochs=3, rate=3e-3)
        network = (train_laplace if method == "laplace" else train_utility)(problem, k, train, 100 + run, how)
        with torch.no_grad():
            for c, test in tests.items():
                erl = (
                    laplace_erl(network, problem, test)
                    if isinstance(network, LaplaceNetwork)
                    else utility_erl(network, problem, test, responses)
                )
                found[c].append(float(erl) * problem.loss_scale)
    own = {"query": query, "loss": loss, "method": method, "k": k, "runs": runs, "blind": blind, "epochs": 3}
    means = {f"erl_{c}c": sum(values) / runs for c, values in found.items()}
    return {**own, **means, **{f"runs_{c}c": values for c, values in found.items()}}


class Sort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-1], -1, 2).sort(-1).values.reshape(x.shape)


# --- plots ---


def plot(results: Path) -> None:
    """Every figure whose numbers are there."""
    for name, panels in (("fig1", panels1), ("fig2", panels2), ("fig4", panels4), ("fig5", panels5), ("sizes", panels_sizes)):
        source = results / f"{name}.json"
        if source.exists():
            text = svg(panels(json.loads(source.read_text()), results))
            DOCS.mkdir(parents=True, exist_ok=True)
            (DOCS / f"{name}.svg").write_text(text)
            print(f"{name}.svg")


Panel = tuple[str, list[Line], bool]


def panels1(made: dict[str, Any], results: Path) -> list[Panel]:
    panels: list[Panel] = []
    for activation, depth, width in FIG1:
        lines: list[Line] = [("target", made["x"], made["target"], "#bbb")]
        for k, colour in zip(FIG1_KS, COLOURS, strict=True):
            error = made["mse"][f"{activation} k={k:g}"]
            lines.append((f"k = {k:g}: {error:.3f}", made["x"], made["fits"][f"{activation} k={k:g}"], colour))
        panels.append((f"{activation}, {depth} layers of {width}: fits of sin x + ½cos 10x, and their error", lines, False))
    return panels


def figure2(scale: int = 1) -> dict[str, Any]:
    """Four datasets of the distribution that everything is trained on, with their means and medians."""
    datasets = Mixture(4, *BOUNDS)(4, N, torch.Generator().manual_seed(2))
    return {"datasets": datasets.tolist(), "mean": datasets.mean(1).tolist(), "median": datasets.quantile(0.5, dim=1).tolist()}


def figure_sizes(scale: int = 1) -> dict[str, Any]:
    """Any number of records, ε = 1: learned for it, resized from 100, and with the number private (add or remove).

    Mean squared errors over datasets of four Gaussians. The first two are expected losses on 200 datasets, the third is of real
    releases, one for each of 400 datasets.
    """
    rows = []
    for query in SIZES_FOR:
        base = learn(query, 1.0, N, BOUNDS, settings=Settings(robust=800 // scale))
        for n in SIZES:
            problem = base.problem.resized(n)
            t = draw(Mixture(4, *BOUNDS), problem, 200 // scale, 7 * n)
            own = base if n == N else learn(query, 1.0, n, BOUNDS, settings=Settings(robust=800 // scale))
            losses = [float(one.losses(t, 5).mean()) * problem.loss_scale for one in (own, base.for_size(n))]
            plan = OpenPlan(1.0, *BOUNDS, (query,))
            datasets = Mixture(4, *BOUNDS)(400 // scale, n, torch.Generator().manual_seed(11 * n))
            errors = [
                float(plan.respond(x)[0].value) - float(problem.answer(problem.query(problem.unit(x[None])))) for x in datasets
            ]
            private = sum(error**2 for error in errors) / len(errors)
            rows.append({"query": query, "n": n, "learned": losses[0], "resized": losses[1], "private": private})
    return {"epsilon": 1.0, "rows": rows}


def panels_sizes(made: dict[str, Any], results: Path) -> list[Panel]:
    panels: list[Panel] = []
    for query in SIZES_FOR:
        rows = [row for row in made["rows"] if row["query"] == query]
        ways = (
            ("learned", "learned for n", "#2ca02c"),
            ("resized", "resized from 100", "#1f77b4"),
            ("private", "n private", "#d62728"),
        )
        lines: list[Line] = [(words, [row["n"] for row in rows], [row[way] for row in rows], colour) for way, words, colour in ways]
        panels.append((f"{query}, squared error against n, ε = 1", lines, True))
    return panels


def panels2(made: dict[str, Any], results: Path) -> list[Panel]:
    panels: list[Panel] = []
    for i, data in enumerate(made["datasets"]):
        bins = torch.histc(torch.tensor(data), 25, 0, 10) / N
        lines: list[Line] = [("data", [0.2 + 0.4 * b for b in range(25)], bins.tolist(), "#1f77b4")]
        lines += [(name, [made[name][i]] * 2, [0.0, 0.3], colour) for name, colour in (("mean", "#d62728"), ("median", "#000"))]
        panels.append((f"draw {i + 1} of four truncated Gaussians", lines, False))
    return panels


def panels4(made: dict[str, Any], results: Path) -> list[Panel]:
    panels: list[Panel] = []
    for i in range(4):
        bins = torch.histc(torch.tensor(made["datasets"][i]), 25, 0, 10) / N
        lines: list[Line] = [("data", [0.2 + 0.4 * b for b in range(25)], bins.tolist(), "#e377c2")]
        for name, colour in (("paper", "#2ca02c"), ("ours", "#1f77b4")):
            own = made[name]
            width = 10 / len(own["responses"]) / 0.4  # as a density on the data's bins
            # Several responses may stand for one answer: their chances add up at the place of the response on the grid.
            place = [10 * value for value in own["grid"]]
            lines.append((name, place, [p / width for p in own["probabilities"][i]], colour))
        lines.append(("median", [made["median"][i]] * 2, [0.0, 0.3], "#000"))
        panels.append((f"dataset {i + 1}: responses, ε = 1, quantile loss", lines, False))
    return panels


def panels5(made: dict[str, Any], results: Path) -> list[Panel]:
    """With what learn() returns at the same ε and loss, as far as the table holds it."""
    table = json.loads((results / "table.json").read_text()) if (results / "table.json").exists() else []
    panels: list[Panel] = []
    for query, _ in FIG5:
        for method in ("laplace", "utility"):
            rows = [row for row in made["rows"] if (row["query"], row["method"]) == (query, method)]
            if not rows:
                continue
            ks = [row["k"] for row in rows]
            lines: list[Line] = [
                (f"paper, {c} components", ks, [row[f"erl_{c}c"] for row in rows], colour)
                for c, colour in ((4, "#1f77b4"), (2, "#ff7f0e"))
            ]
            lines.append(("blind", [ks[0], ks[-1]], [rows[0]["blind"]] * 2, "#000"))
            cell = f"{query}:{rows[0]['loss']}:1"
            for c, colour in ((4, "#2ca02c"), (2, "#98df8a")):
                own = [row[f"returned_{c}c"] for row in table if row["cell"] == cell]
                if own:
                    lines.append((f"learn(), {c} components", [ks[0], ks[-1]], [sum(own) / len(own)] * 2, colour))
            panels.append((f"{query}, {rows[0]['loss']}, {method}: ERL against k", lines, True))
    return panels


def svg(panels: list[Panel]) -> str:
    """Line plots, two in a row; the last field of a panel asks for logarithmic axes."""
    width, height, gap = 420, 240, 50
    parts = []
    for place, (title, lines, logarithmic) in enumerate(panels):
        x0, y0 = gap + (place % 2) * (width + gap), gap + (place // 2) * (height + 2 * gap)
        turn: Callable[[float], float] = math.log10 if logarithmic else float
        xs = [turn(v) for _, x, _, _ in lines for v in x]
        ys = [turn(v) for _, _, y, _ in lines for v in y]
        low, high, left, right = min(ys), max(ys) + 1e-9, min(xs), max(xs)
        parts.append(f'<rect x="{x0}" y="{y0}" width="{width}" height="{height}" fill="none" stroke="#888"/>')
        parts.append(f'<text x="{x0}" y="{y0 - 8}" font-size="13">{title}</text>')
        back: Callable[[float], float] = (lambda v: 10.0**v) if logarithmic else float
        for value, at, down, anchor in (
            (low, x0 - 4, y0 + height, "end"),
            (high, x0 - 4, y0 + 10, "end"),
            (left, x0, y0 + height + 14, "start"),
            (right, x0 + width, y0 + height + 14, "end"),
        ):
            parts.append(f'<text x="{at}" y="{down}" font-size="10" text-anchor="{anchor}">{back(value):.3g}</text>')
        for row, (label, x, y, colour) in enumerate(lines):
            path = " ".join(
                f"{x0 + width * (turn(a) - left) / (right - left):.1f},{y0 + height * (1 - (turn(b) - low) / (high - low)):.1f}"
                for a, b in zip(x, y, strict=True)
            )
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<text x="{x0 + width - 130}" y="{y0 + 14 + 12 * row}" font-size="10" fill="{colour}">{label}</text>')
    rows = (len(panels) + 1) // 2
    size = f'width="{2 * (width + gap) + gap}" height="{rows * (height + 2 * gap)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">' + "".join(parts) + "</svg>\n"
