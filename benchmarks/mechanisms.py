"""The table of learned mechanisms against experts, and the paper's figures, from seeds, with times.

    python benchmarks/mechanisms.py table              # 6 query/loss pairs x 4 epsilons x 3 seeds -> table.csv, table.json
    python benchmarks/mechanisms.py table --seeds 0 --cells median:squared:1
    python benchmarks/mechanisms.py figures            # the paper's Figs 1, 4, 5 -> fig1.json, fig4.json, fig5.json and SVGs
    python benchmarks/mechanisms.py show               # print table.csv as Markdown

Results go to benchmarks/results/mechanisms. n = 100 points of [0, 10], replace-one. Test datasets are drawn from seeds that nothing else
uses (10^9 + ...): training, validation and held-out datasets come from streams of `learn`'s own seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from lipdp.mechanisms import Mixture, Problem, compare
from lipdp.mechanisms.distributions import draw
from lipdp.mechanisms.experts import best_expert

OUT = Path(__file__).parent / "results" / "mechanisms"
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


def cell(name: str, seed: int) -> dict[str, Any]:
    """Learn one cell and compare on test datasets, paired, from 4- and 2-component mixtures."""
    query, loss, text = name.split(":")
    problem = Problem.of(query, float(text), N, BOUNDS, loss)
    wall, cpu = time.perf_counter(), time.process_time()
    found = compare(query, float(text), N, BOUNDS, loss=loss, seed=seed)
    row: dict[str, Any] = {"cell": name, "seed": seed}
    times = {"seconds_wall": time.perf_counter() - wall, "seconds_cpu": time.process_time() - cpu}
    prior = Mixture(4, *BOUNDS)
    textbook = best_expert(
        problem, draw(prior, problem, 8000, TEST_SEED + 11), draw(prior, problem, 2000, TEST_SEED + 12), "textbook", releasable=False
    )
    for components in (4, 2):
        test = draw(Mixture(components, *BOUNDS), problem, TEST, TEST_SEED + 100 * seed + components)
        chosen, expert, learned = (m.losses(test, seed) for m in (found.chosen, found.expert, found.learned))
        gap = chosen - expert
        row |= {
            f"textbook_{components}c": float(textbook.losses(test, seed).mean()) * problem.loss_scale,
            f"expert_{components}c": float(expert.mean()) * problem.loss_scale,
            f"learned_{components}c": float(learned.mean()) * problem.loss_scale,
            f"returned_{components}c": float(chosen.mean()) * problem.loss_scale,
            f"ratio_{components}c": float(chosen.mean() / expert.mean()),
            f"ratio_error_{components}c": float(gap.std()) / math.sqrt(TEST) / float(expert.mean()),
        }
    titles = {"returned": found.chosen.report["returned"], "expert": found.expert.title, "learned": found.learned.title}
    return {**row, **titles, **times}


def table(names: list[str], seeds: list[int]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "table.json"
    done = {(row["cell"], row["seed"]): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    for seed in seeds:
        for name in names:
            row = done[name, seed] = cell(name, seed)
            print(
                f"{name} seed {seed}: expert {row['expert_4c']:.4g}, returned {row['returned_4c']:.4g} ({row['returned']}), ratio "
                f"{row['ratio_4c']:.3f} | 2c {row['ratio_2c']:.3f} | {row['seconds_cpu']:.0f} s cpu",
                flush=True,
            )
            order = {(cell_name, s): i for i, (s, cell_name) in enumerate((s, c) for s in range(100) for c in cells())}
            rows = sorted(done.values(), key=lambda r: order.get((r["cell"], r["seed"]), 10**6))
            path.write_text(json.dumps(rows, indent=1) + "\n")
            with (OUT / "table.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


def show() -> None:
    """Averages over seeds, as Markdown."""
    rows = json.loads((OUT / "table.json").read_text())
    print("| cell | textbook | tuned expert | returned | ratio (worst seed) | 2 components: ratio (worst) | what | cpu s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in cells():
        own = [row for row in rows if row["cell"] == name]
        if own:
            mean = {key: sum(row[key] for row in own) / len(own) for key in own[0] if isinstance(own[0][key], float)}
            worst = {c: max(row[f"ratio_{c}c"] for row in own) for c in (4, 2)}
            what = sorted({row["learned"] if row["returned"] == "learned" else "expert" for row in own})
            print(
                f"| {name} | {mean['textbook_4c']:.4g} | {mean['expert_4c']:.4g} | {mean['returned_4c']:.4g} | "
                f"{mean['ratio_4c']:.3f} ({worst[4]:.3f}) | {mean['ratio_2c']:.3f} ({worst[2]:.3f}) | {'; '.join(what)} | "
                f"{max(row['seconds_cpu'] for row in own):.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "figures", "show"))
    parser.add_argument("--cells", nargs="*", default=None, help="query:loss:epsilon, as in the table")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=int, default=5, help="training runs for each point of Fig. 5")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    if given.what == "table":
        table(given.cells or cells(), given.seeds)
    elif given.what == "show":
        show()
    else:
        from mechanism_figures import figures

        figures(OUT, given.runs)


if __name__ == "__main__":
    main()
