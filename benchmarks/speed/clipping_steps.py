"""One training step by each method: non-private, ours, and Opacus' two modes, as functions without arguments."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

import lipdp.clipping
from lipdp.clipping import kernels
from lipdp.graphs import GraphedFunction, Watched

Step = Callable[[], None]
LOOPS = ("naive", "multiloss")
OURS = ("bookkeeping", "ghost", "reweight", "multiloss", "naive")


def ordinary(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def ordinary_graph(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    """The non-private step with its forward and backward pass as a CUDA graph, too: what launches alone cost."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    loss = torch.nn.CrossEntropyLoss()
    gradients = GraphedFunction(lambda x, y: torch.autograd.grad(loss(model(x), y), trained), state=Watched(model, loss))

    def step() -> None:
        for parameter, gradient in zip(trained, gradients(x, y), strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step


def _never(*tensors: torch.Tensor) -> bool:  # a Mock would keep what it is called with, and the GPU's memory with it
    return False


def without_kernels(make: Callable[..., Step]) -> Callable[..., Step]:
    """The same with torch's own operations in the place of our Triton kernels."""

    def made(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        step = make(model, x, y)

        def plain() -> None:
            with mock.patch.object(kernels, "available", _never):
                step()

        return plain

    return made


def ours(method: str, *, replayed: bool = True, **settings: str) -> Callable[..., Step]:
    def make(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.01)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        clip = lipdp.clipping.Clipper(model, loss, method, **settings)
        if method in LOOPS:  # what is checked once must not count in a step that is measured once: nobody takes part in this one
            clip(x, y, 1.0, mask=torch.zeros(len(x), dtype=torch.bool, device=x.device))

        def step() -> None:
            # A clipper that is new every time never records.
            pending = (clip if replayed else replace(clip)).start(x, y, 1.0)
            noise = [torch.randn_like(parameter) for parameter in trained.values()]
            sums = list(pending.finish().sums.values())
            torch._foreach_add_(sums, noise)
            torch._foreach_div_(sums, len(x))
            for parameter, gradient in zip(trained.values(), sums, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()

        return step

    return make


def _fixed(model: torch.nn.Module) -> torch.nn.Module:
    """Opacus trains its own twins of recurrent and attention layers; frozen normalisation may stay."""
    from opacus.layers import DPRNN
    from opacus.validators import ModuleValidator

    if any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):
        return model
    device = next(model.parameters()).device
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.RNN:  # which the validator passes over
                setattr(module, name, DPRNN(child.input_size, child.hidden_size, batch_first=child.batch_first))
    return ModuleValidator.fix(model).to(device)


def opacus_hooks(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(_fixed(model), strict=False)
    inner = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.01)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x))
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    return step


def opacus_ghost(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(_fixed(model), max_grad_norm=1.0, use_ghost_clipping=True, strict=False)
    inner = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.01)
    optimizer = DPOptimizerFastGradientClipping(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x))
    loss = DPLossFastGradientClipping(wrapped, optimizer, torch.nn.CrossEntropyLoss(), loss_reduction="mean")

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    return step


METHODS: dict[str, Callable[..., Step]] = {
    "non-private": ordinary,
    "opacus hooks": opacus_hooks,
    "opacus ghost": opacus_ghost,
    "non-private graph": ordinary_graph,
    "bookkeeping eager": ours("bookkeeping", replayed=False),
    "bookkeeping no kernels": without_kernels(ours("bookkeeping")),
}
METHODS |= {name: ours(name) for name in OURS}
QUICK = ["non-private", "opacus hooks", "opacus ghost", "bookkeeping", "ghost", "reweight"]
