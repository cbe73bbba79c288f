"""Small runs that choose where the trials of the out-of-the-box table start, on a CPU: not private, and no result of the table.

    python benchmarks/out_of_the_box_pilots.py cifar10 vgg clipless temperature=100 options.clip=0.2 learning_rate=8 --batch 200

100 steps on a part of the training set, judged by held-out records of it. The noise on a *mean* gradient, σ/b, is that of the real
run of 8192 examples a step, so a few hundred examples show what the noise leaves of a network and of its settings. Each run is a
line of OUT/pilots.txt.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.recipes.grid import DATASETS, NETWORKS, base_recipe
from lipdp.recipes.recipe import prepare
from lipdp.recipes.spaces import changed
from lipdp.training import evaluate, fit
from out_of_the_box_runs import BATCH, HELD_OUT, Noise

STEPS, LEARNT, JUDGED = 100, 5000, 2000


def pilot(options: argparse.Namespace, settings: dict[str, Any]) -> float:
    """Accuracy on held-out records."""
    learn, _, info = data.load(options.dataset)
    full = info.train_size
    learn, held_out = data.split(learn, HELD_OUT)
    learn, held_out = (TensorDataset(*(t[:n] for t in part.tensors)) for part, n in ((learn, LEARNT), (held_out, JUDGED)))
    real = Noise(options.out / "noise.json").sigma(full, BATCH, STEPS, options.epsilon)
    recipe = changed(base_recipe(options.dataset, options.network, options.method), settings)
    recipe = recipe.but(batch_size=options.batch, epochs=(STEPS - 1e-3) * options.batch / LEARNT)
    noise = real * options.batch / BATCH
    ready = prepare(recipe, info, noise_multiplier=noise, dataset_size=LEARNT, accountant="rdp", seed=options.seed)
    fit(
        ready.model, ready.loss, ready.optimizer, ready.plan, learn, seed=options.seed, scheduler=ready.scheduler,
        ema_decay=recipe.ema_decay, evaluations=1, settle=True, input_shape=info.shape,
    )  # fmt: skip
    return float(evaluate(ready.model, ready.loss, held_out, batch_size=500)["accuracy"])


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("method", choices=("clipless", "bookkeeping"))
    parser.add_argument("settings", nargs="*", type=_setting)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out_of_the_box"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = dict(options.settings)
    line = {name: getattr(options, name) for name in ("dataset", "network", "method", "epsilon", "batch")}
    line |= {"settings": settings, "accuracy": pilot(options, settings)}
    with (options.out / "pilots.txt").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line)


if __name__ == "__main__":
    main()
