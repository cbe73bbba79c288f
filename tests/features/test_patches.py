"""Features of patches: their formulas, their constants under attack, and the blocks and heads that are made of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, models, nn
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError, DataError
from lipdp.features.drawings import leaf_images, texture_images
from lipdp.features.front import extract_features, split_front
from lipdp.features.patches import PatchFeatures, pooling_windows
from lipdp.features.stacks import PatchBlock, ScatteringBlock, block_of, feature_front
from tests.soundness.harness import attack

SMALL: dict[str, Any] = {"patch": 3, "filters": 6, "grid": 2}
BLOCKS: list[dict[str, Any]] = [{"kind": "patches", **SMALL}, {"kind": "scattering", "J": 1, "L": 2, "order": 1, "weight": 0.5}]


# ------------------------------------------------------------------ drawn images


def test_leaves_are_public_constants() -> None:
    first = leaf_images((3, 12, 10), 8)
    assert torch.equal(first, leaf_images((3, 12, 10), 8))
    assert not torch.equal(first, leaf_images((3, 12, 10), 8, seed=1))
    assert first.shape == (8, 3, 12, 10)
    assert 0 <= float(first.min()) < float(first.max()) <= 1
    with pytest.raises(ConfigurationError, match="images"):
        leaf_images((12, 10))


def test_leaves_have_edges() -> None:
    """Differences of neighbours: as a Gaussian's for textures, with long tails where there are edges."""

    def kurtosis(images: torch.Tensor) -> float:
        steps = (images[..., 1:] - images[..., :-1]).flatten()
        return float(steps.pow(4).mean() / steps.square().mean() ** 2)

    assert kurtosis(leaf_images((1, 24, 24), 32)) > 2 * kurtosis(texture_images((1, 24, 24), 32))


# ------------------------------------------------------------------ the transform


def reference(layer: PatchFeatures, x: np.ndarray) -> np.ndarray:
    """The class's formula, patch by patch, for one image."""
    whitener, filters = layer.energy.double().numpy(), layer.filters.double().numpy()
    side, rows, columns = layer.patch, x.shape[1] - layer.patch + 1, x.shape[2] - layer.patch + 1
    z = np.zeros((2, len(filters), rows, columns))
    for i in range(rows):
        for j in range(columns):
            window = x[:, i : i + side, j : j + side]
            w = np.array([(row * window).sum() for row in whitener])
            strength = 1 / math.sqrt((w**2).sum() / layer.mean_energy + layer.contrast)
            for k, row in enumerate(filters):
                response = (row * window).sum() * strength
                z[0, k, i, j] = max(0.0, response - layer.threshold * layer.level)
                z[1, k, i, j] = max(0.0, -response - layer.threshold * layer.level)
    down, right = (pooling_windows(n, layer.grid, layer.overlap).numpy() for n in (rows, columns))
    pooled = np.einsum("ai,skij,bj->skab", down, z, right)
    if layer.mirror:
        half = len(filters) // 2
        pooled = (pooled[:, :half] + pooled[:, half:, :, ::-1]) / 2
    return pooled.reshape(-1, layer.grid, layer.grid)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("dictionary", ["leaves", "gaussian"])
def test_against_the_formula(mirror: bool, dictionary: Any) -> None:
    layer = PatchFeatures((2, 8, 9), **SMALL, overlap=1.4, threshold=0.5, mirror=mirror, dictionary=dictionary)
    x = torch.rand(2, 2, 8, 9, generator=torch.Generator().manual_seed(0))
    y = layer(x)
    assert y.shape == (2, *layer.output_shape)
    expected = np.stack([reference(layer, image.double().numpy()) for image in x])
    assert np.abs(y.numpy() - expected).max() < 1e-4 * np.abs(expected).max()


def test_as_products_of_matrices() -> None:
    """What is computed away from the CPU."""
    layer = PatchFeatures((2, 8, 9), **SMALL)
    x = torch.rand(3, 2, 8, 9, generator=torch.Generator().manual_seed(0))
    patches = F.unfold(x, 3)
    y = layer._pooled(layer.energy.flatten(1) @ patches, layer.filters.flatten(1) @ patches, x.dtype)
    assert torch.allclose(y, layer(x), atol=1e-5)


