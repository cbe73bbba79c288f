from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy import Stream, effective_multiplier, generator
from lipdp.privacy.moments import moment_sensitivities, moment_stds, moment_sums, private_moments


def _generator(seed: int = 0) -> Stream:
    return generator(seed, 0, "test")


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


shapes = st.sampled_from([(1,), (4,), (1, 5), (3, 2), (2, 3, 4)])


@given(shape=shapes, radius=st.floats(0.01, 100), scale=st.floats(1e-3, 1e6), seed=st.integers(0, 10_000), sparse=st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_record_exceeds_the_sensitivities(shape: tuple[int, ...], radius: float, scale: float, seed: int, sparse: bool) -> None:
    """Random records of all lengths: each part of the query below its bound, whatever the record is."""
    x = scale * _draw(1, *shape, seed=seed)
    if sparse:
        x = x * (x == x.abs().max())
    first, second, positions = moment_sums([x], radius)
    bounds = moment_sensitivities(radius, positions)
    assert positions == math.prod(shape[1:])
    assert float(first.norm()) <= bounds[0] * (1 + 1e-9)
    assert float(second.norm()) <= bounds[1] * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 3)])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.3, 2.0)])
def test_gradient_ascent_reaches_the_bound_and_stops_there(shape: tuple[int, ...], weights: tuple[float, float]) -> None:
    """Maximise the joint norm a²‖m1‖² + b²‖m2‖² of one record: it comes to the bound, never beyond; both parts at once."""
    radius = 1.7
    positions = math.prod(shape[1:])
    limits = moment_sensitivities(radius, positions)
    bound = math.hypot(weights[0] * limits[0], weights[1] * limits[1])
    best = 0.0
    for seed in range(4):
        x = (3 * _draw(1, *shape, seed=seed)).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.1)
        for _ in range(250):
            flat = x.reshape(shape[0], positions)
            y = flat * (radius / flat.norm().clamp_min(radius))  # an independent copy of the query, differentiable
            value = (weights[0] * y.mean(1)).square().sum() + (weights[1] * y.square().mean(1)).square().sum()
            optimizer.zero_grad()
            (-value).backward()
            optimizer.step()
        first, second, _ = moment_sums([x], radius)
        reached = math.hypot(weights[0] * float(first.norm()), weights[1] * float(second.norm()))
        assert reached <= bound * (1 + 1e-9)
        best = max(best, reached)
    assert best > 0.99 * bound


def test_one_constant_channel_attains_both_bounds() -> None:
    x = torch.zeros(1, 3, 4, 5)
    x[:, 1] = 100.0
    first, second, positions = moment_sums([x], 2.0)
    assert (float(first.norm()), float(second.norm())) == pytest.approx(moment_sensitivities(2.0, positions))


