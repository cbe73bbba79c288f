"""Accuracy of the recipes on the test set: every (recipe, ε) with several seeds, through lipdp's own plan, engine and fit.

    python benchmarks/utility.py run --seeds 0 1 2 --device cuda --out benchmarks/results/accuracy
    python benchmarks/utility.py run --recipes cifar10-scattering-eps3 --epsilon 3 …
    python benchmarks/utility.py table --out benchmarks/results/accuracy        the Markdown table of what has been run
    python benchmarks/utility.py times                                         `lipdp train` of MNIST and CIFAR-10, start to end
    python benchmarks/utility.py all --device cuda                              every table of docs/accuracy.md and docs/recipes.md

Settings were chosen on held-out parts of the training sets (benchmarks/accuracy_search.py); here the test set is read once for each
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
from torch.utils.data import TensorDataset

import lipdp
from lipdp import data, models
from lipdp.features.front import split_front
from lipdp.recipes.features import FeatureRecipe, plan_head, train_on_features
from lipdp.recipes.handwriting import HANDWRITING
from lipdp.recipes.mixtures import LARGE, MIXTURES
from lipdp.recipes.patches import PATCHES
from lipdp.recipes.scattering import SCATTERING
from lipdp.training import PrivacyPlan

COLUMNS = ("dataset", "epsilon", "recipe", "runs", "accuracy", "deviation", "spent", "delta", "steps", "seconds", "method")


def jobs(names: list[str], epsilons: list[float], found: Path | None = None) -> list[tuple[FeatureRecipe, float]]:
    """The recipes with the budgets they were made for (or those of a file), restricted to what was asked for."""
    every = (PATCHES, MIXTURES, LARGE, HANDWRITING, SCATTERING)
    chosen = [(recipe, epsilon) for recipes in every for (_, epsilon), recipe in recipes.items()]
    if found is not None:
        chosen = [
            (FeatureRecipe(**{k: v for k, v in r.items() if k != "epsilon"}), r["epsilon"]) for r in json.loads(found.read_text())
        ]
    return [(r, e) for r, e in chosen if (not names or r.name in names or r.dataset in names) and (not epsilons or e in epsilons)]


def run(arguments: argparse.Namespace) -> None:
    file = Path(arguments.out) / "runs.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["recipe"], r["epsilon"], r["seed"]) for r in read(file)}
    store: dict[str, tuple[TensorDataset, TensorDataset]] = {}
    for recipe, epsilon in jobs(arguments.recipes, arguments.epsilon, arguments.found):
        for seed in arguments.seeds:
            if (recipe.name, epsilon, seed) in done:
                continue
            result = train_on_features(
                recipe,
                epsilon=epsilon,
                seed=seed,
                device=arguments.device,
                cache=arguments.cache,
                microbatch_size=arguments.microbatch,
                made=planned(recipe, epsilon, Path(arguments.plans)),
                store=store,
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


def planned(recipe: FeatureRecipe, epsilon: float, folder: Path) -> PrivacyPlan:
    """The plan, from its file if it was made before: calibration takes seconds, and the engine checks a plan anyway."""
    file = folder / f"{recipe.name}.json"
    if file.exists():
        return PrivacyPlan.from_json(file.read_text())
    info = data.info(recipe.dataset)
    model = models.create(recipe.model, input_shape=info.shape, classes=info.classes, **recipe.options)
    assert isinstance(model, torch.nn.Sequential)
    made = plan_head(recipe, split_front(model)[1], info.train_size, epsilon=epsilon)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(made.to_json())
    return made


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
    here = Path(__file__).parent
    searched = (here / "results/out_of_the_box/pilots.txt").exists()
    scripts = [
        ["utility.py", "run", *place],
        ["out_of_the_box.py", "noise"],
        *([] if searched else [["out_of_the_box_pilots.py", "search", *place, *workers]]),
        ["out_of_the_box.py", "run", "--trials", "1", "--seconds", "86400", *place, *workers],
        ["out_of_the_box.py", "table"],
        ["tabular.py"],
        ["tabular.py", "--timing"],
        ["utility.py", "times", *place],
    ]
    for script, *rest in scripts:
        print("$ python", f"benchmarks/{script}", *rest, flush=True)
        subprocess.run([sys.executable, str(here / script), *rest], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("plan", "run", "table", "times", "all"))
    parser.add_argument("--recipes", nargs="*", default=[], help="names of recipes or datasets; all by default")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--found", type=Path, help="recipes of accuracy_heads.py choose, in place of the library's")
    parser.add_argument("--device")
    parser.add_argument("--cache", help="folder for features")
    parser.add_argument("--microbatch", type=int, help="rows at once, see lipdp.fit; wide rows on a CPU are faster with 2048")
    parser.add_argument("--plans", default="benchmarks/results/accuracy/plans", help="folder for plans")
    parser.add_argument("--out", default="benchmarks/results/accuracy")
    arguments = parser.parse_args()
    if arguments.action == "plan":
        for recipe, epsilon in jobs(arguments.recipes, arguments.epsilon, arguments.found):
            print(recipe.name, planned(recipe, epsilon, Path(arguments.plans)).noise_multiplier, flush=True)
    else:
        actions = {"run": run, "table": table, "times": times, "all": everything}
        actions[arguments.action](arguments)


if __name__ == "__main__":
    main()
