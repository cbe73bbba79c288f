"""AUROC at ε = 1 on the nine tables, clipless and book-keeping, three seeds each, and the time beside DP-SGD by Opacus.

    python benchmarks/tabular.py --output benchmarks/results/tabular

The settings are those of the recipes, chosen on held-out parts of the training parts; the test parts are read here only. Writes
OUTPUT.json and OUTPUT.csv, and goes on where a stopped run left off.
"""

import argparse
import csv
import json
import platform
import statistics
import time
import warnings
from pathlib import Path

import torch

import lipdp
from lipdp import models
from lipdp.losses import CrossEntropy
from lipdp.recipes import get, train
from lipdp.recipes.tabular import TabularRecipe

TABLES = ("yeast", "magic", "shuttle", "aloi", "skin", "campaign", "donors", "celeba", "census")
# The paper's Table 7: best validation AUROC in %, DP-SGD and clipless. Our census is another table: not comparable.
PAPER = {
    "aloi": (56.5, 56.2), "campaign": (90.0, 82.2), "celeba": (96.6, 96.5), "census": (93.3, 92.5), "donors": (100.0, 100.0),
    "magic": (90.7, 89.7), "shuttle": (98.3, 99.4), "skin": (100.0, 99.8), "yeast": (66.8, 75.1),
}  # fmt: skip


def figures(recipe: TabularRecipe, seeds: int, device: str) -> dict[str, object]:
    runs = [train(recipe, epsilon=1.0, seed=seed, device=device, evaluations=1) for seed in range(seeds)]
    aurocs = [run.auroc for run in runs]
    return {
        "auroc": statistics.fmean(aurocs),
        "std": statistics.stdev(aurocs) if seeds > 1 else 0.0,
        "aurocs": aurocs,
        "epsilon": max(run.epsilon for run in runs),
        "delta": recipe.delta,
        "steps": runs[0].steps,
        "seconds": statistics.median(run.seconds for run in runs),
    }


def opacus_seconds(recipe: TabularRecipe, steps: int, device: str, timed: int = 10) -> float:
    """Seconds of the same number of steps by Opacus: the same model, batch and loss; the median step of ``timed``, times steps."""
    from opacus import PrivacyEngine

    data, _, info = lipdp.data.load(recipe.dataset)
    model = models.create("tabular", input_shape=info.shape, classes=2, **{**recipe.options, "clip": None, "standardise": False})
    model.to(device)
    loss = CrossEntropy(tau=recipe.temperature, class_weights=recipe.class_weights).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    on_device = torch.utils.data.TensorDataset(*(tensor.to(device) for tensor in data.tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(on_device, batch_size=recipe.batch_size),
            noise_multiplier=4.0, max_grad_norm=1.0,
        )  # fmt: skip
        times = []
        while len(times) < timed + 2:
            started = time.monotonic()
            for x, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).mean().backward()
                optimizer.step()
                times.append(time.monotonic() - started)
                started = time.monotonic()
                if len(times) == timed + 2:
                    break
    return steps * statistics.median(times[2:])


def write(results: dict[str, object], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    with output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("table", "method", "auroc", "std", "seeds", "epsilon", "delta", "steps", "seconds", "opacus_seconds",
                         "paper_dpsgd", "paper_clipless"))  # fmt: skip
        for table, methods in results["tables"].items():
            for method, row in methods.items():
                writer.writerow((table, method, f"{100 * row['auroc']:.2f}", f"{100 * row['std']:.2f}", len(row["aurocs"]),
                                 f"{row['epsilon']:.4f}", row["delta"], row["steps"], f"{row['seconds']:.2f}",
                                 f"{row.get('opacus_seconds', float('nan')):.2f}", *PAPER[table]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default="clipless,bookkeeping")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tabular"))
    arguments = parser.parse_args()
    stored = arguments.output.with_suffix(".json")
    results = json.loads(stored.read_text()) if stored.exists() else {"tables": {}}
    results |= {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": arguments.device,
    }
    for table in arguments.tables.split(","):
        for method in arguments.methods.split(","):
            rows = results["tables"].setdefault(table, {})
            if method in rows:
                continue
            recipe = get(f"adbench-{table}" + ("" if method == "clipless" else f"-{method}"))
            row = figures(recipe, arguments.seeds, arguments.device)
            if method == "clipless":
                row["opacus_seconds"] = opacus_seconds(recipe, row["steps"], arguments.device)
            rows[method] = row
            print(table, method, json.dumps({k: v for k, v in row.items() if k != "aurocs"}), "paper", PAPER[table], flush=True)
            write(results, arguments.output)


if __name__ == "__main__":
    main()
