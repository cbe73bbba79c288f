"""Compare sets of fixed features by what private linear heads learn from them, on held-out tenths of the training set.

    python benchmarks/accuracy/features.py list cifar10 --out found --seconds 120       the sets named in LISTS
    python benchmarks/accuracy/features.py greedy cifar10 --out found --seconds 120     one change at a time from the best so far

A set is a list of blocks (patches, scattering) of the images, or of straightened ones, each evened out by what drawn images give;
then the means of the data are released with multiplier z = 20 and taken off, and each example is put on the unit sphere, and where
the set has them through random ReLUs. Every set is scored for a grid of settings of the head at once (columns.py). Lines
are appended to OUT/DATASET-features.jsonl. The test set is never read. Sets marked "oracle" use statistics that were not paid for:
they only show what paying could bring.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from columns import best_by_epsilon, grid, train_columns
from feature_sets import LISTS, START, changes_of
from torch import Tensor

from lipdp import data
from lipdp.features.drawings import leaf_images, texture_images
from lipdp.features.kernels import RandomReLU
from lipdp.features.layers import Straightening, straighten_layers
from lipdp.features.patches import PatchFeatures
from lipdp.features.scattering import Scattering2d
from lipdp.features.stacks import channel_weights

Block = dict[str, Any]
STATISTICS = 20.0
FLIPS = {"cifar10": True, "fashion_mnist": True, "mnist": False}
# A public bound on records for the release of means, in units of what drawn images give.
RADIUS = {"cifar10": 1.5, "fashion_mnist": 3.0, "mnist": 3.0}
POST = ("compress", "mix", "weight", "orders")  # what is done to a block's features after they are computed


class Images:
    """The training set, and drawn images, on the device."""

    def __init__(self, name: str, device: torch.device, limit: int | None) -> None:
        train, _, self.info = data.load(name, download=False)
        images, labels = train.tensors
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))[:limit]
        self.name, self.device = name, device
        self.images, self.labels = images[order].to(device), labels[order].to(device)
        self._drawn: dict[str, Tensor] = {}
        self._straightened: dict[str, Tensor] = {}

    def straightened(self, straighten: Straightening) -> Tensor:
        if straighten is False:
            return self.images
        key = json.dumps(straighten, sort_keys=True)
        if key not in self._straightened:
            first = torch.nn.Sequential(*straighten_layers(self.info.shape, straighten)).to(self.device)
            self._straightened = {key: torch.cat([first(part) for part in self.images.split(1024)])}
        return self._straightened[key]

    def drawn(self, kind: str) -> Tensor:
        if kind not in self._drawn:
            made = leaf_images(self.info.shape) if kind == "leaves" else texture_images(self.info.shape, 512)
            self._drawn[kind] = made.to(self.device)
        return self._drawn[kind]

    def parts(self, number: int) -> tuple[slice, Tensor]:
        """(held-out rows, the others' indices) of the ``number``-th tenth."""
        size = len(self.images) // 10
        held = slice(number * size, (number + 1) * size)
        kept = torch.cat([torch.arange(0, held.start), torch.arange(held.stop, len(self.images))])
        return held, kept.to(self.device)


class Blocks:
    """Computed blocks, the least recently used dropped first."""

    def __init__(self, images: Images, gib: float, rows: int) -> None:
        self.images, self.limit, self.rows = images, gib * 2**30, rows
        self.kept: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self.dtype = torch.bfloat16 if images.device.type == "cuda" else torch.float32

    def get(self, block: Block, straighten: Straightening = False) -> tuple[Tensor, Tensor]:
        """(N, C, H, W) of the data and of the drawn images."""
        spec = {name: value for name, value in block.items() if name not in POST}
        key = json.dumps([spec, straighten], sort_keys=True)
        if key not in self.kept:
            module = self._module(spec)
            kind = "textures" if spec["kind"] == "scatter" else "leaves"
            with torch.no_grad():
                images = self.images.straightened(straighten)
                computed = self._run(module, images, spec), self._run(module, self.images.drawn(kind), spec)
            while self.kept and sum(t.nbytes for pair in self.kept.values() for t in pair) > self.limit:
                self.kept.popitem(last=False)
            self.kept[key] = computed
        self.kept.move_to_end(key)
        return self.kept[key]

    def _module(self, spec: Block) -> torch.nn.Module:
        options = {name: value for name, value in spec.items() if name not in ("kind", "shifts")}
        shape = self.images.info.shape
        flip = FLIPS[self.images.name]
        if spec["kind"] == "patch":
            return PatchFeatures(shape, **{"mirror": flip, **options}).to(self.images.device)
        if spec["kind"] == "deep":
            deep = _Deep(shape, self.images.drawn("leaves"), options["first"], options["second"])
            return _Averaged(deep, data.Shifts([(0, 0)], flip=flip)) if flip else deep
        transform = Scattering2d(shape, colour="yuv" if shape[0] == 3 else "rgb", **options).to(self.images.device)
        offsets = [(0, 0)]
        if spec.get("shifts"):
            s = spec["shifts"]
            offsets += [(s, 0), (-s, 0), (0, s), (0, -s)]
        views = data.Shifts(offsets, flip=flip)
        return _Averaged(transform, views) if views.copies > 1 else transform

    def _run(self, module: torch.nn.Module, images: Tensor, spec: Block) -> Tensor:
        low = torch.float32 if spec["kind"] == "scatter" else self.dtype
        rows = min(1024, 2 * self.rows) if spec["kind"] == "scatter" else self.rows
        return torch.cat([module(images[i : i + rows].to(low)).to(self.dtype) for i in range(0, len(images), rows)])


class _Deep(torch.nn.Module):
    """Patches of maps of patches: the second dictionary and whitening come from the first layer's maps of drawn images."""

    def __init__(self, shape: Sequence[int], drawn: Tensor, first: Block, second: Block) -> None:
        super().__init__()
        device = drawn.device
        self.first = PatchFeatures(shape, mirror=False, **first).to(device)
        with torch.no_grad():
            maps = torch.cat([self.first(part) for part in drawn[:256].split(16)])
            self.level = maps.mean((0, 2, 3), keepdim=True)
            maps = self._compressed(maps)
            self.mean, self.std = maps.mean((0, 2, 3), keepdim=True), maps.std((0, 2, 3), keepdim=True)
            maps = (maps - self.mean) / self.std
        self.second = PatchFeatures(self.first.output_shape, mirror=False, drawn=maps.cpu(), **second).to(device)

    def _compressed(self, maps: Tensor) -> Tensor:
        return torch.sqrt(1 + 20 * maps / self.level.to(maps.dtype)) - 1

    def forward(self, x: Tensor) -> Tensor:
        maps = (self._compressed(self.first(x)) - self.mean.to(x.dtype)) / self.std.to(x.dtype)
        return self.second(maps)


class _Averaged(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, views: data.Shifts) -> None:
        super().__init__()
        self.module, self.views = module, views

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum(self.module(view(x)) for view in self.views.views)  # type: ignore[assignment]
        return total / self.views.copies


def evened(block: Block, features: Tensor, drawn: Tensor, info: data.DatasetInfo) -> Tensor:
    """(N, C, H, W): compressed, standardised, decorrelated by what drawn images give, so that an entry's size is about 1."""
    level = drawn.float().abs().mean((0, 2, 3), keepdim=True)
    level = level.clamp_min(1e-6 * float(level.max()))

    def compressed(x: Tensor) -> Tensor:
        if block.get("compress") == "root":
            return torch.sign(x) * (torch.sqrt(1 + 200 * x.abs() / level) - 1)
        return torch.sign(x) * torch.log1p(x.abs() / (0.3 * level)) if block.get("compress") == "log" else x

    public = compressed(drawn.float())
    mean, std = public.mean((0, 2, 3), keepdim=True), public.std((0, 2, 3), keepdim=True)
    std = std.clamp_min(1e-3 * float(std.max()))
    mixing = None
    if block.get("mix"):
        even = ((public - mean) / std).movedim(1, -1).flatten(0, 2)
        # In float64 this takes seconds on a GPU, and shrinking makes it needless.
        values, vectors = torch.linalg.eigh((even.T @ even / len(even)).to(torch.float32 if even.is_cuda else torch.float64))
        shrunk = (1 - block["mix"]) * values.clamp_min(0) + block["mix"]
        mixing = (vectors * shrunk.rsqrt() @ vectors.T).float()
    factors: Tensor | float = 1.0
    if "orders" in block and block["kind"] == "scatter":
        transform = Scattering2d(info.shape, J=block["J"], L=block["L"], colour="yuv" if info.shape[0] == 3 else "rgb")
        factors = channel_weights(transform, tuple(block["orders"]))[:, None, None].to(features.device)
    out = torch.empty_like(features)
    for start in range(0, len(features), 4096):
        y = (compressed(features[start : start + 4096].float()) - mean) / std
        y = y if mixing is None else torch.einsum("ij,bjhw->bihw", mixing, y)
        out[start : start + 4096] = (y * factors).to(out.dtype)
    return out


def even_parts(made: dict[str, Any], blocks: Blocks) -> list[Tensor]:
    """The blocks' features (N, C, positions), evened out, in units that give drawn images the norm of the block's weight."""
    parts: list[Tensor] = []
    for block in made["blocks"]:
        even = evened(block, *blocks.get(block, made.get("straighten", False)), blocks.images.info)
        even *= block.get("weight", 1.0) / math.sqrt(math.prod(even.shape[1:]))
        parts.append(even.flatten(2))
    return parts


def assembled(
    made: dict[str, Any], evened_parts: list[Tensor], blocks: Blocks, kept: Tensor, seed: int
) -> tuple[Tensor, dict[str, float]]:
    """All rows on the unit sphere, (N, D), and figures: the part of records that was clipped, the mean's share of the energy."""
    draw = torch.Generator(blocks.images.device).manual_seed(seed)
    parts = [part.clone() for part in evened_parts]
    positions = [part.shape[2] for part in parts]
    n = len(kept)
    # A record's norm is about √Σweights² now, if it resembles drawn images: a public scale.
    radius = made.get("radius", RADIUS[blocks.images.name]) * math.sqrt(
        sum(block.get("weight", 1.0) ** 2 for block in made["blocks"])
    )
    norms = torch.stack([part.float().square().sum((1, 2)) for part in parts]).sum(0).sqrt()
    shrink = (radius / norms).clamp_max(1.0)
    how = made.get("centre", "entry")
    figures = {"clipped": float((shrink < 1).float().mean()), "norm": float(norms.mean())}
    share = 0.0
    for number, part in enumerate(parts):
        if how == "none":
            continue
        mean = torch.zeros(part.shape[1:], device=part.device)
        for rows in kept.split(4096):
            mean += (part[rows].float() * shrink[rows, None, None]).sum(0)
        # Per entry, one record moves the sums by at most R; averaged over positions, by at most R/√positions.
        std = STATISTICS * radius
        if how == "channel":
            mean = mean.mean(1, keepdim=True)
            std /= math.sqrt(positions[number])
        mean = (mean + std * blocks.noise * torch.randn(mean.shape, generator=draw, device=part.device)) / n
        share += float(mean.square().expand(part.shape[1:]).sum()) / figures["norm"] ** 2
        for rows in torch.arange(len(part), device=part.device).split(8192):
            part[rows] = (part[rows].float() - mean).to(part.dtype)
        if made.get("oracle") == "std":
            part /= part[kept].float().std((0, 2), keepdim=True).clamp_min(1e-3 * 1 / math.sqrt(part[0].numel())).to(part.dtype)
            part /= math.sqrt(part[0].numel())
        if made.get("oracle") == "whiten":
            sample = part[kept[:20000]].float().movedim(1, -1).flatten(0, 1)
            sample = sample[torch.randperm(len(sample), device=part.device)[:60000]]
            values, vectors = torch.linalg.eigh(sample.T @ sample / len(sample))
            shrunk = (1 - made["shrink"]) * values.clamp_min(0) + made["shrink"] * values.mean()
            matrix = vectors * (values.mean() / shrunk).sqrt() @ vectors.T
            for rows in torch.arange(len(part), device=part.device).split(8192):
                part[rows] = torch.einsum("ij,bjp->bip", matrix, part[rows].float()).to(part.dtype)
    x = torch.cat([part.flatten(1) for part in parts], dim=1)
    for start in range(0, len(x), 8192):
        rows = x[start : start + 8192].float()
        x[start : start + 8192] = (rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-9)).to(x.dtype)
    figures["mean_share"] = share
    return (rectified(x, made["relu"]) if made.get("relu") else x), figures


