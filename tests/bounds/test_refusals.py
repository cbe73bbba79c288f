"""What the calculus refuses: mixed examples, hidden changes, unbounded quantities. Each error names the thing and a way out."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp import losses, nn
from lipdp.bounds import Bound, Call, Transfer, analyse, rule
from lipdp.errors import ConfigurationError, LipdpError, UnboundedError, UnsupportedError
from tests.soundness.functions import Forward
from tests.soundness.harness import attack

T = torch.nn


def case(name: str, f: Any, says: str, shape: tuple[int, ...] = (4,), **attributes: Any) -> Any:
    return pytest.param(Forward(f, **attributes), shape, says, id=name)


def refused(model: torch.nn.Module, shape: tuple[int, ...], says: str, error: type[Exception] = UnsupportedError) -> None:
    with pytest.raises(error, match=says):
        analyse(model, 1.0, input_shape=shape, input_norm=1.0)


MIXING = [
    case("mean-0", lambda m, x: x - x.mean(0), "batch"),
    case("mean-0-keepdim", lambda m, x: x - x.mean(0, keepdim=True), "batch"),
    case("mean-all", lambda m, x: x - x.mean(), "batch"),
    case("mean-negative", lambda m, x: x.mean(-2, keepdim=True) + x, "batch"),
    case("mean-of-scalars", lambda m, x: x[:, 0].mean(-1, keepdim=True) + x[:, 0], "batch"),
    case("mean-empty-dims", lambda m, x: x - x.mean((), keepdim=True), "batch"),
    case("sum-some", lambda m, x: x.sum((0, 1)), "batch"),
    case("permute", lambda m, x: x.permute(1, 0, 2), "batch", (4, 4)),
    case("permute-negative", lambda m, x: torch.permute(x, (-1, 0, 1)), "batch", (4, 4)),
    case("transpose", lambda m, x: x.transpose(0, 1), "batch"),
    case("transpose-negative", lambda m, x: x.transpose(-2, -1), "batch"),
    case("transpose-twice", lambda m, x: x.transpose(0, 1).cumsum(1).transpose(0, 1), "batch"),
    case("flatten-0", lambda m, x: torch.flatten(x, 0), "batch", (2, 2)),
    case("reshape-merges", lambda m, x: x.reshape(-1), "batch"),
    case("reshape-pairs", lambda m, x: x.reshape(-1, 2), "batch"),
    case("view-batch-in-the-middle", lambda m, x: x.view(4, x.shape[0]), "batch"),
    case("view-of-batch-size", lambda m, x: x.view(x.shape[0], x.shape[0], -1), "batch", (15,)),
    case("first-example", lambda m, x: x + x[0], "batch"),
    case("slice-of-examples", lambda m, x: x[1:], "batch"),
    case("reverse-examples", lambda m, x: x.flip(0), "batch"),
    case("roll-examples", lambda m, x: torch.roll(x, 1, 0), "batch"),
    case("roll-everything", lambda m, x: torch.roll(x, 1), "batch"),
    case("repeat-examples", lambda m, x: x.repeat(2, 1), "batch"),
    case("expand-new-axis", lambda m, x: x.expand(3, -1, -1), "batch"),
    case("interleave-all", lambda m, x: x.repeat_interleave(2), "batch"),
    case("amax-0", lambda m, x: x - x.amax(0), "batch"),
    case("log-softmax-0", lambda m, x: F.log_softmax(x, 0), "batch"),
    case("normalize-0", lambda m, x: F.normalize(x, dim=0), "batch"),
    case("layer-norm-of-the-batch", lambda m, x: F.layer_norm(x, (3, 4)), "fails|batch"),
    case("mask-with-a-batch", lambda m, x: torch.where(m.c, x, 0.0), "fails|batch", (4,), c=torch.ones(3, 4) > 0),
    case("attention-over-examples", lambda m, x: F.scaled_dot_product_attention(x, x, x), "tokens, features"),
    case("instance-norm-of-the-batch", lambda m, x: m.norm(x), "channel|fails", (4, 4), norm=T.InstanceNorm2d(4)),
    case("pool-without-channels", lambda m, x: F.max_pool2d(x, 2), "channel dimension", (4, 4)),
    case("glu-0", lambda m, x: F.glu(x, 0), "batch|fails"),
    case("new-axis-first", lambda m, x: x[None], "batch"),
    case("ellipsis-reaches-batch", lambda m, x: x[..., :, :], "batch|Write"),
    case("mask", lambda m, x: x[:, [0, 0]], "twice"),
    case("cat-0", lambda m, x: torch.cat([x, x]), "batch"),
    case("stack-0", lambda m, x: torch.stack([x, x]), "batch"),
    case("stack-negative", lambda m, x: torch.stack([x, x], -3), "batch"),
    case("chunk-0", lambda m, x: x.chunk(2)[0], "batch"),
    case("split-0", lambda m, x: x.split(1, 0)[0], "batch"),
    case("unbind-0", lambda m, x: x.unbind()[0], "batch"),
    case("softmax-0", lambda m, x: torch.softmax(x, 0), "batch"),
    case("softmax-none", lambda m, x: F.softmax(x), "batch"),
    case("unsqueeze-0", lambda m, x: x.unsqueeze(0), "batch"),
    case("squeeze-all", lambda m, x: x.squeeze(), "batch", (4, 1)),
    case("squeeze-0", lambda m, x: x.squeeze(0), "batch"),
    case("squeeze-scalars", lambda m, x: x[:, 0].squeeze(-1), "batch"),
    case("pad-batch", lambda m, x: F.pad(x, (0, 0, 1, -1)), "batch"),
    case("broadcast-over-batches", lambda m, x: x[:, :, None, None] + x, "unsqueeze"),
    case("broadcast-ranks", lambda m, x: x[:, :1, None] + x[:, :1], "unsqueeze"),
    case("broadcast-scalars", lambda m, x: x[:, :1] * x[:, 0], "unsqueeze"),
    case("gram-of-the-batch", lambda m, x: x @ x.transpose(0, 1), "batch"),
    case("constant-with-a-batch", lambda m, x: x + m.c, "fails|batch", (4,), c=torch.ones(3, 4)),
    case("batch-norm", lambda m, x: m.bn(x), "mixes examples", (4,), bn=T.BatchNorm1d(4)),
    case("times-batch-size", lambda m, x: x * x.shape[0], "how many"),
    case("over-batch-size", lambda m, x: x / x.size(0), "how many"),
    case("plus-batch-size", lambda m, x: x + x.shape[0] * 2.0, "how many"),
    case("slice-by-batch-size", lambda m, x: x[:, : x.shape[0]], "how many", (8,)),
    case("numel", lambda m, x: x / x.numel(), "how many"),
]


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize(("model", "shape", "says"), MIXING)
def test_whatever_mixes_examples_is_refused(model: torch.nn.Module, shape: tuple[int, ...], says: str) -> None:
    refused(model, shape, says, LipdpError)


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_batch_size_written_into_forward_is_refused(size: int) -> None:
    with pytest.raises(LipdpError, match="view"):
        analyse(Forward(lambda m, x: x.view(size, 4)), 1.0, input_shape=(4,), input_norm=1.0)


class Tripled(torch.autograd.Function):
    """Identity forward, three times the cotangent backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * grads[0]


