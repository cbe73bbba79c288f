"""How close the fused kernels are to copying: bytes that have to be moved ÷ time, over the copy bandwidth of the same run."""

from collections.abc import Callable

import torch

from lipdp import _pairs
from lipdp._pairs import Pooling

SHAPES = ((64, 32), (128, 16), (256, 8))


def _microseconds(function: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def _copy_bandwidth() -> float:
    """GB/s, reading and writing counted."""
    numbers = torch.randn(2**28, device="cuda")
    other = torch.empty_like(numbers)
    return 2 * numbers.nbytes / _microseconds(lambda: other.copy_(numbers)) / 1e3


def roofline(rows: int = 4096) -> list[dict[str, float | str]]:
    """Sorting and 2×2 pooling, forward and back, at the shapes of the large CNN."""
    copy = _copy_bandwidth()
    found: list[dict[str, float | str]] = []
    pool = Pooling(2, 2, 1e-12)
    for channels, side in SHAPES:
        x = torch.randn(rows, channels, side, side, device="cuda").contiguous(memory_format=torch.channels_last)
        y = _pairs._forward_kernel(x, None, True, pool)
        g = torch.randn_like(y)
        jobs = {
            "sort and pool": (lambda x=x: _pairs._forward_kernel(x, None, True, pool), x.nbytes + y.nbytes),
            "its cotangent": (
                lambda x=x, y=y, g=g: _pairs._backward_kernel(x, None, y, g, True, pool),
                2 * x.nbytes + 2 * y.nbytes,
            ),
        }
        for name, (job, moved) in jobs.items():
            job()
            time = _microseconds(job)
            share = moved / time / 1e3 / copy
            found.append({"kernel": name, "channels": channels, "side": side, "us": time, "of copying": share})
            print(f"{name:14} {channels:4} channels {side:3}×{side:<3} {time:8.1f} µs  {share:5.0%} of copying at {copy:.0f} GB/s")
    return found
