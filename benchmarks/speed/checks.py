"""What the checks of a step cost (the watch over model and loss, on host and device). For its noise: benchmarks/speed/noise.py.

python benchmarks/speed/checks.py --device cpu|cuda     # small and large CNN, clipless and clipped: a step with them ÷ one without

Two engines take steps in turns, one of them without any check; what is compared are medians, so that neither a slow machine nor a
recording that is made once decides. On a processor it is process time, with the time of all threads.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

import lipdp
from lipdp import losses

sys.path.append(str(Path(__file__).parent))
from pairs import PAIRS


def engine_of(name: str, method: str, batch: int, device: torch.device) -> lipdp.PrivacyEngine:
    """An engine for very many steps of one network."""
    torch.manual_seed(0)
    clipless = method == "clipless"
    model = (PAIRS[name].lipschitz() if clipless else PAIRS[name].ordinary()).to(device)
    loss = losses.CrossEntropy(tau=10.0) if clipless else torch.nn.CrossEntropyLoss(reduction="none")
    settings = {} if clipless else {"max_grad_norm": 1.0, "input_shape": PAIRS[name].shape}
    plan = lipdp.plan(
        model, loss, dataset_size=100 * batch, batch_size=batch, delta=1e-6, noise_multiplier=4.0, steps=100_000,
        accountant="rdp", method=method, precision="tf32" if device.type == "cuda" else None, **settings,
    )  # fmt: skip
    shape = {} if clipless else {"input_shape": PAIRS[name].shape}
    return lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), plan, **shape)


def without_checks(engine: lipdp.PrivacyEngine) -> None:
    """Nothing is looked at any more: structure, settings, hooks, values on either side."""
    watch = engine._run.watch
    words = watch._elsewhere

    def nothing(*_: object) -> None:
        return None

    watch.restore_modes = watch.check_structure = watch.remember_values = nothing  # type: ignore[method-assign]
    watch.compare = watch.compare_here = watch.compare_there = lambda *_: True  # type: ignore[method-assign]
    if words is not None:
        watch.digest_elsewhere = lambda *_: words  # type: ignore[method-assign]


def in_turns(engines: list[lipdp.PrivacyEngine], batch: int, rounds: int, seconds: float) -> list[float]:
    """Median time of a step of each."""
    device = engines[0].device
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.arange(batch, device=device) % 10
    times: list[list[float]] = [[] for _ in engines]
    begun, now = time.perf_counter(), time.perf_counter if device.type == "cuda" else time.process_time
    for number in range(rounds):
        for own, engine in zip(times, engines, strict=True):
            given = x.clone(), y.clone()
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = now()
            engine.step(*given, sample="own")
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= min(8, rounds // 3):  # recordings are made, libraries loaded
                own.append(now() - start)
        if time.perf_counter() - begun > seconds and len(times[0]) >= 5:
            break
    return [statistics.median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network and method, at most")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    for name in ("cnn-small", "cnn-large"):
        for method in ("clipless", "bookkeeping"):
            engines = [engine_of(name, method, options.batch, device) for _ in range(2)]
            without_checks(engines[1])
            step, bare = in_turns(engines, options.batch, options.rounds, options.seconds)
            share = f"{1 - bare / step:.2%} of a step"
            print(
                f"{name} {method}, B = {options.batch}: {1e3 * step:.3f} ms, without checks {1e3 * bare:.3f} ms: {share}",
                flush=True,
            )


if __name__ == "__main__":
    main()
