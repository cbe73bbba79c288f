"""Sequences: recurrent layers, their cells and attention, as matrix products that can be watched.

nn.RNN, nn.LSTM, nn.GRU and their cells run the same recurrences; nn.MultiheadAttention is four linear maps around scaled
dot-product attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lipdp.clipping.contribution import Contribution, Dense, refuse, watched_forward
from lipdp.clipping.handed import ROW, copies_for_all
from lipdp.clipping.rules_layers import affine
from lipdp.clipping.uses import Rows
from lipdp.errors import UnsupportedError

if TYPE_CHECKING:
    from lipdp.clipping.record import Recording


@refuse(torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
def _transformer_refusal(layer: torch.nn.TransformerEncoderLayer) -> str | None:
    if not layer.self_attn.batch_first and any(p.requires_grad for p in layer.parameters()):
        return "its layers see (length, batch, features), where examples are not the first dimension. Use batch_first=True."
    return None


def _project(
    made: Recording, owner: str, module: torch.nn.MultiheadAttention, x: torch.Tensor, which: int, parts: int = 1
) -> torch.Tensor:
    """Rows ``which`` (0: query, 1: key, 2: value; ``parts`` of them) of the packed projection, or the separate one."""
    size = module.embed_dim
    rows = slice(which * size, (which + parts) * size)
    bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
    packed = module.in_proj_weight is not None
    name = "in_proj_weight" if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")[which]
    stored = getattr(module, name)
    weight = stored[rows] if packed else stored
    output = F.linear(x, weight, bias)
    inputs = x.detach() if stored.requires_grad else None

    def contributions(cotangent: torch.Tensor) -> dict[str, Contribution]:
        made_parts = affine(cotangent, inputs, weight, bias, (name, "in_proj_bias"))
        return {
            key: part if key == name and not packed else Rows(part, which * size, parts * size, 3 * size)
            for key, part in made_parts.items()
        }

    made.add(module, owner, output, contributions, (x,))
    return output


def _with_own(made: Recording, owner: str, module: torch.nn.MultiheadAttention, part: torch.Tensor, name: str) -> torch.Tensor:
    """Keys or values (batch, length, width) with those that the layer adds: a trained row (``add_bias_kv``), zeros."""
    own: torch.Tensor | None = getattr(module, name)
    if own is not None:
        row = copies_for_all(own, ROW, len(part))
        made.tap(owner, row, lambda cotangent: {name: Dense(cotangent.unsqueeze(1))}, ())
        part = torch.cat([part, row], 1)
    return torch.cat([part, torch.zeros_like(part[:, :1])], 1) if module.add_zero_attn else part


def _merged_mask(scores_shape: tuple[int, ...], like: torch.Tensor, key_padding_mask: Any, attn_mask: Any) -> torch.Tensor | None:
    """What is added to the scores (batch, heads, query, key): −∞ where attention is not allowed, or the given numbers.

    Keys that the layer adds by itself come last, and are always allowed.
    """
    merged: torch.Tensor | None = None
    if attn_mask is not None:
        mask = _additive(attn_mask, like)
        merged = mask if mask.dim() == 2 else mask.reshape(scores_shape[0], scores_shape[1], *mask.shape[1:])
    if key_padding_mask is not None:
        padded = _additive(key_padding_mask, like)[:, None, None, :]
        merged = padded if merged is None else merged + padded
    return None if merged is None else F.pad(merged, (0, scores_shape[3] - merged.shape[-1])).expand(scores_shape)


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


@watched_forward(torch.nn.MultiheadAttention)
def _attention(made: Recording, owner: str) -> Callable[..., Any]:
    def forward(
        module: torch.nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() != 3:
            raise UnsupportedError(f"layer '{owner}' (MultiheadAttention) is given one sequence without a batch dimension")
        if is_causal and attn_mask is None:
            raise UnsupportedError(f"layer '{owner}' (MultiheadAttention): is_causal=True is only a hint; pass attn_mask too")
        same = query is key and key is value
        if not module.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        if same and module.in_proj_weight is not None:
            q, k, v = _project(made, owner, module, query, 0, 3).chunk(3, -1)
        else:
            q, k, v = (_project(made, owner, module, part, number) for number, part in enumerate((query, key, value)))
        k, v = (_with_own(made, owner, module, part, name) for part, name in ((k, "bias_k"), (v, "bias_v")))
        heads, width = module.num_heads, module.head_dim
        q, k, v = (part.reshape(part.shape[0], part.shape[1], heads, width).transpose(1, 2) for part in (q, k, v))
        weights: torch.Tensor | None = None
        p = module.dropout if module.training else 0.0
        mask = _merged_mask((q.shape[0], heads, q.shape[2], k.shape[2]), q, key_padding_mask, attn_mask)
        if need_weights:
            scores = (q / math.sqrt(width)) @ k.transpose(-1, -2)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p)
        output = module.out_proj(mixed.transpose(1, 2).flatten(2))
        if not module.batch_first:
            output = output.transpose(0, 1)
        if weights is None:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights

    return forward


State = tuple[torch.Tensor, ...]


def watched_linear(made: Recording, owner: str, module: torch.nn.Module, x: torch.Tensor, weight: str, bias: str) -> torch.Tensor:
    """x·Wᵀ + b of the named parameters, watched."""
    w, b = getattr(module, weight), getattr(module, bias, None)
    output = F.linear(x, w, b)
    inputs = x.detach() if w.requires_grad else None
    made.add(module, owner, output, lambda cotangent: affine(cotangent, inputs, w, b, (weight, bias)), (x,))
    return output


def rnn_cell(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor, State], State]:
    """h' = activation(from input + from hidden)."""
    return lambda from_input, from_hidden, state: (activation(from_input + from_hidden),)


