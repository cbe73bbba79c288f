"""What each ingredient of a clipless run is worth: the same network, the same tuning effort, one ingredient more in each row.

    python benchmarks/accuracy/ablation.py run --device cuda --workers 4 --trials 8 --seeds 0 1 2 --out benchmarks/results/ablation
    python benchmarks/accuracy/ablation.py table --out benchmarks/results/ablation

ε = 3, δ = 1e-5 (PLD, real Poisson sampling), MNIST and Fashion-MNIST, a network of 784-128-10. Each row's temperature, learning
rate and (where it has one) clipping norm are chosen by the same number of random trials on a held-out sixth of the training set,
one seed each; the best setting then runs on the whole training set with the given seeds, and only then is the test set read.
Two more rows compare at equal ε and equal effort: the same network without constraints between boundaries, and with per-example
clipping.
Every finished job is appended to OUT/jobs.jsonl; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lipdp
from lipdp import data, losses, nn
from lipdp.data import Shifts
from lipdp.privacy import AdaptiveClip, calibrate_noise

EPSILON, DELTA, BATCH, EPOCHS, HIDDEN = 3.0, 1e-5, 8192, 40, 128
DATASETS = ("mnist", "fashion_mnist")
CROSS = Shifts([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)], mode="zeros")
# Each row has everything of the rows above it, but for the last two, which are other ways to the same ε.
ROWS = ("none", "+ logit clipping", "+ adaptive", "+ centring", "+ allocation", "+ EMA", "+ augmentation")
OTHERS = ("boundary network", "per-example clipping")


def has(row: str, ingredient: str) -> bool:
    if row in OTHERS:  # all that applies to them
        return ingredient in ("+ centring", "+ allocation", "+ EMA", "+ augmentation")
    return ROWS.index(row) >= ROWS.index(ingredient)


def draw_settings(row: str, trial: int) -> dict[str, float]:
    """The trial's setting; the same sequence for every row, so that no row is luckier in what it looks at."""
    draw = random.Random(f"ablation {trial}")
    return {
        "tau": math.exp(draw.uniform(math.log(4), math.log(128))),
        "lr": math.exp(draw.uniform(math.log(0.1), math.log(8))),
        "clip": math.exp(draw.uniform(math.log(0.05), math.log(1.0))),
        "quantile": draw.uniform(0.2, 0.9),
    }


def build(row: str, shape: tuple[int, ...], setting: dict[str, float]) -> torch.nn.Module:
    size = math.prod(shape)
    front = [nn.LayerCentering()] if has(row, "+ centring") else []
    front += [nn.BoundedInput(shape, mode="sphere"), nn.Flatten()]
    if row == "per-example clipping":
        return nn.Sequential(*front, torch.nn.Linear(size, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10))
    if row == "boundary network":
        inner = nn.Boundary(norm=1.0, cotangent=0.7 * setting["clip"])
        layers = [torch.nn.Linear(size, HIDDEN), torch.nn.ReLU(), inner, torch.nn.Linear(HIDDEN, 10)]
        return nn.Sequential(*front, *layers, nn.ClipGradient(setting["clip"]))
    layers = [nn.SpectralLinear(size, HIDDEN, bias=False), nn.GroupSort(2), nn.SpectralLinear(HIDDEN, 10, bias=False)]
    if has(row, "+ logit clipping"):
        layers.append(nn.ClipGradient(setting["clip"], adaptive=has(row, "+ adaptive")))
    return nn.Sequential(*front, *layers)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    row, setting, seed = job["row"], job["setting"], job["seed"]
    torch.set_num_threads(1)
    train, test, info = data.load(job["dataset"])
    if job["trial"] is not None:
        train, test = data.split(train, 1 / 6)
    torch.manual_seed(seed)
    model = build(row, info.shape, setting)
    loss = losses.CrossEntropy(tau=setting["tau"])
    options: dict[str, Any] = {"allocation": "optimal" if has(row, "+ allocation") else "global"}
    if row == "per-example clipping":
        options |= {"method": "bookkeeping", "max_grad_norm": setting["clip"], "allocation": "global"}
    elif row in ROWS and has(row, "+ adaptive"):
        options["adaptive"] = AdaptiveClip(quantile=setting["quantile"], rate=0.2)
    plan = lipdp.plan(
        model, loss, dataset_size=len(train), batch_size=BATCH, delta=DELTA, noise_multiplier=job["sigma"], epochs=EPOCHS, **options
    )
    assert plan.epsilon <= EPSILON
    optimizer = torch.optim.SGD(model.parameters(), lr=setting["lr"] / plan.sensitivity, momentum=0.9)
    started = time.monotonic()
    lipdp.fit(
        model,
        loss,
        optimizer,
        plan,
        train,
        seed=seed,
        device=job["device"],
        microbatch_size=None if job["device"] == "cpu" else 1 << 16,
        ema_decay=0.95 if has(row, "+ EMA") else None,
        augmentation=CROSS if has(row, "+ augmentation") else None,
        evaluations=1,
    )
    accuracy = lipdp.evaluate(model, loss, test, device=job["device"])["accuracy"]
    return {**job, "accuracy": accuracy, "epsilon": plan.epsilon, "steps": plan.steps, "seconds": time.monotonic() - started}


