"""What a conversion decides, and what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from lipdp.bounds import Shape

__all__ = ["Conversion", "ConversionReport", "Decision", "Outcome", "Row", "Where"]

Outcome = Literal["replaced", "kept", "removed", "not converted"]


@dataclass(frozen=True)
class Where:
    """What a replacement may depend on.

    Attributes:
        shape: one example's shape of the input.
        output: one example's shape of the output.
        features: the dimension that holds the features, 1 behind a convolution and −1 behind a dense layer.
        last: whether the layer gives the model's output.
        copy_weights: whether the twin starts from the projected weights.
        alone: whether the layer reads one tensor and nothing else (no masks, no offsets).
        input: whether that tensor is the model's own input.
    """

    shape: Shape
    output: Shape
    features: int
    last: bool
    copy_weights: bool
    alone: bool = True
    input: bool = False


@dataclass(frozen=True)
class Decision:
    """``module`` takes the layer's place (``None``: nothing does)."""

    outcome: Outcome
    module: torch.nn.Module | None
    note: str = ""


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
