"""Private statistics: released once, noised as planned, composed with the training in one account."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.data import PrecomputedCopies
from lipdp.errors import BudgetError, ConfigurationError, DataError
from lipdp.planning.decide import STATISTICS
from lipdp.privacy import PrivateRun, Release, run_epsilon

from .common import engine_of, planned


def standardised(channels=4, positions=3, moments=2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Standardize(channels, radius=4.0, moments=moments),
        nn.BoundedInput((channels, positions), mode="sphere"),
        nn.Flatten(),
        torch.nn.Linear(channels * positions, 3),
    )


def records(count=256, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(count, 4, 3, generator=draw) * torch.tensor([0.1, 0.4, 0.2, 0.3])[:, None]
        + torch.tensor([0.5, 0.0, -0.5, 0.2])[:, None]
    )
    return TensorDataset(x, x[:, :3, 0].argmax(1))


def test_the_whole_costs_exactly_what_was_asked_and_is_one_composition():
    model = standardised()
    plan = planned(model, epsilon=3.0, steps=20, statistics_budget=0.1, accountant="pld")
    (release,) = plan.releases
    assert release.name == STATISTICS
    assert run_epsilon(PrivateRun(plan.sampling_rate, (), plan.releases), plan.delta) == pytest.approx(0.3, rel=1e-3)
    assert 2.99 < plan.epsilon <= 3.0
    steps = PrivateRun(plan.sampling_rate, ((plan.noise_multiplier, 20),))
    assert run_epsilon(steps, plan.delta) < plan.epsilon < run_epsilon(steps, plan.delta) + 0.3
    assert plan.noise_multiplier > planned(model, epsilon=3.0, steps=20, accountant="pld").noise_multiplier
    assert lipdp.PrivacyPlan.from_json(plan.to_json()) == plan


def test_composition_with_a_release_is_that_of_dp_accounting():
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    run = PrivateRun(0.1, ((1.1, 40),), (Release("s", "gaussian", 6.0), Release("p", "pure", 0.05)))
    theirs = PLDAccountant()
    theirs.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.1)), 40))
    theirs.compose(dp.GaussianDpEvent(6.0))
    assert run_epsilon(run, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5) + 0.05, abs=2e-4)
    # For replace-one the release moves by 2Δ as well: the multiplier of a bare Gaussian event would not say so.
    doubled = PLDAccountant()
    doubled.compose(dp.GaussianDpEvent(3.0))
    only = PrivateRun(0.1, (), (Release("s", "gaussian", 6.0),))
    assert run_epsilon(only, 1e-5, adjacency="replace_one") == pytest.approx(doubled.get_epsilon(1e-5), abs=2e-4)


def test_fit_releases_them_once_and_the_history_says_what_was_spent(tmp_path):
    model = standardised()
    plan = planned(model, epsilon=8.0, steps=10, statistics_budget=0.5)
    file = tmp_path / "run.pt"
    history = lipdp.fit(
        model, losses.CrossEntropy(tau=4.0), torch.optim.SGD(model.parameters(), lr=0.1), plan, records(), seed=0, checkpoint=file
    )
    assert history.epsilon == plan.epsilon
    assert bool(model[0].ready)
    true = records().tensors[0].double()
    assert torch.allclose(model[0].mean.double(), true.mean((0, 2)), atol=0.3)
    state = lipdp.training.load_checkpoint(file)
    assert state["engine"]["one_off"] == [STATISTICS]


@pytest.mark.parametrize("moments", [1, 2])
def test_the_released_statistics_are_really_noised_by_the_planned_amount(moments):
    """Fails if the noise is removed: repeated releases differ by the standard deviation that was paid for."""
    channels, means = 60, []
    data = TensorDataset(0.2 * torch.randn(256, channels, 3, generator=torch.Generator().manual_seed(0)), records().tensors[1])
    plan = planned(standardised(channels, moments=moments), epsilon=3.0, steps=5, statistics_budget=0.2)
    for seed in range(7):
        model = standardised(channels, moments=moments)
        engine = engine_of(model, plan, seed=seed)
        engine.release_statistics(data)
        means.append(model[0].mean.clone())
    # 6 degrees of freedom of each of 60 channels: 3.7% deviation, so a false alarm of 1e-7 (keys are bound to the bits of the data)
    spread = float(torch.stack(means).var(0).mean().sqrt())
    radius_over_root = 4.0 / 3**0.5
    expected = plan.releases[0].amount * radius_over_root * moments**0.5 / plan.dataset_size
    assert spread == pytest.approx(expected, rel=0.2)
    assert f"{expected:.3g} on each mean" in str(plan)
    assert ("mean square" in str(plan)) == (moments == 2)


def test_means_alone_cost_the_same_release_and_leave_the_scale_alone():
    """One vector is released instead of two, under the same multiplier: the account is that of the plan for both."""
    plans = [planned(standardised(moments=m), epsilon=3.0, steps=5, statistics_budget=0.2) for m in (1, 2)]
    assert plans[0].releases == plans[1].releases
    assert plans[0].noise_multiplier == plans[1].noise_multiplier
    model = standardised(moments=1)
    engine = engine_of(model, plans[0])
    engine.release_statistics(records())
    assert engine.epsilon == pytest.approx(run_epsilon(PrivateRun(plans[0].sampling_rate, (), plans[0].releases), 1e-4, "rdp"))
    assert torch.equal(model[0].std, torch.ones(4))
    assert bool((model[0].mean != 0).all())
    for statistics in ((torch.zeros(4), torch.ones(4)), (torch.zeros(3),)):
        with pytest.raises(DataError):
            model[0].set_statistics(*statistics)
    with pytest.raises(DataError, match="a variance"):
        standardised()[0].set_statistics(torch.zeros(4))
    with pytest.raises(ConfigurationError, match="1 moment"):
        nn.Standardize(4, radius=1.0, moments=3)


def test_one_record_moves_the_query_by_no_more_than_its_bound():
    """Any record, however large: the sums behind the statistics move by at most the sensitivity that the noise is for."""
    from lipdp.privacy.moments import moment_sensitivities, moment_sums

    data = records(64).tensors[0]
    a, b = moment_sensitivities(4.0, 3)
    base = moment_sums([data], 4.0)
    worst = [0.0, 0.0]
    for record in (
        1e30 * torch.ones(1, 4, 3),
        torch.tensor([[[4.0 / 3**0.5] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]]),
        torch.randn(1, 4, 3),
    ):
        more = moment_sums([torch.cat([data, record])], 4.0)
        moved = [float((more[k] - base[k]).norm()) for k in (0, 1)]
        assert moved[0] <= a * (1 + 1e-9)
        assert moved[1] <= b * (1 + 1e-9)
        worst = [max(w, m) for w, m in zip(worst, moved, strict=True)]
    assert worst == pytest.approx([a, b], rel=1e-6)


def test_the_ledger_charges_once_and_only_what_was_planned():
    model = standardised()
    plan = planned(model, epsilon=3.0, steps=5, statistics_budget=0.2)
    engine = engine_of(model, plan)
    assert engine.epsilon == 0.0
    engine.release_statistics(records())
    assert 0 < engine.epsilon < plan.epsilon
    with pytest.raises(BudgetError, match="released already"):
        engine.release_statistics(records())
    for batch in engine.batches(records()):
        engine.step(*batch)
    assert engine.epsilon == plan.epsilon
    other = engine_of(standardised(), planned(standardised()))
    with pytest.raises(ConfigurationError, match="does not pay"):
        other.release_statistics(records())


def test_without_a_bound_behind_it_the_layer_is_refused():
    model = nn.Sequential(nn.Standardize(4, radius=1.0), nn.Flatten(), torch.nn.Linear(12, 3))
    with pytest.raises(lipdp.errors.UnboundedError, match="BoundedInput"):
        planned(model, input_shape=(4, 3))
    with pytest.raises(ConfigurationError, match="share of epsilon"):
        planned(standardised(), statistics_budget=0.1)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        planned(standardised(), epsilon=3.0, statistics_budget=1.0)
    plain = nn.Sequential(nn.BoundedInput((4, 3)), nn.Flatten(), torch.nn.Linear(12, 3))
    plan = planned(plain, epsilon=3.0, steps=5, statistics_budget=0.1)
    with pytest.raises(ConfigurationError, match="this model has 0"):
        lipdp.fit(plain, losses.CrossEntropy(tau=4.0), torch.optim.SGD(plain.parameters(), lr=0.1), plan, records())


@pytest.mark.parametrize("count", [1, 2])
def test_copies_of_a_record_count_as_one_record(count):
    model = standardised()
    plan = planned(model, epsilon=50.0, steps=5, statistics_budget=0.9)
    x, y = records().tensors
    stored = TensorDataset(torch.stack([x, x.flip(-1)][:count], 1), y)
    engine = engine_of(model, plan, augmentation=PrecomputedCopies(count))
    engine.release_statistics(stored)
    alone = standardised()
    single = engine_of(alone, plan)
    single.release_statistics(records())
    assert torch.allclose(model[0].mean, alone[0].mean, atol=0.05)
    for batch in engine.batches(stored):
        engine.step(*batch)
