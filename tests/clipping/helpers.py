"""The reference: per-example gradients by a plain loop, written without the library."""

from __future__ import annotations

import warnings

import torch

import lipdp.clipping as clipping
from lipdp.errors import LipdpNotice

METHODS = ("naive", "multiloss", "reweight", "ghost", "bookkeeping")


def quadratic(outputs, targets):
    """A per-example loss with a dense, example-dependent cotangent, for outputs of any shape."""
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    flat = outputs.flatten(1)
    wave = torch.cos(torch.arange(flat.shape[1], dtype=flat.dtype, device=flat.device) * 1.7 + 0.3)
    return (flat * wave).sum(1) * (1 + targets.to(flat.dtype)) + 0.5 * flat.square().sum(1)


def reference(model, loss, x, y):
    """[{name: gradient}] for each example alone; parameters without a gradient have zeros."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(x)):
        found = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), list(parameters.values()), allow_unused=True)
        rows.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)})
    return rows


def norm(row):
    return torch.stack([g.double().square().sum() for g in row.values()]).sum().sqrt()


def clipped(rows, max_norm):
    total = {name: torch.zeros_like(g) for name, g in rows[0].items()}
    for row in rows:
        factor = min(1.0, max_norm / float(norm(row))) if float(norm(row)) > 0 else 1.0
        for name, g in row.items():
            total[name] += factor * g
    return total


def assert_close(found, expected, tolerance=1e-9, label=""):
    assert set(found) == set(expected), label
    scale = max(1.0, float(norm(expected)))
    for name in expected:
        error = float((found[name].double() - expected[name].double()).norm())
        assert error <= tolerance * scale, f"{label} {name}: off by {error:.3g} of {scale:.3g}"


def check_all(model, x, y=None, loss=quadratic, methods=METHODS, forms=("auto", "materialise", "gram"), tolerance=1e-9):
    """Every method and form: norms and clipped sums as the reference has them. Returns the norms."""
    y = torch.linspace(-0.5, 0.5, len(x), dtype=torch.float64) if y is None else y
    rows = reference(model, loss, x, y)
    norms = torch.stack([norm(row) for row in rows])
    c = float(norms.median()) or 1.0  # about half of the examples are clipped
    expected = clipped(rows, c)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LipdpNotice)
        for form in forms:
            found = clipping.per_example_norms(model, loss, x, y, form=form)
            assert torch.allclose(found.double(), norms, rtol=tolerance, atol=tolerance), (form, found, norms)
        for method in methods:
            assert_close(clipping.clipped_gradients(model, loss, x, y, c, method), expected, tolerance, method)
    return norms
