"""Clips, reaches and kernels of the tables' private heads: what `defaults.py` does, with more of a choice.

    python benchmarks/tables/rules.py export FILE.npz           the pilots' encoded rows and splits (needs scikit-learn)
    python benchmarks/tables/rules.py search FILE.npz OUT.jsonl  every setting on every pilot (needs torch alone)
    python benchmarks/tables/rules.py show OUT.jsonl            settings by what they lose against the best of each pilot

`export --judged` writes the judged tables of numbers instead, for `search --kind hand` to say what a recipe tuned by hand on them
reaches: a setting is chosen by the mean over splits 100 to 102 and read on splits 0 to 2, those of `estimators.py`
(`rules_by_hand.jsonl`, scores in the order 0, 1, 2, 100, 101, 102).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

DELTA, STEPS, FEATURES, MOMENTUM = 1e-5, 100, 1000, 0.9
EPSILONS = (1.0, 3.0, 9.0)
STABLE = 30.0  # largest rate, on the mean gradient of rows of norm 1, with momentum
TRIALS = {
    "numbers": ((0.3, 0.15), (0.3, 0.1), (0.2, 0.15), (0.15, 0.15), (0.1, 0.15), (0.1, 0.1), (0.1, 0.075), (0.05, 0.075)),
    "hand": ((0.3, 0.15), (0.2, 0.15), (0.1, 0.15), (0.1, 0.1), (0.1, 0.075), (0.05, 0.05)),
    "classes": ((0.3, 0.3), (0.3, 0.2), (0.1, 0.15), (0.1, 0.1), (1.0, 0.6)),
}  # C, κ
BLOCKS = {
    "numbers": (
        *("line + 0.7 + sum 1", "line + 1 + sum 1", "line + 1 + sum 0.7", "line + 1 + pairs 1 + sum 1", "line + 1"),
        *("line + 0.7 + sum 0.7", "line + 1 + sum 0.5", "line + 0.5 + 1 + sum 0.7", "1 + sum 0.7", "line + 0.85 + sum 0.6"),
    ),
    "hand": (
        *("line + 1 + sum 0.5", "line + sum 1", "line + 1 + sum 1", "line + 1"),
        *("line + 0.7 + sum 1", "line + 1 + pairs 1 + sum 1"),
    ),
    "classes": ("line + 0.5", "line + 0.7", "line + t3 0.7", "line + t2 0.7"),
}  # "t3": Matérn's kernel in the place of the Gaussian one, its frequencies drawn from Student's distribution of 3 degrees


def export(file: Path, judged: bool) -> None:
    """Encoded rows, targets, usual widths and splits."""
    sys.path.insert(0, str(Path(__file__).parent))
    import defaults
    from sklearn.model_selection import train_test_split

    from estimators import encoded, fresh, tables

    these = [t for t in (*tables(), *fresh()) if t.metric == "R2"] if judged else list(defaults.pilots())
    out: dict[str, Any] = {}
    facts = []
    for number, table in enumerate(these):
        rows = encoded(table, table.rows).astype(np.float32)
        by = None if table.metric == "R2" else table.targets
        if table.metric == "R2":
            targets = np.asarray(table.targets, dtype=np.float64)
        else:
            targets = np.unique(table.targets, return_inverse=True)[1]
        for split in (0, 1, 2, 100, 101, 102) if judged else range(4):
            kept, _ = train_test_split(np.arange(len(rows)), test_size=0.25, random_state=split, stratify=by)
            mask = np.zeros(len(rows), bool)
            mask[kept] = True
            out[f"split {number} {split}"] = mask
        out[f"rows {number}"], out[f"targets {number}"] = rows, targets
        facts.append(
            {
                "name": table.name,
                "metric": table.metric,
                "range": table.target,
                "width": defaults.width(table, table.rows.shape[1]),
                "splits": list((0, 1, 2, 100, 101, 102) if judged else range(4)),
            }
        )
    np.savez_compressed(file, facts=json.dumps(facts), **out)


def fourier(rows: torch.Tensor, count: int, scale: float, each: int | None, tails: float | None, seed: int) -> torch.Tensor:
    """Random Fourier features of norm 1: of a Gaussian kernel, or of Matérn's, whose frequencies are Student's."""
    draw = np.random.default_rng(seed)
    columns = rows.shape[1]
    weights = draw.normal(size=(columns, count // 2))
    if each is not None and each < columns:
        kept = np.zeros_like(weights)
        for place in range(count // 2):
            kept[draw.permutation(columns)[:each], place] = 1
        weights *= kept
    if tails is not None:
        weights /= np.sqrt(draw.chisquare(tails, count // 2) / tails)
    z = rows @ torch.tensor(weights / scale, dtype=rows.dtype, device=rows.device)
    return torch.nn.functional.normalize(torch.cat([z.cos(), z.sin()], 1), dim=1)


def features(rows: torch.Tensor, blocks: str, usual: float) -> torch.Tensor:
    """Each block at norm 1, all together at norm 1."""
    parts = []
    names = blocks.split(" + ")
    random = sum(name != "line" for name in names)
    for place, name in enumerate(names):
        if name == "line":
            unit = torch.nn.functional.normalize(rows, dim=1)
            parts.append(torch.nn.functional.normalize(torch.nn.functional.pad(unit, (0, 1), value=1.0), dim=1))
            continue
        kind, _, size = name.rpartition(" ")
        each = {"sum": 1, "pairs": 2}.get(kind)
        each = None if each is not None and each >= rows.shape[1] else each
        tails = float(kind[1:]) if kind.startswith("t") else None
        scale = float(size) * (usual if each is None else 0.4 * math.sqrt(each))
        parts.append(fourier(rows, FEATURES // random, scale, each, tails, 17 + place))
    return torch.cat(parts, 1) / math.sqrt(len(parts))


def deviation(epsilon: float) -> float:
    """σ₁ of one Gaussian release (Balle and Wang)."""

    def spent(sigma: float) -> float:
        def below(value: float) -> float:
            return 0.5 * math.erfc(-value / math.sqrt(2))

        return below(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * below(-0.5 / sigma - epsilon * sigma)

    low, high = 0.01, 100.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > DELTA else (low, middle)
    return high


def descend(
    x: torch.Tensor, wanted: torch.Tensor, trials: list[tuple[float, float, float]], draw: torch.Generator, unstable: float
) -> torch.Tensor:
    """The heads' weights, (trials, features, outputs), for (C, κ, ε) each."""
    count, outputs = wanted.shape
    clips, noises, single = (
        torch.tensor(column, device=x.device) for column in zip(*[(c, k, deviation(e)) for c, k, e in trials], strict=True)
    )
    rates = (2 * noises * count / single / STEPS / clips).clamp_max(STABLE)  # on the mean gradient
    momentum = torch.where(rates > unstable, MOMENTUM, 0.0)[:, None, None]
    weights = torch.zeros(len(trials), x.shape[1], outputs, device=x.device)
    speed = torch.zeros_like(weights)
    scale = (clips * math.sqrt(STEPS) * single)[:, None, None]
    for step in range(STEPS):
        seen = x @ weights.transpose(0, 1).flatten(1)
        residual = seen.view(count, len(trials), outputs) - wanted[:, None]
        residual *= (clips[None, :, None] / residual.norm(dim=2, keepdim=True).clamp_min(1e-9)).clamp_max(1.0)
        total = (x.T @ residual.flatten(1)).view(-1, len(trials), outputs).transpose(0, 1)
        total = total + scale * torch.randn(weights.shape, generator=draw, device=x.device)
        speed = momentum * speed + total / count
        weights = weights - rates[:, None, None] * (1 - momentum) * (1 + math.cos(math.pi * step / STEPS)) / 2 * speed
    return weights


