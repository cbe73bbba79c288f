"""Certified accuracy and AUROC of the ADBench recipes: what remains when *every* row is moved by up to a radius (L2, raw columns).

    python benchmarks/accuracy/certified_tables.py                    # all clipless recipes at ε = 1, three seeds each
    python benchmarks/accuracy/certified_tables.py --tables yeast magic
    python benchmarks/accuracy/certified_tables.py --print            # the table of docs/certificates.md, from what is stored

Beside each certified figure stands what an attack leaves: every positive row's score is pushed down, every negative one's up, by
projected ascent inside the radius. The truth lies between the two. Rows: 4,000 of the test part at most, chosen at random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import lipdp
from lipdp import data, recipes
from lipdp.training.account import several_runs

RESULTS = Path(__file__).parents[1] / "results" / "accuracy" / "certified_tables.jsonl"
TABLES = ("yeast", "magic", "shuttle", "aloi", "skin", "campaign", "donors", "celeba", "census")
RADII = (0.0, 1e-3, 1e-2, 0.1, 0.3, 1.0)
MOST = 4000


def scores(model: torch.nn.Module, x: Tensor) -> Tensor:
    """Of the second class."""
    outputs = model(x)
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]


def attacked(model: torch.nn.Module, x: Tensor, y: Tensor, radius: float, steps: int = 20) -> float:
    """The AUROC that projected ascent leaves."""
    moved, sign = torch.zeros_like(x), torch.where(y > 0, -1.0, 1.0)
    for number in range(steps if radius else 0):
        leaf = moved.clone().requires_grad_()
        (slope,) = torch.autograd.grad((sign * scores(model, x + leaf)).sum(), leaf)
        moved = moved + 2 * radius / (number + 2) * slope / slope.norm(dim=1, keepdim=True).clamp_min(1e-30)
        moved = moved * (radius / moved.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    with torch.no_grad():
        return float(roc_auc_score(y, scores(model, x + moved)))


def run(table: str, seed: int) -> dict[str, object]:
    """Train as the recipe says; certify, and attack."""
    with several_runs():  # seeds are repetitions of one experiment, each reported with its own ε
        result = recipes.train(recipes.get(f"adbench-{table}"), seed=seed, evaluations=1)
    _, test, _ = data.load(f"adbench/{table}", download=False)
    chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:MOST]
    x, y = (tensor[chosen] for tensor in test.tensors)
    model = result.model.eval().requires_grad_(False)
    started = time.monotonic()
    areas = lipdp.certified_auroc(model, x, y, RADII)
    shares = lipdp.certified_accuracy(lipdp.certify(model, x, y), RADII)
    seconds = time.monotonic() - started
    left = {radius: attacked(model, x, y, radius) for radius in RADII}
    broken = [radius for radius in RADII if left[radius] < areas[radius]]
    return {
        "table": table, "seed": seed, "epsilon": result.epsilon, "delta": result.delta, "private": result.private, "rows": len(x),
        "auroc": {f"{r:g}": round(v, 5) for r, v in areas.items()}, "accuracy": {f"{r:g}": round(v, 5) for r, v in shares.items()},
        "attacked_auroc": {f"{r:g}": round(v, 5) for r, v in left.items()}, "broken": broken,
        "train_seconds": round(result.seconds, 1), "certify_seconds": round(seconds, 2),
    }  # fmt: skip


def stored() -> list[dict[str, object]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []


def print_table(rows: list[dict[str, object]]) -> None:
    """Means over seeds, in %: certified AUROC / what the attack leaves, and certified accuracy."""
    names = [f"{radius:g}" for radius in RADII]
    print(f"| certified AUROC (under attack), in % | seeds | {' | '.join(names)} |")
    print("|---|---|" + "---|" * len(names))
    for table in dict.fromkeys(str(row["table"]) for row in rows):
        own = [row for row in rows if row["table"] == table]
        cells = [
            f"{100 * statistics.mean(row['auroc'][n] for row in own):.1f} "
            f"({100 * statistics.mean(row['attacked_auroc'][n] for row in own):.1f})"
            for n in names
        ]
        print(f"| {table} | {len(own)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--print", action="store_true", dest="only_print")
    options = parser.parse_args()
    done = {(row["table"], row["seed"]) for row in stored()}
    for table in [] if options.only_print else options.tables:
        for seed in options.seeds:
            if (table, seed) in done:
                continue
            row = run(table, seed)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    print_table(stored())


if __name__ == "__main__":
    main()
