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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import lipdp
from lipdp import losses, privacy
from lipdp.training import step_mechanism
from lipdp.training.streams import Streams

sys.path.append(str(Path(__file__).parent))
from pairs import PAIRS

NETWORKS = ("cnn-small", "cnn-large")


def once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds; on CUDA with all that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


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


@contextmanager
def by_torch() -> Iterator[None]:
    """Steps as they would be with torch's generator: noise by randn, group by group, and no digests."""

    def noised(sums: Mapping[str, torch.Tensor], stds: Mapping[str, float], draw: object) -> dict[str, torch.Tensor]:
        return {n: total.float() + stds[n] * torch.randn(total.shape, device=total.device) for n, total in sums.items()}

    with (
        mock.patch.object(step_mechanism, "add_noise", noised),
        mock.patch.object(Streams, "step_noise", return_value=None),
        mock.patch.object(Streams, "step_done", return_value=None),
    ):
        yield


def step(name: str, method: str, batch: int, device: torch.device, rounds: int) -> dict[str, object]:
    """A whole step, with our noise and with torch's in turns: medians."""
    torch.manual_seed(0)
    clipless = method == "clipless"
    model = (PAIRS[name].lipschitz() if clipless else PAIRS[name].ordinary()).to(device)
    loss = losses.CrossEntropy(tau=10.0) if clipless else torch.nn.CrossEntropyLoss(reduction="none")
    settings = {} if clipless else {"max_grad_norm": 1.0}
    plan = lipdp.plan(
        model, loss, dataset_size=100 * batch, batch_size=batch, delta=1e-6, noise_multiplier=1.0, steps=100_000,
        accountant="rdp", method=method, **settings,
    )  # fmt: skip
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), plan, microbatch_size=batch)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.arange(batch, device=device) % 10
    ours, theirs = [], []
    for number in range(rounds):
        batches = [(x.clone(), y.clone()) for _ in range(2)]
        mine = once(lambda: engine.step(*batches[0]), device)  # noqa: B023
        with by_torch():
            other = once(lambda: engine.step(*batches[1]), device)  # noqa: B023
        if number >= rounds // 5:  # recordings are made, libraries loaded
            ours.append(mine)
            theirs.append(other)
    found = statistics.median(ours), statistics.median(theirs)
    return {
        "device": named(device),
        "step": f"{name} {method}, B = {batch}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": 1e3 * found[0],
        "step_with_randn_ms": 1e3 * found[1],
        "slower_by": found[0] / found[1] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="*", type=float, default=[1e5, 1e7])
    parser.add_argument("--batch", type=int, default=None, help="time whole steps too")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1.0)
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
            add(step(name, method, options.batch, device, options.rounds))
    if options.output:
        path = Path(options.output)
        before = json.loads(path.read_text()) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
