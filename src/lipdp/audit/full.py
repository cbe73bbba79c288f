"""All audits of a plan that need no data, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipdp._checks import positive
from lipdp.audit.attack import SensitivityReport, sensitivities
from lipdp.audit.epsilon import run
from lipdp.audit.release import ReleaseReport, release_path
from lipdp.audit.results import AuditResult, Report
from lipdp.errors import AuditError
from lipdp.planning.plan import PrivacyPlan


@dataclass(frozen=True)
class FullAudit(Report):
    """What all audits of a plan have shown.

    Attributes:
        sensitivities: the attack on Δ; ``None`` where nothing is proved (a plan that clips).
        release: the checks of the release path.
        epsilon: guesses about one step with all records in it.
        seconds: that all took.
    """

    sensitivities: SensitivityReport | None
    release: ReleaseReport
    epsilon: AuditResult
    seconds: float

    @property
    def parts(self) -> tuple[SensitivityReport | ReleaseReport | AuditResult, ...]:
        """Those that were made."""
        return (self.release, self.epsilon) if self.sensitivities is None else (self.sensitivities, self.release, self.epsilon)

    @property
    def refuted(self) -> bool:
        """Whether one of them refutes the plan."""
        return any(part.refuted for part in self.parts)

    def __str__(self) -> str:
        verdict = "REFUTED: the guarantee does not hold as planned" if self.refuted else "nothing speaks against the plan"
        return "\n\n".join((*map(str, self.parts), f"{verdict} ({self.seconds:.1f} s)"))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "refuted": self.refuted,
            "sensitivities": None if self.sensitivities is None else self.sensitivities.to_dict(),
            "release": self.release.to_dict(),
            "epsilon": self.epsilon.to_dict(),
            "seconds": self.seconds,
        }


def check(
    plan: PrivacyPlan,
    model: torch.nn.Module,
    loss: Any,
    *,
    seconds: float = 120.0,
    guesses: int = 20_000,
    confidence: float = 0.999,
    alarm: float = 1e-4,
    targets: Tensor | None = None,
    input_shape: tuple[int, ...] | None = None,
    progress: Callable[[str], None] | None = None,
    strict: bool = False,
) -> FullAudit:
    """Attack a plan's sensitivities, check its release path, and guess at canaries in one of its steps; no data are read.

    Args:
        plan: what is promised.
        model: it is copied, not touched.
        loss: as planned.
        seconds: about how long the attack and the guesses may take, together.
        guesses: see :func:`lipdp.audit.run`.
        confidence: see :func:`lipdp.audit.run`.
        alarm: how often a sound plan may be called faulty, by each part.
        targets: to choose from; by default all classes.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        progress: told what is being done.
        strict: raise :class:`~lipdp.errors.AuditError` where the plan is refuted.
    """
    started, half = time.monotonic(), positive("seconds", seconds) / 2
    tell = progress or (lambda what: None)
    attacked = None
    if all(group.source == "proved" for group in plan.groups):
        tell("attacking the sensitivities")
        attacked = sensitivities(model, loss, plan, seconds=half, targets=targets, input_shape=input_shape, check=False)
    tell("watching the release path")
    released = release_path(plan, model, loss, alarm=alarm, targets=targets, input_shape=input_shape)
    tell("guessing at canaries")
    guessed = run(
        plan,
        model,
        loss,
        steps=1,
        sampling=False,
        guesses=guesses,
        seconds=half,
        confidence=confidence,
        alarm=alarm,
        targets=targets,
        input_shape=input_shape,
    )
    audit = FullAudit(attacked, released, guessed, time.monotonic() - started)
    if strict and audit.refuted:
        raise AuditError(f"the audit refutes the plan\n{audit}")
    return audit
