"""Time of noise against torch's own generator, which nobody should use for it: whole releases, and whole steps.

python benchmarks/speed/noise.py                                   # releases of 1e5 and 1e7 values on the processor
python benchmarks/speed/noise.py --device cuda --sizes 1e5 1e7 1e8 --output benchmarks/results/noise.json
python benchmarks/speed/noise.py --device cuda --sizes --batch 1024     # steps of the benchmark CNNs, clipless and clipped
"""

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lipdp
from lipdp import privacy
from lipdp.privacy.mechanism import Draw
from lipdp.privacy.randomness import Stream
from lipdp.training.streams import Prepared

sys.path.append(str(Path(__file__).parent))
from checks import engine_of, in_turns

NETWORKS = ("cnn-small", "cnn-large")


def once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds; on CUDA with all that was started, on a processor of process time."""
    now = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = now()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now() - start


def seconds(work: Callable[[], object], device: torch.device, least: float) -> float:
    """Median over repetitions that take ``least`` seconds in all, five of them at least."""
    work(), work()
    times = [once(work, device) for _ in range(5)]
    while sum(times) < least:
        times.append(once(work, device))
    return statistics.median(times)


def named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def release(size: int, device: torch.device, least: float) -> dict[str, object]:
    """``add_noise`` on float32 sums (bound, as in training, and not), and torch.randn with an addition."""
    sums = torch.zeros(size, device=device)
    draw = torch.Generator(device).manual_seed(0)
    bound, loose = privacy.Stream(), privacy.Stream(bound=False)
    ours = seconds(lambda: privacy.add_noise({"a": sums}, {"a": 1.3}, bound), device, least)
    alone = seconds(lambda: privacy.add_noise({"a": sums}, {"a": 1.3}, loose), device, least)
    theirs = seconds(lambda: torch.randn(size, device=device, generator=draw).mul_(1.3).add_(sums), device, least)
    only = seconds(lambda: torch.randn(size, device=device, generator=draw), device, least)
    return {
        "device": named(device),
        "values": size,
        "noise_ms": 1e3 * ours,
        "noise_not_bound_ms": 1e3 * alone,
        "randn_and_add_ms": 1e3 * theirs,
        "randn_ms": 1e3 * only,
        "ratio_to_randn": ours / only,
        "ratio_to_randn_and_add": ours / theirs,
    }


def by_torch(engine: lipdp.PrivacyEngine) -> None:
    """Steps as they would be with torch's generator: noise by randn, group by group, no keys and no digests for them."""

    def draw(answer: Any, settings: Any, stream: object) -> dict[str, torch.Tensor]:
        sums, stds = answer.sums, settings.stds
        return {n: total.float() + stds[n] * torch.randn(total.shape, device=total.device) for n, total in sums.items()}

    def draw_on_device(answer: Any, settings: Any, stream: object) -> Draw:
        names = sorted(answer.sums)

        def function(*sums: torch.Tensor) -> tuple[dict[str, torch.Tensor], None]:
            return draw(types.SimpleNamespace(sums=dict(zip(names, sums, strict=True))), settings, None), None

        return Draw(function, tuple(answer.sums[name] for name in names), tuple(settings.stds.items()))

    def prepare(number: int, *_: object) -> Prepared:
        return Prepared(number, bytes(32), torch.zeros(0, 2, dtype=torch.int64))

    streams = engine._run.streams
    engine._run.mechanism.draw = draw  # type: ignore[method-assign]
    engine._run.mechanism.draw_on_device = draw_on_device  # type: ignore[method-assign]
    streams.prepare = prepare  # type: ignore[method-assign]
    stream = Stream()
    streams.noise = lambda *_: stream  # type: ignore[method-assign]
    streams.take = streams.step_done = lambda *_: None  # type: ignore[method-assign]


def step(name: str, method: str, batch: int, device: torch.device, rounds: int, least: float) -> dict[str, object]:
    """A whole step, with our noise and with torch's in turns: medians."""
    engines = [engine_of(name, method, batch, device) for _ in range(2)]
    by_torch(engines[1])
    ours, theirs = in_turns(engines, batch, rounds, least)
    return {
        "device": named(device),
        "step": f"{name} {method}, B = {batch}",
        "parameters": sum(p.numel() for p in engines[0].model.parameters()),
        "step_ms": 1e3 * ours,
        "step_with_randn_ms": 1e3 * theirs,
        "slower_by": ours / theirs - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="*", type=float, default=[1e5, 1e7])
    parser.add_argument("--batch", type=int, default=None, help="time whole steps too")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size, ten times for each network and method")
    parser.add_argument("--output", default=None, help="JSON file that gets the rows added")
    options = parser.parse_args()
    device, rows = torch.device(options.device), []

    def add(row: dict[str, object]) -> None:
        rows.append(row)
        print("  ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{v}" for name, v in row.items()), flush=True)

    for size in options.sizes:
        add(release(int(size), device, options.seconds))
    for name in options.networks if options.batch else ():
        for method in ("clipless", "bookkeeping"):
            add(step(name, method, options.batch, device, options.rounds, 10 * options.seconds))
    if options.output:
        path = Path(options.output)
        before = json.loads(path.read_text()) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
