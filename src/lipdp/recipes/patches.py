"""Linear heads on features of patches and scattering: the best settings found for each dataset and budget.

Every step takes the whole training set (sampling rate 1): a linear head then needs no more noise than with batches, and less at
large budgets, and T steps with a release of statistics are exactly one Gaussian mechanism. Settings were chosen on tenths of the
training sets, held out (benchmarks/accuracy_features.py, accuracy_heads.py); test accuracies are in benchmarks/results/accuracy.
The choice itself is not accounted for: it read the training sets.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from lipdp.recipes.features import FeatureRecipe, whole_batch_recipe
from lipdp.recipes.scattering import nearest_budget

__all__ = ["PATCHES", "patch_recipe"]

_ORDERS = (1.0, 1.23, 0.524, 0.6)
_SCATTERING: tuple[dict[str, Any], ...] = (
    {"kind": "scattering", "J": 2, "flip": False, "orders": _ORDERS, "weight": 0.8},
    {"kind": "scattering", "J": 3, "flip": False, "orders": _ORDERS, "weight": 0.6},
)
_BLOCKS: dict[str, tuple[dict[str, Any], ...]] = {
    "cifar10": ({"kind": "patches", "patch": 4, "filters": 1000, "grid": 4},),
    "fashion_mnist": ({"kind": "patches", "patch": 4, "filters": 100, "grid": 5, "mirror": False}, *_SCATTERING),
}
# A public bound on the length of an image's features, in units of the drawn images'.
_RADIUS = {"cifar10": 1.5, "fashion_mnist": 2.0}


def _made(
    dataset: str, epsilon: float, time: float, clip: float, provenance: str, ema_decay: float = 0.9
) -> tuple[tuple[str, float], FeatureRecipe]:
    recipe = whole_batch_recipe(
        f"{dataset.replace('_', '-')}-patches-eps{epsilon:g}",
        dataset,
        {"blocks": _BLOCKS[dataset], "centre": "private", "radius": _RADIUS[dataset], "clip": clip},
        epsilon=epsilon,
        time=time,
        ema_decay=ema_decay,
        provenance=provenance,
    ).but(statistics_budget=0.16 / epsilon)  # not rounded: what was run
    return (dataset, epsilon), recipe


_FOUND = (
    "best of {} settings on one held-out tenth (by the script that became benchmarks/accuracy_times.py); blocks from trials with "
    "{} images"
)

PATCHES = MappingProxyType(
    dict(
        [
            _made("cifar10", 1.0, 3e4, 0.1, _FOUND.format(5, 4000)),
            _made("cifar10", 3.0, 9e4, 0.1, _FOUND.format(4, 4000)),
            _made("cifar10", 8.0, 1.8e5, 0.1, _FOUND.format(4, 4000), ema_decay=0.97),
            _made("fashion_mnist", 1.0, 6e4, 0.05, _FOUND.format(5, 6000)),
            _made("fashion_mnist", 3.0, 1.2e5, 0.3, _FOUND.format(4, 6000)),
            _made("fashion_mnist", 8.0, 2e5, 0.2, _FOUND.format(5, 6000), ema_decay=0.97),
        ]
    )
)


def patch_recipe(dataset: str, epsilon: float) -> FeatureRecipe:
    """The recipe of patches for a dataset whose budget is nearest to ``epsilon``, on a scale of factors."""
    return nearest_budget(PATCHES, dataset, epsilon)