HIDDEN = [
    case("autograd-function", lambda m, x: Tripled.apply(x), "Tripled"),
    case("random-tensor", lambda m, x: x + torch.randn(4), "random"),
    case("random-number", lambda m, x: x * random.random(), "random"),
    case("random-constant", lambda m, x: x + F.dropout(m.c, 0.5), "another constant|random", (4,), c=torch.ones(4)),
    case(
        "random-frozen-parameter",
        lambda m, x: x + F.dropout(m.c, 0.5),
        "another constant",
        (64,),
        c=T.Parameter(torch.ones(64), requires_grad=False),
    ),
    case("data-to-python", lambda m, x: x * x.sum(1).tolist()[0], "Python values"),
    case("item", lambda m, x: x * x[:, 0].mean().item(), "batch"),
    case("in-place-on-the-input", lambda m, x: F.relu(x, inplace=True), "in place"),
    case("in-place-shared", lambda m, x: _shared(m, m.lin(x)), "in place", (4,), lin=T.Linear(4, 4)),
    case("in-place-by-position-shared", lambda m, x: _shared_positional(m.lin(x)), "in place", (4,), lin=T.Linear(4, 4)),
    case("in-place-method-shared", lambda m, x: _add_in_place(m.lin(x)), "in place", (4,), lin=T.Linear(4, 4)),
    case(
        "in-place-through-dropout", lambda m, x: _aliased(m, m.lin(x)), "in place", (4,), lin=T.Linear(4, 4), d=T.Dropout().eval()
    ),
    case("in-place-through-clip", lambda m, x: _aliased(m, m.lin(x)), "in place", (4,), lin=T.Linear(4, 4), d=nn.ClipGradient(1.0)),
    case("control-flow", lambda m, x: x if x.sum() > 0 else -x, "can't be traced"),
    case("view-as-bits", lambda m, x: x.view(torch.int32), "dtype"),
]


