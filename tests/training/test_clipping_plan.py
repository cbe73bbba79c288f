"""Clipping methods through the same plan, engine, noise and accounting as clipless."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.training import PrivacyPlan

LOSS = torch.nn.CrossEntropyLoss(reduction="none")
METHODS = ("naive", "multiloss", "reweight", "ghost", "bookkeeping")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    )


def data(count: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(x, x.flatten(1)[:, :10].argmax(1))


def planned(model: torch.nn.Module, **changes) -> PrivacyPlan:
    settings = {"dataset_size": 256, "batch_size": 64, "delta": 1e-4, "noise_multiplier": 1.0, "steps": 6, "method": "bookkeeping"}
    return lipdp.plan(model, LOSS, **{**settings, "max_grad_norm": 0.5, **changes})


class Recorder(torch.optim.SGD):
    """Keeps what the engine hands over."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def test_the_sensitivity_is_the_clipping_norm_and_the_source_is_said() -> None:
    plan = planned(network())
    assert plan.sensitivity == 0.5
    assert set(plan.sensitivities.values()) == {0.5}
    assert {group.source for group in plan.groups} == {"clipped"}
    assert set(plan.noise_stds) == {name for name, _ in network().named_parameters()}
    for std in plan.noise_stds.values():
        assert std == pytest.approx(0.5 * plan.slack)
    assert 1 < plan.slack < 1.002
    assert 1 < planned(network(), method="naive").slack < 1 + 1e-5
    assert PrivacyPlan.from_json(plan.to_json()) == plan
    assert "clipped" in str(plan)
    assert plan.epsilon == lipdp.privacy.epsilon(noise_multiplier=1.0, sampling_rate=0.25, steps=6, delta=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_hands_the_same_clipped_sum_and_noise_to_the_optimiser(method: str) -> None:
    train = data()
    expected = None
    for name in ("naive", method):
        model = network()
        optimizer = Recorder(model.parameters())
        # The plan's method is part of the noise's key, so the noise is made negligible to compare the sums.
        plan = planned(model, method=name, noise_multiplier=1e-3, accountant="rdp")
        engine = lipdp.PrivacyEngine(model, LOSS, optimizer, plan, seed=3, reproducible=True, microbatch_size=23)
        engine.step(*train[:60], sample="own")
        clipped = lipdp.clipping.clipped_gradients(model, LOSS, *train[:60], 0.5, "naive")
        for found, reference in zip(optimizer.seen[0], clipped.values(), strict=True):
            assert torch.allclose(found, reference / 64, atol=5 * 0.5e-3 / 64)  # ÷ the constant 64, not the 60 that came
        expected = optimizer.seen[0] if expected is None else expected
        for found, other in zip(optimizer.seen[0], expected, strict=True):
            assert torch.allclose(found, other, atol=8 * 0.5e-3 / 64)


def test_noise_of_empty_batches_has_the_planned_deviation() -> None:
    """Chi-square at 1e-6 two-sided: the sum of n squares is within 6 deviations √(2n) of n."""
    model = network()
    optimizer = Recorder(model.parameters())
    plan = planned(model, steps=40)
    engine = lipdp.PrivacyEngine(model, LOSS, optimizer, plan, seed=1, reproducible=True)
    x, y = data()[:0]
    for _ in range(40):
        engine.step(x, y, sample="own")
    drawn = torch.cat([g.flatten() for step in optimizer.seen for g in step]) * 64 / next(iter(plan.noise_stds.values()))
    assert abs(float(drawn.square().sum()) - drawn.numel()) < 6 * math.sqrt(2 * drawn.numel())


def test_fit_spends_what_was_planned_and_learns() -> None:
    model, train = network(), data(1024)
    plan = planned(
        model, dataset_size=1024, batch_size=256, epsilon=8.0, noise_multiplier=None, steps=None, epochs=25, max_grad_norm=1.0
    )
    before = lipdp.evaluate(model, LOSS, train)["accuracy"]
    history = lipdp.fit(
        model,
        LOSS,
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        plan,
        train,
        seed=0,
        reproducible=True,
        evaluations=2,
    )
    assert history.epsilon == plan.epsilon <= 8.0
    assert lipdp.evaluate(model, LOSS, train)["accuracy"] > before + 0.15


@pytest.mark.parametrize("norm", [None, 0.0, -1.0, math.nan, math.inf, "1"])
def test_a_clipping_method_needs_a_norm(norm) -> None:
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        planned(network(), max_grad_norm=norm)


def test_clipless_takes_no_norm() -> None:
    with pytest.raises(ConfigurationError, match="no meaning"):
        planned(network(), method="clipless")


def test_losses_that_mix_examples_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="reduction='none'"):
        lipdp.plan(
            network(), torch.nn.CrossEntropyLoss(), dataset_size=256, batch_size=64, delta=1e-4, epsilon=1.0, steps=5,
            method="ghost", max_grad_norm=1.0,
        )  # fmt: skip


