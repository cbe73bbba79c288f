"""The largest batch whose training step still fits into so much memory, by each method (CUDA).

    python benchmarks/speed/clipping_largest.py --networks resnet18-64 cnn-large --gib 4 --limit-seconds 60 --out results

Memory is capped for the process, so that it takes seconds. Growing batches tell what a row costs, which gives a guess; from there
on by bisection (--close), with real steps. A batch fits if its first three steps run: an ordinary one, one that is recorded as a
CUDA graph, a replay (where there is no memory for a recording, ours goes on without). Ours does a batch that does not fit in parts:
that does not count, but is measured too ("in parts", up to twice what fits without privacy).
"""

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from clipping_steps import METHODS
from networks import NETWORKS

from lipdp.errors import LipdpNotice

IN_PARTS = "bookkeeping in parts"
ROUNDS = (("non-private", "bookkeeping", IN_PARTS), ("reweight",), ("opacus ghost", "opacus hooks"))
_SMALL = 4


class Trials:
    """Steps of one network by one method."""

    def __init__(self, network: str, method: str, device: torch.device) -> None:
        self.network, self.method, self.device = NETWORKS[network], method, device
        self._model: torch.nn.Module | None = None

    def peak(self, batch: int) -> float | None:
        """Bytes allocated at most by three steps of ``batch`` rows; None if they don't fit."""
        _free()
        try:
            x = self.network.inputs(batch, self.device)
            make = METHODS["bookkeeping" if self.method == IN_PARTS else self.method]
            step = make(self._made(), x, torch.randint(0, self.network.classes, (batch,), device=self.device))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", LipdpNotice)
                for _ in range(3):
                    step()
            torch.cuda.synchronize()
            if self.method != IN_PARTS and any("in parts" in str(notice.message) for notice in said):
                return None
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:  # cuDNN and cuBLAS have their own words for it
            if not any(word in str(error) for word in ("memory", "ALLOC_FAILED", "find an engine", "INTERNAL_ERROR")):
                raise
            return None
        return float(torch.cuda.max_memory_allocated())

    def _made(self) -> torch.nn.Module:
        """One for all steps: ours is verified once. Opacus changes it, and needs another each time."""
        if self._model is None or self.method.startswith("opacus"):
            torch.manual_seed(0)
            with self.device:  # initialised there: faster
                self._model = self.network.make()
        return self._model


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def largest_batch(
    peak: Callable[[int], float | None], gib: float, end: float, close: float = 0.02, enough: int | None = None
) -> int | None:
    """The largest whose ``peak`` is not None, or ``enough``; None if the time is up before it is known to ``close``."""
    if enough and peak(enough) is not None:
        return enough
    cap = gib * 2**30
    peaks: list[tuple[int, float]] = []
    size = _SMALL
    while len(peaks) < 2 or peaks[-1][1] < cap / 8:
        found = peak(size)
        if found is None:
            break
        peaks.append((size, found))
        size *= 3
    if not peaks:
        return 0
    low, high = peaks[-1][0], None
    if len(peaks) > 1:
        (fewer, less), (more, much) = peaks[-2:]
        size = max(low + 1, int(0.95 * (more + (cap - much) * (more - fewer) / max(1.0, much - less))))
    while high is None or high - low > max(1, int(close * low)):
        if time.monotonic() > end:
            return None
        if peak(size) is not None:
            low = size
            size = (low + high) // 2 if high is not None else max(low + 1, int((1 + 4 * close) * low))
        else:
            high = size
            size = max(low + 1, int((1 - 4 * close) * high)) if high > (1 + 5 * close) * low else (low + high) // 2
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18-64", "cnn-large", "cnn-small"], choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=None, choices=list(METHODS), help="besides the non-private step")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--close", type=float, default=0.02, help="how closely to look")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="what is not found by then is left out")
    parser.add_argument("--out", default=None, help="folder for largest.json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    device, end = torch.device("cuda", 0), time.monotonic() + arguments.limit_seconds
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.gib * 2**30 / total), device)
    what = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "gib": arguments.gib, "largest": []}
    whole: dict[str, int] = {}
    # Ours on every network before the peers on any: time may run out.
    rounds = ROUNDS if arguments.methods is None else (("non-private", *arguments.methods),)
    for methods in rounds:
        for network in arguments.networks:
            for method in methods:
                try:
                    enough = 2 * whole.get(network, 0) if method == IN_PARTS else None
                    found = largest_batch(Trials(network, method, device).peak, arguments.gib, end, arguments.close, enough)
                except Exception as error:  # a peer that can't do a network is a result, too
                    print(f"{network:17} {method}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                    continue
                if found is None:
                    print(f"{network:17} {method}: the time is up", flush=True)
                    continue
                whole.setdefault(network, found)
                share = found / max(whole[network], 1)
                print(f"{network:17} {method:16} largest batch in {arguments.gib:g} GiB: {found} ({share:.0%})", flush=True)
                what["largest"].append({"network": network, "method": method, "batch": found, "share": share})
                if arguments.out is not None:
                    Path(arguments.out).mkdir(parents=True, exist_ok=True)
                    (Path(arguments.out) / "largest.json").write_text(json.dumps(what, indent=1))


if __name__ == "__main__":
    main()
