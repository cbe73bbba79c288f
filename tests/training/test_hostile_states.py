"""Every field of a checkpoint with hostile values: refused clearly, or harmless, never a raw exception.

Each edit is tried twice: as it is, when its digest gives it away, and with a digest made to match, when what a step rests on has to
be derived and not read.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.errors import BudgetError, CheckpointError
from lipdp.parametrize import Constrained
from lipdp.privacy import AdaptiveClip
from lipdp.training.checkpoint import load_checkpoint, save_checkpoint
from lipdp.training.state import sealed

from ..hostile import all_edits, refused_or
from ..planning.test_hostile_plans import check_contribution, real_multiplier, standardised
from .common import planned, small, toy

LOSS = losses.CrossEntropy(tau=4.0)


def adapting():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((6,)),
        nn.SpectralLinear(6, 8),
        nn.GroupSort(2),
        nn.SpectralLinear(8, 3, bias=False),
        nn.ClipGradient(0.5, adaptive=True),
    )


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


CASES = {
    "adaptive": (adapting, momentum, {"clipping": lipdp.Clipping(adaptive=AdaptiveClip())}, {"ema_decay": 0.9}),
    "statistics": (standardised, adam, {"epsilon": 3.0, "statistics_budget": 0.1}, {}),
    "plain": (small, momentum, {}, {"tail_average": 0.5}),
}


@functools.cache
def case(name):
    make, _, settings, _ = CASES[name]
    return planned(make(), LOSS, **settings)


def engine_for(name):
    make, optimizer, _, options = CASES[name]
    model = make()
    return lipdp.PrivacyEngine(model, LOSS, optimizer(model), case(name), seed=0, **options)


@functools.cache
def state_of(name):
    engine = engine_for(name)
    if name == "statistics":
        engine.release_statistics(toy())
    for _ in range(3):
        engine.step(*toy(20).tensors, sample="own")
    return engine.state_dict()


def load(name, state):
    engine = engine_for(name)
    engine.load_state_dict(state)
    return engine


def harmless(name, engine):
    """Weights are inside their sets, the noise is enough for the model as it is, and the run goes on or ends with a reason."""
    for module in engine.model.modules():
        assert not isinstance(module, Constrained) or module.is_inside()
    step = min(engine.steps, engine.plan.steps - 1)
    settings = engine._run.mechanism.at(step)
    assert settings.clips == engine.clipping
    assert real_multiplier(engine, settings, case(name)) >= engine.plan.noise_multiplier * (1 - 1e-6)
    check_contribution(engine, settings)
    for _ in range(2):
        try:
            engine.step(*toy(20, seed=3).tensors, sample="own")
        except BudgetError as error:  # another step at a position that was taken is refused, too
            taken = "made before" in str(error)
            assert taken or engine.steps == engine.plan.steps


def run_case(name, seal):
    state, outcomes, failures = state_of(name), {"refused": 0, "harmless": 0}, []
    for what, edited in all_edits(state, 1, seed=sorted(CASES).index(name) + 10 * seal):
        if sealed(edited)["digest"] == state["digest"] and edited.get("digest") == state["digest"]:
            continue  # what was put there is what was there
        try:
            content = sealed(edited) if seal else edited
            outcomes[refused_or(what, functools.partial(load, name), content, functools.partial(harmless, name))] += 1
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, f"{len(failures)} of {sum(outcomes.values()) + len(failures)}:\n" + "\n".join(failures[:40])
    print(name, "sealed" if seal else "as edited", outcomes)
    return outcomes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_edited_states_are_refused(name):
    """By their digest, if by nothing else."""
    assert run_case(name, seal=False)["harmless"] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_states_with_a_forged_digest_are_refused_or_harmless(name):
    assert run_case(name, seal=True)["refused"] > 0


@pytest.mark.parametrize("name", CASES)
def test_the_harness_accepts_the_state_as_it_is(name):
    harmless(name, load(name, copy.deepcopy(state_of(name))))
    there = load(name, state_of(name)).state_dict()
    assert there["charged"] > 3  # by the steps that harmless() made
    assert sealed({**there, "charged": state_of(name)["charged"]})["digest"] == state_of(name)["digest"]


# ------------------------------------------------------------------------------------------------------- the files of fit


def fitted(file, resume=False, make=torch.optim.lr_scheduler.CosineAnnealingLR, arguments=(12,), optimizer=momentum, stop=None):
    model = small()
    own = optimizer(model)
    scheduler = make(own, *arguments)
    callbacks = [] if stop is None else [StopAt(stop)]
    return lipdp.fit(
        model,
        LOSS,
        own,
        case("plain"),
        toy(),
        validation=toy(30, seed=4),
        callbacks=callbacks,
        seed=0,
        reproducible=True,
        scheduler=scheduler,
        evaluations=4,
        checkpoint=file,
        resume=resume,
    ), model


class StopAt(lipdp.training.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        run.stop = run.stop or run.engine.steps == self.step


@pytest.mark.filterwarnings("ignore")
def test_edited_histories_and_schedulers_are_refused_or_harmless(tmp_path):
    file = tmp_path / "run"
    fitted(file, stop=6)
    state = load_checkpoint(file)
    whole, _ = fitted(None)
    outcomes, failures = {"refused": 0, "harmless": 0}, []

    def use(content):
        save_checkpoint({**state, **content}, file)
        return fitted(file, resume=True)[0]

    def check(history):
        """Figures that count the privacy are derived: they are those of the run, whatever the file says."""
        assert (history.delta, history.epsilon) == (whole.delta, whole.epsilon)
        assert all(step in range(1, 13) for step in history.metrics["step"])
        for step, spent in zip(history.metrics["step"], history.metrics["epsilon"], strict=True):
            assert spent >= dict(zip(whole.metrics["step"], whole.metrics["epsilon"], strict=True)).get(step, 0.0)
        assert str(history)

    content = {name: state[name] for name in ("history", "scheduler")}
    for what, edited in all_edits(content, 1):
        if set(edited) != set(content):
            continue
        try:
            outcomes[refused_or(what, use, edited, check)] += 1
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, f"{len(failures)}:\n" + "\n".join(failures[:40])
    print("histories and schedulers", outcomes)
    assert outcomes["refused"] > 0


SCHEDULERS = torch.optim.lr_scheduler


def warm_up(optimizer):
    first, second = SCHEDULERS.LinearLR(optimizer, 0.1, total_iters=3), SCHEDULERS.ExponentialLR(optimizer, 0.9)
    return SCHEDULERS.SequentialLR(optimizer, [first, second], [3])


@pytest.mark.parametrize(
    ("make", "arguments", "optimizer"),
    [
        (SCHEDULERS.CosineAnnealingLR, (12,), adam),
        (SCHEDULERS.OneCycleLR, (0.1, 12), momentum),  # moves momentum, too
        (SCHEDULERS.OneCycleLR, (0.1, 12), adam),  # moves betas
        (SCHEDULERS.CyclicLR, (0.01, 0.1), momentum),
        (SCHEDULERS.MultiStepLR, ([3, 7],), adam),
        (SCHEDULERS.LambdaLR, (lambda step: 1 / (1 + step),), momentum),
        (SCHEDULERS.CosineAnnealingWarmRestarts, (4,), adam),
        (SCHEDULERS.PolynomialLR, (12,), momentum),
        (warm_up, (), momentum),
        (warm_up, (), adam),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_no_honest_scheduler_is_refused(tmp_path, make, arguments, optimizer):
    settings = {"make": make, "arguments": arguments, "optimizer": optimizer}
    whole, expected = fitted(None, **settings)
    fitted(tmp_path / "run", stop=6, **settings)
    again, model = fitted(tmp_path / "run", resume=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))
    assert again.metrics["epsilon"][-1] == whole.metrics["epsilon"][-1]


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_no_honest_optimiser_is_refused(kind):
    plan, ends = planned(small()), []
    engines = []
    for _ in range(2):
        model = small()
        engines.append(lipdp.PrivacyEngine(model, LOSS, kind(model.parameters(), lr=0.01), plan, seed=0))
    first, second = engines
    for _ in range(3):
        first.step(*toy(20).tensors, sample="own")
    second.load_state_dict(first.state_dict())
    for engine in engines:
        engine.step(*toy(20, seed=1).tensors, sample="own")
        ends.append(engine.state_dict()["digest"])
    assert ends[0] == ends[1]


def test_an_optimiser_that_nobody_knows_is_left_alone():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "name": "own"})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["rows"] = p.grad.flatten()[:2].clone()
                        p -= group["lr"] * p.grad

    model = small()
    engine = lipdp.PrivacyEngine(model, LOSS, Own(model.parameters()), planned(model), seed=0)
    engine.step(*toy(20).tensors, sample="own")
    state = engine.state_dict()
    engine.step(*toy(20).tensors, sample="own")
    engine.load_state_dict(state)
    assert engine.steps == 1
    state["optimizer"]["state"][0]["rows"][0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        engine.load_state_dict(sealed(state))
