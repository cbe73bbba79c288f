"""What to do about layers that have no rule, and why they have none."""

from __future__ import annotations

import torch

from lipdp.errors import UnsupportedError

__all__ = ["no_rule", "way_out"]

_RECURRENT = (
    "A recurrence multiplies the cotangent by its weights at every step, so not even lipdp.nn.Boundary around it bounds its "
    "gradients. Train such a model with method='bookkeeping' (or another clipping method), which takes RNN, LSTM and GRU as they "
    "are; or put lipdp.nn.TransformerBlock or SpectralConv1d in its place"
)
_WAYS_OUT: tuple[tuple[type[torch.nn.Module] | tuple[type[torch.nn.Module], ...], str], ...] = (
    (
        torch.nn.MultiheadAttention,
        "Dot-product attention on unbounded tokens with unconstrained projections has no Lipschitz constant: use "
        "lipdp.nn.LipschitzAttention(embed_dim, num_heads, tokens=…), as lipdp.convert does",
    ),
    (
        (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder),
        "Its attention has no Lipschitz constant: use lipdp.nn.TransformerBlock(embed_dim, num_heads, tokens=…), as lipdp.convert "
        "does",
    ),
    ((torch.nn.RNNBase, torch.nn.RNNCellBase), _RECURRENT),
)


def way_out(module: torch.nn.Module) -> str:
    """Why nothing bounds this kind of layer and what to use, or an empty text where there is nothing particular to say."""
    return next((text for classes, text in _WAYS_OUT if isinstance(module, classes)), "")


def no_rule(where: str, module: torch.nn.Module) -> UnsupportedError:
    """The error for a layer without a rule."""
    particular = way_out(module)
    return UnsupportedError(
        f"{where} has no rule, so nothing bounds it. {particular + '. Otherwise: r' if particular else 'R'}eplace it by a layer of "
        "lipdp.nn, register a rule for its class (lipdp.bounds.rule), or use a clipping method for this model."
    )
