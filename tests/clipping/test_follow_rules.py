"""What a rule says of an operation is what the operation does: one record's numbers are changed, and those of the others stay.
So do their gradients, also where a number is zero: torch has derivatives that go another way for all where one is (``prod``).

The operations are torch's own list for testing (``op_db``), in many shapes. Records are declared to be in each dimension of each
argument by itself, and of all arguments of one shape together, in runs of one and of several.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import sys
import types
import unittest

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lipdp.clipping.follow import Following
from lipdp.clipping.operations import At, Mixed

# What is random by itself, or leaves memory as it was, can't be evaluated twice.
_NOT_TWICE = ("empty", "rand", "bernoulli", "normal", "uniform", "exponential", "cauchy", "geometric", "log_normal", "multinomial",
              "dropout", "resize", "new_empty", "rrelu", "fractional", "svd", "pca", "eig", "qr", "jiterator", "sparse",
              "cudnn", "lobpcg", "lstsq", "geqrf", "ormqr", "householder", "nested", "masked.", "kernel", "ldl")  # fmt: skip
_SAMPLES = 2


@functools.cache
def operations():
    """Torch's list, read where it is needed: it takes seconds, and a process that does not run these tests has no need of it."""
    if importlib.util.find_spec("expecttest") is None:  # torch's list wants a class of it, and makes no use of it here
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    flag = "__allow_nonbracketed_mutation_flag"  # importing torch's list forbids all later tests to set flags of backends
    flags = torch.backends.disable_global_flags.__globals__
    allowed = flags[flag]
    from torch.testing._internal.common_methods_invocations import op_db

    flags[flag] = allowed
    return [op for op in op_db if not any(part in op.name for part in _NOT_TWICE) and torch.float32 in op.supported_dtypes("cpu")]


