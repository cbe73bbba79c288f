"""The clipping paper's networks: each is planned without data and takes a step."""

from __future__ import annotations

import itertools

import pytest
import torch

import lipdp
from lipdp import data, models, recipes
from lipdp.data.text import BUCKETS
from lipdp.errors import ConfigurationError
from lipdp.recipes import Recipe

# The same networks with fewer channels: a step on one core in a second.
NARROW = {"plain-resnet18": {"width": 4, "groups": 2}, "plain-vgg11": {"width": 4, "hidden": 16, "groups": 2}}


def narrowed(recipe):
    if recipe.model == "resized":
        return recipe.but(options={**recipe.options, **NARROW[recipe.options["model"]]})
    if recipe.model == "plain-transformer":
        return recipe.but(options={**recipe.options, "dim": 16, "hidden": 16})
    return recipe.but(options={**recipe.options, **NARROW.get(recipe.model, {})})


def inputs(info, rows):
    if info.name == "imdb":
        return torch.randint(0, BUCKETS, (rows, *info.shape))
    return torch.rand(rows, *info.shape)


def paper():
    """Its tasks, at settings that only have to run. The scenes at larger sizes are CIFAR-10, resized."""
    clipped = Recipe("paper", "mnist", "plain-mlp", temperature=1.0, batch_size=1024, method="bookkeeping", max_grad_norm=1.0)
    for dataset in ("mnist", "fashion_mnist"):
        for model in ("mlp", "cnn", "rnn", "lstm"):
            yield f"{dataset}-{model}", clipped.but(dataset=dataset, model=f"plain-{model}")
    words = {"dim": 200, "heads": 8, "hidden": 512, "vocabulary": BUCKETS}
    yield "imdb-transformer", clipped.but(dataset="imdb", model="plain-transformer", options=words, batch_size=512)
    for model, side in itertools.product(("resnet18", "vgg11"), (32, 64, 128, 256)):
        own = (
            {"model": f"plain-{model}"}
            if side == 32
            else {"model": "resized", "options": {"side": side, "model": f"plain-{model}"}}
        )
        yield f"cifar10-{model}-{side}", clipped.but(dataset="cifar10", batch_size=2048, **own)


PAPER = dict(paper())


@pytest.mark.parametrize("name", [name for name in PAPER if not name.endswith(("-128", "-256"))])
def test_a_step(name):
    recipe = narrowed(PAPER[name])
    info = data.info(recipe.dataset)
    ready = recipes.prepare(recipe.but(epochs=1.0), info, noise_multiplier=1.0, accountant="rdp", seed=0)
    assert ready.plan.dataset_size == info.train_size
    before = [parameter.detach().clone() for parameter in ready.model.parameters()]
    engine = lipdp.PrivacyEngine(ready.model, ready.loss, ready.optimizer, ready.plan, seed=0, reproducible=True, microbatch_size=4)
    engine.step(inputs(info, 3), torch.randint(0, info.classes, (3,)), sample="own")
    assert engine.steps == 1
    for old, new in zip(before, ready.model.parameters(), strict=True):
        assert bool(torch.isfinite(new).all())
        assert not torch.equal(old, new)


@pytest.mark.parametrize("name", ["cifar10-resnet18-128", "cifar10-vgg11-256"])
def test_larger_images_plan_and_differentiate(name):
    recipe = narrowed(PAPER[name])
    info = data.info(recipe.dataset)
    ready = recipes.prepare(recipe.but(epochs=1.0), info, noise_multiplier=1.0, accountant="rdp", seed=0)
    model, x, y = ready.model.double(), inputs(info, 2).double(), torch.tensor([0, 1])  # rounding adds up in such deep networks
    assert model[0](x).shape[-1] == recipe.options["side"]
    found, expected = (
        lipdp.clipping.clipped_gradients(model, ready.loss, x, y, 1.0, method) for method in ("bookkeeping", "naive")
    )
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= 1e-8 * float(value.norm()) + 1e-12, key


def test_resized_refuses_what_is_no_image():
    with pytest.raises(ConfigurationError, match="images"):
        models.create("resized", input_shape=(10,), classes=2, side=8, model="plain-mlp")
    with pytest.raises(ConfigurationError, match="side"):
        models.create("resized", input_shape=(3, 8, 8), classes=2, side=0, model="plain-mlp")
