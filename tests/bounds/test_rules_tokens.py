"""Embedding bags, means over tokens that are not padding, and layers of torch that have no rule but a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.errors import DataError, LipdpError, UnsupportedError
from lipdp.export import export
from tests.soundness.functions import Forward
from tests.soundness.harness import attack

T = torch.nn


@pytest.mark.parametrize(("mode", "factor"), [("mean", 1.0), ("sum", 5.0), ("max", 1.0)])
@pytest.mark.parametrize("padding", [None, 3])
def test_embedding_bags(mode: str, factor: float, padding: int | None) -> None:
    """All five tokens the same: the row's gradient is δ (mean, max) or 5·δ (sum), the bound itself."""
    layer = T.EmbeddingBag(7, 3, mode=mode, padding_idx=padding)
    # torch has no second derivative of bags: structured and random starts, no ascent
    report = attack(layer, 1.0, input_shape=(5,), steps=0, draws=4)
    assert {row.name: row.bound for row in report.rows if row.kind == "parameter"} == {"weight": pytest.approx(factor)}
    assert report.tightness("parameter") > 0.99
    frozen = attack(layer.requires_grad_(False), 1.0, input_shape=(5,), steps=0, draws=20)
    assert frozen.tightness("activation") > 0.3


def test_embedding_bags_as_a_function() -> None:
    table = T.Parameter(torch.randn(6, 3))
    model = Forward(lambda m, x: F.embedding_bag(x, m.w, mode="sum"), w=table)
    assert analyse(model, 1.0, input_shape=(4,)).sensitivities == {"w": pytest.approx(4.0)}


@pytest.mark.parametrize(
    "layer",
    [
        T.EmbeddingBag(6, 3, max_norm=1.0),
        T.EmbeddingBag(6, 3, scale_grad_by_freq=True),
        T.EmbeddingBag(6, 3, sparse=True),
        Forward(lambda m, x: m.bag(x.flatten(), offsets=torch.tensor([0, 4, 8])), bag=T.EmbeddingBag(6, 3)),
        Forward(lambda m, x: m.bag(x, per_sample_weights=torch.ones(1, 4)), bag=T.EmbeddingBag(6, 3, mode="sum")),
    ],
)
def test_bags_that_mix_or_rewrite_are_refused(layer: torch.nn.Module) -> None:
    with pytest.raises(LipdpError):
        analyse(layer, 1.0, input_shape=(4,))


class Reader(T.Module):
    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.table, self.mean = nn.BoundedEmbedding(6, 4, length=5), nn.MaskedTokenMean(padding)
        self.dense, self.head = nn.SpectralLinear(4, 4), nn.SpectralLinear(4, 3, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mean(self.dense(self.table(ids)), ids))


def test_a_masked_mean_is_the_mean_of_what_is_kept() -> None:
    layer = nn.MaskedTokenMean(padding_idx=2)
    x, ids = torch.randn(3, 4, 5), torch.tensor([[1, 2, 0, 2], [2, 2, 2, 2], [0, 1, 3, 4]])
    y = layer(x, ids)
    assert torch.allclose(y[0], (x[0, 0] + x[0, 2]) / 2)
    assert torch.equal(y[1], torch.zeros(5))
    assert torch.allclose(y[2], x[2].mean(0))
    with pytest.raises(DataError, match="ids"):
        layer(x, ids[:, :3])


def test_masked_means_under_attack() -> None:
    """One kept token reaches the bound: X and G stay as they are, where the plain mean divides by √T."""
    report = attack(Reader(), 1.0, steps=4, draws=10)
    assert report.tightness("activation", "MaskedTokenMean") > 0.5
    for tokens in ([[1, 0, 0, 0, 0]], [[1, 2, 3, 4, 5]]):
        model = Reader().double()
        ids = torch.tensor(tokens)
        x = model.table(ids).detach().requires_grad_()
        y = model.mean(x, ids)
        (back,) = torch.autograd.grad(y, x, torch.ones_like(y))
        kept = sum(token != 0 for token in tokens[0])
        assert float(back.norm()) == pytest.approx(2.0 / kept**0.5)
    bounds = analyse(Reader(), 1.0).sensitivities
    assert bounds["dense.weight"] == pytest.approx(5**0.5)  # G = 1 at the mean, X = √5 at the dense layer


def test_masked_means_export() -> None:
    model = Reader(padding=1)
    ids = torch.randint(6, (7, 5), generator=torch.Generator().manual_seed(0))
    plain = export(model)
    assert torch.allclose(plain(ids), model(ids), atol=1e-6)
    program = torch.export.export(plain, (ids,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.allclose(program.module()(ids[:2]), model(ids[:2]), atol=1e-6)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Forward(lambda m, x: m.a(x, x, x)[0], a=T.MultiheadAttention(4, 2, batch_first=True)), "LipschitzAttention"),
        (
            Forward(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=T.MultiheadAttention(4, 2, batch_first=True)),
            "LipschitzAttention",
        ),
        (T.Sequential(T.TransformerEncoderLayer(4, 2, 8, batch_first=True)), "TransformerBlock"),
        (Forward(lambda m, x: m.r(x)[0], r=T.LSTM(4, 3, batch_first=True)), "method='bookkeeping'"),
        (Forward(lambda m, x: m.r(x)[0], r=T.GRU(4, 3, batch_first=True)), "not even lipdp.nn.Boundary"),
    ],
)
def test_layers_without_a_rule_name_their_way_out(model: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has no rule.*{says}.*lipdp.bounds.rule"):
        analyse(model, 1.0, input_shape=(3, 4), input_norm=1.0)
