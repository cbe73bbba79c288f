"""Heads on scattering features: their bounds, and that training on stored features is training the network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, models, nn
from lipdp.bounds import analyse
from lipdp.data import Flip, PrecomputedCopies, RandomCrop, Shifts
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.features.drawings import texture_images
from lipdp.features.front import FrozenFeatures, extract_features, split_front
from lipdp.features.scattering import Scattering2d
from tests.soundness.harness import attack

SMALL: dict[str, Any] = {"scales": ((1, 2),), "order": 1}


def images(count: int = 12, shape: tuple[int, ...] = (1, 8, 8)) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(count, *shape, generator=draw), torch.arange(count) % 3)


# ------------------------------------------------------------------ textures


def test_textures_are_public_constants() -> None:
    first, again = texture_images((3, 8, 10), 16), texture_images((3, 8, 10), 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, texture_images((3, 8, 10), 16, seed=1))
    assert first.shape == (16, 3, 8, 10)
    assert 0 <= float(first.min()) < float(first.max()) <= 1
    spectrum = torch.fft.fft2(texture_images((1, 32, 32), 64)[:, 0]).abs().mean(0)
    assert float(spectrum[0, 2] / spectrum[0, 8]) == pytest.approx(4, rel=0.5)  # amplitudes fall with frequency
    with pytest.raises(ConfigurationError, match="images"):
        texture_images((8, 8))


def test_textures_even_channels_out() -> None:
    front = Scattering2d((1, 16, 16), L=4)
    seen = front(texture_images((1, 16, 16), 256)).double()
    mean, std = seen.mean((0, 2, 3)), seen.std((0, 2, 3))
    assert float(std.max() / std.min()) > 30  # what has to be evened out
    other = front(texture_images((1, 16, 16), 64, seed=3))
    spread = ((other.double() - mean[:, None, None]) / std[:, None, None]).std((0, 2, 3))
    assert float(spread.min()) > 0.8
    assert float(spread.max()) < 1.25


# ------------------------------------------------------------------ heads


@pytest.mark.parametrize("name", ["scattering-linear", "scattering-mlp"])
@pytest.mark.parametrize("statistics", ["none", "textures", "private"])
def test_sensitivities_are_the_clips(name: str, statistics: str) -> None:
    options: dict[str, Any] = {"hidden": (6, 4), "hidden_clip": 0.3} if name == "scattering-mlp" else {}
    model = models.create(name, input_shape=(1, 8, 8), classes=3, clip=0.2, statistics=statistics, **SMALL, **options)
    found = list(lipdp.sensitivities(model, losses.CrossEntropy()).values())
    assert found == pytest.approx([0.3, 0.3, 0.2] if name == "scattering-mlp" else [0.2])
    x = images().tensors[0]
    assert model(x).shape == (12, 3)
    assert torch.count_nonzero(model(x)) == 0  # logits start at 0
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.normal_(p)
    assert torch.allclose(model.export()(x), model(x), atol=1e-5)


def test_colour_by_default() -> None:
    front = next(iter(models.create("scattering-linear", input_shape=(3, 8, 8), classes=2, statistics="none", **SMALL)))
    assert isinstance(front, Scattering2d)
    assert front.colour == "yuv"


@pytest.mark.parametrize("name", ["scattering-linear", "scattering-mlp"])
def test_heads_hold_under_attack(name: str) -> None:
    options: dict[str, Any] = {"hidden": (3,)} if name == "scattering-mlp" else {}
    model = models.create(name, input_shape=(1, 4, 4), classes=2, **SMALL, **options)
    report = attack(split_front(model)[1], 1.0, steps=6, draws=2, starts=("random", "constant", "aligned"))
    assert report.tightness("parameter") > 0.9, str(report)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scattering-mlp", {"hidden": ()}),
        ("scattering-linear", {"statistics": "mine"}),
        ("scattering-linear", {"scales": ((5, 8),)}),
    ],
)
def test_options_that_can_not_be_meant(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        models.create(name, input_shape=(1, 8, 8), classes=3, **options)


# ------------------------------------------------------------------ stored features


def test_training_on_stored_features_is_training_the_network() -> None:
    data, loss = images(40), losses.CrossEntropy()
    model = models.create("scattering-mlp", input_shape=(1, 8, 8), classes=3, hidden=(5,), **SMALL)
    torch.nn.init.normal_(list(model.parameters())[-1])
    front, head = split_front(model)
    stored = extract_features(front, data)
    assert [*lipdp.sensitivities(head, loss).values()] == [*lipdp.sensitivities(model, loss).values()]
    for target, (x, y) in ((model, data.tensors), (head, stored.tensors)):
        loss(target(x), y).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        if target is model:
            expected = gradients
    assert len(expected) == len(gradients) == 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, gradients, strict=True))


def test_copies_are_those_of_the_images() -> None:
    data, front = images(), Scattering2d((1, 8, 8), J=1, L=2, order=1)
    copies = Shifts([(0, 0), (1, -1)], flip=True)
    features = extract_features(front, data, copies=copies, batch_size=5, dtype=torch.float64)
    assert features.tensors[0].shape == (12, 4, *front.output_shape)
    assert features.tensors[0].dtype == torch.float64
    assert torch.equal(features.tensors[1], data.tensors[1])
    expected = torch.stack([front(view(data.tensors[0])) for view in copies.views], 1)
    assert torch.allclose(features.tensors[0].float(), expected, atol=1e-6)
    with pytest.raises(ConfigurationError, match="random"):
        extract_features(front, data, copies=RandomCrop(1, 2))


def test_a_head_learns_from_copies() -> None:
    """Through plan, engine and fit, with a private standardisation: the mechanics, not the accuracy."""
    data, loss = images(60), losses.CrossEntropy()
    model = models.create("scattering-linear", input_shape=(1, 8, 8), classes=3, statistics="private", **SMALL)
    front, head = split_front(model)
    features = extract_features(front, data, copies=Flip())
    plan = lipdp.plan(
        head, loss, dataset_size=60, batch_size=30, delta=1e-3, epsilon=5.0, steps=3, statistics_budget=0.1, accountant="rdp"
    )
    history = lipdp.fit(
        head, loss, torch.optim.SGD(head.parameters(), lr=1.0), plan, features, augmentation=PrecomputedCopies(2), seed=0
    )
    assert history.epsilon <= 5
    assert torch.count_nonzero(model(data.tensors[0])) > 0  # layers are shared: the whole network has learned


def test_the_cache_knows_what_it_holds(tmp_path: Path) -> None:
    data = images()
    calls = []

    class Counted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x.flatten(1))

    module = Counted(64, 5)
    first = extract_features(module, data, cache=tmp_path)
    before = len(calls)
    again = extract_features(module, data, cache=tmp_path)
    assert len(calls) == before
    assert torch.equal(first.tensors[0], again.tensors[0])
    other = TensorDataset(data.tensors[0] + 1e-3, data.tensors[1])
    for settings in ({"dtype": torch.float64}, {"copies": Flip()}):
        extract_features(module, data, cache=tmp_path, **settings)
    extract_features(module, other, cache=tmp_path)
    with torch.no_grad():
        module.weight[0, 0] += 1
    changed = extract_features(module, data, cache=tmp_path)
    assert not torch.equal(first.tensors[0], changed.tensors[0])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 5
    assert all(file.suffix == ".pt" for file in files)  # nothing half-written is left
    for file in files:
        file.write_bytes(b"damaged")
    assert torch.equal(extract_features(module, data, cache=tmp_path).tensors[0], changed.tensors[0])


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        extract_features(Scattering2d((1, 8, 8), J=1, L=2, order=1), images(), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Mixing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


class MixingLate(torch.nn.Module):
    """Innocent where it is looked at: on numbers between 0 and 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) + (x > 50).any() * x.flatten(1).mean(0)


