"""The table of learned mechanisms against experts, and the numbers of the paper's figures: from seeds, in parallel, resumable.

    python benchmarks/learned/mechanisms.py run --workers 2      # everything: 24 cells x 3 seeds, Figs 1, 2, 4 and 5, sizes
    python benchmarks/learned/mechanisms.py run --only cell --cells median:squared:1 --seeds 0
    python benchmarks/learned/mechanisms.py run --split tuning --only cell --out DIR   # other draws, to try things out on
    python benchmarks/learned/mechanisms.py merge                               # jobs -> table.json, table.csv, fig*.json
    python benchmarks/learned/mechanisms.py show                                # table.json as Markdown
    python benchmarks/learned/mechanisms.py plot                                # fig*.json as SVG, also into docs/mechanisms

`run` writes one small file for each job into DIR/jobs and leaves out those that are there: a run that was cut short goes on.
n = 100 points of [0, 10], replace-one. Every seed is a hash of what it is for (`stream`): tuning and test draws can't coincide.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mechanisms_figures as figures
import torch

from lipdp.mechanisms import Mechanism, Mixture, Problem, Settings, compare
from lipdp.mechanisms.distributions import draw
from lipdp.mechanisms.experts import best_experts
from lipdp.mechanisms.learning import expert_draws

RESULTS = Path(__file__).parents[1] / "results" / "mechanisms"
N, BOUNDS, TEST = 100, (0.0, 10.0), 16_000
ROUND = 6
"""Which test draws: those of a round are looked at once; after a change to the method, the next round is used."""
PAIRS = (
    ("mean", "squared"),
    ("variance", "squared"),
    ("median", "squared"),
    ("p10", "squared"),
    ("median", "quantile"),
    ("p10", "quantile"),
)
EPSILONS = (0.1, 0.5, 1.0, 2.0)


def stream(*labels: object) -> int:
    """A seed of its own for each purpose."""
    text = "/".join(map(str, labels))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def cells() -> list[str]:
    return [f"{query}:{loss}:{epsilon:g}" for query, loss in PAIRS for epsilon in EPSILONS]


def asked(name: str) -> Problem:
    query, loss, epsilon = name.split(":")
    return Problem.of(query, float(epsilon), N, BOUNDS, loss)


def cell(name: str, seed: int, split: str, scale: int = 1) -> dict[str, Any]:
    """Learn one cell and compare on test datasets, paired, from 4- and 2-component mixtures.

    The experts of all levels (smooth sensitivity competes) are fitted to the draws that `learn` fits its own to, so where it
    falls back to one of them, the ratio is exactly 1. ``scale`` > 1 is for trying this file.
    """
    problem, work = asked(name), Settings() if scale == 1 else Settings.quick()
    learn_seed = stream(split, ROUND, "learn", seed)
    wall, cpu = time.perf_counter(), time.process_time()
    asking = (problem.query, problem.epsilon, N, BOUNDS)
    found = compare(*asking, loss=problem.loss, robustness=None, seed=learn_seed, settings=work)
    times = {"seconds_wall": time.perf_counter() - wall, "seconds_cpu": time.process_time() - cpu}
    levels = best_experts(problem, *expert_draws(problem, work, learn_seed), ("strong", "tuned", "textbook"), releasable=False)
    every: dict[str, Mechanism] = {"returned": found.chosen, "learned": found.learned}
    every |= {str(level): mechanism for level, mechanism in levels.items()}
    row: dict[str, Any] = {"cell": name, "seed": seed, "split": split, "round": ROUND}
    for components in (4, 2):
        test = draw(Mixture(components, *BOUNDS), problem, TEST // scale, stream(split, ROUND, "datasets", components, seed))
        noise = stream(split, ROUND, "noise", seed)
        losses = {who: mechanism.losses(test, noise) for who, mechanism in every.items()}
        row |= {f"{who}_{components}c": float(value.mean()) * problem.loss_scale for who, value in losses.items()}
        for who in ("tuned", "strong"):
            gap, base = losses["returned"] - losses[who], float(losses[who].mean())
            row[f"to_{who}_{components}c"] = 1 + float(gap.mean()) / base
            row[f"to_{who}_error_{components}c"] = float(gap.std()) / math.sqrt(test.shape[0]) / base
    titles = {who: mechanism.title for who, mechanism in every.items()}
    return {**row, "is": found.chosen.report["returned"], **titles, **times}


# --- jobs: a name, what to call, and roughly how long it takes (the longest begin first) ---

Job = tuple[str, dict[str, Any], float]


def jobs(given: argparse.Namespace) -> list[Job]:
    made: list[Job] = []
    for name in given.cells or cells():
        for seed in given.seeds:
            query, loss, _ = name.split(":")
            cost = (40.0 if loss == "quantile" else 30.0) if query in ("median", "p10") else 20.0
            arguments = {"name": name, "seed": seed, "split": given.split, "scale": given.scale}
            made.append((f"cell-{name.replace(':', '-')}-{seed}", {"what": "cell", **arguments}, cost))
    for query, method, k in figures.points():
        arguments = {"query": query, "method": method, "k": k, "runs": given.runs, "scale": given.scale}
        cost = 5.0 * given.runs if method == "utility" else 1.5 * given.runs
        made.append((f"fig5-{query}-{method}-{k:g}", {"what": "fig5", **arguments}, cost))
    made += [
        (name, {"what": name, "scale": given.scale}, cost)
        for name, cost in (("fig4", 35.0), ("fig1", 40.0), ("sizes", 30.0), ("fig2", 1.0))
    ]
    chosen = [job for job in made if given.only is None or job[0].split("-")[0] in given.only]
    return sorted(chosen, key=lambda job: -job[2])


def work(task: tuple[str, dict[str, Any], Path]) -> str:
    """One job in a worker; its file appears whole or not at all."""
    name, arguments, folder = task
    torch.set_num_threads(1)
    torch.manual_seed(stream("job", name))
    start = time.process_time()
    calls: dict[str, Callable[..., dict[str, Any]]]
    calls = {"cell": cell, "fig1": figures.figure1, "fig2": figures.figure2, "fig4": figures.figure4, "fig5": figures.figure5_point}
    calls["sizes"] = figures.figure_sizes
    content = calls[arguments["what"]](**{key: value for key, value in arguments.items() if key != "what"})
    content = {"job": name, "job_seconds_cpu": time.process_time() - start, **content}
    partial = folder / f".{name}.partial"
    partial.write_text(json.dumps(content) + "\n")
    partial.rename(folder / f"{name}.json")
    return told(content)


def told(row: dict[str, Any]) -> str:
    text = f"{row['job']}: {row['job_seconds_cpu']:.0f} s"
    if "to_tuned_4c" in row:
        ratios = f"÷ tuned {row['to_tuned_4c']:.4f} (2c {row['to_tuned_2c']:.4f}), ÷ strong {row['to_strong_4c']:.4f}"
        text += (
            f", {row['is']} {row['returned_4c']:.4g}, {ratios} (2c {row['to_strong_2c']:.4f}), learn() {row['seconds_cpu']:.0f} s"
        )
    return text


def run(given: argparse.Namespace) -> None:
    """All jobs that are not there yet, in parallel, until they are done or the time is over."""
    start, folder = time.monotonic(), given.out / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [(name, arguments, folder) for name, arguments, _ in jobs(given) if not (folder / f"{name}.json").exists()]
    print(f"{len(waiting)} jobs, {given.workers} workers", flush=True)
    done = 0
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        results = pool.imap_unordered(work, waiting)
        for _ in waiting:
            try:
                print(results.next(timeout=max(given.limit_seconds - (time.monotonic() - start), 0.0)), flush=True)
                done += 1
            except Exception as error:  # a job's own error is told, and the others go on
                if not isinstance(error, multiprocessing.TimeoutError):
                    print(f"a job failed: {error!r}", flush=True)
                    continue
                print("the time is over: run the same command again to go on", flush=True)
                break
    print(f"{done} of {len(waiting)} jobs, {time.monotonic() - start:.0f} s", flush=True)


def merge(given: argparse.Namespace) -> None:
    """What was computed, as few files."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((given.out / "jobs").glob("*.json"))}
    order = {name: place for place, name in enumerate(cells())}
    rows = [content for name, content in found.items() if name.startswith("cell-")]
    rows.sort(key=lambda row: (order[row["cell"]], row["seed"]))
    RESULTS.mkdir(parents=True, exist_ok=True)
    if rows:
        (RESULTS / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
        with (RESULTS / "table.csv").open("w", newline="") as sheet:
            writer = csv.DictWriter(sheet, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for name in ("fig1", "fig2", "fig4", "sizes"):
        if name in found:
            (RESULTS / f"{name}.json").write_text(json.dumps(found[name]) + "\n")
    places = {f"fig5-{query}-{method}-{k:g}": place for place, (query, method, k) in enumerate(figures.points())}
    points = sorted((content for name, content in found.items() if name in places), key=lambda row: places[row["job"]])
    if points:
        (RESULTS / "fig5.json").write_text(json.dumps({"epsilon": 1.0, "rows": points}, indent=1) + "\n")
    print(f"{len(rows)} rows of the table, {len(points)} points of Fig. 5 -> {RESULTS}")


def show() -> None:
    """Averages over seeds, as Markdown."""
    rows = json.loads((RESULTS / "table.json").read_text())
    heads = ["cell", "textbook", "tuned", "strong", "returned", "÷ tuned (worst seed)", "÷ strong", "2c ÷ tuned", "2c ÷ strong"]
    print(f"| {' | '.join([*heads, 'learned', 'cpu s'])} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in cells():
        own = [row for row in rows if row["cell"] == name]
        if own:
            mean = {key: sum(row[key] for row in own) / len(own) for key in own[0] if isinstance(own[0][key], float)}
            worst = {key: max(row[key] for row in own) for key in mean}
            keys = ("to_tuned_4c", "to_strong_4c", "to_tuned_2c", "to_strong_2c")
            ratios = [f"{mean[key]:.3f} ({worst[key]:.3f})" for key in keys]
            losses = [f"{mean[key]:.4g}" for key in ("textbook_4c", "tuned_4c", "strong_4c", "returned_4c")]
            times = f"{sum(row['is'] == 'learned' for row in own)} of {len(own)}"
            print(f"| {name} | {' | '.join(losses)} | {' | '.join(ratios)} | {times} | {worst['seconds_cpu']:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "merge", "show", "plot"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder whose jobs/ is written, or read by merge")
    parser.add_argument("--workers", type=int, default=1, help="processes; each uses one thread")
    parser.add_argument("--limit-seconds", type=float, default=1e6, help="stop after this time; finished jobs are kept")
    parser.add_argument("--only", nargs="*", choices=("cell", "fig1", "fig2", "fig4", "fig5", "sizes"), help="kinds of jobs")
    parser.add_argument("--cells", nargs="*", help="query:loss:epsilon, as in the table")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--split", choices=("test", "tuning"), default="test", help="tuning: to look at while changing things")
    parser.add_argument("--runs", type=int, default=5, help="training runs for each point of Fig. 5")
    parser.add_argument("--scale", type=int, default=1, help="above 1: quick settings and fewer datasets, to try this file")
    given = parser.parse_args()
    if given.command == "run":
        run(given)
    elif given.command == "merge":
        merge(given)
    elif given.command == "show":
        show()
    else:
        figures.plot(RESULTS)


if __name__ == "__main__":
    main()
