"""How often a property is tried: enough to attack it in every run, and ``LIPDP_EXAMPLES`` times as often where there is time."""

from __future__ import annotations

import os

__all__ = ["examples"]


def examples(count: int) -> int:
    """So many examples, or LIPDP_EXAMPLES times as many."""
    return max(1, round(count * float(os.environ.get("LIPDP_EXAMPLES", "1"))))
