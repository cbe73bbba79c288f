"""Truncated Poisson and fixed-size samples: drawn as accounted for, planned, written down, refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import math

import dp_accounting
import pytest
import torch
from dp_accounting import pld, rdp
from scipy import stats
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn, privacy
from lipdp.errors import BudgetError, ConfigurationError, LipdpError
from lipdp.privacy import PrivateRun, Sampling, Stream, sample_indices

N, B = 200, 20


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False))


def make(**more: object) -> lipdp.PrivacyPlan:
    settings = {"dataset_size": N, "batch_size": B, "delta": 1e-4, "noise_multiplier": 2.0, "steps": 30, **more}
    return lipdp.plan(model(), losses.CrossEntropy(), **settings)


FIXED = {"sampling": "fixed_size", "adjacency": "replace_one", "accountant": "rdp"}


def dataset(size: int = N) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(size, 4, generator=draw), torch.randint(3, (size,), generator=draw))


def engine(plan: lipdp.PrivacyPlan) -> lipdp.PrivacyEngine:
    trained = model()
    return lipdp.PrivacyEngine(trained, losses.CrossEntropy(), torch.optim.SGD(trained.parameters(), 0.1), plan)


def held(counts: torch.Tensor, chances: list[float], draws: int) -> None:
    """A chi-squared test; alarms falsely once in 10⁶ times. Rare values are put together."""
    expected = torch.tensor(chances, dtype=torch.float64) * draws
    common = expected > 10
    pairs = [*zip(counts[common].tolist(), expected[common].tolist(), strict=True)]
    rest = (float(counts[~common].sum()), float(expected[~common].sum()))
    pairs += [rest] if rest[1] > 10 else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    assert stats.chi2.sf(statistic, len(pairs)) > 1e-6


def test_fixed_size_samples_follow_their_law() -> None:
    """Every sample has b different records; every pair of records is in it with probability b(b−1)/N(N−1)."""
    stream, how, draws = Stream(bytes(32)), Sampling("fixed_size", 8, 3), 6000
    pairs = torch.zeros(8, 8)
    for _ in range(draws):
        chosen = sample_indices(8, 3 / 8, stream, how)
        assert len(chosen) == 3 == len(set(chosen.tolist()))
        assert chosen.tolist() == sorted(chosen.tolist())
        pairs[chosen[:, None], chosen[None, :]] += 1
    assert torch.all((pairs.diagonal() / draws - 3 / 8).abs() < 5 * math.sqrt(0.24 / draws))
    upper = pairs[torch.triu(torch.ones(8, 8), 1) == 1] / draws
    assert torch.all((upper - 6 / 56).abs() < 5 * math.sqrt(0.1 / draws))


def test_truncated_samples_follow_their_law() -> None:
    """Sizes are min(Binomial(N, q), B), and all records stay equally likely, also in samples that were cut."""
    stream, how, draws = Stream(bytes(32)), Sampling("truncated_poisson", 40, 12), 4000
    sizes, inside, cut = torch.zeros(13), torch.zeros(40), 0
    for _ in range(draws):
        chosen = sample_indices(40, 0.25, stream, how)
        sizes[len(chosen)] += 1
        if len(chosen) == 12:
            inside[chosen] += 1
            cut += 1
    law = [float(stats.binom.pmf(size, 40, 0.25)) for size in range(12)]
    held(sizes, [*law, float(stats.binom.sf(11, 40, 0.25))], draws)
    held(inside, [12 / 40] * 40, cut)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_truncated_poisson_is_accounted_as_dp_accounting_has_it(adjacency: str) -> None:
    relation = dp_accounting.NeighboringRelation
    direct = pld.PLDAccountant(relation.ADD_OR_REMOVE_ONE if adjacency == "add_remove" else relation.REPLACE_ONE)
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(N, 0.1, 24, 2.0)
    direct.compose(event, 30)
    plan = make(sampling="truncated_poisson", largest_batch=24, adjacency=adjacency)
    assert plan.epsilon == pytest.approx(direct.get_epsilon(1e-4), rel=1e-5)
    assert privacy.accounting.step_event(plan.run, 2.0) == event
    assert plan.epsilon > make(adjacency=adjacency).epsilon  # what is cut costs
    assert make(sampling="truncated_poisson").epsilon == pytest.approx(make().epsilon, rel=1e-3)  # six deviations cost nothing


def test_fixed_size_is_accounted_as_dp_accounting_has_it() -> None:
    """Its multiplier is against the sensitivity to replacing a record, which is twice a record's bound."""
    direct = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    direct.compose(dp_accounting.SampledWithoutReplacementDpEvent(N, B, dp_accounting.GaussianDpEvent(1.0)), 30)
    assert make(**FIXED).epsilon == pytest.approx(direct.get_epsilon(1e-4), rel=1e-9)


