"""The sabotage table: which planted faults the audits see at ε = 4, how fast, and how often they see one that is not there.

    python benchmarks/audit/sabotage.py                 # all faults once, 20 clean audits; about ten minutes on one core
    python benchmarks/audit/sabotage.py --clean 3       # fewer clean ones

Each fault is planted (benchmarks/audit/faults.py), a plan is made with ε = 4 and δ = 1e-5, and :func:`lipdp.audit.check` runs as
a user would run it, without any data.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from faults import FAULTS

import lipdp
from lipdp import audit, losses, nn

RESULTS = Path(__file__).parent.parent / "results" / "audit"


def setting(kind: str):
    """(model, loss, plan) of a small network at ε = 4."""
    torch.manual_seed(0)
    loss = losses.CrossEntropy(tau=4.0)
    options = {"dataset_size": 1000, "batch_size": 250, "delta": 1e-5, "epsilon": 4.0, "steps": 24}
    if kind == "conv":
        convolution = nn.SpectralConv2d(1, 4, 3, padding=1)
        model = nn.Sequential(nn.BoundedInput((1, 8, 8)), convolution, nn.GroupSort(2), nn.Flatten(), nn.SpectralLinear(256, 4))
    elif kind == "clipping":
        model = torch.nn.Sequential(nn.BoundedInput((32,)), torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        options |= {"method": "bookkeeping", "max_grad_norm": 1.0}
    else:
        model = nn.Sequential(nn.BoundedInput((32,)), nn.SpectralLinear(32, 16), nn.GroupSort(2), nn.SpectralLinear(16, 4))
    return model, loss, lipdp.plan(model, loss, **options)


def audited(kind: str, seconds: float):
    model, loss, plan = setting(kind)
    return audit.check(plan, model, loss, seconds=seconds)


def seen_by(result) -> list[str]:
    """Which parts refute the plan, and by what."""
    parts = []
    if result.sensitivities is not None and result.sensitivities.refuted:
        parts.append("Δ of " + ", ".join(row.name for row in result.sensitivities.violations))
    parts += [check.name for check in result.release.faults]
    if result.epsilon.refuted:
        parts.append(
            f"guesses (p = {result.epsilon.p_value:.1g}, ε ≥ {result.epsilon.epsilon:.2f} of {result.epsilon.claimed:.2f})"
        )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clean", type=int, default=20, help="audits of sound plans, in turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the attack and the guesses of one audit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for fault in FAULTS:
        started, worked = time.monotonic(), time.process_time()
        with fault.plant():
            parts = seen_by(audited(fault.kind, options.seconds))
        row = {"seconds": round(time.monotonic() - started, 1), "processor_seconds": round(time.process_time() - worked, 1)}
        rows.append({"fault": fault.name, "seen": bool(parts), "by": parts, **row})
        print(
            f"{fault.name:<42}{'seen' if parts else 'NOT SEEN':<10}{row['seconds']:>7.1f} s "
            f"({row['processor_seconds']:.1f} s of a core)  {'; '.join(parts)}",
            flush=True,
        )
    alarms: list[str] = []
    worked = time.process_time()
    for number in range(options.clean):
        alarms += seen_by(audited(("mlp", "conv", "clipping")[number % 3], options.seconds))
        print(f"clean audit {number + 1}: {len(alarms)} false alarms so far {alarms}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "epsilon": 4.0,
        "faults": rows,
        "clean_audits": options.clean,
        "false_alarms": alarms,
        "processor_seconds_of_a_clean_audit": round((time.process_time() - worked) / max(1, options.clean), 1),
    }
    (RESULTS / "sabotage.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
