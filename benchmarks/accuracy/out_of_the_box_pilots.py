"""Small runs that choose where the trials of the out-of-the-box table start: not private, and no result of the table.

    python benchmarks/accuracy/out_of_the_box_pilots.py run cifar10 vgg clipless temperature=100 options.clip=0.2 learning_rate=8
    python benchmarks/accuracy/out_of_the_box_pilots.py search --count 20 --device cuda --batch 2048 --workers 5 --seconds 500
    python benchmarks/accuracy/out_of_the_box_pilots.py best                                             the best of each network

100 steps on a part of the training set, judged by held-out records of it. The noise on a *mean* gradient, σ/b, is that of the real
run of 8192 examples a step, so a few hundred examples show what the noise leaves of a network and of its settings. A search gives
every network and method the same number of pilots, chosen by Optuna's TPE after the common start. Each run is a line of
OUT/pilots.txt.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import optuna
import torch
from grid import DATASETS, METHODS, NETWORKS, base_recipe
from out_of_the_box_runs import BATCH, Noise, data_parts
from torch.utils.data import TensorDataset

from lipdp.recipes import prepare
from lipdp.training import evaluate, fit

STEPS = 100
Line = dict[str, Any]
# (lowest, highest) of what is searched on a logarithmic scale, or what it is chosen from.
RANGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "clipless": {"temperature": (15.0, 500.0), "options.clip": (0.03, 1.0), "learning_rate": (0.5, 30.0)},
    "boundaries": {"temperature": (2.0, 60.0), "options.clip": (0.03, 0.6), "options.conv_clip": (0.01, 0.3),
                   "learning_rate": (0.5, 20.0), "options.activation": ("relu", "tanh"), "allocation": ("global", "optimal")},
    "bookkeeping": {"temperature": (1.0, 16.0), "max_grad_norm": (0.03, 1.0), "learning_rate": (0.25, 4.0),
                    "options.activation": ("relu", "tanh")},
}  # fmt: skip


def pilot(family: tuple[str, str, str], settings: Line, options: argparse.Namespace) -> float:
    """Accuracy on held-out records."""
    learn, held_out, info = data_parts(family[0], "trial", options.device, None)
    learn = TensorDataset(*(tensor[: options.limit] for tensor in learn.tensors))
    held_out = TensorDataset(*(tensor[: options.judged] for tensor in held_out.tensors))
    records = len(learn)
    real = Noise(options.out / "noise.json").sigma(info.train_size, BATCH, STEPS, options.epsilon)
    recipe = base_recipe(*family).changed(settings)
    recipe = recipe.but(batch_size=options.batch, epochs=(STEPS - 1e-3) * options.batch / records)
    noise = real * options.batch / BATCH
    ready = prepare(recipe, info, noise_multiplier=noise, dataset_size=records, accountant="rdp", seed=options.seed)
    fit(
        ready.model, ready.loss, ready.optimizer, ready.plan, learn, seed=options.seed, scheduler=ready.scheduler,
        device=options.device, ema_decay=recipe.ema_decay, evaluations=1, settle=True, input_shape=info.shape,
    )  # fmt: skip
    return float(evaluate(ready.model, ready.loss, held_out, batch_size=2500, device=options.device)["accuracy"])


def written(family: tuple[str, str, str], settings: Line, options: argparse.Namespace) -> float:
    """Do it, and write it down."""
    started = time.monotonic()
    line: Line = dict(zip(("dataset", "network", "method"), family, strict=True))
    line |= {"epsilon": options.epsilon, "batch": options.batch, "records": options.limit, "settings": settings}
    line["options"] = base_recipe(*family).options
    line["accuracy"] = pilot(family, settings, options)
    line["seconds"] = round(time.monotonic() - started, 2)
    with (options.out / "pilots.txt").open("a") as file:  # a line is one write: processes don't mix theirs
        file.write(json.dumps(line) + "\n")
    print(line, flush=True)
    return float(line["accuracy"])


def search(options: argparse.Namespace) -> None:
    """Pilots of all families in turn, so that all have had as many when the time is over."""
    families = [(d, n, m) for n in options.networks for d in options.datasets for m in METHODS]
    studies = {family: _study(family, options.seed) for family in families}
    ends = time.monotonic() + options.seconds
    running: dict[Future[float], tuple[optuna.Study, optuna.Trial]] = {}

    def collect(when: Literal["FIRST_COMPLETED", "ALL_COMPLETED"]) -> None:
        for done in wait(running, return_when=when).done:
            study, trial = running.pop(done)
            failed = done.exception() is not None
            if failed:
                print(f"failed: {trial.params}: {done.exception()!r}", flush=True)
            study.tell(trial, None if failed else done.result(), state=optuna.trial.TrialState.FAIL if failed else None)

    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for family in (family for _ in range(options.count) for family in families):
            while len(running) >= options.workers:
                collect("FIRST_COMPLETED")
            if time.monotonic() > ends:
                break
            trial = studies[family].ask()
            running[pool.submit(written, family, _drawn(trial, family), options)] = (studies[family], trial)
        collect("ALL_COMPLETED")


def _ranges(family: tuple[str, str, str]) -> dict[str, tuple[Any, ...]]:
    return {name: values for name, values in RANGES[family[2]].items() if family[1] != "mlp" or name != "options.conv_clip"}


def _drawn(trial: optuna.Trial, family: tuple[str, str, str]) -> Line:
    settings: Line = {}
    for name, values in _ranges(family).items():
        if isinstance(values[0], float):
            settings[name] = float(f"{trial.suggest_float(name, *values, log=True):.3g}")
        else:
            settings[name] = trial.suggest_categorical(name, values)
    return settings


def _study(family: tuple[str, str, str], seed: int) -> optuna.Study:
    """It begins with the recipe's own settings."""
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=6, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(beginning(family))
    return study


def beginning(family: tuple[str, str, str]) -> Line:
    """The settings that are searched, as the recipe has them."""
    known = base_recipe(*family)
    return {name: getattr(known, name, None) or known.options[name.removeprefix("options.")] for name in _ranges(family)}


def show_best(options: argparse.Namespace, count: int = 3) -> None:
    for family, found in ranked(options.out).items():
        print(*family, len(found), "pilots", f"{sum(line['seconds'] for line in found) / len(found):.1f} s each")
        for line in found[:count]:
            print(f"  {100 * line['accuracy']:.2f} {line['settings']}")


def ranked(folder: Path) -> dict[tuple[str, str, str], list[Line]]:
    """(dataset, network, method) to its pilots, the best first."""
    families: dict[tuple[str, str, str], list[Line]] = {}
    file = folder / "pilots.txt"
    for line in (json.loads(text) for text in (file.read_text().splitlines() if file.exists() else ())):
        families.setdefault((line["dataset"], line["network"], line["method"]), []).append(line)
    return {family: sorted(found, key=lambda line: -line["accuracy"]) for family, found in sorted(families.items())}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "search", "best"))
    parser.add_argument("family", nargs="*", help="for run: dataset, network, method, and settings NAME=VALUE")
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS))
    parser.add_argument("--networks", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--count", type=int, default=20, help="pilots of each network and method on each dataset")
    parser.add_argument("--seconds", type=float, default=600.0, help="no pilot of a search begins later")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=int, default=10_000, help="records of the training part")
    parser.add_argument("--judged", type=int, default=4000, help="records of the held-out part")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out_of_the_box"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.action == "best":
        show_best(options)
    elif options.action == "search":
        search(options)
    else:
        dataset, network, method, *settings = options.family
        written((dataset, network, method), dict(map(_setting, settings)), options)


if __name__ == "__main__":
    main()
