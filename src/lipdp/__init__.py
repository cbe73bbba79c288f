"""lipdp: differentially private deep learning whose sensitivities are proved, not clipped."""

from lipdp import bounds, clipping, data, errors, losses, models, nn, parametrize, privacy, recipes, training
from lipdp.bounds import sensitivities
from lipdp.training import History, PrivacyEngine, PrivacyPlan, evaluate, fit, plan

__version__ = "0.1.0"

__all__ = [
    "History",
    "PrivacyEngine",
    "PrivacyPlan",
    "bounds",
    "clipping",
    "data",
    "errors",
    "evaluate",
    "fit",
    "losses",
    "models",
    "nn",
    "parametrize",
    "plan",
    "privacy",
    "recipes",
    "sensitivities",
    "training",
]
