"""Networks whose bounds are known, one constructor each."""

from lipdp.models.lenet import lenet
from lipdp.models.mlp import mlp
from lipdp.models.registry import create, names, register

__all__ = ["create", "lenet", "mlp", "names", "register"]
