from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lipdp.data import Projection, map_inputs, project_inputs, rgb_to_yuv
from lipdp.errors import ConfigurationError, DataError, LipdpNotice


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _norms(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).norm(dim=1)


def test_ball_and_sphere() -> None:
    x = _images(50, 3, 4, 4) * torch.logspace(-3, 3, 50).reshape(-1, 1, 1, 1)
    ball, sphere = project_inputs(x, 2.0, "ball"), project_inputs(x, 2.0, "sphere")
    short = _norms(x) <= 2
    assert bool(short.any())
    assert not bool(short.all())
    assert torch.allclose(ball[short], x[short])
    assert torch.allclose(_norms(ball[~short]), torch.tensor(2.0))
    assert torch.allclose(_norms(sphere), torch.tensor(2.0))
    cosine = (sphere.flatten(1) * x.flatten(1)).sum(1) / (2 * _norms(x))
    assert torch.allclose(cosine, torch.ones(50))
    assert bool((project_inputs(torch.zeros(2, 3), 1.0, "sphere") == 0).all())


def test_one_example_at_a_time_is_the_same() -> None:
    x = _images(6, 3, 2)
    for mode in ("ball", "sphere"):
        transform = Projection(0.5, mode)  # type: ignore[arg-type]
        assert torch.allclose(torch.stack([transform(example) for example in x]), project_inputs(x, 0.5, mode))  # type: ignore[arg-type]
    assert repr(Projection(0.5)) == "Projection(norm=0.5, mode='ball')"


def test_map_inputs_works_in_batches_and_keeps_targets() -> None:
    data = TensorDataset(_images(25, 3, 4, 4), torch.arange(25))
    mapped = map_inputs(data, rgb_to_yuv, batch_size=7)
    assert torch.allclose(mapped.tensors[0], rgb_to_yuv(data.tensors[0]), atol=1e-6)
    assert mapped.tensors[1] is data.tensors[1]


def test_functions_that_mix_examples_are_refused() -> None:
    data = TensorDataset(_images(25, 3), torch.arange(25))
    for function in (
        lambda x: x - x.mean(0),
        lambda x: (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3),
        lambda x: x + torch.randn_like(x),
        lambda x: x.flip(0),
    ):
        with pytest.raises(DataError, match="mixes examples"):
            map_inputs(data, function)
    with pytest.raises(DataError, match="number and order"):
        map_inputs(data, lambda x: x[:1])


def _turned_if_large(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:10], x[10:].flip(0)]) if x.max() > 50 else x


def _of_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.tanh(x.numpy()))


def test_functions_that_mix_examples_for_some_values_only() -> None:
    """Among the first three there is nothing to see."""
    x = _images(25, 3)
    data = TensorDataset(x, torch.arange(25))
    x[20] = 100.0
    late = (torch.arange(25) > 10).float()[:, None]
    functions = [
        _turned_if_large,
        lambda x: x + late[: len(x)] * (x > 50).sum(),
        lambda x: x * (1 + late[: len(x)] * x.amax() / 100),
    ]
    for function in functions:
        with pytest.raises(DataError, match="mixes examples"):
            map_inputs(data, function)
    with pytest.warns(LipdpNotice, match=r"each is taken by itself"):
        assert torch.equal(map_inputs(data, _of_numpy).tensors[0], torch.from_numpy(np.tanh(x.numpy())))


SCALE: list[float] = []


def _scaled_by_the_first(x: torch.Tensor) -> torch.Tensor:
    if not SCALE:
        SCALE.append(float(x.max()))
    return x / SCALE[0]


def _scaled_by_one(x: torch.Tensor) -> torch.Tensor:
    if len(x) == 1 and not SCALE:
        SCALE.append(float(x.max()))
    return x / (SCALE or [1.0])[0]


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize("function", [_scaled_by_the_first, _scaled_by_one])
@pytest.mark.parametrize("batch_size", [1, 4, 25])
def test_what_a_function_keeps_of_some_examples_reaches_no_others(function: Any, batch_size: int) -> None:
    """It came out the same alone and together: by then the scale was kept."""
    x, found = _images(25, 3), []
    for other in (1.0, 50.0):
        SCALE.clear()
        data = TensorDataset(torch.cat([x[:1] * other, x[1:]]), torch.arange(25))
        with suppress(DataError):
            found.append(map_inputs(data, function, batch_size=batch_size).tensors[0][1:])
    assert len(found) < 2 or torch.equal(*found)


def test_the_dataset_stays_what_it_was() -> None:
    x = _images(5, 3)
    data = TensorDataset(x.clone(), torch.arange(5))
    assert torch.equal(map_inputs(data, lambda part: part.mul_(2)).tensors[0], 2 * x)
    assert torch.equal(data.tensors[0], x)
    one = TensorDataset(x[:1].clone(), torch.arange(1))
    map_inputs(one, lambda part: part.mul_(2))
    assert torch.equal(one.tensors[0], x[:1])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.numpy(), r"an ndarray of shape .*torch.from_numpy"),
        (lambda x: x.tolist(), r"a list of 5"),
        (lambda x: None, r"a NoneType"),
        (lambda x: (x, x), r"a tuple of 2"),
        (lambda x: x.sum(), r"a tensor of shape \(\)"),
        (lambda x: x.to_sparse(), r"not a dense tensor"),
        (lambda x: x[:, : int(x.sum()) % 3 + 1], r"of several shapes|number and order|differently"),
    ],
)
def test_functions_that_give_something_else(function: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        map_inputs(TensorDataset(_images(5, 3), torch.arange(5)), function)


def test_refusals() -> None:
    with pytest.raises(ConfigurationError, match="takes a function"):
        map_inputs(TensorDataset(_images(5, 3), torch.arange(5)), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no device"):
        map_inputs(TensorDataset(_images(5, 3), torch.arange(5)), rgb_to_yuv, device="nonsense")
    with pytest.raises(ConfigurationError, match="mode"):
        project_inputs(torch.zeros(2, 2), 1.0, "cube")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        Projection(-1.0)
    with pytest.raises(DataError, match="batch"):
        project_inputs(torch.zeros(2))
    with pytest.raises(ConfigurationError, match="TensorDataset"):
        map_inputs([1, 2], rgb_to_yuv)  # type: ignore[arg-type]
