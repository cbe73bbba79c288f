"""Fast per-example clipping for any PyTorch model: the norm of every example's gradient, without computing the gradients."""

from lipdp.clipping import rules_conv, rules_layers, rules_sequence  # noqa: F401  (they register rules)
from lipdp.clipping.adoption import check_supported
from lipdp.clipping.batch import Clip, Group, MaxNorm, Style, clipping_groups
from lipdp.clipping.clipper import Clipped, Clipper, Method, Pending
from lipdp.clipping.contribution import Contribution, Dense, Form, PositionSum, Scatter, norm_rule, refuse
from lipdp.clipping.once import clip_batch, clipped_gradients, per_example_norms
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.support import LayerSupport, Support, support

CapturedClipping = Clipping = Clipper  # what it was called before

__all__ = [
    "CapturedClipping",
    "Clip",
    "Clipped",
    "Clipper",
    "Clipping",
    "Contribution",
    "Dense",
    "Form",
    "Group",
    "LayerSupport",
    "MaxNorm",
    "Method",
    "OuterSum",
    "Pending",
    "PositionSum",
    "Scatter",
    "Style",
    "Support",
    "check_supported",
    "clip_batch",
    "clipped_gradients",
    "clipping_groups",
    "norm_rule",
    "per_example_norms",
    "refuse",
    "support",
]
