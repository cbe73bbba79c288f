"""PrivateImageClassifier, and images of one's own on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from typer.testing import CliRunner

import lipdp
from lipdp.cli import app
from lipdp.data.images import read_images
from lipdp.errors import ConfigurationError, DataError
from lipdp.estimators import Numeric, PrivateImageClassifier, images
from lipdp.features.learned import NetworkShape, ResidualNetwork, folded_weights, write_network


def halves(count: int, side: int = 12, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images that are bright on the left, or on the right."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, count)
    left = np.arange(side) < side // 2
    x = 40 * draw.random((count, side, side)) + 150 * np.where(y[:, None, None] == 1, left, ~left)
    return x.astype(np.uint8), np.where(y == 1, "left", "right")


@pytest.fixture(scope="module")
def tiny_network(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A network of a few drawn filters, in a file."""
    file, shape = tmp_path_factory.mktemp("network") / "tiny.npz", NetworkShape((4, 6, 8), (1, 1, 1))
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lipdp.features.learned._DRAWINGS", 32)
        write_network(file, shape, folded_weights(ResidualNetwork(shape, learning=True)), 32, {"name": "tiny"})
    return str(file)


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tiny_network: str) -> None:
    """A network alone, a tiny one but for one test: patches and scattering take half a minute to set up. And short runs."""
    shipped = request.node.name == "test_defaults_learn_and_promise"

    def blocks(level: str, channels: int, mirror: bool) -> tuple[list[dict[str, Any]], int]:
        return [{"kind": "learned", "network": level if shipped else tiny_network, "flip": mirror}], 3328

    monkeypatch.setattr(images, "_blocks", blocks)
    if not shipped:
        monkeypatch.setattr(images, "_STEPS", 30)


def test_defaults_learn_and_promise() -> None:
    x, y = halves(200)
    model = lipdp.PrivateImageClassifier(epsilon=3.0).fit(x, y)
    assert model.epsilon_ <= 3
    assert model.delta_ == 1e-5
    assert model.private_
    assert model.score(*halves(40, seed=1)) > 0.95
    shares = model.predict_proba(x[:5])
    assert shares.shape == (5, 2)
    assert np.allclose(shares.sum(1), 1)
    assert "not centred by their mean" in model.report()
    assert [group.source for group in model.plan_.groups] == ["proved"]


def test_what_decides_is_public() -> None:
    one = PrivateImageClassifier(epsilon=3.0)._chosen(100_000, 3)
    assert one.settings["centre"] == "private"
    assert one.settings["blocks"][0]["flip"]
    other = PrivateImageClassifier(epsilon=3.0)._chosen(1000, 1)
    assert other.settings["centre"] == "drawn"
    assert not other.settings["blocks"][0]["flip"]
    assert not PrivateImageClassifier(mirror=False)._chosen(1000, 3).settings["blocks"][0]["flip"]
    with pytest.raises(ConfigurationError, match="features"):
        PrivateImageClassifier(features="huge")._chosen(10, 1)
    with pytest.raises(ConfigurationError, match="mirror"):
        PrivateImageClassifier(mirror="yes")._chosen(10, 1)  # type: ignore[arg-type]


def test_the_rate_scales_with_the_number_of_images() -> None:
    rates = []
    for records in (1000, 10_000):
        model = lipdp.models.create(
            "patches-linear", input_shape=(1, 32, 32), classes=2, blocks=images._blocks("small", 1, False)[0]
        )
        plan = lipdp.plan(
            model, lipdp.losses.CrossEntropy(), dataset_size=records, batch_size=records, delta=1e-5, epsilon=3.0, steps=150
        )
        rates.append(images._optimizer(model, plan)[0].param_groups[0]["lr"])
    assert rates[1] == pytest.approx(10 * rates[0], rel=0.02)


