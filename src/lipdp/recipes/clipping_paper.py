"""The models and tasks of the fast-clipping paper (ReweightGP), trained by book-keeping.

Its networks as published, but for what can't be private: batch normalisation is group normalisation here, and words are hashed in
the place of embeddings from elsewhere. The scenes at 64 to 256 pixels are CIFAR-10, resized. The paper measures time; the settings
here are a common start for all of them, not a search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lipdp.data.imdb import BUCKETS
from lipdp.recipes.recipe import Recipe

__all__ = ["CLIPPING_PAPER", "IMAGE_SIZES"]

IMAGE_SIZES = (32, 64, 128, 256)
_PROVENANCE = "the fast-clipping paper's network and task; settings carried over from mnist-dpsgd by hand, not searched"


def _recipe(name: str, dataset: str, model: str, options: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "batch_size": 1024,
        "epochs": 30.0,
        "learning_rate": 0.4,
        "schedule": "cosine",
        "ema_decay": 0.9,
        "method": "bookkeeping",
        "max_grad_norm": 1.0,
        "provenance": _PROVENANCE,
    }
    return Recipe(name, dataset, model, options or {}, **{**settings, **changes})


def _all() -> Iterator[Recipe]:
    for dataset, short in (("mnist", "mnist"), ("fashion_mnist", "fmnist")):
        for model in ("mlp", "cnn", "rnn", "lstm"):
            yield _recipe(f"clip-{short}-{model}", dataset, f"plain-{model}")
    # 200 numbers a word, as the paper's; its embeddings come from elsewhere, these are trained.
    words = {"dim": 200, "heads": 8, "hidden": 512, "vocabulary": BUCKETS}
    yield _recipe("clip-imdb-transformer", "imdb", "plain-transformer", words, batch_size=512, epochs=20.0, learning_rate=0.2)
    for model in ("resnet18", "vgg11"):
        for side in IMAGE_SIZES:
            options = {} if side == 32 else {"side": side, "model": f"plain-{model}"}
            name = f"plain-{model}" if side == 32 else "resized"
            yield _recipe(f"clip-cifar10-{model}-{side}", "cifar10", name, options, batch_size=2048)


CLIPPING_PAPER = tuple(_all())
