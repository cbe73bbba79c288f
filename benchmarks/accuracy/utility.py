"""Accuracy of the recipes on the test set: every (recipe, ε) with several seeds, through lipdp's own plan, engine and fit.

    python benchmarks/accuracy/utility.py run --seeds 0 1 2 --device cuda --out benchmarks/results/accuracy
    python benchmarks/accuracy/utility.py run --recipes cifar10-scattering-eps3 --epsilon 3 …
    python benchmarks/accuracy/utility.py table --out benchmarks/results/accuracy        the Markdown table of what has been run
    python benchmarks/accuracy/utility.py times                                `lipdp train` of MNIST and CIFAR-10, start to end
    python benchmarks/accuracy/utility.py all --device cuda                     every table of docs/accuracy.md and docs/recipes.md

Settings were chosen on held-out parts of the training sets (benchmarks/accuracy/search.py); here the test set is read once for each
seed. Every run is appended to OUT/runs.jsonl when it is done; runs that are there already are not repeated. OUT/table.csv and
OUT/table.md are made from that file. ``all`` calls the scripts of the other tables, too, each of which goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import lipdp
from lipdp import recipes
from lipdp.recipes import Recipe

COLUMNS = ("dataset", "epsilon", "recipe", "runs", "accuracy", "deviation", "spent", "delta", "steps", "seconds", "method")


def jobs(names: list[str], epsilons: list[float], file: Path | None = None) -> list[Recipe]:
    """The recipes on fixed features of images (or those of a file), restricted to what was asked for."""
    known = (recipes.get(name) for name in recipes.names()) if file is None else recipes.read_recipes(file).values()
    chosen = {recipe.name: recipe for recipe in known if recipe.front == "stored" and recipe.metric == "accuracy"}
    return [
        recipe
        for recipe in chosen.values()
        if (not names or recipe.name in names or recipe.dataset in names) and (not epsilons or recipe.epsilon in epsilons)
    ]


def run(arguments: argparse.Namespace) -> None:
    file = Path(arguments.out) / "runs.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["recipe"], r["epsilon"], r["seed"]) for r in read(file)}
    for recipe in jobs(arguments.recipes, arguments.epsilon, arguments.found):
        epsilon = recipe.epsilon
        for seed in arguments.seeds:
            if (recipe.name, epsilon, seed) in done:
                continue
            result = recipes.train(
                recipe,
                seed=seed,
                device=arguments.device,
                cache=arguments.cache,
                microbatch_size=arguments.microbatch,
                evaluations=1,
            )
            place = torch.cuda.get_device_name() if arguments.device and "cuda" in arguments.device else "cpu"
            record = {
                **result.summary(),
                "epsilon": epsilon,
                "spent": result.epsilon,
                "dataset": recipe.dataset,
                "noise_multiplier": result.plan.noise_multiplier,
                "sensitivities": result.plan.sensitivities,
                "releases": [str(release) for release in result.plan.releases],
                "device": place,
                "torch": torch.__version__,
                "lipdp": getattr(lipdp, "__version__", ""),
                "command": " ".join(["python", *sys.argv]),
            }
            with file.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
            print(f"{recipe.name} eps={epsilon:g} seed={seed}: {100 * result.accuracy:.2f}% in {result.seconds:.1f} s", flush=True)
    table(arguments)


def read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(arguments: argparse.Namespace) -> None:
    """CSV and Markdown of all runs, grouped by recipe and ε."""
    out = Path(arguments.out)
    groups: dict[tuple[str, float, str], list[dict[str, object]]] = {}
    for record in read(out / "runs.jsonl"):
        key = (str(record["dataset"]), float(str(record["epsilon"])), str(record["recipe"]))
        groups.setdefault(key, []).append(record)
    rows = []
    for (dataset, epsilon, recipe), records in sorted(groups.items()):
        accuracies = [100 * float(str(r["accuracy"])) for r in records]
        rows.append(
            {
                "dataset": dataset,
                "epsilon": epsilon,
                "recipe": recipe,
                "runs": len(records),
                "accuracy": round(statistics.fmean(accuracies), 2),
                "deviation": round(statistics.stdev(accuracies), 2) if len(records) > 1 else "",
                "spent": max(float(str(r["spent"])) for r in records),
                "delta": records[0]["delta"],
                "steps": records[0]["steps"],
                "seconds": round(statistics.median(float(str(r["seconds"])) for r in records), 1),
                "method": records[0]["method"],
            }
        )
    with (out / "table.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    lines = ["| dataset | ε | test accuracy % | runs | steps | seconds | recipe |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        spread = f" ± {r['deviation']:.2f}" if r["deviation"] != "" else ""
        cells = (
            r["dataset"],
            f"{r['epsilon']:g}",
            f"{r['accuracy']:.2f}{spread}",
            r["runs"],
            r["steps"],
            r["seconds"],
            r["recipe"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def times(arguments: argparse.Namespace) -> None:
    """What a user waits for: the whole command, with starting, loading and the features. Run nothing beside it."""
    for dataset in ("mnist", "cifar10"):
        command = ["lipdp", "train", dataset, "--epsilon", "3", "--seed", "0"]
        command += ["--device", arguments.device] if arguments.device else []
        started = time.monotonic()
        run = subprocess.run([sys.executable, "-m", *command, "--json"], check=True, capture_output=True, text=True)
        seconds = time.monotonic() - started
        place = torch.cuda.get_device_name() if arguments.device else f"{len(os.sched_getaffinity(0))} cores"
        result = json.loads(run.stdout[run.stdout.index("{") :])
        record = {"command": " ".join(command), "seconds": round(seconds, 1), "accuracy": result["accuracy"], "device": place}
        with (Path(arguments.out) / "times.jsonl").open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(record, flush=True)


def everything(arguments: argparse.Namespace) -> None:
    """The scripts behind every table, one after the other; what has been run already is not run again."""
    place = ["--device", arguments.device] if arguments.device else []
    workers = ["--workers", "4" if arguments.device else "1"]
    here = Path(__file__).parents[1]
    searched = (here / "results/out_of_the_box/pilots.txt").exists()
    scripts = [
        ["accuracy/utility.py", "run", *place],
        ["accuracy/out_of_the_box.py", "noise"],
        *([] if searched else [["accuracy/out_of_the_box_pilots.py", "search", *place, *workers]]),
        ["accuracy/out_of_the_box.py", "run", "--trials", "1", "--seconds", "86400", *place, *workers],
        ["accuracy/out_of_the_box.py", "table"],
        ["tables/tabular.py"],
        ["tables/tabular.py", "--timing"],
        ["accuracy/utility.py", "times", *place],
    ]
    for script, *rest in scripts:
        print("$ python", f"benchmarks/{script}", *rest, flush=True)
        subprocess.run([sys.executable, str(here / script), *rest], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table", "times", "all"))
    parser.add_argument("--recipes", nargs="*", default=[], help="names of recipes or datasets; all by default")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--found", type=Path, help="file of recipes (heads.py choose), in place of the library's")
    parser.add_argument("--device")
    parser.add_argument("--cache", help="folder for features")
    parser.add_argument("--microbatch", type=int, help="rows at once, see lipdp.fit; wide rows on a CPU are faster with 2048")
    parser.add_argument("--out", default="benchmarks/results/accuracy")
    arguments = parser.parse_args()
    actions = {"run": run, "table": table, "times": times, "all": everything}
    actions[arguments.action](arguments)


if __name__ == "__main__":
    main()
