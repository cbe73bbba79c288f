"""Models without lipdp: plain torch modules with the same outputs; and files that hold a model."""

from lipdp.export.plain import export
from lipdp.export.registry import Site, lowering
from lipdp.export.saved import load, save_model

__all__ = ["Site", "export", "load", "lowering", "save_model"]

# Imported for their effect: they register the lowerings of lipdp's layers.
from lipdp.export import rules  # noqa: F401