def _shared(m: Any, h: torch.Tensor) -> torch.Tensor:
    return F.relu(h, inplace=True) + h


def _shared_positional(h: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(h, 3.0, True) + h


def _add_in_place(h: torch.Tensor) -> torch.Tensor:
    h.add_(1.0)
    return h


def _aliased(m: Any, h: torch.Tensor) -> torch.Tensor:
    """The dropout hands its input on, so relu writes into h, which is read again."""
    return F.leaky_relu(m.d(h), 5.0, inplace=True) + h


@pytest.mark.parametrize(("model", "shape", "says"), HIDDEN)
def test_whatever_the_graph_does_not_show_is_refused(model: torch.nn.Module, shape: tuple[int, ...], says: str) -> None:
    refused(model, shape, says)


def test_in_place_on_a_layers_own_output_is_fine() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 4), T.ReLU(inplace=True), nn.SpectralLinear(4, 2))
    assert analyse(model, 1.0).sensitivities["3.weight"] == pytest.approx(1.1)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_are_refused(register: str) -> None:
    layer = nn.SpectralLinear(4, 4)
    getattr(layer, register)(lambda *a: None)
    refused(nn.Sequential(layer), (4,), r"'0' \(SpectralLinear\) has hooks.*Remove")


def test_parameter_hooks_are_refused() -> None:
    layer = nn.SpectralLinear(4, 4)
    layer.weight.register_hook(lambda g: 10 * g)
    refused(nn.Sequential(layer), (4,), r"'weight' of layer '0'.*has hooks")
    layer = nn.SpectralLinear(4, 4)
    layer.bias.register_post_accumulate_grad_hook(lambda p: None)
    refused(nn.Sequential(layer), (4,), r"'bias' of layer '0'.*has hooks")


def test_torch_parametrisations_are_refused() -> None:
    for wrapped in (
        torch.nn.utils.parametrizations.weight_norm(T.Linear(4, 4)),
        torch.nn.utils.parametrizations.spectral_norm(T.Linear(4, 4)),
    ):
        refused(nn.Sequential(wrapped), (4,), "parametrize.*lipdp.nn layer")


