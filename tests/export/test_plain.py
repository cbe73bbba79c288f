"""Exported modules: the same outputs, nothing of lipdp in them, and they live without it."""

from __future__ import annotations

import copy
import importlib.util
import io
import subprocess
import sys

import pytest
import torch

from lipdp import models, nn, parametrize
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.export import Site, export, lowering
from lipdp.parametrize import constraint
from lipdp.program import find_input_dtype

IMAGE = (4, 6, 7)


class MaskedMean(torch.nn.Module):
    """A layer that reads tokens and what became of them."""

    def __init__(self):
        super().__init__()
        self.table, self.mean = nn.BoundedEmbedding(11, 6, length=4), nn.MaskedTokenMean(3)

    def forward(self, ids):
        return self.mean(self.table(ids), ids)


LAYERS = {
    "linear": (nn.SpectralLinear(5, 3), (5,)),
    "linear, tokens, no bias": (nn.SpectralLinear(5, 3, bias=False), (2, 5)),
    "conv": (nn.SpectralConv2d(4, 6, 3, padding=1), IMAGE),
    "conv, stride, groups": (nn.SpectralConv2d(4, 6, (3, 2), stride=2, groups=2, bias=False), IMAGE),
    "conv, circular, dilated": (nn.SpectralConv2d(4, 2, 3, padding=2, dilation=2, padding_mode="circular"), IMAGE),
    "conv, same": (nn.SpectralConv2d(4, 2, 3, padding="same", padding_mode="reflect"), IMAGE),
    "GroupSort(2)": (nn.GroupSort(2), IMAGE),
    "GroupSort(4), last": (nn.GroupSort(3, dim=-2), IMAGE),
    "MaxMin": (nn.MaxMin(), (6,)),
    "FullSort": (nn.FullSort(), (5,)),
    "L2NormPool2d": (nn.L2NormPool2d(2), IMAGE),
    "L2NormPool2d, overlap": (nn.L2NormPool2d(3, stride=2, padding=1, eps=1e-3), IMAGE),
    "ScaledAvgPool2d": (nn.ScaledAvgPool2d((2, 3)), IMAGE),
    "LayerCentering": (nn.LayerCentering(), IMAGE),
    "LayerCentering(1)": (nn.LayerCentering(1), IMAGE),
    "ball": (nn.BoundedInput(IMAGE, norm=3.0), IMAGE),
    "sphere": (nn.BoundedInput(IMAGE, norm=3.0, mode="sphere"), IMAGE),
    "ClipGradient": (nn.ClipGradient(0.1), IMAGE),
    "Standardize": (nn.Standardize(4, radius=2.0), IMAGE),
    "Boundary": (nn.Boundary(norm=3.0, cotangent=0.1), IMAGE),
    "Boundary, cotangent": (nn.Boundary(cotangent=0.1), IMAGE),
    "Boundary, floor": (nn.Boundary(norm=3.0, floor=0.2), IMAGE),
    "Residual": (nn.Residual(nn.Sequential(nn.SpectralConv2d(4, 4, 3, padding=1), nn.GroupSort())), IMAGE),
    "Flatten": (nn.Flatten(), IMAGE),
    "floor": (nn.BoundedInput(IMAGE, norm=3.0, mode="floor", floor=0.5), IMAGE),
    "FrobeniusLinear": (nn.FrobeniusLinear(5, 3), (5,)),
    "L1Linear": (nn.L1Linear(5, 3), (5,)),
    "L1Linear, rows, tokens": (nn.L1Linear(5, 3, bias=False, rows=True), (2, 5)),
    "Conv1d": (nn.SpectralConv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "Conv1d, circular, no bias": (nn.SpectralConv1d(4, 3, 3, padding=1, bias=False, padding_mode="circular"), (4, 9)),
    "Conv3d": (nn.SpectralConv3d(2, 4, (2, 3, 2), padding=(1, 0, 1), dilation=(1, 2, 1)), (2, 3, 6, 4)),
    "ConvTranspose2d": (nn.SpectralConvTranspose2d(4, 3, 2, stride=2), IMAGE),
    "ConvTranspose2d, all": (
        nn.SpectralConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False, dilation=2),
        IMAGE,
    ),
    "FourierConv2d": (nn.FourierConv2d(4, 6, 3, padding=1), IMAGE),
    "FourierConv2d, circular": (nn.FourierConv2d(4, 6, 3, padding=1, groups=2, bias=False, padding_mode="circular"), IMAGE),
    "Cayley": (nn.SpectralLinear(5, 3, constraint=parametrize.Cayley()), (5,)),
    "conv, MatrixExp": (nn.SpectralConv2d(4, 6, 3, groups=2, constraint=parametrize.MatrixExp()), IMAGE),
    "ConvTranspose2d, Polar": (nn.SpectralConvTranspose2d(4, 6, 3, constraint=parametrize.Polar()), IMAGE),
    "conv, AOC": (nn.SpectralConv2d(4, 6, 3, stride=2, padding=1, constraint=constraint.AOC()), IMAGE),
    "conv, AOC, groups, circular": (
        nn.SpectralConv2d(4, 8, (2, 3), padding="same", groups=2, padding_mode="circular", constraint=constraint.AOC()),
        IMAGE,
    ),
    "conv, BCOP, dilated": (nn.SpectralConv2d(4, 4, 3, padding=2, dilation=2, bias=False, constraint=constraint.BCOP()), IMAGE),
    "conv, SOC": (nn.SpectralConv2d(4, 3, 3, padding=1, constraint=constraint.SOC(terms=4)), IMAGE),
    "conv, SOC, same": (nn.SpectralConv2d(4, 4, 3, padding="same", bias=False, constraint=constraint.SOC(terms=3)), IMAGE),
    "conv, CircularFFT": (
        nn.SpectralConv2d(4, 6, 3, padding=1, padding_mode="circular", constraint=constraint.CircularFFT((6, 7))),
        IMAGE,
    ),
    "Conv1d, AOC": (nn.SpectralConv1d(4, 4, 5, padding=2, constraint=constraint.AOC()), (4, 9)),
    "Conv1d, CircularFFT": (
        nn.SpectralConv1d(4, 4, 2, padding="same", padding_mode="circular", constraint=constraint.CircularFFT(8)),
        (4, 8),
    ),
    "Conv3d, AOC": (nn.SpectralConv3d(2, 2, 2, stride=2, constraint=constraint.AOC()), (2, 4, 4, 4)),
    "ConvTranspose2d, AOC": (nn.SpectralConvTranspose2d(4, 2, 3, stride=2, padding=1, constraint=constraint.AOC()), IMAGE),
    "LayerNorm": (nn.LayerNorm(5), (3, 5)),
    "LayerNorm, no bias": (nn.LayerNorm((6, 7), bias=False), IMAGE),
    "LayerNorm, no affine": (nn.LayerNorm(7, elementwise_affine=False), IMAGE),
    "RMSNorm": (nn.RMSNorm(5, scale=2.0), (3, 5)),
    "GroupNorm": (nn.GroupNorm(2, 4, eps=0.5), IMAGE),
    "GroupNorm, no affine": (nn.GroupNorm(2, 4, affine=False), IMAGE),
    "Normalize": (nn.Normalize((0.1, 0.2, 0.3, 0.4), 0.5), IMAGE),
    "Abs": (nn.Abs(), IMAGE),
    "BoundedPReLU": (nn.BoundedPReLU(4), IMAGE),
    "Householder": (nn.Householder(4), IMAGE),
    "Householder, last": (nn.Householder(6, dim=-1), (3, 6)),
    "LayerScale": (nn.LayerScale((4, 1, 1), bound=2.0), IMAGE),
    "LayerScale, scalar": (nn.LayerScale(init=0.3), IMAGE),
    "ConvexResidual": (nn.ConvexResidual(nn.GroupSort(2), weight=0.25), IMAGE),
    "ConvexResidual, learned": (nn.ConvexResidual(nn.SpectralLinear(7, 7), weight=0.25, learned=True), IMAGE),
    "ConcatResidual": (nn.ConcatResidual(nn.SpectralConv2d(4, 2, 3, padding=1)), IMAGE),
    "L2NormPool1d": (nn.L2NormPool1d(3, stride=2, padding=1), (4, 9)),
    "GlobalL2NormPool": (nn.GlobalL2NormPool(), IMAGE),
    "ScaledAvgPool1d": (nn.ScaledAvgPool1d(2, stride=3), (4, 9)),
    "ScaledAdaptiveAvgPool2d": (nn.ScaledAdaptiveAvgPool2d((3, 1)), IMAGE),
    "InvertibleDownsampling": (nn.InvertibleDownsampling(2), (3, 4, 6)),
    "InvertibleUpsampling": (nn.InvertibleUpsampling(2), IMAGE),
    "BoundedEmbedding": (nn.BoundedEmbedding(11, 6), (4,)),
    "BoundedEmbedding, padding": (nn.BoundedEmbedding(11, 6, padding_idx=2, norm=2.0, length=4), (4,)),
    "LearnedPositions": (nn.LearnedPositions(4, 6), (4, 6)),
    "SinusoidalPositions": (nn.SinusoidalPositions(4, 6, scale=0.5), (4, 6)),
    "TokenMean": (nn.TokenMean(), (4, 6)),
    "MaskedTokenMean": (MaskedMean(), (4,)),
    "TokenMean, scaled": (nn.TokenMean(4), (4, 6)),
    "TokenBall": (nn.TokenBall(2.0), (4, 6)),
    "LipschitzAttention": (nn.LipschitzAttention(6, 2, tokens=4), (4, 6)),
    "LipschitzAttention, causal": (nn.LipschitzAttention(6, 3, causal=True, bias=True, token_norm=2.0), (4, 6)),
    "TransformerBlock": (nn.TransformerBlock(6, 2, tokens=4), (4, 6)),
    "token model": (
        nn.Sequential(
            nn.BoundedEmbedding(11, 6, length=4),
            nn.LearnedPositions(4, 6),
            nn.TransformerBlock(6, 2, tokens=4, bias=True),
            nn.TokenMean(),
            nn.SpectralLinear(6, 3),
        ),
        (4,),
    ),
}
for _layer, _ in LAYERS.values():  # away from where it starts: zero biases, scales of one
    with torch.no_grad():
        for _parameter in _layer.parameters():
            _parameter.add_(torch.randn(_parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    parametrize.project_(_layer)


def inputs(shape, dtype=torch.float32):
    if not dtype.is_floating_point:
        return torch.randint(11, (5, *shape), generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    x[1] *= 1e-3
    x[2] *= 1e3
    return x


def assert_plain(plain):
    assert not any("lipdp" in type(module).__module__ for module in plain.modules())
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    assert b"lipdp" not in buffer.getvalue()


def test_every_layer_has_a_lowering_or_is_traced_through():
    layers = (getattr(nn, name) for name in nn.__all__)
    used = {type(module) for layer, _ in LAYERS.values() for module in layer.modules()}
    missing = {layer.__name__ for layer in layers if isinstance(layer, type) and layer not in used}
    assert not missing, f"layers whose export is not tested: {missing}"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_layer_exports(name, dtype):
    layer, shape = LAYERS[name]
    model = torch.nn.Sequential(layer)
    model.register_buffer("like", torch.zeros(()))  # layers without weights do not tell the model's type
    model.to(dtype)
    x = inputs(shape, find_input_dtype(model) or dtype)
    plain = export(model, input_shape=shape)
    expected = model(x)
    assert plain(x).dtype == expected.dtype == dtype
    # A Fourier transform rounds relative to the whole image, not to each of its pixels.
    largest = expected.detach().abs().flatten(1).amax(1).clamp_min(1.0) if "FFT" in name else torch.ones(len(x))
    scale = largest.reshape(-1, *[1] * (expected.ndim - 1)).to(dtype)
    assert torch.allclose(plain(x) / scale, expected / scale, rtol=1e-6, atol=1e-6)
    assert_plain(plain)


ORTHOGONAL = [name for name in LAYERS if any(word in name for word in ("AOC", "BCOP", "SOC", "FFT"))]


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_orthogonal_convolutions_are_plain_convolutions_for_torch_export(name):
    layer, shape = copy.deepcopy(LAYERS[name][0]).float(), LAYERS[name][1]
    plain, x = export(layer, input_shape=shape), inputs(shape)[3:]
    assert {type(module).__name__ for module in plain.modules() if list(module.parameters(recurse=False))} <= {
        "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d",
    }  # fmt: skip
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.allclose(program.module()(x), layer(x), rtol=1e-6, atol=1e-6)


MODELS = {
    "mlp": lambda: models.create("mlp", input_shape=(1, 8, 8), classes=5, hidden=(32, 16), clip=0.1),
    "mlp, ball": lambda: models.create("mlp", input_shape=(1, 8, 8), classes=5, hidden=(8,), input_mode="ball"),
    "lenet": lambda: models.create("lenet", input_shape=(1, 8, 8), classes=5, channels=(4, 8), hidden=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model = MODELS[name]()
    plain = model.export()
    x = inputs((1, 8, 8))
    assert torch.allclose(plain(x), model.eval()(x), rtol=1e-6, atol=1e-6)
    assert torch.allclose(plain(x[:1]), model(x[:1]), rtol=1e-6, atol=1e-6)
    assert_plain(plain)
    assert set(plain.state_dict()) == set(model.state_dict())


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.SpectralConv2d(4, 4, 3, padding=1), nn.GroupSort(2))
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(self.body(x))
        return torch.cat((x, y), 1)[:, 2:6] * self.gain


class Custom(torch.nn.Module):
    """Modules of one's own, nested; one block used at two sizes; a view by the batch's size; functional dropout."""

    def __init__(self):
        super().__init__()
        self.block, self.pool, self.head = Block(), nn.L2NormPool2d(2), nn.SpectralLinear(4 * 3 * 3, 5)

    def forward(self, x):
        x = self.block(self.pool(self.block(x)))
        x = torch.nn.functional.dropout(x, 0.5, training=self.training)
        return self.head(x.view(x.size(0), -1))


def test_modules_of_ones_own():
    model = Custom()
    plain = export(model, input_shape=(4, 6, 6))
    assert model.training
    assert not plain.training
    x = inputs((4, 6, 6))
    assert torch.allclose(plain(x), model.eval()(x), rtol=1e-6, atol=1e-6)
    assert_plain(plain)
    assert {"block.gain", "block.body.0.weight", "head.weight"} <= set(plain.state_dict())


def test_the_export_is_independent_of_the_model():
    model = MODELS["mlp"]()
    plain, x = model.export(), inputs((1, 8, 8))
    before = plain(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(plain(x), before)


def test_tied_weights_stay_tied():
    model = torch.nn.Sequential(nn.SpectralLinear(6, 6), nn.GroupSort(2), nn.SpectralLinear(6, 6))
    model[2].weight = model[0].weight
    plain = export(model, input_shape=(6,))
    assert plain.get_submodule("0").weight is plain.get_submodule("2").weight


def test_a_shared_layer_is_exported_once():
    layer = nn.SpectralConv2d(2, 2, 3, padding=1)
    plain = export(torch.nn.Sequential(layer, nn.GroupSort(2), layer), input_shape=(2, 5, 5))
    assert sum(isinstance(module, torch.nn.Conv2d) for module in plain.modules()) == 1


@pytest.mark.parametrize("norm", [0.01, 0.49, 0.51, 100.0])
def test_the_floor_scales_short_inputs_by_one_factor(norm):
    layer = nn.BoundedInput((6,), norm=3.0, mode="floor", floor=0.5)
    x = torch.nn.functional.normalize(inputs((6,))[3:], dim=1) * norm
    y = export(layer)(x)
    assert torch.allclose(y, layer(x), rtol=1e-6, atol=1e-6)
    assert torch.allclose(y.norm(dim=1), torch.tensor(3.0 * min(1.0, norm / 0.5)), rtol=1e-5)


def test_reparametrised_weights_are_exported_as_they_are_used():
    layer = nn.SpectralLinear(6, 4, constraint=parametrize.Cayley())
    plain = export(layer).get_submodule("0")
    assert torch.equal(plain.weight, layer.effective("weight"))
    assert not torch.equal(plain.weight, layer.weight)
    assert plain.weight.is_leaf
    assert plain.weight.requires_grad
    assert not export(layer.requires_grad_(False)).get_submodule("0").weight.requires_grad


class Placed(torch.nn.Module):
    """A table of positions: not what the input is looked up in."""

    def __init__(self):
        super().__init__()
        self.positions, self.head = torch.nn.Embedding(4, 6), nn.SpectralLinear(6, 3)

    def forward(self, x):
        return self.head(x + self.positions(torch.arange(x.shape[1])))


def test_a_table_of_positions_does_not_make_a_token_model():
    model, x = Placed(), inputs((4, 6))
    assert torch.allclose(export(model, input_shape=(4, 6))(x), model(x), rtol=1e-6, atol=1e-6)


def test_tensors_in_a_lowering_become_the_models():
    layer = nn.Normalize((0.1, 0.2), (0.3, 0.4))
    plain = export(torch.nn.Sequential(layer, layer), input_shape=(2, 3))
    assert set(plain.state_dict()) == {"0.mean", "0.std"}
    x = inputs((2, 3))
    assert torch.allclose(plain(x), layer(layer(x)), rtol=1e-6, atol=1e-6)
    plain.double()
    assert plain(x.double()).dtype == torch.float64


def test_torch_layers_take_the_place_of_their_twins():
    plain = {
        nn.BoundedEmbedding(11, 6): torch.nn.Embedding,
        nn.LayerNorm(6): torch.nn.LayerNorm,
        nn.RMSNorm(6): torch.nn.RMSNorm,
        nn.GroupNorm(2, 6): torch.nn.GroupNorm,
        nn.BoundedPReLU(): torch.nn.PReLU,
        nn.L1Linear(6, 2): torch.nn.Linear,
        nn.FourierConv2d(2, 2, 3): torch.nn.Conv2d,
    }
    for layer, cls in plain.items():
        found = export(layer).get_submodule("0")
        assert type(found) is cls
        assert set(found.state_dict()) == set(layer.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_torch_export(name):
    model = MODELS[name]()
    x = inputs((1, 8, 8))
    program = torch.export.export(model.export(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.allclose(program.module()(x[:3]), model.eval()(x[:3]), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))), reason="onnx is not installed")
def test_onnx(tmp_path):
    model = MODELS["lenet"]()
    torch.onnx.export(model.export(), (inputs((1, 8, 8)),), str(tmp_path / "model.onnx"), dynamo=True)
    assert (tmp_path / "model.onnx").stat().st_size > 0


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))), reason="onnx is not installed")
def test_onnx_of_orthogonal_convolutions(tmp_path):
    """One model with all of them: what ONNX gets is ordinary convolutions."""
    same = {"padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(
        nn.BoundedInput((2, 6, 6)),
        nn.SpectralConv2d(2, 4, 3, padding=1, constraint=constraint.AOC()),
        nn.SpectralConv2d(4, 4, 3, **same, constraint=constraint.CircularFFT(6)),
        nn.SpectralConv2d(4, 4, 3, padding=1, constraint=constraint.SOC(terms=3)),
        nn.SpectralConvTranspose2d(4, 2, 2, stride=2, constraint=constraint.AOC()),
    )
    torch.onnx.export(model.export(), (inputs((2, 6, 6)),), str(tmp_path / "model.onnx"), dynamo=True)
    assert (tmp_path / "model.onnx").stat().st_size > 0


def test_it_runs_where_lipdp_can_not_be_imported(tmp_path):
    x, files = inputs((1, 8, 8)), []
    for name, make in MODELS.items():
        model = make().eval()
        plain = model.export()
        files.append(tmp_path / f"{name}.pt")
        torch.save((plain, x, model(x).detach()), files[-1])
        torch.export.save(torch.export.export(plain, (x,)), tmp_path / f"{name}.pt2")
    code = """
import sys
sys.modules["lipdp"] = None
import torch
for path in sys.argv[1:]:
    plain, x, y = torch.load(path, weights_only=False)
    assert torch.allclose(plain(x), y, rtol=1e-6, atol=1e-6)
    assert torch.allclose(torch.export.load(path + "2").module()(x), y, rtol=1e-6, atol=1e-6)
assert not any(name.startswith("lipdp.") for name in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code, *map(str, files)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_bare_layer_and_a_model_of_unknown_input():
    plain = export(nn.SpectralLinear(4, 3))
    assert isinstance(plain.get_submodule("0"), torch.nn.Linear)
    with pytest.raises(ConfigurationError, match=r"layer '0' \(SpectralConv2d\).*input_shape="):
        export(nn.SpectralConv2d(4, 3, 3))
    with pytest.raises(ConfigurationError, match=r"Is input_shape right\?"):
        export(nn.SpectralLinear(4, 3), input_shape=(5,))
    with pytest.raises(DataError):
        export(nn.BoundedInput((3,)), input_shape=(5,))
    with pytest.raises(ConfigurationError, match="not dict"):
        export({})


class Twice(nn.GroupSort):
    def forward(self, x):
        return 2 * x


class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_what_can_not_be_exported_is_refused():
    with pytest.raises(UnsupportedError, match=r"can't be traced.*lowering"):
        export(Branch(), input_shape=(4,))
    assert export(Twice(), input_shape=(4,))(torch.ones(1, 4)).sum() == 8  # another forward: not GroupSort's lowering


def test_a_layer_brings_its_own_lowering():
    class Cautious(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor if x.shape[0] > 0 else x

    Cautious.__module__ = "lipdp.elsewhere"
    with pytest.raises(UnsupportedError, match="can't be traced"):
        export(Cautious(2.0), input_shape=(3,))

    @lowering(Cautious)
    def _lower(layer: Cautious, site: Site) -> torch.Tensor:
        return site.x * layer.factor

    assert_plain(export(torch.nn.Sequential(Cautious(2.0)), input_shape=(3,)))

    @lowering(Cautious)
    def _wrong(layer: Cautious, site: Site) -> torch.Tensor:
        return site.x * 2.5

    with pytest.raises(UnsupportedError, match="outputs differ"):
        export(torch.nn.Sequential(Cautious(2.0)), input_shape=(3,))

    @lowering(Cautious)
    def _itself(layer: Cautious, site: Site) -> torch.nn.Module:
        return layer

    with pytest.raises(UnsupportedError, match="register a lowering"):
        export(torch.nn.Sequential(Cautious(2.0)), input_shape=(3,))


def test_after_training_and_projection():
    model = MODELS["lenet"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    parametrize.project_(model)
    x = inputs((1, 8, 8))
    assert torch.allclose(model.export()(x), model.eval()(x), rtol=1e-6, atol=1e-6)


def test_token_models_can_be_saved_and_take_any_batch():
    model, shape = LAYERS["token model"]
    x = inputs(shape, torch.long)
    plain = export(model)
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.allclose(program.module()(x[:3]), model(x[:3]), rtol=1e-6, atol=1e-6)
    assert torch.allclose(plain(x[:1]), model(x[:1]), rtol=1e-6, atol=1e-6)
    assert set(plain.state_dict()) == set(model.state_dict())
