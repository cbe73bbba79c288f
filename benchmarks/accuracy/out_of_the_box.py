"""Networks without a front-end, proved against clipped: MLP, LeNet, VGG, ResNet, Mixer at ε = 3 and 10, after the same tuning.

    python benchmarks/accuracy/out_of_the_box_pilots.py search …                          where trials start: OUT/pilots.txt
    python benchmarks/accuracy/out_of_the_box.py noise --out found                        multipliers by PLD (needs dp-accounting)
    python benchmarks/accuracy/out_of_the_box.py run --out found --device cuda --workers 4 --seconds 500
    python benchmarks/accuracy/out_of_the_box.py run --out found --again …                more trials, and finals where they help
    python benchmarks/accuracy/out_of_the_box.py table --out found                        table.md, table.csv
    python benchmarks/accuracy/out_of_the_box.py tightness --out found                    tightness.json: before training, on a CPU
    python benchmarks/accuracy/out_of_the_box.py recipes --out found                      found/grid.toml

The three methods (Lipschitz layers, conventional layers between boundaries, clipping) get the same number of pilots and of trials
for each (dataset, network, ε), on a held-out tenth of the training set: the two best pilots, then changes of what has gained most.
The best is trained on the whole training set with three seeds, and only those runs read the test set. Every run is a line of
OUT/*.jsonl, which ``lipdp pareto`` draws; what was done is not done again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grid import DATASETS, METHODS, NETWORKS, base_recipe, grid_name
from out_of_the_box_pilots import beginning, ranked
from out_of_the_box_runs import BATCH, DELTA, HELD_OUT, Cell, Noise, evaluated_steps, untrained
from out_of_the_box_schedule import Schedule, Settings, cell_of, counted_finals, counted_trials, cut_torn_line, read_runs, work

from lipdp.data import info
from lipdp.recipes import save_recipe

EPSILONS, STEPS = (3.0, 10.0), (100,)
CERTIFIED_AT = "0.25"  # the radius of the table
BEGINNINGS = 2  # trials that are pilots' settings


def starts(folder: Path, families: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Where the trials of each family begin: the settings of its best pilots (or MNIST's), or the recipe's where there is none."""
    pilots = ranked(folder)
    found = {}
    for family in families:
        best = pilots.get(family) or (pilots.get(("mnist", *family[1:])) if family[0] == "fashion_mnist" else None) or []
        found[family] = [line["settings"] for line in best][:BEGINNINGS] or [beginning(family)]
    return found


def run_all(options: argparse.Namespace) -> None:
    """Runs until everything is done or the time is over."""
    device = options.device.partition(":")[0]
    target = options.out / f"{options.label or device}.jsonl"
    cut_torn_line(target)
    cells = [Cell(d, n, m, e) for e in options.epsilons for n in options.networks for d in options.datasets for m in METHODS]
    beginnings = starts(options.out, {cell.family for cell in cells})
    schedule = Schedule(
        cells, read_runs(options.out), beginnings, trials=options.trials, steps=options.steps, workers=options.workers,
        device=device, again=options.again,
    )  # fmt: skip
    settings = Settings(str(options.out / "noise.json"), options.device, 1, options.limit, options.batch)
    for seconds, job, run in work(schedule, settings, target, options.seconds):
        result = "failed: see failed.txt" if run is None else f"{100 * run['accuracy']:.2f} {run['total_seconds']:.1f} s"
        print(
            f"{seconds:6.1f} s {job.kind} {job.number} eps={job.cell.epsilon:g} {grid_name(*job.cell.family)} {result}", flush=True
        )
    print(f"{len(schedule.finals())} finals missing")


