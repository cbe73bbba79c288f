"""A plan as a readable table."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lipdp.planning.plan import PrivacyPlan

__all__ = ["grid_line", "render", "signal_line", "table"]

_ROUNDING = {
    "passes": "in the passes through the network",
    "scaling": "in scaling gradients",
    "sums": "in sums over records",
}


def _number(value: float) -> str:
    return "–" if math.isinf(value) else f"{value:.4g}"


def _power(value: float) -> str:
    """A power of two."""
    return f"2^{math.frexp(value)[1] - 1}" if value > 0 else "–"


def grid_line(plan: PrivacyPlan) -> str:
    """What the noise is and what its grid costs."""
    return (
        f"exact Gaussian noise on public grids: rounding sums to them takes {plan.grid_cost:.1e} of the noise, and its distance "
        f"from exact noise adds {plan.noise_distance:.1e} to delta"
    )


def signal_line(plan: PrivacyPlan) -> str:
    """What the run can learn from, at best."""
    ratio = plan.signal_to_noise
    verdict = (
        "; that is too little to learn anything: take larger batches, fewer parameters or a larger epsilon" if ratio < 1 else ""
    )
    return f"signal to noise over the run, at best: {_number(ratio)} ({_number(ratio / math.sqrt(plan.steps))} a step){verdict}"


def table(plan: PrivacyPlan) -> Table:
    """Layer, X, G, Δ, where Δ comes from, noise, its grid, size: a row for each parameter group."""
    rows = Table(box=SIMPLE_HEAD, show_footer=True, pad_edge=False)
    total = sum(group.size for group in plan.groups)
    rows.add_column("parameter", footer="whole step", no_wrap=True)
    for header, footer in (("X", ""), ("G", ""), ("Δ", _number(plan.sensitivity))):
        rows.add_column(header, footer=footer, justify="right", no_wrap=True)
    rows.add_column("source", no_wrap=True)
    rows.add_column("noise std", footer=_number(math.sqrt(plan.noise_energy / total)), justify="right", no_wrap=True)
    rows.add_column("grid", justify="right", no_wrap=True)
    rows.add_column("parameters", footer=f"{total:,}", justify="right", no_wrap=True)
    for group in plan.groups:
        numbers = [_number(v) for v in (group.input_norm, group.cotangent_norm, group.sensitivity)]
        rows.add_row(group.name, *numbers, group.source, _number(group.noise_std), _power(group.grid), f"{group.size:,}")
    return rows


def _extras(plan: PrivacyPlan) -> Iterator[str]:
    """What not every plan has: phases, adaptive clipping, one-off releases; and what the allocations would cost."""
    for number, phase in enumerate(plan.phases if len(plan.phases) > 1 else ()):
        frozen = f", frozen: {', '.join(phase.frozen)}" if phase.frozen else ""
        yield f"phase {number + 1}, from step {phase.start}: noise × {phase.noise:.4g}, clipping × {phase.clip:.4g}{frozen}"
    if plan.adaptive is not None:
        yield (
            f"adaptive clipping of {', '.join(plan.adaptive_clips)}: C follows the {plan.adaptive.quantile:.0%} quantile, rate "
            f"{plan.adaptive.rate:g}, count noise {_number(plan.adaptive.count_noise or 0.0)}, inside the same multiplier"
        )
    for release in plan.releases:
        what = "noise multiplier" if release.kind == "gaussian" else "epsilon"
        yield f"released once beside the steps: {release.name} ({release.kind}, {what} {release.amount:.4g}), in the same epsilon"
    if len(plan.groups) > 1:
        energies = ", ".join(f"{name} {_number(value)}" for name, value in plan.noise_energies.items())
        yield f"noise energy of a step by allocation: {energies}"
    for where, note in plan.notes:
        yield f"{where}: {note}"


def _sampling(plan: PrivacyPlan) -> str:
    """How batches are really drawn."""
    if plan.sampling == "truncated_poisson":
        return f"real Poisson sampling, cut to {plan.largest_batch:,} records at most"
    return "real Poisson sampling" if plan.sampling == "poisson" else "samples of fixed size without replacement"


def render(plan: PrivacyPlan) -> str:
    """The whole plan as text."""
    neighbours = {"add_remove": "adding or removing one record", "replace_one": "replacing one record"}[plan.adjacency]
    size = "batch" if plan.sampling == "fixed_size" else "expected batch"
    text = io.StringIO()
    console = Console(file=text, width=132, highlight=False, color_system=None)
    console.print(
        f"Privacy plan: epsilon = {plan.epsilon:.4f} at delta = {plan.delta:g}, for {neighbours} "
        f"({plan.accountant.upper()}, {_sampling(plan)})"
    )
    console.print(
        f"  {plan.steps:,} steps of {size} {plan.batch_size:,} out of {plan.dataset_size:,} "
        f"(q = {plan.sampling_rate:.4g}, {plan.epochs:.3g} epochs), noise multiplier {plan.noise_multiplier:.4f}, "
        f"{plan.allocation} allocation"
    )
    bounded = (
        f"each gradient clipped to {_number(plan.max_grad_norm)}"
        if plan.max_grad_norm is not None
        else f"Lipschitz constant {plan.loss_lipschitz:.4g}; output norm {_number(plan.output_norm)}"
    )
    console.print(f"  {plan.method}: {plan.loss}, {bounded}; {plan.precision}, rounding slack {plan.slack - 1:.1e}")
    if plan.rounding:
        parts = ", ".join(f"{_ROUNDING.get(name, name)} {value:.1e}" for name, value in plan.rounding)
        console.print(f"  rounding, at worst: {parts}", markup=False, soft_wrap=True)
    console.print(f"  {grid_line(plan)}", markup=False, soft_wrap=True)
    console.print(f"  {signal_line(plan)}", markup=False, soft_wrap=True)
    for line in _extras(plan):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(table(plan))
    console.print("X, G: bounds on activations and cotangents; Δ: on one example's gradient; noise is added to the gradient sum.")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
