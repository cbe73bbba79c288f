"""lipdp: differentially private deep learning whose sensitivities are proved, not clipped."""

from lipdp import (
    audit,
    bounds,
    clipping,
    data,
    diagnose,
    errors,
    features,
    losses,
    mechanisms,
    models,
    nn,
    parametrize,
    privacy,
    recipes,
    training,
)
from lipdp.bounds import sensitivities
from lipdp.certify import attack, certified_accuracy, certified_auroc, certify
from lipdp.convert import convert
from lipdp.export import export
from lipdp.saved import load, save_model
from lipdp.training import History, PrivacyEngine, PrivacyPlan, evaluate, fit, plan, suggest_optimizer

__version__ = "0.1.0"

__all__ = [
    "History",
    "PrivacyEngine",
    "PrivacyPlan",
    "attack",
    "audit",
    "bounds",
    "certified_accuracy",
    "certified_auroc",
    "certify",
    "clipping",
    "convert",
    "data",
    "diagnose",
    "errors",
    "evaluate",
    "export",
    "features",
    "fit",
    "load",
    "losses",
    "mechanisms",
    "models",
    "nn",
    "parametrize",
    "plan",
    "privacy",
    "recipes",
    "save_model",
    "sensitivities",
    "suggest_optimizer",
    "training",
]
