"""The settings that did best on held-out records, by recipe: written by ``python benchmarks/out_of_the_box.py recipes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FOUND"]

# name → (where the settings come from, the settings that differ from the common start)
FOUND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cifar10-lenet": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 101.0, "options.clip": 0.223, "learning_rate": 7.59, "epochs": 16.38},
    ),
    "cifar10-lenet-bookkeeping": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 5.79, "max_grad_norm": 0.295, "learning_rate": 2.19, "options.activation": "tanh", "epochs": 16.38},
    ),
    "cifar10-lenet-boundaries": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 6.42,
            "options.clip": 0.435,
            "options.conv_clip": 0.267,
            "learning_rate": 15.0,
            "options.activation": "relu",
            "allocation": "optimal",
            "epochs": 16.38,
        },
    ),
    "cifar10-mixer": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 3.0, "epochs": 16.38},
    ),
    "cifar10-mixer-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 1.06, "max_grad_norm": 0.791, "learning_rate": 2.94, "options.activation": "relu", "epochs": 16.38},
    ),
    "cifar10-mixer-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 12.0,
            "options.clip": 0.0669,
            "options.conv_clip": 0.188,
            "learning_rate": 4.7,
            "options.activation": "relu",
            "allocation": "optimal",
            "epochs": 16.38,
        },
    ),
    "cifar10-mlp": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 3.0, "epochs": 16.38},
    ),
    "cifar10-mlp-bookkeeping": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 9.32, "max_grad_norm": 0.0957, "learning_rate": 0.797, "options.activation": "relu", "epochs": 16.38},
    ),
    "cifar10-mlp-boundaries": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 12.8,
            "options.clip": 0.3,
            "learning_rate": 7.95,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 16.38,
        },
    ),
    "cifar10-resnet": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 190.0, "options.clip": 0.926, "learning_rate": 4.53, "epochs": 16.38},
    ),
    "cifar10-resnet-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 2.24, "max_grad_norm": 0.865, "learning_rate": 1.68, "options.activation": "relu", "epochs": 16.38},
    ),
    "cifar10-resnet-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 7.0,
            "options.clip": 0.2,
            "options.conv_clip": 0.05,
            "learning_rate": 4.0,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 16.38,
        },
    ),
    "cifar10-vgg": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 29.7, "options.clip": 0.776, "learning_rate": 7.95, "epochs": 16.38},
    ),
    "cifar10-vgg-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 2.97, "max_grad_norm": 0.0682, "learning_rate": 1.6, "options.activation": "tanh", "epochs": 16.38},
    ),
    "cifar10-vgg-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 6.69,
            "options.clip": 0.113,
            "options.conv_clip": 0.0136,
            "learning_rate": 2.63,
            "options.activation": "relu",
            "allocation": "optimal",
            "epochs": 16.38,
        },
    ),
    "fashion-mnist-mlp": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 100.0, "options.clip": 0.2, "learning_rate": 3.0, "epochs": 13.65},
    ),
    "fashion-mnist-mlp-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 2.57, "max_grad_norm": 0.129, "learning_rate": 3.5, "options.activation": "relu", "epochs": 13.65},
    ),
    "fashion-mnist-mlp-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 15.5,
            "options.clip": 0.284,
            "learning_rate": 3.32,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 13.65,
        },
    ),
    "mnist-lenet": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 48.6, "options.clip": 0.0912, "learning_rate": 5.65, "epochs": 13.65},
    ),
    "mnist-lenet-bookkeeping": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 3.55, "max_grad_norm": 0.0602, "learning_rate": 3.34, "options.activation": "tanh", "epochs": 13.65},
    ),
    "mnist-lenet-boundaries": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 2.29,
            "options.clip": 0.177,
            "options.conv_clip": 0.0314,
            "learning_rate": 15.8,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 13.65,
        },
    ),
    "mnist-mixer": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 130.0, "options.clip": 0.187, "learning_rate": 22.7, "epochs": 13.65},
    ),
    "mnist-mixer-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 1.25, "max_grad_norm": 0.816, "learning_rate": 1.66, "options.activation": "relu", "epochs": 13.65},
    ),
    "mnist-mixer-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 16.3,
            "options.clip": 0.544,
            "options.conv_clip": 0.016,
            "learning_rate": 2.97,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 13.65,
        },
    ),
    "mnist-mlp": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 24.7, "options.clip": 0.29, "learning_rate": 8.18, "epochs": 13.65},
    ),
    "mnist-mlp-bookkeeping": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 4.74, "max_grad_norm": 0.0305, "learning_rate": 2.67, "options.activation": "relu", "epochs": 13.65},
    ),
    "mnist-mlp-boundaries": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 10.5,
            "options.clip": 0.108,
            "learning_rate": 3.64,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 13.65,
        },
    ),
    "mnist-resnet": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 243.0, "options.clip": 0.0607, "learning_rate": 7.08, "epochs": 13.65},
    ),
    "mnist-resnet-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 1.97, "max_grad_norm": 0.921, "learning_rate": 2.43, "options.activation": "tanh", "epochs": 13.65},
    ),
    "mnist-resnet-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 24.0,
            "options.clip": 0.0831,
            "options.conv_clip": 0.0464,
            "learning_rate": 5.3,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 13.65,
        },
    ),
    "mnist-vgg": (
        "best of 17 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 137.0, "options.clip": 0.907, "learning_rate": 6.18, "epochs": 13.65},
    ),
    "mnist-vgg-bookkeeping": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {"temperature": 1.95, "max_grad_norm": 0.874, "learning_rate": 2.14, "options.activation": "tanh", "epochs": 13.65},
    ),
    "mnist-vgg-boundaries": (
        "best of 16 pilots (benchmarks/out_of_the_box.py, epsilon=3) on a tenth of the training set, held out",
        {
            "temperature": 13.7,
            "options.clip": 0.151,
            "options.conv_clip": 0.11,
            "learning_rate": 1.91,
            "options.activation": "relu",
            "allocation": "global",
            "epochs": 13.65,
        },
    ),
}
