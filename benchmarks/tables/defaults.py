"""The search for the estimators' defaults: features and κ by simulation, on tables that the estimators are not judged on.

    python benchmarks/tables/defaults.py pilots             try every setting on the pilots (resumes), print the ranking
    python benchmarks/tables/defaults.py pilots --show      print it from the stored trials
    python benchmarks/tables/defaults.py hand               settings on judged tables themselves, on other splits of them
    python benchmarks/tables/defaults.py chosen             the best of those, read where the defaults are read

A fit of the estimators is full-batch descent on Φ(rows), whose rows have norm 1, with residuals clipped to C and Gaussian noise.
That is done here in a few lines of torch, with noise from torch's own generator: the same distribution, and some hundred times as
fast. Nothing that is released comes from here. ε is that of one Gaussian release (all steps are on all records, so they compose to
it), by the analytic formula of Balle and Wang.

Settings: which blocks of features stand beside each other ("line": the columns; a number w: a kernel of w times the usual
width; "sum w": a kernel that is a sum over the columns, "pairs w" over pairs of them), and κ. A score is accuracy or R².
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

sys.path.insert(0, str(Path(__file__).parent))
from estimators import Table, encoded, fresh, powers_of_two, tables
from lipdp.data.files import data_root
from lipdp.estimators import Categorical, Numeric
from lipdp.features.kernels import RandomFourier

RESULTS = Path(__file__).parents[1] / "results" / "estimators"
DELTA, STEPS, CLIP, FEATURES, MOMENTUM = 1e-5, 100, 0.3, 1000, 0.9
EPSILONS = (1.0, 3.0, 9.0)  # at ε = 9 a pilot stands for one of thrice the records at ε = 3
UNSTABLE = 2.0  # the stored trials of pilots: 20, for classes of N·ε above 1000 each only; the two were compared afterwards
NOISES = {"classes": (0.1, 0.2, 0.3), "numbers": (0.05, 0.1, 0.15)}
Blocks = tuple[str, ...]


# Tables.


def _adbench(name: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    with np.load(data_root(None) / "adbench" / name, allow_pickle=False) as file:
        rows, labels = file["X"].astype(float), file["y"].astype(int)
    chosen = np.random.default_rng(seed).permutation(len(labels))[:count]
    return rows[chosen], labels[chosen]


def _even(rows: np.ndarray, labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """As many of each class: accuracy says more of them."""
    draw = np.random.default_rng(1)
    parts = [draw.permutation(np.flatnonzero(labels == label))[: count // 2] for label in (0, 1)]
    chosen = np.concatenate(parts)
    return rows[chosen], labels[chosen]


def _classes(name: str, rows: np.ndarray, labels: np.ndarray, schema: Any = None) -> Table:
    return Table(name, rows, labels, schema or powers_of_two(rows))


def pilots() -> Iterator[Table]:
    """Tables that decide. None of them is judged, and none of those that are is looked at here."""
    digits = datasets.load_digits()
    images = digits.images
    sums = np.concatenate([images.sum(1), images.sum(2)], axis=1)
    yield _classes("digits, sums", sums, digits.target, Numeric(0, 128))
    halves = images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16)
    few = np.flatnonzero(digits.target < 4)[:400]
    yield _classes("digits, four of them", halves[few], digits.target[few], Numeric(0, 16))
    yield _classes("yeast", *_adbench("47_yeast.npz", 1484))
    for count in (400, 2000):
        yield _classes(f"magic {count}", *_even(*_adbench("22_magic.gamma.npz", 19020), count))
    yield _classes("skin", *_even(*_adbench("33_skin.npz", 30000), 800))
    yield _classes("shuttle", *_even(*_adbench("32_shuttle.npz", 49097), 1500))
    draw = np.random.default_rng(5)
    yield _classes("blobs", *datasets.make_blobs(200, 5, centers=4, cluster_std=3.0, random_state=3), Numeric(-16, 16))
    for number, (count, columns, useful, kinds) in enumerate(((250, 8, 4, 3), (2000, 12, 8, 2), (1500, 20, 6, 4))):
        rows, labels = datasets.make_classification(
            count, columns, n_informative=useful, n_classes=kinds, n_clusters_per_class=2, class_sep=1.5, random_state=number
        )
        yield _classes(f"clusters {columns}", rows, labels, Numeric(-8, 8))
    yield _classes("circles", *datasets.make_circles(1500, noise=0.1, factor=0.6, random_state=0), Numeric(-2, 2))
    for dimensions, count in ((5, 1500), (7, 2000), (16, 2000)):
        rows = draw.normal(size=(count, dimensions))
        inside = (rows**2).sum(1)
        yield _classes(f"shells {dimensions}", rows, (inside > np.median(inside)).astype(int), Numeric(-3, 3))
    rows = draw.uniform(-1, 1, (2000, 6))
    yield _classes("checkers", rows, ((rows[:, 0] * rows[:, 1] > 0) ^ (draw.random(2000) < 0.05)).astype(int), Numeric(-1, 1))
    rows = draw.uniform(0, 1, (2000, 9))
    logits = 3 * np.sin(2 * np.pi * rows[:, 0]) + 8 * (rows[:, 1] - 0.5) ** 2 + 2 * rows[:, 2] - 2
    yield _classes("sum of curves", rows, (draw.random(2000) < 1 / (1 + np.exp(-2 * logits))).astype(int), Numeric(0, 1))
    # Numbers.
    for count in (300, 2000):
        rows, values = datasets.make_regression(count, 12, n_informative=6, noise=30.0, random_state=count)
        yield Table(f"plane {count}", rows, values, Numeric(-4, 4), "R2", (-512.0, 512.0))
    rows = draw.uniform(-1, 1, (2000, 8))
    values = np.abs(rows[:, 0]) + rows[:, 1] * rows[:, 2] + np.exp(rows[:, 3]) / 2 + 0.1 * draw.normal(size=2000)
    yield Table("corners", rows, values, Numeric(-1, 1), "R2", (-1.0, 3.0))
    values = np.cos(3 * rows[:, 0]) + rows[:, 1] ** 2 - rows[:, 2] + 0.2 * draw.normal(size=2000)
    yield Table("sum of curves, R2", rows, values, Numeric(-1, 1), "R2", (-4.0, 4.0))
    for name, file, count, column in (
        ("yeast, R2", "47_yeast.npz", 1484, 0),
        ("magic, R2", "22_magic.gamma.npz", 2000, 0),
        ("magic, R2, few", "22_magic.gamma.npz", 400, 1),
        ("skin, R2", "33_skin.npz", 1000, 2),
    ):
        rows, _ = _adbench(file, count)
        rest = np.delete(rows, column, 1)
        (span,) = powers_of_two(rows[:, column : column + 1])
        yield Table(name, rest, rows[:, column], powers_of_two(rest), "R2", span)
    yield Table("digits, R2", sums, digits.target.astype(float), Numeric(0, 128), "R2", (0.0, 10.0))


# Features, and a fit.


def width(table: Table, columns: int) -> float:
    """As :func:`lipdp.estimators.methods.kernel_width`."""
    kinds = table.schema if isinstance(table.schema, list) else [table.schema] * columns
    return 0.4 * math.sqrt(sum(2 if isinstance(kind, Categorical) else 1 for kind in kinds))


def features(rows: torch.Tensor, blocks: Blocks, usual: float) -> torch.Tensor:
    """Each block at norm 1, all together at norm 1; the random ones share FEATURES among them."""
    parts, random = [], sum(block != "line" for block in blocks)
    for block in blocks:
        if block == "line":
            unit = torch.nn.functional.normalize(rows, dim=1)
            part = torch.nn.functional.pad(unit, (0, 1), value=1.0)
        else:
            kind, _, size = block.rpartition(" ")
            each = {"": None, "sum": 1, "pairs": 2}[kind]
            if each is not None and each >= rows.shape[1]:
                each = None
            scale = float(size) * (usual if each is None else 0.4 * math.sqrt(each))
            part = RandomFourier(rows.shape[1], FEATURES // random, scale, each=each)(rows)
        parts.append(torch.nn.functional.normalize(part, dim=1))
    return torch.nn.functional.normalize(torch.cat(parts, 1), dim=1)


def deviation(epsilon: float, delta: float = DELTA) -> float:
    """σ₁ of one Gaussian release."""

    def spent(sigma: float) -> float:
        def below(value: float) -> float:
            return 0.5 * math.erfc(-value / math.sqrt(2))

        return below(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * below(-0.5 / sigma - epsilon * sigma)

    low, high = 0.01, 100.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


Trial = tuple[float, float]  # (κ, ε)


def descend(x: torch.Tensor, wanted: torch.Tensor, trials: list[Trial], draw: torch.Generator) -> torch.Tensor:
    """The heads' weights, (trials, features, outputs): all of them in one product a step."""
    count, outputs = wanted.shape
    single = torch.tensor([deviation(epsilon) for _, epsilon in trials])
    rates = 2 * torch.tensor([noise for noise, _ in trials]) * count / single / STEPS
    momentum = torch.where(rates / CLIP > UNSTABLE, MOMENTUM, 0.0)[:, None, None]
    weights = torch.zeros(len(trials), x.shape[1], outputs)
    speed = torch.zeros_like(weights)
    for step in range(STEPS):
        seen = x @ weights.transpose(0, 1).flatten(1)
        residual = seen.view(count, len(trials), outputs) - wanted[:, None]
        if outputs == 1:
            residual = residual.clamp(-1, 1)  # Huber's
        residual *= (CLIP / residual.norm(dim=2, keepdim=True).clamp_min(1e-9)).clamp_max(1.0)
        total = (x.T @ residual.flatten(1)).view(-1, len(trials), outputs).transpose(0, 1)
        drawn = torch.randn(weights.shape, generator=draw)
        total = total + CLIP * math.sqrt(STEPS) * single[:, None, None] * drawn
        speed = momentum * speed + total / count
        weights = weights - rates[:, None, None] * (1 - momentum) / CLIP * (1 + math.cos(math.pi * step / STEPS)) / 2 * speed
    return weights


