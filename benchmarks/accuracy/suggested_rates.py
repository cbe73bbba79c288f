"""The rates that lipdp.suggest_optimizer suggests against those that searches have found.

    python benchmarks/accuracy/suggested_rates.py ratios                      # noise over weights at the rates found; reads no data
    python benchmarks/accuracy/suggested_rates.py compare digits --seeds 8    # held-out accuracy of both, by recipe

``compare`` trains each recipe to ε = 3 on all but a sixth of its training set (digits: a quarter), twice: as it is, and with the
suggested optimiser and schedule, without averaging; the held-out part judges. A line of JSON for each run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings

import lipdp
from lipdp import data, recipes
from lipdp.errors import LipdpNotice
from lipdp.recipes import Prepared

EPSILON = 3.0
# The mean square of a rate that goes to 0 along half a cosine is 3/8 of the first one's.
_OF_A_CONSTANT = math.sqrt(8 / 3)


def searched() -> list[str]:
    """Recipes of whole networks whose rate was searched for."""
    found = []
    for name in recipes.names():
        recipe = recipes.get(name)
        own = recipe.name == name and recipe.front == "computed" and recipe.metric == "accuracy"
        if own and recipe.provenance.startswith("best of"):
            found.append(name)
    return found


def prepared(name: str, size: int, seed: int) -> Prepared:
    """The recipe for a training set of this size."""
    recipe = recipes.get(name)
    return recipes.prepare(recipe, data.info(recipe.dataset), dataset_size=size, seed=seed, epsilon=EPSILON, accountant="rdp")


def rate(ready: Prepared, optimizer: object) -> float:
    """The first rate, in units of the sensitivity."""
    group = optimizer.param_groups[0]  # type: ignore[attr-defined]
    return float(group.get("initial_lr", group["lr"])) * ready.plan.sensitivity


def ratios() -> None:
    """At the rates found: how long the noise of a run is, relative to the weights."""
    found = {}
    for name in searched():
        ready = prepared(name, data.info(recipes.get(name).dataset).train_size, 0)
        unit = rate(ready, lipdp.suggest_optimizer(ready.model, ready.plan, noise_to_weights=1.0)[0])
        constant = 1.0 if ready.recipe.schedule == "cosine" else _OF_A_CONSTANT
        found[name] = constant * ready.recipe.learning_rate / unit
        print(json.dumps({"recipe": name, "found": ready.recipe.learning_rate, "noise_to_weights": round(found[name], 3)}))
    logs = [math.log(value) for value in found.values()]
    mean, spread = math.exp(statistics.fmean(logs)), math.exp(statistics.stdev(logs))
    print(json.dumps({"recipes": len(logs), "geometric_mean": round(mean, 2), "standard_deviation_factor": round(spread, 2)}))


def compare(name: str, seeds: int) -> None:
    """Both, on the same held-out part."""
    recipe = recipes.get(name)
    train, _, _ = data.load(recipe.dataset)
    learn, held_out = data.split(train, 0.25 if recipe.dataset == "digits" else 1 / 6)
    for seed in range(seeds):
        for how in ("suggested", "found"):
            started = time.monotonic()
            ready = prepared(name, len(learn), seed)
            optimizer, scheduler, averaging = ready.optimizer, ready.scheduler, {"ema_decay": recipe.ema_decay}
            if how == "suggested":
                optimizer, scheduler = lipdp.suggest_optimizer(ready.model, ready.plan)
                averaging = {}
            first = rate(ready, optimizer)
            lipdp.fit(
                *(ready.model, ready.loss, optimizer, ready.plan, learn),
                **{"seed": seed, "scheduler": scheduler, "evaluations": 1, "augmentation": recipe.augmentation, **averaging},
            )
            row = {"recipe": name, "rate": how, "value": round(first, 3), "seed": seed, "steps": ready.plan.steps}
            row["held_out"] = lipdp.evaluate(ready.model, ready.loss, held_out)["accuracy"]
            print(json.dumps({**row, "seconds": round(time.monotonic() - started)}), flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ratios")
    of = commands.add_parser("compare")
    of.add_argument("recipes", nargs="+")
    of.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    warnings.simplefilter("ignore", LipdpNotice)
    if given.command == "ratios":
        ratios()
        return
    for name in given.recipes:
        compare(name, given.seeds)


if __name__ == "__main__":
    main()