@given(radius=st.floats(0.01, 100), positions=st.integers(1, 100), z=st.floats(0.3, 50), share=st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_noise_makes_one_mechanism_of_the_multiplier(radius: float, positions: int, z: float, share: float) -> None:
    first, second = moment_sensitivities(radius, positions)
    stds = moment_stds(radius, positions, z, share)
    found = effective_multiplier({"mean": first, "square": second}, {"mean": stds[0], "square": stds[1]})
    assert z <= found <= z * (1 + 1e-6)


@given(radius=st.floats(0.01, 100), positions=st.integers(1, 100), z=st.floats(0.3, 50))
@settings(max_examples=40, deadline=None)
def test_means_alone_are_a_mechanism_of_the_same_multiplier_with_less_noise(radius: float, positions: int, z: float) -> None:
    first, _ = moment_sensitivities(radius, positions)
    alone, none = moment_stds(radius, positions, z, 1.0)
    assert math.isinf(none)
    assert z <= effective_multiplier({"mean": first}, {"mean": alone}) <= z * (1 + 1e-6)
    assert alone * math.sqrt(2) == pytest.approx(moment_stds(radius, positions, z)[0])


def test_a_release_of_means_alone_has_their_noise_and_says_nothing_of_squares() -> None:
    x = torch.tensor([1.0, -1.0]).expand(1, 4_000, 2)  # means 0, squares 1
    size, radius, z = 2, 100.0, 1e-5
    released = private_moments([x], radius=radius, multiplier=z, dataset_size=size, generator=_generator(), mean_share=1.0)
    expected = z * radius / math.sqrt(2) / size
    assert released.mean_noise == pytest.approx(expected)
    assert float(released.mean.std()) == pytest.approx(expected, rel=0.05)
    assert (released.variance, released.std, released.variance_noise) == (None, None, math.inf)


def test_equal_shares_have_the_least_relative_error() -> None:
    def relative_error(share: float) -> float:
        stds, limits = moment_stds(3.0, 7, 2.0, share), moment_sensitivities(3.0, 7)
        return (stds[0] / limits[0]) ** 2 + (stds[1] / limits[1]) ** 2

    assert all(relative_error(0.5) < relative_error(share) for share in (0.1, 0.4, 0.45, 0.55, 0.9))


def test_release_has_the_noise_that_is_accounted_for() -> None:
    """Noise of the right size on both parts, at 4,000 channels; removing it, or dividing it wrongly, shows at once."""
    x = torch.tensor([1.0, -1.0]).expand(1, 4_000, 2)  # means 0, squares 1
    size, radius, z = 2, 100.0, 1e-5
    stds = moment_stds(radius, 2, z)
    released = private_moments([x], radius=radius, multiplier=z, dataset_size=size, generator=_generator())
    assert (released.mean_noise, released.variance_noise) == pytest.approx((stds[0] / size, stds[1] / size))
    assert float(released.mean.std()) == pytest.approx(stds[0] / size, rel=0.05)
    square = released.variance + released.mean.square()
    assert float(square.std()) == pytest.approx(stds[1] / size, rel=0.05)
    assert float(square.mean()) == pytest.approx(0.5, rel=0.05)
    other = private_moments([x], radius=radius, multiplier=z, dataset_size=size, generator=_generator(1))
    assert not torch.equal(released.mean, other.mean)


def test_moments_are_those_of_the_data() -> None:
    x = _draw(2_000, 3, 4, seed=5) * torch.tensor([1.0, 0.5, 2.0])[:, None] + torch.tensor([0.0, 1.0, -1.0])[:, None]
    radius = float(x.flatten(1).norm(dim=1).max())

    def batches() -> Iterator[torch.Tensor]:
        yield from x.split(300)

    exact = private_moments(batches(), radius=radius, multiplier=1e-6, dataset_size=2_000, generator=_generator())
    flat = x.transpose(0, 1).reshape(3, -1)
    assert torch.allclose(exact.mean, flat.mean(1), atol=1e-5)
    assert torch.allclose(exact.variance, flat.var(1, correction=0), atol=1e-5)
    assert torch.allclose(exact.std, exact.variance.sqrt())
    loose = [Stream(bytes(32), bound=False) for _ in range(2)]  # the rounding of sums is another in other batches
    noisy = private_moments(batches(), radius=radius, multiplier=5.0, dataset_size=2_000, generator=loose[0])
    assert float((noisy.mean - flat.mean(1)).abs().max()) < 5 * noisy.mean_noise
    again = private_moments(x.split(7), radius=radius, multiplier=5.0, dataset_size=2_000, generator=loose[1])
    assert torch.allclose(noisy.mean, again.mean)  # batches are no part of the query


def test_sums_are_divided_by_the_public_size() -> None:
    """A neighbour has one record more; dividing by the number of records seen would not be the accounted query."""
    x = torch.ones(10, 2, 1)
    small = private_moments([x], radius=2.0, multiplier=1e-9, dataset_size=20, generator=_generator())
    assert torch.allclose(small.mean, torch.full((2,), 0.5, dtype=torch.float64), atol=1e-6)


def test_copies_are_averaged_within_the_sensitivity() -> None:
    x = 10 * _draw(1, 4, 3, 5, seed=2)
    first, second, positions = moment_sums([x], 1.0, copies=True)
    each = [moment_sums([x[:, k]], 1.0) for k in range(4)]
    assert positions == 5
    assert torch.allclose(first, torch.stack([one[0] for one in each]).mean(0))
    assert torch.allclose(second, torch.stack([one[1] for one in each]).mean(0))
    assert float(first.norm()) <= moment_sensitivities(1.0, 5)[0]


def test_records_that_are_not_finite_are_left_out() -> None:
    x = _draw(4, 3, 2)
    whole_sums = moment_sums([x[:1]], 1.0)
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = x[:2].clone()
        spoiled[1, 0, 0] = bad
        assert torch.equal(moment_sums([spoiled], 1.0)[0], whole_sums[0])
    huge = torch.full((1, 2, 2), 1e300, dtype=torch.float64)
    assert float(moment_sums([huge], 1.0)[1].norm()) <= 0.5 * (1 + 1e-9)


def test_floor_and_refusals() -> None:
    arguments = {"radius": 1.0, "multiplier": 1.0, "dataset_size": 10, "generator": _generator()}
    released = private_moments([torch.zeros(5, 3)], **arguments, variance_floor=0.2)  # type: ignore[arg-type]
    assert float(released.variance.min()) >= 0.2
    default = private_moments([torch.zeros(5, 3)], **arguments)  # type: ignore[arg-type]
    assert float(default.variance.min()) >= default.variance_noise
    empty = private_moments([torch.zeros(0, 3, 2)], **arguments)  # type: ignore[arg-type]
    assert bool((empty.mean != 0).all())  # a dataset of nobody is answered, by noise
    for wrong in ({"radius": 0.0}, {"multiplier": 0.0}, {"dataset_size": 0}, {"mean_share": 1.1}, {"variance_floor": 0.0}):
        with pytest.raises(ConfigurationError):
            private_moments([torch.zeros(5, 3)], **{**arguments, **wrong})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no batch"):
        private_moments([], **arguments)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the first one"):
        private_moments([torch.zeros(5, 3), torch.zeros(5, 4)], **arguments)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="channels"):
        private_moments([torch.zeros(5)], **arguments)  # type: ignore[arg-type]
