"""Small settings that the tests of audits share."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

import lipdp
from lipdp import losses, nn

LONG = 1800.0  # seconds: what ends an attack is its schedule, not how busy the machine is
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "audit"

# Larger audits take minutes: LIPDP_AUDIT_FULL=1 runs them too.
full = pytest.mark.skipif(not os.environ.get("LIPDP_AUDIT_FULL"), reason="takes long; set LIPDP_AUDIT_FULL=1")

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))
faults = importlib.import_module("faults")


def line(size=64, method="clipless", **options):
    """A linear head that reaches Δ for every direction of its inputs: (model, loss, plan)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((size,)), torch.nn.Linear(size, 2, bias=False))
    clip = {} if method == "clipless" else {"method": method, "max_grad_norm": 1.0}
    settings = {"dataset_size": size, "batch_size": size, "delta": 1e-5, "steps": 1, **clip, **options}
    if "noise_multiplier" not in settings:
        settings["epsilon"] = settings.get("epsilon", 4.0)
    return model, losses.CrossEntropy(), lipdp.plan(model, losses.CrossEntropy(), **settings)


def network(kind="mlp", **options):
    """A small network with constrained weights, a convolution, or one that is clipped."""
    torch.manual_seed(0)
    loss = losses.CrossEntropy(tau=4.0)
    settings = {"dataset_size": 200, "batch_size": 50, "delta": 1e-5, "noise_multiplier": 1.2, "steps": 8, **options}
    if kind == "conv":
        layers = (nn.BoundedInput((1, 6, 6)), nn.SpectralConv2d(1, 2, 3, padding=1), nn.Flatten(), nn.SpectralLinear(72, 3))
    elif kind == "clipping":
        layers = (nn.BoundedInput((8,)), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        settings |= {"method": "bookkeeping", "max_grad_norm": 1.0}
    else:
        layers = (nn.BoundedInput((8,)), nn.SpectralLinear(8, 8), nn.GroupSort(2), nn.SpectralLinear(8, 3))
    model = nn.Sequential(*layers)
    return model, loss, lipdp.plan(model, loss, **settings)
