"""AUROC at ε = 1 on the nine tables, clipless and book-keeping, three seeds each; and the time of a step beside DP-SGD by Opacus.

    python benchmarks/tables/tabular.py                             the AUROCs; minutes
    taskset -c 0,1 python benchmarks/tables/tabular.py --timing     the times, on two cores of a machine that does nothing else

The settings are those of the recipes, chosen on held-out parts of the training parts; the test parts are read here only. Writes
OUTPUT.json and OUTPUT.csv. Goes on where a stopped run left off, and starts a table anew when its recipe has changed.
"""

import argparse
import csv
import hashlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import lipdp
from lipdp import models
from lipdp.losses import CrossEntropy
from lipdp.recipes import Recipe, get, prepare, train
from lipdp.recipes.recipe import settings_of
from lipdp.training.batches import gather_lazily

TABLES = ("yeast", "magic", "shuttle", "aloi", "skin", "campaign", "donors", "celeba", "census")
METHODS = ("clipless", "bookkeeping")
# The paper's Table 7: best validation AUROC in %, DP-SGD and clipless. Our census is another table: not comparable.
PAPER = {
    "aloi": (56.5, 56.2), "campaign": (90.0, 82.2), "celeba": (96.6, 96.5), "census": (93.3, 92.5), "donors": (100.0, 100.0),
    "magic": (90.7, 89.7), "shuttle": (98.3, 99.4), "skin": (100.0, 99.8), "yeast": (66.8, 75.1),
}  # fmt: skip
WARM_UP = 3


def recipe_of(table: str, method: str) -> Recipe:
    return get(f"adbench-{table}" + ("" if method == "clipless" else f"-{method}"))


def digest(recipe: Recipe) -> str:
    """Changes when the recipe's settings do."""
    settings = {name: value for name, value in settings_of(recipe).items() if name != "provenance"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


def figures(table: str, method: str, seeds: int, device: str) -> dict[str, object]:
    recipe = recipe_of(table, method)
    runs = [train(recipe, epsilon=1.0, seed=seed, device=device, evaluations=1) for seed in range(seeds)]
    aurocs = [run.auroc for run in runs]
    return {
        "auroc": statistics.fmean(aurocs),
        "std": statistics.stdev(aurocs) if seeds > 1 else 0.0,
        "aurocs": aurocs,
        "epsilon": max(run.epsilon for run in runs),
        "delta": recipe.delta,
        "steps": runs[0].steps,
        "recipe": digest(recipe),
    }


def median_step(step: Callable[[], None], timed: int) -> dict[str, float]:
    """Seconds of one step by the clock, and of processor time: the medians of ``timed``, after some to warm up.

    Processor time hardly depends on what else the machine does.
    """
    times = []
    for _ in range(timed + WARM_UP):
        started = time.perf_counter(), time.process_time()
        step()
        times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    clock, processor = zip(*times[WARM_UP:], strict=True)
    return {"clock": statistics.median(clock), "processor": statistics.median(processor)}


def engine_step(recipe: Recipe, timed: int, device: str) -> tuple[dict[str, float], int]:
    """Seconds of a step of ours as the recipe runs it, drawing the batch included, and the recipe's number of steps."""
    learn, _, info = lipdp.data.load(recipe.dataset)
    ready = prepare(recipe, info, epsilon=1.0, accountant="rdp", seed=0)
    if ready.plan.steps < timed + WARM_UP:  # steps that aren't paid for can't be taken
        longer = recipe.but(epochs=recipe.epochs * (timed + WARM_UP + 1) / ready.plan.steps)
        timing = prepare(longer, info, epsilon=1.0, accountant="rdp", seed=0)
    else:
        timing = ready
    engine = lipdp.PrivacyEngine(
        timing.model, timing.loss, timing.optimizer, timing.plan, seed=0, device=device, ema_decay=recipe.ema_decay
    )
    if recipe.statistics_budget is not None:
        engine.release_statistics(learn)
    rows = engine.settle(learn) if recipe.front == "stored" else learn
    samples = engine.samples(rows)

    def step() -> None:  # as lipdp.fit does
        chosen = next(samples)
        engine.step(*gather_lazily(rows, chosen), sample=chosen)

    return median_step(step, timed), ready.plan.steps


def opacus_step(recipe: Recipe, timed: int, device: str, *, helped: bool) -> dict[str, float]:
    """Seconds of a step by Opacus: the same model, batch size and loss.

    As it comes it gathers a batch record by record and computes the features in every step. ``helped`` gives it all that is not its
    own: batches indexed at once, features computed once wherever the recipe does so.
    """
    from opacus import PrivacyEngine

    data, _, info = lipdp.data.load(recipe.dataset)
    # Its engine does not release statistics, and the layers cost little once they are set.
    options = {**recipe.options, "clip": None, "standardise": False, "centre": False}
    model = models.create("tabular", input_shape=info.shape, classes=2, **options).to(device)
    held = torch.utils.data.TensorDataset(*(tensor.to(device) for tensor in data.tensors))
    if helped and recipe.front == "stored":
        with torch.no_grad():
            rows = torch.cat([model[:-1](part) for part in torch.split(held.tensors[0], 4096)])
        held, model = torch.utils.data.TensorDataset(rows, held.tensors[1]), model[-1:]
    loss = CrossEntropy(tau=recipe.temperature, class_weights=recipe.class_weights).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    rate = min(1.0, recipe.batch_size / len(held))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(held, batch_size=recipe.batch_size),
            noise_multiplier=4.0, max_grad_norm=1.0,
        )  # fmt: skip

        def endless():
            while True:
                yield from loader

        def indexed():
            while True:
                chosen = (torch.rand(len(held)) < rate).nonzero().flatten()
                yield tuple(tensor[chosen] for tensor in held.tensors)

        batches = indexed() if helped else endless()

        def step() -> None:
            x, y = next(batches)
            optimizer.zero_grad()
            loss(model(x), y).mean().backward()
            optimizer.step()

        return median_step(step, timed)


