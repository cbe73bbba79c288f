"""Robustness certificates: radii within which a Lipschitz network can't change its decision, and attacks to test them."""

from lipdp.certify.radii import attack, certified_accuracy, certified_auroc, certify

__all__ = ["attack", "certified_accuracy", "certified_auroc", "certify"]
