"""One training step of each kind, as functions without arguments."""

from collections.abc import Callable

import torch
from clipping_steps import METHODS as CLIPPING
from pairs import Pair
from torch import Tensor

import lipdp
from lipdp import losses
from lipdp.bounds import program_of
from lipdp.graphs import GraphedFunction, Watched
from lipdp.training.watch import Projection

Step = Callable[[], object]
Make = Callable[[Pair, Tensor, Tensor], Step]


def eager(pair: Pair, x: Tensor, y: Tensor) -> Step:
    """The ordinary network without privacy, as most people run it."""
    return CLIPPING["non-private"](pair.ordinary().to(x.device), x, y)


def compiled(pair: Pair, x: Tensor, y: Tensor) -> Step:
    """The ordinary network, compiled; with CUDA graphs and channels last on a GPU."""
    model = pair.ordinary().to(x.device)
    if x.device.type == "cuda" and x.ndim == 4:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.CrossEntropyLoss()
    run = torch.compile(lambda x, y: loss(model(x), y), mode="reduce-overhead" if x.device.type == "cuda" else "default")

    def step() -> None:
        optimizer.zero_grad()
        run(x, y).backward()
        optimizer.step()

    return step


def twin(pair: Pair, x: Tensor, y: Tensor) -> Step:
    """The Lipschitz network without privacy: the same fused program and projection, no noise, no checks."""
    model = pair.lipschitz().to(x.device)
    program, loss, trained = program_of(model, pair.shape), losses.CrossEntropy(tau=10.0), list(model.parameters())
    optimizer, project = torch.optim.SGD(trained, lr=0.01), Projection(model)

    def gradients(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(program.fused(x), y).mean(), trained, allow_unused=True)

    run = GraphedFunction(gradients, state=Watched(model, loss))

    def step() -> None:
        for parameter, gradient in zip(trained, run(x, y), strict=True):
            parameter.grad = gradient
        optimizer.step()
        project()

    return step


def clipless(pair: Pair, x: Tensor, y: Tensor) -> Step:
    """The engine's whole step: gradient sum, checks, cryptographic noise, optimiser, certified projection."""
    model, loss = pair.lipschitz().to(x.device), losses.CrossEntropy(tau=10.0)
    precision = "tf32" if x.device.type == "cuda" else None  # what torch uses in convolutions unless told otherwise
    sizes = {"dataset_size": 100 * len(x), "batch_size": len(x), "steps": 100_000}
    # The accounting is not part of a step; any long plan will do.
    plan = lipdp.plan(model, loss, delta=1e-6, noise_multiplier=4.0, accountant="rdp", precision=precision, **sizes)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), plan)
    return lambda: engine.step(x, y, sample="own")


def _clipping(method: str) -> Make:
    return lambda pair, x, y: CLIPPING[method](pair.ordinary().to(x.device), x, y)


METHODS: dict[str, Make] = {
    "ordinary eager": eager,
    "ordinary compiled": compiled,
    "twin, not private": twin,
    "clipless": clipless,
    "bookkeeping": _clipping("bookkeeping"),
    "opacus hooks": _clipping("opacus hooks"),
    "opacus ghost": _clipping("opacus ghost"),
}
