"""Where the records are after an operation: one rule for each kind of aten operation (:mod:`lipdp.clipping.follow`).

A rule is asked when some argument depends on the batch. It says where the records are in what the operation gives, or raises
:class:`Mixed`. It may only claim what holds for all values. An operation without a rule is mixing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lipdp.clipping.operations import (
    TAKEN_OUT,
    At,
    Call,
    Mixed,
    Results,
    Rule,
    State,
    by_masks,
    constant,
    dimension,
    is_mask,
    mixing,
    shaped,
)
from lipdp.graphs import holds


def _broadcast(tensors: Sequence[tuple[torch.Tensor, State]], shape: Sequence[int]) -> At:
    """All that depend on the batch have their records in the same dimension, counted from the last."""
    found: At | None = None
    for tensor, state in tensors:
        if state is None:
            continue
        if isinstance(state, Mixed):
            raise state
        at = At(state.dim + len(shape) - tensor.ndim, state.runs)
        if at.dim < 0 or tensor.shape[state.dim] != shape[at.dim] or (found is not None and found != at):
            raise Mixed("records meet others in another dimension")
        found = at
    if found is None:
        raise Mixed("nothing that depends on the batch was found")
    return found


def _pointwise(call: Call) -> Any:
    like = call.output[0] if isinstance(call.output, tuple | list) else call.output
    first = call.states[0]
    if type(first) is At and call.states.count(None) == len(call.states) - 1 and like.shape == call.args[0].shape:
        return first  # nearly always
    return _broadcast(call.tensors, like.shape)


def _reduction(call: Call) -> Any:
    """Along the dimensions ``dim``, which stay if ``keepdim``."""
    at, dims = call.only("self"), call.dims("dim", "dims")
    if dims is None or at.dim in dims:
        raise Mixed("over the records")
    return at if call.get("keepdim", False) else At(at.dim - sum(d < at.dim for d in dims), at.runs)


def _product(call: Call) -> Any:
    """torch takes another derivative for all of them where any number is zero."""
    if call.args[0].requires_grad:
        raise Mixed("its derivative depends on whether any number of the batch is zero")
    return _reduction(call)


def _along(call: Call) -> Any:
    """Something along dimensions that stay (softmax, cumsum, sort, flip)."""
    at, dims = call.only("self"), call.dims("dim", "dims")
    if dims is None and call.rule.name in _LAST and "dim" in call.rule.places and len(call.args) <= call.rule.places["dim"]:
        dims = {call.args[0].ndim - 1}
    if dims is None or at.dim in dims:
        raise Mixed("over the records")
    return at


_LAST = ("sort", "topk", "glu")  # along the last dimension, if none is named


def _leading(last: int) -> Results:
    """On the last dimensions: those before are kept in place and in size, in all outputs."""

    def results(call: Call) -> Any:
        name = next(iter(call.rule.places))
        at, source = call.only(name), call.args[0]
        if at.dim >= source.ndim - last or any(
            isinstance(part, torch.Tensor) and part.shape[: at.dim + 1] != source.shape[: at.dim + 1] for part in _outputs(call)
        ):
            raise Mixed("over the records")
        return at

    return results


def _outputs(call: Call) -> Sequence[Any]:
    return call.output if isinstance(call.output, tuple | list) else [call.output]


def _matrix_product(call: Call) -> Any:
    """A·B of matrices, or of stacks of them; β·C + α·A·B."""
    added = call.rule.name in ("addmm", "baddbmm")
    a, b = call.args[added : added + 2]
    of_a, of_b = call.states[added : added + 2]
    for _ in call.tensors:  # raises what is mixed
        pass
    product = of_a if of_a is not None else of_b
    if of_a is not None and of_b is not None and (of_a != of_b or of_a.dim >= a.ndim - 2):
        raise Mixed("a product of records with records")
    if (of_b is None and of_a is not None and of_a.dim == a.ndim - 1) or (
        of_a is None and of_b is not None and of_b.dim == b.ndim - 2
    ):
        raise Mixed("a sum over the records")
    if not added or call.states[0] is None:
        return product
    of_c = _broadcast([(call.args[0], call.states[0])], call.output.shape)
    if product is not None and of_c != product:
        raise Mixed("records meet others in another dimension")
    return of_c


def _first(*names: str) -> Results:
    """Records are first in the arguments of these names, no other depends on them, and they are first in all outputs."""

    def results(call: Call) -> Any:
        at = call.only(*names)
        sizes = {call.get(name).shape[0] for name in names if isinstance(call.get(name), torch.Tensor)}
        if at.dim != 0 or len(sizes) != 1:
            raise Mixed("records are not in the first dimension of all")
        rows = sizes.pop()
        return [at if isinstance(part, torch.Tensor) and part.ndim and len(part) == rows else None for part in _outputs(call)]

    return results


def _group_norm(call: Call) -> Any:
    """N is said by the caller: it has to be the rows."""
    if call.get("N") != len(call.get("input")):
        raise Mixed("rows that are not the records'")
    return _first("input")(call)


def _matrix_vector(call: Call) -> Any:
    at = call.only("self")
    if at.dim != 0:
        raise Mixed("a sum over the records")
    return at


def _convolution(call: Call) -> Any:
    at = call.only("input" if "input" in call.rule.places else "self")
    if at.dim != 0:
        raise Mixed("records are not in the first dimension")
    return at


def _embedding(call: Call) -> Any:
    if call.get("scale_grad_by_freq", False):
        raise Mixed("gradients divided by how often a token is in the batch")
    return call.only("indices")


def _gather(call: Call) -> Any:
    """self, index and, of scatter, a source: all of one size in the records' dimension, which is not the one that is indexed."""
    at = _same([state for _, state in call.tensors])
    parts = [arg for arg in call.args if isinstance(arg, torch.Tensor) and arg.ndim]
    if call.dims("dim") == {at.dim} or any(part.ndim <= at.dim or part.shape[at.dim] != parts[0].shape[at.dim] for part in parts):
        raise Mixed("over the records")
    return at