def lstm_cell(from_input: torch.Tensor, from_hidden: torch.Tensor, state: State) -> State:
    """c' = f⊙c + i⊙g, h' = o⊙tanh(c'): one pre-activation, so both sides have the same cotangent."""
    i, f, g, o = (from_input + from_hidden).chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def gru_cell(from_input: torch.Tensor, from_hidden: torch.Tensor, state: State) -> State:
    """The reset gate multiplies the hidden-side pre-activation, so the two sides have cotangents of their own."""
    ri, zi, ni = from_input.chunk(3, 1)
    rh, zh, nh = from_hidden.chunk(3, 1)
    update = torch.sigmoid(zi + zh)
    return ((1 - update) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + update * state[0],)


def _cell(module: torch.nn.RNNBase) -> Callable[[torch.Tensor, torch.Tensor, State], State]:
    if isinstance(module, torch.nn.LSTM):
        return lstm_cell
    if isinstance(module, torch.nn.GRU):
        return gru_cell
    return rnn_cell(torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh)


def _direction(
    made: Recording,
    owner: str,
    module: torch.nn.RNNBase,
    x: torch.Tensor,
    lengths: torch.Tensor | None,
    state: State,
    suffix: str,
    reverse: bool,
) -> tuple[torch.Tensor, State]:
    """One layer in one direction over (B, T, features); positions past an example's length change nothing."""
    from_input = watched_linear(made, owner, module, x, f"weight_ih{suffix}", f"bias_ih{suffix}")
    cell, steps = _cell(module), x.shape[1]
    outputs: list[torch.Tensor] = []
    for t in reversed(range(steps)) if reverse else range(steps):
        from_hidden = watched_linear(made, owner, module, state[0], f"weight_hh{suffix}", f"bias_hh{suffix}")
        new = cell(from_input[:, t], from_hidden, state)
        if module.proj_size > 0:
            projected = watched_linear(made, owner, module, new[0], f"weight_hr{suffix}", "no bias")
            new = (projected, *new[1:])
        output = new[0]
        if lengths is not None:
            active = (t < lengths)[:, None]
            new = tuple(torch.where(active, fresh, old) for fresh, old in zip(new, state, strict=True))
            output = torch.where(active, output, torch.zeros_like(output))
        state = new
        outputs.append(output)
    return torch.stack(outputs[::-1] if reverse else outputs, 1), state


