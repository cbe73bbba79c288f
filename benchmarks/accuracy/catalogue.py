"""What `lipdp recipes` says of each recipe: figures of the results in benchmarks/results, as one file of the package.

    python benchmarks/accuracy/catalogue.py                  writes src/lipdp/recipes/catalog/measured.json
    python benchmarks/accuracy/catalogue.py memory NAME …    two steps of each, in its own process: results/accuracy/memory.jsonl

Figures are those at the budget that a recipe's settings were found for: on the test set from accuracy/runs.jsonl, lockbox.jsonl,
accuracy/certified.jsonl, the finals of out_of_the_box/, tabular.json and clipping/dpsgd_mnist; where a recipe has not been on the
test set, what its provenance says of records that were held out. Memory: of the whole process on a CPU; a recipe with stored
features takes a slice of the data, and the rest of the records is added with the size of their features. On a GPU: of the GPU's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import data, recipes
from lipdp.features import split_front
from lipdp.recipes import Recipe
from lipdp.recipes.run import fit_prepared, seeded_model

RESULTS = Path(__file__).parents[1] / "results"
MEMORY = RESULTS / "accuracy/memory.jsonl"
MEASURED = Path(__file__).parents[2] / "src/lipdp/recipes/catalog/measured.json"
SLICE = 2000
# As README.md and docs/recipes.md have them: lipdp train NAME --epsilon 3 --seed 0|1|2. The runs of the out-of-the-box table are
# of other settings.
SHIPPED_OTHERWISE = {"mnist-mlp": (95.2, 0.1), "mnist-lenet": (96.5, 0.3)}
DIGITS = RESULTS / "accuracy/digits.jsonl"


def lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def test_runs() -> Iterator[tuple[str, float, float, float | None, str, float | None]]:
    """(recipe, ε, score in %, seconds, machine, GB) of every run on a test set."""
    shared = 0.0  # features that several recipes of one call of lockbox.py share are computed for the first
    for run in (*lines(RESULTS / "accuracy/runs.jsonl"), *lines(DIGITS), *lines(RESULTS / "lockbox.jsonl")):
        seconds = run.get("seconds")
        if seconds is None:
            shared = run["features_seconds"] or shared
            seconds = run["head_seconds"] + shared
        machine = run.get("device", "cuda" if "--device cuda" in run["command"] else "cpu")
        memory = run.get("memory_gb")
        if memory is None and "features" in run:  # at least those of both parts of the data are held
            info = data.info(run["dataset"])
            memory = run["features"] * 4 * (info.train_size + info.test_size) / 1e9
        yield run["recipe"], run["epsilon"], 100 * run["accuracy"], seconds, machine, memory
    for run in (*lines(RESULTS / "out_of_the_box/cpu.jsonl"), *lines(RESULTS / "out_of_the_box/cuda.jsonl")):
        if run["kind"] == "final" and run["evaluated_on"] == "test" and run["recipe"] not in SHIPPED_OTHERWISE:
            yield run["recipe"], run["budget"], 100 * run["accuracy"], run["seconds"], run["device"], None
    for run in lines(RESULTS / "clipping/dpsgd_mnist/test.jsonl"):
        yield run["recipe"], 3.0, 100 * run["accuracy"], run["seconds"], run.get("device", "cpu"), None
    for run in lines(RESULTS / "accuracy/certified.jsonl"):
        if "columns" in run and run.get("recipe"):
            yield run["recipe"], recipes.get(run["recipe"]).epsilon, run["columns"][0], run["seconds"], "cuda", None
    tables = json.loads((RESULTS / "tabular.json").read_text())
    for table, methods in tables["tables"].items():
        for method, found in methods.items():
            name = f"adbench-{table}" + ("" if method == "clipless" else f"-{method}")
            seconds = found["steps"] * tables["timing"][table][method]["clock"]
            for score in found["aurocs"]:
                yield name, 1.0, 100 * score, seconds, "cpu", None


def machine_name(told: str) -> str:
    return "H200" if "H200" in told or told == "cuda" else "2 cores"


def figures_of(name: str, recipe: Recipe, runs: list[tuple[float, float | None, str, float | None]]) -> dict[str, Any] | None:
    """What is said of one recipe; ``None``: nothing is known."""
    if name in SHIPPED_OTHERWISE:
        mean, deviation = SHIPPED_OTHERWISE[name]
        return {"score": mean, "deviation": deviation, "runs": 3, "part": "test", "epsilon": recipe.epsilon}
    if not runs:
        held_out = re.search(r"held-out ([\d.]+) %|held-out tenths, ([\d.]+) %", recipe.provenance)
        if held_out is None:
            return None
        score = float(held_out[1] or held_out[2])
        told = re.search(r"over (\d+) tenths", recipe.provenance)
        tenths = 1 if told is None else int(told[1])
        return {"score": score, "deviation": None, "runs": tenths, "part": "held out", "epsilon": recipe.epsilon}
    scores = [score for score, *_ in runs]
    machine = "H200" if any(machine_name(told) == "H200" for _, _, told, _ in runs) else "2 cores"
    seconds = [taken for _, taken, told, _ in runs if taken is not None and machine_name(told) == machine]
    memory = [held for *_, held in runs if held is not None]
    return {
        "score": round(statistics.fmean(scores), 2),
        "deviation": round(statistics.stdev(scores), 2) if len(scores) > 1 else None,
        "runs": len(scores),
        "part": "test",
        "epsilon": recipe.epsilon,
        "seconds": round(statistics.median(seconds), 1) if seconds else None,
        "machine": machine,
        "memory_gb": round(max(memory), 1) if memory else None,
    }


def features(recipe: Recipe) -> int:
    """How many numbers of a record are kept where the front's outputs are stored."""
    front, _ = split_front(seeded_model(recipe, data.info(recipe.dataset), 0))
    return int(front(torch.zeros(1, *data.info(recipe.dataset).shape)).numel())


