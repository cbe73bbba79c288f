"""Random search for a recipe's settings, on a validation split of the training set. The test set is never loaded.

    python benchmarks/search.py mnist-mlp --epsilon 3 --trials 40 --processes 6 --device cuda --seconds 240 --output found.jsonl

Each line of the output is one trial: its settings, validation accuracy and time. `lipdp sweep` will take this over.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch

import lipdp
from lipdp.recipes import get, prepare
from lipdp.training import evaluate, fit

HIDDEN = [(64,), (128,), (256,), (64, 64), (128, 128), (128, 64), (256, 128)]
CHANNELS = [(8, 16), (16, 16), (16, 32), (8,), (16,), (32,)]


def draw(rng: random.Random, base: "lipdp.recipes.Recipe") -> "lipdp.recipes.Recipe":
    if base.method != "clipless":
        return base.but(
            options={"width": rng.choice([16, 16, 24, 32]), "hidden": rng.choice([32, 64])},
            temperature=2 ** rng.uniform(-1, 2),
            batch_size=rng.choice([1024, 2048, 4096, 8192]),
            epochs=rng.choice([20, 30, 40, 60]),
            learning_rate=10 ** rng.uniform(-1.3, 0.5),
            schedule=rng.choice(["constant", "cosine"]),
            ema_decay=rng.choice([None, 0.9, 0.95, 0.98]),
            max_grad_norm=10 ** rng.uniform(-1.5, 0.3),
        )
    options = dict(base.options)
    options["clip"] = 10 ** rng.uniform(-1.6, 0)
    options["centre"] = rng.random() < 0.7
    if base.model == "mlp":
        options["hidden"] = rng.choice(HIDDEN)
    if base.model == "lenet":
        options |= {"channels": rng.choice(CHANNELS), "kernel_size": rng.choice([3, 5, 7]), "hidden": rng.choice([None, 64, 128])}
    return base.but(
        options=options,
        temperature=2 ** rng.uniform(4, 7.5),
        batch_size=rng.choice([2048, 4096, 8192]),
        epochs=rng.choice([10, 20, 30] if base.model == "lenet" else [20, 40, 60, 100]),
        learning_rate=10 ** rng.uniform(-0.7, 1.0),
        momentum=0.9,
        schedule=rng.choice(["constant", "cosine"]),
        ema_decay=rng.choice([None, 0.9, 0.95, 0.98]),
        allocation=rng.choice(["global", "per_layer", "optimal"]),
    )


def worker(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rng = random.Random(f"{arguments.seed}/{rank}")
    train, _, info = lipdp.data.load(get(arguments.recipe).dataset)
    learn, held = lipdp.data.split(train, 1 / 6)
    learn, held = (torch.utils.data.TensorDataset(*(t.to(arguments.device) for t in part.tensors)) for part in (learn, held))
    end = time.monotonic() + arguments.seconds
    for _ in range(arguments.trials):
        if time.monotonic() > end:
            break
        recipe = draw(rng, get(arguments.recipe))
        if recipe.batch_size > len(learn):
            continue
        started = time.monotonic()
        ready = prepare(recipe, info, epsilon=arguments.epsilon, dataset_size=len(learn), seed=rng.randrange(10**6))
        fit(
            ready.model, ready.loss, ready.optimizer, ready.plan, learn, seed=1, device=arguments.device,
            scheduler=ready.scheduler, ema_decay=recipe.ema_decay, evaluations=1, microbatch_size=4096,
        )  # fmt: skip
        accuracy = evaluate(ready.model, ready.loss, held)["accuracy"]
        row = {name: getattr(recipe, name) for name in (
            "options", "temperature", "batch_size", "epochs", "learning_rate", "momentum", "schedule", "ema_decay", "allocation",
            "max_grad_norm"
        )}  # fmt: skip
        line = json.dumps(
            {"recipe": arguments.recipe, "accuracy": accuracy, "seconds": round(time.monotonic() - started, 1), **row}
        )
        with Path(arguments.output).open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="found.jsonl")
    arguments = parser.parse_args()
    torch.multiprocessing.spawn(worker, (arguments,), nprocs=arguments.processes)
    rows = [json.loads(line) for line in Path(arguments.output).read_text().splitlines()]
    rows = sorted((r for r in rows if r["recipe"] == arguments.recipe), key=lambda row: -row["accuracy"])
    for row in rows[:8]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
