"""The errors lipdp raises. Each message names the thing, says why it is refused, and says what to do."""

from __future__ import annotations

__all__ = [
    "AuditError",
    "BudgetError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "Interrupted",
    "LipdpError",
    "LipdpNotice",
    "LipdpWarning",
    "RepeatedRunWarning",
    "RepeatedStepError",
    "UnboundedError",
    "UnexpectedError",
    "UnsupportedError",
]


class LipdpError(Exception):
    """Root of every error of this library."""


class ConfigurationError(LipdpError, ValueError):
    """An argument that can't be meant: a negative epsilon, a batch larger than the dataset, an unknown name."""


class BudgetError(LipdpError, RuntimeError):
    """The privacy budget does not allow it: too small for one step, or already spent."""


class RepeatedStepError(BudgetError):
    """A step that was made before would be made again as another release, which nobody pays for; see ``engine.give_up()``."""


class AuditError(LipdpError, RuntimeError):
    """An audit has refuted what is promised: a bound was beaten, or what is released is not what the plan says."""


class UnboundedError(LipdpError, ValueError):
    """Some sensitivity is infinite: an unbounded input, an unconstrained hidden layer, a loss that is not Lipschitz."""


class UnsupportedError(LipdpError, TypeError):
    """A module or function that can't be analysed, or that mixes the examples of a batch."""


class DataError(LipdpError, ValueError):
    """The data are not what they should be: missing, corrupt, not finite, of the wrong shape."""


class UnexpectedError(LipdpError, RuntimeError):
    """An exception of somebody else's, met with private records at hand: its type and place, without its text."""


class CheckpointError(LipdpError, RuntimeError):
    """A checkpoint that is corrupt, or that belongs to another model or plan."""


class LipdpWarning(UserWarning):
    """Something legal that is probably not meant, e.g. delta at or above one over the dataset's size."""


class RepeatedRunWarning(LipdpWarning):
    """A second run over the same data that no budget adds up to the first."""


class LipdpNotice(UserWarning):
    """Something legal and correct that costs time or memory, e.g. a layer whose per-example gradients are materialised."""


class Interrupted(KeyboardInterrupt):
    """A run was stopped by SIGINT (Ctrl-C) or SIGTERM, after a whole step; the message says how it goes on.

    Attributes:
        signal: the signal's number.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