def write() -> None:
    taken = {line["recipe"]: line for line in lines(MEMORY)}
    by_recipe: dict[str, list[tuple[float, float | None, str, float | None]]] = {}
    for name, epsilon, *run in test_runs():
        recipe = recipes.get(name) if name in recipes.names() else None
        if recipe is not None and math.isclose(epsilon, recipe.epsilon, rel_tol=0.01):
            by_recipe.setdefault(name, []).append(tuple(run))  # type: ignore[arg-type]
    figures = {}
    for name in recipes.names():
        recipe = recipes.get(name)
        own = figures_of(name, recipe, by_recipe.get(name, [])) if recipe.name == name else None
        if own is not None:
            if own.get("memory_gb") is None and name in taken:
                own["memory_gb"] = taken[name]["memory_gb"]
            figures[name] = {key: value for key, value in own.items() if value is not None or key == "deviation"}
        elif recipe.name == name:
            print(f"nothing is known of {name}")
    told = ",\n".join(f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in sorted(figures.items()))
    MEASURED.write_text("{\n" + told + "\n}\n")
    print(f"{len(figures)} recipes in {MEASURED.name}")


def memory_of(recipe: Recipe) -> float:
    """GB that two steps of it take, in this process."""
    train, _, info = data.load(recipe.dataset, download=False)
    stored = recipe.front == "stored"
    learn = TensorDataset(*(tensor[:SLICE] for tensor in train.tensors)) if stored else train
    ready = recipes.prepare(recipe.but(epochs=2 * recipe.batch_size / info.train_size), info, dataset_size=len(learn), seed=0)
    fit_prepared(ready, learn, seed=0, evaluations=1)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # Images are there in any case. Features of all records but the slice's are added.
    more = (len(train) - SLICE) * features(recipe) * 4 if stored else 0
    return (own + more) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=("write", "memory", "memory-here"), default="write")
    parser.add_argument("recipes", nargs="*")
    arguments = parser.parse_args()
    if arguments.task == "write":
        write()
    elif arguments.task == "memory-here":
        (name,) = arguments.recipes
        print(json.dumps({"recipe": name, "memory_gb": round(memory_of(recipes.get(name)), 2), "device": "cpu"}))
    else:
        known = {line["recipe"] for line in lines(MEMORY)}
        for name in arguments.recipes:
            if name not in known:
                own = subprocess.run([sys.executable, __file__, "memory-here", name], check=True, capture_output=True, text=True)
                with MEMORY.open("a") as stream:
                    stream.write(own.stdout.splitlines()[-1] + "\n")
                print(own.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
