"""The sets of features that benchmarks/accuracy/features.py compares."""

from __future__ import annotations

import copy
import random
from typing import Any

Set = dict[str, Any]


def patch(**changes: Any) -> dict[str, Any]:
    """A block of patch features."""
    return {"kind": "patch", **_patches(6, 1000, 4), "dictionary": "leaves", **_after(), **changes}


def _patches(size: int, filters: int, grid: int) -> dict[str, Any]:
    rest = {"overlap": 1.5, "threshold": 1.0, "whiten": 0.01, "contrast": 0.1}
    return {"patch": size, "filters": filters, "grid": grid, **rest}


def _after() -> dict[str, Any]:
    return {"compress": "root", "mix": 0.1, "weight": 1.0}


def scatter(**changes: Any) -> dict[str, Any]:
    """A block of scattering features."""
    return {"kind": "scatter", "J": 2, "L": 8, "shifts": 2, "orders": [1.0, 1.23, 0.524, 0.6], **_after(), **changes}


def deep(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A block of patches of maps of patches."""
    return {
        "kind": "deep",
        "first": {**_patches(5, 64, 14), "threshold": 0.5, **first},
        "second": {**_patches(3, 1000, 3), "whiten": 0.1, **second},
        **_after(),
        **changes,
    }


def one(*blocks: dict[str, Any], **changes: Any) -> Set:
    return {"blocks": list(blocks), "centre": "entry", **changes}


SCATTER = (scatter(weight=0.8), scatter(J=3, weight=0.6))
PATCH_CHANGES: dict[str, tuple[Any, ...]] = {
    "threshold": (0.0, 0.5, 1.5, 2.0),
    "mix": (0.0, 0.01, 0.03, 0.3),
    "compress": ("log", "none"),
    "grid": (2, 3, 5, 6, 8),
    "patch": (4, 5, 7, 8),
    "whiten": (0.001, 0.003, 0.03, 0.1),
    "contrast": (0.01, 0.03, 0.3, 1.0),
    "overlap": (1.0, 2.0, 3.0),
    "filters": (400, 2000, 4000),
    "dictionary": ("gaussian",),
}

LISTS: dict[str, dict[str, Set]] = {
    "first": {
        "scatter": one(*SCATTER),
        "patch": one(patch()),
        "both": one(*SCATTER, patch()),
        "centre channel": one(patch(), centre="channel"),
        "centre none": one(patch(), centre="none"),
        "oracle std": one(patch(), oracle="std"),
        "oracle whiten": one(patch(), oracle="whiten", shrink=0.1),
        "oracle whiten more": one(patch(), oracle="whiten", shrink=0.03),
    },
    "patches": {f"{name}={value}": one(patch(**{name: value})) for name, among in PATCH_CHANGES.items() for value in among},
    "mixtures": {
        "two sizes": one(patch(patch=4), patch(patch=8)),
        "two grids": one(patch(grid=2), patch(grid=6, filters=400)),
        "both, more patch": one(*SCATTER, patch(weight=2.0)),
        "both, three sizes": one(*SCATTER, patch(patch=4), patch(patch=6), patch(patch=8)),
        "oracle both whiten": one(*SCATTER, patch(), oracle="whiten", shrink=0.1),
        "scatter mix=0.03": one(scatter(weight=0.8, mix=0.03), scatter(J=3, weight=0.6, mix=0.03)),
        "scatter three": one(scatter(J=1, weight=0.5), *SCATTER),
    },
}
LISTS["deep"] = {
    "deep": one(deep({}, {})),
    "deep 5": one(deep({}, {"patch": 5})),
    "deep threshold=0": one(deep({"threshold": 0.0}, {"threshold": 0.5})),
    "deep whiten=0.02": one(deep({}, {"whiten": 0.02})),
    "deep and patch": one(deep({}, {}), patch()),
    "deep, patch, scatter": one(deep({}, {}), patch(), *SCATTER),
}
small = {"patch": 4, "filters": 2000}
LISTS["second"] = {
    "p4 f2000": one(patch(**small)),
    "p4 f2000 mix=0.3": one(patch(**small, mix=0.3)),
    "p3 f1000 + p5 f1000": one(patch(patch=3), patch(patch=5)),
    "p4 f2000 + scatter": one(patch(**small), scatter(weight=0.5), scatter(J=3, weight=0.4)),
    "p4 f1000": one(patch(patch=4)),
    "p3 f2000": one(patch(patch=3, filters=2000)),
    "p3 + p5 + p7": one(patch(patch=3, mix=0.2), patch(patch=5, mix=0.2), patch(patch=7, mix=0.2)),
    "p5 f2000": one(patch(patch=5, filters=2000)),
    "p4 f2000 threshold=0.5": one(patch(**small, threshold=0.5)),
    "p4 f2000 grid=5": one(patch(**small, grid=5)),
    "p4 f4000 grid=3": one(patch(patch=4, filters=4000, grid=3)),
    "p4 f2000 contrast=0.03": one(patch(**small, contrast=0.03)),
    "p4 f2000 overlap=2.5": one(patch(**small, overlap=2.5)),
}
# For a GPU: 64 000 features and more.
LISTS["large"] = {
    "p4 f4000": one(patch(patch=4, filters=4000)),
    "p3 f2000 + p5 f2000": one(patch(patch=3, filters=2000), patch(patch=5, filters=2000)),
    "p3 f1500 + p4 f1500 + p6 f1500": one(*(patch(patch=size, filters=1500) for size in (3, 4, 6))),
    "p4 f4000 threshold=1.5": one(patch(patch=4, filters=4000, threshold=1.5)),
}
# Patches with scattering: with copies, and small enough for a processor to compute.
_smooth = {"patch": 4, "overlap": 2.5}
_scatter = (scatter(weight=0.5), scatter(J=3, weight=0.4))
LISTS["third"] = {
    "p4 f1000 overlap=2.5 mix=0.3 + J3, no copies": one(patch(**_smooth, mix=0.3), scatter(J=3, weight=0.5, shifts=0)),
    "p4 f1000 overlap=2.5 + J3, no copies": one(patch(**_smooth), scatter(J=3, weight=0.5, shifts=0)),
    "p4 f2000 overlap=2.5 + scatter": one(patch(**_smooth, filters=2000), *_scatter),
    "p4 f2000 overlap=2.5 mix=0.3 + scatter": one(patch(**_smooth, filters=2000, mix=0.3), *_scatter),
    "p4 f2000 overlap=2.5 + more scatter": one(patch(**_smooth, filters=2000), scatter(weight=0.8), scatter(J=3, weight=0.6)),
    "p4 f2000 overlap=2.5 + scatter mix=0.3": one(
        patch(**_smooth, filters=2000), scatter(weight=0.5, mix=0.3), scatter(J=3, weight=0.4, mix=0.3)
    ),
    "p4 f2000 overlap=2.5 threshold=0.5 + scatter": one(patch(**_smooth, filters=2000, threshold=0.5), *_scatter),
    "p4 f4000 overlap=2.5 + scatter": one(patch(**_smooth, filters=4000), *_scatter),
    "p3 + p5 overlap=2.5 + scatter": one(patch(patch=3, overlap=2.5), patch(patch=5, overlap=2.5), *_scatter),
    "p4 f4000 grid=3 overlap=2 + scatter": one(patch(patch=4, filters=4000, grid=3, overlap=2.0), *_scatter),
    "p4 f1000 overlap=2.5 + J2 + J3, no copies": one(
        patch(**_smooth), scatter(weight=0.5, shifts=0), scatter(J=3, weight=0.4, shifts=0)
    ),
    "p4 f2000 overlap=4 + scatter": one(patch(patch=4, filters=2000, overlap=4.0), *_scatter),
    "p4 f2000 overlap=2.5 + J3": one(patch(**_smooth, filters=2000), scatter(J=3, weight=0.5)),
}
# Around the best of these: more filters, more scattering.
_more, _most = SCATTER, (scatter(weight=1.2), scatter(J=3, weight=0.9))
LISTS["fourth"] = {
    "p4 f4000 overlap=2.5 + more scatter": one(patch(**_smooth, filters=4000), *_more),
    "p4 f2000 overlap=2.5 + most scatter": one(patch(**_smooth, filters=2000), *_most),
    "p4 f4000 overlap=2.5 + most scatter": one(patch(**_smooth, filters=4000), *_most),
    "p4 f2000 + p7 f1000 overlap=2.5 + more scatter": one(
        patch(**_smooth, filters=2000), patch(patch=7, overlap=2.5, weight=0.7), *_more
    ),
    "p4 f2000 overlap=2.5 + more scatter L=12": one(
        patch(**_smooth, filters=2000), scatter(L=12, weight=0.8), scatter(J=3, weight=0.6)
    ),
    "p4 f3000 grid=5 overlap=2.5 + more scatter": one(patch(**_smooth, filters=3000, grid=5), *_more),
    "p4 f4000 overlap=2.5 threshold=1.3 + most scatter": one(patch(**_smooth, filters=4000, threshold=1.3), *_most),
    "p4 f2000 overlap=2.5 mix=0.03 + more scatter": one(patch(**_smooth, filters=2000, mix=0.03), *_more),
    "p4 f2000 overlap=2.5 + more scatter mix=0.03": one(
        patch(**_smooth, filters=2000), scatter(weight=0.8, mix=0.03), scatter(J=3, weight=0.6, mix=0.03)
    ),
}
# Fewer than 27 000 features: what two cores compute in minutes.
LISTS["processor"] = {
    "p4 f1000 overlap=2.5 mix=0.3 + more J3, no copies": one(patch(**_smooth, mix=0.3), scatter(J=3, weight=0.8, shifts=0)),
    "p4 f1000 overlap=2.5 mix=0.3 + most J3, no copies": one(patch(**_smooth, mix=0.3), scatter(J=3, weight=1.2, shifts=0)),
    "p4 f1000 overlap=2.5 mix=0.2 threshold=0.5 + more J3, no copies": one(
        patch(**_smooth, mix=0.2, threshold=0.5), scatter(J=3, weight=0.8, shifts=0)
    ),
    "p4 f1000 overlap=2.5 mix=0.3 + J3, no copies": one(patch(**_smooth, mix=0.3), scatter(J=3, weight=0.5, shifts=0)),
    "p4 f1000 overlap=2.5 mix=0.3": one(patch(**_smooth, mix=0.3)),
    "p4 f1600 overlap=2.5 mix=0.3": one(patch(**_smooth, mix=0.3, filters=1600)),
    "p4 f1600 overlap=2.5 mix=0.3 threshold=0.5": one(patch(**_smooth, mix=0.3, filters=1600, threshold=0.5)),
    "p4 f1600 grid=3 overlap=2 mix=0.3": one(patch(patch=4, grid=3, overlap=2.0, mix=0.3, filters=1600)),
    "p4 f1600 overlap=3 mix=0.3": one(patch(patch=4, overlap=3.0, mix=0.3, filters=1600)),
}
# Small enough for a processor: at most 12 000 features, no shifted copies.
_plain = (scatter(weight=0.8, shifts=0), scatter(J=3, weight=0.6, shifts=0))
_few = {"filters": 200, "grid": 5}
LISTS["grey"] = {
    "p4 + scatter": one(patch(patch=4, **_few), *_plain),
    "scatter, no copies": one(*_plain),
    "p4 f400": one(patch(patch=4, filters=400, grid=5)),
    "p4 f200 grid=7": one(patch(patch=4, filters=200, grid=7)),
    "p3 + p6 + scatter": one(patch(patch=3, filters=100, grid=5), patch(patch=6, filters=100, grid=5), *_plain),
}
# Handwritten digits: scattering of one scale, brought into one pose, through random ReLUs; heads on squares.
_even = {"shifts": 0, "orders": [1.0, 1.0, 1.0, 1.0]}


def _digits(*more: dict[str, Any], straighten: Any = True, relu: int = 2, **changes: Any) -> Set:
    return one(scatter(**{**_even, **changes}), *more, straighten=straighten, relu=relu, radius=1.8)


_coarse = scatter(J=3, weight=0.6, **_even)
LISTS["digits"] = {
    "J2": _digits(),
    "J2 + J3": _digits(_coarse, relu=1),
    "J2, linear": _digits(relu=0),
    "J2, as they are": _digits(straighten=False),
    "stretch=0.3": _digits(straighten={"stretch": 0.3}),
    "stretch=0.7": _digits(straighten={"stretch": 0.7}),
    "mix=0.03": _digits(mix=0.03),
    "mix=0.3": _digits(mix=0.3),
    "relu=4": _digits(relu=4),
    "L=6": _digits(L=6),
    "L=12": _digits(L=12, relu=1),
    "shifts=1": _digits(shifts=1),
    "orders": _digits(orders=[1.0, 1.3, 0.7, 1.0]),
    "compress=log": _digits(compress="log"),
    "J2 + p7": _digits(patch(patch=7, filters=80, grid=5, weight=0.7), relu=1),
    "spread=0.14": _digits(straighten={"spread": 0.14}),
    "spread=0.18": _digits(straighten={"spread": 0.18}),
    "stretch=0": _digits(straighten={"stretch": 0.0}),
    "p5 alone": one(patch(patch=5, filters=160, grid=5), straighten=True, relu=1, radius=1.8),
}
LISTS["tiny"] = {"tiny": one(patch(filters=20, grid=2)), "tiny 4": one(patch(patch=4, filters=20, grid=2))}
START: dict[str, Set] = {
    "cifar10": one(patch()),
    "fashion_mnist": one(patch(grid=5)),
    "mnist": one(patch(grid=5, filters=300)),
}


def changes_of(made: Set, draw: random.Random) -> list[tuple[str, Set]]:
    """Sets that differ from this one in one setting of one block, in its weight, or by a block that comes or goes; shuffled."""
    found: list[tuple[str, Set]] = []
    for number, block in enumerate(made["blocks"]):
        if block["kind"] == "patch":
            pairs = [(name, value) for name, among in PATCH_CHANGES.items() for value in among if block[name] != value]
            found += [(f"{number}.{name}={value}", _with(made, number, name, value)) for name, value in pairs]
        if len(made["blocks"]) > 1:
            weights = [(factor, round(block["weight"] * factor, 3)) for factor in (0.6, 1.6)]
            found += [(f"{number}.weight*{factor}", _with(made, number, "weight", weight)) for factor, weight in weights]
            without = copy.deepcopy(made)
            del without["blocks"][number]
            found.append((f"without {number}", without))
    kinds = [block["kind"] for block in made["blocks"]]
    if "scatter" not in kinds:
        found.append(("add scatter", {**made, "blocks": [*copy.deepcopy(made["blocks"]), *SCATTER]}))
    if kinds.count("patch") < 3:
        first = next((block for block in made["blocks"] if block["kind"] == "patch"), patch())
        more = [(size, [*copy.deepcopy(made["blocks"]), {**first, "patch": size}]) for size in (4, 5, 7, 8)]
        found += [(f"add patch={size}", {**made, "blocks": blocks}) for size, blocks in more]
    draw.shuffle(found)
    return found


def _with(made: Set, number: int, name: str, value: Any) -> Set:
    new = copy.deepcopy(made)
    new["blocks"][number][name] = value
    return new
