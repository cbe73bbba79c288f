"""Where the records are after an operation: one rule for each kind of aten operation (:mod:`lipdp.clipping.follow`).

A rule is asked when some argument depends on the batch. It says where the records are in what the operation gives, or raises
:class:`Mixed`. It may only claim what holds for all values. An operation without a rule is mixing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["At", "Mixed", "Rule", "State", "rule_of"]

aten = torch.ops.aten


class At(NamedTuple):
    """Records lie in dimension ``dim``, ``runs`` rows of each at a time: those at index k are record (k // runs) mod B."""

    dim: int
    runs: int


class Mixed(Exception):  # noqa: N818  (it is a state as well)
    """Numbers that depend on several records, or on one that is not to be told.

    Attributes:
        what: was done.
        where: in the user's code.
        answer: of a question whether something holds for all or any of the batch: what is answered, whatever the batch is.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.what, self.where = what, where
        self.answer: bool | None = None
        self.counted = -1  # of how many numbers this is the sum, to be compared with that

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed)

    __hash__ = Exception.__hash__


State = At | Mixed | None
"""Of a tensor; ``None``: it does not depend on the batch."""

Results = Callable[[int, Sequence[Any], list[Any], Any], Any]
"""(records, args in their order, states of args, output) ↦ the state of all outputs, or a list with one for each."""


@dataclass(frozen=True)
class Rule:
    """What an operation does to records.

    Attributes:
        results: where they are afterwards.
        view: whether it gives the memory that it was given.
        writes: whether its outputs are arguments that it has written into.
        written: arguments that it writes into and does not give back.
        reads: "" or what it shows to Python: a "value", or by its output's "size".
    """

    results: Results
    view: bool = False
    writes: bool = False
    written: tuple[int, ...] = ()
    reads: str = ""
    chooses: Callable[[Sequence[Any]], bool] = field(default=lambda args: True)
    names: tuple[tuple[str, Any], ...] = ()
    name: str = ""

    def answer(self, args: Sequence[Any], states: list[Any]) -> bool | None:
        """No, if it asks for all of the batch; yes, if for any of it; what is not, the other way round."""
        if self.name in ("all", "any") and len(args) == 1:
            return self.name == "any"
        if self.name == "eq" and isinstance(states[0], Mixed) and args[1] == states[0].counted:
            return False  # the sum of a mask is the number of its places
        before = states[0].answer if states and isinstance(states[0], Mixed) else None
        if self.name in ("logical_not", "bitwise_not"):
            return None if before is None else not before
        return before if self.name in ("clone", "_to_copy") and args[0].dtype == torch.bool else None

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """All arguments by their place, those that were given by name too."""
        return [*args, *(kwargs.get(name, default) for name, default in self.names[len(args) :])] if kwargs else args


def _dim(dim: Any, ndim: int) -> int:
    if type(dim) is not int:  # another form of the operation, whose arguments have another order
        raise Mixed("along dimensions that nobody has looked for there")
    return dim + ndim if dim < 0 else dim


def _one(states: Sequence[Any], *allowed: int) -> At:
    """The state of the one argument among these that depends on the batch."""
    for number, state in enumerate(states):
        for part in state if isinstance(state, list) else [state]:
            if isinstance(part, Mixed):
                raise part
            if part is not None and number not in allowed:
                raise Mixed("an argument that should not depend on the batch does")
    found = [states[number] for number in allowed if number < len(states) and states[number] is not None]
    if len(found) != 1:
        raise Mixed("several arguments depend on the batch")
    at: At = found[0]
    return at


def _mixing(records: int, args: Any, states: list[Any], output: Any) -> Any:
    raise Mixed("it takes the records together, or nobody has said that it does not")


def _constant(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """Only the shape of its argument matters."""
    return None


def _tensors(args: Sequence[Any], states: list[Any]) -> list[tuple[torch.Tensor, State]]:
    found = []
    for arg, state in zip(args, states, strict=False):
        if isinstance(arg, torch.Tensor):
            found.append((arg, state))
        elif isinstance(state, list):
            found += [(part, one) for part, one in zip(arg, state, strict=True) if isinstance(part, torch.Tensor)]
    return found


def _broadcast(tensors: Sequence[tuple[torch.Tensor, State]], shape: Sequence[int]) -> At:
    """All that depend on the batch have their records in the same dimension, counted from the last."""
    found: At | None = None
    for tensor, state in tensors:
        if state is None:
            continue
        if isinstance(state, Mixed):
            raise state
        at = At(state.dim + len(shape) - tensor.ndim, state.runs)
        if at.dim < 0 or tensor.shape[state.dim] != shape[at.dim]:
            raise Mixed("records meet others in another dimension")
        if found is not None and found != at:
            raise Mixed("records meet others in another dimension")
        found = at
    if found is None:
        raise Mixed("an argument by name depends on the batch")
    return found


def _pointwise(records: int, args: Any, states: list[Any], output: Any) -> Any:
    like = output[0] if isinstance(output, tuple | list) else output
    return _broadcast(_tensors(args, states), like.shape)


def _reduction(dims: int, keep: int | None, whole: str = "") -> Results:
    """Along the dimensions that argument ``dims`` names; argument ``keep`` says whether they stay, as they always do if None."""

    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at, ndim = _one(states, 0), args[0].ndim
        given = args[dims] if len(args) > dims else None
        if given is None or (isinstance(given, list | tuple) and not given and whole != "none"):
            raise Mixed("over all of the batch")
        chosen = {_dim(d, ndim) for d in (given if isinstance(given, list | tuple) else [given])}
        if at.dim in chosen:
            raise Mixed("over the records")
        if keep is None:
            return at
        kept = args[keep] if len(args) > keep else False
        return at if kept else At(at.dim - sum(d < at.dim for d in chosen), at.runs)

    return results


def _along(dim: int, default: int = -1) -> Results:
    """Something along one dimension that keeps it (softmax, cumsum, sort)."""

    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at = _one(states, 0)
        given = args[dim] if len(args) > dim else default
        if given is None or _dim(given, args[0].ndim) == at.dim:
            raise Mixed("over the records")
        return at

    return results


def _leading(last: int | Callable[[tuple[Any, ...]], int], *others: int) -> Results:
    """On the last dimensions: the dimensions before are kept in place and in size, in all outputs that have them."""

    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at = _one(states, *(others or (0,)))
        source = next(args[k] for k in (others or (0,)) if states[k] is not None)
        if at.dim >= source.ndim - (last if isinstance(last, int) else last(args)):
            raise Mixed("over the records")
        return at

    return results


def _matrix_product(first: int) -> Results:
    """A·B of matrices, or of stacks of them; C + A·B where ``first`` is 1."""

    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        (a, b), (of_a, of_b) = args[first : first + 2], states[first : first + 2]
        product, stack = None, a.ndim - 2
        for state in (of_a, of_b, *states[:first]):
            if isinstance(state, Mixed):
                raise state
        if of_a is not None and of_b is not None:
            if of_a != of_b or of_a.dim >= stack:
                raise Mixed("a product of records with records")
            product = of_a
        elif of_a is not None:
            if of_a.dim == a.ndim - 1:
                raise Mixed("a sum over the records")
            product = of_a
        elif of_b is not None:
            if of_b.dim == b.ndim - 2:
                raise Mixed("a sum over the records")
            product = of_b if b.ndim > 1 else None
        if not first or states[0] is None:
            return product
        added = _broadcast([(args[0], states[0])], output.shape)
        if product is not None and added != product:
            raise Mixed("records meet others in another dimension")
        return added

    return results


def _matrix_vector(records: int, args: Any, states: list[Any], output: Any) -> Any:
    at = _one(states, 0)
    if at.dim != 0:
        raise Mixed("a sum over the records")
    return at


def _convolution(records: int, args: Any, states: list[Any], output: Any) -> Any:
    at = _one(states, 0)
    if at.dim != 0:
        raise Mixed("records are not in the first dimension")
    return at


def _embedding(records: int, args: Any, states: list[Any], output: Any) -> Any:
    return _one(states, 1)


def _gather(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """self, dim, index and, of scatter, a source: all of them aligned in the records' dimension, which is not ``dim``."""
    size = {tensor.shape[state.dim] for tensor, state in _tensors(args, states) if isinstance(state, At)}
    at = _aligned(args, states)
    if at.dim == _dim(args[1], args[0].ndim):
        raise Mixed("over the records")
    others = {arg.shape[at.dim] for arg in args if isinstance(arg, torch.Tensor) and arg.ndim}
    if len(size | others) != 1:
        raise Mixed("not all records are taken")
    return at


def _aligned(args: Any, states: list[Any]) -> At:
    found = {state for state in states if state is not None and not isinstance(state, list)}
    for state in found:
        if isinstance(state, Mixed):
            raise state
    if len(found) != 1:
        raise Mixed("records meet others in another dimension")
    at: At = found.pop()
    return at


def _index_select(records: int, args: Any, states: list[Any], output: Any) -> Any:
    self, dim, index = args[:3]
    if states[0] is None:
        at = _one(states, 2)
        return At(_dim(dim, self.ndim), at.runs)
    at = _one(states, 0)
    if at.dim != _dim(dim, self.ndim):
        return at
    raise Mixed("the records in another order")


def _index(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """``self[i, j, …]``: by whole numbers. The records stay where they are, or each takes of its own."""
    self, indices = args[0], list(args[1])
    of_self, of_indices = states[0], list(states[1]) if isinstance(states[1], list) else [None] * len(indices)
    if any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in indices):
        raise Mixed("as many of them as their contents say")
    places = [k for k, part in enumerate(indices) if part is not None]
    shape = torch.broadcast_shapes(*(indices[k].shape for k in places))
    together = places == list(range(places[0], places[-1] + 1))
    begin = places[0] if together else 0  # where the dimensions of the indices are in the result
    chosen = None
    if any(of_indices[k] is not None for k in places):
        chosen = _broadcast([(indices[k], of_indices[k]) for k in places], shape)
    if isinstance(of_self, Mixed):
        raise of_self
    if of_self is None:
        assert chosen is not None
        return At(chosen.dim + begin, chosen.runs)
    if of_self.dim not in places:
        if chosen is not None:
            raise Mixed("records meet others in another dimension")
        rest = [d for d in range(self.ndim) if d not in places]
        before = rest.index(of_self.dim)
        return At(before if together and of_self.dim < begin else before + len(shape), of_self.runs)
    own = indices[of_self.dim]  # of each record, something: those numbers must name the records in their order
    if of_indices[of_self.dim] is not None or of_self.runs != 1 or self.shape[of_self.dim] != records:
        raise Mixed("the records in an order that depends on them")
    dims = [d for d in range(own.ndim) if own.shape[d] != 1]
    if len(dims) != 1 or own.numel() != records or not _counts(own):
        raise Mixed("the records in another order")
    at = At(dims[0] + len(shape) - own.ndim, 1)
    if chosen is not None and chosen != at:
        raise Mixed("records meet others in another dimension")
    return At(at.dim + begin, 1)


def _counts(numbers: torch.Tensor) -> bool:
    """Whether they are 0, 1, 2, …; not to be asked while a CUDA graph is recorded, when it was asked before."""
    if numbers.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(torch.equal(numbers.reshape(-1), torch.arange(numbers.numel(), device=numbers.device, dtype=numbers.dtype)))


def _index_put(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """``self[i, j] = values``: the records keep their dimension, or each writes into its own."""
    self, indices, values = args[:3]
    read = [self, indices], [states[0], states[1]]
    if any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in indices):
        if states[2] is not None or values.numel() != 1:
            raise Mixed("as many of them as their contents say")
        mask = [(part, state) for part, state in zip(indices, states[1] or [None] * len(indices), strict=True) if part is not None]
        if len(mask) != 1 or indices[0] is not mask[0][0]:
            raise Mixed("as many of them as their contents say")
        padded = mask[0][0].reshape(*mask[0][0].shape, *[1] * (self.ndim - mask[0][0].ndim))
        return _broadcast([(self, states[0]), (padded, mask[0][1])], self.shape)
    like = torch.empty(self.shape, device="meta")
    at = states[0]
    if at is None:
        owners = [k for k, part in enumerate(indices) if part is not None and part.numel() == records and _counts(part)]
        if len(owners) != 1 or self.shape[owners[0]] != records:
            raise Mixed("into places that are not the records' own")
        at = At(owners[0], 1)
    taken = _index(records, read[0], [at, read[1][1]], like)
    if states[2] is not None:
        shape = self[tuple(slice(None) if part is None else part for part in indices)].shape
        if _broadcast([(values, states[2])], shape) != taken:
            raise Mixed("records meet others in another dimension")
    return at


def _cat(records: int, args: Any, states: list[Any], output: Any) -> Any:
    parts, of_parts = args[0], states[0]
    pairs = [(part, state) for part, state in zip(parts, of_parts, strict=True) if part.numel() or part.ndim > 1]
    at = _aligned(args, [state for _, state in pairs])
    dim = _dim(args[1] if len(args) > 1 else 0, output.ndim)
    if dim == at.dim and any(part.shape[dim] % (records * at.runs) for part, _ in pairs):
        raise Mixed("records beside others in their own dimension")
    return at


def _stack(records: int, args: Any, states: list[Any], output: Any) -> Any:
    at = _aligned(args, list(states[0]))
    dim = _dim(args[1] if len(args) > 1 else 0, output.ndim)
    return At(at.dim + (dim <= at.dim), at.runs)


def _repeat(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """Whole copies beside each other: in their own dimension records come round again and again."""
    at = _one(states, 0)
    return At(at.dim + output.ndim - args[0].ndim, at.runs)


def _pad(records: int, args: Any, states: list[Any], output: Any) -> Any:
    at, self, widths = _one(states, 0), args[0], args[1]
    from_last = self.ndim - 1 - at.dim
    if any(widths[2 * from_last : 2 * from_last + 2]):
        raise Mixed("beside the records")
    return at


def _layer_norm(records: int, args: Any, states: list[Any], output: Any) -> Any:
    at = _one(states, 0)
    if at.dim >= args[0].ndim - len(args[1]):
        raise Mixed("over the records")
    return at


def _first(*allowed: int) -> Results:
    """Records are first in all that depend on the batch, and in all outputs that have dimensions."""

    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at = _aligned(args, [states[k] for k in allowed if k < len(states)])
        if at.dim != 0 or any(state is not None for k, state in enumerate(states) if k not in allowed):
            raise Mixed("records are not in the first dimension of all")
        return [at if part.ndim else None for part in output] if isinstance(output, tuple | list) else at

    return results


def _group_norm(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """N, C and the places of each may be said by hand: N has to be the rows."""
    if args[3] != args[0].shape[0]:
        raise Mixed("rows that are not the records'")
    return _first(0)(records, args, states, output)


def _batched(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """Records first, and channels behind them, in a dimension that is kept apart."""
    at = _one(states, 0)
    if at.dim != 0 or args[0].ndim < 4:
        raise Mixed("records are not in the first of four dimensions")
    return at


def _values(records: int, args: Any, states: list[Any], output: Any) -> Any:
    """Each number by itself, against others that are nobody's."""
    return _one(states, 0)


def _frozen_norm(training: int) -> Results:
    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at = _one(states, 0)
        if training >= 0 and type(args[training]) is not bool:  # without statistics that are given
            raise Mixed("statistics of the batch")
        if (training >= 0 and args[training]) or at.dim == 1:
            raise Mixed("statistics of the batch")
        return [at, None, None, *[None] * (len(output) - 3)] if isinstance(output, tuple | list) else at

    return results


def _attention(mask: int | None) -> Results:
    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at = _aligned(args, states[:3])
        if any(state is None for state in states[:3]) and any(
            part.shape[at.dim] != args[0].shape[at.dim] for part in args[:3]
        ):
            raise Mixed("records meet others in another dimension")
        if at.dim > 1 or any(arg.ndim != 4 for arg in args[:3]):
            raise Mixed("attention over the records")
        if at.dim == 1 and len({part.shape[1] for part in args[:3]}) != 1:
            raise Mixed("heads that records share")
        bias, state = (args[mask], states[mask]) if mask is not None and len(args) > mask else (None, None)
        if isinstance(state, Mixed):
            raise state
        if state is not None and At(state.dim + 4 - bias.ndim, state.runs) != at:
            raise Mixed("records meet others in another dimension")
        return [
            at if isinstance(part, torch.Tensor) and part.ndim > at.dim and part.ndim >= 3 and part.is_floating_point() else None
            for part in output
        ]

    return results


def _nll(records: int, args: Any, states: list[Any], output: Any) -> Any:
    if args[3] != 0:
        raise Mixed("a mean or a sum of the losses (use reduction='none')")
    at = _aligned(args, states[:2])
    if at.dim != 0 or (len(states) > 2 and states[2] is not None):
        raise Mixed("records are not in the first dimension")
    return [at, None]


def _elementwise_loss(reduction: int) -> Results:
    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        if (args[reduction] if len(args) > reduction else 1) != 0:
            raise Mixed("a mean or a sum of the losses (use reduction='none')")
        return _pointwise(records, args, states, output)

    return results


def _fft(dims: int) -> Results:
    def results(records: int, args: Any, states: list[Any], output: Any) -> Any:
        at = _one(states, 0)
        given = args[dims]
        if at.dim in {_dim(d, args[0].ndim) for d in (given if isinstance(given, list | tuple) else [given])}:
            raise Mixed("over the records")
        return at

    return results


_TABLE: dict[str, Results] = {}


def _say(names: str, results: Results) -> None:
    _TABLE.update(dict.fromkeys(names.split(), results))


_say("clone _to_copy alias_copy contiguous native_dropout bernoulli multinomial_ copy fill masked_fill where nan_to_num "
     "isnan isinf isfinite clamp clamp_min clamp_max elu gelu silu mish hardswish hardsigmoid leaky_relu celu selu prelu "
     "_prelu_kernel softplus log_sigmoid_forward threshold glu_ hardtanh relu6 logit polar complex _conj_physical real imag "
     "dropout _fused_dropout round floor_divide rsub bitwise_and bitwise_or bitwise_not logical_and logical_or "
     "logical_not logical_xor isclose frac trunc copysign addcmul addcdiv lerp heaviside rrelu_with_noise "
     "_resize_output_ searchsorted_ special_entr ldexp float_power logaddexp logaddexp2 xlogy copy_ relu mul add sub div "
     "angle sgn to normal_ uniform_ exponential_ random_ bernoulli_ cauchy_ geometric_ "
     "log_normal_ rand_like_", _pointwise)  # fmt: skip
_say("zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
     "new_empty_strided is_same_size sym_size sym_stride sym_numel sym_storage_offset zero_ scalar_tensor", _constant)  # fmt: skip
_say("sum mean amax amin logsumexp nansum count_nonzero", _reduction(1, 2))
_say("any all argmax argmin prod median nanmedian max min aminmax", _reduction(1, 2))
_say("var std", _reduction(1, 3))
_say("var_mean std_mean", _reduction(1, 3))
_say("linalg_vector_norm", _reduction(2, 3))
_say("norm", _reduction(2, 3))
_say("kthvalue", _reduction(2, 3))
_say("mode", _reduction(1, 2))
_say("_softmax _safe_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin", _along(1))
_say("_softmax_backward_data", _mixing)
_say("sort argsort", _along(1))
_say("topk", _along(2))
_say("glu", _along(1))
_say("renorm", _mixing)
_say("flip", _reduction(1, None, whole="none"))
_say("roll", _reduction(2, None))
_say("mm", _matrix_product(0))
_say("bmm", _matrix_product(0))
_say("addmm baddbmm", _matrix_product(1))
_say("mv", _matrix_vector)
_say("convolution _convolution mkldnn_convolution cudnn_convolution slow_conv_transpose2d conv_depthwise3d "
     "_conv_depthwise2d thnn_conv2d", _convolution)  # fmt: skip
_say("embedding", _embedding)
_say("gather scatter scatter_add scatter_reduce scatter_ scatter_add_ scatter_reduce_", _gather)
_say("index_select", _index_select)
_say("index", _index)
_say("index_put index_put_ _index_put_impl_ _unsafe_index_put", _index_put)
_say("_unsafe_index", _index)
_say("cat", _cat)
_say("stack", _stack)
_say("repeat", _repeat)
_say("constant_pad_nd", _pad)
_say("native_layer_norm _fused_rms_norm rms_norm", _layer_norm)
_say("native_group_norm", _group_norm)
_say("native_batch_norm cudnn_batch_norm", _frozen_norm(5))
_say("_native_batch_norm_legit", _frozen_norm(5))
_say("_native_batch_norm_legit_no_training", _frozen_norm(-1))
_say("_batch_norm_no_update", _frozen_norm(-1))
_say("_scaled_dot_product_flash_attention_for_cpu", _attention(5))
_say("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", _attention(3))
_say("_scaled_dot_product_flash_attention", _attention(None))
_say("_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable", _attention(3))
_say("nll_loss_forward nll_loss2d_forward", _nll)
_say("mse_loss smooth_l1_loss huber_loss soft_margin_loss", _elementwise_loss(2))
_say("binary_cross_entropy", _elementwise_loss(3))
_say("triu tril", _leading(2))
_say("max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d "
     "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest_exact2d "
     "_upsample_nearest_exact2d reflection_pad2d replication_pad2d fractional_max_pool2d", _leading(2))  # fmt: skip
_say("col2im grid_sampler_2d", _leading(2))
_say("adaptive_avg_pool1d avg_pool1d max_pool1d upsample_linear1d upsample_nearest1d reflection_pad1d replication_pad1d "
     "adaptive_max_pool1d", _leading(1))  # fmt: skip
_say("avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d upsample_trilinear3d upsample_nearest3d "
     "reflection_pad3d replication_pad3d", _leading(3))  # fmt: skip
_say("pixel_shuffle pixel_unshuffle", _leading(3))
_say("im2col channel_shuffle native_channel_shuffle", _batched)
_say("bucketize", _values)
_say("multinomial", _leading(1))
_say("linalg_inv_ex linalg_cholesky_ex inverse cholesky _linalg_det", _leading(2))
_say("_fft_r2c _fft_c2r _fft_c2c", _fft(1))
_say("_cdist_forward", _mixing)
_say("_thnn_fused_lstm_cell", _first(0, 1, 2))
_say("_thnn_fused_gru_cell", _first(0, 1, 2))

_VALUES = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose", "_is_all_true", "_is_any_true", "_assert_async"}


def _chooses(args: Sequence[Any]) -> bool:
    return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])


@functools.cache
def rule_of(func: Any) -> Rule:
    """The rule of an operation."""
    schema, name = func._schema, func._schema.name.partition("::")[2]
    ours = func.namespace == "aten" or func.namespace == "prims"
    written = [k for k, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    returned = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
    view = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    view = view or name in ("_unsafe_view", "as_strided_", "_reshape_alias", "lift_fresh", "detach", "detach_", "_to_view", "alias")
    plain = name.rstrip("_") if name.endswith("_") and not name.endswith("__") else name
    results = _TABLE.get(name) or (_TABLE.get(plain) if written else None)
    if results is None and torch.Tag.pointwise in func.tags:
        results = _pointwise
    if name in ("sort", "argsort") and "stable" in func._overloadname:
        results = _along(2)  # stable, dim
    if not ours or results is None:
        results = _mixing
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    reads = "value" if name in _VALUES or torch.Tag.data_dependent_output in func.tags else "size" if dynamic else ""
    chooses = _chooses if name in ("index", "index_put") else (lambda args: True)
    if name in _VALUES:
        results = _constant
    return Rule(
        results,
        view=view and ours,
        writes=any(returned),
        written=tuple(written) if written and not any(returned) else (),
        reads=reads,
        chooses=chooses,
        name=name,
        names=tuple((arg.name, arg.default_value if arg.has_default_value() else None) for arg in schema.arguments),
    )
