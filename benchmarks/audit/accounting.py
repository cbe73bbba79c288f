"""ε and σ on 60 settings against references that know no grid, and the seconds of one core that each took.

    python benchmarks/audit/accounting.py                 # minutes; writes benchmarks/results/accounting.json
    python benchmarks/audit/accounting.py --only 3 17     # some of them
    python benchmarks/audit/accounting.py --theirs        # and dp-accounting itself, on its usual grid (up to 10 minutes each)

Each setting is (ε, q, steps, δ). σ is calibrated to it, and its ε computed again. References are ``tests/privacy/exact_losses.py``:
closed forms for one step and for full batches, a contour integral otherwise; where that does not converge (rare, large losses) a
very fine grid in extended precision, which is right to about 1e-4. "never below" is a ratio of at least 1 less the reference's own
precision.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "privacy"))

from exact_losses import exact_epsilon, exact_sigma, fine_grid_epsilon  # noqa: E402

from lipdp import privacy  # noqa: E402

SETTINGS: tuple[tuple[float, float, int, float], ...] = (
    # The findings.
    (0.1, 1e-3, 100_000, 1e-5), (0.01, 1e-6, 10_000_000, 1e-5),
    # One step.
    (0.01, 1e-6, 1, 1e-8), (1.0, 1e-6, 1, 1e-9), (100.0, 1e-6, 1, 1e-12), (0.1, 1e-4, 1, 1e-6), (10.0, 1e-2, 1, 1e-12),
    (0.01, 0.1, 1, 1e-5), (1.0, 0.3, 1, 1e-8), (100.0, 0.5, 1, 1e-5), (3.0, 0.9, 1, 1e-12),
    # Full batches.
    (0.01, 1.0, 1, 1e-5), (0.1, 1.0, 1000, 1e-12), (1.0, 1.0, 1, 1e-12), (1.0, 1.0, 10_000_000, 1e-6), (10.0, 1.0, 100, 1e-8),
    (100.0, 1.0, 1, 1e-5), (100.0, 1.0, 100_000, 1e-12),
    # Few steps.
    (0.1, 0.01, 10, 1e-6), (1.0, 0.1, 10, 1e-5), (10.0, 0.3, 10, 1e-8), (100.0, 0.1, 10, 1e-6), (0.01, 0.5, 10, 1e-12),
    (1.0, 1e-3, 100, 1e-6), (0.1, 0.01, 100, 1e-5), (3.0, 0.1, 100, 1e-8), (30.0, 0.5, 100, 1e-10), (0.01, 0.05, 100, 1e-9),
    # As in training.
    (1.0, 0.01, 1_000, 1e-5), (8.0, 0.1, 1_000, 1e-5), (0.1, 0.05, 1_000, 1e-8), (3.0, 0.034, 600, 1e-5), (0.5, 1e-3, 1_000, 1e-7),
    (100.0, 0.2, 1_000, 1e-6), (1.0, 0.01, 10_000, 1e-5), (3.0, 0.004, 10_000, 1e-12), (10.0, 0.05, 10_000, 1e-8),
    (0.01, 1e-3, 10_000, 1e-6), (0.1, 1e-4, 10_000, 1e-9), (50.0, 0.3, 10_000, 1e-10), (0.3, 0.02, 10_000, 1e-12),
    # Long.
    (1.0, 1e-3, 100_000, 1e-6), (3.0, 1e-4, 100_000, 1e-12), (0.01, 1e-5, 100_000, 1e-7), (10.0, 0.01, 100_000, 1e-9),
    (100.0, 0.05, 100_000, 1e-5), (0.1, 1e-5, 100_000, 1e-10), (1.0, 0.1, 100_000, 1e-12),
    (1.0, 1e-4, 1_000_000, 1e-8), (0.1, 1e-5, 1_000_000, 1e-6), (0.01, 1e-4, 1_000_000, 1e-12), (10.0, 1e-3, 1_000_000, 1e-12),
    (100.0, 0.3, 1_000_000, 1e-8), (3.0, 1e-6, 1_000_000, 1e-12),
    (1.0, 1e-5, 10_000_000, 1e-6), (0.1, 1e-6, 10_000_000, 1e-12), (10.0, 1e-4, 10_000_000, 1e-10), (1.0, 0.01, 10_000_000, 1e-12),
    (100.0, 1e-3, 10_000_000, 1e-12), (0.03, 1e-6, 10_000_000, 1e-9),
)  # fmt: skip


def cpu_seconds(call: Callable[[], float]) -> tuple[float, float, bool]:
    """What it returns, the CPU seconds it took, and whether it warned that it may be loose."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = call()
    return value, time.process_time() - start, any("larger than it need be" in str(w.message) for w in caught)


