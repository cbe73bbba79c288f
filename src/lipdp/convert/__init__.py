"""Conversion of ordinary networks: into Lipschitz ones, or between boundaries."""

from lipdp.convert.boundaries import NormReport, Renormed, between_boundaries, per_example_norms
from lipdp.convert.twin import Conversion, ConversionReport, Row, convert

# lipdp.convert is the function, which hides this package: what belongs to it is found on it.
vars(convert).update(between_boundaries=between_boundaries, per_example_norms=per_example_norms)

__all__ = [
    "Conversion",
    "ConversionReport",
    "NormReport",
    "Renormed",
    "Row",
    "between_boundaries",
    "convert",
    "per_example_norms",
]
