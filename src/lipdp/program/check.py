"""Whether a program computes what its module computes, tried on random inputs and weights before anything rests on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lipdp._numerics import keep_freed_memory, same_entries, seed_torch
from lipdp.errors import LipdpError, UnsupportedError
from lipdp.program.program import TABLES, Program
from lipdp.program.reading import undisturbed
from lipdp.program.remember import Remembering

_SIZES = (1, 2, 3, 5, 8)
_COMPANY = 3
# The same operations in the same order: what differs is at most the order of additions inside a kernel (on CUDA, atomic ones).
_EQUAL = 1024
# Batches on which a fused program may differ before it is refused.
_TRIES = 3
# One example in a batch of another size: kernels choose another blocking.
_ALONE = 4096
# Passes in which a layer that draws may happen to draw the same.
_SEEDS = 32
# Products of a record in convolutions from which on it pays not to compute them again.
_HEAVY = 4_000_000


def check_program(program: Program, sizes: tuple[int, ...] = _SIZES, *, gradients: bool = True) -> None:
    """Refuse a program whose outputs or gradients differ from its module's, or whose examples do not stand alone.

    Batches of ``sizes`` random examples go through both, with weights moved at random (so that a number read off a weight shows);
    then each example of a batch alone. Outputs are compared to rounding, gradients of a random combination of the outputs likewise.

    Args:
        program: made from the module as it is now.
        sizes: numbers of examples to try.
        gradients: compare gradients too, move the weights, and try single examples.
    """
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    with undisturbed(program.model), _full_arithmetic(), _moved(program, generator if gradients else None):
        records = _inputs(program, max(*sizes, _COMPANY), generator)
        few = min(sizes, key=lambda size: abs(size - _COMPANY))
        saves_time = records.device.type == "cpu" and _is_heavy(program)  # elsewhere it only takes memory
        with Remembering(sizes) if saves_time else nullcontext():
            for size in sorted(sizes, reverse=True):  # what was computed for many is not computed again for some of them
                expected = _compare(program, records[:size], gradients)
                if program.fused is not program.whole and size == few:  # it has the graph of the whole, and other kernels
                    _compare_fused(program, records[:size], expected, generator, gradients)
            if gradients:
                _compare_alone(program, records[:_COMPANY])


def _is_heavy(program: Program) -> bool:
    """Whether convolutions are most of the work: products for one record."""
    work = 0
    for node, shapes in program.shapes.items():
        layer = program.modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(layer, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
            work += layer.weight.numel() * math.prod(shapes[0][1:])
    return work > _HEAVY


@contextmanager
def _full_arithmetic() -> Iterator[None]:
    """On CUDA without TF32, and by algorithms that repeat themselves: rounding is all that two passes may differ by."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _inputs(program: Program, size: int, generator: torch.Generator) -> torch.Tensor:
    like = next((t for t in (*program.model.parameters(), *program.model.buffers())), torch.zeros(()))
    if program.input_dtype.is_floating_point:
        x = torch.randn(size, *program.input_shape, generator=generator, dtype=torch.float64).to(program.input_dtype)
    else:
        tables = [module.num_embeddings for module in program.modules.values() if isinstance(module, TABLES)]
        limit = min(tables, default=2)
        x = torch.randint(max(1, limit), (size, *program.input_shape), generator=generator).to(program.input_dtype)
    return x.to(like.device)


@contextmanager
def _moved(program: Program, generator: torch.Generator | None) -> Iterator[None]:
    """Trainable weights, moved a little within the block."""
    if generator is None:
        yield
        return
    trained = [p for p in program.model.parameters() if id(p) in program.names]
    kept = [p.detach().clone() for p in trained]
    with torch.no_grad():
        for p in trained:
            scale = p.detach().abs().mean() * 0.2 + 2e-2 if p.numel() else 0.0
            p.add_((torch.rand(p.shape, generator=generator) - 0.5).to(p), alpha=float(scale))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(trained, kept, strict=True):
                p.copy_(before)


_Evaluated = tuple[Any, Mapping[str, torch.Tensor]]
"""Outputs, and the gradients of a random combination of them."""


def _compare(program: Program, x: torch.Tensor, gradients: bool) -> _Evaluated:
    """What the module gives, and so does the program."""
    expected = _evaluate(program.model, program, x, gradients)
    _refuse_differences(type(program.model).__name__, x, *expected, *_evaluate(program, program, x, gradients))
    return expected


def _compare_fused(program: Program, x: torch.Tensor, expected: _Evaluated, generator: torch.Generator, gradients: bool) -> None:
    """Our own kernels in the place of the program's operations: refused where they differ on every one of a few batches.

    Other kernels round otherwise, and two numbers that are equal but for rounding may be sorted the other way round, which sends a
    cotangent elsewhere. Among the 10⁵ pairs of an image that happens now and then; a fault is there every time.
    """
    name = f"{type(program.model).__name__}, fused,"
    for left in reversed(range(_TRIES)):
        try:
            _refuse_differences(name, x, *expected, *_evaluate(program.fused, program, x, gradients))
            return
        except UnsupportedError:
            if not left:
                raise
            x = _inputs(program, len(x), generator)
            expected = _evaluate(program.whole, program, x, gradients)


