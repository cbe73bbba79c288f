"""Audits of MNIST recipes, clipless and by clipping: what guesses about canaries show of runs on the real data.

    python benchmarks/audit/mnist.py                    # about a quarter of an hour on one core; --seconds for shorter looks

The plans are the recipes' own, for all 60,000 records; the runs are on the first few hundred of them, among which the canaries are
put (what a record's presence costs does not depend on how many others there are). Two looks at each plan: as many steps with all
records in them as cost about ε, white-box (every released sum, worst-case weights); and the whole run at the planned sampling rate,
black-box (the last weights, as the suggested optimiser leaves them). A lower bound above what those steps cost, or a p-value below
the alarm level, would refute the plan. MNIST is public: the figures may be published.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import audit, recipes
from lipdp.audit.statistics import gaussian_mu

RESULTS = Path(__file__).parent.parent / "results" / "audit"
RECIPES = ("mnist-mlp", "mnist-mlp-bookkeeping")


def looks(plan: lipdp.PrivacyPlan, seconds: float) -> dict[str, dict[str, Any]]:
    """Arguments of :func:`lipdp.audit.run` for each look. T steps without sampling are one Gaussian mechanism of μ = √T/σ."""
    steps = max(1, min(plan.steps, round((gaussian_mu(plan.epsilon, plan.delta) * plan.noise_multiplier) ** 2)))
    return {
        "white-box, steps with all records": {
            "steps": steps,
            "sampling": False,
            "canaries": 128,
            "guesses": 4_000,
            "seconds": seconds,
        },
        "black-box, the whole run": {"access": "black", "canaries": 128, "guesses": 1_000, "seconds": seconds},
    }


def audits(name: str, epsilon: float, records: int, seconds: float) -> list[dict[str, object]]:
    """All looks at a recipe's plan, in runs on so many records."""
    train, _, info = lipdp.data.load("mnist", download=False)
    data = TensorDataset(*(tensor[:records] for tensor in train.tensors))
    ready = recipes.prepare(recipes.get(name), info, seed=0, epsilon=epsilon)
    rows = []
    for look, options in looks(ready.plan, seconds).items():
        worked = time.process_time()
        result = audit.run(ready.plan, ready.model, ready.loss, data, public=True, **options)
        kept = ("claimed", "p_value", "refuted", "steps", "sampling_rate", "canaries", "runs", "guesses", "correct", "strength")
        row: dict[str, object] = {"recipe": name, "method": ready.plan.method, "planned": ready.plan.epsilon, "look": look}
        row |= {field: getattr(result, field) for field in (*kept, "confidence", "seconds")}
        row["bounds"] = {bound.name: bound.epsilon for bound in result.bounds}
        row["above"] = any(bound.epsilon > result.claimed for bound in result.bounds)
        rows.append({**row, "records": records, "processor_seconds": time.process_time() - worked})
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 4.0, 10.0])
    parser.add_argument("--records", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=45.0, help="for each look")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for epsilon in options.epsilons:
        for name in options.recipes:
            rows = audits(name, epsilon, options.records, options.seconds)
            with (RESULTS / "mnist.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main()
