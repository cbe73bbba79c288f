"""nn.MultiheadAttention as the user wrote it, transformers, and attention written by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lipdp.clipping as clipping
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import check_all, quadratic
from tests.many import examples

D = 4


class Attention(nn.Module):
    def __init__(self, how="self", need_weights=False, masks="none", batch_first=True, **arguments):
        super().__init__()
        self.how, self.need_weights, self.masks, self.batch_first = how, need_weights, masks, batch_first
        self.core = nn.MultiheadAttention(D, 2, batch_first=batch_first, **arguments)

    def forward(self, x):
        mask, padding = None, None
        if self.masks in ("causal", "both"):
            mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        if self.masks == "numbers":
            mask = torch.linspace(-1, 1, x.shape[1] ** 2, dtype=x.dtype).reshape(x.shape[1], -1)
        if self.masks == "heads":
            mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1).expand(2 * len(x), -1, -1)
        if self.masks in ("padding", "both"):
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            padding[:, -1] = x[:, -1, 0] > 0
        x = x if self.batch_first else x.transpose(0, 1)
        key = x if self.how == "self" else torch.tanh(x)
        value = key if self.how != "three" else torch.sin(x)
        output, weights = self.core(x, key, value, key_padding_mask=padding, need_weights=self.need_weights, attn_mask=mask)
        output = output if self.batch_first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], 1)


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(
    st.sampled_from(["self", "cross", "three"]),
    st.booleans(),
    st.sampled_from(["none", "causal", "numbers", "heads", "padding", "both"]),
    st.booleans(),
    st.booleans(),
)
def test_against_the_loop(how, need_weights, masks, batch_first, bias):
    torch.manual_seed(0)
    model = Attention(how, need_weights, masks, batch_first, bias=bias).double()
    x = torch.randn(3, 3, D, dtype=torch.float64)
    expected = model(x)
    with recording(model, 3):
        assert torch.allclose(model(x), expected, atol=1e-12)
    check_all(model, x, methods=("reweight", "bookkeeping"), forms=("materialise", "gram"))


def test_separate_projections():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.MultiheadAttention(D, 2, batch_first=True, kdim=3, vdim=2)

        def forward(self, x):
            return self.core(x, x[..., :3], x[..., 1:3])[0]

    torch.manual_seed(0)
    check_all(Model().double(), torch.randn(3, 3, D, dtype=torch.float64))


def test_one_module_for_self_and_for_cross_attention():
    """The packed projection is used whole and in parts: ranges of rows that overlap have cross terms."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x):
            h = self.core(x, x, x)[0]
            return self.core(h, x, x)[0]

    torch.manual_seed(0)
    check_all(Model().double(), torch.randn(3, 3, D, dtype=torch.float64))


def test_a_row_that_may_attend_to_nothing():
    """torch's own attention returns zeros there; so must the twin, and not drop the example."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x):
            return self.core(x, x, x, key_padding_mask=x[..., 0] > 100, need_weights=False)[0]

    torch.manual_seed(0)
    x = torch.randn(3, 3, D, dtype=torch.float64)
    x[1, :, 0] = 200.0
    model = Model().double()
    expected = model(x)
    with recording(model, 3):
        assert torch.allclose(model(x), expected, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_and_decoder(norm_first):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            arguments = {"nhead": 2, "dim_feedforward": 5, "dropout": 0.0, "batch_first": True, "norm_first": norm_first}
            encoder = nn.TransformerEncoderLayer(D, **arguments)
            self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
            self.decoder = nn.TransformerDecoderLayer(D, **arguments)

        def forward(self, x):
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.decoder(torch.tanh(x), self.encoder(x, mask=causal, is_causal=True))

    torch.manual_seed(0)
    check_all(Model().double(), torch.randn(3, 3, D, dtype=torch.float64))


def test_attention_written_by_hand():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x):
            q, k, v = (p.unflatten(-1, (2, D // 2)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
            return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    check_all(nn.Sequential(Block(), Block()).double(), torch.randn(3, 4, D, dtype=torch.float64))


def test_sequence_first_transformer_is_refused_with_the_fix():
    model = nn.TransformerEncoderLayer(D, 2, 5)
    with pytest.raises(UnsupportedError, match="batch_first=True"):
        clipping.clipped_gradients(model, quadratic, torch.randn(2, 3, D), torch.zeros(2), 1.0)


def test_causal_hint_without_a_mask_is_refused():
    class Model(Attention):
        def forward(self, x):
            return self.core(x, x, x, is_causal=True, need_weights=False)[0]

    with pytest.raises((UnsupportedError, RuntimeError), match="mask"):
        clipping.clipped_gradients(Model(), quadratic, torch.randn(2, 3, D), torch.zeros(2), 1.0)