def test_batch_normalisation_is_refused_before_data_is_read() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 10))
    with pytest.raises(UnsupportedError, match="BatchNorm"):
        planned(model)


def test_forged_plans_are_refused() -> None:
    model = network()
    plan = planned(model)
    group = plan.groups[0]
    forged = [
        dataclasses.replace(plan, max_grad_norm=5.0),
        dataclasses.replace(plan, groups=(dataclasses.replace(group, noise_std=group.noise_std / 2),)),
        dataclasses.replace(plan, groups=(dataclasses.replace(group, parameters=group.parameters[:-1]),)),
        dataclasses.replace(plan, slack=1.0),
        dataclasses.replace(plan, epsilon=plan.epsilon / 2),
    ]
    for bad in forged:
        with pytest.raises(ConfigurationError):
            lipdp.PrivacyEngine(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), bad)


def test_a_record_that_is_not_finite_is_dropped_alone() -> None:
    model, train = network(), data()
    x, y = train[:20]
    spoilt = x.clone()
    spoilt[4] = math.inf
    keep = torch.arange(20) != 4
    seen = []
    for inputs, targets in ((spoilt, y), (x[keep], y[keep])):
        fresh = network()
        optimizer = Recorder(fresh.parameters())
        plan = planned(fresh, noise_multiplier=1e-6, accountant="rdp")  # other batches have other noise
        lipdp.PrivacyEngine(fresh, LOSS, optimizer, plan).step(inputs, targets, sample="own")
        seen.append(optimizer.seen[0])
    for a, b in zip(*seen, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_resumed_run_is_the_same_run(tmp_path) -> None:
    def run(stop_at: int | None, file) -> torch.nn.Module:
        class Stop(lipdp.training.Callback):
            def on_step(self, run):
                if run.engine.steps == stop_at:
                    raise KeyboardInterrupt

        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plan = planned(model, steps=8)
        arguments = {"seed": 2, "reproducible": True, "evaluations": 4, "checkpoint": file, "resume": True}
        if stop_at is not None:
            with pytest.raises(KeyboardInterrupt):
                lipdp.fit(model, LOSS, optimizer, plan, data(), callbacks=[Stop()], **arguments)
            return run(None, file)
        lipdp.fit(model, LOSS, optimizer, plan, data(), **arguments)
        return model

    whole, resumed = run(None, tmp_path / "a"), run(5, tmp_path / "b")
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


class Scaled(torch.nn.Module):
    """Without a norm rule."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


class Meeting(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x - 0 * x.sum(0))


@pytest.mark.parametrize(
    ("method", "layer", "said"),
    [
        ("bookkeeping", torch.nn.Identity(), "proved"),
        ("multiloss", torch.nn.Identity(), "proved"),
        ("naive", torch.nn.Identity(), "alone"),
        ("bookkeeping", Meeting(6, 6), "alone"),
    ],
)
def test_a_plan_says_how_records_are_kept_apart_and_the_engine_how_they_were(method, layer, said):
    model = torch.nn.Sequential(Scaled(), layer, torch.nn.Linear(6, 3))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    settings = {"dataset_size": 100, "batch_size": 10, "delta": 1e-3, "noise_multiplier": 1.0, "steps": 2, "accountant": "rdp"}
    plan = lipdp.plan(model, loss, method=method, max_grad_norm=1.0, **settings)
    assert ("records: each is taken alone" in str(plan)) == (method == "naive")
    assert ("each followed through every operation" in str(plan)) == (method != "naive")
    assert ("evaluated again for each record, having no norm rule: 0 (Scaled)" in str(plan)) == (method == "bookkeeping")
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    assert engine.apart == ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.step(torch.randn(5, 6), torch.arange(5) % 3, sample="own")
    assert engine.apart == said
