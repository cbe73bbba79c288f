"""The same clipped gradients as Opacus, on the layers that it supports."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
from tests.clipping.helpers import assert_close, quadratic

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus")
    from opacus.grad_sample import GradSampleModule
    from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore")


def opacus_clipped(model, x, y, c, batch_first=True):
    wrapped = GradSampleModule(copy.deepcopy(model), batch_first=batch_first, loss_reduction="sum")
    quadratic(wrapped(x), y).sum().backward()
    samples = {name.removeprefix("_module."): p.grad_sample for name, p in wrapped.named_parameters()}
    norms = torch.stack([g.flatten(1).square().sum(1) for g in samples.values()]).sum(0).sqrt()
    factors = (c / norms).clamp_max(1)
    return {name: torch.einsum("b,b...->...", factors, g) for name, g in samples.items()}, norms


def mapped(model):
    """Opacus' recurrent layers name parameters as torch.nn does; the values are copied by name."""
    return {name: p.detach() for name, p in model.named_parameters()}


class First(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, x):
        return self.core(x)[0]


class SelfAttention(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, x):
        x = x.transpose(0, 1)  # Opacus' attention sees the batch second, whatever its batch_first says
        return self.core(x, x, x)[0].transpose(0, 1)


PLAIN = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear over positions": (lambda: nn.Linear(4, 3), (5, 6, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (5, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1, dilation=2), (5, 2, 8, 8)),
    "conv2d strided": (lambda: nn.Conv2d(2, 4, (2, 3), stride=(2, 1), padding="valid"), (5, 2, 7, 6)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (5, 1, 4, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (5, 3, 4, 4)),
    "network": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)
        ),
        (5, 1, 8, 8),
    ),
}


@pytest.mark.parametrize("name", list(PLAIN))
def test_plain_layers(name):
    torch.manual_seed(0)
    make, shape = PLAIN[name]
    model, x, y = make().double(), torch.randn(shape).double(), torch.linspace(0, 1, 5).double()
    compare(model, model, x, y)


def test_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    compare(model, model, torch.randint(7, (5, 6)), torch.linspace(0, 1, 5).double())


@pytest.mark.parametrize(("theirs", "ours"), [(DPRNN, nn.RNN), (DPLSTM, nn.LSTM), (DPGRU, nn.GRU)])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(theirs, ours, layers, bidirectional):
    torch.manual_seed(0)
    arguments = {"num_layers": layers, "bidirectional": bidirectional, "batch_first": True}
    model = First(ours(3, 4, **arguments).double())
    other = First(theirs(3, 4, **arguments).double())
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(mapped(model)[_torch_name(name)])
    compare(model, other, torch.randn(5, 6, 3).double(), torch.linspace(0, 1, 5).double(), _torch_name)


def _torch_name(name):
    """core.l0.ih.weight → core.weight_ih_l0, if it is not called so already."""
    parts = name.split(".")
    if len(parts) != 4:
        return name
    suffix = parts[1].replace("_reverse", "")
    return f"{parts[0]}.{parts[3]}_{parts[2]}_{suffix}{'_reverse' if 'reverse' in parts[1] else ''}"


def test_attention():
    torch.manual_seed(0)
    model = SelfAttention(nn.MultiheadAttention(4, 2).double())
    other = SelfAttention(DPMultiheadAttention(4, 2).double())
    core = model.core
    with torch.no_grad():
        for part, weight, bias in zip("qkv", core.in_proj_weight.chunk(3), core.in_proj_bias.chunk(3), strict=True):
            layer = getattr(other.core, f"{part}linear")
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        other.core.out_proj.weight.copy_(core.out_proj.weight)
        other.core.out_proj.bias.copy_(core.out_proj.bias)
    x, y = torch.randn(5, 6, 4).double(), torch.linspace(0, 1, 5).double()
    _, norms = opacus_clipped(other, x, y, 1.0, False)
    c = float(norms.median())
    expected, _ = opacus_clipped(other, x, y, c, False)
    joined = {
        "core.in_proj_weight": torch.cat([expected[f"core.{p}linear.weight"] for p in "qkv"]),
        "core.in_proj_bias": torch.cat([expected[f"core.{p}linear.bias"] for p in "qkv"]),
        "core.out_proj.weight": expected["core.out_proj.weight"],
        "core.out_proj.bias": expected["core.out_proj.bias"],
    }
    assert_close(clipping.clipped_gradients(model, quadratic, x, y, c), joined, 1e-6)


def compare(model, other, x, y, rename=lambda name: name):
    _, norms = opacus_clipped(other, x, y, 1.0)
    c = float(norms.median())
    expected, _ = opacus_clipped(other, x, y, c)
    expected = {rename(name): value for name, value in expected.items()}
    assert torch.allclose(clipping.per_example_norms(model, quadratic, x, y), norms, rtol=1e-6)
    for method in ("reweight", "ghost", "bookkeeping"):
        assert_close(clipping.clipped_gradients(model, quadratic, x, y, c, method), expected, 1e-6, method)
