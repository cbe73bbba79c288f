"""How long it takes to plan the models of the zoo: process time on one thread, the best of some repetitions.

python benchmarks/speed/planning.py --output now.json
PYTHONPATH=OLDER/src python benchmarks/speed/planning.py --output then.json        # another version of lipdp
python benchmarks/speed/planning.py --compare then.json now.json
"""

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path

import torch

import lipdp
from lipdp import losses, models

ZOO = {
    "mlp": ("mlp", (1, 28, 28), {"hidden": (128,)}),
    "lenet": ("lenet", (1, 28, 28), {}),
    "vgg5": ("vgg5", (1, 28, 28), {}),
    "vgg8": ("vgg8", (3, 32, 32), {}),
    "resnet6": ("resnet6", (3, 32, 32), {}),
    "resnet10": ("resnet10", (3, 32, 32), {}),
    "resnet18, narrow": ("resnet18", (1, 8, 8), {"width": 2}),
    "vgg11, narrow": ("vgg11", (1, 8, 8), {"width": 4, "hidden": 6}),
    "resnet, patches": ("resnet", (1, 8, 8), {"width": 4, "patch": 2, "pooled": False, "hidden": 6, "clip": 0.3}),
    "mixer": ("mixer", (3, 32, 32), {}),
    "mixer, small": ("mixer", (3, 6, 9), {"dim": 4, "patch": 3, "depth": 3}),
    "transformer": ("transformer", (1, 8, 8), {"dim": 4}),
    "transformer of tokens": ("transformer", (5,), {"dim": 4, "vocabulary": 11, "depth": 2}),
}


def milliseconds(name: str, repetitions: int) -> float:
    """Of one plan, σ given: no calibration."""
    kind, shape, options = ZOO[name]
    times = []
    for _ in range(repetitions):
        torch.manual_seed(0)
        model, loss = models.create(kind, input_shape=shape, classes=10, **options), losses.CrossEntropy(tau=4.0)
        start = time.process_time()
        lipdp.plan(model, loss, dataset_size=50_000, batch_size=500, delta=1e-5, noise_multiplier=1.0, steps=100, accountant="rdp")
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def compare(before: Path, after: Path) -> None:
    """Ratios, one by one and of all."""
    then, now = (json.loads(path.read_text()) for path in (before, after))
    ratios = {name: now[name] / then[name] for name in then.keys() & now.keys()}
    for name in sorted(ratios):
        print(f"{name:24} {then[name]:8.0f} {now[name]:8.0f} ms  {ratios[name]:.2f}")
    total = sum(now[name] for name in ratios) / sum(then[name] for name in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    print(f"all together {total:.2f}, geometric mean {mean:.2f}, worst {max(ratios.values()):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("THEN", "NOW"))
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name in ZOO:
        found[name] = milliseconds(name, options.repetitions)
        print(f"{name:24} {found[name]:8.0f} ms", flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
