"""Learning times and clips for the recipes DATASET-patches-…, on a held-out tenth of the training set, also without a GPU.

    python benchmarks/accuracy/times.py cifar10 --settings '{"1": [[2e4, 0.1], [4e4, 0.1]], "8": [[2e5, 0.1]]}' --steps 150

Settings are [time, clip, momentum, average's decay] for each ε (columns.Setting); all are trained at once, in bfloat16,
on the features of the recipe for ε = 1. The means of the features are released with multiplier 20 and charged. The features on the
sphere are kept in OUT/DATASET.pt for the next call (they are private data in another form); lines go to OUT/DATASET-times.jsonl.
The test set is never read.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from columns import Setting, train_columns
from torch import Tensor

from lipdp import data, models, nn
from lipdp.features.front import extract_features, split_front
from lipdp.recipes import get

STATISTICS = 20.0


def prepared(dataset: str, file: Path, device: str) -> tuple[Tensor, Tensor]:
    """(features on the unit sphere in bfloat16, labels) of the training set in random order: the first tenth is held out."""
    if file.exists():
        stored = torch.load(file, weights_only=True)
        return stored["x"].to(device), stored["y"].to(device)
    train, _, info = data.load(dataset, download=False)
    recipe = get(f"{dataset.replace('_', '-')}-patches-eps1")
    model = models.create(recipe.model, input_shape=info.shape, classes=info.classes, **recipe.options)
    assert isinstance(model, torch.nn.Sequential)
    front, head = split_front(model)
    features = extract_features(front, train, device=device, keep=device).tensors[0]
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(7)).to(device)
    radius = next(layer.radius for layer in head if isinstance(layer, nn.Standardize))
    learned = order[len(order) // 10 :]
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=device)
    for rows in learned.split(2048):
        x = features[rows]
        total += (x * (radius / x.norm(dim=1, keepdim=True)).clamp_max(1)).sum(0).double()
    draw = torch.Generator(device).manual_seed(3)
    noise = STATISTICS * radius * torch.randn(total.shape, generator=draw, device=device)
    mean = ((total + noise) / len(learned)).float()
    out = torch.empty(features.shape, dtype=torch.bfloat16, device=device)
    for start, rows in zip(range(0, len(order), 2048), order.split(2048), strict=True):
        x = features[rows] - mean
        out[start : start + len(rows)] = (x / x.norm(dim=1, keepdim=True).clamp_min(1e-9)).bfloat16()
    labels = train.tensors[1].to(device)[order]
    torch.save({"x": out.cpu(), "y": labels.cpu()}, file)
    return out, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=("cifar10", "fashion_mnist"))
    parser.add_argument("--settings", required=True, help="JSON: ε to a list of settings")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="found")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    x, y = prepared(arguments.dataset, out / f"{arguments.dataset}.pt", arguments.device)
    settings = [Setting(float(epsilon), *given) for epsilon, among in json.loads(arguments.settings).items() for given in among]
    held = len(x) // 10
    started = time.monotonic()
    classes = data.info(arguments.dataset).classes
    scores = train_columns(
        x[held:], y[held:], x[:held], y[:held], classes, settings, arguments.steps, STATISTICS, arguments.seed
    )  # fmt: skip
    seconds = time.monotonic() - started
    with (out / f"{arguments.dataset}-times.jsonl").open("a") as stream:
        for setting, score in zip(settings, scores, strict=True):
            record = {**vars(setting), "steps": arguments.steps, "seed": arguments.seed, "held_out": round(score, 3)}
            record.update(features=x.shape[1], seconds=round(seconds, 1))
            stream.write(json.dumps(record) + "\n")
            print(record, flush=True)


if __name__ == "__main__":
    main()
