"""Networks without a front-end, proved against clipped: MLP, LeNet, VGG, ResNet, Mixer at ε = 3 and 10, after the same tuning.

    python benchmarks/out_of_the_box.py noise --out found                                 multipliers by PLD (needs dp-accounting)
    python benchmarks/out_of_the_box.py run --out found --device cuda --workers 6 --seconds 300
    python benchmarks/out_of_the_box.py table --out found                                 table.md, table.csv
    python benchmarks/out_of_the_box.py tightness --out found                             tightness.json: before training, on a CPU
    python benchmarks/out_of_the_box.py recipes --out found                               src/lipdp/recipes/grid_found.py

Each cell (dataset, network, method, ε) gets the same number of trials on a held-out tenth of the training set: its recipe's start,
three random ones, then changes of the family's best. The best is trained on the whole training set with three seeds, and only those
runs read the test set. Every run is a line of OUT/*.jsonl, which ``lipdp pareto`` draws; what was done is not done again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import pprint
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from lipdp.data import info
from lipdp.recipes.grid import DATASETS, NETWORKS, grid_name
from out_of_the_box_runs import BATCH, DELTA, HELD_OUT, Cell, Job, Noise, evaluated_steps, perform, untrained

EPSILONS, STEPS, SEEDS, RANDOM_ROUNDS = (3.0, 10.0), (100, 200), 3, 4
METHODS = ("clipless", "bookkeeping")
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "clipless": {"temperature": (20, 300), "options.clip": (0.05, 0.6), "learning_rate": (0.5, 12)},
    "bookkeeping": {"temperature": (0.5, 12), "max_grad_norm": (0.05, 1), "learning_rate": (0.4, 8)},
}
START = {
    "clipless": {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 3.0},
    "bookkeeping": {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "tanh"},
}
SPREAD = math.log(1.7)


def proposed(cell: Cell, number: int, known: list[dict[str, Any]], steps: tuple[int, ...]) -> Job:
    """The cell's trial of this round; ``known`` are the trials of its family, at all budgets."""
    draw = random.Random(f"{cell} {number}")
    ranges = RANGES[cell.method]
    if number == 0:
        return Job(cell, "trial", 0, dict(START[cell.method]), steps[-1])
    if number < RANDOM_ROUNDS or not known:
        settings: dict[str, Any] = {
            name: _short(math.exp(draw.uniform(math.log(low), math.log(high)))) for name, (low, high) in ranges.items()
        }
        if cell.method == "bookkeeping":
            settings["options.activation"] = draw.choice(("relu", "tanh"))
        return Job(cell, "trial", number, settings, draw.choice(steps))
    # Of its own budget if there is one: what is best at another is only the next best guess.
    parent = max(known, key=lambda run: (run["budget"] == cell.epsilon, run["accuracy"]))
    settings = dict(parent["changes"])
    for name in ranges:
        settings[name] = _short(settings[name] * math.exp(draw.gauss(0, SPREAD)))
    if cell.method == "bookkeeping" and draw.random() < 0.2:
        settings["options.activation"] = {"relu": "tanh", "tanh": "relu"}[settings["options.activation"]]
    length = draw.choice(steps) if draw.random() < 0.3 else parent["steps"]
    return Job(cell, "trial", number, settings, length)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """All runs so far."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


class Schedule:
    """Which run is next: a round of trials for all cells after another, then each cell's finals."""

    def __init__(self, cells: list[Cell], runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
        self.cells, self.options = cells, options
        self.runs = [run for run in runs if _cell(run) in set(cells)]
        self.started = {_key(run) for run in self.runs}
        self.finishing = False

    def done(self, cell: Cell, kind: str) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["kind"] == kind and _cell(run) == cell]

    def rounds(self) -> int:
        """Rounds that every cell has been through: only they count, so that the effort is the same."""
        numbers = [{run["number"] for run in self.done(cell, "trial")} for cell in self.cells]
        return next(k for k in range(10**6) if any(k not in have for have in numbers))

    def finals_seconds(self) -> float:
        """What the finals will take, by the cells' own trials."""
        times = [statistics.fmean(run["total_seconds"] for run in self.done(cell, "trial")) for cell in self.cells
                 if self.done(cell, "trial")]  # fmt: skip
        return 1.2 * SEEDS * sum(times) / max(1, self.options.workers) + 2 * max(times, default=0.0)

    def jobs(self, left: float) -> Iterator[Job]:
        """The next runs that may start now, with so many seconds left."""
        if not self.finishing:
            for number in range(self.options.trials):
                if self.rounds() > 0 and left < self.finals_seconds():
                    break
                for cell in self.cells:
                    if (cell, "trial", number) not in self.started:
                        known = [run for run in self.runs if run["kind"] == "trial" and _cell(run).family == cell.family]
                        yield proposed(cell, number, known, self.options.steps)
            self.finishing = True
        for number in range(SEEDS):
            for cell in self.cells:
                if (cell, "final", number) not in self.started and (best := self.best(cell)) is not None:
                    yield Job(cell, "final", number, best["changes"], best["steps"])

    def best(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's best trial in rounds that all cells have been through; fixed by its first final."""
        finals = self.done(cell, "final")
        if finals:
            return finals[0]
        trials = [run for run in self.done(cell, "trial") if run["number"] < self.rounds()]
        return max(trials, key=lambda run: run["accuracy"]) if trials else None


def _cell(run: dict[str, Any]) -> Cell:
    return Cell(run["dataset"], run["network"], run["method"], run["budget"])


def _key(run: dict[str, Any]) -> tuple[Cell, str, int]:
    return _cell(run), run["kind"], run["number"]


def run_all(options: argparse.Namespace) -> None:
    """Runs until everything is done or the time is over."""
    until = time.monotonic() + options.seconds
    cells = [Cell(d, n, m, e) for e in EPSILONS for n in options.networks for d in options.datasets for m in METHODS]
    schedule = Schedule(cells, read_runs(options.out), options)
    target = options.out / f"{options.label or options.device.partition(':')[0]}.jsonl"
    noise, threads = str(options.out / "noise.json"), 1 if options.device == "cpu" else 2
    waiting: dict[Future[str], Job] = {}
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            left = until - time.monotonic()
            fresh = schedule.jobs(left)
            while left > 0 and len(waiting) < options.workers and (job := next(fresh, None)) is not None:
                schedule.started.add((job.cell, job.kind, job.number))
                waiting[pool.submit(perform, job, noise, options.device, threads, options.limit, options.batch)] = job
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                job = waiting.pop(future)
                line = future.result()
                with target.open("a") as file:
                    file.write(line + "\n")
                run = json.loads(line)
                schedule.runs.append(run)
                print(f"{time.monotonic() - until + options.seconds:6.1f} s {job.kind} {job.number} eps={job.cell.epsilon:g} "
                      f"{run['recipe']} {100 * run['accuracy']:.2f} {run['total_seconds']:.1f} s", flush=True)  # fmt: skip


def make_noise(options: argparse.Namespace) -> None:
    """σ and the ε spent at each evaluation, for each size of a training set."""
    from lipdp.privacy import calibrate_noise, epsilon

    file = options.out / "noise.json"
    table = json.loads(file.read_text()) if file.exists() else {}
    sizes = {info(name).train_size for name in options.datasets}
    records = {size - round(HELD_OUT * size) for size in sizes} | sizes if options.limit is None else {options.limit}
    for size in sorted(records):
        for steps in options.steps:
            for budget in EPSILONS:
                key = Noise.key(size, options.batch, steps, budget)
                if key not in table:
                    q = min(1.0, options.batch / size)
                    sigma = calibrate_noise(epsilon=budget, delta=DELTA, sampling_rate=q, steps=steps, tolerance=1e-3)
                    spent = {
                        step: epsilon(noise_multiplier=sigma, sampling_rate=q, steps=step, delta=DELTA)
                        for step in evaluated_steps(steps)
                    }
                    table[key] = {"sigma": sigma, "spent": spent}
                    file.write_text(json.dumps(table, indent=1) + "\n")
                    print(key, table[key], flush=True)


def measure_tightness(options: argparse.Namespace) -> None:
    """What share of its bound the gradient of an average example has before training, layer by layer."""
    file = options.out / "tightness.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for dataset in options.datasets:
        for network in options.networks:
            for method in METHODS:
                cell = Cell(dataset, network, method, EPSILONS[0])
                result = untrained(cell, str(options.out / "noise.json"), STEPS[-1], options.limit)
                found[grid_name(*cell.family)] = result
                layers = [f"{100 * row['share']:.2g}" for row in result.get("parameters", {}).values()]
                print(f"{grid_name(*cell.family)}: {100 * result['whole']:.2g} % of the bound, SNR {result['snr']:.2g}, "
                      f"{result['size']:,} weights; by layer {', '.join(layers)}", flush=True)  # fmt: skip
                file.write_text(json.dumps(found, indent=1) + "\n")


def make_table(options: argparse.Namespace) -> None:
    """Means and deviations of the finals, and how much of their bounds gradients use."""
    runs = read_runs(options.out)
    rows = []
    for cell in sorted(
        {_cell(run) for run in runs}, key=lambda c: (DATASETS.index(c.dataset), c.epsilon, NETWORKS.index(c.network), c.method)
    ):
        finals = [run for run in runs if run["kind"] == "final" and _cell(run) == cell]
        trials = [run for run in runs if run["kind"] == "trial" and _cell(run) == cell]
        if not finals:
            continue
        scores = [100 * run["accuracy"] for run in finals]
        probe: dict[str, Any] = next((run["tightness"] for run in finals if "tightness" in run), {})
        rows.append({
            "dataset": cell.dataset, "epsilon": cell.epsilon, "network": cell.network, "method": cell.method,
            "accuracy": statistics.fmean(scores), "std": statistics.stdev(scores) if len(scores) > 1 else math.nan,
            "seeds": len(scores), "trials": len(trials), "held_out": 100 * max(run["accuracy"] for run in trials),
            "tightness": probe.get("whole"), "snr": probe.get("snr"), "clipped": probe.get("clipped"), "weights": probe.get("size"),
            "seconds": statistics.median(run["seconds"] for run in finals), "device": finals[0]["device"],
        })  # fmt: skip
    with (options.out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    (options.out / "table.md").write_text("\n".join(_markdown(rows)) + "\n")
    print((options.out / "table.md").read_text())


def _markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    by_cell = {(row["dataset"], row["epsilon"], row["network"], row["method"]): row for row in rows}
    yield "| dataset | ε | network | clipless | book-keeping | bound used: clipless | book-keeping | SNR: clipless | book-keeping |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for dataset, epsilon, network in dict.fromkeys((row["dataset"], row["epsilon"], row["network"]) for row in rows):
        pair = [by_cell.get((dataset, epsilon, network, method)) for method in METHODS]
        scores = ["–" if row is None else f"{row['accuracy']:.1f} ± {row['std']:.1f}" for row in pair]
        shares = ["–" if row is None or row["tightness"] is None else f"{100 * row['tightness']:.2g} %" for row in pair]
        signals = ["–" if row is None or row["snr"] is None else f"{row['snr']:.2g}" for row in pair]
        yield f"| {dataset} | {epsilon:g} | {network} | {' | '.join([*scores, *shares, *signals])} |"


def write_recipes(options: argparse.Namespace) -> None:
    """The best trials at ε = 3 as the recipes' settings."""
    runs = [run for run in read_runs(options.out) if run["kind"] == "trial" and run["budget"] == EPSILONS[0]]
    found = {}
    for family in dict.fromkeys(_cell(run).family for run in runs):
        trials = [run for run in runs if _cell(run).family == family]
        best = max(trials, key=lambda run: run["accuracy"])
        source = f"best of {len(trials)} trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out"
        epochs = math.floor(100 * best["steps"] * options.batch / info(family[0]).train_size) / 100  # the finals' steps
        found[grid_name(*family)] = (source, {**best["changes"], "epochs": epochs})
    text = options.recipes.read_text()
    head = text[: text.index("FOUND: Mapping")]
    body = pprint.pformat(dict(sorted(found.items())), width=120, sort_dicts=False)
    options.recipes.write_text(f"{head}FOUND: Mapping[str, tuple[str, Mapping[str, Any]]] = {body}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("noise", "run", "table", "tightness", "recipes"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out_of_the_box"))
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS))
    parser.add_argument("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--trials", type=int, default=8, help="at most so many for each cell")
    parser.add_argument("--steps", type=lambda text: tuple(map(int, text.split(","))), default=STEPS)
    parser.add_argument("--seconds", type=float, default=300.0, help="no run starts later; finals are left time for")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--label", help="name of the file of runs; the device's by default")
    parser.add_argument("--limit", type=int, help="only so many records, to try it out")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--recipes", type=Path, default=Path("src/lipdp/recipes/grid_found.py"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    actions = {"noise": make_noise, "run": run_all, "table": make_table, "tightness": measure_tightness, "recipes": write_recipes}
    actions[options.action](options)


if __name__ == "__main__":
    main()
