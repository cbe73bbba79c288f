"""Steps on CUDA are replayed as graphs: they must be those that are taken without. And the projection that hopes for the best."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import lipdp
from lipdp import nn
from lipdp._numerics import are_finite, deferred_checks
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.graphs import GraphedFunction
from lipdp.losses import CrossEntropy
from lipdp.parametrize import constraint
from lipdp.training.watch import Projection, project_trained
from tests.test_graphs import recorder  # noqa: F401  (a fixture)

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((1, 8, 8), mode="sphere"),
        nn.SpectralConv2d(1, 4, 3, padding=1),
        nn.GroupSort(2),
        nn.L2NormPool2d(2),
        nn.Flatten(),
        nn.SpectralLinear(64, 16),
        nn.GroupSort(2),
        nn.SpectralLinear(16, 3, constraint=constraint.Spectral()),
    )


def shake(model: torch.nn.Module, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))


def norms(model: torch.nn.Module) -> list[float]:
    return [float(torch.linalg.matrix_norm(p.detach().double().flatten(1), ord=2)) for p in model.parameters() if p.ndim > 1]


@pytest.mark.parametrize("size", [1e-3, 0.02])
def test_the_hopeful_projection_is_the_careful_one(size: float) -> None:
    model = network()
    shake(model, size)
    careful = copy.deepcopy(model)
    project_trained(careful)
    before = [p.detach().clone() for p in model.parameters()]
    fine, projected, _ = Projection(model)._hopeful()
    assert bool(fine)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), projected)
    for p, q in zip(model.parameters(), careful.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=0)
    assert max(norms(model)) <= 1


@pytest.mark.parametrize("damage", ["far", "nan"])
def test_the_hopeful_projection_holds_from_anywhere_and_notices_what_is_not_finite(damage: str) -> None:
    model = network()
    with torch.no_grad():
        weight = next(iter(model.parameters()))
        weight.fill_(float("nan")) if damage == "nan" else weight.mul_(40.0)
    fine, projected, _ = Projection(model)._hopeful()
    assert bool(fine) == (damage == "far")
    if damage == "far":
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), projected)
        assert 0.5 <= max(norms(model)) <= 1


def test_checks_are_listed_while_deferred() -> None:
    with deferred_checks() as found:
        assert are_finite(torch.tensor([1.0, float("inf")]))
    assert [bool(flag) for flag in found] == [False]
    assert not are_finite(torch.tensor([1.0, float("inf")]))


def trained(device: str, steps: int = 6) -> tuple[torch.nn.Module, lipdp.PrivacyEngine]:
    model, loss = network(), CrossEntropy(tau=4.0)
    made = lipdp.plan(model, loss, dataset_size=96, batch_size=32, delta=1e-3, noise_multiplier=1.0, steps=steps, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine = lipdp.PrivacyEngine(
        model, loss, optimizer, made, device=device, seed=3, reproducible=True, microbatch_size=16, ema_decay=0.9
    )
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(96, 1, 8, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    )
    for x, y in engine.batches(data):
        engine.step(x, y)
    return model, engine


@pytest.mark.usefixtures("recorder")
def test_steps_through_recordings_are_the_steps_without() -> None:
    """With a stand-in for CUDA: gradients come from recordings, one for all steps, and the run is the same."""
    recorded, engine = trained("cpu")
    assert engine._run.query._graphed.recordings == 1  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedFunction, "__call__", lambda self, *inputs, between=None: self.function(*inputs))
        plain, _ = trained("cpu")
    for p, q in zip(recorded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@on_cuda
def test_replayed_steps_are_the_steps_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, engine = trained("cuda")
    graphed = engine._run.query._graphed  # type: ignore[attr-defined]
    assert graphed.refused is None
    assert graphed.recordings == 1
    assert engine._run.update._graphed.recordings == 1
    assert engine._run.update._graphed.refused is None
    assert engine._run.project.words is not None  # the digest of what it left comes with it
    monkeypatch.setattr(GraphedFunction, "__call__", lambda self, *inputs, between=None: self.function(*inputs))
    plain, _ = trained("cuda")
    for p, q in zip(replayed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-3)


@on_cuda
def test_diverged_weights_are_an_error_on_cuda_too() -> None:
    model = network().cuda()
    project = Projection(model)
    for _ in range(3):
        project()
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("inf"))
    project()
    with pytest.raises(ConfigurationError, match="diverged"):
        project.check()


def batch_of(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 1, 8, 8), torch.zeros(rows, dtype=torch.long)


def take(engine: lipdp.PrivacyEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step(*batch_of(), sample="own")


def watched_sums(engine: lipdp.PrivacyEngine) -> list[float]:
    """The norms of the sums that are released, step by step."""
    found: list[float] = []
    release = engine._release

    def noted(asked):
        found.append(sum(float(total.norm()) for total in asked.answer.sums.values()))
        return release(asked)

    engine._release = noted  # type: ignore[method-assign]
    return found


@on_cuda
def test_after_weights_diverge_nothing_more_is_released() -> None:
    """The host hears of it before the next release, and the state is not saved either."""
    _, engine = trained("cuda", steps=30)
    engine.ledger.steps = 5
    sums = watched_sums(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = float("inf")
    engine.step(*batch_of(), sample="own")
    with pytest.raises(ConfigurationError, match="diverged"):
        take(engine, 10)
    assert len(sums) == 1
    assert sums[0] > 0
    with pytest.raises(ConfigurationError, match="diverged"):
        engine.state_dict()


@on_cuda
def test_weights_written_past_torch_are_noticed_before_anything_is_released() -> None:
    """No version of a tensor shows it; the digests are compared on the device, and the model is analysed and projected again."""
    model, engine = trained("cuda", steps=30)
    engine.ledger.steps = 5
    sums = watched_sums(engine)
    engine.step(*batch_of(), sample="own")
    for p in model.parameters():
        p.data.mul_(30.0)
    take(engine, 8)
    assert all(size > 0 for size in sums)
    assert max(norms(model)) <= 1


@on_cuda
def test_weights_written_through_torch_are_projected_before_the_step() -> None:
    model, engine = trained("cuda", steps=30)
    engine.ledger.steps = 5
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30.0)
    asked = []
    ask = engine._run.query.ask
    engine._run.query.ask = lambda *given: asked.append(max(norms(model))) or ask(*given)  # type: ignore[method-assign]
    sums = watched_sums(engine)
    engine.step(*batch_of(), sample="own")
    assert len(asked) == 2  # once for nothing, and again from projected weights
    assert asked[1] <= 1 < asked[0]
    assert sums[0] > 0


@on_cuda
def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    _, engine = trained("cuda", steps=30)
    engine.ledger.steps = 5
    sums = watched_sums(engine)
    fine = torch.zeros((), dtype=torch.bool, device="cuda")
    ask = engine._run.query.ask

    def broken(*given):
        answer = ask(*given)
        again = dataclasses.replace(answer, sums={name: total.clone() for name, total in answer.sums.items()})
        zeros = {name: torch.zeros_like(total) for name, total in answer.sums.items()}
        return dataclasses.replace(answer, sums=zeros, fine=fine, again=lambda: again)

    engine._run.query.ask = broken  # type: ignore[method-assign]
    take(engine, 8)
    assert all(size > 0 for size in sums)


@on_cuda
def test_weights_far_outside_are_projected_on_cuda_too() -> None:
    model = network().cuda()
    project = Projection(model)
    for _ in range(3):
        project()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30.0)
    project()
    assert max(norms(model)) <= 1


@on_cuda
def test_state_that_a_forward_pass_writes_is_put_back_on_the_device() -> None:
    """What the data wrote into a buffer is not to be seen after the step, and nothing is released."""
    model, engine = trained("cuda", steps=30)
    engine.ledger.steps = 5
    model[0].register_buffer("note", torch.zeros(4, device="cuda"))
    engine.step(*batch_of(), sample="own")  # settings have changed: analysed again
    ask = engine._run.query.ask
    engine._run.query.ask = lambda *given: (model[0].note.data.add_(7.0), ask(*given))[1]  # type: ignore[method-assign]
    sums = watched_sums(engine)
    with pytest.raises(UnsupportedError, match="note"):
        engine.step(*batch_of(), sample="own")
    assert torch.equal(model[0].note.cpu(), torch.zeros(4))
    assert sums == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("rows", [None, 5])
def test_a_clipped_gradient_that_is_not_finite_is_left_out(device: str, rows: int | None) -> None:
    """Of the sums that are released, whichever microbatch it is in: on CUDA they are noised before the host knows of it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(device)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets[:, None]).square().sum(1)

    plan = lipdp.plan(
        model, loss, dataset_size=100, batch_size=12, delta=1e-3, noise_multiplier=1.0, steps=9, accountant="rdp",
        method="bookkeeping", max_grad_norm=0.5, input_shape=(4,),
    )  # fmt: skip
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), plan, microbatch_size=rows)
    released = []
    release = engine._release
    engine._release = lambda asked: (released.append(asked.answer.sums), release(asked))[1]  # type: ignore[method-assign]
    for step in range(9):
        x, y = torch.randn(12, 4), torch.randn(12)
        bad = torch.zeros(12, dtype=torch.bool)
        bad[step] = step % 3 > 0
        x[bad] = 1e30
        expected = lipdp.clipping.clip_batch(model, loss, x[~bad].to(device), y[~bad].to(device), 0.5).sums
        engine.step(x, y, sample="own")
        for name, total in expected.items():
            torch.testing.assert_close(released[-1][name], total, rtol=1e-4, atol=1e-6)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
