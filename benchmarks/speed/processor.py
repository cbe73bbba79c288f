"""Engine steps on a processor, in turns: Opacus' MNIST example clipped by us, by Opacus and not at all; small networks clipless.

python benchmarks/speed/processor.py [--batches 64 256 512] [--seconds 4] [--threads 1] [--cells opacus-mnist mnist-cnn mlp]

Process time of the median step, in ms. Our batches are Poisson samples, drawn before the clock starts; others take one batch of the
expected size again and again. Pictures are random numbers. The clipless cells are the pairs of benchmarks/speed/pairs.py.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses

sys.path.append(str(Path(__file__).parent))
from clipping_steps import opacus_hooks, ordinary
from pairs import PAIRS

Step = Callable[[], object]
POOL = 40  # batches that are drawn ahead


def example() -> torch.nn.Module:
    """The network of Opacus' examples/mnist.py."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 8, 2, padding=3), torch.nn.ReLU(), torch.nn.MaxPool2d(2, 1),
        torch.nn.Conv2d(16, 32, 4, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(2, 1),
        torch.nn.Flatten(), torch.nn.Linear(32 * 4 * 4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10),
    )  # fmt: skip


def steps_of(model: torch.nn.Module, loss: object, shape: tuple[int, ...], batch: int, **plan: object) -> Step:
    """Steps of an engine on batches of its own, one after another."""
    x, y = torch.rand(16 * batch, *shape), torch.arange(16 * batch) % 10
    planned = lipdp.plan(
        model,
        loss,
        dataset_size=len(x),
        batch_size=batch,
        delta=1e-5,
        noise_multiplier=4.0,
        steps=100_000,
        accountant="rdp",
        **plan,
    )
    own = {"input_shape": shape} if "method" in plan else {}
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), planned, **own)
    drawn = engine.batches(TensorDataset(x, y))
    pool: list[object] = []

    def step() -> float:
        """The time of the step itself: batches are drawn ahead of it, as a loader does."""
        if not pool:
            pool.extend(itertools.islice(drawn, POOL))
        inputs, targets = pool.pop(0)  # as they were drawn: a batch that was passed over is refused
        begun = time.process_time()
        engine.step(inputs, targets)
        return time.process_time() - begun

    return step


def timed(one: Step) -> Step:
    """The step, with its time."""

    def step() -> float:
        begun = time.process_time()
        one()
        return time.process_time() - begun

    return step


def peer(make: Callable[..., Step], model: torch.nn.Module, shape: tuple[int, ...], batch: int) -> Step:
    """Steps of others, all on one batch of the size that ours have on average."""
    return timed(make(model, torch.rand(batch, *shape), torch.arange(batch) % 10))


def cell(name: str, batch: int) -> dict[str, Step]:
    """What is compared."""
    torch.manual_seed(0)
    if name == "opacus-mnist":
        shape, loss = (1, 28, 28), torch.nn.CrossEntropyLoss(reduction="none")
        return {
            "ordinary": peer(ordinary, example(), shape, batch),
            "opacus": peer(opacus_hooks, example(), shape, batch),
            "bookkeeping": steps_of(example(), loss, shape, batch, method="bookkeeping", max_grad_norm=1.0, input_shape=shape),
        }
    pair = PAIRS[name]
    return {
        "ordinary": peer(ordinary, pair.ordinary(), pair.shape, batch),
        "clipless": steps_of(pair.lipschitz(), losses.CrossEntropy(tau=10.0), pair.shape, batch),
    }


def measured(steps: dict[str, Step], seconds: float) -> dict[str, float]:
    """Median time of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    begun = time.perf_counter()
    for number in itertools.count():
        for name, step in steps.items():
            times[name] += [step()] if number > 2 else [step()][1:]
        if number > 12 and time.perf_counter() - begun > seconds:
            return {name: 1000 * statistics.median(own) for name, own in times.items()}
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["opacus-mnist"], choices=["opacus-mnist", *PAIRS])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--seconds", type=float, default=6.0, help="of a cell")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for name, batch in itertools.product(arguments.cells, arguments.batches):
        found = measured(cell(name, batch), arguments.seconds)
        rows.append({"cell": name, "batch": batch, "threads": arguments.threads, **{k: round(v, 2) for k, v in found.items()}})
        print(
            f"{name:14} {batch:6}  " + "  ".join(f"{k} {v:.2f} ms ({v / found['ordinary']:.2f})" for k, v in found.items()),
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
