"""What takes the place of layers that work on tokens: embeddings, attention, transformer blocks."""

from __future__ import annotations

import torch

from lipdp import nn
from lipdp.convert.report import Decision, Where

__all__ = ["attention", "embedding", "embedding_bag", "encoder", "encoder_layer"]

_NOT_FIRST = "batch_first=False puts tokens before the batch, which mixes examples: build it with batch_first=True"


def embedding(module: torch.nn.Embedding, where: Where) -> Decision:
    """The same table with rows kept in the unit ball."""
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return Decision("not converted", module, "max_norm, scale_grad_by_freq and sparse have no private form: leave them off")
    length = where.shape[0] if where.input and len(where.shape) == 1 else None
    twin = nn.BoundedEmbedding(
        module.num_embeddings,
        module.embedding_dim,
        module.padding_idx,
        length=length,
        device=module.weight.device,
        dtype=module.weight.dtype,
    )
    note = "rows are kept in the unit ball"
    if where.copy_weights:
        note += "; weights copied and projected"
        with torch.no_grad():
            twin.weight.copy_(module.weight)
        twin.project_()
    twin.weight.requires_grad_(module.weight.requires_grad)
    return Decision("replaced", twin, note)


def embedding_bag(module: torch.nn.EmbeddingBag, where: Where) -> Decision:
    """A table, then the mean over tokens."""
    if module.mode != "mean" or module.padding_idx is not None or not where.alone or len(where.shape) != 1:
        note = (
            "only bags of mode 'mean', without padding_idx, offsets and weights have a twin: use BoundedEmbedding and a TokenMean"
        )
        return Decision("not converted", module, note)
    table = torch.nn.Embedding(module.num_embeddings, module.embedding_dim, sparse=module.sparse, _weight=module.weight.detach())
    table.max_norm, table.scale_grad_by_freq = module.max_norm, module.scale_grad_by_freq
    table.weight.requires_grad_(module.weight.requires_grad)
    found = embedding(table, where)
    if found.module is None or found.outcome != "replaced":
        return Decision("not converted", module, found.note)
    return Decision("replaced", nn.Sequential(found.module, nn.TokenMean()), found.note)


def _refusal(module: torch.nn.MultiheadAttention, where: Where) -> str:
    """Why this attention has no twin, if it has none."""
    if not module.batch_first:
        return _NOT_FIRST
    if not where.alone:
        return "only self-attention without masks has a twin: write the block with lipdp.nn.LipschitzAttention (it has causal=True)"
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        return "add_bias_kv, add_zero_attn, kdim and vdim have no twin"
    return ""


def _copy_attention(twin: nn.LipschitzAttention, module: torch.nn.MultiheadAttention) -> None:
    layers = (twin.query, twin.key, twin.value, twin.output)
    weights = (*module.in_proj_weight.detach().chunk(3), module.out_proj.weight.detach())
    biases = (None,) * 4 if module.in_proj_bias is None else (*module.in_proj_bias.detach().chunk(3), module.out_proj.bias.detach())
    with torch.no_grad():
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
            layer.project_()


def attention(module: torch.nn.MultiheadAttention, where: Where) -> Decision:
    """Lipschitz self-attention of as many heads, divided by its constant for this number of tokens."""
    why = _refusal(module, where)
    if why:
        return Decision("not converted", module, why)
    weight = module.in_proj_weight
    twin = nn.LipschitzAttention(
        module.embed_dim,
        module.num_heads,
        tokens=where.shape[0],
        bias=module.in_proj_bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    note = "tokens are brought into the unit ball, outputs divided by ℓ"
    if where.copy_weights:
        note += "; weights copied and projected"
        _copy_attention(twin, module)
    twin.requires_grad_(weight.requires_grad)
    return Decision("replaced", twin, note)


def encoder_layer(module: torch.nn.TransformerEncoderLayer, where: Where) -> Decision:
    """A 1-Lipschitz block: attention and dense layers, each averaged with its input; without normalisation and dropout."""
    why = _refusal(module.self_attn, where)
    hidden = module.linear1.out_features
    if not why and hidden % 2:
        why = f"dim_feedforward={hidden} is odd: GroupSort sorts pairs"
    if why:
        return Decision("not converted", module, why)
    bias = module.linear1.bias is not None
    twin = nn.TransformerBlock(module.linear1.in_features, module.self_attn.num_heads, hidden, tokens=where.shape[0], bias=bias)
    twin.to(device=module.linear1.weight.device, dtype=module.linear1.weight.dtype)
    note = "residuals are averages; normalisation and dropout are left out"
    if where.copy_weights:
        note += "; weights copied and projected"
        _copy_attention(twin.attention.module, module.self_attn)  # type: ignore[arg-type]
        inside = twin.dense.module
        assert isinstance(inside, torch.nn.Sequential)
        with torch.no_grad():
            for layer, plain in ((inside[0], module.linear1), (inside[2], module.linear2)):
                assert isinstance(layer, nn.SpectralLinear)
                layer.weight.copy_(plain.weight)
                if bias:
                    layer.bias.copy_(plain.bias)
                layer.project_()
    twin.requires_grad_(module.linear1.weight.requires_grad)
    return Decision("replaced", twin, note)


def encoder(module: torch.nn.TransformerEncoder, where: Where) -> Decision:
    """Its layers, one after the other."""
    blocks = []
    for layer in module.layers:
        assert isinstance(layer, torch.nn.TransformerEncoderLayer)
        found = encoder_layer(layer, where)
        if found.module is None or found.outcome != "replaced":
            return Decision("not converted", module, found.note)
        blocks.append(found.module)
    return Decision("replaced", nn.Sequential(*blocks), "residuals are averages; normalisation and dropout are left out")
