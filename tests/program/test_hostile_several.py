"""Programs of several inputs, drawn line by line, trained by clipping: a record moves a step's sum by C at most, whatever they do.

They are refused with a reason; or else what is trained is the sum over records of the module's own gradients, each clipped, where
the module gives a record the same whoever is beside it.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import clipping
from lipdp._numerics import seed_all
from lipdp.errors import LipdpError
from tests.many import examples
from tests.program.hostile import (
    KINDS,
    SEVERAL,
    SEVERAL_CHANGES,
    SEVERAL_IN_PLACE,
    SEVERAL_LINES,
    SEVERAL_MIXED,
    SeveralBase,
    bodies,
    build,
    several_inputs,
)

LOSS = torch.nn.CrossEntropyLoss(reduction="none")
CLIP, NOISE, COUNT = 0.7, 1e-9, 5
METHODS = ("bookkeeping", "ghost", "reweight", "multiloss", "naive")
Sums = dict[str, torch.Tensor]


class Catch(torch.optim.SGD):
    """Keeps what it is given, and moves nothing."""

    def step(self, closure: Any = None) -> None:
        self.given = [None if p.grad is None else p.grad.double().clone() for p in self.param_groups[0]["params"]]


def rows(inputs: Any, chosen: list[int]) -> Any:
    if isinstance(inputs, dict):
        return {name: part[chosen] for name, part in inputs.items()}
    return tuple(part[chosen] for part in inputs)


def run(model: torch.nn.Module, inputs: Any) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    parts = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    fit = {name: part.clone().to(dtype) if part.is_floating_point() else part.clone() for name, part in parts}
    return model(**fit) if isinstance(inputs, dict) else model(*fit.values())  # type: ignore[no-any-return]


def gradient(model: torch.nn.Module, inputs: Any, y: torch.Tensor, passes: int = 0, seed: int = 0) -> Sums:
    """The module's own, of a copy that has seen nothing yet, or this batch so many times."""
    model = copy.deepcopy(model)
    seed_all(seed)
    for _ in range(passes):
        run(model, inputs)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(LOSS(run(model, inputs), y).sum(), list(trained.values()), allow_unused=True)
    return {n: torch.zeros_like(p).double() if g is None else g.double() for (n, p), g in zip(trained.items(), found, strict=True)}


def size_of(sums: Sums) -> float:
    return math.hypot(*(float(part.norm()) for part in sums.values()))


def apart(one: Sums, other: Sums) -> float:
    return size_of({name: one[name] - other[name] for name in one})


def planned(model: torch.nn.Module, method: str) -> lipdp.PrivacyPlan:
    settings: Any = {
        "dataset_size": 100,
        "batch_size": 10,
        "delta": 1e-3,
        "noise_multiplier": NOISE,
        "steps": 1,
        "accountant": "rdp",
    }
    return lipdp.plan(model, LOSS, method=method, max_grad_norm=CLIP, **settings)  # type: ignore[arg-type]