def search(source: Path, out: Path, kind: str) -> None:
    """Scores of all settings."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    with np.load(source, allow_pickle=False) as file:
        facts = json.loads(str(file["facts"]))
        held = {name: file[name] for name in file.files if name != "facts"}
    done = {(t["table"], t["blocks"]) for t in stored(out)}
    for blocks in BLOCKS[kind]:
        began = time.process_time()
        for number, fact in enumerate(facts):
            numbers = fact["metric"] == "R2"
            if (fact["name"], blocks) in done or numbers == (kind == "classes"):
                continue
            rows = torch.from_numpy(held[f"rows {number}"]).to(device)
            targets = held[f"targets {number}"]
            every = features(rows, blocks, fact["width"])
            kinds = [(c, k, e) for c, k in TRIALS[kind] for e in EPSILONS[: 2 if kind == "hand" else 3]]
            scores = []
            for split in fact["splits"]:
                mask = torch.from_numpy(held[f"split {number} {split}"]).to(device)
                kept = mask.cpu().numpy()
                x, z = every[mask], every[~mask]
                draw = torch.Generator(device).manual_seed(1000 + split)
                if numbers:
                    low, high = fact["range"]
                    wanted = torch.from_numpy((2 * (targets[kept] - low) / (high - low) - 1).clip(-1, 1)).float()[:, None]
                    weights = descend(x, wanted.to(device), kinds, draw, 2.0)
                    outs = (z @ weights)[..., 0].clamp(-1, 1).double().cpu().numpy()
                    answers = targets[~kept]
                    scores.append(
                        [1 - float(((answers - low - (o + 1) / 2 * (high - low)) ** 2).mean() / answers.var()) for o in outs]
                    )
                else:
                    outputs = int(targets.max()) + 1
                    codes = torch.from_numpy(targets)
                    wanted = torch.nn.functional.one_hot(codes[mask.cpu()], outputs).float().to(device) - 1 / outputs
                    weights = descend(x, wanted, kinds, draw, 2.0)
                    right = (z @ weights).argmax(2) == codes[~mask.cpu()].to(device)
                    scores.append(right.double().mean(1).cpu().tolist())
            with out.open("a") as file_:
                for place, (clip, noise, epsilon) in enumerate(kinds):
                    line = {"table": fact["name"], "blocks": blocks, "clip": clip, "noise": round(noise, 5), "epsilon": epsilon}
                    line |= {"metric": fact["metric"], "scores": [round(found[place], 4) for found in scores]}
                    out_line = json.dumps(line)
                    file_.write(out_line + "\n")
        print(blocks, f"{time.process_time() - began:.0f} s", file=sys.stderr, flush=True)


def stored(file: Path) -> list[dict[str, Any]]:
    """Trials so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def show(file: Path, count: int) -> None:
    """Settings by what they lose against the best of each table at each ε: mean, the worst, and how many lose over 2."""
    for metric in ("R2", "accuracy"):
        lost: dict[tuple[Any, ...], dict[tuple[str, float], float]] = defaultdict(dict)
        for trial in stored(file):
            if (trial["metric"] == "R2") == (metric == "R2"):
                setting = (trial["blocks"], trial["clip"], trial["noise"])
                lost[setting][trial["table"], trial["epsilon"]] = 100 * max(0.0, statistics.fmean(trial["scores"]))
        places = sorted({place for found in lost.values() for place in found})
        best = {place: max(found.get(place, -math.inf) for found in lost.values()) for place in places}
        rows = [
            (statistics.fmean(gaps), max(gaps), sum(gap > 2 for gap in gaps), setting)
            for setting, found in lost.items()
            if len(found) == len(places)
            for gaps in [[best[place] - found[place] for place in places]]
        ]
        print(metric)
        for mean, worst, beyond, (blocks, clip, noise) in sorted(rows)[:count]:
            print(f"{mean:6.2f} {worst:6.1f} {beyond:3d}/{len(places)}  {blocks}, C = {clip}, κ = {noise}")


def main() -> None:
    """Export, search or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("export", "search", "show"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--judged", action="store_true", help="the judged tables")
    parser.add_argument("--kind", choices=("numbers", "classes", "hand"), default="numbers")
    parser.add_argument("--count", type=int, default=12)
    options = parser.parse_args()
    if options.what == "export":
        export(options.files[0], options.judged)
    elif options.what == "search":
        search(options.files[0], options.files[1], options.kind)
    else:
        show(options.files[0], options.count)


if __name__ == "__main__":
    main()
