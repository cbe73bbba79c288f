"""Models without lipdp: plain torch modules with the same outputs."""

from lipdp.export.lowering import Site, lowering
from lipdp.export.plain import export

__all__ = ["Site", "export", "lowering"]
