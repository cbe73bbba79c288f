"""Lipschitz twins of ordinary networks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lipdp import losses, nn
from lipdp.bounds import analyse, certified_norm
from lipdp.certify import certify
from lipdp.convert import Conversion, convert
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.parametrize import Constrained


def mlp():
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 9),
        torch.nn.GELU(),
        torch.nn.Linear(9, 5),
        torch.nn.Softmax(dim=1),
    )


class LeNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = torch.nn.Conv2d(6, 16, 3, bias=False)
        self.fc1, self.fc2 = torch.nn.Linear(16, 12), torch.nn.Linear(12, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(torch.relu(self.conv2(x)), (2, 2))
        x = x.view(x.size(0), -1)
        x = F.dropout(self.fc1(x).relu(), 0.25, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


class Block(torch.nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(outputs), torch.nn.BatchNorm2d(outputs)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = torch.nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = torch.nn.Sequential(torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False), torch.nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.pool = torch.nn.MaxPool2d(3, 2, 1)
        self.layers = torch.nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.average = torch.nn.AdaptiveAvgPool2d(1)
        self.fc = torch.nn.Linear(16, 5)

    def forward(self, x):
        x = self.average(self.layers(self.pool(F.relu(self.stem(x)))))
        return self.fc(torch.flatten(x, 1))


def vgg():
    layers, depth = [], 1
    for width in (8, 16):
        layers += [torch.nn.Conv2d(depth, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU(inplace=True)]
        layers += [torch.nn.MaxPool2d(2)]
        depth = width
    features = torch.nn.Sequential(*layers)
    classifier = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(True), torch.nn.Dropout(), torch.nn.Linear(32, 5))
    return torch.nn.Sequential(features, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), classifier)


NETWORKS = {"mlp": mlp, "lenet": LeNet, "resnet": ResNet, "vgg": vgg}
SHAPE = (1, 8, 8)


@pytest.mark.parametrize("copy_weights", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_twin_is_bounded_and_has_the_same_shapes(name, copy_weights):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    twin, report = convert(model, SHAPE, input_norm=2.0, copy_weights=copy_weights)
    assert report.bounded
    assert not report.unconverted
    assert "finite sensitivity" in str(report)
    x = torch.randn(4, *SHAPE)
    assert twin.training
    assert twin(x).shape == model(x).shape
    analysis = analyse(twin, losses.CrossEntropy())
    assert all(0 < row.sensitivity < 1e3 for row in analysis.parameters)
    assert {type(m) for m in twin.modules() if list(m.parameters(recurse=False))} <= {nn.SpectralLinear, nn.SpectralConv2d}
    for layer in twin.modules():
        if isinstance(layer, Constrained):
            groups = getattr(layer, "groups", 1)
            assert certified_norm(layer.weight.detach().reshape(groups, -1, layer.weight[0].numel())).max() < 1.001
    # the original is left as it was, but for the running statistics that this test's own forward pass has moved
    assert all(
        torch.equal(state[key], value) for key, value in model.state_dict().items() if "running" not in key and "num" not in key
    )
    assert model.training


@pytest.mark.parametrize("name", NETWORKS)
def test_the_twin_exports_and_certifies(name):
    twin = convert(NETWORKS[name](), SHAPE).model
    x = torch.randn(4, *SHAPE)
    assert torch.allclose(twin.export()(x), twin.eval()(x), rtol=1e-6, atol=1e-6)
    assert (certify(twin, x) >= 0).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_the_bound_holds(name):
    """The measured gradient of each parameter is below the twin's sensitivities."""
    torch.manual_seed(1)
    twin, loss = convert(NETWORKS[name](), SHAPE).model.double(), losses.CrossEntropy()
    x, y = torch.randn(8, *SHAPE, dtype=torch.float64), torch.randint(0, 5, (8,))
    bounds = analyse(twin, loss).sensitivities
    for i in range(8):
        twin.zero_grad()
        loss(twin(x[i : i + 1]), y[i : i + 1]).sum().backward()
        for key, parameter in twin.named_parameters():
            assert parameter.grad is None or parameter.grad.norm() <= bounds[key]


def rows(model, shape=SHAPE, **options):
    report = convert(model, shape, **options).report
    return {row.where: row for row in report.rows}, report


def test_the_report_of_an_mlp():
    found, report = rows(mlp())
    assert {where: row.outcome for where, row in found.items()} == {
        "1": "replaced", "2": "replaced", "3": "replaced", "4": "replaced", "5": "kept", "6": "replaced", "7": "removed",
    }  # fmt: skip
    assert found["1"].after.startswith("SpectralLinear")
    assert found["2"].after.startswith("LayerCentering")
    assert found["3"].after.startswith("GroupSort")
    assert "9 channels are odd" in found["5"].note
    assert "logits" in found["7"].note
    assert "GELU" in str(report)


