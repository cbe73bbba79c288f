"""Parameters that modules without a norm rule hand to torch's functions: ``F.linear(x, self.weight)``, ``x @ self.weight.T``.

Whatever a module does besides, each such use is a dense layer, an embedding or a normalisation, of which the gradients of the
examples are known: from what goes into the function and the cotangent of what it gives. So in the place of its parameters the
module is given stand-ins, which compute the same and note the use (Conv1D of GPT-2, embeddings that are scaled or numbered from
two on, norms that turn their input first, adapters by hand).

Which modules can be given stand-ins is tried: with two and three examples and with other contents, all that they do with their
parameters has to be one of these functions, on tensors whose first dimension holds the examples, as many rows of each. It is only
used where the self-check (:mod:`lipdp.clipping.verify`) finds each example's gradient to be that of the example alone.

**Copies**, for parameters that modules add, multiply by, expand or join by hand (class tokens, positions, scales). In the place of
p (…) the forward pass of a batch of B examples is given its B equal copies (B, 1, …, 1, …), with as many ones as let it meet the
examples in the first dimension; of p = (1, …), as class tokens and positions are, the one row becomes B. The gradient in copy i is
that of example i: nothing is evaluated twice, and what is measured is what the batch has computed.

Which shape is the right one is tried on the module's own arguments, with two and with three examples and with other contents: it
gives what the module gave. That alone would not do (the mean over all copies is that of one). It is only used where the self-check
(:mod:`lipdp.clipping.verify`) finds each example's gradient to be that of the example alone; where it does not, or no shape fits
(``p.norm()``, ``F.layer_norm(x, shape, p)``), the module is evaluated again for each example (:mod:`lipdp.clipping.fallback`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from lipdp.clipping.contribution import Contribution, Contributions, PositionSum, Scatter, find_norm_rule, find_watched_forward
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.rules_layers import normalised


class Use(NamedTuple):
    """A parameter's use in a function.

    Attributes:
        of: the parameters' names in the module.
        x: what the function reads besides; its first dimension holds the examples.
        output: what it gives.
        contributions: (number of examples) → (cotangent) → gradients by these names.
        keeps: whether ``x`` is needed in the backward pass as it was.
        at_once: see :func:`lipdp.clipping.contribution.norm_rule`.
    """

    of: tuple[str, ...]
    x: torch.Tensor
    output: torch.Tensor
    contributions: Callable[[int], Contributions]
    keeps: bool = True
    at_once: bool = False

    def runs(self, batch: int) -> int | None:
        """Rows of each example in the first dimension of what goes in and of what comes out, if they can be told."""
        rows = {part.shape[0] if part.ndim else 0 for part in (self.x, self.output)}
        (count,) = rows if len(rows) == 1 else (0,)
        return count // batch if count and count % batch == 0 else None


Note = Callable[[Use | None], torch.Tensor | None]
"""Told of every use; ``None``: of one that is not known. What it returns takes the output's place."""


class _StandIn(torch.Tensor):
    """A parameter, or (``turned``) its transpose, that tells of what is done with it."""

    whole: torch.Tensor
    local: str
    turned: bool
    note: Note

    @classmethod
    def of(cls, whole: torch.Tensor, local: str, note: Note, turned: bool = False) -> _StandIn:
        shown: _StandIn = (whole.detach().t() if turned else whole.detach()).as_subclass(cls)
        shown.whole, shown.local, shown.turned, shown.note = whole, local, turned, note
        return shown

    @property
    def plain(self) -> torch.Tensor:
        """What it stands for."""
        return self.whole.t() if self.turned else self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        one = next(part for part in tree_leaves((args, kwargs)) if isinstance(part, cls))
        if func in _TURNS and one is args[0] and one.whole.ndim == 2 and _turns(func, args[1:], kwargs):
            return cls.of(one.whole, one.local, one.note, not one.turned)
        plain_args, plain_kwargs = tree_map(lambda part: part.plain if isinstance(part, cls) else part, (args, kwargs))
        output = func(*plain_args, **plain_kwargs)
        if output is one.whole and not one.turned:  # a conversion that had nothing to do
            return one
        if not any(isinstance(part, torch.Tensor) for part in tree_leaves(output)):
            return output  # its shape, its type
        replaced = one.note(_use(func, args, kwargs, output))
        return output if replaced is None else replaced