def rectified(x: Tensor, blocks: int) -> Tensor:
    """Random ReLU features of unit vectors, on the unit sphere again."""
    layer = RandomReLU(x.shape[1], blocks=blocks).to(x.device)
    out = torch.empty(len(x), layer.output_features, dtype=x.dtype, device=x.device)
    for start in range(0, len(x), 8192):
        rows = layer(x[start : start + 8192].float())
        out[start : start + 8192] = (rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-9)).to(x.dtype)
    return out


class Session:
    """What is tried, and where it is written down."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.started, self.seconds = time.monotonic(), arguments.seconds
        device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.images = Images(arguments.dataset, device, arguments.limit)
        self.blocks = Blocks(self.images, arguments.memory, arguments.rows)
        # A tiny run has as much noise for each example as a full one.
        self.blocks.noise = len(self.images.images) / self.images.info.train_size  # type: ignore[attr-defined]
        self.scale = 1 / self.blocks.noise  # type: ignore[attr-defined]
        self.steps, self.folds = arguments.steps, arguments.folds
        self.settings = grid(arguments.epsilon, arguments.times, arguments.clips)
        self.file = Path(arguments.out) / f"{arguments.dataset}-features.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done = [json.loads(line) for line in lines]

    def over(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def score(self, name: str, made: dict[str, Any]) -> dict[str, Any] | None:
        """Held-out accuracy for each ε, the mean over folds of the best setting's; None if it was tried before."""
        if any(entry["set"] == made for entry in self.done):
            return None
        started = time.monotonic()
        record: dict[str, Any] = {"name": name, "set": made, "steps": self.steps, "train": len(self.images.images)}
        try:
            totals = [0.0] * len(self.settings)
            parts = even_parts(made, self.blocks)
            for fold in range(self.folds):
                held, kept = self.images.parts(fold)
                x, figures = assembled(made, parts, self.blocks, kept, 100 + fold)
                labels = self.images.labels
                scores = train_columns(
                    x[kept], labels[kept], x[held], labels[held], self.images.info.classes, self.settings, self.steps, STATISTICS,
                    fold, self.scale,
                )  # fmt: skip
                totals = [total + score / self.folds for total, score in zip(totals, scores, strict=True)]
            best = best_by_epsilon(self.settings, totals)
            record.update(
                width=x.shape[1], figures=figures, scores={e: round(s, 2) for e, (s, _) in best.items()},
                best={e: vars(setting) for e, (_, setting) in best.items()}, all=[round(t, 2) for t in totals],
            )  # fmt: skip
            del x, parts
        except (torch.cuda.OutOfMemoryError, RuntimeError, ValueError) as error:
            record.update(scores={f"{s.epsilon:g}": 0.0 for s in self.settings}, error=str(error)[:300])
            self.blocks.kept.clear()
            if self.images.device.type == "cuda":
                torch.cuda.empty_cache()
        record["seconds"] = round(time.monotonic() - started, 2)
        self.done.append(record)
        with self.file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        chosen = {e: (s["time"], s["clip"]) for e, s in record.get("best", {}).items()}
        notes = record.get("figures", record.get("error"))
        print(f"{name}: {record['scores']} {record['seconds']}s D={record.get('width')} {notes} {chosen}", flush=True)
        return record