def _refuse_differences(
    name: str,
    x: torch.Tensor,
    expected: Any,
    wanted: Mapping[str, torch.Tensor],
    got: Any,
    given: Mapping[str, torch.Tensor],
) -> None:
    why = (
        "What the graph shows is not what forward does: look for writes in place through another name or a view, for choices "
        "made by the type, the batch size or a counter, for numbers read off a parameter (.item(), .tolist(), .data), for "
        "torch.no_grad"
        " or autocast"
    )
    if isinstance(expected, torch.Tensor) and not (isinstance(got, torch.Tensor) and expected.shape == got.shape):
        raise UnsupportedError(f"{name} gives outputs of other shapes than its graph for {len(x)} examples. {why}.")
    if isinstance(expected, torch.Tensor) and not _close(got, expected, _EQUAL):
        raise UnsupportedError(
            f"{name} gives other outputs than its graph for {len(x)} random examples (they differ by "
            f"{float((got - expected).abs().nan_to_num().max()):.2g}). {why}."
        )
    for key in wanted:
        if not _close(given[key], wanted[key], _EQUAL):
            raise UnsupportedError(
                f"the gradient of '{key}' in {name} is another one than in its graph, for {len(x)} random examples (by "
                f"{float((given[key] - wanted[key]).abs().nan_to_num().max()):.2g}). {why}; for detach."
            )


def _evaluate(function: Callable[[torch.Tensor], Any], program: Program, x: torch.Tensor, gradients: bool) -> _Evaluated:
    trained = {program.names[id(p)]: p for p in program.model.parameters() if id(p) in program.names}
    seed_torch(0)  # inside undisturbed: dropout draws the same in both
    with torch.set_grad_enabled(gradients), torch.autocast(x.device.type, enabled=False):
        try:
            output = function(x.clone())
            if not gradients or not trained or not isinstance(output, torch.Tensor) or not output.requires_grad:
                zero = {name: torch.zeros_like(p) for name, p in trained.items()} if gradients else {}
                return output.detach() if isinstance(output, torch.Tensor) else output, zero
            generator = torch.Generator().manual_seed(1)
            weights = torch.stack([torch.randn(row.shape, generator=generator, dtype=torch.float64) for row in output]).to(output)
            slopes = torch.autograd.grad(output, list(trained.values()), weights, allow_unused=True)
        except LipdpError:
            raise
        except Exception as error:
            raise UnsupportedError(f"{type(program.model).__name__} fails on {len(x)} random examples: {error}") from error
    return output.detach(), {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), slopes, strict=True)
    }


def _compare_alone(program: Program, x: torch.Tensor) -> None:
    seed_torch(0)
    before = _random_state(x.device)
    first = _output(program, x, 0)
    drawn = not torch.equal(_random_state(x.device), before)
    if drawn and any(not _close(_output(program, x, seed), first, _EQUAL) for seed in range(1, _SEEDS)):
        return  # random layers: no two passes agree
    for row in range(len(x)):
        alone = _output(program, x[row : row + 1], 0)
        if not _close(alone[0], first[row], _ALONE, scale=first):
            raise UnsupportedError(
                f"{type(program.model).__name__} gives an example another output in company than alone (they differ by "
                f"{float((alone[0] - first[row]).abs().nan_to_num().max()):.2g}): examples are mixed, so one example's influence "
                "can't be bounded. A layer's own rule may be wrong."
            )


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _output(program: Program, x: torch.Tensor, seed: int) -> torch.Tensor:
    seed_torch(seed)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        output: torch.Tensor = program.fused(x.clone())
    return output


def _close(a: torch.Tensor, b: torch.Tensor, units: float, scale: torch.Tensor | None = None) -> bool:
    """Equal to rounding, relative to the largest entry; what is not finite must be so in both."""
    if same_entries(a, b):  # as a rule
        return True
    if not a.is_floating_point():
        return False
    difference, reference = (a - b).abs().max(), (b if scale is None else scale).abs().max()
    if bool(torch.isfinite(difference) & torch.isfinite(reference)):
        return float(difference) <= units * torch.finfo(a.dtype).eps * float(reference) + torch.finfo(a.dtype).tiny
    finite = torch.isfinite(b)
    if not bool((torch.isfinite(a) == finite).all()):
        return False
    reference = (b if scale is None else scale).nan_to_num(0.0, 0.0, 0.0).double().abs().max()
    tolerance = units * torch.finfo(a.dtype).eps * float(reference)
    return bool(((a - b)[finite].double().abs() <= tolerance + torch.finfo(a.dtype).tiny).all())
