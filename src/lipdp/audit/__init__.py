"""Audits: the guarantee, seen from outside."""

from lipdp.audit.attack import ParameterAttack, SensitivityReport, sensitivities
from lipdp.audit.epsilon import run
from lipdp.audit.full import FullAudit, check
from lipdp.audit.inference import AttackRow, MembershipReport, membership
from lipdp.audit.release import Check, ReleaseReport, release_path
from lipdp.audit.results import AuditResult, EpsilonBound
from lipdp.audit.shadows import train_shadows

__all__ = [
    "AttackRow",
    "AuditResult",
    "Check",
    "EpsilonBound",
    "FullAudit",
    "MembershipReport",
    "ParameterAttack",
    "ReleaseReport",
    "SensitivityReport",
    "check",
    "membership",
    "release_path",
    "run",
    "sensitivities",
    "train_shadows",
]