def key(job: dict[str, Any]) -> tuple[Any, ...]:
    return job["dataset"], job["row"], job["trial"], job["seed"] if job["trial"] is None else 0


def read(out: Path) -> list[dict[str, Any]]:
    file = out / "jobs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def work(jobs: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    done = {key(job) for job in read(out)}
    todo = [job for job in jobs if key(job) not in done]
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.workers) as pool, (out / "jobs.jsonl").open("a") as stream:
        for result in pool.imap_unordered(run_job, todo):
            stream.write(json.dumps(result) + "\n")
            stream.flush()
            which = f"trial {result['trial']}" if result["trial"] is not None else f"seed {result['seed']}"
            print(f"{result['dataset']} {result['row']} {which}: {result['accuracy']:.4f}", flush=True)


def run(arguments: argparse.Namespace) -> None:
    rows = [*ROWS, *OTHERS]
    sizes = {"mnist": 60_000, "fashion_mnist": 60_000}
    sigmas = {
        held: calibrate_noise(
            epsilon=EPSILON, delta=DELTA, sampling_rate=BATCH / size, steps=math.ceil(EPOCHS * size / BATCH - 1e-9)
        )
        for held, size in ((True, 50_000), (False, 60_000))
    }
    assert set(sizes) == set(DATASETS)
    common = {"device": arguments.device}
    trials = [
        {**common, "dataset": d, "row": row, "trial": t, "seed": 0, "setting": draw_settings(row, t), "sigma": sigmas[True]}
        for t in range(arguments.trials)
        for row in reversed(rows)  # the slow ones first
        for d in DATASETS
    ]
    work(trials, arguments)
    found = read(Path(arguments.out))
    final = []
    for d in DATASETS:
        for row in reversed(rows):
            tried = [job for job in found if job["dataset"] == d and job["row"] == row and job["trial"] is not None]
            best = max(tried, key=lambda job: job["accuracy"])
            final += [
                {**common, "dataset": d, "row": row, "trial": None, "seed": s, "setting": best["setting"], "sigma": sigmas[False]}
                for s in arguments.seeds
            ]
    work(final, arguments)


def table(arguments: argparse.Namespace) -> None:
    found = read(Path(arguments.out))
    lines = ["| | MNIST | Fashion-MNIST |", "|---|---|---|"]
    for row in (*ROWS, *OTHERS):
        cells = []
        for d in DATASETS:
            runs = [100 * job["accuracy"] for job in found if job["dataset"] == d and job["row"] == row and job["trial"] is None]
            spread = statistics.stdev(runs) if len(runs) > 1 else math.nan
            cells.append(f"{statistics.mean(runs):.1f} ± {spread:.1f} ({len(runs)})" if runs else "–")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    (Path(arguments.out) / "table.md").write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="benchmarks/results/ablation")
    arguments = parser.parse_args()
    {"run": run, "table": table}[arguments.command](arguments)


if __name__ == "__main__":
    main()