def test_extractors_that_mix_examples_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="mixes examples"):
        extract_features(Mixing(), images())
    large = images()
    large.tensors[0][3] = 100.0
    with pytest.raises(DataError, match="mixes examples"):
        extract_features(MixingLate(), large)
    normal = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64))
    features = extract_features(normal, images())  # evaluation mode: public statistics
    assert normal.training
    assert torch.count_nonzero(normal[1].running_mean) == 0
    assert features.tensors[0].shape == (12, 64)


@pytest.mark.parametrize("dataset", [[(1, 2)], TensorDataset(torch.rand(3, 4))])
def test_datasets_that_are_refused(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match="TensorDataset"):
        extract_features(torch.nn.Flatten(), dataset)


def test_empty_datasets() -> None:
    with pytest.raises(DataError, match="empty"):
        extract_features(torch.nn.Flatten(), TensorDataset(torch.rand(0, 4), torch.zeros(0)))


# ------------------------------------------------------------------ any frozen module


def frozen(**bounds: float) -> FrozenFeatures:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.Dropout(0.5), torch.nn.Tanh())
    return FrozenFeatures(module, (1, 8, 8), **bounds)


def test_a_frozen_module_in_front() -> None:
    front = frozen()
    model = nn.Sequential(front, nn.BoundedInput((6,)), torch.nn.Linear(6, 3, bias=False), nn.ClipGradient(0.5)).train()
    assert not front.module.training
    assert lipdp.sensitivities(model, losses.CrossEntropy()) == pytest.approx({"2.weight": 0.5})
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["2.weight"]
    assert [type(layer) for layer in split_front(model)[0]] == [FrozenFeatures]
    assert analyse(model, 1.0).lipschitz == math.inf
    front.module[1].requires_grad_(True)
    with pytest.raises(UnsupportedError, match="unfrozen"):
        lipdp.sensitivities(model, losses.CrossEntropy())


def test_what_is_known_of_a_frozen_module() -> None:
    model = nn.Sequential(frozen(norm=math.sqrt(6), lipschitz=2.0), torch.nn.Linear(6, 3, bias=False), nn.ClipGradient(1.0))
    assert lipdp.sensitivities(model, losses.CrossEntropy()) == pytest.approx({"1.weight": math.sqrt(6)})
    with pytest.raises(ConfigurationError, match="lipschitz"):
        frozen(lipschitz=-1.0)


def test_models_without_a_fixed_front() -> None:
    with pytest.raises(ConfigurationError, match="fixed front"):
        split_front(models.create("mlp", input_shape=(4,), classes=2, hidden=(4,)))
    with pytest.raises(ConfigurationError, match="fixed front"):
        split_front(nn.Sequential(torch.nn.Conv2d(1, 1, 1), frozen()))
