"""The variance about a private centre: its sensitivity attacked, its losses simulated, its ratio to plain noise searched."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch

import lipdp
import lipdp.mechanisms.mechanism
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.mechanisms import Settings, learn
from lipdp.mechanisms.centred import CentredMechanism
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.worst import truth_losses
from tests.mechanisms.common import plain_mechanisms

PLACES = 2**30


def centred(n=500, epsilon=1.0, share=0.1, reach=2.5, noise="staircase", bounds=(0.0, 1.0)):
    return CentredMechanism.of(Problem.of("variance", epsilon, n, bounds), share, reach, noise)


def hostile_pairs(n, generator):
    """Datasets with a record replaced: lumps at few places, ends among them."""
    places = torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), torch.rand(3, dtype=torch.float64, generator=generator)])
    for old, new in product(places, places):
        share = float(torch.rand(1, generator=generator))
        base = torch.where(
            torch.rand(n - 1, generator=generator) < share, places[2], places[torch.randint(5, (1,), generator=generator)]
        )
        yield torch.cat([base, old[None]])[None], torch.cat([base, new[None]])[None]


@pytest.mark.parametrize("n", [2, 3, 10, 200])
def test_no_record_moves_it_further_than_its_noise_is_for(n):
    generator = torch.Generator().manual_seed(n)
    for reach, centre in product((0.0, 0.02, 0.3, 50.0), (0, 1, PLACES // 3, PLACES // 2, PLACES - 1, PLACES)):
        mechanism = centred(n=n, share=0.5, reach=reach)
        for one, other in hostile_pairs(n, generator):
            moved = abs(mechanism.statistic(one, centre)[0] - mechanism.statistic(other, centre)[0])
            assert moved <= mechanism.moves(centre)


def test_the_sensitivity_is_reached():
    n, centre = 400, PLACES // 2
    mechanism = centred(n=n, share=0.1, reach=2.5)
    h = mechanism.half_width / PLACES
    rest = torch.full(
        (n - 1,), 0.5 - h + 0.5 / n, dtype=torch.float64
    )  # the mean lies h below the centre, so the upper end is furthest
    pair = [torch.cat([rest, rest.new_tensor([value])])[None] for value in (0.5 - h, 1.0)]
    moved = abs(mechanism.statistic(pair[0], centre)[0] - mechanism.statistic(pair[1], centre)[0])
    assert 0.98 * mechanism.moves(centre) < moved <= mechanism.moves(centre)
    plain = [torch.cat([rest.new_zeros(n - 1), rest.new_tensor([value])])[None] for value in (0.0, 1.0)]
    moved = abs(mechanism.statistic(plain[0], 0)[0] - mechanism.statistic(plain[1], 0)[0])
    assert moved == pytest.approx(mechanism.moves(0), rel=1e-9)


def test_it_is_the_variance_itself_within_its_reach():
    t = torch.rand(1, 300, dtype=torch.float64)
    mechanism = centred(n=300)
    unit = 2**24 / (PLACES**2 * 300)
    near = round(float(t.mean()) * PLACES)
    for centre in (near, near + mechanism.half_width // 2, 0, PLACES):  # at the ends it is the variance, too
        assert mechanism.statistic(t, centre)[0] * unit == pytest.approx(float(t.var(correction=0)), abs=1e-8)
    far = near + 2 * mechanism.half_width
    above = (2**2 - 1) * (mechanism.half_width / PLACES) ** 2
    assert mechanism.statistic(t, far)[0] * unit == pytest.approx(float(t.var(correction=0)) + above, abs=1e-6)


def test_the_shares_are_exactly_epsilon():
    for epsilon, share in product((0.1, 1.0, 3.0, 1e-3), (0.03, 0.1, 1e-6, 0.999)):
        first, second = centred(epsilon=epsilon, share=share).shares
        assert min(first, second) > 0
        assert first + second == min(Fraction(epsilon), Fraction(repr(epsilon)))


@pytest.mark.parametrize("noise", ["laplace", "staircase"])
@pytest.mark.parametrize("wide", [0.04, 0.5, 1.0])
def test_losses_are_those_of_releases(noise, wide):
    t = (wide * torch.rand(1, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).sort(1).values
    mechanism = centred(n=60, epsilon=6.0, noise=noise)
    truth = float(t.var(correction=0))
    released = [mechanism.respond_within(t, 0.95) for _ in range(1200)]
    squares = torch.tensor([(float(answer) - truth) ** 2 for answer, _ in released], dtype=torch.float64)
    assert abs(float(squares.mean()) - float(mechanism.losses(t))) < 5 * float(squares.std()) / math.sqrt(1200)
    inside = sum(abs(float(answer) - truth) <= error for answer, error in released)
    assert inside >= 0.93 * 1200


@pytest.mark.parametrize(("n", "epsilon"), [(500, 1.0), (5000, 0.3), (5000, 1.0)])
def test_what_learn_returns_keeps_its_word_on_all_means_and_variances(n, epsilon):
    mechanism = learn("variance", epsilon, n, (0, 1), settings=Settings(robust=200))
    assert isinstance(mechanism, CentredMechanism)
    generator = torch.Generator().manual_seed(n)
    means = torch.rand(4000, dtype=torch.float64, generator=generator)
    means[:2000] = means[:2000] ** 4  # near the end, where it is worst
    variances = means * (1 - means) * torch.rand(4000, dtype=torch.float64, generator=generator) ** 3
    plain = torch.stack([truth_losses(one, variances) for one in plain_mechanisms(mechanism.problem)]).amin(0)
    ratios = mechanism.losses_of(means, variances) / plain
    assert float(ratios.max()) <= 1.25
    assert float(ratios.max()) <= 1.01 * mechanism.report["worst_ratio"]
    assert float(ratios[(means > 0.4) & (means < 0.6)].max()) < 0.7
    assert mechanism.report["worst_case"] == "of all datasets"


def test_few_records_stay_without_a_centre():
    assert not isinstance(learn("variance", 0.3, 50, (0, 1), settings=Settings(robust=200)), CentredMechanism)


def test_saved_and_read(tmp_path):
    mechanism = centred(n=1000, bounds=(-5.0, 5.0))
    mechanism.save(tmp_path / "variance.mechanism")
    again = lipdp.mechanisms.load(tmp_path / "variance.mechanism")
    assert again == mechanism
    x = 2 + torch.rand(1000, dtype=torch.float64)
    assert abs(again.release(x) - float(x.var(correction=0))) < 3
    for broken in ({"share": 1.0}, {"share": 0.0}, {"reach": -1.0}, {"noise": "normal"}, {"share": math.nan}):
        content = mechanism.content()
        content["state"] = {**content["state"], **broken}
        with pytest.raises((ConfigurationError, CheckpointError)):
            lipdp.mechanisms.mechanism.from_content(content)


def test_other_sizes_and_other_queries():
    assert centred(n=100).for_size(300).problem.n == 300
    with pytest.raises(ConfigurationError, match="variance"):
        CentredMechanism.of(Problem.of("mean", 1.0, 10, (0, 1)), 0.1, 1.0, "laplace")


def test_answers_have_an_interval_that_the_release_itself_gives():
    x = 40 + 5 * torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plan = lipdp.mechanisms.plan("std", 1.0, 5000, (0, 100), settings=Settings(robust=200))
    truth, found = float(x.std(correction=0)), [plan.release(x, clamp=True)[0] for _ in range(60)]
    assert sum(low <= truth <= high for low, high in (one.interval for one in found)) >= 53
    assert found[0].basis == "noise"
    assert max(high - low for low, high in (one.interval for one in found)) < 2  # plain noise has some 6
