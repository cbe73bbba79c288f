"""The release path under every method, looked at for as long as a night allows: exit code 4 where something refutes a plan.

    python benchmarks/audit/nightly.py                    # all settings, a minute each; --seconds for longer looks
    python benchmarks/audit/nightly.py --only "mixed"     # one of them

Each setting is a plan that leads through another part of the engine: proved bounds, each way to clip, groups, norms that change,
noise that changes, layers that freeze, steps on all records. :func:`lipdp.audit.check` attacks its sensitivities where they are
proved, watches its sums, noise, samples and projections, and guesses at canaries; a plan that is sound is called faulty once in
some 3,000 times (three parts at 1e-4). No data are read. What was seen is appended to benchmarks/results/audit/nightly.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lipdp
from lipdp import audit, losses, nn

RESULTS = Path(__file__).parent.parent / "results" / "audit" / "nightly.jsonl"
CLIP = {"max_grad_norm": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "clipless": {},
    "clipless, convolution": {"network": "conv"},
    "clipless, noise by layer": {"allocation": "optimal"},
    "clipless, noise that falls": {"schedule": lipdp.Schedule(noise=[(0.0, 1.0), (0.5, 1.3)])},
    "clipless, all records": {"batch_size": 1000},
    **{
        method: {"network": "plain", "method": method, **CLIP}
        for method in ("naive", "multiloss", "reweight", "ghost", "bookkeeping")
    },
    "per layer": {"network": "plain", "method": "bookkeeping", "clipping": lipdp.Clipping(style="per_layer"), **CLIP},
    "automatic": {"network": "plain", "method": "bookkeeping", "clipping": lipdp.Clipping(clip="automatic"), **CLIP},
    "mixed": {"network": "half", "method": "mixed", **CLIP},
}


def network(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "conv":
        convolution = nn.SpectralConv2d(1, 4, 3, padding=1)
        return nn.Sequential(nn.BoundedInput((1, 8, 8)), convolution, nn.GroupSort(2), nn.Flatten(), nn.SpectralLinear(256, 4))
    if kind == "plain":
        return torch.nn.Sequential(nn.BoundedInput((32,)), torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    last = nn.SpectralLinear(16, 4) if kind == "lipschitz" else torch.nn.Linear(16, 4)
    first = nn.SpectralLinear(32, 16) if kind == "lipschitz" else torch.nn.Linear(32, 16)
    return nn.Sequential(nn.BoundedInput((32,)), first, nn.GroupSort(2), last)


def looked_at(name: str, seconds: float, epsilon: float) -> dict[str, Any]:
    """One setting, audited."""
    options = {"dataset_size": 1000, "batch_size": 250, "delta": 1e-5, "epsilon": epsilon, "steps": 48, **SETTINGS[name]}
    model, loss = network(options.pop("network", "lipschitz")), losses.CrossEntropy(tau=4.0)
    worked = time.process_time()
    found = audit.check(lipdp.plan(model, loss, **options), model, loss, seconds=seconds, guesses=100_000)
    faults = [check.name for check in found.release.faults]
    faults += [row.name for row in found.sensitivities.violations] if found.sensitivities is not None else []
    return {
        "setting": name,
        "refuted": found.refuted,
        "faults": faults,
        "least_p_value": min(found.epsilon.p_value, *(check.p_value for check in found.release.checks)),
        "epsilon": found.epsilon.epsilon,
        "claimed": found.epsilon.claimed,
        "guesses": found.epsilon.guesses,
        "steps_watched": found.release.steps,
        "seconds": round(found.seconds, 1),
        "processor_seconds": round(time.process_time() - worked, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for the attack and the guesses of each setting")
    parser.add_argument("--epsilon", type=float, default=4.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    refuted = 0
    for name in options.only:
        row = looked_at(name, options.seconds, options.epsilon)
        refuted += row["refuted"]
        print(json.dumps(row, ensure_ascii=False), flush=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            content = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "version": lipdp.__version__, **row}
            file.write(json.dumps(content, ensure_ascii=False) + "\n")
    return 4 if refuted else 0


if __name__ == "__main__":
    sys.exit(main())
