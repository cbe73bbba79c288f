"""Splits and checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from lipdp import data
from lipdp.data.files import stratified
from lipdp.errors import ConfigurationError, DataError


def numbered(labels: torch.Tensor) -> TensorDataset:
    return TensorDataset(torch.arange(len(labels), dtype=torch.float32), labels)


@given(
    labels=st.lists(st.integers(-2, 5), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**40),
)
def test_stratified_is_a_partition_with_even_shares(labels: list[int], fraction: float, seed: int) -> None:
    y = torch.tensor(labels)
    train, held = stratified(y, fraction, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(labels)))
    assert train.tolist() == sorted(train.tolist())
    assert len(held) == round(fraction * len(labels))
    for label in set(labels):
        assert abs(int((y[held] == label).sum()) - fraction * labels.count(label)) < 1 + 1e-6


def test_split_returns_whole_examples() -> None:
    dataset = numbered(torch.arange(100) % 4)
    train, validation = data.split(dataset, 0.2)
    assert isinstance(train, TensorDataset)
    assert (len(train), len(validation)) == (80, 20)
    assert validation.tensors[1].bincount().tolist() == [5] * 4
    for part in (train, validation):
        assert torch.equal(part.tensors[0] % 4, part.tensors[1].float())


def test_split_is_fixed_by_its_seed() -> None:
    dataset = numbered(torch.arange(50) % 2)

    def chosen(**arguments: Any) -> list[float]:
        return data.split(dataset, 0.1, **arguments)[1].tensors[0].tolist()

    assert chosen() == chosen(seed=0) != chosen(seed=1)
    state = torch.random.get_rng_state()
    # For ever: a published split must not move with a new version of numpy or torch.
    assert chosen() == [2, 3, 11, 20, 48]
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


def test_split_without_labels() -> None:
    dataset = TensorDataset(torch.rand(10, 3))
    with pytest.raises(ConfigurationError, match="stratify=False"):
        data.split(dataset, 0.3)
    train, validation = data.split(dataset, 0.3, stratify=False)
    assert (len(train), len(validation)) == (7, 3)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), float("inf"), True, "0.1", None, 0.001, 0.999])
def test_silly_fractions(fraction: Any) -> None:
    with pytest.raises(ConfigurationError, match="fraction="):
        data.split(numbered(torch.arange(10) % 2), fraction)


@pytest.mark.parametrize("seed", [-1, 0.5, None, True])
def test_silly_seeds(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="seed is"):
        data.split(numbered(torch.arange(10) % 2), 0.5, seed)


def test_other_datasets_are_refused() -> None:
    class Other(Dataset[int]):
        pass

    for function in (lambda d: data.split(d, 0.1), data.require_finite):
        with pytest.raises(ConfigurationError, match=r"TensorDataset, not a Other"):
            function(Other())  # type: ignore[no-untyped-call]


def test_finite_datasets_pass() -> None:
    data.require_finite(TensorDataset(torch.rand(5, 2), torch.arange(5)))
    data.require_finite(TensorDataset(torch.rand(5), torch.rand(5, 2, 2).half()))
    data.require_finite(TensorDataset(torch.rand(0, 3)))
    data.require_finite(TensorDataset(torch.rand(3, 0)))
    data.require_finite(TensorDataset(torch.full((2, 2), 3e38)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_not_located(value: float) -> None:
    x, z = torch.zeros(10_000, 1, 2), torch.zeros(10_000)
    x[9000] = value
    x[5000, 0, 1] = value
    z[5000] = value
    z[7] = value
    with pytest.raises(DataError, match=r"^an example contains a NaN or an infinity"):
        data.require_finite(TensorDataset(x, torch.arange(10_000), z))