@pytest.mark.parametrize("how", [FIXED, {"sampling": "truncated_poisson", "largest_batch": 22}])
def test_plans_say_it_and_come_back_from_json(how: dict[str, object]) -> None:
    plan = make(**how)
    assert lipdp.PrivacyPlan.from_json(plan.to_json()) == plan
    assert ("without replacement" if "adjacency" in how else "cut to 22 records") in str(plan)
    content = json.loads(plan.to_json())
    for name, value in (("sampling", "shuffled"), ("largest_batch", 0), ("largest_batch", "20"), ("sampling", "poisson")):
        if content[name] != value:
            wrong = {**content, name: value}
            if how is FIXED and (name, value) == ("sampling", "poisson"):
                continue  # a plan of another run, which the accountant refuses where it is used
            with pytest.raises(LipdpError):
                lipdp.PrivacyPlan.from_json(json.dumps(wrong))


def test_engines_draw_what_is_planned() -> None:
    """Batches of ``fit`` and of the loop have the planned sizes, and the run costs what the plan says."""
    fixed, cut = make(**FIXED), make(sampling="truncated_poisson", largest_batch=18)
    with engine(fixed) as one:
        sizes = []
        for batch in one.batches(dataset()):
            sizes.append(len(batch[0]))
            one.step(*batch)
    assert sizes == [B] * 30
    assert one.epsilon == fixed.epsilon
    with engine(cut) as other:
        sizes = [len(chosen) for chosen in other.samples(dataset())]
    assert max(sizes) == 18
    assert min(sizes) < 18
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    history = lipdp.fit(trained, losses.CrossEntropy(), optimizer, cut, dataset(N - 1), evaluations=1)
    assert history.epsilon == cut.epsilon


@pytest.mark.parametrize(("how", "size"), [(FIXED, N - 1), (FIXED, N + 1), ({"sampling": "truncated_poisson"}, N + 1)])
def test_other_sizes_are_refused(how: dict[str, object], size: int) -> None:
    with engine(make(**how)) as own, pytest.raises(ConfigurationError, match="Make a plan for this many"):
        next(iter(own.batches(dataset(size))))


def test_a_plan_that_says_poisson_for_other_batches_is_refused() -> None:
    """The same noise is worth less under another scheme: a plan whose scheme was changed reports another ε, and is not accepted."""
    cut = make(sampling="truncated_poisson", largest_batch=15)
    cheaper = dataclasses.replace(make(), sampling="truncated_poisson", largest_batch=15)
    assert cheaper.epsilon < cut.epsilon
    with pytest.raises(ConfigurationError, match="Make a new plan"):
        engine(cheaper)


def test_what_dp_accounting_does_not_have_is_refused() -> None:
    for more in (
        {"sampling": "fixed_size"},
        {"sampling": "fixed_size", "adjacency": "replace_one"},
        {"sampling": "truncated_poisson", "accountant": "rdp"},
        {"sampling": "weighted"},
        {"largest_batch": 30},
        {**FIXED, "largest_batch": 30},
        {"sampling": "truncated_poisson", "largest_batch": 0},
    ):
        with pytest.raises(ConfigurationError):
            make(**more)
    for arguments in (("fixed_size", 10, 20), ("fixed_size", 10, None), ("poisson", 10, 5), ("truncated_poisson", None, 5)):
        with pytest.raises(ConfigurationError):
            Sampling(*arguments)
    with pytest.raises(ConfigurationError, match="rate"):
        PrivateRun(0.5, ((1.0, 3),), sampling=Sampling("fixed_size", 10, 3))


def test_budgets_pay_for_truncated_runs(tmp_path) -> None:
    budget = privacy.Budget(tmp_path / "b", epsilon=20.0, delta=1e-4, dataset="d")
    cut = make(sampling="truncated_poisson", largest_batch=24)
    budget.charge(cut.run, "a run")
    assert budget.spent == pytest.approx(cut.epsilon, rel=1e-3)


def test_a_budget_for_replaced_records_pays_for_samples_of_fixed_size(tmp_path) -> None:
    """What was planned for ε fits into ε, to the last digit; a second run composes, and one of too many is refused."""
    plan = make(**FIXED)
    budget = privacy.Budget(tmp_path / "r", epsilon=plan.epsilon, delta=1e-4, dataset="d", adjacency="replace_one")
    assert budget.epsilon_with(plan.run) == pytest.approx(plan.epsilon, rel=1e-9)
    trained, loss = model(), losses.CrossEntropy()
    lipdp.fit(trained, loss, torch.optim.SGD(trained.parameters(), 0.1), plan, dataset(), budget=budget)
    assert budget.spent == pytest.approx(plan.epsilon, rel=1e-9)
    with pytest.raises(BudgetError, match="Nothing was charged"):
        budget.charge(plan.run, "another")
    ample = privacy.Budget(tmp_path / "a", epsilon=90.0, delta=1e-4, dataset="d", adjacency="replace_one")
    ample.charge([plan.run, plan.run], "two")
    ledger = rdp.RdpAccountant(None, dp_accounting.NeighboringRelation.REPLACE_ONE)
    ledger.compose(dp_accounting.SampledWithoutReplacementDpEvent(N, B, dp_accounting.GaussianDpEvent(1.0)), 60)
    assert ample.spent == pytest.approx(ledger.get_epsilon(1e-4), rel=1e-9)
    assert plan.epsilon < ample.spent < 2 * plan.epsilon


