"""Every field of a saved model with hostile values: refused clearly, or harmless, never a raw exception.

Harmless: the model's weights are inside their sets and everything in it is finite, so bounds and certificates hold for it.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

import lipdp
from lipdp import losses, models
from lipdp.errors import CheckpointError, LipdpError, LipdpWarning
from lipdp.parametrize import Constrained
from lipdp.saved import load, save_model
from lipdp.training.checkpoint import load_checkpoint, save_checkpoint

from ..hostile import all_edits, refused_or

CASES = {
    "lenet": {"input_shape": (1, 8, 8), "classes": 3, "channels": [4, 8], "hidden": 8, "clip": 0.1},
    "mlp": {"input_shape": (4,), "classes": 2, "hidden": (6,)},
    "tabular": {"input_shape": (5,), "classes": 2, "standardise": True, "fourier": 16, "hidden": (4,)},
}


@functools.cache
def made(name):
    torch.manual_seed(0)
    model = models.create(name, **CASES[name])
    if name == "tabular":
        model[1].set_statistics(torch.zeros(5), torch.ones(5))
    next(iter(model.parameters())).requires_grad_(False)
    return model


def harmless(name, model):
    for module in model.modules():
        assert not isinstance(module, Constrained) or module.is_inside()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    config = model.lipdp_config
    draw = torch.Generator().manual_seed(0)
    dtype = next(p.dtype for p in model.parameters())
    x = torch.randn(64, *config["input_shape"], generator=draw, dtype=torch.float64).to(dtype)
    y = torch.zeros(64, dtype=torch.long)
    outputs = model(x)
    assert outputs.shape[0] == 64
    # What the calculus says of it holds: no example's gradient is above its bound.
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    bounds = lipdp.sensitivities(model, losses.CrossEntropy())
    for row in range(4):
        model.zero_grad()
        losses.CrossEntropy()(model(x[row : row + 1]), y[:1]).sum().backward()
        for own, parameter in trained.items():
            assert parameter.grad is None or float(parameter.grad.double().norm()) <= bounds[own] * (1 + 1e-2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_edited_models_are_refused_or_harmless(name, tmp_path):
    file = tmp_path / "model"
    save_model(made(name), file)
    content, outcomes, failures = load_checkpoint(file), {"refused": 0, "harmless": 0}, []

    def use(edited):
        save_checkpoint(edited, file)
        return load(file)

    for what, edited in all_edits(content, 1, seed=len(name)):
        try:
            outcomes[refused_or(what, use, edited, functools.partial(harmless, name))] += 1
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, f"{len(failures)} of {sum(outcomes.values()) + len(failures)}:\n" + "\n".join(failures[:40])
    print(name, outcomes)
    assert outcomes["refused"] > 0


@pytest.mark.parametrize("name", CASES)
def test_the_harness_accepts_the_model_as_it_is(name, tmp_path):
    save_model(made(name), tmp_path / "model")
    harmless(name, load(tmp_path / "model"))


def test_weights_outside_of_their_sets_are_projected_with_a_warning(tmp_path):
    model = models.create("mlp", input_shape=(4,), classes=2, hidden=(6,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7)
    save_model(model, tmp_path / "model")
    with pytest.warns(LipdpWarning, match="outside of their constraint sets"):
        again = load(tmp_path / "model")
    assert all(float(torch.linalg.matrix_norm(p, 2)) <= 1 for p in again.parameters() if p.ndim == 2)


@pytest.mark.parametrize("size", [2**20, 2**40])
def test_numbers_in_a_file_do_not_fill_up_the_memory(tmp_path, size):
    save_model(made("mlp"), tmp_path / "model")
    content = load_checkpoint(tmp_path / "model")
    content["config"]["options"]["hidden"] = [size, size]
    save_checkpoint(content, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"can't be built|do not fit|numbers that no model has"):
        load(tmp_path / "model")


def test_negative_deviations_are_refused_by_the_calculus(tmp_path):
    """The gain of a standardisation is one over its least deviation: of one below 0 nothing was left."""
    save_model(made("tabular"), tmp_path / "model")
    content = load_checkpoint(tmp_path / "model")
    content["state"]["1.std"] = torch.tensor([1.0, 1.0, -1e-6, 1.0, 1.0])
    save_checkpoint(content, tmp_path / "model")
    with pytest.raises(LipdpError, match="deviations"):
        lipdp.sensitivities(load(tmp_path / "model"), losses.CrossEntropy())
    assert math.isfinite(max(lipdp.sensitivities(made("tabular"), losses.CrossEntropy()).values()))
