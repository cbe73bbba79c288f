"""Twins of nn.RNN, nn.LSTM and nn.GRU: the same recurrences as matrix products that can be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lipdp.clipping.record import watched_forward
from lipdp.clipping.rules_dense import affine
from lipdp.errors import UnsupportedError

if TYPE_CHECKING:
    from lipdp.clipping.record import Recording

__all__ = ["gru_cell", "lstm_cell", "rnn_cell", "watched_linear"]

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
