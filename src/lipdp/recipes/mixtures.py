"""Linear heads on patches *and* scattering, for photographs: the best settings found for CIFAR-10, in two sizes.

``cifar10-mixture-eps1`` … have 26,416 features, which two cores compute in minutes. ``cifar10-large-eps1`` … have 57,968 (89,968
at ε = 8), those of scattering averaged over ten copies of each image; they are meant for a GPU. As in :mod:`lipdp.recipes.patches`,
every step takes the whole training set. Sets and settings were chosen on two held-out tenths of it (benchmarks/accuracy_heads.py),
and the choice itself is not accounted for: it read the training set.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from lipdp.recipes.features import FeatureRecipe, whole_batch_recipe

__all__ = ["LARGE", "MIXTURES"]

Block = dict[str, Any]
_PATCHES: Block = {"kind": "patches", "patch": 4, "grid": 4, "overlap": 2.5}
_SCATTERING: Block = {"kind": "scattering", "flip": True, "orders": (1.0, 1.23, 0.524, 0.6)}
_CROSS = ((0, 0), (2, 0), (-2, 0), (0, 2), (0, -2))


def _mixture(weight: float) -> Sequence[Block]:
    return {**_PATCHES, "filters": 1000, "decorrelate": 0.3}, {**_SCATTERING, "J": 3, "weight": weight}


def _large(filters: int) -> Sequence[Block]:
    return (
        {**_PATCHES, "filters": filters},
        {**_SCATTERING, "J": 2, "shifts": _CROSS, "weight": 0.8},
        {**_SCATTERING, "J": 3, "shifts": _CROSS, "weight": 0.6},
    )


def _made(
    size: str,
    blocks: Sequence[Block],
    epsilon: float,
    *,
    time: float,
    clip: float,
    provenance: str,
    normalise: bool = False,
    ema_decay: float = 0.9,
) -> tuple[tuple[str, float], FeatureRecipe]:
    recipe = whole_batch_recipe(
        f"cifar10-{size}-eps{epsilon:g}",
        "cifar10",
        {"blocks": blocks, "centre": "private", "radius": 1.5, "clip": clip, "normalise": normalise},
        epsilon=epsilon,
        time=time,
        ema_decay=ema_decay,
        provenance=provenance,
    )
    return ("cifar10", epsilon), recipe


_FOUND = (
    "best mean over two held-out tenths of 80 settings of the head at this epsilon, on the best {} sets of features "
    "(benchmarks/accuracy_heads.py linear cifar10 --lists {} --steps 150)"
)
_SMALL, _BIG = _FOUND.format("two of 9", "processor"), _FOUND.format("three of 22", "third, then --lists fourth")

MIXTURES = MappingProxyType(
    dict(
        [
            _made("mixture", _mixture(0.8), 1.0, time=3.2e4, clip=0.1, provenance=_SMALL),
            _made("mixture", _mixture(1.2), 3.0, time=9.391e4, clip=0.05, provenance=_SMALL),
            _made("mixture", _mixture(1.2), 8.0, time=4.911e5, clip=0.3, normalise=True, ema_decay=0.97, provenance=_SMALL),
        ]
    )
)
LARGE = MappingProxyType(
    dict(
        [
            _made("large", _large(2000), 1.0, time=1.6e4, clip=0.4, provenance=_BIG),
            _made("large", _large(2000), 3.0, time=1.878e5, clip=0.3, normalise=True, provenance=_BIG),
            _made("large", _large(4000), 8.0, time=2.456e5, clip=0.05, provenance=_BIG),
        ]
    )
)
