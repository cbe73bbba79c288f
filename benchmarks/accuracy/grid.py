"""Where the searches of the out-of-the-box table start: every dataset of images × every network × three ways to bound gradients.

The clipless recipe proves its bounds by its layers (Lipschitz ones, the logits' gradient clipped). Its twins are a conventional
network of the same widths and depth (lipdp.models.twins): between boundaries, which is clipless too and proves its bounds whatever
the weights are, and with each example's gradient clipped by book-keeping. What the searches found is in the library's catalogue.
"""

from __future__ import annotations

from typing import Any

from lipdp.recipes import Recipe

DATASETS = ("mnist", "fashion_mnist", "cifar10")
NETWORKS = ("mlp", "lenet", "vgg", "resnet", "mixer")
METHODS = ("clipless", "boundaries", "bookkeeping")

# Small networks: the noise of a step grows with the number of weights, its signal does not.
_GREY: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": (128,)},
    "lenet": {"channels": (16,), "kernel_size": 5, "hidden": 128},
    "vgg": {"depth": 5, "width": 16, "hidden": 64},
    "resnet": {"depth": 6, "width": 16, "patch": 2, "pooled": False, "hidden": 64},
    "mixer": {"patch": 4, "dim": 64, "depth": 1, "pooled": False, "hidden": 128},
}
_COLOUR = {**_GREY, "mlp": {"hidden": (256,)}, "lenet": {"channels": (16, 32), "kernel_size": 5, "hidden": 128}}
_TWINS = {"mlp": "dense", "lenet": "lenet", "vgg": "vgg", "resnet": "resnet", "mixer": "mixer"}
_COMMON: dict[str, Any] = {"batch_size": 8192, "epochs": 27.0, "schedule": "cosine", "ema_decay": 0.95}
_PROVED: dict[str, Any] = {"temperature": 100.0, "learning_rate": 3.0, "allocation": "optimal"}
_BOUNDED: dict[str, Any] = {"temperature": 7.0, "learning_rate": 4.0}
_CLIPPED: dict[str, Any] = {"temperature": 4.0, "learning_rate": 1.6, "method": "bookkeeping", "max_grad_norm": 0.3}
_START = "a common start for all networks, near the settings found for {}"


def grid_name(dataset: str, network: str, method: str = "clipless") -> str:
    """What ``lipdp train`` calls it."""
    return f"{dataset.replace('_', '-')}-{network}" + ("" if method == "clipless" else f"-{method}")


def base_recipe(dataset: str, network: str, method: str = "clipless") -> Recipe:
    """Where a search starts: the same settings for every network of a method."""
    options = dict((_COLOUR if dataset == "cifar10" else _GREY)[network])
    name = grid_name(dataset, network, method)
    if method == "clipless":
        provenance = _START.format("mnist-lenet")
        return Recipe(name, dataset, network, {**options, "clip": 0.2}, **_COMMON, **_PROVED, provenance=provenance)
    if method == "boundaries":
        options |= {"activation": "relu", "clip": 0.2, "conv_clip": 0.05}
        provenance = _START.format("cifar10-lenet-boundaries")
        return Recipe(name, dataset, f"boundary-{_TWINS[network]}", options, **_COMMON, **_BOUNDED, provenance=provenance)
    options["activation"] = "tanh"
    provenance = _START.format("mnist-mlp-bookkeeping")
    return Recipe(name, dataset, f"plain-{_TWINS[network]}", options, **_COMMON, **_CLIPPED, provenance=provenance)
