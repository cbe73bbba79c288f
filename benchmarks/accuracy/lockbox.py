"""The lock-box: recipes on the test set, after they were committed. Every reading is logged, by this script, whatever it gives.

    python benchmarks/accuracy/lockbox.py cifar10-drawn-eps1 cifar10-drawn-eps3 cifar10-drawn-eps8 --seeds 0 1 2 --device cuda

Recipes are taken from the library's catalogue and nowhere else, and the commit that holds them is asked of git: a catalogue
with changes that are not committed is refused. (Where there is no git, name the commit with --commit.) Recipes with the same
features share them: computed once, by lipdp.features.extract_features, and each seed trains its head by lipdp.plan and
lipdp.fit. With --whole every seed is one lipdp.recipes.train instead, which keeps one copy of the features: half of the memory,
for a processor. Lines are appended to benchmarks/results/lockbox.jsonl: time, commit, recipe, digest of its settings, seed, ε
spent, accuracy, digests of the networks that the features come from.

    python benchmarks/accuracy/lockbox.py RECIPE… --missing        only seeds that the log lacks, with these settings and networks
    python benchmarks/accuracy/lockbox.py RECIPE… --constants      computes and keeps their public constants, and reads nothing
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import data, recipes
from lipdp.features import extract_features, split_front
from lipdp.features.learned import read_network
from lipdp.features.stacks import feature_front
from lipdp.recipes import Recipe
from lipdp.recipes.files import to_toml
from lipdp.recipes.run import optimizer_for, seeded_model

ROOT = Path(__file__).parents[2]
LOG = ROOT / "benchmarks/results/lockbox.jsonl"
CATALOG = "src/lipdp/recipes/catalog"


def _without_folder(argument: str) -> str:
    """A word of a command line; of a path that begins at the root, only its name: the log tells nothing of the machine."""
    return Path(argument).name if argument.startswith("/") else argument


def committed() -> str:
    """The commit that holds the catalogue as it is now."""
    changed = subprocess.run(["git", "status", "--porcelain", CATALOG], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if changed:
        raise SystemExit(
            f"the catalogue has changes that are not committed:\n{changed}Commit the settings before the test set is read."
        )
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def features_of(recipe: Recipe, device: str) -> tuple[TensorDataset, TensorDataset]:
    """What the fixed front makes of both parts of the dataset, where the heads are trained."""
    train, test, info = data.load(recipe.dataset, download=False)
    front, _ = split_front(seeded_model(recipe, info, 0))
    learn, judge = (extract_features(front, part, device=device, keep=device) for part in (train, test))
    return learn, judge


def planned(recipe: Recipe, records: int) -> tuple[torch.nn.Module, lipdp.PrivacyPlan]:
    """The head behind the fixed front, which starts at zero, and the plan of its training."""
    _, head = split_front(seeded_model(recipe, data.info(recipe.dataset), 0))
    plan = lipdp.plan(
        head, recipe.make_loss(), dataset_size=records, batch_size=recipe.batch_for(records, records), delta=recipe.delta,
        epsilon=recipe.epsilon, epochs=recipe.epochs, allocation=recipe.allocation, statistics_budget=recipe.statistics_budget,
    )  # fmt: skip
    return head, plan


def reading(
    recipe: Recipe,
    head: torch.nn.Module,
    plan: lipdp.PrivacyPlan,
    train: TensorDataset,
    test: TensorDataset,
    seed: int,
    device: str,
    rows: int | None = None,
) -> dict[str, object]:
    """One head, trained with the recipe's budget and judged once. ``rows``: of a microbatch at most; it changes rounding only."""
    loss = recipe.make_loss()
    optimizer, scheduler = optimizer_for(recipe, head, plan)
    started = time.monotonic()
    history = lipdp.fit(
        head, loss, optimizer, plan, train, scheduler=scheduler, ema_decay=recipe.ema_decay, seed=seed, device=device,
        evaluations=1, settle=True, microbatch_size=None if rows is None else math.ceil(len(train) / math.ceil(len(train) / rows)),
    )  # fmt: skip
    seconds = time.monotonic() - started
    accuracy = lipdp.evaluate(head, loss, test, device=device, batch_size=1024)["accuracy"]
    return {
        "accuracy": accuracy,
        "spent": history.epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "releases": [str(release) for release in plan.releases],
        "private": history.private,
        "head_seconds": round(seconds, 2),
        **({"memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)} if "cuda" in device else {}),
    }


def networks_of(recipe: Recipe) -> dict[str, str]:
    """Which networks its features come from, by the digests of their files."""
    names = {block["network"] for block in recipe.options["blocks"] if block["kind"] == "learned"}
    return {name: read_network(name).digest[:16] for name in sorted(names)}


def keep_constants(recipe: Recipe) -> None:
    """Compute dictionaries, scales and mixing matrices of its features, which are kept in the cache; networks are not needed."""
    for block in recipe.options["blocks"]:
        if block["kind"] != "learned":
            feature_front(data.info(recipe.dataset).shape, blocks=[block])


def whole_reading(recipe: Recipe, seed: int, device: str) -> dict[str, object]:
    """As ``lipdp train`` does it, from the images to the figure."""
    result = recipes.train(recipe, seed=seed, device=device, evaluations=1)
    return {
        "accuracy": result.accuracy,
        "spent": result.epsilon,
        "delta": result.delta,
        "noise_multiplier": result.plan.noise_multiplier,
        "steps": result.steps,
        "releases": [str(release) for release in result.plan.releases],
        "private": result.private,
        "seconds": round(result.seconds, 1),
        "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }


def settings_digest(recipe: Recipe) -> str:
    return hashlib.sha256(to_toml(recipe).encode()).hexdigest()[:16]


def seeds_in(log: Path, recipe: Recipe) -> set[int]:
    """The seeds that the log has a reading of, with the recipe's settings and the networks that are here."""
    if not log.exists():
        return set()
    wanted = (recipe.name, settings_digest(recipe), networks_of(recipe))
    readings = map(json.loads, log.read_text().splitlines())
    return {line["seed"] for line in readings if (line["recipe"], line["settings"], line.get("networks")) == wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--whole", action="store_true", help="every seed from the images on")
    parser.add_argument("--commit", help="that holds the catalogue, where there is no git")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--rows", type=int, help="of a microbatch at most")
    parser.add_argument("--missing", action="store_true", help="only seeds that the log lacks")
    parser.add_argument("--constants", action="store_true", help="compute public constants and read nothing")
    arguments = parser.parse_args()
    chosen = [recipes.get(name) for name in arguments.recipes]
    if arguments.constants:
        for recipe in chosen:
            keep_constants(recipe)
        return
    commit = arguments.commit or committed()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    kept: tuple[str, tuple[TensorDataset, TensorDataset]] | None = None
    for recipe in chosen:
        known = seeds_in(arguments.log, recipe) if arguments.missing else set()
        seeds = [seed for seed in arguments.seeds if seed not in known]
        if not seeds:
            print(f"{recipe.name}: all seeds are in the log", flush=True)
            continue
        key = json.dumps([recipe.dataset, recipe.options["blocks"], recipe.options.get("straighten", False)])
        started = time.monotonic()
        if not arguments.whole and (kept is None or kept[0] != key):
            kept = None  # the memory first
            kept = (key, features_of(recipe, arguments.device))
        features_seconds = time.monotonic() - started
        figures = []
        head, plan = (None, None) if kept is None else planned(recipe, len(kept[1][0]))
        for seed in seeds:
            if kept is None or head is None or plan is None:
                result = whole_reading(recipe, seed, arguments.device)
            else:
                result = reading(recipe, copy.deepcopy(head), plan, *kept[1], seed, arguments.device, arguments.rows)
                result |= {"features": kept[1][0].tensors[0][0].numel(), "features_seconds": round(features_seconds, 1)}
            figures.append(100 * float(str(result["accuracy"])))
            record = {
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": commit,
                "recipe": recipe.name,
                "settings": settings_digest(recipe),
                "dataset": recipe.dataset,
                "epsilon": recipe.epsilon,
                "seed": seed,
                **result,
                "networks": networks_of(recipe),
                "device": torch.cuda.get_device_name() if "cuda" in arguments.device else "cpu",
                "torch": torch.__version__,
                "command": " ".join(["python", *map(_without_folder, sys.argv)]),
            }
            with arguments.log.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
            print(f"{recipe.name} seed {seed}: {figures[-1]:.2f}%", flush=True)
        spread = f" ± {statistics.stdev(figures):.2f}" if len(figures) > 1 else ""
        print(f"{recipe.name}: {statistics.fmean(figures):.2f}{spread} over {len(figures)} seeds", flush=True)


if __name__ == "__main__":
    main()