def test_buffers_updated_in_forward_are_refused() -> None:
    class Counting(T.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x

    @rule(Counting)
    def _counting(layer: Counting, call: Call) -> Transfer:
        return Transfer(call.inputs[0])

    refused(nn.Sequential(Counting()), (4,), "buffer '0.seen'")


# ---------------------------------------------------------------------------------------------- rules and subclasses


class Doubled(nn.SpectralLinear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class LoudConv(nn.SpectralConv2d):
    def scale(self, height: int, width: int) -> float:
        return 10.0


class Unprojected(nn.SpectralLinear):
    def project_(self) -> None:
        pass


class OtherConv(T.Conv2d):
    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, weight * 5, bias)


class Called(T.ReLU):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 7 * x


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (LoudConv(1, 1, 3), (1, 4, 4)),
        (OtherConv(1, 1, 3), (1, 4, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_that_computes_something_else_inherits_no_rule(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    refused(nn.Sequential(layer), shape, "no rule|computed from a trainable")


@pytest.mark.parametrize("layer", [Doubled(4, 4), Unprojected(4, 4)], ids=lambda value: type(value).__name__)
def test_a_subclass_of_a_dense_layer_counts_with_what_its_forward_shows(layer: torch.nn.Module) -> None:
    """Traced into F.linear with a trained weight: whatever kept it bounded is not relied on."""
    report = attack(nn.Sequential(layer), 1.0, input_shape=(4,), input_norm=1.0, steps=5)
    assert report.tightness("parameter") > 0.99
    assert analyse(nn.Sequential(layer), 1.0, input_shape=(4,), input_norm=1.0).lipschitz == math.inf


def test_a_subclass_that_only_constructs_differently_keeps_the_rule() -> None:
    class Small(nn.SpectralLinear):
        def __init__(self) -> None:
            super().__init__(4, 2, bias=False)

    assert analyse(nn.Sequential(Small()), 1.0, input_shape=(4,), input_norm=1.0).sensitivities == {"0.weight": 1.0}


def test_methods_replaced_on_the_instance_lose_the_rule() -> None:
    layer = nn.SpectralConv2d(1, 1, 3)
    layer.scale = lambda height, width: 10.0  # type: ignore[method-assign]
    refused(nn.Sequential(layer), (1, 4, 4), "no rule|computed from a trainable")
    layer = nn.SpectralLinear(4, 4)
    layer.forward = lambda x: 10.0 * x  # type: ignore[method-assign]
    result = analyse(nn.Sequential(layer), 1.0, input_shape=(4,), input_norm=1.0)
    assert result.lipschitz == 10.0  # traced into: the graph shows what it computes
    assert analyse(nn.Sequential(Called()), 1.0, input_shape=(4,), input_norm=1.0).lipschitz == 7.0


def test_a_module_without_a_rule_is_named() -> None:
    refused(nn.Sequential(nn.SpectralLinear(4, 4), T.Bilinear(4, 4, 4)), (4,), "Bilinear|missing", LipdpError)
    refused(nn.Sequential(T.GRUCell(4, 4)), (4,), r"'0' \(GRUCell\) has no rule.*lipdp.bounds.rule.*clipping")
    refused(Forward(lambda m, x: torch.cumsum(x, 1)), (4,), "'cumsum'.*has no rule.*rule_for_function")
    refused(Forward(lambda m, x: F.bilinear(x, x, m.w), w=T.Parameter(torch.ones(1, 4, 4))), (4,), "'bilinear'.*no rule")


def test_a_rule_must_name_every_trainable_parameter() -> None:
    class Two(T.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = T.Parameter(torch.ones(4)), T.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.a + self.b

    @rule(Two)
    def _two(layer: Two, call: Call) -> Transfer:
        return Transfer(Bound(math.inf, call.output_shape), (math.inf,), {"a": call.inputs[0].norm})

    refused(nn.Sequential(Two()), (4,), r"'0' \(Two\).*parameter\(s\) b")
    layer = Two()
    layer.b.requires_grad_(False)
    assert analyse(nn.Sequential(layer), 1.0, input_shape=(4,), input_norm=1.0).sensitivities == {"0.a": 1.0}


def test_a_rule_must_bound_every_activation_it_reads() -> None:
    class Sum(T.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    @rule(Sum)
    def _sum(layer: Sum, call: Call) -> Transfer:
        return Transfer(call.inputs[0])

    refused(Forward(lambda m, x: m.sum(x, x * 2), sum=Sum()), (4,), "reads 2 activations and its rule bounds 1")


# ---------------------------------------------------------------------------------------------- parameters by themselves

P = T.Parameter
BY_THEMSELVES = [
    case(
        "times-parameter-then-a-layer", lambda m, x: m.lin(x * m.p), "multiplies", lin=nn.SpectralLinear(4, 4), p=P(torch.ones(4))
    ),
    case("over-parameter", lambda m, x: x / m.p, "divides", p=P(torch.ones(4))),
    case("function-of-a-parameter", lambda m, x: x + torch.tanh(m.p), "computed from a trainable", p=P(torch.ones(4))),
    case("parameter-scaled-before", lambda m, x: x + 100 * m.p, "computed from a trainable", p=P(torch.ones(4))),
    case("layer-of-a-buffer", lambda m, x: x + m.lin(m.b), "computed from a trainable", lin=T.Linear(4, 4), b=torch.ones(4)),
    case("layer-of-a-parameter", lambda m, x: x + m.lin(m.p), "computed from a trainable", lin=T.Linear(4, 4), p=P(torch.ones(4))),
    case("derived-twice", lambda m, x: x + (m.lin(m.b) * 2 + 1), "computed from a trainable", lin=T.Linear(4, 4), b=torch.ones(4)),
    case("cat-parameter", lambda m, x: torch.cat([x, m.p], 1), "constants or parameters|fails", p=P(torch.ones(3, 4))),
    case("matmul-parameter", lambda m, x: x @ m.p, "two activations", p=P(torch.ones(4, 4))),
    case("alpha-parameter", lambda m, x: torch.add(x, x, alpha=m.p), "fails|rule can't read", p=P(torch.ones(()))),
    case("dropout-parameter", lambda m, x: F.celu(x, alpha=m.p), "fails|rule can't read|says nothing", p=P(torch.ones(()))),
]


@pytest.mark.parametrize(("model", "shape", "says"), BY_THEMSELVES)
def test_parameters_outside_layers_are_bounded_or_refused_never_missed(model: Any, shape: Any, says: str) -> None:
    refused(model, shape, says, LipdpError)


@pytest.mark.parametrize(
    "model",
    [
        Forward(lambda m, x: torch.add(x, 2, torch.ones(4))),
        Forward(lambda m, x: torch.mul(other=x, input=x)),
        Forward(lambda m, x: torch.add(x, x, out=None)),
        Forward(lambda m, x: torch.div(x, 2.0, rounding_mode="floor")),
        Forward(lambda m, x: 1.0 / x),
        Forward(lambda m, x: x / x),
        Forward(lambda m, x: F.pad(x, (1, 1), value=3.0)),
        Forward(lambda m, x: F.pad(x[:, None], (1, 1), mode="circular")),
        Forward(lambda m, x: torch.matmul(x, m.c), c=torch.ones(4, 2)),
        Forward(lambda m, x: torch.cat([x, m.c.expand(3, 4)], 1), c=torch.ones(1, 4)),
        Forward(lambda m, x: x.chunk(4, 1)[1:][0]),
    ],
)
@pytest.mark.filterwarnings("ignore:This overload")
def test_forms_without_a_proof_are_refused_with_an_error_of_ours(model: torch.nn.Module) -> None:
    refused(model, (4,), "", LipdpError)


def test_division_by_zero_is_unbounded() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), Forward(lambda m, x: x / 0), nn.SpectralLinear(4, 2))
    with pytest.raises(UnboundedError, match="truediv"):
        analyse(model, 1.0)


# ---------------------------------------------------------------------------------------------- unbounded and malformed models


def test_unbounded_input() -> None:
    with pytest.raises(UnboundedError, match=r"'weight'.*model's input.*BoundedInput"):
        analyse(nn.SpectralLinear(4, 2), 1.0, input_shape=(4,))


def test_unknown_input_shape() -> None:
    with pytest.raises(ConfigurationError, match=r"BoundedInput.*input_shape="):
        analyse(nn.SpectralLinear(4, 2), 1.0)


def test_wrong_input_shape_names_the_layer() -> None:
    with pytest.raises(ConfigurationError, match=r"layer '0' \(SpectralLinear\).*\(3, 5\)"):
        analyse(nn.Sequential(nn.SpectralLinear(4, 2)), 1.0, input_shape=(5,), input_norm=1.0)


def test_unconstrained_hidden_layer_names_the_culprit_and_the_ways_out() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 4), T.Linear(4, 4), nn.SpectralLinear(4, 2))
    with pytest.raises(UnboundedError, match=r"'1.weight' \(and \d more\).*layer '2' \(Linear\).*SpectralLinear.*Boundary"):
        analyse(model, 1.0)
    model = nn.Sequential(nn.BoundedInput((4,)), T.Linear(4, 4), nn.SpectralLinear(4, 2))
    with pytest.raises(UnboundedError, match=r"'2.weight'.*activations.*layer '1' \(Linear\)"):
        analyse(model, 1.0)
    rows = analyse(model, 1.0, check=False).sensitivities
    assert rows["2.weight"] == math.inf
    assert rows["1.weight"] == 1.0


def test_infinite_loss_constant() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), T.Linear(4, 2))
    with pytest.raises(UnboundedError, match=r"loss has no finite Lipschitz constant.*ClipGradient"):
        analyse(model, losses.MSE(target_norm=1.0))
    clipped = nn.Sequential(nn.BoundedInput((4,)), T.Linear(4, 2), nn.ClipGradient(0.5))
    assert analyse(clipped, losses.MSE(target_norm=1.0)).sensitivities == pytest.approx({"1.weight": 0.5, "1.bias": 0.5})


