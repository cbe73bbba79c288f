"""Time of noise against torch's own generator, which nobody should use for it: whole releases, sums included.

python benchmarks/noise.py                                   # 1e5 and 1e7 values on the processor
python benchmarks/noise.py --device cuda --sizes 1e5 1e7 1e8 --output benchmarks/results/noise.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lipdp import privacy


def seconds(work: Callable[[], object], device: torch.device, least: float) -> float:
    """Median over repetitions that take ``least`` seconds in all, five of them at least; on CUDA with all that it started."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once(), once()
    times = [once() for _ in range(5)]
    while sum(times) < least:
        times.append(once())
    return statistics.median(times)


def measure(size: int, device: torch.device, least: float) -> dict[str, object]:
    """``add_noise`` on float32 sums (bound, as in training, and not), and torch.randn with an addition."""
    sums = torch.zeros(size, device=device)
    draw = torch.Generator(device).manual_seed(0)
    bound, loose = privacy.Stream(), privacy.Stream(bound=False)
    ours = seconds(lambda: privacy.add_noise({"a": sums}, {"a": 1.3}, bound), device, least)
    alone = seconds(lambda: privacy.add_noise({"a": sums}, {"a": 1.3}, loose), device, least)
    theirs = seconds(lambda: torch.randn(size, device=device, generator=draw).mul_(1.3).add_(sums), device, least)
    only = seconds(lambda: torch.randn(size, device=device, generator=draw), device, least)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "values": size,
        "noise_ms": 1e3 * ours,
        "noise_not_bound_ms": 1e3 * alone,
        "randn_and_add_ms": 1e3 * theirs,
        "randn_ms": 1e3 * only,
        "ratio_to_randn": ours / only,
        "ratio_to_randn_and_add": ours / theirs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="+", type=float, default=[1e5, 1e7])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--output", default=None, help="JSON file that gets the rows added")
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes:
        rows.append(measure(int(size), torch.device(arguments.device), arguments.seconds))
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in rows[-1].items()),
            flush=True,
        )
    if arguments.output:
        path = Path(arguments.output)
        before = json.loads(path.read_text()) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