def timing(table: str, timed: int, device: str) -> dict[str, object]:
    """Seconds of a step by each, one after another."""
    found: dict[str, object] = {}
    for method in METHODS:
        found[method], found["steps"] = engine_step(recipe_of(table, method), timed, device)
    for name, helped in (("opacus", False), ("opacus_helped", True)):
        found[name] = opacus_step(recipe_of(table, "clipless"), timed, device, helped=helped)
    return {**found, "threads": torch.get_num_threads(), "torch": torch.__version__, "machine": processor_name()}


def processor_name() -> str:
    """The processor's name, where the system says it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(results: dict[str, dict], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    with output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("table", "method", "auroc", "std", "seeds", "epsilon", "delta", "steps", "ms_per_step", "cpu_ms_per_step",
                         "opacus_ms_per_step", "opacus_cpu_ms_per_step", "opacus_helped_ms_per_step",
                         "opacus_helped_cpu_ms_per_step", "paper_dpsgd", "paper_clipless"))  # fmt: skip
        for table in TABLES:
            for method, row in results["tables"].get(table, {}).items():
                times = results["timing"].get(table, {})
                shown = [f"{1e3 * times[name][clock]:.2f}" if name in times else ""
                         for name in (method, "opacus", "opacus_helped") for clock in ("clock", "processor")]  # fmt: skip
                writer.writerow((table, method, f"{100 * row['auroc']:.2f}", f"{100 * row['std']:.2f}", len(row["aurocs"]),
                                 f"{row['epsilon']:.4f}", row["delta"], row["steps"], *shown, *PAPER[table]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--workers", type=int, default=1, help="processes for the AUROCs")
    parser.add_argument("--timing", action="store_true", help="measure times instead; run nothing beside it")
    parser.add_argument("--timed", type=int, default=30, help="steps that are timed")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tabular"))
    arguments = parser.parse_args()
    stored = arguments.output.with_suffix(".json")
    results: dict[str, dict] = json.loads(stored.read_text()) if stored.exists() else {}
    results = {"tables": results.get("tables", {}), "timing": results.get("timing", {})}
    tables = arguments.tables.split(",")
    if arguments.timing:
        for table in tables:
            results["timing"][table] = timing(table, arguments.timed, arguments.device)
            print(table, json.dumps(results["timing"][table]), flush=True)
            write(results, arguments.output)
        return
    due = [(table, method) for table in tables for method in arguments.methods.split(",")
           if results["tables"].get(table, {}).get(method, {}).get("recipe") != digest(recipe_of(table, method))]  # fmt: skip
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        waiting = {pair: pool.submit(figures, *pair, arguments.seeds, arguments.device) for pair in due}
        for (table, method), future in waiting.items():
            row = results["tables"].setdefault(table, {})[method] = future.result()
            print(table, method, json.dumps({k: v for k, v in row.items() if k != "aurocs"}), "paper", PAPER[table], flush=True)
            write(results, arguments.output)


if __name__ == "__main__":
    main()