def library_epsilon(sigma: float, q: float, steps: int, delta: float, h: float) -> float:
    """dp-accounting's own figure on a grid of h."""
    from dp_accounting import pld

    ledger = pld.PLDAccountant(value_discretization_interval=h)
    ledger.compose(privacy.event(sigma, q, steps))
    return float(ledger.get_epsilon(delta))


def measure(number: int, theirs: bool) -> dict[str, Any]:
    """One row of the table."""
    target, q, steps, delta = SETTINGS[number]
    run = {"sampling_rate": q, "steps": steps, "delta": delta}
    privacy.accounting.figure.cache_clear()
    sigma, sigma_seconds, _ = cpu_seconds(lambda: privacy.calibrate_noise(epsilon=target, **run))
    privacy.accounting.figure.cache_clear()
    epsilon, seconds, loose = cpu_seconds(lambda: privacy.epsilon(noise_multiplier=sigma, **run))
    row: dict[str, Any] = {
        "target": target, **run, "sigma": sigma, "sigma_seconds": sigma_seconds, "epsilon": epsilon, "epsilon_seconds": seconds,
        "loose": loose,
    }  # fmt: skip
    try:
        row["epsilon_reference"] = exact_epsilon(sigma, q, steps, delta, epsilon)
        row["sigma_reference"] = exact_sigma(target, q, steps, delta, sigma)
        row["reference"] = "closed form" if steps == 1 or q == 1 else "integral"
    except ArithmeticError:
        row["reference"] = "fine grid"
        row["epsilon_reference"] = fine_grid_epsilon(sigma, q, steps, delta)
        # ε falls as σ^slope near there, so the reference's σ follows from its ε.
        above = privacy.epsilon(noise_multiplier=sigma * 1.01, **run)
        slope = math.log(above / epsilon) / math.log(1.01)
        row["sigma_reference"] = sigma * (target / row["epsilon_reference"]) ** (1 / slope)
    if theirs:
        figure, spent, _ = cpu_seconds(lambda: library_epsilon(sigma, q, steps, delta, 1e-4))
        row |= {"dp_accounting": figure, "dp_accounting_seconds": spent}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of settings, from 0")
    parser.add_argument("--theirs", action="store_true", help="dp-accounting on its usual grid, too")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "accounting.json")
    arguments = parser.parse_args()
    chosen = range(len(SETTINGS)) if arguments.only is None else arguments.only
    print(" no   target       q     steps   delta |        sigma   ratio-1   sec |      epsilon   ratio-1   sec | reference")
    rows = []
    for number in chosen:
        row = measure(number, arguments.theirs)
        rows.append(row)
        ratios = [row[name] / row[f"{name}_reference"] - 1 for name in ("sigma", "epsilon")]
        more = f"  theirs {row['dp_accounting']:.6g} in {row['dp_accounting_seconds']:.1f} s" if arguments.theirs else ""
        print(
            f"{number:3d} {row['target']:8g} {row['sampling_rate']:7g} {row['steps']:9d} {row['delta']:7g} | {row['sigma']:12.6g} "
            f"{ratios[0]:9.2e} {row['sigma_seconds']:5.2f} | {row['epsilon']:12.6g} {ratios[1]:9.2e} {row['epsilon_seconds']:5.2f} "
            f"| {row['reference']}{' (warned)' if row['loose'] else ''}{more}",
            flush=True,
        )
    for name in ("sigma", "epsilon"):
        ratios = [row[name] / row[f"{name}_reference"] - 1 for row in rows]
        spent = [row[f"{name}_seconds"] for row in rows]
        print(
            f"{name}: ratio to the reference 1 + ({min(ratios):.1e} to {max(ratios):.1e}); CPU seconds "
            f"{sum(spent) / len(rows):.2f} on average, {max(spent):.2f} at most"
        )
    if arguments.only is None:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
