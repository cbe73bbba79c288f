"""Features learned from drawings beside today's, compared on held-out tenths of a training set; the best become recipes.

    python benchmarks/accuracy/drawn.py cifar10 --device cuda --out found                   OUT/cifar10-drawn.jsonl and .toml
    python benchmarks/accuracy/drawn.py cifar10 --families small --sets "small 1.5" …       some of the sets
    python benchmarks/accuracy/drawn.py mnist --steps 100 --folds 5 --device cuda           straightened digits behind random ReLUs

The rule of choice, fixed before anything was run: in each family (one network), the set of features whose best settings of the
head have the highest mean over ε = 1, 3, 8 and over the held-out tenths; then, for each ε, that set's best setting. Every step
takes the whole training part, and the release of the means is charged (columns.py). The test set is never read here: lockbox.py
does, afterwards. Of digits one family is read: that with the highest such mean over five tenths.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from columns import FADE, Setting, train_columns
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.features import Straighten, extract_features
from lipdp.features.kernels import RandomReLU
from lipdp.features.stacks import feature_front
from lipdp.recipes import Recipe, save_recipe

STATISTICS = 20.0
EPSILONS = (1.0, 3.0, 8.0)
RADIUS = {"cifar10": 1.5, "fashion_mnist": 2.0, "mnist": 1.8}
Block = dict[str, Any]
CROSS = [[0, 0], [2, 0], [-2, 0], [0, 2], [0, -2]]
ORDERS = [1.0, 1.23, 0.524, 0.6]


def learned(network: str, weight: float, **more: Any) -> Block:
    return {"kind": "learned", "network": network, **more, "weight": weight}


def colour_sets() -> dict[str, dict[str, list[Block]]]:
    """By family and name. Patches and scattering are those of cifar10-mixture-* and cifar10-large-*."""
    few = {"kind": "patches", "patch": 4, "grid": 4, "overlap": 2.5, "filters": 1000, "decorrelate": 0.3}
    many = {**few, "filters": 2000, "decorrelate": 0.1}
    plain = {"kind": "scattering", "J": 3, "flip": True, "orders": ORDERS, "weight": 1.0}
    moved = [
        {**plain, "J": 2, "shifts": CROSS, "weight": 0.8},
        {**plain, "J": 3, "shifts": CROSS, "weight": 0.6},
    ]
    # Compared first, on one tenth: large at 1, 1.5, 2.2; with `many`, `moved` at 1.5, 2.2; alone; small at 1, 1.5; fewer filters.
    # Two views: images at 32 and at 48 pixels.
    near, far = (lambda w: learned("large", w, shifts=CROSS)), (lambda w: learned("large-48", w, shifts=CROSS))
    large = {
        "large 1.5": [few, plain, near(1.5)],
        "large, two views": [few, plain, near(1.2), far(1.2)],
        "large, two views, more": [few, plain, near(1.6), far(1.6)],
        "large, two views, many": [many, *moved, near(1.2), far(1.2)],
        "large and small": [few, plain, near(1.3), learned("small", 0.8, shifts=CROSS)],
    }
    small = {f"small {w:g}": [few, plain, learned("small", w)] for w in (0.7, 1.0)}
    return {"large": large, "small": small}


def grey_sets() -> dict[str, dict[str, list[Block]]]:
    """For clothes: shoes all point the same way, so nothing is mirrored."""
    patches = {"kind": "patches", "patch": 4, "filters": 200, "grid": 5, "mirror": False}
    one = [[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]]
    maps = [
        {"kind": "scattering", "J": J, "flip": False, "orders": ORDERS, "shifts": one, "weight": w} for J, w in ((2, 0.8), (3, 0.6))
    ]
    sets = {f"large {w:g}": [patches, *maps, learned("large", w, flip=False, shifts=one)] for w in (0.7, 1.2, 1.8)}
    sets["patches"] = [patches, *maps]
    return {"large": sets, "small": {"small 1.2": [patches, *maps, learned("small", 1.2, flip=False)]}}


def digit_sets() -> dict[str, dict[str, list[Block]]]:
    """For digits, straightened: the features of mnist-straight-*, alone and beside learned ones."""
    maps = [{"kind": "scattering", "J": 2, "flip": False}, {"kind": "scattering", "J": 3, "flip": False, "weight": 0.6}]
    one = [[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]]
    small = {f"small {w:g}": [*maps, learned("small", w, flip=False, shifts=one)] for w in (0.5, 1.0, 1.6)}

    def near(weight: float) -> Block:
        return learned("large", weight, flip=False, shifts=one)

    large = {f"large {w:g}": [*maps, near(w)] for w in (0.5, 1.0, 1.6)}
    large["large, two views"] = [*maps, near(0.8), learned("large-48", 0.8, flip=False, shifts=one)]
    large["large and small"] = [*maps, near(0.8), learned("small", 0.6, flip=False, shifts=one)]
    return {"straight": {"straight": maps}, "small": small, "large": large}


SETS = {"cifar10": colour_sets, "fashion_mnist": grey_sets, "mnist": digit_sets}
# How many blocks of random ReLUs the head learns from; digits are straightened first.
RELU = {"mnist": 1}


def settings(dataset: str) -> list[Setting]:
    """Learning times around N·μ·κ for κ from 1 to 16, four clips, two averages, for every ε at once."""
    if dataset == "mnist":
        squares = {1.0: (2e3, 4e3, 8e3), 3.0: (5e3, 1e4, 2e4), 8.0: (1.5e4, 4e4, 8e4)}
        clips = (0.1, 0.2, 0.4, 0.8)
        return [Setting(e, t, clip, ema=0.97, loss="squares") for e in EPSILONS for t in squares[e] for clip in clips]
    times = {1.0: (1e4, 2e4, 4e4, 8e4), 3.0: (6e4, 1.2e5, 2.4e5, 4.8e5), 8.0: (1e5, 2e5, 4e5, 8e5, 1.6e6)}
    kinds = [(0.05, False), (0.1, False), (0.3, False), (0.3, True)]
    return [Setting(e, t, clip, ema=a, normalise=n) for e in EPSILONS for t in times[e] for clip, n in kinds for a in (0.9, 0.97)]


class Blocks:
    """The features of the whole training set, block by block at weight 1, computed once."""

    def __init__(self, train: TensorDataset, shape: tuple[int, ...], device: str) -> None:
        self.train, self.shape, self.device = train, shape, device
        self._known: dict[str, Tensor] = {}

    def of(self, block: Block) -> Tensor:
        own = {name: value for name, value in block.items() if name != "weight"}
        key = json.dumps(own, sort_keys=True)
        if key not in self._known:
            started = time.monotonic()
            front = feature_front(self.shape, blocks=[own])[0][0]
            dataset = extract_features(front, self.train, device=self.device, keep=self.device, dtype=torch.float16)
            self._known[key] = dataset.tensors[0]
            print(f"{self._known[key].shape[1]} features in {time.monotonic() - started:.1f} s: {key}", flush=True)
        return self._known[key]


def on_sphere(blocks: Blocks, chosen: list[Block], kept: Tensor, radius: float, seed: int, relu: int = 0) -> Tensor:
    """All examples' features, less the kept ones' released means, on the unit sphere, in bfloat16; or random ReLUs of them."""
    parts = [(blocks.of(block), float(block.get("weight", 1.0))) for block in chosen]
    longest = radius * math.sqrt(sum(weight**2 for _, weight in parts))
    size, width = len(parts[0][0]), sum(part.shape[1] for part, _ in parts)
    device = parts[0][0].device

    def rows(numbers: Tensor) -> Tensor:
        return torch.cat([part[numbers].float() * weight for part, weight in parts], 1)

    total = torch.zeros(width, dtype=torch.float64, device=device)
    for numbers in kept.split(4096):
        x = rows(numbers)
        total += (x * (longest / x.norm(dim=1, keepdim=True)).clamp_max(1)).sum(0).double()
    draw = torch.Generator(device).manual_seed(seed)
    mean = ((total + STATISTICS * longest * torch.randn(width, generator=draw, device=device)) / len(kept)).float()
    random = RandomReLU(width, blocks=relu).to(device) if relu else None
    out = torch.empty(size, random.output_features if random else width, dtype=torch.bfloat16, device=device)
    for numbers in torch.arange(size, device=device).split(4096):
        x = F.normalize(rows(numbers) - mean, eps=1e-9)
        out[numbers] = (x if random is None else F.normalize(random(x))).bfloat16()
    return out


def as_recipe(dataset: str, family: str, setting: Setting, blocks: list[Block], steps: int, note: str) -> Recipe:
    name = {"large": "drawn", "small": "drawn-small"}.get(family, family)
    size = data.info(dataset).train_size
    more = {"straighten": True, "relu": RELU[dataset]} if dataset in RELU else {}
    return Recipe(
        f"{dataset.replace('_', '-')}-{name}-eps{setting.epsilon:g}",
        dataset,
        "patches-linear",
        {"blocks": blocks, "centre": "private", "radius": RADIUS[dataset], "clip": FADE if setting.normalise else setting.clip}
        | more,
        front="stored",
        loss=setting.loss,
        temperature=1.0,
        batch_size=size,
        epochs=float(steps),
        learning_rate=round(setting.time / steps * (1 - setting.momentum), 4),
        momentum=setting.momentum,
        schedule="linear",
        ema_decay=setting.ema,
        allocation="per_layer",
        statistics_budget=round(0.16 / setting.epsilon, 4),
        epsilon=setting.epsilon,
        provenance=note,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=sorted(RADIUS))
    parser.add_argument("--families", nargs="+", help="networks; all by default")
    parser.add_argument("--sets", nargs="*", help="names of sets; all by default")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="no new set is begun after so long")
    parser.add_argument("--limit", type=int, help="so many training images only: for trying the script")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="found")
    arguments = parser.parse_args()
    started, out = time.monotonic(), Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    train, _, info = data.load(arguments.dataset, download=False)
    images, labels = (tensor[: arguments.limit].to(arguments.device) for tensor in train.tensors)
    relu = RELU.get(arguments.dataset, 0)
    if relu:
        straight = Straighten(info.shape).to(arguments.device)
        images = torch.cat([straight(part) for part in images.split(4096)])
    blocks = Blocks(TensorDataset(images, labels), info.shape, arguments.device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7)).to(arguments.device)
    tenths, grid = order.tensor_split(10), settings(arguments.dataset)
    families = SETS[arguments.dataset]()
    best: dict[str, tuple[float, list[Block], dict[float, tuple[float, Setting]]]] = {}
    print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
    for family in arguments.families or families:
        for name, chosen in families[family].items():
            if (arguments.sets and name not in arguments.sets) or time.monotonic() - started > arguments.seconds:
                continue
            scores = []
            for fold in range(arguments.folds):
                held, kept = tenths[fold], torch.cat([part for number, part in enumerate(tenths) if number != fold])
                x = on_sphere(blocks, chosen, kept, RADIUS[arguments.dataset], 100 + fold, relu)
                scores.append(
                    train_columns(
                        x[kept], labels[kept], x[held], labels[held], info.classes, grid, arguments.steps, STATISTICS, 10 + fold
                    )
                )
                del x
            means = [statistics.fmean(column) for column in zip(*scores, strict=True)]
            top = {
                e: max(((m, s) for m, s in zip(means, grid, strict=True) if s.epsilon == e), key=lambda p: p[0]) for e in EPSILONS
            }
            overall = statistics.fmean(score for score, _ in top.values())
            told = " ".join(
                f"eps={e:g}: {m:.2f} (time {s.time:g} clip {s.clip:g}{'n' if s.normalise else ''} ema {s.ema:g})"
                for e, (m, s) in top.items()
            )
            print(f"{time.monotonic() - started:.0f} s {family}/{name} {overall:.2f}: {told}", flush=True)
            with (out / f"{arguments.dataset}-drawn.jsonl").open("a") as stream:
                ranked = [{**vars(s), "held_out": round(m, 3)} for m, s in zip(means, grid, strict=True)]
                record = {"family": family, "set": name, "blocks": chosen, "folds": arguments.folds, "steps": arguments.steps}
                stream.write(json.dumps({**record, "overall": overall, "settings": ranked}) + "\n")
            if family not in best or overall > best[family][0]:
                best[family] = (overall, chosen, top)
    file = out / f"{arguments.dataset}-drawn.toml"
    file.unlink(missing_ok=True)
    for family, (_, chosen, top) in best.items():
        for score, setting in top.values():
            note = (
                f"held-out {score:.2f} %: best mean over {arguments.folds} tenths of {len(grid) // 3} or so settings of the head, "
                f"on the best of {len(families[family])} sets of features (benchmarks/accuracy/drawn.py {arguments.dataset})"
            )
            save_recipe(as_recipe(arguments.dataset, family, setting, chosen, arguments.steps, note), file)
    print(file.read_text() if file.exists() else "nothing was compared")


if __name__ == "__main__":
    main()