def test_the_report_of_functions():
    found, _ = rows(LeNet())
    assert found["function 'max_pool2d'"].after.startswith("L2NormPool2d(kernel_size=(2, 2)")
    assert found["function 'avg_pool2d'"].after.startswith("ScaledAvgPool2d(kernel_size=(2, 2)")
    assert found["tensor method '.relu()'"].after.startswith("GroupSort")
    assert found["function 'dropout'"].outcome == "kept"
    assert "1.33" in found["function 'dropout'"].note
    assert found["function 'log_softmax'"].outcome == "removed"
    assert "√64" in found["conv1"].note


def test_functional_dropout_follows_the_mode():
    twin = convert(LeNet(), SHAPE).model
    x = torch.randn(4, *SHAPE)
    assert not torch.equal(twin(x), twin(x))
    twin.eval()
    assert torch.equal(twin(x), twin(x))


def test_the_report_of_a_resnet():
    found, _ = rows(ResNet())
    assert found["function 'iadd' in the forward of 'layers.0'"].after == "(x + y)/2"
    assert "windows overlap" in found["pool"].note
    assert found["average"].after.startswith("ScaledAvgPool2d(kernel_size=(2, 2)")


def test_the_average_takes_the_sums_place():
    class Sum(torch.nn.Module):
        def forward(self, x):
            return x + (x * 3.0)

    twin = convert(Sum(), (4,), input_norm=100.0).model
    x = torch.randn(2, 4)
    assert torch.allclose(twin(x), x * 2)


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm_like = torch.nn.Bilinear(4, 4, 4)
        self.conv = torch.nn.ConvTranspose1d(4, 4, 1)
        self.position = torch.nn.Parameter(torch.zeros(4))
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        x = self.lstm_like(x, x) + self.position
        x = self.conv(x[:, :, None])[:, :, 0]
        return self.last(torch.cumprod(x, 1))


def test_what_can_not_be_converted_is_named():
    found, report = rows(Odd(), (4,))
    assert {row.where for row in report.unconverted} == {"lstm_like", "conv", "position", "function 'cumprod'"}
    assert not report.bounded
    assert all(name in str(report) for name in ("Bilinear", "position", "cumprod", "Not converted: lstm_like"))
    assert found["last"].outcome == "replaced"
    assert all(row.note for row in report.unconverted)
    assert convert(Odd(), (4,)).model(torch.ones(3, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    ("layer", "shape", "outcome", "after"),
    [
        (torch.nn.LayerNorm(6), (3, 6), "replaced", "LayerCentering(dim=(-1,))"),
        (torch.nn.InstanceNorm2d(4), (4, 4, 4), "replaced", "LayerCentering(dim=(2, 3))"),
        (torch.nn.GroupNorm(2, 4), (4, 4, 4), "replaced", "LayerCentering(dim=None)"),
        (torch.nn.BatchNorm1d(1), (1,), "removed", ""),
        (torch.nn.MaxPool2d(2, ceil_mode=True), (4, 5, 5), "kept", ""),
        (torch.nn.AvgPool2d(3, 1), (4, 5, 5), "kept", ""),
        (torch.nn.AdaptiveAvgPool2d(5), (4, 5, 5), "removed", ""),
        (torch.nn.AdaptiveMaxPool2d((2, 1)), (4, 4, 4), "replaced", "L2NormPool2d(kernel_size=(2, 4), stride=(…)"),
        (torch.nn.PReLU(), (5,), "replaced", "ReLU()"),
        (torch.nn.PReLU(), (6,), "replaced", "GroupSort(group_size=2, dim=1)"),
        (torch.nn.Dropout(0.0), (6,), "removed", ""),
        (torch.nn.Sigmoid(), (1,), "removed", ""),
        (torch.nn.Conv2d(4, 2, 3, padding="same", groups=2), (4, 4, 4), "replaced", "SpectralConv2d(4, 2, kernel_size=(3, 3), …)"),
        (torch.nn.Conv1d(4, 2, 3, padding=1), (4, 7), "replaced", "SpectralConv1d(4, 2, kernel_size=(3,), st…)"),
        (torch.nn.Conv3d(1, 2, 2, stride=2), (1, 4, 4, 4), "replaced", "SpectralConv3d(1, 2, kernel_size=(2, 2, 2…)"),
        (torch.nn.ConvTranspose2d(4, 2, 3, 2, groups=2), (4, 3, 3), "replaced", "SpectralConvTranspose2d(4, 2, kernel_size…)"),
        (torch.nn.Linear(6, 4), (3, 6), "replaced", "SpectralLinear(in_features=6, out_feature…)"),
    ],
)
def test_single_layers(layer, shape, outcome, after):
    conversion = convert(layer, shape)
    (row,) = conversion.report.rows
    assert (row.outcome, row.after) == (outcome, after)
    assert conversion.model.eval()(torch.randn(2, *shape)).shape == layer.eval()(torch.randn(2, *shape)).shape


def test_adaptive_pools_of_uneven_windows_stay():
    (row,) = convert(torch.nn.AdaptiveAvgPool2d(2), (4, 5, 5)).report.rows
    assert row.outcome in ("kept", "not converted")  # kept where the calculus has a rule for it
    assert "do not divide" in row.note


def test_activations_behind_dense_layers_sort_the_last_dimension():
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU())
    assert convert(net, (3, 6)).model.network.get_submodule("1").dim == -1


