"""Small runs that choose where the trials of the out-of-the-box table start, on a CPU: not private, and no result of the table.

    python benchmarks/out_of_the_box_pilots.py cifar10 vgg clipless temperature=100 options.clip=0.2 learning_rate=8
    python benchmarks/out_of_the_box_pilots.py cifar10 vgg clipless --search 40          40 more, chosen by Optuna (TPE)
    python benchmarks/out_of_the_box_pilots.py best                                      the best of each network

A few steps on a part of the training set, judged by held-out records of it. The noise on a *mean* gradient, σ/b, is that of the
real run of 8192 examples a step, so a few hundred examples show what the noise leaves of a network and of its settings. Each run
is a line of OUT/pilots.txt.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.errors import LipdpError
from lipdp.recipes.grid import DATASETS, NETWORKS, base_recipe
from lipdp.recipes.recipe import prepare
from lipdp.recipes.spaces import changed
from lipdp.training import evaluate, fit
from out_of_the_box_runs import BATCH, HELD_OUT, Noise

LEARNT, JUDGED = 10_000, 4000
# (lowest, highest) of what is searched on a logarithmic scale, or what it is chosen from. Shapes are searched with both methods.
RANGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "clipless": {"temperature": (15.0, 500.0), "options.clip": (0.03, 1.0), "learning_rate": (0.5, 30.0)},
    "bookkeeping": {"temperature": (1.0, 16.0), "max_grad_norm": (0.03, 1.0), "learning_rate": (0.25, 4.0),
                    "options.activation": ("relu", "tanh")},
}  # fmt: skip
SHAPES: dict[str, dict[str, tuple[Any, ...]]] = {
    "mlp": {"options.hidden": ((64,), (128,), (256,))},
    "lenet": {"options.hidden": (64, 128, 256)},
    "vgg": {"options.hidden": (64, 128)},
    "resnet": {"options.patch": (2, 4), "options.hidden": (None, 64, 128)},
    "mixer": {"options.patch": (2, 4), "options.hidden": (None, 64, 128), "options.dim": (32, 64, 128)},
}


def pilot(options: argparse.Namespace, settings: dict[str, Any], steps: int) -> float:
    """Accuracy on held-out records."""
    learn, _, info = data.load(options.dataset)
    full = info.train_size
    learn, held_out = data.split(learn, HELD_OUT)
    learn, held_out = (TensorDataset(*(t[:n] for t in part.tensors)) for part, n in ((learn, LEARNT), (held_out, JUDGED)))
    real = Noise(options.out / "noise.json").sigma(full, BATCH, steps, options.epsilon)
    recipe = changed(base_recipe(options.dataset, options.network, options.method), settings)
    recipe = recipe.but(batch_size=options.batch, epochs=(steps - 1e-3) * options.batch / LEARNT)
    noise = real * options.batch / BATCH
    ready = prepare(recipe, info, noise_multiplier=noise, dataset_size=LEARNT, accountant="rdp", seed=options.seed)
    fit(
        ready.model, ready.loss, ready.optimizer, ready.plan, learn, seed=options.seed, scheduler=ready.scheduler,
        ema_decay=recipe.ema_decay, evaluations=1, settle=True, input_shape=info.shape,
    )  # fmt: skip
    return float(evaluate(ready.model, ready.loss, held_out, batch_size=500)["accuracy"])


def written(options: argparse.Namespace, settings: dict[str, Any], steps: int) -> float:
    """Do it, and write it down."""
    started = time.monotonic()
    line = {name: getattr(options, name) for name in ("dataset", "network", "method", "epsilon", "batch")}
    line |= {"steps": steps, "settings": settings, "accuracy": pilot(options, settings, steps), "learnt": LEARNT}
    with (options.out / "pilots.txt").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{time.monotonic() - started:5.1f} s", line, flush=True)
    return float(line["accuracy"])


def search(options: argparse.Namespace, fixed: dict[str, Any]) -> None:
    """More pilots of this network and method, with ``fixed`` as it is."""
    import optuna

    ranges = {"steps": options.steps, **RANGES[options.method], **SHAPES[options.network]}
    ranges = {name: values for name, values in ranges.items() if name not in fixed}

    def objective(trial: optuna.Trial) -> float:
        chosen: dict[str, Any] = {}
        for name, values in ranges.items():
            if isinstance(values[0], float):
                chosen[name] = float(f"{trial.suggest_float(name, *values, log=True):.3g}")
            else:
                chosen[name] = values[trial.suggest_categorical(name, list(range(len(values))))]
        steps = chosen.pop("steps", options.steps[0])
        try:
            return written(options, {**fixed, **chosen}, steps)
        except LipdpError as error:
            raise optuna.TrialPruned(str(error)) from error

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=options.seed, multivariate=True, n_startup_trials=10)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=options.search, timeout=options.seconds)


def best(options: argparse.Namespace, count: int = 3) -> None:
    """The best pilots with Optuna of each dataset, network, method and ε."""
    lines = [json.loads(line) for line in (options.out / "pilots.txt").read_text().splitlines()]
    families: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if "learnt" in line:
            families.setdefault(tuple(str(line[n]) for n in ("dataset", "network", "method", "epsilon")), []).append(line)
    for family, found in sorted(families.items()):
        print(*family, len(found), "pilots")
        for line in sorted(found, key=lambda line: -line["accuracy"])[:count]:
            print(f"  {100 * line['accuracy']:.1f} {line['steps']} steps {line['settings']}")


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=(*DATASETS, "best"))
    parser.add_argument("network", choices=NETWORKS, nargs="?")
    parser.add_argument("method", choices=("clipless", "bookkeeping"), nargs="?")
    parser.add_argument("settings", nargs="*", type=_setting)
    parser.add_argument("--search", type=int, default=0, help="so many pilots with what the settings leave open")
    parser.add_argument("--seconds", type=float, help="no pilot of a search begins later")
    parser.add_argument("--steps", type=lambda text: tuple(map(int, text.split(","))), default=(100,))
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out_of_the_box"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.dataset == "best":
        best(options)
    elif options.search:
        search(options, dict(options.settings))
    else:
        written(options, dict(options.settings), options.steps[0])


if __name__ == "__main__":
    main()
