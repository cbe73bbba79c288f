"""Conversion of ordinary networks: into Lipschitz ones, or between boundaries."""

from lipdp.convert.boundaries import between_boundaries
from lipdp.convert.twin import Conversion, ConversionReport, Row, convert

__all__ = ["Conversion", "ConversionReport", "Row", "between_boundaries", "convert"]
