"""Freed memory is kept, where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, torch
from lipdp._numerics import keep_freed_memory
keep_freed_memory()
def used():
    torch.ones(5 * 2**20)  # 20 MB
used()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    used()
    torch.ones(2**18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep memory in other ways")
def test_buffers_are_not_mapped_again() -> None:
    found = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    # 20 MB are 5,000 pages: given back and mapped again, they would be faults in each of the eight rounds, not in one or two.
    assert int(found.stdout) < 12_000
