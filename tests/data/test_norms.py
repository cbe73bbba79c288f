from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from lipdp.data import choose_input_bound, input_norms, norm_histogram, project_inputs
from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy import generator


def _data(count: int = 4_000) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    directions = project_inputs(torch.randn(count, 3, 2, generator=draw), 1.0, "sphere")
    return TensorDataset(directions * torch.rand(count, 1, 1, generator=draw) * 4, torch.zeros(count))


def test_norms_are_the_norms() -> None:
    data = _data(5_000)
    assert torch.allclose(input_norms(data), data.tensors[0].double().flatten(1).norm(dim=1))
    assert torch.equal(input_norms(data.tensors[0]), input_norms(data))
    assert len(input_norms(torch.zeros(0, 3))) == 0


def test_histogram_and_its_figures() -> None:
    made = norm_histogram(_data(), bins=10)
    assert sum(made.counts) == 4_000
    assert len(made.edges) == 11
    assert made.mean == pytest.approx(2.0, rel=0.05)
    assert made.spread == pytest.approx(1 / math.sqrt(3), rel=0.05)
    assert made.quantiles[0.9] == pytest.approx(3.6, rel=0.05)
    assert made.tightness(4.0) == pytest.approx(0.5, rel=0.05)
    assert made.tightness(0.1) == pytest.approx(1.0, abs=0.05)


def test_it_says_loudly_that_it_is_not_private(tmp_path: Path) -> None:
    private, public = norm_histogram(_data()), norm_histogram(_data(), public=True)
    assert "NOT PRIVATE" in str(private)
    assert "NOT PRIVATE" in json.loads(private.to_json())["privacy"]
    assert "NOT PRIVATE" not in str(public)
    assert json.loads(public.to_json())["privacy"] == "public data"
    pytest.importorskip("matplotlib")
    figure = private.plot(tmp_path / "norms.png", bound=2.0)
    assert (tmp_path / "norms.png").stat().st_size > 1000
    assert figure.axes[0].get_title() == "NOT PRIVATE"


def test_awkward_data() -> None:
    sphere = norm_histogram(torch.eye(5))
    assert sum(sphere.counts) == 5
    assert sphere.spread == 0
    assert sum(norm_histogram(torch.zeros(3, 2)).counts) == 3
    assert sum(norm_histogram(torch.tensor([[1.0], [math.inf], [math.nan]])).counts) == 1
    with pytest.raises(DataError, match="finite"):
        norm_histogram(torch.tensor([[math.nan]]))
    with pytest.raises(DataError, match="tensor"):
        input_norms(torch.zeros(3))


def test_bound_from_public_data_is_exact_and_free() -> None:
    found = choose_input_bound(_data(), 0.5, public=True)
    assert found.epsilon == 0
    assert found.value == pytest.approx(float(input_norms(_data()).median()), rel=1e-3)


def test_bound_from_private_data_is_noised_and_paid_for() -> None:
    def choose(seed: int) -> float:
        draw = generator(seed, 0, "test")
        found = choose_input_bound(_data(), 0.9, largest=20.0, epsilon=0.5, generator=draw)
        assert found.epsilon == 0.5
        return found.value

    values = [choose(seed) for seed in range(5)]
    assert len(set(values)) == 5  # noised
    assert all(value == pytest.approx(3.6, rel=0.05) for value in values)
    with pytest.raises(ConfigurationError, match="release"):
        choose_input_bound(_data(), 0.9)
    with pytest.raises(ConfigurationError, match="public=True"):
        choose_input_bound(_data(), 0.9, public=True, epsilon=1.0)