def trained_sum(model: torch.nn.Module, plan: lipdp.PrivacyPlan, inputs: Any, y: torch.Tensor) -> Sums:
    """What a step of an engine hands to the optimiser, as a sum."""
    model = copy.deepcopy(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = Catch(trained.values(), lr=0.0)
    with lipdp.PrivacyEngine(model, LOSS, optimizer, plan, microbatch_size=4) as engine:
        engine.step(inputs, y, sample="own")
    return {
        name: torch.zeros_like(p).double() if g is None else g * plan.batch_size
        for (name, p), g in zip(trained.items(), optimizer.given, strict=True)
    }


def summed(model: torch.nn.Module, method: str, inputs: Any, y: torch.Tensor, kept: list[int]) -> Sums:
    """Of the records that are kept, on the seats that they have among all."""
    keep = torch.zeros(COUNT, dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
    seed_all(0)
    return dict(clipping.clip_batch(copy.deepcopy(model), LOSS, inputs, y, CLIP, method, mask=keep).sums)  # type: ignore[arg-type]


def attack(model: torch.nn.Module, kind: type, method: str, leaving_out: tuple[int, ...] = (0,)) -> str | None:
    """The refusal; ``None`` where it was accepted, and held."""
    inputs, y = several_inputs(COUNT, kind), torch.arange(COUNT) % 3
    everyone = list(range(COUNT))
    try:
        alone = [gradient(model, rows(inputs, [i]), y[[i]]) for i in everyone]
        again = [gradient(model, rows(inputs, [i]), y[[i]], passes=1) for i in everyone]
        together = gradient(model, inputs, y)
    except Exception:  # no model: it does not run, or not on one record
        return "it does not run"
    numbers = all(math.isfinite(size_of(g)) for g in (*alone, together))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = planned(model, method)
            whole = trained_sum(model, plan, inputs, y)
            drawn = any(apart(gradient(model, inputs, y, seed=s), gradient(model, inputs, y, seed=0)) > 0 for s in (1, 2))
            for left_out in leaving_out:
                rest = [i for i in everyone if i != left_out]
                if drawn:  # a record has the random numbers of its seat: the others stay on theirs
                    moved = apart(*(summed(model, method, inputs, y, keep) for keep in (everyone, rest)))
                else:
                    moved = apart(whole, trained_sum(model, plan, rows(inputs, rest), y[rest]))
                assert moved <= CLIP * (1 + 1e-4), (left_out, moved / CLIP)
        except LipdpError as error:
            return str(error)
    in_company: Sums = {name: torch.stack([g[name] for g in alone]).sum(0) for name in together}
    pure = numbers and all(apart(one, two) == 0 for one, two in zip(alone, again, strict=True))
    if pure and apart(in_company, together) <= 1e-5 * (1 + size_of(together)):
        clipped = {n: torch.stack([g[n] * min(1.0, CLIP / max(size_of(g), 1e-30)) for g in alone]).sum(0) for n in together}
        assert apart(clipped, whole) <= 1e-4 * CLIP * COUNT, "what is trained is not the module"
    return None


@settings(
    max_examples=examples(int(os.environ.get("LIPDP_SEVERAL", "16"))),
    deadline=None,
    derandomize="LIPDP_SEVERAL" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    database=None,
)
@given(bodies(SEVERAL_LINES, SEVERAL_CHANGES), st.sampled_from(KINDS), st.sampled_from(METHODS))
def test_a_record_of_several_inputs_moves_a_sum_by_the_clip(drawn: tuple[str, str], kind: type, method: str) -> None:
    refusal = attack(build(*drawn, SeveralBase), kind, method, leaving_out=(0, COUNT - 1))
    assert refusal is None or len(refusal) > 10


KEEPING = ["self.last = h", "self.last = h.detach()", "self.last = [other, ids]", "self.table.last = {'h': h}"]


@pytest.mark.parametrize("line", [*SEVERAL, *SEVERAL_IN_PLACE, *SEVERAL_MIXED, *KEEPING])
def test_each_line_of_several_inputs(line: str) -> None:
    refusal = attack(build(line, base=SeveralBase), dict, "bookkeeping")
    assert line not in (*SEVERAL, *KEEPING) or refusal is None, "an ordinary model is refused"


@pytest.mark.parametrize("method", METHODS)
def test_a_model_may_keep_what_it_computed_last(method: str) -> None:
    """What a layer is run again for is no pass, and leaves nothing: what is kept is a tensor of the batch, or nothing at all."""
    for line in KEEPING[1:3]:
        assert attack(build(line, base=SeveralBase), tuple, method) is None


@pytest.mark.parametrize("method", METHODS)
def test_records_in_a_list_are_refused_at_every_step(method: str) -> None:
    model = build("self.listed.append(other)\nh = h + self.listed[1][:1]", base=SeveralBase)
    inputs, y = several_inputs(COUNT, dict), torch.arange(COUNT) % 3
    with lipdp.PrivacyEngine(model, LOSS, Catch(model.parameters(), lr=0.0), planned(model, method)) as engine:
        for _ in range(3):
            with pytest.raises(LipdpError, match=r"kept|keeps|changes while"):
                engine.step(inputs, y, sample="own")


def test_the_attack_can_succeed() -> None:
    """Against sums of whole batches that nobody follows: a mean over records moves them by more than the clip."""
    model = build("h = h + other.mean(0)", base=SeveralBase)
    inputs, y = several_inputs(COUNT, dict), torch.arange(COUNT) % 3
    rest = list(range(1, COUNT))
    alone = [gradient(model, rows(inputs, [i]), y[[i]]) for i in rest]
    assert apart(gradient(model, inputs, y), gradient(model, rows(inputs, rest), y[rest])) > 10 * CLIP
    assert all(math.isfinite(size_of(g)) for g in alone)