def scores(table: Table, blocks: Blocks, trials: list[Trial], split: int) -> list[float]:
    """On a held-out quarter, of each trial."""
    by = None if table.metric == "R2" else table.targets
    every = encoded(table, table.rows)
    rows, rest, targets, answers = train_test_split(every, table.targets, test_size=0.25, random_state=split, stratify=by)
    usual = width(table, table.rows.shape[1])
    x, z = (features(torch.from_numpy(part).float(), blocks, usual) for part in (rows, rest))
    draw = torch.Generator().manual_seed(1000 + split)
    if table.metric == "R2":
        low, high = table.target or (0.0, 1.0)
        wanted = torch.from_numpy((2 * (targets - low) / (high - low) - 1).clip(-1, 1)).float()[:, None]
        outs = (z @ descend(x, wanted, trials, draw))[..., 0].clamp(-1, 1).double().numpy()
        return [1 - float(((answers - low - (out + 1) / 2 * (high - low)) ** 2).mean() / answers.var()) for out in outs]
    labels, codes = np.unique(targets, return_inverse=True)
    wanted = torch.nn.functional.one_hot(torch.from_numpy(codes), len(labels)).float() - 1 / len(labels)
    outs = (z @ descend(x, wanted, trials, draw)).numpy()
    if table.metric == "auroc":
        return [float(roc_auc_score(answers, out[:, 1] - out[:, 0])) for out in outs]
    return [float((labels[out.argmax(1)] == answers).mean()) for out in outs]


