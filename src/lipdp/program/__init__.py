"""A model as a program: what is proved is what runs."""

from lipdp.program.check import check_program
from lipdp.program.program import TABLES, Program, find_input_dtype, find_input_shape, trace
from lipdp.program.tracer import describe, line_of, trace_graph

__all__ = [
    "TABLES",
    "Program",
    "check_program",
    "describe",
    "find_input_dtype",
    "find_input_shape",
    "line_of",
    "trace",
    "trace_graph",
]