def _same(states: Sequence[State]) -> At:
    found = {state for state in states if state is not None}
    if len(found) != 1:
        raise Mixed("records meet others in another dimension")
    at = found.pop()
    if isinstance(at, Mixed):
        raise at
    return at


def _index_select(call: Call) -> Any:
    self, dim = call.get("self"), dimension(call.get("dim"), call.get("self").ndim)
    if call.state("self") is None:
        return At(dim, call.only("index").runs)
    at = call.only("self")
    if at.dim == dim:
        raise Mixed("the records in another order")
    return at if self.ndim else None


def _index(call: Call) -> Any:
    """``self[i, j, …]``: the records stay where they are, or each takes of its own."""
    for _ in call.tensors:
        pass
    return _indexed(call.records, call.args[0], call.args[1], call.states[0], call.states[1])


def _indexed(records: int, self: torch.Tensor, indices: Sequence[Any], of_self: State, of_indices: Any) -> At:
    masked = [is_mask(part) for part in indices for _ in range(part.ndim if is_mask(part) else 1)]
    indices, of_indices = _without_masks(indices, of_indices)
    places = [k for k, part in enumerate(indices) if part is not None]
    shape = torch.broadcast_shapes(*(indices[k].shape for k in places))  # type: ignore[no-untyped-call]
    together = places == list(range(places[0], places[-1] + 1))
    begin = places[0] if together else 0  # where the dimensions of the indices are in the result
    chosen = None
    if any(of_indices[k] is not None for k in places):
        chosen = _broadcast([(indices[k], of_indices[k]) for k in places], shape)
    if isinstance(of_self, Mixed):
        raise of_self
    if of_self is None:
        if chosen is None:
            raise Mixed("nothing that depends on the batch was found")
        return At(chosen.dim + begin, chosen.runs)
    if of_self.dim not in places:
        if chosen is not None:
            raise Mixed("records meet others in another dimension")
        before = sum(d < of_self.dim for d in range(self.ndim) if d not in places)
        return At(before if together and of_self.dim < begin else before + len(shape), of_self.runs)
    if masked[of_self.dim]:
        raise Mixed(TAKEN_OUT)
    own = indices[of_self.dim]  # of each record, something: those numbers must name the records in their order
    if of_indices[of_self.dim] is not None or of_self.runs != 1 or self.shape[of_self.dim] != records:
        raise Mixed("the records in another order")
    dims = [d for d in range(own.ndim) if own.shape[d] == records and _counts(own, d)]
    if len(dims) != 1:
        raise Mixed("the records in another order")
    at = At(dims[0] + len(shape) - own.ndim, 1)
    if chosen is not None and chosen != at:
        raise Mixed("records meet others in another dimension")
    return At(at.dim + begin, 1)


