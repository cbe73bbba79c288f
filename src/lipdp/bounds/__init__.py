"""The calculus of bounds: how far activations, cotangents and per-example gradients can reach, proved from the graph."""

from lipdp.bounds.analysis import Analysis, ConvolutionNote, ParameterBound, analyse, convolution_notes, sensitivities
from lipdp.bounds.calculus import Bound, Call, ParameterRef, Shape, Transfer, rule, rule_for_function, times
from lipdp.bounds.operator_norm import certified_norm, conv_norm_fft
from lipdp.bounds.propagate import program_of

__all__ = [
    "Analysis",
    "Bound",
    "Call",
    "ConvolutionNote",
    "ParameterBound",
    "ParameterRef",
    "Shape",
    "Transfer",
    "analyse",
    "certified_norm",
    "conv_norm_fft",
    "convolution_notes",
    "program_of",
    "rule",
    "rule_for_function",
    "sensitivities",
    "times",
]

# Imported for their effect: they register the rules of torch's own layers and functions.
from lipdp.bounds import (  # noqa: F401
    rules_elementwise,
    rules_functions,
    rules_norms,
    rules_pools,
    rules_weighted,
)