def test_mirror_images_have_the_same_features() -> None:
    layer = PatchFeatures((3, 8, 8), **SMALL)
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(layer(x), layer(x.flip(3)), atol=1e-5)
    assert not torch.allclose(layer(x), layer(x.flip(2)), atol=1e-3)


def test_whitening() -> None:
    """Eigenvalues λ of drawn patches become λ/((1−a)λ + a·λ̄), brightness is removed, dictionary vectors have norm 1."""
    layer = PatchFeatures((1, 16, 16), patch=4, filters=10, grid=2, whiten=0.05)
    patches = F.unfold(leaf_images((1, 16, 16), 256), 4).transpose(1, 2).flatten(0, 1).double()
    whitener = layer.energy.flatten(1).double()
    assert float((whitener @ torch.ones(16, dtype=torch.float64)).abs().max()) < 1e-4
    centred = patches - patches.mean(1, keepdim=True)
    values = torch.linalg.eigvalsh(centred.T @ centred / len(centred))[1:]
    white = patches @ whitener.T
    found = torch.linalg.eigvalsh(white.T @ white / len(white))[1:]
    expected = values / (0.95 * values + 0.05 * values.sum() / 16)
    assert torch.allclose(found, expected.sort().values, rtol=0.15)
    directions = layer.filters.flatten(1).double() @ torch.linalg.pinv(whitener, rtol=1e-3)
    assert torch.allclose(directions.norm(dim=1), torch.ones(10, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("overlap", [1.0, 1.5, 3.0])
def test_windows(overlap: float) -> None:
    windows = pooling_windows(9, 3, overlap)
    assert windows.shape == (3, 9)
    assert torch.allclose(windows.sum(1), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(windows, windows.flip((0, 1)))  # symmetric, so that mirroring maps windows to windows
    if overlap == 1.0:
        assert torch.equal((windows > 0).sum(0), torch.ones(9, dtype=torch.long))


# ------------------------------------------------------------------ its constants


@pytest.mark.parametrize("mirror", [False, True])
def test_constants_hold_under_attack(mirror: bool) -> None:
    layer = PatchFeatures((1, 6, 6), **SMALL, threshold=0.1, contrast=0.5, mirror=mirror)
    found = attack(nn.Sequential(nn.BoundedInput((1, 6, 6), norm=2.0), layer), 1.0, steps=25, draws=3)
    assert found.tightness("input") > 0.01, str(found)
    x = 1e4 * torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    reached = float(layer(x).flatten(1).norm(dim=1).max())
    assert 0.1 * layer.norm < reached <= layer.norm  # however large the image
    assert torch.count_nonzero(layer(torch.zeros(1, 1, 6, 6))) == 0


@pytest.mark.parametrize("mirror", [False, True])
def test_constants_are_reached(mirror: bool) -> None:
    """One patch, no threshold, a whitening that only scales: then one direction is worst for every factor."""
    drawn = torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"patch": 4, "filters": 6, "grid": 1, "threshold": 0.0, "whiten": 1.0, "contrast": 0.3}
    # Mirrored halves add up in full where image and dictionary are their own mirror images.
    layer = PatchFeatures((1, 4, 4), **settings, mirror=mirror, drawn=drawn + drawn.flip(3) if mirror else drawn)
    worst = torch.linalg.svd(layer.filters.flatten(1).double())[2][0].float().reshape(1, 1, 4, 4)
    for size, bound in ((1e-4, 1e-4 * layer.lipschitz), (1e6, layer.norm)):
        reached = float(torch.linalg.vector_norm(layer(size * worst)))
        assert 0.99 * bound < reached <= bound


def test_the_calculus_knows_it() -> None:
    layer = PatchFeatures((1, 6, 6), **SMALL)
    model = nn.Sequential(nn.BoundedInput((1, 6, 6), norm=1e-3), layer)
    assert analyse(model, losses.CrossEntropy()).output.norm == pytest.approx(1e-3 * layer.lipschitz)
    model = nn.Sequential(nn.BoundedInput((1, 6, 6), norm=1e9), layer)
    assert analyse(model, losses.CrossEntropy()).output.norm == pytest.approx(layer.norm)
    x = torch.rand(3, 1, 6, 6)
    assert torch.allclose(model.export()(x), model(x), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 9}, "do not fit"),
        ({"filters": 5}, "even number"),
        ({"grid": 7}, "windows"),
        ({"overlap": 0.5}, "windows"),
        ({"whiten": 0.0}, "whiten"),
        ({"contrast": 0.0}, "contrast"),
        ({"threshold": -1.0}, "threshold"),
        ({"dictionary": "photographs"}, "dictionary"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PatchFeatures((1, 8, 8), **{**SMALL, **changes})


def test_an_empty_batch() -> None:
    layer = PatchFeatures((1, 8, 8), **SMALL)
    assert layer(torch.rand(0, 1, 8, 8)).shape == (0, *layer.output_shape)


def test_refuses_other_shapes() -> None:
    with pytest.raises(DataError, match="expects images of shape"):
        PatchFeatures((1, 8, 8), **SMALL)(torch.rand(2, 1, 8, 9))


# ------------------------------------------------------------------ blocks and heads


def test_blocks_are_evened_out() -> None:
    layers, width = feature_front((1, 12, 12), blocks=BLOCKS, centre="drawn")
    front = layers[0]
    size = feature_front((1, 12, 12), blocks=BLOCKS[:1])[1]
    for images, part, weight in (
        (leaf_images((1, 12, 12), 128, seed=5), slice(0, size), 1.0),
        (texture_images((1, 12, 12), 128, seed=5), slice(size, width), 0.5),
    ):
        lengths = front(images)[:, part].norm(dim=1)
        assert float(lengths.square().mean().sqrt()) == pytest.approx(weight, rel=0.25)
    assert front(torch.rand(2, 1, 12, 12)).shape == (2, width)


def test_blocks_by_name() -> None:
    assert block_of({"kind": "patches", "patch": 5}) == PatchBlock(patch=5)
    assert block_of({"kind": "scattering", "shifts": [[0, 0], [1, 0]]}) == ScatteringBlock(shifts=((0, 0), (1, 0)))
    with pytest.raises(ConfigurationError, match="kind"):
        block_of({"patch": 5})
    with pytest.raises(ConfigurationError, match="no setting size"):
        block_of({"kind": "patches", "size": 5})
    with pytest.raises(ConfigurationError, match="at least one"):
        feature_front((1, 8, 8), blocks=())
    with pytest.raises(ConfigurationError, match="weights"):
        feature_front((1, 8, 8), blocks=[{**BLOCKS[0], "weight": 0.0}])
    with pytest.raises(ConfigurationError, match="centre"):
        feature_front((1, 8, 8), blocks=BLOCKS, centre="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["patches-linear", "patches-mlp"])
@pytest.mark.parametrize("centre", ["drawn", "private"])
def test_sensitivities_are_the_clips(name: str, centre: str) -> None:
    options: dict[str, Any] = {"hidden": (6, 4), "hidden_clip": 0.3} if name == "patches-mlp" else {}
    model = models.create(name, input_shape=(1, 8, 8), classes=3, clip=0.2, blocks=BLOCKS, centre=centre, **options)
    found = list(lipdp.sensitivities(model, losses.CrossEntropy()).values())
    assert found == pytest.approx([0.3, 0.3, 0.2] if name == "patches-mlp" else [0.2])
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.normal_(p)
    assert torch.allclose(model.export()(x), model(x), atol=1e-4)


def test_training_on_stored_features() -> None:
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(40, 1, 8, 8, generator=draw), torch.arange(40) % 2)
    model = models.create("patches-linear", input_shape=(1, 8, 8), classes=2, blocks=BLOCKS, centre="private")
    front, head = split_front(model)
    features = extract_features(front, data)
    loss = losses.CrossEntropy()
    plan = lipdp.plan(
        head, loss, dataset_size=40, batch_size=40, delta=1e-3, epsilon=50.0, steps=3, statistics_budget=0.1, accountant="rdp"
    )
    lipdp.fit(head, loss, torch.optim.SGD(head.parameters(), lr=1.0), plan, features, seed=0, reproducible=True)
    assert torch.allclose(model(data.tensors[0]), head(features.tensors[0]), atol=1e-5)
    assert torch.count_nonzero(model(data.tensors[0])) > 0
