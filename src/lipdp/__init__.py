"""lipdp: differentially private deep learning whose sensitivities are proved, not clipped."""

from lipdp import bounds, losses, nn, parametrize
from lipdp.bounds import sensitivities

__version__ = "0.1.0"

__all__ = ["bounds", "losses", "nn", "parametrize", "sensitivities"]
