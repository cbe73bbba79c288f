"""`lipdp certify`: a trained run's certified accuracy."""

import dataclasses

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp as package
from lipdp.data import load

SHORT = ("--batch-size", "256", "--delta", "1e-4", "--set", "options.hidden=64", "--epochs", "4", "--noise-multiplier", "3")


@pytest.fixture
def run(lipdp, tmp_path):
    done = lipdp("train", "digits-mlp", *SHORT, "--seed", "1", "--output", tmp_path / "run", "--json")
    assert done.code == 0
    assert "model.lipdp" in done.json["files"]
    return tmp_path / "run", done.json


def test_a_run_is_certified_on_its_test_part(lipdp, run):
    folder, trained = run
    found = lipdp("certify", folder, "--radii", "0,8,32,100000", "--json").json
    shares = list(found["certified_accuracy"].values())
    assert found["dataset"] == "digits"
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[0] <= trained["accuracy"]  # a tie of two outputs has no radius
    assert shares[-1] == 0
    model = package.load(folder / "model.lipdp")
    x, y = load("digits")[1].tensors
    radii = package.certify(model, x, y)
    assert shares[2] == pytest.approx(float((radii > 32 / 255).double().mean()))
    assert found["median_radius"] == pytest.approx(float(radii.median()))


def test_the_table_and_a_file_of_its_own(lipdp, run, tmp_path):
    folder, _ = run
    text = lipdp("certify", folder, "--examples", "50").stdout
    assert "on 50 test examples of digits" in text.replace("\n", " ")
    assert "16/255" in text
    torch.manual_seed(0)
    file = tmp_path / "mine.lipdp"
    package.save_model(package.models.create("mlp", input_shape=(1, 8, 8), classes=10, hidden=(16,)), file)
    assert lipdp("certify", file, "--dataset", "digits", "--json").code == 0
    refused = lipdp("certify", file)
    assert refused.code == 2
    assert "give --dataset" in refused.stderr


def test_what_is_not_there_is_named(lipdp, tmp_path):
    missing = lipdp("certify", tmp_path)
    assert missing.code == 2
    assert "no model.lipdp in the folder" in missing.stderr.replace("\n", " ")
    assert "no file" in lipdp("certify", tmp_path / "nothing.lipdp").stderr
    assert "--radii takes numbers" in lipdp("certify", tmp_path, "--radii", "a,b").stderr


def test_two_classes_have_a_certified_auroc(lipdp, tmp_path, monkeypatch):
    train, test, info = load("digits")
    zero_or_not = [TensorDataset(part.tensors[0], (part.tensors[1] == 0).long()) for part in (train, test)]
    known = dataclasses.replace(info, classes=2, class_names=("other", "zero"))
    monkeypatch.setattr(package.data, "load", lambda *_, **__: (*zero_or_not, known))
    torch.manual_seed(0)
    file, loss = tmp_path / "zeros.lipdp", package.losses.CrossEntropy(8.0)
    model = package.models.create("mlp", input_shape=(1, 8, 8), classes=2, hidden=(16,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(zero_or_not[0].tensors[0]), zero_or_not[0].tensors[1]).mean().backward()
        optimizer.step()
        package.parametrize.project_(model)
    package.save_model(model, file)
    found = lipdp("certify", file, "--dataset", "digits", "--radii", "0,16,64", "--json").json
    x, y = zero_or_not[1].tensors
    expected = package.certified_auroc(package.load(file), x, y, (0.0, 16 / 255, 64 / 255))
    assert list(found["certified_auroc"].values()) == pytest.approx(list(expected.values()))
    assert expected[0.0] > 0.95
    assert expected[0.0] > expected[64 / 255]
    text = lipdp("certify", file, "--dataset", "digits", "--radii", "0,16").stdout
    assert "certified AUROC" in text
