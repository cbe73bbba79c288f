"""Attacking Δ: look for weights in their sets, an input and a target whose gradient is longer than the calculus says is possible.

The attack runs in float64 on a copy of the model, through the proved program. It goes up the gradient of the ratios ‖g‖/Δ, of all
parameters together and of one at a time, from structured starts (rank one, constant, impulses, random: where exact rules are
reached). The cotangent at the output is either any vector of norm L (an arbitrary loss of constant L), or that of a real target.
All that is met on the way is compared. It is a lower bound on the true maximum, so that ratios also tell how tight each Δ is.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipdp import nn
from lipdp._checks import named_one, positive, whole
from lipdp._numerics import Undrawn
from lipdp._texts import text_table
from lipdp.audit.canaries import target_choices
from lipdp.audit.results import Report
from lipdp.bounds import Analysis, analyse
from lipdp.errors import AuditError, ConfigurationError
from lipdp.losses import as_loss
from lipdp.parametrize import effective_leaves, project_
from lipdp.planning.plan import PrivacyPlan

STARTS = ("given", "constant", "positive", "aligned", "impulse", "random", "large")
_TOLERANCE = 1e-9  # in float64; more is no rounding
_JUMP = 4.0


@dataclass(frozen=True)
class ParameterAttack:
    """One bound under attack.

    Attributes:
        name: of the parameter; "whole gradient" for all of them together.
        bound: Δ.
        reached: the largest gradient norm that was met.
        how: where: the start, and whether with a real target or an arbitrary cotangent.
    """

    name: str
    bound: float
    reached: float
    how: str

    @property
    def tightness(self) -> float:
        """reached ÷ Δ; above 1 the bound is false."""
        return self.reached / self.bound if self.bound > 0 else (0.0 if self.reached == 0 else math.inf)

    @property
    def violated(self) -> bool:
        """Whether the bound is beaten by more than rounding."""
        return self.reached > self.bound * (1 + _TOLERANCE) + 1e-13


@dataclass(frozen=True)
class SensitivityReport(Report):
    """What an attack on all sensitivities of a model has reached.

    Attributes:
        rows: a row for each parameter.
        whole: the gradient of all parameters together against √(ΣΔ²).
        evaluations: points that were looked at.
        seconds: that it took.
    """

    rows: tuple[ParameterAttack, ...]
    whole: ParameterAttack
    evaluations: int
    seconds: float

    @property
    def violations(self) -> tuple[ParameterAttack, ...]:
        """Bounds that were beaten. There should be none: the guarantee rests on them."""
        return tuple(row for row in (*self.rows, self.whole) if row.violated)

    @property
    def refuted(self) -> bool:
        """Whether some bound was beaten."""
        return bool(self.violations)

    def __getitem__(self, name: str) -> ParameterAttack:
        return named_one("parameter", name, (*self.rows, self.whole))

    def __str__(self) -> str:
        rows = [
            (r.name, f"{r.bound:.5g}", f"{r.reached:.5g}", f"{r.tightness:.2%}", "BEATEN" if r.violated else r.how)
            for r in (*self.rows, self.whole)
        ]
        body = text_table(("parameter", "Δ", "reached", "reached/Δ", "from"), rows, right=("Δ", "reached", "reached/Δ"))
        verdict = (
            f"REFUTED: gradients longer than Δ of {', '.join(r.name for r in self.violations)}; the guarantee does not hold. "
            "Please report this."
            if self.refuted
            else "no bound was beaten"
        )
        return f"attack on sensitivities, {self.evaluations:,} points, {self.seconds:.1f} s\n{body}\n{verdict}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        rows = [{**dataclasses.asdict(r), "tightness": r.tightness, "violated": r.violated} for r in (*self.rows, self.whole)]
        return {"rows": rows, "refuted": self.refuted, "evaluations": self.evaluations, "seconds": self.seconds}


def sensitivities(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan | None = None,
    *,
    steps: int = 30,
    restarts: int = 1,
    seconds: float = 60.0,
    targets: Tensor | None = None,
    input_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    check: bool = True,
) -> SensitivityReport:
    """Attack Δ of every parameter of a model, one by one and all together.

    Args:
        model: it is copied, not touched. All of its trained weights must have a finite Δ.
        loss: a loss of :mod:`lipdp.losses` (or of torch, translated), or a Lipschitz constant.
        plan: attack the sensitivities that it promises, instead of those that are proved now.
        steps: of ascent from each start.
        restarts: how often all starts are gone through.
        seconds: no start is begun after so long; each parameter has had one by then, or not, and its row says from where.
        targets: real targets to try beside arbitrary cotangents; by default all classes.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        seed: of the starts.
        check: raise :class:`~lipdp.errors.AuditError` where a bound is beaten; ``False``: only report it.

    Example:
        >>> import lipdp
        >>> from lipdp import losses, nn
        >>> model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False))
        >>> report = lipdp.audit.sensitivities(model, losses.MulticlassKR(), seconds=5)
        >>> report["1.weight"].tightness > 0.99 and not report.refuted
        True
    """
    started = time.monotonic()
    whole("steps", steps), whole("restarts", restarts)
    limit = positive("seconds", seconds)
    own = copy.deepcopy(model).double()
    proved_loss = loss if isinstance(loss, int | float) else as_loss(loss)
    generator = torch.Generator().manual_seed(seed)
    with Undrawn(), sdpa_kernel(SDPBackend.MATH):
        attack = _Attack(own, proved_loss, plan, input_shape, targets, generator)
        for number, (start, focus, real) in enumerate(_schedule(attack, restarts)):
            if number and time.monotonic() - started > limit:
                break
            attack.restart(start, real)
            attack.ascend(steps, focus)
    report = SensitivityReport(*attack.rows(), attack.evaluations, time.monotonic() - started)
    if check and report.refuted:
        raise AuditError(f"sensitivities are beaten\n{report}")
    return report


def _schedule(attack: _Attack, restarts: int) -> Iterator[tuple[str, int | None, bool]]:
    """(start, parameter to maximise or all, real targets): all together first, then each parameter by itself."""
    kinds = (False, True) if attack.choices is not None else (False,)
    for _ in range(restarts):
        yield from ((start, None, real) for start in STARTS for real in kinds)
        yield from ((start, i, False) for i in range(len(attack.bounds)) for start in ("constant", "random", "aligned", "impulse"))


class _Attack:
    """A model under attack: the point (weights, input, cotangent or target) reached, and the longest gradients met."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Any,
        plan: PrivacyPlan | None,
        input_shape: tuple[int, ...] | None,
        targets: Tensor | None,
        generator: torch.Generator,
    ) -> None:
        project_(model)
        self.model, self.loss, self.generator = model, loss, generator
        self.analysis: Analysis = analyse(model, loss, input_shape=input_shape)
        self.program = self.analysis.program
        self.shape = next(s[0] for node, s in self.program.shapes.items() if node.op == "placeholder")
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.bounds = self._promised(plan)
        declared = [m.norm for m in model.modules() if isinstance(m, nn.BoundedInput)]
        self.radius = declared[0] if declared else 10.0
        self.beyond = 7.0 if declared else 1.0  # a BoundedInput brings inputs back
        self.tokens = not self.program.input_dtype.is_floating_point
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        self.vocabulary = min(tables, default=1)
        self.given = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.x = self._input("random")
        with torch.no_grad():
            self.outputs = tuple(self.program(self.x).shape[1:])
        self.choices = None if isinstance(loss, int | float) else self._targets(targets)
        self.v = torch.zeros(1, *self.outputs, dtype=torch.float64)
        self.y: Tensor | None = None
        self.start, self.length = "given", self.radius
        self.best = [0.0] * (len(self.bounds) + 1)
        self.how = ["nowhere"] * len(self.best)
        self.evaluations = 0

    def _promised(self, plan: PrivacyPlan | None) -> tuple[list[str], list[float]]:
        found = self.analysis.sensitivities
        if plan is not None:
            if any(group.source != "proved" for group in plan.groups):
                raise ConfigurationError(
                    "this plan clips: its sensitivities are enforced, not proved. lipdp.audit.release_path looks whether they are; "
                    "without plan= this looks at what the calculus proves."
                )
            sizes = {(row.name, row.size) for row in self.analysis.parameters}
            different = sorted({name for name, _ in sizes ^ {(g.name, g.size) for g in plan.groups}})
            if different:
                raise ConfigurationError(
                    f"the plan was made for another model: {', '.join(different[:5])} differ. Make a new plan."
                )
            found = plan.sensitivities
        return list(found), list(found.values())

    def _targets(self, given: Tensor | None) -> Tensor | None:
        try:
            return target_choices(self.model, self.loss, self.x, given)
        except ConfigurationError:
            return None

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _input(self, start: str) -> Tensor:
        if self.tokens:
            one = start in ("constant", "aligned", "impulse")
            drawn = torch.randint(self.vocabulary, (1, *self.shape), generator=self.generator)
            return torch.zeros_like(drawn) if one else drawn
        return _structured(start, (1, *self.shape), self._normal)

    def restart(self, start: str, real: bool) -> None:
        """Weights, input and cotangent (or, with ``real``, the worst target) at a structured or random start."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                value = self.given[name] if start == "given" else _structured(start, tuple(parameter.shape), self._normal)
                parameter.copy_(value * (1e3 if start == "large" else 1.0))
        project_(self.model)
        self.start = start
        self.x = self._input(start)
        self.v = _structured("random" if start == "given" else start, (1, *self.outputs), self._normal)
        self.length = self.radius * (self.beyond if start == "large" else 1.0)
        self._bring_back()
        self.y = self._worst_target() if real else None

    def _bring_back(self) -> None:
        """The input on its sphere, the cotangent on the sphere of radius L."""
        if not self.tokens:
            self.x = self.x / self.x.norm().clamp_min(1e-300) * self.length
        self.v = self.v / self.v.norm().clamp_min(1e-300) * self.analysis.loss_lipschitz

    def _worst_target(self) -> Tensor:
        assert self.choices is not None
        best, longest = self.choices[:1], -1.0
        for i in range(min(len(self.choices), 16)):
            self.y = self.choices[i : i + 1]
            reached = float(self._norms(create_graph=False)[0][-1])
            if reached > longest:
                best, longest = self.y, reached
        return best

    def _norms(self, create_graph: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Gradient norms by parameter and of all, at the present point; and the leaves that they depend on."""
        x = self.x if self.tokens else self.x.detach().clone().requires_grad_()
        v = self.v.detach().clone().requires_grad_()
        with torch.enable_grad(), effective_leaves(self.model, differentiable=True) as effective:
            output = self.program(x)
            bounded = {**self.parameters, **effective}
            wanted = [bounded[name] for name in self.names]
            if self.y is None:
                found = torch.autograd.grad(output, wanted, v, create_graph=create_graph, allow_unused=True)
            else:
                value = self.loss(output, self.y).sum()
                found = torch.autograd.grad(value, wanted, create_graph=create_graph, allow_unused=True)
        zero = torch.zeros((), dtype=torch.float64)
        norms = [zero if g is None else torch.linalg.vector_norm(g) for g in found]
        norms.append(torch.linalg.vector_norm(torch.stack(norms)))
        self.evaluations += 1
        leaves = [v, *self.parameters.values()] if self.tokens else [x, v, *self.parameters.values()]
        return norms, leaves

    def _record(self, norms: Sequence[Tensor]) -> None:
        how = f"{self.start}, {'an arbitrary cotangent' if self.y is None else f'target {self.y.flatten().tolist()[:3]}'}"
        for i, norm in enumerate(norms):
            value = float(norm.detach())
            if value > self.best[i]:
                self.best[i], self.how[i] = value, how

    def ascend(self, steps: int, focus: int | None) -> None:
        """Gradient ascent on log(‖g‖/Δ): of all parameters together, or of one."""
        live = [i for i, bound in enumerate(self.bounds) if bound > 0]
        chosen = live if focus is None else [focus]
        for step in range(steps):
            norms, leaves = self._norms(create_graph=True)
            self._record(norms)
            objective = torch.stack([torch.log(norms[i] / max(self.bounds[i], 1e-300) + 1e-6) for i in chosen]).sum()
            if not objective.requires_grad:
                return
            directions = torch.autograd.grad(objective, leaves, allow_unused=True)
            rate = max(0.5 * 0.85**step, 0.03)
            with torch.no_grad():
                for number, (leaf, direction) in enumerate(zip(leaves, directions, strict=True)):
                    if direction is None or not bool(torch.isfinite(direction).all()) or float(direction.norm()) == 0:
                        continue
                    # Now and then the input and the cotangent jump: a step of power iteration, if the map is linear.
                    factor = _JUMP if number < 2 and step % 3 == 2 else rate
                    length = leaf.norm().clamp_min(1.0 if leaf.ndim < 2 else 0.1)
                    leaf.add_(direction / direction.norm() * (factor * length))
                if not self.tokens:
                    self.x = leaves[0].detach()
                self.v = leaves[0 if self.tokens else 1].detach()
                project_(self.model)
            self._bring_back()
        self._record(self._norms(create_graph=False)[0])

    def rows(self) -> tuple[tuple[ParameterAttack, ...], ParameterAttack]:
        """The report's rows."""
        total = math.sqrt(math.fsum(bound**2 for bound in self.bounds))
        entries = zip(self.names, self.bounds, self.best, self.how, strict=False)
        together = ParameterAttack("whole gradient", total, self.best[-1], self.how[-1])
        return tuple(ParameterAttack(*entry) for entry in entries), together


def _structured(start: str, shape: tuple[int, ...], normal: Callable[..., Tensor]) -> Tensor:
    """Ones, positive numbers, one entry (the first, or in the middle of a kernel or image), or random numbers."""
    if start == "constant":
        return torch.ones(shape, dtype=torch.float64)
    if start == "positive":
        return normal(*shape).abs()
    value = torch.zeros(shape, dtype=torch.float64)
    if start == "aligned":
        value.view(-1)[0] = 1.0
        return value
    if start == "impulse":
        value[(0, 0, *(size // 2 for size in shape[2:]))[: len(shape)]] = 1.0
        return value
    return normal(*shape)