@pytest.mark.parametrize("layout", ["grey", "last", "first", "float", "torch"])
def test_layouts_are_the_same_images(layout: str) -> None:
    x, _ = halves(3)
    colour = np.repeat(x[..., None], 3, axis=3)
    given: Any = {
        "grey": x,
        "last": colour,
        "first": np.moveaxis(colour, 3, 1),
        "float": colour.astype(np.float64) / 255,
        "torch": torch.from_numpy(np.moveaxis(colour, 3, 1).copy()),
    }[layout]
    sized = images._sized(images._channels_first(given))
    assert sized.shape == (3, 1 if layout == "grey" else 3, 32, 32)
    wanted = images._sized(images._channels_first(x)).expand_as(sized)
    torch.testing.assert_close(sized, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((4, 10)), "height, width"),
        (np.zeros((4, 16, 16, 2)), "1 or 3 channels"),
        (np.zeros((4, 4, 4)), "8 to 1024"),
        (np.zeros((0, 16, 16)), "0 images"),
        (np.full((4, 16, 16), 2.0), "from 0 to 1"),
        (np.full((4, 16, 16), np.nan), "from 0 to 1"),
        (np.zeros((4, 16, 16), dtype=np.int64), "uint8"),
        (np.array([["a"]]), "array of numbers"),
    ],
)
def test_what_is_no_image_is_told(x: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        PrivateImageClassifier().fit(x, np.arange(len(x)) % 2)


def test_labels() -> None:
    x, y = halves(6)
    with pytest.raises(DataError, match="X has 6 images and y has 5"):
        PrivateImageClassifier().fit(x, y[:5])
    with pytest.raises(DataError, match="nothing to tell apart"):
        PrivateImageClassifier().fit(x, np.zeros(6))
    with pytest.raises(DataError, match="not among the 2 declared"):
        PrivateImageClassifier(classes=["up", "down"]).fit(x, y)
    with pytest.raises(DataError, match="requires y"):
        PrivateImageClassifier().fit(x, None)


def test_sklearn_can_clone_it_and_other_sizes_are_refused() -> None:
    x, y = halves(60)
    model = clone(PrivateImageClassifier(epsilon=8.0, random_state=1, reproducible=True)).fit(x, y)
    assert not model.private_
    with pytest.raises(DataError, match="fitted on images of shape"):
        model.predict(np.zeros((2, 16, 16), dtype=np.uint8))


def pictures(folder: Path, count: int) -> None:
    image = pytest.importorskip("PIL.Image")
    x, y = halves(count, side=16)
    for number, (pixels, label) in enumerate(zip(x, y, strict=True)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / label / f"{number}.png")


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    pictures(tmp_path / "all", 30)
    x, y = read_images(tmp_path / "all")
    assert x.shape == (30, 16, 16)
    assert sorted(set(y)) == ["left", "right"]
    with pytest.raises(DataError, match="LABEL/picture"):
        read_images(tmp_path)
    (tmp_path / "all" / "left" / "bad.png").write_text("no picture")
    with pytest.raises(DataError, match=r"unreadable_pictures"):
        read_images(tmp_path / "all")


def test_a_folder_is_fitted_judged_and_predicted(tmp_path: Path) -> None:
    pictures(tmp_path / "train", 120)
    pictures(tmp_path / "test", 20)
    image = pytest.importorskip("PIL.Image")
    model = lipdp.PrivateClassifier(epsilon=8.0).fit(tmp_path / "train")
    assert list(model.classes_) == ["left", "right"]
    assert model.score(str(tmp_path / "test")) > 0.9
    (tmp_path / "new").mkdir()  # no labels, in colour, another size: each picture is brought to what was fitted
    for name, file in (("a", next((tmp_path / "test" / "left").iterdir())), ("b", next((tmp_path / "test" / "right").iterdir()))):
        image.open(file).convert("RGB").resize((24, 20)).save(tmp_path / "new" / f"{name}.png")
    assert list(model.predict(tmp_path / "new")) == ["left", "right"]
    with pytest.raises(DataError, match="LABEL/picture"):
        model.score(tmp_path / "new")
    with pytest.raises(DataError, match="LABEL/picture"):
        lipdp.PrivateClassifier().fit(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures"):
        model.predict(tmp_path / "empty")


@pytest.mark.parametrize("layout", ["torch", "list"])
def test_the_classifier_takes_images_as_they_come_and_says_what_it_chose(layout: str) -> None:
    x, y = halves(200)
    given: Any = torch.from_numpy(x)[:, None] if layout == "torch" else list(x)
    model = lipdp.PrivateClassifier(3.0, random_state=1).fit(given, y)
    assert model.choice_.method == "features"
    for words in ("X holds images of 1 × 12 × 12", "fixed public features", "small ones, what runs anywhere"):
        assert words in model.choice_.why
    assert model.epsilon_ <= 3
    test_x, test_y = halves(40, seed=1)
    assert model.score(test_x, test_y) > 0.95
    assert model.decision_function(test_x).shape == (40,)
    shares = model.predict_proba(test_x)
    assert np.allclose(shares.sum(1), 1)
    assert ((shares[:, 1] > 0.5) == (model.predict(test_x) == model.classes_[1])).all()
    assert "# PrivateClassifier" in model.report()
    assert "features" in model.report()
    with pytest.raises(DataError, match="height, width"):
        model.predict(np.zeros((3, 144)))


def test_a_table_after_images_and_images_after_a_table() -> None:
    x, y = halves(60)
    rows = x.reshape(len(x), -1).astype(float)
    model = lipdp.PrivateClassifier(8.0).set_params(schema=Numeric(0, 255)).fit(rows, y)
    with pytest.raises(DataError, match="was fitted on a table"):
        model.predict(x)
    model.set_params(schema=None).fit(x, y)
    assert not hasattr(model, "n_features_in_")
    assert not hasattr(model, "schema_")
    model.set_params(schema=Numeric(0, 255)).fit(rows, y)
    assert not hasattr(model, "images_")
    assert model.predict(rows).shape == (60,)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"method": "kernel"}, "these are images"), ({"schema": Numeric(0, 1)}, "leave it out"), ({"method": "svm"}, "for tables")],
)
def test_what_is_a_tables_is_refused_for_images(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        lipdp.PrivateClassifier(**change).fit(*halves(10))


def test_what_is_for_images_is_refused_for_tables() -> None:
    with pytest.raises(ConfigurationError, match="this is a table"):
        lipdp.PrivateClassifier(method="features").fit(np.zeros((4, 3)), [0, 1, 0, 1])
    with pytest.raises(DataError, match="PrivateRegressor is for tables"):
        lipdp.PrivateRegressor(target=(0, 1)).fit(np.zeros((4, 3, 8, 8)), np.zeros(4))


def test_the_command_line(tmp_path: Path) -> None:
    x, y = halves(200)
    np.savez(tmp_path / "mine.npz", images=x, labels=y)
    command = ["train", "--images", str(tmp_path / "mine.npz"), "--epsilon", "3", "--validation-fraction", "0.2", "--json"]
    told = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "run")])
    assert told.exit_code == 0, told.output
    report = json.loads(told.output[told.output.index("{") :])
    assert report["accuracy"] > 0.9
    assert report["epsilon"] <= 3
    assert report["records"] == 160
    assert (tmp_path / "run" / "report.md").exists()
    for wrong in (
        ["train"],
        ["train", "digits", "--images", "x"],
        [*command, "--epochs", "3"],
        ["train", "--images", "nowhere.npz"],
    ):
        assert CliRunner().invoke(app, wrong).exit_code == 2, wrong


def test_features_train_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lipdp.features import learned

    monkeypatch.setitem(learned.SHAPES, "large", learned.NetworkShape((4, 6, 8), (1, 1, 1)))
    monkeypatch.setattr(learned, "_DRAWINGS", 16)
    file = tmp_path / "mine.npz"
    told = CliRunner().invoke(
        app, ["features", "train", "large", "--steps", "1", "--batch", "8", "--pool", "16", "--output", str(file), "--json"]
    )
    assert told.exit_code == 0, told.output
    assert file.exists()
    assert file.with_name("mine-48.npz").exists()