def make_noise(options: argparse.Namespace) -> None:
    """σ and the ε spent at each evaluation, for each size of a training set."""
    from lipdp.privacy import calibrate_noise, epsilon

    file = options.out / "noise.json"
    table = json.loads(file.read_text()) if file.exists() else {}
    sizes = {info(name).train_size for name in options.datasets}
    records = {size - round(HELD_OUT * size) for size in sizes} | sizes if options.limit is None else {options.limit}
    for size in sorted(records):
        for steps in options.steps:
            for budget in options.epsilons:
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
            # Between boundaries logits start at zero, and so do the gradients of all other layers.
            for method in ("clipless", "bookkeeping"):
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
        {cell_of(run) for run in runs}, key=lambda c: (DATASETS.index(c.dataset), c.epsilon, NETWORKS.index(c.network), c.method)
    ):
        finals, trials = counted_finals(runs, cell), counted_trials(runs, cell)
        if not finals:
            continue
        scores = [100 * run["accuracy"] for run in finals]
        probe: dict[str, Any] = next((run["tightness"] for run in finals if "tightness" in run), {})
        certified = [100 * run["certified"][CERTIFIED_AT] for run in finals if CERTIFIED_AT in run["certified"]]
        rows.append({
            "dataset": cell.dataset, "epsilon": cell.epsilon, "network": cell.network, "method": cell.method,
            "accuracy": statistics.fmean(scores), "std": statistics.stdev(scores) if len(scores) > 1 else math.nan,
            f"certified_{CERTIFIED_AT}": statistics.fmean(certified) if certified else None,
            "seeds": len(scores), "trials": len(trials), "held_out": 100 * max(run["accuracy"] for run in trials),
            "tightness": probe.get("whole"), "snr": probe.get("snr"), "clipped": probe.get("clipped"), "weights": probe.get("size"),
            "seconds": statistics.median(run["seconds"] for run in finals), "device": finals[0]["device"],
        })  # fmt: skip
    with (options.out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    (options.out / "table.md").write_text("\n".join([*_markdown(rows), "", *_layers(runs)]) + "\n")
    print((options.out / "table.md").read_text())


def _layers(runs: list[dict[str, Any]]) -> Iterator[str]:
    """The share of its bound that an average gradient uses, in % by layer from the input, of the trained networks of seed 0."""
    finals = {cell: counted_finals(runs, cell) for cell in dict.fromkeys(map(cell_of, runs)) if cell.epsilon == EPSILONS[0]}
    shares = {
        cell: [f"{100 * row['share']:.0f}" for row in found[0]["tightness"]["parameters"].values()]
        for cell, found in finals.items()
        if found and "parameters" in found[0].get("tightness", {})
    }
    yield f"Bound used by layer at ε = {EPSILONS[0]:g}, in %, after training:"
    yield ""
    yield "| dataset | network | Lipschitz layers | boundaries |"
    yield "|---|---|---|---|"
    for dataset, network in dict.fromkeys((cell.dataset, cell.network) for cell in shares):
        columns = [", ".join(shares.get(Cell(dataset, network, method, EPSILONS[0]), ["–"])) for method in METHODS[:2]]
        yield f"| {dataset} | {network} | {' | '.join(columns)} |"


def _markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    by_cell = {(row["dataset"], row["epsilon"], row["network"], row["method"]): row for row in rows}
    yield (
        f"| dataset | ε | network | Lipschitz layers | boundaries | book-keeping | bound used | SNR | certified at {CERTIFIED_AT} "
        "| trials, seeds |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for dataset, epsilon, network in dict.fromkeys((row["dataset"], row["epsilon"], row["network"]) for row in rows):
        cells = [by_cell.get((dataset, epsilon, network, method)) for method in METHODS]
        certified = "–" if cells[0] is None else _or_dash(cells[0][f"certified_{CERTIFIED_AT}"], "{:.0f} %")
        efforts = dict.fromkeys("–" if row is None else f"{row['trials']}, {row['seeds']}" for row in cells)
        columns = [
            *_scores(cells),
            " / ".join("–" if row is None else _or_dash(row["tightness"] and 100 * row["tightness"], "{:.0f} %") for row in cells),
            " / ".join("–" if row is None else _or_dash(row["snr"], "{:.2g}") for row in cells),
            certified,
            " / ".join(efforts),
        ]
        yield f"| {dataset} | {epsilon:g} | {network} | {' | '.join(columns)} |"


def _scores(cells: list[dict[str, Any] | None]) -> list[str]:
    """Mean ± deviation; the best in bold if it is better than the second by more than their deviations."""
    texts = ["–" if row is None else f"{row['accuracy']:.1f} ± {row['std']:.1f}" for row in cells]
    known = sorted((row["accuracy"], row["std"], place) for place, row in enumerate(cells) if row is not None)
    if len(known) > 1:
        (second, its_std, _), (best, std, winner) = known[-2:]
        if best - second > math.hypot(std, its_std):
            texts[winner] = f"**{texts[winner]}**"
    return texts


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def write_recipes(options: argparse.Namespace) -> None:
    """What the finals at ε = 3 were trained with, as a file of recipes beside the runs."""
    runs = [run for run in read_runs(options.out) if run["budget"] == EPSILONS[0]]
    pilots = ranked(options.out)
    options.recipes.unlink(missing_ok=True)
    finals = {grid_name(*cell_of(run).family): cell_of(run) for run in runs if run["kind"] == "final"}
    for _, cell in sorted(finals.items()):
        family, count = cell.family, len(counted_trials(runs, cell))
        chosen = counted_finals(runs, cell)[0]
        tried = f"{len(pilots.get(family, ()))} pilots" + (f" and {count} trials" if count > 1 else "")
        source = f"best of {tried} (benchmarks/accuracy/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out"
        epochs = math.floor(100 * chosen["steps"] * options.batch / info(family[0]).train_size) / 100  # the finals' steps
        save_recipe(base_recipe(*family).changed({**chosen["changes"], "epochs": epochs, "provenance": source}), options.recipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("noise", "run", "table", "tightness", "recipes"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out_of_the_box"))
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS))
    parser.add_argument("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--epsilons", type=lambda text: tuple(map(float, text.split(","))), default=EPSILONS)
    parser.add_argument("--trials", type=int, default=8, help="at most so many for each cell")
    parser.add_argument("--steps", type=lambda text: tuple(map(int, text.split(","))), default=STEPS)
    parser.add_argument("--seconds", type=float, default=300.0, help="no run starts later; finals are left time for")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--again", action="store_true", help="more trials for cells that have finals, too")
    parser.add_argument("--label", help="name of the file of runs; the device's by default")
    parser.add_argument("--limit", type=int, help="only so many records, to try it out")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--recipes", type=Path, default=Path("found/grid.toml"), help="file of recipes that is written")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    actions = {"noise": make_noise, "run": run_all, "table": make_table, "tightness": measure_tightness, "recipes": write_recipes}
    actions[options.action](options)


if __name__ == "__main__":
    main()
