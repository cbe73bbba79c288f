"""``lipdp doctor``: what is installed here, what works, and what to do about the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import typer

from lipdp.cli import options
from lipdp.cli.output import console, print_json, table

__all__ = ["doctor"]

Verdict = Literal["ok", "missing", "broken"]
_CORE = ("torch", "numpy", "cryptography", "dp-accounting", "scikit-learn", "pooch", "platformdirs", "rich", "typer")
_EXTRAS = {
    "matplotlib": "figures: pip install 'lipdp[plots]'",
    "optuna": "lipdp sweep: pip install 'lipdp[sweep]'",
    "opendp": "OpenDP's noise for mechanisms: pip install 'lipdp[mechanisms]'",
    "pandas": "DataFrames in the estimators: pip install pandas",
    "tensorboard": "training.TensorBoardLogger: pip install tensorboard",
}


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    detail: str


def doctor(data: options.DataRoot = None, as_json: options.Json = False) -> None:
    """Check this installation: packages, noise, accounting, datasets, GPU. Exit code 2 where something that is needed is broken."""
    findings = [*_packages(), *(_tried(what, check) for what, check in _CHECKS.items()), *_data(data)]
    broken = [finding.what for finding in findings if finding.verdict == "broken"]
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings], "broken": broken})
    else:
        out = console()
        out.print(table(("", "verdict", "detail"), [tuple(finding) for finding in findings]))
        out.print(f"broken: {', '.join(broken)}" if broken else "All that lipdp needs works here.", markup=False)
    if broken:
        raise typer.Exit(2)


def _packages() -> list[Finding]:
    findings = [Finding("Python", "ok", platform.python_version())]
    for name in _CORE:
        try:
            findings.append(Finding(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "broken", "lipdp needs it: pip install lipdp"))
    for name, purpose in _EXTRAS.items():
        try:
            findings.append(Finding(name, "ok", f"{metadata.version(name)} ({purpose.partition(':')[0]})"))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "missing", f"optional, {purpose}"))
    return findings


def _tried(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except Exception as error:  # whatever it is, it is what the user wants to know
        return Finding(what, "broken", f"{type(error).__name__}: {error}")


def _noise() -> str:
    """Draws noise, which checks the generator against known answers on the way."""
    import torch

    from lipdp.privacy import Stream
    from lipdp.privacy.mechanism import add_noise

    drawn = add_noise({"w": torch.zeros(10_000, dtype=torch.float64)}, {"w": 1.0}, Stream())["w"]
    deviation = float(drawn.std())
    if not 0.9 < deviation < 1.1:
        raise RuntimeError(f"10,000 draws of standard deviation 1 have {deviation:.3f}")
    return f"10,000 draws, standard deviation {deviation:.3f}"


def _accounting() -> str:
    from lipdp.privacy import epsilon

    cost = epsilon(noise_multiplier=1.0, sampling_rate=0.01, steps=100, delta=1e-5)
    if not 0.5 < cost < 2:
        raise RuntimeError(f"a known run costs ε = {cost:.3f}, not about 0.9")
    return f"ε = {cost:.4f} for a known run"


def _step() -> str:
    """A whole private run, of two steps."""
    import torch
    from torch.utils.data import TensorDataset

    import lipdp
    from lipdp import losses, nn

    model = nn.Sequential(nn.BoundedInput((2,)), nn.SpectralLinear(2, 2, bias=False))
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=8, batch_size=4, delta=1e-2, noise_multiplier=1.0, steps=2)
    data = TensorDataset(torch.rand(8, 2), torch.tensor([0, 1] * 4))
    history = lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, data, evaluations=1)
    return f"two private steps, ε = {history.epsilon:.3f}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: everything runs on the processor"
    triton = "with Triton" if importlib.util.find_spec("triton") else "without Triton: noise is drawn on the processor"
    return f"{torch.cuda.get_device_name(0)}, {triton}"


_CHECKS: dict[str, Callable[[], str]] = {"noise": _noise, "accounting": _accounting, "training": _step, "GPU": _gpu}


def _data(root: Path | None) -> list[Finding]:
    from lipdp.data import available
    from lipdp.data.files import data_root

    place = data_root(root)
    there = [name for name, own in available(root).items() if own.on_disk]
    parent = place if place.exists() else next(p for p in place.parents if p.exists())
    writable: Verdict = "ok" if os.access(parent, os.W_OK) else "missing"
    note = "" if writable == "ok" else "; it can't be written to: set LIPDP_DATA"
    return [Finding("datasets", writable, f"{place}: {', '.join(there)}{note}")]