def _counts(numbers: torch.Tensor, dim: int) -> bool:
    """Whether they are 0, 1, 2, … along ``dim``, the same at all other places."""
    expected = torch.arange(numbers.shape[dim], device=numbers.device, dtype=numbers.dtype)
    return holds(numbers, expected.reshape([-1 if d == dim else 1 for d in range(numbers.ndim)]).expand_as(numbers))


def _names_records(numbers: torch.Tensor, records: int) -> bool:
    """Whether they are 0, 1, 2, …, one for each record, in one dimension."""
    dims = [d for d in range(numbers.ndim) if numbers.shape[d] == records]
    return numbers.numel() == records and any(_counts(numbers, d) for d in dims)


def _without_masks(indices: Sequence[Any], states: Any) -> tuple[list[Any], list[Any]]:
    """The numbers of the places that masks choose, in their stead; one that depends on the batch chooses nobody knows which."""
    if by_masks(indices, states):
        raise Mixed("as many of them as their contents say")
    plain = [part.nonzero().unbind(1) if is_mask(part) else (part,) for part in indices]
    states = states if isinstance(states, list) else [None] * len(indices)
    return [one for parts in plain for one in parts], [state for parts, state in zip(plain, states, strict=True) for _ in parts]


def _index_put(call: Call) -> Any:
    """``self[i, j] = values``: the records keep their dimension, or each writes into its own."""
    for _ in call.tensors:
        pass
    self, indices, values = call.args[:3]
    of_self, of_indices, of_values = call.states[:3]
    if of_self is not None and of_values is None and all(one is None for one in of_indices or ()):
        return of_self  # numbers of nobody's, into places that nobody says
    if by_masks(indices, of_indices):
        masks = [k for k, part in enumerate(indices) if part is not None]
        if of_values is not None or values.numel() != 1 or masks != [0]:
            raise Mixed("as many of them as their contents say")
        mask, of_mask = indices[0], of_indices[0] if isinstance(of_indices, list) else None
        padded = mask.reshape(*mask.shape, *[1] * (self.ndim - mask.ndim))
        return _broadcast([(self, of_self), (padded, of_mask)], self.shape)
    indices, of_indices = _without_masks(indices, of_indices)
    at = of_self
    if at is None:
        owners = [k for k, part in enumerate(indices) if part is not None and _names_records(part, call.records)]
        if len(owners) != 1 or self.shape[owners[0]] != call.records:
            raise Mixed("into places that are not the records' own")
        at = At(owners[0], 1)
    taken = _indexed(call.records, self, indices, at, of_indices)
    if of_values is not None:
        shape = torch.empty(self.shape, device="meta")[tuple(slice(None) if p is None else p.to("meta") for p in indices)].shape
        if _broadcast([(values, of_values)], shape) != taken:
            raise Mixed("records meet others in another dimension")
    return at


def _cat(call: Call) -> Any:
    pairs = [(part, state) for part, state in call.tensors if part.numel() or part.ndim > 1]
    at, dim = _same([state for _, state in pairs]), dimension(call.get("dim", 0), call.output.ndim)
    if dim == at.dim and any(part.shape[dim] % (call.records * at.runs) for part, _ in pairs):
        raise Mixed("records beside others in their own dimension")
    return at


