"""The settings that did best on held-out records, by recipe: written by ``python benchmarks/out_of_the_box.py recipes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FOUND"]

# name → (where the settings come from, the settings that differ from the common start)
FOUND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fashion-mnist-mlp": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 57.8, "options.clip": 0.193, "learning_rate": 2.28, "epochs": 13.65},
    ),
    "fashion-mnist-mlp-bookkeeping": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "tanh", "epochs": 13.65},
    ),
    "mnist-mlp": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 3.0, "epochs": 13.65},
    ),
    "mnist-mlp-bookkeeping": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "tanh", "epochs": 13.65},
    ),
}