def placements(tensors):
    """Which tensors depend on the batch, and where: (records, {number: At})."""
    for number, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            for records in (size, size // 2):
                if records < 2 or size % records:
                    continue
                at = At(dim, size // records)
                yield records, {number: at}
                alike = {k: at for k, other in enumerate(tensors) if other.shape == tensor.shape}
                if len(alike) > 1 and number == min(alike):
                    yield records, alike
                from_last = {
                    k: At(dim + other.ndim - tensor.ndim, at.runs)
                    for k, other in enumerate(tensors)
                    if 0 <= dim + other.ndim - tensor.ndim < other.ndim and other.shape[dim + other.ndim - tensor.ndim] == size
                }
                if number == 0 and len(from_last) > len(alike):
                    yield records, from_last


def owners(shape, at, records):
    """Whose each number of a tensor is."""
    along = torch.arange(shape[at.dim]) // at.runs % records
    return along.reshape(-1, *[1] * (len(shape) - at.dim - 1)).expand(shape)


def changed(tensor, at, records):
    """Other numbers for record 0, in the range of those that are there; whole numbers and truth values in another order."""
    mine = owners(tensor.shape, at, records) == 0
    others = (
        tensor.flip(at.dim)
        if tensor.dtype == torch.bool or not (tensor.is_floating_point() or tensor.is_complex())
        else tensor * 0.5
    )
    return torch.where(mine, others, tensor)


def run(op, args, kwargs):
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def check(name, op, sample):
    """How many claims were made, of which all hold."""
    leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    numbers = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    tensors = [leaves[k].detach().clone() for k in numbers]
    claims = 0
    for records, where in placements(tensors):
        copies = [tensor.clone() for tensor in tensors]
        following = Following(records, answering=False, strict=False)
        for number, at in where.items():
            following.declare(copies[number], at)
        filled = list(leaves)
        for k, copy in zip(numbers, copies, strict=True):
            filled[k] = copy
        args, kwargs = tree_unflatten(filled, structure)
        try:
            with following.following():
                outputs = run(op, args, kwargs)
        except RuntimeError:
            continue  # a sample that is a part of a larger memory
        states = [following.state(output) for output in outputs]
        if following.reads or not any(isinstance(state, At) or state is None for state in states):
            continue
        before = [output.clone() for output in outputs]
        for k, number in zip(numbers, range(len(tensors)), strict=True):
            filled[k] = tensors[number].clone()
            if number in where:
                filled[k] = changed(tensors[number], where[number], records)
        args, kwargs = tree_unflatten(filled, structure)
        try:
            again = run(op, args, kwargs)
        except (RuntimeError, IndexError, ValueError):
            continue  # such numbers it does not take
        for state, one, other in zip(states, before, again, strict=True):
            if state is None or isinstance(state, At):
                assert one.shape == other.shape, (name, where, records)
                theirs = torch.ones(one.shape, dtype=torch.bool) if state is None else owners(one.shape, state, records) != 0
                torch.testing.assert_close(
                    one[theirs], other[theirs], rtol=1e-5, atol=1e-6, equal_nan=True, msg=f"{name} {where} {records}: {state}"
                )
                claims += 1
    return claims


@pytest.mark.parametrize("part", range(8))
def test_rules_hold(part):
    torch.manual_seed(0)
    claims = 0
    for op in operations()[part::8]:
        samples = []
        for sample in op.sample_inputs_func(op, "cpu", torch.float32, False):  # untracked: no stack is written down for each
            first = sample.input if isinstance(sample.input, torch.Tensor) else None
            if first is None or first.numel() <= 4000:
                samples.append(sample)
            if len(samples) >= _SAMPLES:
                break
        for sample in samples:
            claims += check(op.name, op.op, sample)
    assert claims > 100


def derivatives(op, args, kwargs, tensors, where):
    """Towards the tensors that depend on the batch, of a random combination of what the operation gives."""
    with torch.enable_grad():
        outputs = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(output.shape, generator=draw) for output in outputs]
        towards = [tensors[k] for k in where if tensors[k].requires_grad]
        return torch.autograd.grad(outputs, towards, weights, allow_unused=True) if outputs and towards else ()


def check_derivatives(name, op, sample):
    """How many gradients of others stay to the bit, where records are said to be kept apart and one has other numbers."""
    leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    numbers = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    tensors = [leaves[k].detach().clone() for k in numbers]

    def filled(values):
        full, own = list(leaves), [value.clone().requires_grad_(value.is_floating_point()) for value in values]
        for k, value in zip(numbers, own, strict=True):
            full[k] = value
        return own, *tree_unflatten(full, structure)

    claims = 0
    for records, where in placements(tensors):
        own, args, kwargs = filled(tensors)
        following = Following(records, answering=False, strict=False)
        for number, at in where.items():
            following.declare(own[number], at)
        try:
            with torch.enable_grad(), following.following():
                outputs = [
                    leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
                ]
            if following.reads or not outputs or any(isinstance(following.state(output), Mixed) for output in outputs):
                continue
            own, args, kwargs = filled(tensors)
            before = derivatives(op, args, kwargs, own, where)
            for factor in (0.0, 1e3):
                values = [
                    torch.where(owners(t.shape, where[k], records) == 0, t * factor, t)
                    if k in where and t.is_floating_point()
                    else t
                    for k, t in enumerate(tensors)
                ]
                own, args, kwargs = filled(values)
                now = derivatives(op, args, kwargs, own, where)
                for k, one, other in zip([k for k in where if own[k].requires_grad], before, now, strict=True):
                    if one is not None and other is not None:
                        theirs = owners(one.shape, where[k], records) != 0
                        assert torch.equal(one[theirs].nan_to_num(), other[theirs].nan_to_num()), (name, where, records, factor)
                        claims += 1
        except (RuntimeError, IndexError, ValueError):
            continue  # such numbers it does not take, or can't be differentiated
    return claims


@pytest.mark.parametrize("part", range(4))
def test_derivatives_hold(part):
    torch.manual_seed(0)
    claims = 0
    for op in operations()[part::4]:
        samples = (s for s in op.sample_inputs_func(op, "cpu", torch.float32, False) if isinstance(s.input, torch.Tensor))
        for sample in itertools.islice((s for s in samples if s.input.numel() <= 700), 2 * _SAMPLES):
            claims += check_derivatives(op.name, op.op, sample)
    assert claims > 100


@pytest.mark.parametrize("shape", [(6, 8, 7, 9), (6, 4, 1, 5), (6, 3, 8, 8)])
@pytest.mark.parametrize("window", [(2,), (3, 1, 1), ((1, 2), 1, 0, 2), (3, 2, 1, 1, True)], ids=str)
def test_maxima_that_are_found_more_quickly_are_the_same(shape, window):
    """To the bit, with the same places among equal ones and beside NaN, in the same layout; and so are their gradients."""
    torch.manual_seed(0)
    plain = torch.randint(0, 3, shape).float()  # most maxima are there several times
    plain[1, :, 0, 1], plain[2, 1], plain[3, 2, 0] = float("nan"), float("inf"), -0.0
    found = []
    for followed in (False, True):
        x = plain.clone().requires_grad_()
        following = Following(len(x))
        following.declare(x, At(0, 1))
        with following.following() if followed else contextlib.nullcontext():
            try:
                maxima, places = torch.nn.functional.max_pool2d_with_indices(x * 1.0, *window)
            except RuntimeError:  # too small for the window
                found.append(None)
                continue
        gradient = torch.autograd.grad(maxima.nansum(), x)[0]
        found.append((maxima.detach().nan_to_num(7), places, gradient))
        assert not followed or (following.state(maxima) == At(0, 1) and not following.reads)
    assert (found[0] is None) == (found[1] is None)
    for one, other in zip(found[0] or (), found[1] or (), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