def test_a_parameter_added_by_itself_unbounds_what_follows() -> None:
    add = Forward(lambda m, x: x + m.p, p=P(torch.zeros(4)))
    with pytest.raises(UnboundedError, match="adds a trainable parameter"):
        analyse(nn.Sequential(nn.BoundedInput((4,)), add, nn.SpectralLinear(4, 2)), 1.0)
    attack(nn.Sequential(nn.BoundedInput((4,)), add, nn.Boundary(norm=1.0), nn.SpectralLinear(4, 2)), 1.0, steps=5, draws=2)


class TwoInputs(T.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class OptionalInput(T.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale


def test_inputs_and_outputs_of_the_model() -> None:
    refused(TwoInputs(), (4,), "2 inputs")
    assert analyse(OptionalInput(), 1.0, input_shape=(4,), input_norm=1.0).lipschitz == 2.0
    refused(Forward(lambda m, x: (x, x)), (4,), "one output tensor")
    refused(Forward(lambda m, x: {"logits": x}), (4,), "one output tensor")
    refused(Forward(lambda m, x: x.chunk(2, 1)), (4,), "one output tensor")
    refused(Forward(lambda m, x: m.c, c=torch.ones(4)), (4,), "one output tensor")
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.Module"):
        analyse("model", 1.0, input_shape=(4,))  # type: ignore[arg-type]


def test_batch_norm_trained_anywhere_in_the_model_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.SpectralConv2d(1, 2, 3), T.BatchNorm2d(2), nn.Flatten())
    refused(model, (1, 4, 4), r"'1' \(BatchNorm2d\).*mixes examples.*LayerCentering.*eval")


ODD = [
    (lambda: nn.SpectralLinear(4, 4), "bias_norm", -1.0, "bias_norm = -1.0"),
    (lambda: nn.L1Linear(4, 4), "bias_norm", -1.0, "bias_norm = -1.0"),
    (lambda: nn.L1Linear(4, 4), "in_features", 0, "in_features"),
    (lambda: nn.L1Linear(4, 4), "out_features", 50, "out_features"),
    (lambda: nn.LayerNorm(4), "bias_norm", -1.0, "bias_norm"),
    (lambda: nn.LayerScale(4), "bound", math.nan, "bound = nan"),
    (lambda: nn.TokenBall(0.5), "norm", math.nan, "norm = nan"),
    (lambda: nn.BoundedInput((4,)), "norm", math.nan, "norm = nan"),
    (lambda: T.LeakyReLU(0.1), "negative_slope", math.nan, "negative_slope = nan"),
    (lambda: T.ELU(), "alpha", math.nan, "alpha = nan"),
    (lambda: T.Linear(4, 4), "in_features", 1, "in_features"),
    (lambda: nn.Residual(nn.SpectralLinear(4, 4)), "bias_norm", -1.0, "bias_norm = -1.0"),
]


@pytest.mark.parametrize(("make", "name", "value", "says"), ODD, ids=lambda value: value if isinstance(value, str) else None)
def test_settings_that_no_constructor_takes(make: Any, name: str, value: float, says: str) -> None:
    """Rules rely on them: a negative radius made bounds too small, and so did a size that is not the weight's."""
    layer = make()
    owner = next(part for part in layer.modules() if hasattr(part, name))
    setattr(owner, name, value)
    refused(nn.Sequential(nn.BoundedInput((4,), norm=1.0), layer, nn.SpectralLinear(4, 3)), (4,), says, LipdpError)


class Drawing(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


def _on_the_instance(model: torch.nn.Module) -> torch.nn.Module:
    model.forward = lambda x: x * random.random()  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "inner",
    [lambda: Drawing(T.Tanh()), lambda: nn.Sequential(Drawing()), lambda: _on_the_instance(T.Sequential(T.Tanh()))],
    ids=range(3),
)
def test_what_draws_in_forward_is_seen_however_deep(inner: Any) -> None:
    """A model of our own containers is traced once; one with any of somebody's own, twice."""
    refused(nn.Sequential(nn.BoundedInput((4,), norm=1.0), inner(), nn.SpectralLinear(4, 3)), (4,), "something else each time")