@watched_forward(torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU)
def _recurrent(made: Recording, owner: str) -> Callable[..., Any]:
    def forward(module: torch.nn.RNNBase, input: Any, hx: Any = None) -> Any:
        packed = isinstance(input, PackedSequence)
        lengths: torch.Tensor | None = None
        if packed:
            x, lengths = pad_packed_sequence(input, batch_first=True)
            lengths = lengths.to(x.device)
        else:
            if input.dim() != 3:
                raise UnsupportedError(f"layer '{owner}' ({type(module).__name__}) is given one sequence without a batch dimension")
            x = input if module.batch_first else input.transpose(0, 1)
        directions = 2 if module.bidirectional else 1
        is_lstm = isinstance(module, torch.nn.LSTM)
        initial = _initial_state(module, x, hx, directions, is_lstm)
        finals: list[State] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                output, final = _direction(
                    made, owner, module, x, lengths, tuple(part[number] for part in initial), suffix, direction == 1
                )
                outputs.append(output)
                finals.append(final)
            x = torch.cat(outputs, 2) if directions == 2 else outputs[0]
            if module.dropout > 0 and layer < module.num_layers - 1:
                x = F.dropout(x, module.dropout, module.training)
        states = tuple(torch.stack([final[i] for final in finals]) for i in range(2 if is_lstm else 1))
        result: Any = x if module.batch_first else x.transpose(0, 1)
        if packed:
            assert lengths is not None
            result = _packed_like(input, x, lengths)
        return result, states if is_lstm else states[0]

    return forward


def _packed_like(like: PackedSequence, x: torch.Tensor, lengths: torch.Tensor) -> PackedSequence:
    """(B, T, features) packed in the very order of ``like``."""
    order = like.sorted_indices
    if order is not None:
        x, lengths = x[order], lengths[order]
    data = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=True).data
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _initial_state(module: torch.nn.RNNBase, x: torch.Tensor, hx: Any, directions: int, is_lstm: bool) -> State:
    if hx is not None:
        return tuple(hx) if is_lstm else (hx,)
    count, batch = module.num_layers * directions, x.shape[0]
    hidden = x.new_zeros(count, batch, module.proj_size or module.hidden_size)
    return (hidden, x.new_zeros(count, batch, module.hidden_size)) if is_lstm else (hidden,)


@watched_forward(torch.nn.RNNCell, torch.nn.LSTMCell, torch.nn.GRUCell)
def _watched_cell(made: Recording, owner: str) -> Callable[..., Any]:
    def forward(module: torch.nn.RNNCellBase, input: torch.Tensor, hx: Any = None) -> Any:
        if input.dim() != 2:
            raise UnsupportedError(f"layer '{owner}' ({type(module).__name__}) is given one input without a batch dimension")
        is_lstm = isinstance(module, torch.nn.LSTMCell)
        if hx is None:
            zeros = input.new_zeros(input.shape[0], module.hidden_size)
            hx = (zeros, zeros) if is_lstm else zeros
        state: tuple[torch.Tensor, ...] = tuple(hx) if is_lstm else (hx,)
        from_input = watched_linear(made, owner, module, input, "weight_ih", "bias_ih")
        from_hidden = watched_linear(made, owner, module, state[0], "weight_hh", "bias_hh")
        if is_lstm:
            return lstm_cell(from_input, from_hidden, state)
        if isinstance(module, torch.nn.GRUCell):
            return gru_cell(from_input, from_hidden, state)[0]
        activation = torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh
        return rnn_cell(activation)(from_input, from_hidden, state)[0]

    return forward
