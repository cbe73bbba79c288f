"""An ε, δ or ρ that people read says no less than was spent, and no more than is left: everywhere by one set of functions."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp._texts import brief, downwards, upwards
from lipdp.privacy import guarantee

ROOT = Path(__file__).parents[1]
_NAMES = {"epsilon", "epsilons", "delta", "deltas", "rho", "spent", "remaining", "claimed"}
_ROUNDED = {"upwards", "downwards", "brief", "guarantee", "percent"}  # a share is no promise
_BEFORE = re.compile(r"(ε|δ|ρ|epsilon|delta|rho)\s*(=|≤|≥|<|>|is|of|cost|costs|up to|:)?\s*$")
_DIGITS = re.compile(r"[.\d]*[efgEG%]$")


def _names(node: ast.AST) -> set[str]:
    """Parts of the names in an expression, but for what a function that rounds well is given."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ROUNDED:
        return set()
    own = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        own = node.value
    return {part for part in own.split("_") if part} | {n for child in ast.iter_child_nodes(node) for n in _names(child)}


def _text(node: ast.expr | None) -> str:
    return "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in getattr(node, "values", ())) if node else ""


def offences(code: str) -> Iterator[tuple[int, str]]:
    """Where an ε, δ or ρ becomes text in digits that are rounded to the nearest."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            before = ""
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    rounded = bool(_DIGITS.search(_text(part.format_spec)))
                    if rounded and (_names(part.value) & _NAMES or _BEFORE.search(before)):
                        yield part.lineno, ast.unparse(part)
                before = part.value if isinstance(part, ast.Constant) else ""
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            shown = called in ("number", "bound", "format") or (called == "round" and len(node.args) == 2)
            named = node.args[:1] and isinstance(node.args[0], ast.Constant)  # number("delta", delta) of lipdp._checks
            if shown and not named and any(_names(argument) & _NAMES for argument in node.args):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant | ast.JoinedStr):
            text = not isinstance(node.left, ast.Constant) or isinstance(node.left.value, str)
            if text and _names(node.right) & _NAMES:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("folder", ["src", "examples"])
def test_no_promise_is_rounded_to_the_nearest(folder):
    found = {
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, what in offences(path.read_text(encoding="utf-8"))
    }
    assert not found, "write it with upwards, downwards, brief or guarantee of lipdp._texts"


def test_nor_is_one_in_the_documentation():
    """Code that people copy."""
    wrong = re.compile(r"\{[^}]*(epsilon|delta|spent|remaining)\w*(\([^)]*\))?:[.\d]*[efg]\}")
    pages = [ROOT / "README.md", *(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    assert len(pages) > 20
    assert not {f"{path.name}: {found[0]}" for path in pages for found in wrong.finditer(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    "code",
    [
        'f"{epsilon:.3g}"',
        'f"{plan.delta:g}"',
        'f"costs ε = {value:.4f}"',
        'f"epsilon {x:g}"',
        'f"epsilon costs {max(0.0, b - y):.6g}"',
        'f"{budget.remaining:g} left"',
        "f\"{run.get('spent'):.2f}\"",
        "number(recipe.epsilon)",
        "round(history.epsilon, 3)",
        "format(rho, '.3g')",
        '"%.3f" % epsilon',
        'f"{upwards(a)} of {total_epsilon:g}"',
    ],
)
def test_what_would_be_is_found(code):
    assert list(offences(code))


@pytest.mark.parametrize("code", ['f"{epsilon!r}"', 'f"{upwards(epsilon)}"', 'f"{steps:,}"', 'f"{sigma:g}"', "round(epsilon)"])
def test_what_is_right_is_left_alone(code):
    assert not list(offences(code))


@given(st.floats(1e-300, 1e300), st.integers(1, 8))
def test_texts_are_on_the_safe_side_and_not_far_off(value, digits):
    exact, noise = Fraction(value), Fraction(1, 10**11)
    for text in (upwards(value, digits), brief(value, digits)):
        assert exact * (1 - noise) <= Fraction(text) <= exact * (1 + Fraction(10, 10**digits) + noise)
    assert exact * (1 + noise) >= Fraction(downwards(value, digits)) >= exact * (1 - Fraction(10, 10**digits) - noise)


@pytest.mark.parametrize(
    ("value", "up", "short", "down"),
    [
        (3.0, "3.000", "3", "3"),
        (3.0000000000000004, "3.000", "3", "3"),
        (2.99951, "3.000", "2.99951", "2.999"),
        (0.99999999, "1.000", "1", "0.9999"),
        (1e-5, "0.00001000", "1e-05", "1e-05"),
        (1.2345678e-7, "0.0000001235", "1.23457e-07", "1.234e-07"),
        (1234567.8, "1234568", "1.23457e+06", "1.234e+06"),
        (6.6001e30, "6.601e+30", "6.6001e+30", "6.6e+30"),
        (0.0, "0", "0", "0"),
        (math.inf, "∞", "∞", "∞"),
        (-0.00012344, "-0.0001234", "-0.00012344", "-0.0001235"),
    ],
)
def test_some_of_them(value, up, short, down):
    assert (upwards(value), brief(value), downwards(value)) == (up, short, down)


def test_a_guarantee_is_one_text():
    assert guarantee(0.99999999, 1.00000001e-5) == "ε = 1.000, δ = 1.00001e-05"
