"""Steps per second and memory of several processes on one machine, beside one.

    torchrun --standalone --nproc-per-node=2 benchmarks/speed/ranks.py --output benchmarks/results/ranks/2.json
    torchrun --standalone --nproc-per-node=1 benchmarks/speed/ranks.py --output benchmarks/results/ranks/1.json

A network of Lipschitz layers on random images by bookkeeping and clipless; and what the parts of a step cost that several processes
add: exact sums and their exchange, beside noise and the projection.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.privacy import Stream, add_noise
from lipdp.training.distributed import present_ranks
from lipdp.training.query import carried, exact, floating, unit_of


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [nn.SpectralLinear(784, width), nn.GroupSort(2), nn.SpectralLinear(width, width), nn.GroupSort(2)]
    return nn.Sequential(nn.BoundedInput((784,)), *layers, nn.SpectralLinear(width, 10))


def steps_per_second(method: str, options: argparse.Namespace) -> float:
    model, loss = network(options.width), losses.CrossEntropy(tau=4.0)
    clip: dict[str, Any] = {} if method == "clipless" else {"max_grad_norm": 1.0}
    count = options.steps + 2
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=20_000,
        batch_size=options.batch,
        delta=1e-5,
        noise_multiplier=1.0,
        steps=count,
        method=method,  # type: ignore[arg-type]
        accountant="rdp",
        **clip,
    )
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20_000, 784, generator=draw), torch.randint(10, (20_000,), generator=draw))
    rate = 0.1 / plan.sensitivity
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=rate), plan)
    started = 0.0
    for number, batch in enumerate(engine.batches(data)):
        if number == 2:
            started = time.perf_counter()
        engine.step(*batch)
    return options.steps / (time.perf_counter() - started)


def parts(size: int) -> dict[str, float]:
    """Nanoseconds for each parameter."""
    ranks, value, unit = present_ranks(), torch.randn(size, dtype=torch.float64), unit_of(1.0)
    pair = exact(value, unit)
    work = {
        "exact": lambda: exact(value, unit),
        "exchange": lambda: ranks.add([carried(pair)]),
        "floating": lambda: floating(pair, unit),
        "noise": lambda: add_noise({"a": value}, {"a": 1.0}, Stream(bytes(32))),
    }
    found = {}
    for name, action in work.items():
        action()
        started = time.perf_counter()
        for _ in range(3):
            action()
        found[name] = (time.perf_counter() - started) / 3 / size * 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Several processes beside one.")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {
        "processes": dist.get_world_size(),
        "batch": options.batch,
        "parameters": sum(p.numel() for p in network(options.width).parameters()),
        "steps_per_second": {method: steps_per_second(method, options) for method in ("clipless", "bookkeeping")},
        "ns_per_parameter": parts(2_000_000),
        "largest_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "processors": os.cpu_count(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=2))
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
