"""Look for the settings of a tabular recipe at ε = 1, on held-out fifths of the training part.

    python benchmarks/tables/search.py --tables magic,yeast --workers 12 --seconds 250 --out found
    python benchmarks/tables/search.py --tables magic,yeast --out found --show

A trial is the mean AUROC over several splits of the training part (12 for yeast, whose AUROC varies by ±4 from split to split, 3
for magic), one private run on each. Two trials of three change one of the best six so far, the others are random. At the end the
best twelve are run again on twice as many other splits: the ranking that counts. Every trial is a line of OUT/TABLE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from lipdp import data
from lipdp.recipes import Recipe, get, prepare
from lipdp.recipes.run import auroc, class_margins
from lipdp.training import fit

SPLITS = {"yeast": 12, "magic": 3}
Settings = dict[str, Any]


def drawn(table: str, draw: random.Random) -> Settings:
    """Random settings. Lengths and shares of the budget are few, for each new pair takes the accountant a second."""

    def log(low: float, high: float) -> float:
        return float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.3g}")

    if table == "yeast":
        return {
            "steps": draw.choice((2, 3, 4, 5, 8)),
            "options.landmarks": draw.choice((200, 400, 800)),
            "options.scale": log(1.5, 5),
            "options.ridge": log(1e-5, 1e-3),
            "options.radius": draw.choice((4.0, 5.0, 6.0, 8.0)),
            "options.clip": log(0.1, 0.7),
            "temperature": log(2, 12),
            "learning_rate": log(4, 25),
            "momentum": draw.choice((0.0, 0.5, 0.9)),
            "class_weights": draw.choice((None, (0.5, 1.0), (0.7, 1.0))),
            "ema_decay": draw.choice((None, 0.5)),
        }
    return {
        "steps": draw.choice((60, 120, 240)),
        "statistics_budget": draw.choice((0.02, 0.05, 0.1)),
        "options.centre": True,
        "options.fourier": draw.choice((600, 1000)),
        "options.each": draw.choice((None, 2, 3)),
        "options.scale": log(0.7, 4.5),
        "options.reach": draw.choice((None, 2.0, 3.0, 4.0)),
        "options.compress": draw.choice((None, None, 1.0, 2.0)),
        "options.clip": log(0.05, 0.7),
        "temperature": log(0.4, 4),
        "learning_rate": log(3, 30),
        "momentum": draw.choice((0.9, 0.95)),
        "class_weights": draw.choice((None, (0.5, 1.0), (0.7, 1.0))),
        "ema_decay": draw.choice((0.9, 0.95, 0.98)),
    }


def varied(settings: Settings, table: str, draw: random.Random) -> Settings:
    """One to three settings changed: numbers by a factor, others drawn anew."""
    fresh, new = drawn(table, draw), dict(settings)
    for name in draw.sample(list(settings), draw.choice((1, 2, 2, 3))):
        tuned = name in ("options.scale", "options.ridge", "options.clip", "temperature", "learning_rate")
        new[name] = float(f"{settings[name] * math.exp(draw.gauss(0, 0.35)):.3g}") if tuned else fresh[name]
    return new


def recipe_of(table: str, settings: Settings, records: int) -> Recipe:
    """The table's recipe with these settings; yeast is taken whole in each step, magic by thirds."""
    batch = records if table == "yeast" else records // 3
    fields = {name: value for name, value in settings.items() if name != "steps"}
    chosen = get(f"adbench-{table}").changed(fields)
    return chosen.but(batch_size=batch, epochs=(settings["steps"] - 1e-3) * batch / records)


def score(table: str, settings: Settings, splits: range) -> list[float]:
    """AUROC on each of these held-out parts."""
    learn, _, info = data.load(f"adbench/{table}")
    found = []
    for number in splits:
        part, held_out = data.split(learn, 0.2, seed=number)
        recipe = recipe_of(table, settings, len(part))
        ready = prepare(recipe, info, epsilon=1.0, dataset_size=len(part), seed=number)
        assert ready.plan.steps == settings["steps"]
        fit(ready.model, ready.loss, ready.optimizer, ready.plan, part, seed=number, scheduler=ready.scheduler,
            ema_decay=recipe.ema_decay, evaluations=1, microbatch_size=1024)  # fmt: skip
        rows, labels = held_out.tensors
        found.append(auroc(class_margins(ready.model, rows), labels == 1))
    return found


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    file = folder / f"{table}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def tuples(settings: Settings) -> Settings:
    """As they were before JSON made lists of them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def best(trials: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    kept = {json.dumps(trial["settings"], sort_keys=True): trial for trial in trials if trial["stage"] == stage}
    return sorted(kept.values(), key=lambda trial: -trial["mean"])


def work(table: str, number: int, workers: int, until: float, out: str) -> None:
    """One process: trials until the time is over, its share of the confirmations at the end."""
    torch.set_num_threads(1)
    folder, draw, count = Path(out), random.Random(f"{table} {number} {time.time()}"), SPLITS[table]
    confirming = until - 0.25 * (until - time.time())

    def tried(settings: Settings, stage: str, splits: range) -> None:
        started = time.time()
        try:
            scores = score(table, settings, splits)
        except (ValueError, RuntimeError) as error:
            print(table, "failed:", error, settings, flush=True)
            return
        line = {"stage": stage, "mean": statistics.fmean(scores), "std": statistics.pstdev(scores), "scores": scores,
                "settings": settings, "seconds": round(time.time() - started, 2)}  # fmt: skip
        with (folder / f"{table}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    while time.time() < confirming:
        parents = best(read(folder, table), "search")[:6]
        fresh = len(parents) < 6 or draw.random() < 0.35
        tried(
            drawn(table, draw) if fresh else varied(tuples(draw.choice(parents)["settings"]), table, draw), "search", range(count)
        )
    for place, trial in enumerate(best(read(folder, table), "search")[:12]):
        if time.time() < until and place % workers == number:
            tried(tuples(trial["settings"]), "confirm", range(100, 100 + 2 * count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="magic,yeast")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--out", type=Path, default=Path("found"))
    parser.add_argument("--show", action="store_true", help="only print what was found")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tables = options.tables.split(",")
    if not options.show:
        until, each = time.time() + options.seconds, max(1, options.workers // len(tables))
        context = multiprocessing.get_context("spawn")
        jobs = [
            context.Process(target=work, args=(table, number, each, until, str(options.out)))
            for table in tables
            for number in range(each)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    for table in tables:
        trials = read(options.out, table)
        print(table, len(trials), "trials")
        for stage in ("confirm", "search"):
            for trial in best(trials, stage)[:4]:
                print(f"  {stage} {100 * trial['mean']:.2f} ± {100 * trial['std']:.2f}", json.dumps(trial["settings"]))


if __name__ == "__main__":
    main()
