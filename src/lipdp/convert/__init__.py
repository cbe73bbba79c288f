"""Conversion of ordinary networks: into Lipschitz ones, or between boundaries."""

from lipdp.convert.boundaries import between_boundaries
from lipdp.convert.report import Conversion, ConversionReport, Row
from lipdp.convert.twin import convert

__all__ = ["Conversion", "ConversionReport", "Row", "between_boundaries", "convert"]
