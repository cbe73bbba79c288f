"""Attention: the table's bounds one by one, heads, masks, and the layers on top."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.bounds import Bound, analyse
from lipdp.bounds.rules_norms import attention_gains
from lipdp.errors import LipdpError
from tests.soundness.functions import Forward
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value

T = torch.nn
attend = F.scaled_dot_product_attention


def constants(*shape: int, seed: int = 0, norm: float = 1.0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / drawn.norm(dim=-1, keepdim=True) * norm


def test_bounds_are_those_of_the_table() -> None:
    model = Forward(lambda m, x: _split(m, x), a=nn.TokenBall(0.5), b=nn.TokenBall(0.7), c=nn.TokenBall(2.0))
    result = analyse(model, 1.0, input_shape=(4, 9), input_norm=math.inf)
    (row,) = [row for row in result.layers if "scaled_dot" in row.where]
    assert row.norm == pytest.approx(math.sqrt(4) * 2.0)
    gains = {row.where.split("'")[1]: row.cotangent for row in result.layers}
    assert gains["a"] == pytest.approx(0.3 * 0.7 * 2.0)
    assert gains["b"] == pytest.approx(0.3 * (2 * 0.5) * min(2.0 / math.sqrt(2), 4.0 / 2))
    assert gains["c"] == pytest.approx(2.0)
    attack(model, 1.0, input_shape=(4, 9), input_norm=3.0, steps=15)


def _split(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.chunk(3, dim=2)
    return attend(m.a(q), m.b(k), m.c(v), scale=0.3)


def test_each_gain_is_attacked_at_its_worst_case() -> None:
    """Queries: two keys ±r_k and values ±r_v at equal weight. Values: all queries look at one key. Keys: one query."""
    r_k, r_v, s = 0.7, 1.3, 0.5
    k, v = (torch.tensor([[[r], [-r]]], dtype=torch.float64) for r in (r_k, r_v))
    q = torch.zeros(1, 1, 1, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda q: attend(q, k, v, scale=s), q)
    first, second, third = attention_gains(Bound(0.4, (1, 1)), Bound(9.0, (2, 1), r_k), Bound(9.0, (2, 1), r_v), s)
    assert float(jacobian.norm()) == pytest.approx(first, rel=1e-9)
    query = torch.full((1, 1, 1), 0.4, dtype=torch.float64)
    zero = torch.zeros(1, 2, 1, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda k: attend(query, k, v, scale=s), zero)
    assert float(jacobian.norm()) == pytest.approx(second, rel=1e-9)
    many, keys = torch.full((1, 5, 1), 50.0).double(), torch.tensor([[[50.0], [-50.0]]]).double()
    dense = torch.autograd.functional.jacobian(lambda v: attend(many, keys, v, scale=1.0), v).reshape(5, 2)
    assert largest_singular_value(dense) == pytest.approx(math.sqrt(5), rel=1e-6)
    assert third == 1.0


def test_heads_may_look_at_different_tokens() -> None:
    """Two heads, two tokens with values in different halves: outputs of norm √2·r. The bound of one head would be false."""
    v = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)  # token 1 in the first half, token 2 in the second
    q = torch.full((1, 2, 1, 1), 60.0, dtype=torch.float64)
    k = torch.tensor([[[[1.0], [-1.0]], [[-1.0], [1.0]]]], dtype=torch.float64)
    heads = v.unflatten(-1, (2, 1)).transpose(1, 2)
    assert float(attend(q, k, heads).norm()) == pytest.approx(math.sqrt(2), rel=1e-9)
    model = Forward(lambda m, x: _heads(m.ball(x)), ball=nn.TokenBall(1.0))
    assert analyse(model, 1.0, input_shape=(2, 2)).output.norm == pytest.approx(math.sqrt(2) * math.sqrt(2))
    attack(model, 1.0, input_shape=(2, 2), input_norm=2.0)


def _heads(x: torch.Tensor) -> torch.Tensor:
    parts = x.unflatten(-1, (2, 1)).transpose(1, 2)
    return attend(parts * 30.0, parts, parts).transpose(1, 2).flatten(2)


CASES = [
    ("plain", lambda m, x: attend(x, x, x)),
    ("scale", lambda m, x: attend(x, x, x, scale=2.0)),
    ("negative-scale", lambda m, x: attend(x, x, x, scale=-2.0)),
    ("causal", lambda m, x: attend(x, x, x, is_causal=True)),
    ("mask", lambda m, x: attend(x, x, x, attn_mask=m.mask)),
    ("float-mask", lambda m, x: attend(x, x, x, m.bias)),
    ("cross", lambda m, x: attend(x[:, :1], x, x * 0.5)),
    ("kwargs", lambda m, x: attend(query=x, key=x, value=-x)),
    ("constants-behind", lambda m, x: attend(m.q(x), x, x)),
]


@pytest.mark.parametrize(("name", "function"), CASES, ids=[name for name, _ in CASES])
def test_forms_of_attention_hold_under_attack(name: str, function: Any) -> None:
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    bias = torch.where(mask, 0.3, -math.inf)
    model = Forward(function, mask=mask, bias=bias.double(), q=nn.SpectralLinear(4, 4))
    for ball in (None, nn.TokenBall(0.8)):
        whole = model if ball is None else T.Sequential(ball, model)
        report = attack(whole, 1.0, input_shape=(3, 4), input_norm=1.5, steps=10, draws=2, starts=("random", "constant", "large"))
        assert max(row.tightness for row in report.rows) > 0.2


REFUSED = [
    ("closed-row", lambda m, x: attend(x, x, x, attn_mask=m.closed), "without any key"),
    ("closed-float-row", lambda m, x: attend(x, x, x, attn_mask=torch.where(m.closed, 0.0, -math.inf)), "without any key"),
    ("infinite-mask", lambda m, x: attend(x, x, x, attn_mask=m.nan), "NaN"),
    ("batch-mask", lambda m, x: attend(x, x, x, attn_mask=m.batch), "batch dimension|fails"),
    ("learned-mask", lambda m, x: attend(x, x, x, attn_mask=m.learned), "constant mask|requires_grad"),
    ("dropout", lambda m, x: attend(x, x, x, dropout_p=0.1), "dropout"),
    ("constant-keys", lambda m, x: attend(x, m.nan, x), "activations"),
    ("order", lambda m, x: attend(key=x, query=x, value=x), "this order"),
]


@pytest.mark.parametrize(("name", "function", "says"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_forms_without_a_bound_are_refused(name: str, function: Any, says: str) -> None:
    closed = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])
    attributes = {"closed": closed, "nan": torch.full((3, 3), math.inf), "batch": torch.ones(5, 3, 3) > 0}
    model = Forward(function, learned=T.Parameter(torch.zeros(3, 3)), **attributes)
    with pytest.raises(LipdpError, match=says):
        analyse(model, 1.0, input_shape=(3, 3), input_norm=1.0)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_normalised_attention_is_one_lipschitz(heads: int, causal: bool) -> None:
    layer = nn.LipschitzAttention(4, heads, tokens=3, causal=causal, token_norm=0.9)
    result = analyse(layer, 1.0, input_shape=(3, 4), input_norm=5.0)
    assert result.lipschitz == pytest.approx(1.0, rel=1e-9)
    attack(layer, 1.0, input_shape=(3, 4), input_norm=2.0, steps=8, draws=2, starts=("random", "constant", "large"))
    for seed in range(3):
        at = constants(3, 4, seed=seed, norm=0.8)
        assert largest_singular_value(impulse_jacobian(layer, (3, 4), at=at)) <= 1


def test_plain_attention_has_the_constant_it_says() -> None:
    layer = nn.LipschitzAttention(6, 2, bias=True)
    for tokens in (1, 4):
        result = analyse(layer, 1.0, input_shape=(tokens, 6), input_norm=50.0)
        assert result.lipschitz == pytest.approx(layer.lipschitz(tokens), rel=1e-9)


def test_attention_computes_attention() -> None:
    layer = nn.LipschitzAttention(4, 2, scale=0.6).double()
    x = constants(2, 3, 4, norm=0.5)
    q, k, v = (m(x).unflatten(-1, (2, 2)).transpose(1, 2) for m in (layer.query, layer.key, layer.value))
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.6, dim=-1)
    assert torch.allclose(layer(x), layer.output((weights @ v).transpose(1, 2).flatten(2)), rtol=1e-9)


def test_transformer_block_is_one_lipschitz_and_holds_under_attack() -> None:
    block = nn.TransformerBlock(4, 2, 6, tokens=3)
    assert analyse(block, 1.0, input_shape=(3, 4), input_norm=2.0).lipschitz == pytest.approx(1.0, rel=1e-9)
    model = nn.Sequential(nn.BoundedEmbedding(5, 4, length=3), nn.LearnedPositions(3, 4, 0.5), block, nn.TokenMean())
    report = attack(model, 1.0, steps=6, draws=2, starts=("random", "constant", "aligned"))
    assert all(math.isfinite(row.bound) for row in report.rows)
    assert max(row.tightness for row in report.rows) > 0.9


def test_one_example_of_attention_never_sees_another() -> None:
    block = nn.TransformerBlock(4, 2, tokens=3).double()
    x = constants(4, 3, 4)
    other = x.clone()
    other[1:] = constants(3, 3, 4, seed=9)
    assert torch.equal(block(x)[0], block(other)[0])
