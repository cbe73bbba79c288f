"""Fast per-example clipping for any PyTorch model: the norm of every example's gradient, without computing the gradients."""

from lipdp.clipping import rules_attention, rules_conv, rules_dense, rules_recurrent  # noqa: F401  (they register rules)
from lipdp.clipping.contribution import Contribution, Dense, OuterSum, PositionSum, Scatter
from lipdp.clipping.methods import Method, clipped_gradients, per_example_norms
from lipdp.clipping.registry import norm_rule, refuse

__all__ = [
    "Contribution",
    "Dense",
    "Method",
    "OuterSum",
    "PositionSum",
    "Scatter",
    "clipped_gradients",
    "norm_rule",
    "per_example_norms",
    "refuse",
]
