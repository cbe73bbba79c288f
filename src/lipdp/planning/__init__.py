"""What is decided before a record is read: sensitivities, noise, length, cost, and all that changes on the way."""

from lipdp.planning.decide import plan
from lipdp.planning.phases import Clipping, Phase, Schedule, cosine_schedule, linear_schedule
from lipdp.planning.plan import ParameterGroup, PrivacyPlan
from lipdp.planning.suggest import suggest_optimizer

__all__ = [
    "Clipping",
    "ParameterGroup",
    "Phase",
    "PrivacyPlan",
    "Schedule",
    "cosine_schedule",
    "linear_schedule",
    "plan",
    "suggest_optimizer",
]
