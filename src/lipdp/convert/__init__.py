"""Conversion of ordinary networks into Lipschitz ones."""

from lipdp.convert.report import Conversion, ConversionReport, Row
from lipdp.convert.twin import convert

__all__ = ["Conversion", "ConversionReport", "Row", "convert"]
