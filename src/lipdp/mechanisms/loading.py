"""Mechanisms as they are read from files: every field checked, what they promise derived anew, and tried on neighbours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import read
from lipdp.mechanisms.files import load_file
from lipdp.mechanisms.mechanism import FORMAT, Mechanism
from lipdp.mechanisms.problem import Problem

__all__ = ["checked_report", "from_content", "load", "neighbours"]

_PAIRS, _LARGEST = 24, 20_000  # neighbours to try, and records above which none are: reading a file should be quick


@dataclass(frozen=True)
class _Content:
    kind: str
    problem: Problem
    title: str
    report: dict[str, Any]
    state: Any


def load(path: str | os.PathLike[str]) -> Mechanism:
    """A mechanism that was saved. Nothing in the file is executed, what it promises is derived anew, and tried on neighbours.

    Args:
        path: a file of :meth:`Mechanism.save`.
    """
    return load_file(path, FORMAT, from_content)


def neighbours(n: int, pairs: int = _PAIRS) -> tuple[Tensor, Tensor]:
    """Sorted unit datasets in pairs that differ in one record: uniform ones, of ends only, half and half, and constant ones.

    The sensitivity of what a file holds follows from its content by proof; tried on these, it is looked at a second time.
    """
    generator = torch.Generator().manual_seed(n)
    t = torch.rand(pairs, n, generator=generator, dtype=torch.float64)
    quarter = pairs // 4
    t[:quarter] = t[:quarter].round()
    t[quarter : 2 * quarter] = (torch.arange(n) < n // 2).to(torch.float64)
    t[2 * quarter : 3 * quarter] = t[2 * quarter : 3 * quarter, :1]
    other = t.clone()
    other[:, 0] = torch.where(torch.rand(pairs, generator=generator) < 0.5, 1 - t[:, 0].round(), t[:, 0].round())
    return t.sort(-1).values, other.sort(-1).values


def from_content(content: Any) -> Mechanism:
    """The inverse of :meth:`Mechanism.content`: every field is checked, and that neighbours don't move it further than it says."""
    own: _Content = read(_Content, content, "the mechanism")
    if own.kind not in Mechanism.kinds:
        raise ConfigurationError(f"the mechanism.kind is {own.kind[:60]!r}: it has to be one of {', '.join(Mechanism.kinds)}")
    made = Mechanism.kinds[own.kind]._from_state(own.problem, own.title, checked_report(own.report), own.state)
    if own.problem.n <= _LARGEST:
        for moved, allowed in made.moved(*neighbours(own.problem.n)):
            if moved > allowed:
                raise ConfigurationError(f"one record moves what it noises by {moved} steps, and its noise is for {allowed}.")
    return made


def checked_report(report: Any, losses: Any = float) -> dict[str, Any]:
    """A report of plain values; ``losses`` is the type of its expected loss, where it has one."""
    own: dict[str, Any] = read(dict[str, Any], report, "the mechanism's report")
    _check_plain(own, "the mechanism's report")
    if "expected_loss" in own:
        read(losses, own["expected_loss"], "the mechanism's report.expected_loss")
    return own


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, part in read(dict[str, Any], value, where).items():
            _check_plain(part, f"{where}[{name!r}]")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            _check_plain(part, f"{where}[{number}]")
    elif isinstance(value, str):
        read(str, value, where)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ConfigurationError(f"{where} is a {type(value).__name__}: a report holds plain values")