def test_fixed_size_and_everything_else_in_one_budget_is_the_sum_of_two_halves(tmp_path) -> None:
    """Poisson steps for replaced records have no divergences, fixed sizes no losses: each kind at half of δ."""
    fixed, poisson = make(**FIXED), make(adjacency="replace_one")
    budget = privacy.Budget(tmp_path / "b", epsilon=90.0, delta=1e-4, dataset="d", adjacency="replace_one")
    budget.charge(privacy.Release("statistics", "gaussian", 30.0), "a full sum: divergences and losses")
    whole = dp_accounting.GaussianDpEvent(15.0)
    ledger = rdp.RdpAccountant(None, dp_accounting.NeighboringRelation.REPLACE_ONE).compose(whole)
    assert budget.spent <= ledger.get_epsilon(1e-4) * (1 + 1e-9)
    budget.charge(fixed.run, "fixed")
    ledger.compose(dp_accounting.SampledWithoutReplacementDpEvent(N, B, dp_accounting.GaussianDpEvent(1.0)), 30)
    assert budget.spent == pytest.approx(ledger.get_epsilon(1e-4), rel=1e-9)
    budget.charge([poisson.run, privacy.Pure(0.5, "replace_one"), privacy.Approximate(0.1, 1e-5, "replace_one")], "Poisson, pure")
    half = (1e-4 - 1e-5) / 2
    alone = privacy.run_epsilon(fixed.run, half, "rdp", "replace_one")
    losses_apart = privacy.PrivateRun(poisson.sampling_rate, poisson.run.segments, (privacy.Release("s", "gaussian", 30.0),))
    others = privacy.run_epsilon(losses_apart, half, adjacency="replace_one") + 0.6
    assert alone + 0.9 * others < budget.spent <= (alone + others) * (1 + 1e-3)


def test_a_budget_for_a_record_more_or_less_refuses_samples_of_fixed_size(tmp_path) -> None:
    budget = privacy.Budget(tmp_path / "b", epsilon=90.0, delta=1e-4, dataset="d")
    plan, trained = make(**FIXED), model()
    with pytest.raises(ConfigurationError, match=r"another promise.*adjacency='replace_one'"):
        lipdp.fit(trained, losses.CrossEntropy(), torch.optim.SGD(trained.parameters(), 0.1), plan, dataset(), budget=budget)
    assert budget.spent == 0
    impossible = dp_accounting.SampledWithoutReplacementDpEvent(10, 20, dp_accounting.GaussianDpEvent(1.0))
    replaced = privacy.Budget(tmp_path / "r", epsilon=90.0, delta=1e-4, dataset="d", adjacency="replace_one")
    with pytest.raises(ConfigurationError, match="without replacement"):
        replaced.charge(impossible, "more than there are")


@pytest.mark.parametrize("scheme", [Sampling(), Sampling("fixed_size", 9, 3), Sampling("truncated_poisson", 9, 3)])
def test_samples_are_drawn_from_a_secret_stream_only(scheme: Sampling) -> None:
    for other in (torch.Generator(), None, 0):
        with pytest.raises(ConfigurationError, match="Stream"):
            privacy.sample_indices(9, 1 / 3, other, scheme)
    with pytest.raises(ConfigurationError, match="Sampling"):
        privacy.sample_indices(9, 1 / 3, Stream(bytes(32)), "fixed_size")


def test_statistics_beside_samples_of_fixed_size() -> None:
    released = make(**FIXED, noise_multiplier=None, epsilon=8.0, statistics_budget=0.1)
    assert released.epsilon <= 8.0
    assert [release.name for release in released.releases] == ["statistics"]


@pytest.mark.parametrize(
    ("how", "size"), [(FIXED, B - 1), (FIXED, B + 1), ({"sampling": "truncated_poisson", "largest_batch": 22}, 23)]
)
def test_batches_that_the_plan_can_not_have_drawn_are_refused(how: dict[str, object], size: int) -> None:
    run = engine(make(**how))
    x, y = dataset().tensors
    with pytest.raises(LipdpError, match=r"engine\.batches"):
        run.step(x[:size], y[:size], sample="own")
    assert run.steps == 0
