"""The input of a record, or of a batch of them: a tensor, or a tuple or dict of tensors (ids, mask, positions), also nested.

All that depends on this structure is here: going over its leaves, choosing rows, calling a model with it. A tensor is handed to the
model as it is, the entries of a tuple as arguments, those of a dict by name. Every leaf has a row for each example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from lipdp._checks import kind_of
from lipdp.errors import DataError

Inputs: TypeAlias = "torch.Tensor | tuple[Inputs, ...] | dict[str, Inputs]"


def plain(x: Any) -> Any:
    """The same as tuples and dicts: lists are tuples, other mappings (a tokenizer's) dicts with their keys in order."""
    if isinstance(x, torch.Tensor):  # nearly always: asking an abstract class takes longer
        return x
    if isinstance(x, Mapping):
        strange = [key for key in x if not isinstance(key, str)]
        if strange:
            raise DataError(f"a dict of inputs has names for keys, not {kind_of(strange[0])}: they become the model's arguments")
        return {key: plain(x[key]) for key in sorted(x)}
    if isinstance(x, tuple | list):
        return tuple(plain(part) for part in x)
    return x


def named_leaves(x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, tensor) of each leaf, in order; the name of a tensor by itself is empty."""
    if isinstance(x, Mapping):
        for key in sorted(x):
            yield from named_leaves(x[key], f"{name}.{key}" if name else str(key))
    elif isinstance(x, tuple | list):
        for number, part in enumerate(x):
            yield from named_leaves(part, f"{name}.{number}" if name else str(number))
    else:
        yield name, x


def leaves(x: Any) -> list[Any]:
    """Its tensors, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    if type(x) is tuple and _ORDINARY.issuperset(map(type, x)):  # a batch, nearly always
        return list(x)
    return [leaf for _, leaf in named_leaves(x)]


_ORDINARY = {torch.Tensor, torch.nn.Parameter}


def mapped(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """``function`` of each leaf (and of the leaves of ``others`` at the same places), in the same structure."""
    if isinstance(x, torch.Tensor):
        return function(x, *others)
    if isinstance(x, Mapping):
        return {key: mapped(function, x[key], *(other[key] for other in others)) for key in sorted(x)}
    if isinstance(x, tuple | list):
        return tuple(mapped(function, *parts) for parts in zip(x, *others, strict=True))
    return function(x, *others)


def flattened(x: Any) -> tuple[list[Any], Hashable]:
    """Its leaves, and the structure that :func:`rebuilt` puts them back into."""
    return ([x], None) if isinstance(x, torch.Tensor) else (leaves(x), _structure(x))


def _structure(x: Any) -> Hashable:
    if isinstance(x, Mapping):
        return "dict", tuple((key, _structure(x[key])) for key in sorted(x))
    if isinstance(x, tuple | list):
        return "tuple", tuple(_structure(part) for part in x)
    return None


def rebuilt(values: Sequence[Any], structure: Any) -> Any:
    """Leaves in a structure of :func:`flattened`."""
    if structure is None:
        return values[0]
    return _rebuilt(iter(values), structure)


def _rebuilt(values: Iterator[Any], structure: Any) -> Any:
    if structure is None:
        return next(values)
    kind, inside = structure
    if kind == "dict":
        return {key: _rebuilt(values, part) for key, part in inside}
    return tuple(_rebuilt(values, part) for part in inside)


def rows_of(x: Any) -> int:
    """How many examples there are; refuses what is no batch of tensors with a row for each of them."""
    if isinstance(x, torch.Tensor) and x.ndim:
        return len(x)
    counts: dict[str, int] = {}
    for name, leaf in named_leaves(x):
        what = f"the input '{name}'" if name else "the input"
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, torch.Size):
            raise DataError(f"{what} of a batch is a {type(leaf).__name__}, not a tensor. Give tensors, tuples or dicts of them.")
        if len(shape) == 0:
            raise DataError(f"{what} of a batch has no dimensions: it needs one row for each example")
        counts[name] = shape[0]
    if not counts:
        raise DataError("the inputs of a batch hold no tensor at all")
    if len(set(counts.values())) > 1:
        said = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        raise DataError(f"the inputs of a batch need one row for each example, all of them; here the rows are {said}")
    return next(iter(counts.values()))


def device_of(x: Any) -> torch.device:
    """Where its first tensor is."""
    first: torch.Tensor = x if isinstance(x, torch.Tensor) else leaves(x)[0]
    return first.device


def select(x: Any, part: Any) -> Any:
    """Some rows: a slice, or numbers of rows."""
    if isinstance(part, torch.Tensor):
        return mapped(lambda leaf: leaf[part.to(leaf.device)], x)
    return mapped(lambda leaf: leaf[part], x)


def owned(x: Any) -> Any:
    """The same numbers in memory of their own: from a row of a larger table one gets to the others (``_base``, its storage)."""
    return mapped(_owned, x)


def _owned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    whole = leaf._base is None and leaf.untyped_storage().nbytes() == leaf.nbytes
    return leaf if whole else leaf.detach().clone()


def joined(parts: Sequence[Any]) -> Any:
    """Batches one after another."""
    return mapped(lambda *found: torch.cat(found), *parts)


def per_row(condition: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A condition on examples (batch,), shaped so that it applies to whole rows of a tensor like this."""
    return condition.to(like.device).reshape(-1, *[1] * (like.ndim - 1))


def call(model: Callable[..., Any], x: Any) -> Any:
    """The model's output: a tensor is its one argument, a tuple its arguments, a dict its arguments by name."""
    if isinstance(x, torch.Tensor):
        return model(x)
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, tuple | list):
        return model(*x)
    return model(x)


def logits_of(outputs: Any) -> Any:
    """The logits of a model that returns them beside other things (Hugging Face's ModelOutput, a dict); else what it returned."""
    if isinstance(outputs, torch.Tensor | tuple | list):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else outputs


def loss_of(loss: Callable[..., Any], outputs: Any, targets: torch.Tensor) -> Any:
    """The loss's values. It gets the logits of a ModelOutput; or all of it, where it asks for its parts itself."""
    logits = logits_of(outputs)
    if logits is outputs:
        return loss(outputs, targets)
    try:
        return loss(logits, targets)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        try:
            return loss(outputs, targets)  # it reads `outputs.logits`, or something else that only the whole has
        except (AttributeError, KeyError, IndexError, TypeError):
            raise error from None


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode; behind it each of its modules is in its own again."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def outputs_in_parts(
    model: torch.nn.Module, x: torch.Tensor, rows: int, prepared: Callable[[torch.Tensor], torch.Tensor] = lambda part: part
) -> torch.Tensor:
    """What a model gives in evaluation mode, of so many (prepared) rows at a time: in float64, on the processor."""
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    with evaluating(model), torch.no_grad():
        return torch.cat([model(prepared(part).to(place)).double().cpu() for part in torch.split(x, rows)])
