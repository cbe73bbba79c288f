"""Models in files."""

from __future__ import annotations

import pytest
import torch

from lipdp import models, nn
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.saved import load, save_model
from lipdp.training.checkpoint import save_checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_comes_back_as_it_was(tmp_path, dtype):
    model = models.create("lenet", input_shape=(1, 8, 8), classes=5, channels=[4, 8], hidden=16, clip=0.1).to(dtype)
    model[2].weight.requires_grad_(False)
    save_model(model, tmp_path / "model")
    again = load(tmp_path / "model")
    x = torch.randn(3, 1, 8, 8, dtype=dtype)
    assert not again.training
    assert torch.equal(again(x), model.eval()(x))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert str(again) == str(model)
    save_model(again, tmp_path / "again")  # what was loaded can be saved
    assert torch.equal(load(tmp_path / "again")(x), model(x))


def test_other_models_are_refused_with_a_way_out(tmp_path):
    with pytest.raises(ConfigurationError, match=r"state_dict\(\).*lipdp\.export"):
        save_model(nn.Sequential(nn.SpectralLinear(2, 2)), tmp_path / "model")
    model = models.create("mlp", input_shape=(4,), classes=2, hidden=torch.tensor([4]).tolist())
    save_model(model, tmp_path / "model")
    model.lipdp_config["options"]["hidden"] = torch.tensor([4])
    with pytest.raises(ConfigurationError, match="not plain data"):
        save_model(model, tmp_path / "model")


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "model"
    save_checkpoint({"weights": {}}, path)
    with pytest.raises(CheckpointError, match="something else than a model"):
        load(path)
    save_model(models.create("mlp", input_shape=(4,), classes=2, hidden=(4,)), path)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    with pytest.raises(CheckpointError, match="can't be read"):
        load(tmp_path / "nothing")


def test_weights_that_do_not_fit(tmp_path):
    model = models.create("mlp", input_shape=(4,), classes=2, hidden=(4,))
    model.lipdp_config["options"]["hidden"] = (6,)
    save_model(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="do not fit"):
        load(tmp_path / "model")