def test_shared_layers_stay_shared():
    layer = torch.nn.Linear(4, 4)
    twin = convert(torch.nn.Sequential(layer, torch.nn.ReLU(), layer), (4,)).model
    assert sum(isinstance(module, nn.SpectralLinear) for module in twin.modules()) == 1
    assert len(list(twin.parameters())) == 2


def test_copied_weights_are_those_of_the_model():
    net = torch.nn.Linear(6, 6)
    torch.nn.init.orthogonal_(net.weight)
    twin = convert(net, (6,), copy_weights=True).model
    assert torch.allclose(next(p for p in twin.parameters() if p.ndim == 2), net.weight, atol=1e-5)


def test_lipdp_layers_are_left_alone():
    net = torch.nn.Sequential(nn.SpectralLinear(4, 4), nn.GroupSort(2), torch.nn.Linear(4, 2))
    conversion = convert(net, (4,))
    assert [row.where for row in conversion.report.rows] == ["2"]
    assert conversion.report.bounded


def test_models_that_can_not_be_traced_are_refused():
    class Branch(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Two(torch.nn.Module):
        def forward(self, x, y):
            return x + y

    with pytest.raises(UnsupportedError, match=r"Branch can't be traced.*by hand"):
        convert(Branch(), (4,))
    with pytest.raises(UnsupportedError, match="takes 2 inputs"):
        convert(Two(), (4,))
    with pytest.raises(ConfigurationError, match=r"layer '0' \(Linear\) fails on examples of shape \(5,\)"):
        convert(torch.nn.Sequential(torch.nn.Linear(4, 2)), (5,))
    with pytest.raises(ConfigurationError, match="not str"):
        convert("resnet18", (4,))


def test_it_unpacks():
    conversion = convert(mlp(), SHAPE)
    assert isinstance(conversion, Conversion)
    assert tuple(conversion) == (conversion.model, conversion.report)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Conv1d(2, 4, 3, stride=2, bias=False), (2, 9)),
        (torch.nn.Conv3d(2, 4, 2, padding=1), (2, 3, 4, 3)),
        (torch.nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, dilation=2), (4, 3, 4)),
    ],
)
def test_other_convolutions_keep_shapes_and_take_the_weights_along(layer, shape):
    fresh = convert(layer, shape).model.network.get_submodule("0")
    with torch.no_grad():
        layer.weight.copy_(fresh.weight)  # inside the set: projection does not move it
    conversion = convert(layer, shape, copy_weights=True)
    assert conversion.report.bounded
    twin = conversion.model.network.get_submodule("0")
    assert conversion.model(torch.ones(3, *shape)).shape == layer(torch.ones(3, *shape)).shape
    assert torch.allclose(twin.weight, layer.weight, atol=1e-4)
    assert sorted(dict(twin.named_parameters())) == sorted(dict(layer.named_parameters()))
    if layer.bias is not None:
        positions = layer(torch.ones(1, *shape)).numel() // layer.out_channels
        assert f"at {positions} places" in conversion.report.rows[0].note


def test_a_transposed_convolution_called_with_an_output_size_is_left():
    class Up(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.ConvTranspose2d(2, 2, 3, stride=2)

        def forward(self, x):
            return self.up(x, output_size=[8, 8])

    conversion = convert(Up(), (2, 3, 3))
    assert [row.where for row in conversion.report.unconverted] == ["up"]
    assert conversion.model(torch.ones(1, 2, 3, 3)).shape == (1, 2, 8, 8)


# ---------------------------------------------------------------------------------------------------- tokens


class Attentive(torch.nn.Module):
    """Embedding, self-attention in a residual, a pooled head: what people write with torch.nn.MultiheadAttention."""

    def __init__(self, need_weights=False, **options):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
        self.need_weights = need_weights

    def forward(self, ids):
        x = self.table(ids)
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.head(self.norm(x + y).mean(dim=1))


def encoder():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), layer, torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.nn.Flatten(),
        torch.nn.Linear(24, 3),
    )  # fmt: skip


def bag():
    return torch.nn.Sequential(torch.nn.EmbeddingBag(11, 8), torch.nn.Linear(8, 3))


