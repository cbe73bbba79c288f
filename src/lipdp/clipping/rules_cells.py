"""Twins of nn.RNNCell, nn.LSTMCell and nn.GRUCell: one step of the recurrences, as products that can be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lipdp.clipping.record import watched_forward
from lipdp.clipping.rules_recurrent import gru_cell, lstm_cell, rnn_cell, watched_linear
from lipdp.errors import UnsupportedError

if TYPE_CHECKING:
    from lipdp.clipping.record import Recording

__all__: list[str] = []


@watched_forward(torch.nn.RNNCell, torch.nn.LSTMCell, torch.nn.GRUCell)
def _cell(made: Recording, owner: str) -> Callable[..., Any]:
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
