"""Membership inference on a model that remembers, and on its twin that was trained with ε = 10.

    python benchmarks/audit/membership.py               # about a minute on one core

Digits, of which 30% have a random label, so that there is something to remember: 400 members, 400 others, the rest for four shadows
of each kind, all drawn from one pool at random. The network without privacy is the same network, trained by the same
:func:`lipdp.fit` with hardly any noise.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import audit, losses, nn
from lipdp.training.account import several_runs

RESULTS = Path(__file__).parent.parent / "results" / "audit"
SIZE, STEPS = 400, 300


def records() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Members, others, pool."""
    draw = torch.Generator().manual_seed(0)
    parts = [part.tensors for part in lipdp.data.load("digits")[:2]]
    x, y = (torch.cat([part[number] for part in parts]) for number in range(2))
    order = torch.randperm(len(y), generator=draw)
    x, y = x[order].flatten(1).float(), y[order]
    noisy = torch.rand(len(y), generator=draw) < 0.3
    y = torch.where(noisy, torch.randint(10, (len(y),), generator=draw), y)
    cuts = (slice(0, SIZE), slice(SIZE, 2 * SIZE), slice(2 * SIZE, None))
    members, others, pool = (TensorDataset(x[cut], y[cut]) for cut in cuts)
    return members, others, pool


def make():
    model = nn.Sequential(nn.BoundedInput((64,), norm=4.0), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    return model, losses.CrossEntropy(), torch.optim.Adam(model.parameters(), lr=5e-3)


def trained(plan, data) -> torch.nn.Module:
    torch.manual_seed(0)
    model, loss, optimizer = make()
    with several_runs():  # what two models together spend is not the question
        lipdp.fit(model, loss, optimizer, plan, data)
    return model


def main() -> None:
    torch.set_num_threads(1)
    members, others, pool = records()
    fixed = {"dataset_size": SIZE, "batch_size": 200, "delta": 1e-4, "steps": STEPS, "method": "bookkeeping", "accountant": "rdp"}
    plans = {
        "no privacy": lipdp.plan(*make()[:2], noise_multiplier=1e-4, max_grad_norm=10.0, **fixed),
        "ε = 10": lipdp.plan(*make()[:2], epsilon=10.0, max_grad_norm=1.0, **fixed),
    }
    content = {}
    for name, plan in plans.items():
        started, worked = time.monotonic(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            shadows = audit.train_shadows(make, plan, pool, 4, folder)
        took = {
            "shadow_seconds": round(time.monotonic() - started, 1),
            "shadow_cpu_seconds": round(time.process_time() - worked, 1),
        }
        model = trained(plan, members)
        accuracy = [lipdp.evaluate(model, losses.CrossEntropy(), part)["accuracy"] for part in (members, others)]
        report = audit.membership(model, members, others, shadows=shadows)
        print(f"{name}: accuracy {accuracy[0]:.1%} on members, {accuracy[1]:.1%} on others\n{report}\n", flush=True)
        content[name] = {"accuracy": accuracy, "epsilon": plan.epsilon, **took, **report.to_dict()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "membership.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
