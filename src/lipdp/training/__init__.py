"""Private training: the engine, the whole run in one call. (Plans are :mod:`lipdp.planning`'s; their names still work here.)"""

from lipdp.losses import predict
from lipdp.planning import (
    ParameterGroup,
    Phase,
    PrivacyPlan,
    cosine_schedule,
    linear_schedule,
    plan,
    suggest_optimizer,
)
from lipdp.training.account import several_runs
from lipdp.training.callbacks import Callback, History, Logger, MLflowLogger, ProgressBar, Run, TensorBoardLogger, WandbLogger
from lipdp.training.checkpoint import load_checkpoint, save_checkpoint
from lipdp.training.engine import PrivacyEngine
from lipdp.training.evaluation import evaluate
from lipdp.training.fit import fit

__all__ = [
    "Callback",
    "History",
    "Logger",
    "MLflowLogger",
    "ParameterGroup",
    "Phase",
    "PrivacyEngine",
    "PrivacyPlan",
    "ProgressBar",
    "Run",
    "TensorBoardLogger",
    "WandbLogger",
    "cosine_schedule",
    "evaluate",
    "fit",
    "linear_schedule",
    "load_checkpoint",
    "plan",
    "predict",
    "save_checkpoint",
    "several_runs",
    "suggest_optimizer",
]
