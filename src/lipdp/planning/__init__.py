"""What is decided before a record is read: sensitivities, noise, length, cost, and all that changes on the way."""

from lipdp.planning.decide import plan
from lipdp.planning.options import Clipping, Schedule
from lipdp.planning.phases import Phase, cosine_schedule, linear_schedule
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