TOKENS = {
    "attention": (Attentive, (5,), {nn.BoundedEmbedding, nn.LipschitzAttention}),
    "attention, weights": (lambda: Attentive(need_weights=True), (5,), {nn.LipschitzAttention}),
    "encoder": (encoder, (3, 4), {nn.TransformerBlock}),
    "bag": (bag, (5,), {nn.BoundedEmbedding, nn.TokenMean}),
}


@pytest.mark.parametrize("copy_weights", [False, True])
@pytest.mark.parametrize("name", TOKENS)
def test_token_models_have_bounded_twins(name, copy_weights):
    torch.manual_seed(0)
    make, shape, expected = TOKENS[name]
    model = make().eval()
    twin, report = convert(model, shape, copy_weights=copy_weights)
    assert report.bounded, str(report)
    assert not report.unconverted
    assert expected <= {type(module) for module in twin.modules()}
    assert not any(isinstance(module, torch.nn.MultiheadAttention) for module in twin.modules())
    x = torch.randint(11, (4, *shape)) if len(shape) == 1 else torch.randn(4, *shape)
    assert twin(x).shape == model(x).shape
    assert torch.allclose(twin.export()(x), twin.eval()(x), atol=1e-6)
    bounds, loss = analyse(twin.double(), losses.CrossEntropy()).sensitivities, losses.CrossEntropy()
    x = x if len(shape) == 1 else x.double()
    for i in range(4):
        twin.zero_grad()
        loss(twin(x[i : i + 1]), torch.tensor([i % 3])).sum().backward()
        for key, parameter in twin.named_parameters():
            assert parameter.grad is None or parameter.grad.norm() <= bounds[key] * (1 + 1e-9)


def test_copied_attention_weights_are_the_models():
    model = Attentive()
    with torch.no_grad():
        model.attention.in_proj_weight.copy_(torch.cat([torch.eye(8) * s for s in (0.5, 0.25, 0.75)]))
        model.attention.out_proj.weight.copy_(torch.eye(8) * 0.5)
    attention = convert(model, (5,), copy_weights=True).model.network.attention
    found = [layer.weight.detach()[0, 0] for layer in (attention.query, attention.key, attention.value, attention.output)]
    assert torch.allclose(torch.stack(found), torch.ones(4), atol=1e-4)  # Björck makes them orthogonal, in the same direction


class Masked(Attentive):
    def forward(self, ids):
        x = self.table(ids)
        mask = torch.zeros(5, 5)
        return self.head((x + self.attention(x, x, x, attn_mask=mask)[0]).mean(dim=1))


class Weighted(Attentive):
    def forward(self, ids):
        x = self.table(ids)
        y, weights = self.attention(x, x, x)
        return self.head((y + weights.mean(dim=(1, 2))[:, None, None]).mean(dim=1))


class Recurrent(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, torch.nn.Linear(6, 3)

    def forward(self, x):
        y, _ = self.cell(x)
        return self.head(y[:, -1])


class Positions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.positions, self.head = torch.nn.Embedding(11, 4), torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3)

    def forward(self, ids):
        return self.head((self.table(ids) + self.positions(torch.arange(5))).mean(dim=1))


@pytest.mark.parametrize(
    ("model", "shape", "layer", "says"),
    [
        (Recurrent(torch.nn.LSTM(4, 6, batch_first=True)), (5, 4), "cell", "method='bookkeeping'"),
        (Recurrent(torch.nn.GRU(4, 6, batch_first=True)), (5, 4), "cell", "Boundary"),
        (Recurrent(torch.nn.RNN(4, 6, batch_first=True)), (5, 4), "cell", "TransformerBlock"),
        (Masked(), (5,), "attention", "without masks"),
        (Attentive(kdim=8, vdim=8, add_bias_kv=True), (5,), "attention", "add_bias_kv"),
        (torch.nn.Sequential(torch.nn.TransformerEncoderLayer(4, 2, 8)), (5, 4), "0", "batch_first"),
        (torch.nn.Sequential(torch.nn.TransformerEncoderLayer(4, 2, 7, batch_first=True)), (5, 4), "0", "odd"),
        (torch.nn.Sequential(torch.nn.EmbeddingBag(11, 4, mode="max")), (5,), "0", "TokenMean"),
        (torch.nn.Sequential(torch.nn.Embedding(11, 4, sparse=True)), (5,), "0", "no private form"),
        (Positions(), (5,), "positions", "LearnedPositions"),
    ],
)
def test_what_has_no_twin_says_why_and_the_way_out(model, shape, layer, says):
    _, report = convert(model.eval(), shape)
    found = {row.where: row for row in report.unconverted}
    assert says in found[layer].note
    assert not report.bounded
    assert "Not converted" in report.verdict


def test_attention_weights_that_are_used_are_refused():
    with pytest.raises(UnsupportedError, match="attention weights"):
        convert(Weighted().eval(), (5,))