def _use(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Use | None:
    rule = _RULES.get(func)
    if rule is None or not isinstance(output, torch.Tensor):
        return None
    try:
        return rule(output, *args, **kwargs)
    except TypeError:  # arguments that the rule does not know
        return None


# Functions ---------------------------------------------------------------------------------------------------------------


def _is(part: Any) -> TypeGuard[_StandIn]:
    return isinstance(part, _StandIn)


def _names(*parts: Any) -> tuple[str, ...]:
    return tuple(part.local for part in parts if _is(part))


def _tall(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """(batch, positions, features)."""
    return tensor.reshape(batch, tensor.numel() // max(1, batch * tensor.shape[-1]), tensor.shape[-1])


def _affine(output: torch.Tensor, x: Any, matrix: Any, bias: Any, across: bool) -> Use | None:
    """x·M, or (``across``) x·Mᵀ, and a bias behind it."""
    if _is(x) or not isinstance(x, torch.Tensor) or x.ndim < 2 or not isinstance(matrix, torch.Tensor) or matrix.ndim != 2:
        return None
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.ndim != 1 or bias.shape[0] != output.shape[-1]):
        return None
    seen = x.detach()

    def contributions(batch: int) -> Contributions:
        def of(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
            delta, found = _tall(cotangent, batch), dict[str, Contribution]()
            if _is(matrix):
                out_first = across != matrix.turned  # the parameter is (outputs, inputs)
                pair = (delta, _tall(seen, batch)) if out_first else (_tall(seen, batch), delta)
                found[matrix.local] = OuterSum(*pair, tuple(matrix.whole.shape))
            if _is(bias):
                found[bias.local] = PositionSum(delta, tuple(bias.whole.shape))
            return found

        return of

    return Use(_names(matrix, bias), x, output, contributions, keeps=_is(matrix))


def _linear(output: torch.Tensor, input: Any, weight: Any, bias: Any = None) -> Use | None:
    return _affine(output, input, weight, bias, across=True)


def _product(output: torch.Tensor, input: Any, other: Any) -> Use | None:
    return _affine(output, input, other, None, across=False)


def _added_product(output: torch.Tensor, input: Any, mat1: Any, mat2: Any) -> Use | None:
    return _affine(output, mat1, mat2, input, across=False)


def _sum(output: torch.Tensor, input: Any, other: Any) -> Use | None:
    x, bias = (other, input) if _is(input) else (input, other)
    if _is(x) or not isinstance(x, torch.Tensor) or x.ndim < 2 or x.shape != output.shape or not _is(bias) or bias.whole.ndim != 1:
        return None
    if bias.whole.shape[0] != x.shape[-1]:
        return None

    def contributions(batch: int) -> Contributions:
        return lambda cotangent: {bias.local: PositionSum(_tall(cotangent, batch), tuple(bias.whole.shape))}

    return Use(_names(bias), x, output, contributions, keeps=False)


def _embedding(
    output: torch.Tensor,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Use | None:
    if not _is(weight) or weight.turned or max_norm is not None or scale_grad_by_freq or sparse or input.ndim == 0:
        return None
    rows, width = weight.whole.shape
    padding = None if padding_idx is None else padding_idx % rows

    def contributions(batch: int) -> Contributions:
        tokens = input.reshape(batch, input.numel() // batch)

        def of(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
            delta = cotangent.reshape(*tokens.shape, width)
            if padding is not None:
                delta = delta.masked_fill((tokens == padding)[..., None], 0)
            return {weight.local: Scatter(tokens, delta, rows)}

        return of

    return Use(_names(weight), input, output, contributions)


def _layer_norm(
    output: torch.Tensor,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Use | None:
    shape = tuple(normalized_shape)
    if _is(input) or input.ndim <= len(shape):
        return None
    seen = input.detach()
    own = {name: part for name, part in (("weight", weight), ("bias", bias)) if _is(part)}

    def contributions(batch: int) -> Contributions:
        places = (batch, seen.numel() // max(1, batch * math.prod(shape)), *shape)
        scale, shift = (own[name].whole if name in own else None for name in ("weight", "bias"))
        made = normalised(seen.reshape(places), lambda x: F.layer_norm(x, shape, eps=eps), scale, shift, len(shape))
        return lambda cotangent: {own[name].local: part for name, part in made(cotangent.reshape(places)).items()}

    return Use(_names(weight, bias), input, output, contributions, at_once=True)


_RULES: dict[Any, Callable[..., Use | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    torch.layer_norm: lambda output, input, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True: _layer_norm(
        output, input, shape, weight, bias, eps
    ),
    torch.addmm: _added_product,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _product),
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _sum),
}


def _getter(name: str) -> Any:
    """What reads an attribute of tensors."""
    return getattr(torch.Tensor, name).__get__


_TURNS = {torch.t, torch.Tensor.t, _getter("T"), _getter("mT"), torch.transpose, torch.Tensor.transpose}


def _turns(func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call turns a matrix."""
    return not kwargs and (func not in (torch.transpose, torch.Tensor.transpose) or {dim % 2 for dim in rest} == {0, 1})


# Modules -----------------------------------------------------------------------------------------------------------------


@contextmanager
def stand_ins(module: torch.nn.Module, note: Note) -> Iterator[None]:
    """Within the block, a module's own trained parameters tell ``note`` of what is done with them."""
    own = {local: p for local, p in module.named_parameters(recurse=False, remove_duplicate=False) if p.requires_grad}
    with swapped(module, {local: _StandIn.of(p, local, note) for local, p in own.items()}):
        yield


class Handing:
    """Finds, while a model runs on a few examples, which modules hand all of their parameters to functions that are known.

    Args:
        modules: candidates, by name.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.modules = dict(modules)
        self._uses: dict[str, list[list[tuple[tuple[str, ...], int | None]]]] = {name: [] for name in modules}

    @contextmanager
    def looking(self, batch: int) -> Iterator[None]:
        """Within the block, the model is run on this many examples."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                self._uses[name].append([])
                stack.enter_context(stand_ins(module, self._note_of(name, batch)))
            yield

    def _note_of(self, name: str, batch: int) -> Note:
        def note(use: Use | None) -> None:
            self._uses[name][-1].append(((), None) if use is None else (use.of, use.runs(batch)))

        return note

    def fitting(self) -> set[str]:
        """Modules whose uses are the same in all passes, each with as many rows of every example."""
        return {name for name, passes in self._uses.items() if self._fits(name, passes)}

    def _fits(self, name: str, passes: Sequence[Sequence[tuple[tuple[str, ...], int | None]]]) -> bool:
        first = passes[0] if passes else ()
        known = all(runs is not None for _, runs in first) and all(uses == first for uses in passes)
        own = {local for local, p in self.modules[name].named_parameters(recurse=False) if p.requires_grad}
        return known and own == {local for of, _ in first for local in of}


ROW = -1
_CANDIDATES = (ROW, 0, 1, 2, 3)

Ones = dict[str, int]
"""By own parameter: ones between the examples and the parameter's dimensions; ``ROW``: its one row for all becomes theirs."""


def copies_for_all(parameter: torch.Tensor, ones: int, batch: int) -> torch.Tensor:
    """The parameter once for each example, as a tensor of its own in the graph."""
    rest = parameter.shape[1:] if ones == ROW else (*[1] * ones, *parameter.shape)
    start = parameter if ones == ROW else parameter.reshape(1, *rest)
    return start.expand(batch, *rest).clone()


@contextmanager
def swapped(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within the block, a module's own parameters are these tensors."""
    kept = {local: module._parameters[local] for local in tensors}
    try:
        module._parameters.update(tensors)  # type: ignore[arg-type]
        yield
    finally:
        module._parameters.update(kept)


def spreadable(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules without a rule, with trainable parameters of their own and none in lists, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
        and not any(isinstance(part, torch.nn.ParameterList | torch.nn.ParameterDict) for part in (module, *module.children()))
        and not isinstance(module, torch.jit.ScriptModule)
        and find_norm_rule(module) is None
        and find_watched_forward(module) is None
    }


class Spreading:
    """Finds, while a model runs on a few examples without gradients, which modules' own parameters can be spread, and how.

    Args:
        modules: candidates, by name.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._left = {
            name: {
                local: [ones for ones in _CANDIDATES if ones != ROW or (p.ndim and p.shape[0] == 1)]
                for local, p in module.named_parameters(recurse=False)
                if p.requires_grad
            }
            for name, module in modules.items()
        }
        self._called: set[str] = set()
        self._trying = False

    @contextmanager
    def looking(self, batch: int) -> Iterator[None]:
        """Within the block, the model is run on this many examples."""
        handles = [
            module.register_forward_hook(self._hook(name, batch), with_kwargs=True, prepend=True)
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fitting(self) -> dict[str, Ones]:
        """Modules all of whose parameters can be spread."""
        return {
            name: {local: ones[0] for local, ones in left.items()}
            for name, left in self._left.items()
            if name in self._called and all(left.values())
        }

    def _hook(self, name: str, batch: int) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            left = self._left[name]
            if self._trying or not all(left.values()):
                return
            self._called.add(name)
            self._trying = True
            try:
                for local in left:
                    left[local] = [ones for ones in left[local] if self._same(module, {local: ones}, batch, args, kwargs, output)]
                if all(left.values()) and not self._same(module, {p: o[0] for p, o in left.items()}, batch, args, kwargs, output):
                    left.update({local: [] for local in left})
            finally:
                self._trying = False

        return hook

    @staticmethod
    def _same(module: torch.nn.Module, ones: Ones, batch: int, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether the module gives the same with a copy for each example."""
        own = dict(module.named_parameters(recurse=False))
        copies = {local: copies_for_all(own[local], number, batch) for local, number in ones.items()}
        try:
            with swapped(module, copies):
                again = module.forward(*args, **kwargs)
        except Exception:  # whatever it raises, it can't be given copies
            return False
        one, other = ([leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (again, output))
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True) if one.is_floating_point() else torch.equal(one, other)
