"""Drawings, what a network learns from them, and the features that come of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp.errors import ConfigurationError, DataError
from lipdp.features import LearnedFeatures, draw_images, learning
from lipdp.features.learned import NetworkShape, ResidualNetwork, _mixing, folded_weights, network_file, read_network, write_network
from lipdp.features.learning import Lesson, contrastive_loss, learn, learn_from, random_views

TINY = NetworkShape((4, 6, 8), (1, 1, 1))
LESSON = Lesson(steps=4, batch=8, view=16, canvas=16, pool=16, refresh=2, warm=1)


def test_drawings_follow_from_the_seed_and_use_all_their_numbers() -> None:
    first = draw_images(6, 16, seed=1)
    assert first.shape == (6, 3, 16, 16)
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1
    assert torch.equal(first, draw_images(6, 16, seed=1))
    assert not torch.equal(first, draw_images(6, 16, seed=2))
    assert float(first.std((2, 3)).min()) > 0.01, "an image without anything in it"
    with pytest.raises(ConfigurationError, match="size"):
        draw_images(1, 4)


def test_views_depend_on_their_own_image_only() -> None:
    images = draw_images(4, 16)
    other = torch.cat([images[:1], 1 - images[1:]])
    views, others = (random_views(x, 12, torch.Generator().manual_seed(3)) for x in (images, other))
    assert views.shape == (4, 3, 12, 12)
    assert torch.equal(views[0], others[0])
    assert not torch.equal(views[1], others[1])


def test_the_contrastive_loss_is_its_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(3, 5, generator=draw), torch.randn(3, 5, generator=draw)
    z = torch.nn.functional.normalize(torch.cat([first, second]), dim=1)
    total = 0.0
    for i in range(6):
        others = [math.exp(float(z[i] @ z[k]) / 0.5) for k in range(6) if k != i]
        total -= math.log(math.exp(float(z[i] @ z[(i + 3) % 6]) / 0.5) / sum(others))
    assert float(contrastive_loss(first, second, 0.5)[0]) == pytest.approx(total / 6, rel=1e-5)


def test_a_lesson_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = learn(TINY, LESSON).state_dict()
    file, save = tmp_path / "lesson.pt", learning._save

    def save_and_stop(*given: Any) -> None:
        save(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(learning, "_BETWEEN_SAVES", -1.0)
    monkeypatch.setattr(learning, "_save", save_and_stop)
    for _ in range(LESSON.steps):
        with pytest.raises(KeyboardInterrupt):
            learn(TINY, LESSON, checkpoint=file)
    network = learn(TINY, LESSON, checkpoint=file)
    for name, value in network.state_dict().items():
        assert torch.equal(value, whole[name]), name
    with pytest.raises(ConfigurationError, match="another lesson"):
        learn(TINY, Lesson(steps=5, batch=8, view=16, canvas=16, pool=16, refresh=2, warm=1), checkpoint=file)


def test_folding_changes_nothing() -> None:
    """In float64, of weights that are rounded to float32."""
    network = learn(TINY, LESSON).double()
    plain = ResidualNetwork(TINY).double()
    plain.load_state_dict(folded_weights(network))
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64) - 0.5
    for own, other in zip(network(x), plain(x), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_a_pupil_foretells_its_teacher() -> None:
    teacher = ResidualNetwork(TINY)
    teacher.load_state_dict(folded_weights(learn(TINY, LESSON)))
    errors: list[float] = []
    lesson = Lesson(steps=60, batch=16, view=16, canvas=16, pool=16, refresh=100, warm=2, rate=0.1)
    learn_from(teacher, TINY, lesson, watch=lambda step, loss, right: errors.append(loss))
    assert errors[-1] < 0.8 * errors[0]


def test_partial_whitening() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 5, generator=draw, dtype=torch.float64) @ torch.randn(5, 5, generator=draw, dtype=torch.float64)
    x = x - x.mean(0)
    mixed = x @ _mixing(x.T @ x / len(x)).T
    assert float(mixed.square().sum(1).mean()) == pytest.approx(5, rel=1e-6)

    def spread(y: torch.Tensor) -> float:
        values = torch.linalg.eigvalsh(torch.corrcoef(y.T))
        return float(values.max() / values.min())

    assert spread(mixed) < 0.5 * spread(x)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 20, 50)])
def test_features_of_images_of_any_size_one_by_one(shape: tuple[int, int, int]) -> None:
    layer = LearnedFeatures(shape)
    x = torch.rand(3, *shape)
    y = layer(x)
    assert y.shape == (3, 3328)
    torch.testing.assert_close(layer(torch.cat([x[:1], 1 - x[1:]]))[0], y[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x.flip(3)), y, rtol=1e-3, atol=1e-4)


def test_drawings_have_features_of_norm_about_one() -> None:
    images = torch.nn.functional.interpolate(draw_images(24, 64, 9), size=(32, 32), mode="bilinear", antialias=True)
    assert 0.6 < float(LearnedFeatures((3, 32, 32), flip=False)(images).norm(dim=1).mean()) < 1.4


def test_the_shipped_network_is_small_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = network_file("small")
    assert file.stat().st_size <= 4_000_000
    assert "lipdp features train" in read_network("small").about["command"]
    damaged = tmp_path / "small.npz"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    monkeypatch.setattr("lipdp.features.learned.network_file", lambda name: damaged)
    with pytest.raises(DataError, match="corrupt"):
        read_network("small")


def test_a_network_is_written_and_read(tmp_path: Path) -> None:
    network = learn(TINY, LESSON)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("lipdp.features.learned._DRAWINGS", 32)
        written = write_network(tmp_path / "tiny.npz", TINY, folded_weights(network), 16, {"name": "tiny"})
    layer = LearnedFeatures((3, 16, 16), str(tmp_path / "tiny.npz"))
    assert layer.digest == written.digest
    assert layer(torch.rand(2, 3, 16, 16)).shape == (2, written.features)
    with pytest.raises(DataError, match="lipdp features train nosuch"):
        read_network("nosuch")
    with pytest.raises(ConfigurationError, match="1 or 3 channels"):
        LearnedFeatures((2, 16, 16))


def test_a_head_on_learned_features_trains_and_exports() -> None:
    blocks = [{"kind": "learned", "weight": 1.5}, {"kind": "scattering", "J": 1, "L": 2, "flip": False}]
    model = lipdp.models.create("patches-linear", input_shape=(1, 16, 16), classes=3, blocks=blocks, centre="private", clip=0.2)
    loss = lipdp.losses.CrossEntropy()
    assert lipdp.sensitivities(model, loss) == pytest.approx({next(n for n, _ in model.named_parameters()): 0.2}, rel=1e-6)
    plan = lipdp.plan(model, loss, dataset_size=24, batch_size=24, delta=1e-3, epsilon=3.0, steps=2, statistics_budget=0.1)
    data = TensorDataset(torch.rand(24, 1, 16, 16), torch.arange(24) % 3)
    history = lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=1.0), plan, data, settle=True)
    assert history.epsilon <= 3
    x = data.tensors[0][:4]
    torch.testing.assert_close(lipdp.export(model)(x), model(x), rtol=1e-4, atol=1e-6)
    assert np.isfinite(model(x).detach().numpy()).all()