def greedy(session: Session, epsilon: str) -> None:
    """Changes of the best set so far, in random order; what is better than the best by a little becomes the best."""
    draw = random.Random(len(session.done))
    paid = [entry for entry in session.done if "oracle" not in entry["set"] and epsilon in entry["scores"]]
    best = max(paid, key=lambda entry: entry["scores"][epsilon], default=None)
    if best is None:
        best = session.score("start", START[session.images.name])
    while best is not None and not session.over():
        waiting = changes_of(best["set"], draw)
        improved = False
        for name, made in waiting:
            if session.over():
                return
            record = session.score(f"greedy {name}", made)
            if record is not None and record["scores"][epsilon] > best["scores"][epsilon] + 0.05:
                best, improved = record, True
                break
        if not improved:
            return


def parse_common(parser: argparse.ArgumentParser) -> None:
    """What this script and heads.py both take."""
    parser.add_argument("dataset", choices=sorted(FLIPS))
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--times", type=float, nargs="+", default=[4e3, 1e4, 2.5e4, 6e4, 1.5e5])
    parser.add_argument("--clips", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="found")
    parser.add_argument("--device")
    parser.add_argument("--memory", type=float, default=50.0, help="GiB for blocks")
    parser.add_argument("--rows", type=int, default=512, help="images whose patches are taken at once")
    parser.add_argument("--limit", type=int, help="use so many training images only, with noise to match: for trying the script")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "greedy"))
    parser.add_argument("--lists", nargs="+", default=["all"], help="names of lists in feature_sets.py")
    parser.add_argument("--only", nargs="*", help="names of sets")
    parse_common(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    session = Session(arguments)
    print(f"ready after {time.monotonic() - session.started:.1f} s", flush=True)
    if arguments.action == "greedy":
        greedy(session, f"{arguments.epsilon[0]:g}")
        return
    names = list(LISTS) if arguments.lists == ["all"] else arguments.lists
    for chosen in names:
        for name, made in LISTS[chosen].items():
            if arguments.only and name not in arguments.only:
                continue
            if session.over():
                return
            session.score(name, made)


if __name__ == "__main__":
    main()
