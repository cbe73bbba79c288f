"""How near white-box audits come to ε in the worst case, and that they do not exceed it.

    python benchmarks/audit/tight.py                    # ε = 1, 4, 10; 20 audits each; about ten minutes on one core

One step of a linear head with all records in it: each canary has its own direction, and reaches Δ. The bounds hold with 99.9%, so
that "never above" is meant of all audits together (a bound of 95% may exceed ε once in 20 times). δ = 1e-5.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import lipdp
from lipdp import audit, losses, nn

RESULTS = Path(__file__).parent.parent / "results" / "audit"
GUESSES = {1.0: 100_000, 4.0: 20_000, 10.0: 20_000}
NAMES = ("independent guesses", "Clopper–Pearson", "any dependence", "assumption-free")


def audits(epsilon: float, method: str, count: int, size: int) -> list[audit.AuditResult]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((size,)), torch.nn.Linear(size, 2, bias=False))
    loss = losses.CrossEntropy()
    clip = {} if method == "clipless" else {"method": method, "max_grad_norm": 1.0}
    plan = lipdp.plan(model, loss, dataset_size=size, batch_size=size, delta=1e-5, epsilon=epsilon, steps=1, **clip)
    return [audit.run(plan, model, loss, guesses=GUESSES[epsilon], seconds=300.0) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--size", type=int, default=1024, help="canaries in a run")
    parser.add_argument("--methods", nargs="+", default=["clipless", "bookkeeping"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(GUESSES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        for epsilon in options.epsilons:
            found = audits(epsilon, method, options.repetitions, options.size)
            shares = sorted(result.epsilon / epsilon for result in found)
            row = {
                "method": method,
                "epsilon": epsilon,
                "audits": len(found),
                "guesses": found[0].guesses,
                "least": shares[0],
                "median": shares[len(shares) // 2],
                "largest": shares[-1],
                "above": sum(share > 1 for share in shares),
                "refuted": sum(result.refuted for result in found),
                "others": {name: max(result[name].epsilon for result in found) for name in NAMES[1:]},
                "seconds": sum(result.seconds for result in found) / len(found),
            }
            line = json.dumps(row, ensure_ascii=False)
            print(line, flush=True)
            with (RESULTS / "tight.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
