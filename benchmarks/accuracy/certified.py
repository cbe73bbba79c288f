"""CIFAR-10 with certificates: certified accuracy at ε = 10, δ = 1e-5 for radii of 0, 1, 2, 4, 8 and 16 /255 (L2, pixels from 0 to 1).

    python benchmarks/accuracy/certified.py search --device cuda           # settings, on a held-out tenth of the training set
    python benchmarks/accuracy/certified.py run --device cuda              # the recipe on the test set, three seeds, and the attack

*search* trains many heads of `scattering-certified` at once (benchmarks/accuracy/columns.py: whole-batch steps, the noise and the
release of the mean of the real thing) and certifies each by its own weights. The rule of choice: the largest mean of the six columns.
*run* takes the recipe that is committed, trains it by lipdp.plan and lipdp.fit, certifies the whole test set by lipdp.certify, attacks
1,000 of its images at 99% of their radius and looks for the radius at which the attack succeeds. Every reading is appended to
benchmarks/results/accuracy/certified.jsonl, with the commit.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from columns import Setting, column_weights
from torch import Tensor

from lipdp import data
from lipdp.models import create

RADII = (0, 1, 2, 4, 8, 16)
PAPER = (47.4, 39.1, 35.6, 30.9, 25.9, 19.7)
EPSILON, RECORDS = 10.0, 50_000
FRONTS = {
    "J=2": {"scales": [(2, 8)]},
    "J=3": {"scales": [(3, 8)]},
    "J=2, no mirror": {"scales": [(2, 8)], "flip": False},
    "J=2, order 0 halved": {"scales": [(2, 8)], "orders": (0.5, 1.0, 1.0)},
    "J=2, order 0 at .2": {"scales": [(2, 8)], "orders": (0.2, 1.0, 1.0)},
    "J=3, order 0 at .3": {"scales": [(3, 8)], "orders": (0.3, 1.0, 1.0)},
    "J=2, twelve angles": {"scales": [(2, 12)]},
    "J=4": {"scales": [(4, 8)]},
}
MODES = (("sphere", 1.0), ("ball", 6.0), ("ball", 12.0))


def coefficients(options: dict[str, object], images: Tensor) -> Tensor:
    """What the fixed layers make of images, before the mean is taken off."""
    model = create("scattering-certified", input_shape=(3, 32, 32), classes=10, **options)
    layers = model[:-3].to(images.device).eval()  # without sphere, head and clip
    with torch.no_grad():
        return torch.cat([layers(part).half() for part in torch.split(images, 500)])


def certified_columns(weights: Tensor, x: Tensor, lengths: Tensor, labels: Tensor, mode: str, norm: float) -> list[list[float]]:
    """Certified accuracy in percent at the radii, for each head; x of norm at most 1, ``lengths`` before the scaling.

    As lipdp.certify does it (without its care for rounding): (ŷ₁ − ŷ_j)/‖w₁ − w_j‖, and the chord of the sphere.
    """
    rows = []
    for head in weights.unbind(1):
        logits = x.float() @ head
        decision = logits.argmax(1)
        steep = torch.cdist(head.T, head.T)
        margins = (logits.gather(1, decision[:, None]) - logits) / steep[decision]
        margin = margins.scatter(1, decision[:, None], math.inf).amin(1)
        share = margin / 2
        radii = 2 * lengths * share * (1 - share.square()).clamp_min(0).sqrt() if mode == "sphere" else margin * norm
        radii = radii * (decision == labels)
        rows.append([round(100 * float((radii > r / 255).float().mean()), 2) for r in RADII])
    return rows


def searched(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A line for each set of fixed layers, each scaling and each setting of the head."""
    train, _, _ = data.load("cifar10", download=False)
    images, labels = (tensor[: options.records].to(options.device) for tensor in train.tensors)
    cut = len(images) - len(images) // 10
    settings = [Setting(EPSILON, t, c) for t in options.times for c in options.clips]
    multiplier = options.statistics
    draw = torch.Generator(options.device).manual_seed(1)
    for name, front in FRONTS.items():
        if options.fronts and name not in options.fronts:
            continue
        started = time.monotonic()
        z = coefficients(front, images)
        seconds = time.monotonic() - started
        lengths = torch.cat([torch.linalg.vector_norm(part.float(), dim=1) for part in torch.split(z, 4096)])
        radius = float(lengths[:cut].quantile(0.95))
        mean = torch.stack([part.float().sum(0) for part in torch.split(z[:cut], 4096)]).sum(0) / cut
        mean += radius * multiplier / RECORDS * torch.randn(mean.shape, generator=draw, device=mean.device)
        z = torch.cat([(part.float() - mean).half() for part in torch.split(z, 4096)])
        lengths = torch.cat([torch.linalg.vector_norm(part.float(), dim=1) for part in torch.split(z, 4096)])
        for mode, norm in MODES:
            scale = lengths if mode == "sphere" else lengths.clamp_min(norm)
            x = torch.cat([(p.float() / s[:, None]).half() for p, s in zip(torch.split(z, 4096), torch.split(scale, 4096))])
            weights = column_weights(x[:cut], labels[:cut], 10, settings, options.steps, multiplier, 0, RECORDS / cut)
            rows = certified_columns(weights, x[cut:], lengths[cut:], labels[cut:], mode, norm)
            for setting, row in zip(settings, rows, strict=True):
                yield {
                    "front": name, "mode": mode, "norm": norm, "radius": round(radius, 2), "length": round(float(lengths.mean()), 2),
                    "columns": row, "mean": round(sum(row) / len(row), 3), "seconds": round(seconds, 1), **asdict(setting),
                }  # fmt: skip


def search(options: argparse.Namespace) -> None:
    """Print and keep all lines, the best last."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with options.out.open("a") as stream:
        for line in searched(options):
            lines.append(line)
            stream.write(json.dumps(line) + "\n")
            stream.flush()
    for line in sorted(lines, key=lambda entry: float(str(entry["mean"])))[-12:]:
        print({key: line[key] for key in ("front", "mode", "norm", "time", "clip", "columns", "mean", "length", "radius")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    searching = commands.add_parser("search")
    searching.add_argument("--device", default="cpu")
    searching.add_argument("--records", type=int, default=RECORDS, help="only the first so many training images")
    searching.add_argument("--fronts", nargs="*", help="only these")
    searching.add_argument("--times", type=float, nargs="+", default=[100.0, 300.0, 1000.0, 3000.0, 10000.0, 30000.0])
    searching.add_argument("--clips", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    searching.add_argument("--steps", type=int, default=150)
    searching.add_argument("--statistics", type=float, default=20.0, help="noise multiplier of the mean's release")
    searching.add_argument("--out", type=Path, default=Path("certified_search.jsonl"))
    searching.set_defaults(work=search)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
