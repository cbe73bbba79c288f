"""Private estimators in scikit-learn's shape: rows in, a model with its (ε, δ) out.

What is public of a table (ranges, categories) is declared with :class:`Numeric`, :class:`Categorical` and :class:`Dates`;
``numeric``, ``categorical`` and ``dates`` are the same under the names that read well in a schema.
"""

from lipdp.estimators.base import Choice, PrivateEstimator
from lipdp.estimators.images import PrivateImageClassifier
from lipdp.estimators.schema import Categorical, Dates, Numeric, Schema
from lipdp.estimators.tables import PrivateClassifier, PrivateRegressor

numeric, categorical, dates = Numeric, Categorical, Dates

__all__ = [
    "Categorical",
    "Choice",
    "Dates",
    "Numeric",
    "PrivateClassifier",
    "PrivateEstimator",
    "PrivateImageClassifier",
    "PrivateRegressor",
    "Schema",
    "categorical",
    "dates",
    "numeric",
]
