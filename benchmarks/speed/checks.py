"""What the checks of a step cost (the watch over model and loss, the program's classes). For its noise: benchmarks/speed/noise.py.

python benchmarks/speed/checks.py --batch 1024 --device cpu|cuda      # small and large CNN, shares of a whole clipless step
"""

import argparse
import sys
import time
from pathlib import Path

import torch

import lipdp
from lipdp import losses

sys.path.append(str(Path(__file__).parent))
from pairs import PAIRS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for name in ("cnn-small", "cnn-large"):
        torch.manual_seed(0)
        model, loss = PAIRS[name].lipschitz().to(device), losses.CrossEntropy(tau=10.0)
        sizes = {"dataset_size": 50_000, "batch_size": options.batch, "steps": 10_000}
        precision = "tf32" if device.type == "cuda" else None
        plan = lipdp.plan(model, loss, delta=1e-5, noise_multiplier=1.0, accountant="rdp", precision=precision, **sizes)
        engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        spent = {"checks": 0.0}

        def timed(owner: object, attribute: str, spent: dict[str, float] = spent) -> None:
            original = getattr(owner, attribute)

            def measured(*args: object) -> object:
                start = now()
                result = original(*args)
                spent["checks"] += now() - start
                return result

            setattr(owner, attribute, measured)

        x, y = torch.randn(options.batch, 3, 32, 32, device=device), torch.arange(options.batch, device=device) % 10

        def run(count: int, engine: lipdp.PrivacyEngine = engine, x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            batches = [(x.clone(), y.clone()) for _ in range(count)]
            start = now()
            for batch in batches:
                engine.step(*batch)
            return (now() - start) / count

        run(4)
        step = run(options.steps)
        watch = engine._watch
        for attribute in ("restore_modes", "remember_values"):
            timed(watch, attribute)
        timed(engine, "_look")
        run(options.steps)
        checks = spent["checks"] / options.steps
        print(f"{name}: step {1e3 * step:.2f} ms, checks by themselves {1e3 * checks:.3f} ms", flush=True)
        # What they add to a step, most of which they share with the device: the same run without them.
        engine._look = lambda weights=None: True  # type: ignore[method-assign]
        watch.remember_values = lambda *given, watch=watch: setattr(  # type: ignore[method-assign]
            watch, "_versions", [t._version for t in watch._tensors[1]]
        )
        without = run(options.steps)
        print(f"{name}: without them {1e3 * without:.2f} ms: they cost {max(0.0, 1 - without / step):.1%} of a step", flush=True)


if __name__ == "__main__":
    main()
