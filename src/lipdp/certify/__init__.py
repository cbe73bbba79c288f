"""Robustness certificates: radii within which a Lipschitz network can't change its decision, and attacks to test them."""

from lipdp.certify.pgd import attack
from lipdp.certify.radii import certified_accuracy, certified_auroc, certify

__all__ = ["attack", "certified_accuracy", "certified_auroc", "certify"]