def _stack(call: Call) -> Any:
    at, dim = _same([state for _, state in call.tensors]), dimension(call.get("dim", 0), call.output.ndim)
    return At(at.dim + (dim <= at.dim), at.runs)


def _repeat(call: Call) -> Any:
    """Whole copies beside each other: in their own dimension records come round again and again."""
    at = call.only("self")
    return At(at.dim + call.output.ndim - call.args[0].ndim, at.runs)


def _pad(call: Call) -> Any:
    at, widths = call.only("self"), call.get("pad")
    from_last = call.args[0].ndim - 1 - at.dim
    if any(widths[2 * from_last : 2 * from_last + 2]):
        raise Mixed("beside the records")
    return at


def _layer_norm(call: Call) -> Any:
    at = call.only("input")
    if at.dim >= call.args[0].ndim - len(call.get("normalized_shape")):
        raise Mixed("over the records")
    return at


def _frozen_norm(call: Call) -> Any:
    at = call.only("input")
    training = call.get("training", call.get("train", False))
    if training or at.dim == 1:
        raise Mixed("statistics of the batch")
    return [at, *[None] * (len(call.output) - 1)] if isinstance(call.output, tuple | list) else at


def _attention(call: Call) -> Any:
    """(batch, heads, length, width): records in the first two dimensions, the same in all."""
    parts, bias = call.args[:3], call.get("attn_mask", call.get("attn_bias"))
    of_bias = call.state("attn_mask" if "attn_mask" in call.rule.places else "attn_bias")
    for _ in call.tensors:
        pass
    at = _same(list(call.states[:3]))
    if at.dim > 1 or any(part.ndim != 4 or part.shape[at.dim] != parts[0].shape[at.dim] for part in parts):
        raise Mixed("attention over the records")
    if of_bias is not None and (
        At(of_bias.dim + 4 - bias.ndim, of_bias.runs) != at or bias.shape[of_bias.dim] != parts[0].shape[at.dim]
    ):
        raise Mixed("records meet others in another dimension")
    front = tuple(parts[0].shape[: at.dim + 1])
    return [
        (at if tuple(part.shape[: at.dim + 1]) == front else Mixed("an output of attention that is not known"))
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.numel()
        else None
        for part in call.output
    ]


def _between(call: Call) -> Any:
    """Where numbers lie between bounds that are nobody's, or between those of their own row."""
    bounds = call.get("sorted_sequence", call.get("boundaries"))
    if call.state("sorted_sequence") is None and bounds.ndim == 1:
        return call.only("self")
    return _rows(1, call.get("sorted_sequence"), call.get("self"))(call)


def _rows(last: int, *parts: Any) -> Results:
    """On the last dimensions of these: in those before they have the same sizes, and so has what comes out."""

    def results(call: Call) -> Any:
        at = _same([state for _, state in call.tensors])
        alike = all(isinstance(part, torch.Tensor) and part.shape[: at.dim + 1] == parts[0].shape[: at.dim + 1] for part in parts)
        if not alike or at.dim >= parts[0].ndim - last or call.output.shape[: at.dim + 1] != parts[0].shape[: at.dim + 1]:
            raise Mixed("over the records")
        return at

    return results


def _distances(call: Call) -> Any:
    return _rows(2, call.get("x1"), call.get("x2"))(call)


def _into(call: Call) -> Any:
    """Rows of ``source`` into those of ``self`` that ``index`` names, along another dimension than the records'."""
    at = _same([state for _, state in call.tensors])
    self, source = call.get("self"), call.get("source")
    if call.state("index") is not None or call.dims("dim") == {at.dim} or self.ndim != source.ndim:
        raise Mixed("over the records")
    if source.ndim <= at.dim or source.shape[at.dim] != self.shape[at.dim]:
        raise Mixed("over the records")
    return at


