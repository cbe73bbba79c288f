"""A learning rate from the plan alone: how far the noise of the whole run carries the weights.

In units of the sensitivity, a step is ``η·(noised sum)/(b·Δ)``: the same η means the same for every clip and loss. What it should
be still depends on the noise. With rates ``η·w_k`` of SGD with momentum m, the noise of step t moves the weights by c_t = Σ_{k≥t}
w_k·m^(k−t) times η, so a run's noise adds up, in each entry of a weight W_d, to ``η·(s_d/b)·√(Σ_t c_t²)``. Where that is far more
than the weights are, nothing is left of what was learned; where it is far less, the run could have gone further at the same
privacy. At the rates that searches have found for 35 recipes of whole networks (MLPs, convolutions, mixers; proved bounds,
boundaries, clipping; ε = 3), the noise was 2.0 times as long as the weights (a root mean square over the weights, a geometric mean
over the recipes; one standard deviation is a factor of 2.1). The rate that makes it 2 is what is suggested.

Which optimisers a private run can have is decided here too.
"""

from __future__ import annotations

import math
import warnings

import torch

from lipdp._checks import instance, is_number, positive
from lipdp._numerics import whole_tensor
from lipdp.errors import ConfigurationError, LipdpWarning
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import check_model


def check_parts(model: object, plan: object, optimizer: object = None) -> None:
    """Refuse a class in the place of its object, a path, a name, arguments in another order: by name, before anything is done."""
    check_model(model)
    instance("plan", plan, PrivacyPlan, "what lipdp.plan(…) gives, or PrivacyPlan.from_json(text) of a stored one")
    if optimizer is not None:
        instance(
            "optimizer",
            optimizer,
            torch.optim.Optimizer,
            "one of torch.optim over model.parameters(); or optimizer, scheduler = lipdp.suggest_optimizer(model, plan)",
        )


def check_scheduler(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler that moves another optimiser's rates, or asks for a metric after each step."""
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        instance("scheduler", scheduler, torch.optim.lr_scheduler.LRScheduler, "one of torch.optim.lr_scheduler, for the optimiser")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigurationError(
            "scheduler is ReduceLROnPlateau, which follows a figure of the records after each step: of training records nobody has "
            "paid for one. Take a schedule of the steps alone, CosineAnnealingLR(optimizer, plan.steps) for example"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError(
            f"scheduler is a {type(scheduler).__name__} of another optimiser: it would leave the rates of this one as they are. "
            "Make it of the optimiser that is passed"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Refuse an optimiser that asks several times a step, or trains something else; warn of parameters that it leaves out."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates the loss several times a step, and each time is a query; use another optimiser")
    ours = {id(p) for p in model.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in ours for p in theirs):
        raise ConfigurationError(
            "the optimiser holds parameters that are not the model's. Make it from model.parameters(), once the model is final."
        )
    held = {id(p) for p in theirs}
    idle = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if idle:
        warnings.warn(
            f"the optimiser does not train {', '.join(idle[:3])}{'…' if len(idle) > 3 else ''}: noise is spent on them for "
            "nothing. Freeze them (requires_grad_(False)) before planning.",
            LipdpWarning,
            stacklevel=4,
        )


def suggest_optimizer(
    model: torch.nn.Module, plan: PrivacyPlan, *, momentum: float = 0.9, noise_to_weights: float = 2.0
) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.CosineAnnealingLR]:
    """SGD with momentum for a planned run, and its schedule: a rate that goes to 0 along half a cosine.

    It depends on public numbers only: the plan's noise, batch size and steps, and the lengths of the weights that training starts
    from, which must not have seen the private data. It is meant for whole networks that start from random weights; for weights
    that were trained before (on public data), ask for less noise.

    Args:
        model: as it was planned, with its initial weights, on the device where it will be trained.
        plan: from :func:`lipdp.plan`.
        momentum: of SGD.
        noise_to_weights: how long the noise of the whole run may be, relative to the weights (a root mean square over them).

    Returns:
        The optimiser and the scheduler, for ``lipdp.fit(model, loss, optimizer, plan, train, scheduler=scheduler)``.

    Example:
        >>> import lipdp
        >>> from lipdp import nn, losses
        >>> model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False))
        >>> plan = lipdp.plan(model, losses.CrossEntropy(), dataset_size=1000, batch_size=100, delta=1e-5,
        ...                   noise_multiplier=2.0, steps=50)
        >>> optimizer, scheduler = lipdp.suggest_optimizer(model, plan)
        >>> 0.5 < optimizer.param_groups[0]["lr"] * plan.sensitivity < 5
        True
    """
    check_parts(model, plan)
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise ConfigurationError(f"momentum must lie in [0, 1), not {momentum!r}")
    share = positive("noise_to_weights", noise_to_weights)
    rate = share / _noise_of_unit_rate(model, plan, momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=float(momentum))
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)


def _noise_of_unit_rate(model: torch.nn.Module, plan: PrivacyPlan, momentum: float) -> float:
    """√(mean_d (‖noise_d‖/‖W_d‖)²) over the weights, at the end of a run whose rate goes from 1 to 0 along half a cosine."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    stds = plan.noise_stds
    if set(trained) != set(stds):
        different = ", ".join(sorted(set(trained) ^ set(stds))[:5])
        raise ConfigurationError(
            f"the plan was made for another model: the trainable parameters differ in {different}. Make a plan for this one."
        )
    lengths = {name: float(torch.linalg.vector_norm(whole_tensor(p).double())) for name, p in trained.items()}
    known = [name for name, length in lengths.items() if 0 < length < math.inf and stds[name] > 0]
    weights = [name for name in known if trained[name].ndim > 1] or known  # biases start at 0, or at random
    if not weights:
        raise ConfigurationError(
            "all weights of this model start at 0 (a linear head on fixed features, say), or get no noise: there is no length to "
            "compare the noise with. Choose a rate yourself, in units of the sensitivity: "
            "torch.optim.SGD(model.parameters(), lr=10 / plan.sensitivity, momentum=0.9)."
        )
    ratios = [stds[name] * math.sqrt(trained[name].numel()) / lengths[name] for name in weights]
    return math.sqrt(math.fsum(ratio**2 for ratio in ratios) / len(ratios)) / plan.batch_size * _length_of_run(plan, momentum)


def _length_of_run(plan: PrivacyPlan, momentum: float) -> float:
    """√(Σ_t (c_t·f_t)²): c_t = w_t + m·c_{t+1} with the cosine's shares w_t, f_t the factors of the plan's phases on the noise."""
    ends = [phase.start for phase in plan.phases[1:]] + [plan.steps]
    factors = [phase.noise * phase.clip for phase, end in zip(plan.phases, ends, strict=True) for _ in range(phase.start, end)]
    squares, reach = [], 0.0
    for step in reversed(range(plan.steps)):
        reach = 0.5 * (1 + math.cos(math.pi * step / plan.steps)) + momentum * reach
        squares.append((reach * factors[step]) ** 2)
    return math.sqrt(math.fsum(squares))
