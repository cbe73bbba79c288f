"""What a conversion decides, and what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lipdp.twins import Outcome

__all__ = ["Conversion", "ConversionReport", "Row"]


@dataclass(frozen=True)
class Row:
    """One operation: where it is, what it was, what became of it, and why."""

    where: str
    before: str
    outcome: Outcome
    after: str = ""
    note: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """Every replacement, and everything that could not be converted.

    Attributes:
        rows: in the order of execution. Operations that need no change (flatten, reshape, concatenation …) have none.
        bounded: whether every parameter of the twin has a finite sensitivity.
        verdict: that in words: the largest sensitivity, or the calculus's own message.
    """

    rows: tuple[Row, ...]
    bounded: bool
    verdict: str

    @property
    def unconverted(self) -> tuple[Row, ...]:
        """What could not be converted and stands in the twin as it was."""
        return tuple(row for row in self.rows if row.outcome == "not converted")

    def __str__(self) -> str:
        header = ("layer", "was", "", "now", "note")
        table = [header, *((row.where, row.before, row.outcome, row.after, row.note) for row in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
        lines.insert(1, "─" * max(map(len, lines)))
        return "\n".join((*lines, "", self.verdict))


@dataclass(frozen=True)
class Conversion:
    """The Lipschitz twin of a model, and the report of how it came about. Unpacks as ``twin, report = lipdp.convert(…)``."""

    model: torch.nn.Module
    report: ConversionReport

    def __iter__(self) -> Iterator[torch.nn.Module | ConversionReport]:
        return iter((self.model, self.report))