def _loss(call: Call) -> Any:
    if call.get("reduction", 1) != 0:
        raise Mixed("a mean or a sum of the losses (use reduction='none')")
    if not call.rule.name.startswith("nll"):
        return _pointwise(call)
    at = call.only("self", "target")
    if at.dim != 0:
        raise Mixed("records are not in the first dimension")
    return [at, None]


def _bag(call: Call) -> Any:
    """Rows of as many tokens each: the offsets are the multiples of that, and nobody's."""
    if call.get("scale_grad_by_freq", False):
        raise Mixed("gradients divided by how often a token is in the batch")
    at, offsets, tokens = call.only("indices", "per_sample_weights"), call.get("offsets"), call.get("indices")
    bags = call.output[0].shape[0]
    regular = offsets.numel() == bags and tokens.numel() % bags == 0 and bags % call.records == 0
    if not regular or at.dim != 0 or call.get("mode", 0) == 2 or call.get("include_last_offset", False):
        raise Mixed("bags of other lengths")
    each = tokens.numel() // bags
    expected = torch.arange(bags, device=offsets.device, dtype=offsets.dtype) * each
    if not holds(offsets, expected):
        raise Mixed("bags of other lengths")
    if at.runs % each:
        raise Mixed("bags of several records")
    return [At(0, at.runs // each), *[None] * (len(call.output) - 1)]


_TABLE: dict[str, Results] = {}


def _say(results: Results, *names: str) -> None:
    _TABLE.update(dict.fromkeys(" ".join(names).split(), results))


_say(_pointwise, "clone _to_copy copy copy_ fill native_dropout bernoulli masked_fill where nan_to_num clamp elu gelu silu mish",
     "hardswish hardsigmoid leaky_relu _prelu_kernel softplus log_sigmoid_forward threshold hardtanh polar complex",
     "_conj_physical normal normal_ uniform_ exponential_ random_ bernoulli_ cauchy_ geometric_ log_normal_")  # fmt: skip
_say(shaped, "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full")
_say(constant, "new_empty_strided is_same_size sym_size sym_stride sym_numel sym_storage_offset zero_")
_say(_reduction, "sum mean amax amin logsumexp nansum count_nonzero any all argmax argmin median nanmedian max min aminmax",
     "var std var_mean std_mean linalg_vector_norm norm kthvalue mode")  # fmt: skip
_say(_product, "prod")
_say(_along, "_softmax _safe_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort topk glu flip roll",
     "rot90")  # fmt: skip
_say(_into, "index_add index_copy")
_say(_along, "_fft_r2c _fft_c2r _fft_c2c")
_say(_matrix_product, "mm bmm addmm baddbmm")
_say(_matrix_vector, "mv")
_say(_convolution, "convolution _convolution mkldnn_convolution cudnn_convolution")
_say(_embedding, "embedding")
_say(_bag, "_embedding_bag _embedding_bag_forward_only")
_say(_gather, "gather scatter scatter_add scatter_reduce")
_say(_index_select, "index_select")
_say(_index, "index _unsafe_index")
_say(_index_put, "index_put _index_put_impl _unsafe_index_put")
_say(_cat, "cat")
_say(_stack, "stack")
_say(_repeat, "repeat")
_say(_pad, "constant_pad_nd")
_say(_layer_norm, "native_layer_norm _fused_rms_norm rms_norm")
_say(_group_norm, "native_group_norm")
_say(_first("input_gates", "hidden_gates", "cx", "hx"), "_thnn_fused_lstm_cell _thnn_fused_gru_cell")
_say(_first("input", "grid"), "grid_sampler_2d grid_sampler_3d")
_say(_frozen_norm, "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training")
_say(_attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention",
     "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention")  # fmt: skip
_say(_loss, "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy")
_say(_leading(2), "triu tril max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d",
     "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact2d",
     "reflection_pad2d replication_pad2d im2col col2im linalg_inv_ex linalg_cholesky_ex")  # fmt: skip
_say(_leading(1), "multinomial")
_say(_leading(1), "avg_pool1d upsample_linear1d upsample_nearest1d reflection_pad1d replication_pad1d adaptive_avg_pool1d")
_say(_between, "bucketize searchsorted")
_say(_distances, "_cdist_forward")
_say(_leading(3), "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d upsample_trilinear3d upsample_nearest3d pixel_shuffle",
     "pixel_unshuffle native_channel_shuffle channel_shuffle reflection_pad3d replication_pad3d")  # fmt: skip

_VALUES = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose", "_is_all_true", "_is_any_true", "_assert_async"}
_TORCHS = {"aten", "prims", "mkldnn", "mkl", "quantized"}
_SAME_MEMORY = {"_unsafe_view", "as_strided_", "_reshape_alias", "lift_fresh", "detach", "detach_", "alias",
                "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}  # fmt: skip


@functools.cache
def rule_of(func: Any) -> Rule:
    """The rule of an operation."""
    schema, name = func._schema, func._schema.name.partition("::")[2]
    written = [k for k, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    returned = any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    shares = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    results = _TABLE.get(name) or (_TABLE.get(name.removesuffix("_")) if written else None)
    if name in _VALUES:
        results = constant
    if results is None and torch.Tag.pointwise in func.tags:
        results = _pointwise
    if func.namespace != "aten" or results is None:
        results = mixing
    return Rule(
        name.removesuffix("_") if written else name,
        results,
        places={arg.name: k for k, arg in enumerate(schema.arguments)},
        defaults=tuple(arg.default_value if arg.has_default_value() else None for arg in schema.arguments),
        view=func.namespace == "aten" and (shares or name in _SAME_MEMORY),
        writes=returned,
        written=() if returned else tuple(written),
        changed=tuple(written),
        keeps=results is _frozen_norm,
        torchs=func.namespace in _TORCHS,
        reads=name in _VALUES or torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags,
        unwritten=schema.name in _UNWRITTEN and func is not _SET_TENSOR,
        run=_max_pool if func is _MAX_POOL else _emptied(func) if name in _EMPTY else func,
    )


_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_"}
_UNWRITTEN = {
    *("aten::set_", "aten::set", "aten::resize", "aten::resize_as", "aten::_resize_output", "aten::_resize_output_"),
    *("aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized", "aten::empty_quantized"),
}
_SET_TENSOR = torch.ops.aten.set_.source_Tensor  # another tensor's memory, which is known


_GROWN = {"aten::resize_", "aten::resize_as_"}


def _emptied(func: Any) -> Callable[..., Any]:
    """Memory that is not written to may hold what was in it before, numbers of other records: here, zeros."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args and isinstance(args[0], torch.Tensor) and func._schema.name in _GROWN else None
        before = 0 if given is None else given.untyped_storage().nbytes()
        made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.layout == torch.strided and not (made.is_meta or made.is_quantized):
            storage = made.untyped_storage()
            if storage.nbytes() > before:
                torch.empty(0, dtype=torch.uint8, device=made.device).set_(storage)[before:].zero_()
        return made

    return run


_MAX_POOL = torch.ops.aten.max_pool2d_with_indices.default


def _max_pool(x: torch.Tensor, *window: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """On a processor with the channels last: there torch takes as many of them at once as the processor does, else one number.

    The maxima are the same, and so are their places, the first of equal ones: nothing is added up.
    """
    if x.device.type != "cpu" or x.ndim != 4 or x.shape[1] < _CHANNELS or not x.is_contiguous():
        found: tuple[torch.Tensor, torch.Tensor] = _MAX_POOL(x, *window, **more)
        return found
    maxima, places = _MAX_POOL(x.contiguous(memory_format=torch.channels_last), *window, **more)
    return maxima.clone(memory_format=torch.contiguous_format), places.clone(memory_format=torch.contiguous_format)


_CHANNELS = 4  # of fewer, turning them around takes longer than it saves
