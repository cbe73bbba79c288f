"""Programs drawn line by line: accepted only if what runs is what was proved and what the module does; refused with a reason."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from lipdp import losses
from lipdp.bounds import Analysis, analyse
from lipdp.errors import LipdpError
from lipdp.parametrize import project_
from tests.many import examples
from tests.program.hostile import CHANGES, LINES, WIDTH, bodies, build

LOSS = losses.CrossEntropy(tau=5.0)


def verdict(model: torch.nn.Module) -> Analysis | str:
    """The analysis of an accepted model, or the refusal; anything else than lipdp's own errors is a failure."""
    project_(model)
    try:
        return analyse(model, LOSS)
    except LipdpError as error:
        return str(error)


def per_record(function: object, parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    values = LOSS(function(x), y).sum()  # type: ignore[operator]
    found = torch.autograd.grad(values, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)}


def attack(model: torch.nn.Module, analysis: Analysis, whole_model: bool) -> None:
    """Adding a record moves the sum by at most Δ, at batch sizes that were never tried; the module's gradient is the program's."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 4, 6, 7, 13):
        x = (torch.randn(size, WIDTH, generator=generator) * 3).to(next(model.parameters()).dtype)
        y = torch.arange(size) % 3
        with_it = per_record(analysis.program, parameters, x, y)
        without = per_record(analysis.program, parameters, x[:-1], y[:-1]) if size > 1 else {}
        random = any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in model.modules())
        for name, bound in analysis.sensitivities.items():
            if size == 1 or not random:
                moved = with_it[name] - without[name] if without else with_it[name]
                assert float(moved.double().norm()) <= bound * (1 + 1e-4) + 1e-6, (name, size)
        if whole_model:
            own = per_record(model, parameters, x, y)
            for name, gradient in own.items():
                scale = 1 + float(gradient.abs().max())
                assert torch.allclose(gradient, with_it[name], atol=1e-4 * scale, rtol=0), (name, size)


@settings(
    max_examples=examples(int(os.environ.get("LIPDP_PROGRAMS", "120"))),
    deadline=None,
    derandomize="LIPDP_PROGRAMS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    database=None,
)
@given(bodies())
def test_an_accepted_program_is_bounded_and_is_the_module(drawn: tuple[str, str]) -> None:
    model = build(*drawn)
    result = verdict(model)
    if isinstance(result, str):
        assert len(result) > 30
        return
    attack(model, result, whole_model=True)


@pytest.mark.parametrize("line", [line for lines in LINES[2:] for line in lines])
def test_each_line_by_itself(line: str) -> None:
    model = build(line)
    result = verdict(model)
    if not isinstance(result, str):
        attack(model, result, whole_model=True)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_module(change: str) -> None:
    model = build("h = self.b(h)\nh = self.a(h)\nh = self.drop(h)", change)
    result = verdict(model)
    # A method replaced on the instance is traced into: its own operations are bounded.
    harmless = {"none", "tie", "double", "frozen", "evaluation", "dropout", "instance forward", "instance method"}
    assert isinstance(result, str) == (change not in harmless), result
    if not isinstance(result, str):
        attack(model, result, whole_model=True)


WITH_A_LINE = [
    "k = self.a(h)\nu, v = k.chunk(2, 1)\nu *= 100\nh = k * 1.0",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    h = self.a(h)",
    "h = torch.func.functional_call(self.a, {'weight': self.big}, (h,))",
    "h = h + torch.nn.utils.parameters_to_vector([self.p])",
    "h = h * self.complex",
    "h = h * float(h.abs().max())",
    "h[:, 0] = 7.0",
    "h = Tripled.apply(h)",
]


@pytest.mark.parametrize("body", WITH_A_LINE)
def test_a_refusal_says_where(body: str) -> None:
    result = verdict(build(body))
    assert isinstance(result, str)
    assert "line " in result or "float" in result, result
