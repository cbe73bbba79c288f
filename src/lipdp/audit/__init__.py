"""Audits: the guarantee, seen from outside."""

from lipdp.audit.attack import ParameterAttack, SensitivityReport, sensitivities
from lipdp.audit.epsilon import run
from lipdp.audit.full import FullAudit, check
from lipdp.audit.release import Check, ReleaseReport, release_path
from lipdp.audit.results import AuditResult, EpsilonBound

__all__ = [
    "AuditResult",
    "Check",
    "EpsilonBound",
    "FullAudit",
    "ParameterAttack",
    "ReleaseReport",
    "SensitivityReport",
    "check",
    "release_path",
    "run",
    "sensitivities",
]
