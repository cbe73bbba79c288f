"""The settings that did best on held-out records, by recipe: written by ``python benchmarks/out_of_the_box.py recipes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FOUND"]

# name → (where the settings come from, the settings that differ from the common start)
FOUND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cifar10-lenet": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 4.0, "epochs": 16.38},
    ),
    "cifar10-lenet-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "tanh", "epochs": 16.38},
    ),
    "cifar10-mixer": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 70.0, "options.clip": 0.15, "learning_rate": 12.0, "epochs": 16.38},
    ),
    "cifar10-mixer-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "tanh", "epochs": 16.38},
    ),
    "cifar10-mlp": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 58.7, "options.clip": 0.424, "learning_rate": 2.04, "epochs": 16.38},
    ),
    "cifar10-mlp-bookkeeping": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 3.07, "max_grad_norm": 0.184, "learning_rate": 1.98, "options.activation": "relu", "epochs": 16.38},
    ),
    "cifar10-resnet": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 200.0, "options.clip": 0.2, "learning_rate": 6.0, "epochs": 16.38},
    ),
    "cifar10-resnet-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.0, "options.activation": "tanh", "epochs": 16.38},
    ),
    "cifar10-vgg": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 8.0, "epochs": 16.38},
    ),
    "cifar10-vgg-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 0.9, "options.activation": "tanh", "epochs": 16.38},
    ),
    "fashion-mnist-mlp": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 57.8, "options.clip": 0.193, "learning_rate": 2.28, "epochs": 13.65},
    ),
    "fashion-mnist-mlp-bookkeeping": (
        "best of 6 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "tanh", "epochs": 13.65},
    ),
    "mnist-lenet": (
        "best of 2 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 4.0, "epochs": 13.65},
    ),
    "mnist-lenet-bookkeeping": (
        "best of 2 trials (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": "relu", "epochs": 13.65},
    ),
    "mnist-mixer": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 70.0, "options.clip": 0.15, "learning_rate": 12.0, "epochs": 13.65},
    ),
    "mnist-mixer-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
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
    "mnist-resnet": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 200.0, "options.clip": 0.2, "learning_rate": 6.0, "epochs": 13.65},
    ),
    "mnist-resnet-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.0, "options.activation": "tanh", "epochs": 13.65},
    ),
    "mnist-vgg": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 8.0, "epochs": 13.65},
    ),
    "mnist-vgg-bookkeeping": (
        "best of a few pilots (benchmarks/out_of_the_box_pilots.py, epsilon=3), rounded; one trial at full size",
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 0.9, "options.activation": "tanh", "epochs": 13.65},
    ),
}
