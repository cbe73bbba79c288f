"""The table of learned mechanisms against experts, and the paper's figures, from seeds, with times.

    python benchmarks/mechanisms.py table              # 6 query/loss pairs x 4 epsilons x 3 seeds -> table.csv, table.json
    python benchmarks/mechanisms.py table --seeds 0 --cells median:squared:1
    python benchmarks/mechanisms.py figures            # the paper's Figs 1, 4, 5 -> fig1.json, fig4.json, fig5.json and SVGs
    python benchmarks/mechanisms.py show               # print table.csv as Markdown

Results go to benchmarks/results/mechanisms. n = 100 points of [0, 10], replace-one. Test datasets are drawn from seeds that nothing
else uses (10^9 + ...): training, validation and held-out datasets come from streams of `learn`'s own seed.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import math
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lipdp.mechanisms import Mechanism, Mixture, Problem, compare
from lipdp.mechanisms.distributions import draw
from lipdp.mechanisms.experts import best_expert
from lipdp.mechanisms.learn_utility import UtilitySettings, learn_utility
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

OUT = Path(__file__).parent / "results" / "mechanisms"
DOCS = Path(__file__).parent.parent / "docs" / "mechanisms"
N, BOUNDS, TEST = 100, (0.0, 10.0), 8000
PAIRS = (
    ("mean", "squared"),
    ("variance", "squared"),
    ("median", "squared"),
    ("p10", "squared"),
    ("median", "quantile"),
    ("p10", "quantile"),
)
EPSILONS = (0.1, 0.5, 1.0, 2.0)
TEST_SEED = 10**9


def cells() -> list[str]:
    return [f"{query}:{loss}:{epsilon:g}" for query, loss in PAIRS for epsilon in EPSILONS]


@cache
def references(name: str) -> tuple[Mechanism, Mechanism]:
    """The textbook and tuned experts of the anchors (smooth sensitivity competes too), fitted to datasets of their own."""
    problem = asked(name)
    fit, validation = (draw(Mixture(4, *BOUNDS), problem, count, TEST_SEED + 11 + i) for i, count in enumerate((16_000, 3000)))
    textbook = best_expert(problem, fit, validation, "textbook", releasable=False)
    return textbook, best_expert(problem, fit, validation, "tuned", releasable=False)


def asked(name: str) -> Problem:
    query, loss, epsilon = name.split(":")
    return Problem.of(query, float(epsilon), N, BOUNDS, loss)


def cell(name: str, seed: int) -> dict[str, Any]:
    """Learn one cell and compare on test datasets, paired, from 4- and 2-component mixtures."""
    problem = asked(name)
    wall, cpu = time.perf_counter(), time.process_time()
    found = compare(problem.query, problem.epsilon, N, BOUNDS, loss=problem.loss, seed=seed)
    times = {"seconds_wall": time.perf_counter() - wall, "seconds_cpu": time.process_time() - cpu}
    textbook, tuned = references(name)
    row: dict[str, Any] = {"cell": name, "seed": seed}
    for components in (4, 2):
        test = draw(Mixture(components, *BOUNDS), problem, TEST, TEST_SEED + 100 * (seed + 1) + components)
        # "strong" is the expert that learn() has to beat.
        every = {"returned": found.chosen, "learned": found.learned, "strong": found.expert, "tuned": tuned, "textbook": textbook}
        losses = {who: mechanism.losses(test, seed) for who, mechanism in every.items()}
        row |= {f"{who}_{components}c": float(value.mean()) * problem.loss_scale for who, value in losses.items()}
        for who in ("tuned", "strong"):
            gap, base = losses["returned"] - losses[who], float(losses[who].mean())
            row[f"to_{who}_{components}c"] = 1 + float(gap.mean()) / base
            row[f"to_{who}_error_{components}c"] = float(gap.std()) / math.sqrt(TEST) / base
    titles = {"returned": found.chosen.report["returned"], "learned": found.learned.title}
    titles |= {"strong": found.expert.title, "tuned": tuned.title, "textbook": textbook.title}
    return {**row, **titles, **times}


def table(names: list[str], seeds: list[int]) -> None:
    for seed in seeds:
        for name in names:
            row = cell(name, seed)
            keep(row)
            print(
                f"{name} seed {seed}: {row['returned']} {row['returned_4c']:.4g}, to tuned {row['to_tuned_4c']:.3f}, "
                f"to strong {row['to_strong_4c']:.3f} | 2c {row['to_tuned_2c']:.3f} {row['to_strong_2c']:.3f} | "
                f"{row['seconds_cpu']:.0f} s cpu",
                flush=True,
            )


def keep(row: dict[str, Any]) -> None:
    """Add a row to table.json and table.csv; locked, so that two processes can work on different cells."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "table.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        rows = {(old["cell"], old["seed"]): old for old in (json.loads(text) if text else [])}
        rows[row["cell"], row["seed"]] = row
        order = {name: place for place, name in enumerate(cells())}
        ordered = sorted(rows.values(), key=lambda r: (order.get(r["cell"], len(order)), r["seed"]))
        file.truncate(0)
        file.write(json.dumps(ordered, indent=1) + "\n")
        with (OUT / "table.csv").open("w", newline="") as sheet:
            writer = csv.DictWriter(sheet, list(ordered[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(ordered)


def show() -> None:
    """Averages over seeds, as Markdown."""
    rows = json.loads((OUT / "table.json").read_text())
    heads = ["cell", "textbook", "tuned", "strong", "returned", "÷ tuned (worst seed)", "÷ strong", "2c ÷ tuned", "2c ÷ strong"]
    print(f"| {' | '.join([*heads, 'learned', 'cpu s'])} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in cells():
        own = [row for row in rows if row["cell"] == name]
        if own:
            mean = {key: sum(row[key] for row in own) / len(own) for key in own[0] if isinstance(own[0][key], float)}
            worst = {key: max(row[key] for row in own) for key in mean}
            ratios = [
                f"{mean[key]:.3f} ({worst[key]:.3f})" for key in ("to_tuned_4c", "to_strong_4c", "to_tuned_2c", "to_strong_2c")
            ]
            losses = [f"{mean[key]:.4g}" for key in ("textbook_4c", "tuned_4c", "strong_4c", "returned_4c")]
            times = f"{sum(row['returned'] == 'learned' for row in own)} of {len(own)}"
            print(f"| {name} | {' | '.join(losses)} | {' | '.join(ratios)} | {times} | {worst['seconds_cpu']:.0f} |")


# --- the paper's figures ---

KS = (0.01, 0.03, 0.1, 0.3, 1.0, 10.0)
FIG5 = (("mean", "squared"), ("variance", "squared"), ("median", "quantile"), ("p10", "quantile"))


def figures(which: list[int], runs: int) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for number, make in ((1, figure1), (4, figure4), (5, lambda: figure5(runs))):
        if number in which:
            start = time.perf_counter()
            content = make()
            content["seconds"] = time.perf_counter() - start
            (OUT / f"fig{number}.json").write_text(json.dumps(content) + "\n")
            print(f"fig{number}: {content['seconds']:.0f} s", flush=True)


def figure1() -> dict[str, Any]:
    """Fits of sin x + ½cos 10x by k-Lipschitz networks of three layers, ReLU (the paper's) and GroupSort (ours)."""
    x = torch.linspace(0, 6.28, 400)[:, None]
    y = torch.sin(x) + 0.5 * torch.cos(10 * x)
    made: dict[str, Any] = {"x": x[:, 0].tolist(), "target": y[:, 0].tolist(), "fits": {}, "mse": {}}
    panels = []
    for activation in ("relu", "groupsort"):
        lines = [("target", made["x"], made["target"], "#bbb")]
        for k, colour in zip((0.5, 1.0, 2.0, 5.0, 10.0), COLOURS, strict=True):
            torch.manual_seed(0)
            share = k ** (1 / 3)
            layers = [L1Linear(1, 100, share), L1Linear(100, 100, share), L1Linear(100, 1, share)]
            between = torch.nn.ReLU if activation == "relu" else Sort
            network = torch.nn.Sequential(layers[0], between(), layers[1], between(), layers[2])
            optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
            for _ in range(1200):
                optimiser.zero_grad()
                loss = ((network(x) - y) ** 2).mean()
                loss.backward()
                optimiser.step()
            with torch.no_grad():
                fit = network(x)[:, 0].tolist()
            made["fits"][f"{activation} k={k:g}"] = fit
            made["mse"][f"{activation} k={k:g}"] = float(loss.detach())
            lines.append((f"k = {k:g}", made["x"], fit, colour))
        panels.append((f"{activation}: fit of sin x + ½cos 10x", lines, False))
    svg("fig1", panels)
    return made


def figure4() -> dict[str, Any]:
    """Response distributions for the median on fresh datasets: the paper's network (k = 10), and permute-and-flip, learned."""
    problem = Problem.of("median", 1.0, N, BOUNDS, "quantile")
    train = draw(Mixture(4, *BOUNDS), problem, 10_000, 5)
    fresh = draw(Mixture(4, *BOUNDS), problem, 4, 6)
    paper = utility_mechanism(problem, train_utility(problem, 10.0, train, 0, Training(epochs=6, rate=3e-3)))
    ours = learn_utility(problem, train, UtilitySettings(), 0)
    made: dict[str, Any] = {"datasets": (fresh * 10).tolist(), "median": (problem.query(fresh) * 10).tolist()}
    panels = []
    for name, mechanism in (("paper", paper), ("ours", ours)):
        chances = mechanism.table(fresh)
        made[name] = {"responses": mechanism.responses.tolist(), "probabilities": chances.tolist()}
        made[name]["expected_loss"] = float(mechanism.losses(draw(Mixture(4, *BOUNDS), problem, 2000, 7)).mean())
    for i in range(4):
        bins = torch.histc(fresh[i] * 10, 25, 0, 10) / N
        lines: list[Line] = [("data", [0.2 + 0.4 * b for b in range(25)], bins.tolist(), "#e377c2")]
        for name, colour in (("paper", "#2ca02c"), ("ours", "#1f77b4")):
            width = 10 / len(made[name]["responses"]) / 0.4  # as a density on the data's bins
            lines.append((name, made[name]["responses"], [p / width for p in made[name]["probabilities"][i]], colour))
        lines.append(("median", [made["median"][i]] * 2, [0.0, 0.3], "#000"))
        panels.append((f"dataset {i + 1}: responses, ε = 1, quantile loss", lines, False))
    svg("fig4", panels)
    return made


def figure5(runs: int) -> dict[str, Any]:
    """ERL against k, both methods, four queries, on 4- and 2-component datasets, ε = 1, with the data-blind baseline."""
    rows, panels = [], []
    how = Training(epochs=3, rate=3e-3)
    for query, loss in FIG5:
        for method in ("laplace", "utility"):
            problem = Problem.of(query, 1.0, N, BOUNDS, loss if method == "utility" else "squared")
            train = draw(Mixture(4, *BOUNDS), problem, 10_000, 5)
            tests = {c: draw(Mixture(c, *BOUNDS), problem, 2000, 8 + c) for c in (4, 2)}
            responses = paper_responses()
            blind = blind_loss(problem, tests[4], responses if method == "utility" else None) * problem.loss_scale
            curves: dict[int, list[float]] = {4: [], 2: []}
            for k in KS:
                sums = {4: 0.0, 2: 0.0}
                for run in range(runs):
                    with torch.enable_grad():
                        network = (train_laplace if method == "laplace" else train_utility)(problem, k, train, 100 + run, how)
                    with torch.no_grad():
                        for c, test in tests.items():
                            erl = (
                                laplace_erl(network, problem, test)
                                if isinstance(network, LaplaceNetwork)
                                else utility_erl(network, problem, test, responses)
                            )
                            sums[c] += float(erl) * problem.loss_scale / runs
                rows.append(
                    {
                        "query": query,
                        "loss": problem.loss,
                        "method": method,
                        "k": k,
                        "runs": runs,
                        "blind": blind,
                        **{f"erl_{c}c": value for c, value in sums.items()},
                    }
                )
                for c in (4, 2):
                    curves[c].append(sums[c])
            lines = [(f"{c} components", list(KS), curves[c], colour) for c, colour in ((4, "#1f77b4"), (2, "#ff7f0e"))]
            panels.append(
                (
                    f"{query}, {problem.loss}, {method}: ERL against k",
                    [*lines, ("blind", [KS[0], KS[-1]], [blind] * 2, "#000")],
                    True,
                )
            )
            print(query, method, [f"{value:.3g}" for value in curves[4]], "blind", f"{blind:.3g}", flush=True)
    svg("fig5", panels)
    return {"rows": rows, "epsilon": 1.0, "epochs": how.epochs}


class Sort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-1], -1, 2).sort(-1).values.reshape(x.shape)


COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
Line = tuple[str, list[float], list[float], str]


def svg(name: str, panels: list[tuple[str, list[Line], bool]]) -> None:
    """Line plots, two in a row, as an SVG beside the numbers; the last field of a panel asks for logarithmic axes."""
    width, height, gap = 420, 240, 50
    parts = []
    for place, (title, lines, logarithmic) in enumerate(panels):
        x0, y0 = gap + (place % 2) * (width + gap), gap + (place // 2) * (height + 2 * gap)
        turn = math.log10 if logarithmic else float
        xs = [turn(v) for _, x, _, _ in lines for v in x]
        ys = [turn(v) for _, _, y, _ in lines for v in y]
        low, high, left, right = min(ys), max(ys) + 1e-9, min(xs), max(xs)
        parts.append(f'<rect x="{x0}" y="{y0}" width="{width}" height="{height}" fill="none" stroke="#888"/>')
        parts.append(f'<text x="{x0}" y="{y0 - 8}" font-size="13">{title}</text>')
        back = (lambda v: 10**v) if logarithmic else (lambda v: v)
        for value, x, y, anchor in (
            (low, x0 - 4, y0 + height, "end"),
            (high, x0 - 4, y0 + 10, "end"),
            (left, x0, y0 + height + 14, "start"),
            (right, x0 + width, y0 + height + 14, "end"),
        ):
            parts.append(f'<text x="{x}" y="{y}" font-size="10" text-anchor="{anchor}">{back(value):.3g}</text>')
        for row, (label, x, y, colour) in enumerate(lines):
            points = " ".join(
                f"{x0 + width * (turn(a) - left) / (right - left):.1f},{y0 + height * (1 - (turn(b) - low) / (high - low)):.1f}"
                for a, b in zip(x, y, strict=True)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<text x="{x0 + width - 90}" y="{y0 + 14 + 12 * row}" font-size="10" fill="{colour}">{label}</text>')
    rows = (len(panels) + 1) // 2
    size = f'width="{2 * (width + gap) + gap}" height="{rows * (height + 2 * gap)}"'
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">' + "".join(parts) + "</svg>\n"
    DOCS.mkdir(parents=True, exist_ok=True)
    for folder in (OUT, DOCS):
        (folder / f"{name}.svg").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "figures", "show"))
    parser.add_argument("--cells", nargs="*", default=None, help="query:loss:epsilon, as in the table")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--figures", nargs="*", type=int, default=[1, 4, 5])
    parser.add_argument("--runs", type=int, default=5, help="training runs for each point of Fig. 5")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    if given.what == "table":
        table(given.cells or cells(), given.seeds)
    elif given.what == "show":
        show()
    else:
        figures(given.figures, given.runs)


if __name__ == "__main__":
    main()
