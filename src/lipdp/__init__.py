"""lipdp: differentially private deep learning whose sensitivities are proved, not clipped."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    planning,
    privacy,
    recipes,
    training,
)
from lipdp.bounds import sensitivities
from lipdp.certify import attack, certified_accuracy, certified_auroc, certify
from lipdp.convert import convert
from lipdp.export import export
from lipdp.planning import Clipping, PrivacyPlan, Schedule, plan, suggest_optimizer
from lipdp.saved import load, save_model
from lipdp.training import History, PrivacyEngine, evaluate, fit

if TYPE_CHECKING:
    from lipdp import estimators, report
    from lipdp.estimators import PrivateClassifier, PrivateImageClassifier, PrivateRegressor

__version__ = "0.1.0"

__all__ = [
    "Clipping",
    "History",
    "PrivacyEngine",
    "PrivacyPlan",
    "PrivateClassifier",
    "PrivateImageClassifier",
    "PrivateRegressor",
    "Schedule",
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
    "estimators",
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
    "planning",
    "privacy",
    "recipes",
    "report",
    "save_model",
    "sensitivities",
    "suggest_optimizer",
    "training",
]

# scikit-learn takes longer to import than all of lipdp: only when it is asked for.
_LAZY = dict.fromkeys(("PrivateClassifier", "PrivateImageClassifier", "PrivateRegressor"), "estimators")


# Pickles of fitted estimators and of whole models name the modules in which their classes stood when they were written.
_STOOD_IN = {
    "audit.curves": "audit.statistics",
    "features.straighten": "features.layers",
    "mechanisms.lattice": "mechanisms.problem",
    "mechanisms.robust": "mechanisms.worst",
    "mechanisms.squares": "mechanisms.truths",
    "models.mixer": "models.lipschitz",
    "parametrize.orthogonal_conv": "parametrize.convolution",
    "privacy.adaptive": "privacy.quantile",
    "training.averaging": "training.update",
    "training.history": "training.callbacks",
}
sys.modules.update({f"lipdp.{then}": import_module(f"lipdp.{now}") for then, now in _STOOD_IN.items()})


def __getattr__(name: str) -> Any:
    if name in ("estimators", "report"):
        return import_module(f"lipdp.{name}")
    if name in _LAZY:
        return getattr(import_module(f"lipdp.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'lipdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
