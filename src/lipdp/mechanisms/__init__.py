"""Private statistics: means, medians, quantiles, histograms, by mechanisms that are fitted to public beliefs.

mechanism = lipdp.mechanisms.learn(query="median", epsilon=1.0, n=100, bounds=(0, 10))
answer = mechanism.release(x, budget=lipdp.privacy.Budget("survey.budget", epsilon=2.0, delta=1e-6, dataset="survey"))
"""

from lipdp.mechanisms.answering import Plan, answer, plan
from lipdp.mechanisms.distributions import Distribution, Everyday, Mixture, World
from lipdp.mechanisms.files import BudgetLedger
from lipdp.mechanisms.gaussian import GaussianPlan
from lipdp.mechanisms.joint import JointQuantiles
from lipdp.mechanisms.learning import Comparison, Settings, compare, learn
from lipdp.mechanisms.lines import Line, release_line
from lipdp.mechanisms.loading import load
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.problem import Problem, Query
from lipdp.mechanisms.questions import Answer
from lipdp.mechanisms.spending import Moments, Spending, Vector, release_moments, release_query
from lipdp.mechanisms.unknown_size import OpenPlan
from lipdp.mechanisms.vector import ColumnMechanism, VectorMechanism, learn_columns, learn_vector, load_columns, load_vector

__all__ = [
    "Answer",
    "BudgetLedger",
    "ColumnMechanism",
    "Comparison",
    "Distribution",
    "Everyday",
    "GaussianPlan",
    "JointQuantiles",
    "Line",
    "Mechanism",
    "Mixture",
    "Moments",
    "OpenPlan",
    "Plan",
    "Problem",
    "Query",
    "Settings",
    "Spending",
    "Vector",
    "VectorMechanism",
    "World",
    "answer",
    "compare",
    "learn",
    "learn_columns",
    "learn_vector",
    "load",
    "load_columns",
    "load_vector",
    "plan",
    "release_line",
    "release_moments",
    "release_query",
]
