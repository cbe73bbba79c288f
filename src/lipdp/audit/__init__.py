"""Audits: the guarantee, seen from outside.

- :func:`check`: all audits of a plan that need no data, in one call.
- :func:`run`: canaries in the data or not, guesses about them, lower bounds on ε.
- :func:`release_path`: sums, noise, sampling and projection of the real engine, as they leave it.
- :func:`sensitivities`: an attack on every Δ.
- :func:`membership`, :func:`train_shadows`: can a trained model's outputs tell its training records from others?

The statistics behind them are in :mod:`lipdp.audit.statistics`.
"""

from lipdp.audit.attack import ParameterAttack, SensitivityReport, sensitivities
from lipdp.audit.epsilon import run
from lipdp.audit.full import FullAudit, check
from lipdp.audit.inference import AttackRow, MembershipReport, membership
from lipdp.audit.release import Check, ReleaseReport, release_path
from lipdp.audit.results import AuditResult, EpsilonBound
from lipdp.audit.watching import train_shadows

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
