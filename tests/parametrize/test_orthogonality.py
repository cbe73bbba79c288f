"""Orthogonal layers trained privately: singular values stay where they should, and what is released is what was planned."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch

import lipdp
from lipdp import nn
from lipdp.parametrize import constraint as C
from lipdp.parametrize import effective_leaves, pull_back
from tests.doc_tools import DOCS, load_tool
from tests.training.test_reparametrised import LOSS, Recorder, planned

MAPS = [C.AOC(), C.SOC(3), C.CircularFFT(6)]
named = pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_orthogonality")


def test_orthogonal_layers_stay_orthogonal_under_noisy_steps(tool: ModuleType) -> None:
    for layer, shape, exact in tool.LAYERS:
        moved = tool.train(layer, shape, steps=4)
        found = tool.measure(layer, shape)
        assert moved > 0.01
        assert found.largest <= 1 + 1e-13
        if exact:
            assert found.smallest >= 0.95, layer


def test_the_page_holds_a_run_of_200_steps_that_shows_the_claim(tool: ModuleType) -> None:
    text = (DOCS / "parametrisations.md").read_text().split(tool.START)[1].split(tool.END)[0]
    assert "After 200 private steps" in text
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(tool.LAYERS)
    kept: dict[str, list[float]] = {}
    for name, chosen, exact, smallest, largest, gradient, _ in rows:
        assert float(largest) <= 1
        if exact == "yes":
            assert float(smallest) >= 0.95
        if "circular" in name and "stride=(1, 1)" in name:
            kept[chosen] = [float(number) for number in re.findall(r"[0-9.]+", gradient)]
    assert all(abs(value - 1) <= 1e-3 for value in kept["AOC"])
    assert all(value < 0.5 for value in kept["Bjorck of the reshaped kernel (RKO)"])


def network(pi: Any, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((2, 6, 6)),
        nn.SpectralConv2d(2, 4, 3, padding="same", padding_mode="circular", bias=False, constraint=pi, dtype=dtype),
        nn.GroupSort(2),
        nn.Flatten(),
        nn.SpectralLinear(144, 10, bias=False, dtype=dtype),
    )


def data(count: int = 64, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, x.flatten(1)[:, :10].argmax(1)


@named
def test_the_engine_noises_the_kernel_and_pulls_it_back_to_theta(pi: Any) -> None:
    model = network(pi)
    optimizer = Recorder(model.parameters())
    x, y = data(50)
    with effective_leaves(model) as leaves:
        wanted = {**{name: p for name, p in model.named_parameters() if name not in leaves}, **leaves}
        total = torch.autograd.grad(LOSS(model(x), y).sum(), list(wanted.values()))
    expected = pull_back(model, {name: g / 64 for name, g in zip(wanted, total, strict=True)})
    lipdp.PrivacyEngine(model, LOSS, optimizer, planned(model, noise_multiplier=1e-4), seed=0, reproducible=True).step(
        x, y, sample="own"
    )
    for found, (name, parameter) in zip(optimizer.seen[0], model.named_parameters(), strict=True):
        assert found.shape == parameter.shape
        assert torch.allclose(found, expected[name], atol=2e-3), name


@named
def test_noise_lives_in_the_space_of_the_kernel(pi: Any) -> None:
    """On empty batches the release is pure noise, of the planned size in every entry of W, whose shape is not θ's."""
    model = network(pi)
    plan = planned(model)
    released: list[dict[str, torch.Tensor]] = []
    engine = lipdp.PrivacyEngine(model, LOSS, Recorder(model.parameters()), plan, seed=3, reproducible=True)
    inner = engine._run.query.gradients
    engine._run.query.gradients = lambda noised: released.append(dict(noised)) or inner(noised)  # type: ignore[method-assign]
    x, y = data()
    for _ in range(8):
        engine.step(x[:0], y[:0], sample="own")
    name, weight = "1.weight", model[1].effective("weight")
    assert released[0][name].shape == weight.shape
    assert next(group.size for group in plan.groups if group.name == name) == weight.numel()
    drawn = torch.cat([step[name].flatten() for step in released]) * 64 / plan.noise_stds[name]
    # A chi-square of n draws is within 6 deviations √(2n) of n, but for one run in 5e8.
    assert abs(float(drawn.square().sum()) - drawn.numel()) < 6 * (2 * drawn.numel()) ** 0.5


def test_clipping_refuses_them() -> None:
    with pytest.raises(lipdp.errors.UnsupportedError, match="reparametrised"):
        lipdp.plan(
            network(C.AOC()), LOSS, dataset_size=256, batch_size=64, delta=1e-4, noise_multiplier=1.0, steps=5,
            method="bookkeeping", max_grad_norm=1.0,
        )  # fmt: skip
