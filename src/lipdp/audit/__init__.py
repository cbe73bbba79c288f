"""Audits: the guarantee, seen from outside."""

from lipdp.audit.epsilon import run
from lipdp.audit.results import AuditResult, EpsilonBound

__all__ = ["AuditResult", "EpsilonBound", "run"]
