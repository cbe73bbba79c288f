from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp._texts import text_table
from lipdp.diagnose import Diagnosis, DiagnosisCallback, diagnose, measure_gradients
from lipdp.errors import ConfigurationError, DataError, LipdpWarning
from lipdp.models import mixer, mlp
from lipdp.parametrize import Cayley


def _batch(*shape: int, classes: int = 3, count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=draw), torch.randint(classes, (count,), generator=draw)


def _mlp(**settings: object) -> nn.Sequential:
    torch.manual_seed(0)
    return mlp((8,), 3, hidden=(8, 8), **settings)  # type: ignore[arg-type]


def _conv() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((1, 6, 6), norm=2.0),
        nn.SpectralConv2d(1, 4, 3, padding=1),
        nn.GroupSort(2),
        nn.L2NormPool2d(2),
        nn.Flatten(),
        nn.SpectralLinear(36, 3),
    )


def _mixer() -> nn.Sequential:
    torch.manual_seed(0)
    return mixer((1, 6, 6), 3, patch=3, dim=8, depth=1)


def _reparametrised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((6,)), nn.SpectralLinear(6, 6, constraint=Cayley()), nn.GroupSort(2), nn.SpectralLinear(6, 3)
    )


def _plain() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(nn.BoundedInput((6,)), torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


MODELS = [(_mlp, (8,)), (_conv, (1, 6, 6)), (_mixer, (1, 6, 6)), (_reparametrised, (6,)), (_plain, (6,))]


@pytest.mark.parametrize(("make", "shape"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_norms_are_those_of_gradients_taken_one_by_one(make: object, shape: tuple[int, ...]) -> None:
    model, (x, y) = make().double(), _batch(*shape)  # type: ignore[operator]
    loss = losses.CrossEntropy(tau=2.0)
    fast, slow = (measure_gradients(model, loss, x.double(), y, one_by_one=one) for one in (False, True))
    assert set(fast.norms) == {name for name, _ in model.named_parameters()}
    for name, norms in slow.norms.items():
        assert torch.allclose(fast.norms[name], norms, rtol=1e-6, atol=1e-9), name
        assert torch.allclose(fast.sums[name], slow.sums[name])
    assert float(slow.sums["1.weight"].norm() if "1.weight" in slow.sums else 1.0) > 0


def test_sums_are_autograds() -> None:
    model, (x, y) = _conv(), _batch(1, 6, 6)
    loss = losses.CrossEntropy()
    found = measure_gradients(model, loss, x, y)
    expected = torch.autograd.grad(loss(model(x), y).sum(), list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        assert torch.allclose(found.sums[name], gradient, atol=1e-6)


@pytest.mark.parametrize(("make", "shape"), MODELS[:4], ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("float64", [False, True])
def test_no_example_is_above_its_bound(make: object, shape: tuple[int, ...], float64: bool) -> None:
    x, y = _batch(*shape)
    found = diagnose(make(), losses.HKR(2.0, 1.0), (100 * x, y), float64=float64)  # type: ignore[operator]
    assert found.violations == ()
    for row in (*found.rows, found.whole):
        assert 0 < row.mean <= row.largest * (1 + 1e-9)
        assert row.peak <= found.slack
        assert sum(row.counts) == found.examples == 24
        assert row.quantiles[0.1] <= row.quantiles[0.5] <= row.quantiles[0.9] <= row.largest


def test_tightness_of_a_single_layer_is_known() -> None:
    """One dense layer under KR: ‖g‖ = ‖x‖·√(1 + 1/(K−1)) for every example; on the sphere that is the bound itself."""
    x, y = _batch(8)
    model = nn.Sequential(nn.BoundedInput((8,), norm=2.0, mode="sphere"), nn.SpectralLinear(8, 3, bias=False))
    row = diagnose(model, losses.MulticlassKR(), (x, y))["1.weight"]
    assert row.bound == pytest.approx(2 * math.sqrt(1.5))
    assert (row.tightness, row.peak) == pytest.approx((1.0, 1.0), rel=1e-5)
    assert (row.input_share, row.cotangent_share) == pytest.approx((1.0, 1.0), rel=1e-5)
    assert row.alignment == pytest.approx(1.0, rel=1e-5)
    ball = nn.Sequential(nn.BoundedInput((8,), norm=2.0), nn.SpectralLinear(8, 3, bias=False))
    half = x / x.norm(dim=1, keepdim=True)  # norm 1 in a ball of 2
    row = diagnose(ball, losses.MulticlassKR(), (half, y))["1.weight"]
    assert row.tightness == pytest.approx(0.5, rel=1e-5)
    assert row.input_share == pytest.approx(0.5, rel=1e-5)
    assert row.cotangent_share == pytest.approx(1.0, rel=1e-5)


def test_signal_to_noise_of_a_plan() -> None:
    model, (x, y) = _mlp(), _batch(8)
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=1000, batch_size=100, delta=1e-4, noise_multiplier=2.0, steps=3, accountant="rdp")
    found = diagnose(model, loss, (x, y), plan=plan)
    gradients = torch.autograd.grad(loss(model(x), y).mean(), list(model.parameters()))
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        noise = plan.noise_stds[name] * math.sqrt(parameter.numel())
        assert found[name].mean_gradient == pytest.approx(float(gradient.norm()), rel=1e-4)
        assert found[name].snr == pytest.approx(float(gradient.norm()) * 100 / noise, rel=1e-4)
    whole = math.hypot(*(float(g.norm()) for g in gradients)) * 100 / math.sqrt(plan.noise_energy)
    assert found.whole.snr == pytest.approx(whole, rel=1e-4)
    halved = diagnose(model, loss, (x, y), plan=plan, noise_stds={k: v / 2 for k, v in plan.noise_stds.items()})
    assert halved.whole.snr == pytest.approx(2 * whole, rel=1e-4)
    assert diagnose(model, loss, (x, y)).whole.snr is None
    with pytest.raises(ConfigurationError, match="plan"):
        diagnose(model, loss, (x, y), noise_stds=plan.noise_stds)


def test_unbounded_parameters_are_shown_without_a_bound() -> None:
    """An ordinary network has no proved Δ below its last layer; its norms are still worth seeing (the papers' figure 9a)."""
    found = diagnose(_plain(), losses.CrossEntropy(), _batch(6))
    assert found["1.weight"].bound == math.inf
    assert found["1.weight"].tightness == 0
    assert found["1.weight"].mean > 0
    assert json.loads(found.to_json())["rows"][0]["bound"] is None


def test_a_broken_bound_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from lipdp.diagnose import diagnosis

    real = diagnosis.analyse

    def halved(*arguments: object, **settings: object) -> object:
        found = real(*arguments, **settings)  # type: ignore[arg-type]
        rows = tuple(dataclasses.replace(row, sensitivity=row.sensitivity / 2) for row in found.parameters)
        return dataclasses.replace(found, parameters=rows)

    monkeypatch.setattr(diagnosis, "analyse", halved)
    found = diagnose(_mlp(), losses.MulticlassKR(), _batch(8))
    assert found.violations
    assert "ABOVE THE BOUND" in str(found)


def test_it_says_loudly_that_it_is_not_private(tmp_path: Path) -> None:
    private, public = (diagnose(_mlp(), losses.CrossEntropy(), _batch(8), public=public) for public in (False, True))
    assert "NOT PRIVATE" in str(private)
    assert next(iter(json.loads(private.to_json()))) == "privacy"
    assert "NOT PRIVATE" in json.loads(private.to_json())["privacy"]
    assert "NOT PRIVATE" not in str(public)
    assert json.loads(public.to_json())["privacy"] == "public data"
    for name in ("3.weight", "whole gradient", "mean/Δ"):
        assert name in str(private)
    pytest.importorskip("matplotlib")
    figure = private.plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").stat().st_size > 1000
    assert "NOT PRIVATE" in figure.get_suptitle()
    assert len(figure.axes) == 3


def test_datasets_and_batches() -> None:
    x, y = _batch(8, count=30)
    model, loss = _mlp(), losses.CrossEntropy()
    from_data = diagnose(model, loss, TensorDataset(x, y), examples=20)
    assert from_data.examples == 20
    assert from_data == diagnose(model, loss, (x[:20], y[:20]))
    many = diagnose(model, loss, (x.repeat(20, 1), y.repeat(20)), examples=600)  # more than one chunk
    assert many.examples == 600
    assert many.whole.mean == pytest.approx(diagnose(model, loss, (x, y)).whole.mean, rel=1e-5)
    with pytest.raises(DataError):
        diagnose(model, loss, (x[:0], y[:0]))
    with pytest.raises(KeyError, match=r"3\.weight"):
        from_data["head"]


def test_the_model_is_left_alone() -> None:
    model, (x, y) = _mlp(), _batch(8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    diagnose(model, losses.CrossEntropy(), (x, y), float64=True)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype == torch.float32
        assert parameter.grad is None


def _trained(callbacks: list[DiagnosisCallback]) -> dict[str, torch.Tensor]:
    model, (x, y) = _mlp(), _batch(8, count=60)
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=60, batch_size=20, delta=1e-3, noise_multiplier=2.0, steps=6, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lipdp.fit(model, loss, optimizer, plan, TensorDataset(x, y), callbacks=callbacks, seed=1, reproducible=True, evaluations=3)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_callback_records_over_training_and_changes_nothing(tmp_path: Path) -> None:
    callback = DiagnosisCallback(_batch(8), public=True)
    with_it, without = _trained([callback]), _trained([])
    for name, value in without.items():
        assert torch.equal(with_it[name], value)
    steps = [step for step, _ in callback.records]
    assert steps[0] == 0
    assert steps[-1] == 6
    assert len(steps) >= 3
    assert all(isinstance(record, Diagnosis) and record.whole.snr is not None for _, record in callback.records)
    assert len(callback.series("3.weight")) == len(steps)
    assert callback.series("3.weight", "snr") != callback.series("3.weight", "tightness")
    assert "3.weight" in str(callback)
    assert "step 6" in str(callback)
    assert len(json.loads(callback.to_json())["records"]) == len(steps)
    pytest.importorskip("matplotlib")
    callback.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_callback_on_private_data_warns_and_is_marked() -> None:
    with pytest.warns(LipdpWarning, match="guarantee does not cover"):
        callback = DiagnosisCallback(_batch(8))
    assert "NOT PRIVATE" in str(callback)
    assert "NOT PRIVATE" in json.loads(callback.to_json())["privacy"]


def test_normalised_cotangents_make_a_gnp_network_tight() -> None:
    """Sphere inputs, orthogonal square weights, and cotangents of norm exactly C: every hidden layer uses its whole bound."""
    model = _mlp()
    model.append(nn.ClipGradient(0.5, normalise=True))
    found = diagnose(model, losses.CrossEntropy(), _batch(8), float64=True)
    assert min(row.tightness for row in found.rows) > 0.9
    assert found["7.weight"].tightness == pytest.approx(1.0, rel=1e-3)


def test_a_table_of_many_steps_is_as_wide_as_it_has_to_be() -> None:
    headers = ["parameter", *(f"step {100 * number}" for number in range(40))]
    row = ["0.weight", *(f"12.{number:02d}% (1.3)" for number in range(40))]
    first, *_, last = text_table(headers, [row], right=headers[1:], whole=headers).splitlines()
    assert " ".join(first.split()) == " ".join(headers)
    assert " ".join(last.split()) == " ".join(row)
    assert max(map(len, text_table(["what"], [["words " * 100]]).splitlines())) <= 140  # what may be folded is folded


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_a_model_keeps_while_it_is_measured_is_put_back(one_by_one: bool) -> None:
    """It is measured on private records, and trained on: a scale of theirs would be a constant to the training."""
    seen: list[float] = []

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not seen:
                seen.append(float(x.detach().abs().max()))
            y: torch.Tensor = super().forward(x) / seen[0]
            return y

    loss = torch.nn.CrossEntropyLoss(reduction="none")
    measure_gradients(Scaled(3, 2), loss, torch.rand(4, 3), torch.zeros(4, dtype=torch.long), one_by_one=one_by_one)
    assert seen == []
