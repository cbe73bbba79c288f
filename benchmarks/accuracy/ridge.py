"""Private ridge regression in one release beside a head of many steps, on held-out images of a training set.

    python benchmarks/accuracy/ridge.py fashion_mnist --learn 4000 --held 2000

Features: those of the network that comes with lipdp, centred by the mean of the images to learn from (not paid for, in all rows),
on the unit sphere. One release of B = Σ x·yᵀ, y the centred one-hot vector of norm 1: one record moves it by 1 at most. Then
W = (C + λ)⁻¹·B/N: with C = I ("sum"), with the covariance of the data itself, which nobody paid for ("oracle"), and with one that
is released too for half of μ² ("paid"). One record moves Σ x·xᵀ by ‖xxᵀ‖ = 1; of a symmetric matrix the diagonal d and the part o
above it are released, with noise of variance 1 and ½: Σ d² + 2·Σ o² = ‖xxᵀ‖². λ is the best of a grid on the held-out images, as
are the settings of the heads of steps (columns.py): all are a little too good, alike. Noise is that of the whole training set.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from columns import FADE, Setting, gaussian_mu, train_columns
from torch import Tensor
from torch.nn import functional as F

from lipdp import data
from lipdp.features.learned import LearnedFeatures

STATISTICS, STEPS = 20.0, 100
LAMBDAS = [10.0**-k * f for k in range(1, 6) for f in (1.0, 0.3)]
TIMES = {
    "cross_entropy": {1.0: (1e4, 4e4), 3.0: (6e4, 1.2e5), 8.0: (1e5, 4e5)},
    "squares": {1.0: (2e3, 8e3), 3.0: (8e3, 3e4), 8.0: (3e4, 1e5)},
}
CLIPS = {"cross_entropy": (0.1, FADE), "squares": (0.2, 0.4)}


def features(dataset: str, count: int, device: str) -> tuple[Tensor, Tensor, int, int]:
    """(features, labels, classes, size of the training set) of some training images, in the order of a fixed seed."""
    train, _, info = data.load(dataset, download=False)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(5))[:count]
    network = LearnedFeatures(info.shape, "small", flip=info.shape[0] == 3).to(device)
    with torch.no_grad():
        rows = torch.cat([network(part.to(device)) for part in train.tensors[0][order].split(16)])
    return rows, train.tensors[1][order].to(device), info.classes, len(train)


def best_ridge(values: Tensor, vectors: Tensor, sums: Tensor, held: Tensor, labels: Tensor) -> float:
    """Held-out accuracy in % of (C + λ)⁻¹·B for the best λ, from the eigenvectors of C."""
    turned, seen = vectors.T @ sums, held @ vectors
    logits = [seen @ (turned / (values.clamp_min(0) + ridge)[:, None]) for ridge in LAMBDAS]
    return max(100 * float((own.argmax(1) == labels).double().mean()) for own in logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=("mnist", "fashion_mnist", "cifar10"))
    parser.add_argument("--learn", type=int, default=4000)
    parser.add_argument("--held", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    count = arguments.learn
    x, y, classes, whole = features(arguments.dataset, count + arguments.held, arguments.device)
    x = F.normalize(x - x[:count].mean(0))
    rows, held = x[:count].double(), x[count:].double()
    targets = F.normalize(F.one_hot(y[:count], classes).double() - 1 / classes)
    sums, covariance = rows.T @ targets / count, rows.T @ rows / count
    own = torch.linalg.eigh(covariance)
    draw = torch.Generator(x.device).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64, device=x.device)

    for epsilon in (1.0, 3.0, 8.0):
        mu = math.sqrt(gaussian_mu(epsilon) ** 2 - STATISTICS**-2)  # what the release of a mean would leave
        noise = normal(*sums.shape) / (mu * whole)
        square = normal(*covariance.shape)
        paid = torch.linalg.eigh(covariance + (square + square.T) / 2 / (mu / math.sqrt(2) * whole))
        record = {
            "dataset": arguments.dataset,
            "epsilon": epsilon,
            "learn": count,
            "sum": 100 * float(((held @ (sums + noise)).argmax(1) == y[count:]).double().mean()),
            "oracle": best_ridge(*own, sums + noise, held, y[count:]),
            "paid": best_ridge(*paid, sums + noise * math.sqrt(2), held, y[count:]),
        }
        for loss, times in TIMES.items():
            settings = [Setting(epsilon, t, c, ema=0.97, loss=loss) for t in times[epsilon] for c in CLIPS[loss]]
            scale = whole / count
            scores = train_columns(x[:count], y[:count], x[count:], y[count:], classes, settings, STEPS, STATISTICS, 1, scale)
            record[loss] = max(scores)
        print(
            json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in record.items()}), flush=True
        )


if __name__ == "__main__":
    main()