# The search.

BLOCKS: tuple[Blocks, ...] = (
    ("line", "0.7", "sum 1"),
    ("line", "0.7"),
    ("line", "0.85", "sum 1"),
    ("line", "0.7", "sum 0.7"),
    ("line", "0.5", "1", "sum 1"),
    ("line", "0.5", "sum 1"),
    ("line", "0.5"),
    ("line", "1", "sum 1"),
    ("line", "0.5", "1"),
    ("line", "1"),
    ("line", "sum 1"),
    ("1",),
    ("line",),
)


def stored(file: Path) -> list[dict[str, Any]]:
    """Trials so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def search(these: list[Table], file: Path, first: int, epsilons: tuple[float, ...]) -> None:
    """Every setting on every table: what is missing. Small tables are split more often."""
    done = {(t["table"], tuple(t["blocks"]), t["noise"]) for t in stored(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    # By hand: those that differ most first, for it may be cut short.
    apart = [("line", "0.7", "sum 1"), ("line", "0.5"), ("line", "1"), ("line", "sum 1"), ("line",), ("line", "1", "sum 1")]
    for blocks in BLOCKS if len(epsilons) > 2 else apart:
        began = time.time()
        for table in these:
            noises = NOISES["numbers" if table.metric == "R2" else "classes"]
            trials = [(n, epsilon) for n in noises if (table.name, blocks, n) not in done for epsilon in epsilons]
            if not trials:
                continue
            splits = range(first, first + (4 if len(table.rows) < 1000 else 2))
            found = zip(*[scores(table, blocks, trials, split) for split in splits], strict=True)
            with file.open("a") as out:
                for (noise, epsilon), figures in zip(trials, found, strict=True):
                    line = {"table": table.name, "blocks": blocks, "noise": noise, "epsilon": epsilon, "metric": table.metric}
                    out.write(json.dumps({**line, "scores": [round(figure, 5) for figure in figures]}) + "\n")
        print(blocks, f"{time.time() - began:.0f} s", file=sys.stderr, flush=True)


def chosen(file: Path) -> None:
    """The recipe tuned by hand, chosen on other splits, read on the first three: those that `estimators.py` reads."""
    found: dict[tuple[str, float], dict[tuple[Blocks, float], float]] = defaultdict(dict)
    for trial in stored(RESULTS / "hand.jsonl"):
        setting = (tuple(trial["blocks"]), trial["noise"])
        found[trial["table"], trial["epsilon"]][setting] = statistics.fmean(trial["scores"])
    for table in (*tables(), *fresh()):
        if table.metric != "R2" and "spheres" not in table.name:
            continue  # of the other classes, `hand.jsonl` has few settings
        for epsilon in EPSILONS[:2]:
            own = found[table.name, epsilon]
            blocks, noise = max(own, key=lambda setting: own[setting])
            figures = [round(scores(table, blocks, [(noise, epsilon)], split)[0], 4) for split in range(3)]
            line = {"table": table.name, "epsilon": epsilon, "blocks": blocks, "noise": noise, "scores": figures}
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(line, flush=True)


def show(trials: list[dict[str, Any]], numbers: bool, each: bool, epsilons: tuple[float, ...] = EPSILONS) -> None:
    """Settings by what they lose against the best of each table at each ε: mean, and the worst."""
    lost: dict[tuple[Any, ...], dict[tuple[str, float], float]] = defaultdict(dict)
    for trial in trials:
        if (trial["metric"] == "R2") == numbers and trial["epsilon"] in epsilons:
            place = (trial["table"], trial["epsilon"])
            lost[(tuple(trial["blocks"]), trial["noise"])][place] = 100 * max(0.0, statistics.fmean(trial["scores"]))
    places = sorted({place for found in lost.values() for place in found})
    best = {place: max(found.get(place, -math.inf) for found in lost.values()) for place in places}
    rows = []
    for setting, found in lost.items():
        if len(found) == len(places):
            gaps = [best[place] - found[place] for place in places]
            rows.append((statistics.fmean(gaps), max(gaps), sum(gap > 2 for gap in gaps), setting))
    for mean, worst, beyond, setting in sorted(rows)[:8]:
        print(f"{mean:6.2f} {worst:6.1f} {beyond:3d}/{len(places)}  {' + '.join(setting[0])}, κ = {setting[1]}")
        if each:
            print("      ", {f"{p[0]} {p[1]:g}": round(best[p] - lost[setting][p], 1) for p in places})


def main() -> None:
    """Search, or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pilots", "hand", "chosen"))
    parser.add_argument("--show", action="store_true", help="only print")
    parser.add_argument("--each", action="store_true", help="what is lost on each table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / f"{options.what}.jsonl"
    if options.what == "chosen":
        chosen(file)
        return
    if not options.show:
        these = (
            list(pilots())
            if options.what == "pilots"
            else [table for table in (*fresh(), *tables()) if table.fresh or table.metric == "R2"]
        )
        search(these, file, *((0, EPSILONS) if options.what == "pilots" else (100, EPSILONS[:2])))
    for numbers in (False, True):
        print("numbers" if numbers else "classes")
        for epsilons in (EPSILONS, *((epsilon,) for epsilon in EPSILONS)):
            print("ε =", *epsilons)
            show(stored(file), numbers, options.each, epsilons)


if __name__ == "__main__":
    main()
