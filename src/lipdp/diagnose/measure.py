"""Diagnosing a model on some examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipdp._checks import whole
from lipdp.bounds import Analysis, analyse
from lipdp.diagnose.diagnosis import Diagnosis, ParameterDiagnosis
from lipdp.diagnose.norms import Measured, measure_gradients
from lipdp.errors import ConfigurationError, DataError
from lipdp.losses import as_loss
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, gather
from lipdp.training.plan import PrivacyPlan

__all__ = ["diagnose", "first_examples"]

_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_CHUNK = 256
_WHOLE = "whole gradient"


@dataclass(frozen=True)
class _Noise:
    """b, and the noise on the gradient sum by parameter."""

    batch_size: int
    stds: Mapping[str, float]


def first_examples(data: Any, examples: int) -> tuple[Tensor, Tensor]:
    """The first examples of a map-style dataset, or of a batch (inputs, targets)."""
    count = whole("examples", examples)
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) != len(y) or len(x) == 0:
            raise DataError(
                f"a batch of {len(x)} inputs and {len(y)} targets can't be diagnosed: it needs as many of both, and some"
            )
        return x[:count], y[:count]
    return gather(data, torch.arange(min(count, check_dataset(data))))


def diagnose(
    model: torch.nn.Module,
    loss: Any,
    data: Any,
    *,
    public: bool = False,
    plan: PrivacyPlan | None = None,
    noise_stds: Mapping[str, float] | None = None,
    examples: int = 512,
    float64: bool = False,
    input_shape: tuple[int, ...] | None = None,
    bins: int = 40,
    one_by_one: bool = False,
) -> Diagnosis:
    """True per-example gradient norms of every parameter against the bound Δ that is proved for it.

    The result is **not private**: it is made of the examples' own gradients, without noise. Say ``public=True`` where they are
    public; otherwise the diagnosis carries a warning wherever it is printed, saved or plotted.

    Args:
        model: the model as it is now. It is copied, not touched.
        loss: a loss of :mod:`lipdp.losses` (or of torch, translated).
        data: a dataset of (input, target), whose first ``examples`` are used, or a batch (inputs, targets).
        public: whether the data are public.
        plan: for the signal-to-noise ratio of each parameter in one step of this plan.
        noise_stds: noise on the gradient sum by parameter, where it is no longer the plan's (adaptive clipping).
        examples: how many to look at.
        float64: compute in double precision.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        bins: of the histograms.
        one_by_one: one backward pass per example (:func:`lipdp.diagnose.measure_gradients`).
    """
    if noise_stds is not None and plan is None:
        raise ConfigurationError("noise_stds need the plan that they belong to: pass plan= too (its batch size makes the ratio)")
    proved_loss = as_loss(loss)
    x, y = first_examples(data, examples)
    own = copy.deepcopy(model)
    if float64:
        own = own.double()
    like = next((p for p in own.parameters() if p.is_floating_point()), x)
    types = Types(own, proved_loss)
    x, y = types.inputs(x.to(like.device)), types.targets(y.to(like.device))
    with torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []):
        analysis = analyse(own, proved_loss, input_shape=input_shape, check=False)
        measured: Measured | None = None
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            found = measure_gradients(own, proved_loss, x[part], y[part], one_by_one=one_by_one)
            measured = found if measured is None else measured.joined(found)
    assert measured is not None
    noise = None if plan is None else _Noise(plan.batch_size, plan.noise_stds if noise_stds is None else noise_stds)
    return _assemble(analysis, measured, noise, len(x), public, whole("bins", bins))


def _assemble(analysis: Analysis, measured: Measured, noise: _Noise | None, examples: int, public: bool, bins: int) -> Diagnosis:
    rows = []
    for bounds in analysis.parameters:
        name = bounds.name
        module = name.rpartition(".")[0]
        signal = float(measured.sums[name].double().norm()) / examples
        std = None if noise is None else noise.stds.get(name)
        rows.append(
            _row(
                name,
                bounds.size,
                bounds.sensitivity,
                measured.norms[name].cpu(),
                signal,
                bins,
                input_share=_used(measured.inputs.get(module), bounds.input_norm),
                cotangent_share=_used(measured.cotangents.get(module), bounds.cotangent_norm),
                noise_std=std,
                snr=None if noise is None or not std else signal * noise.batch_size / (std * math.sqrt(bounds.size)),
            )
        )
    norms = torch.stack([measured.norms[row.name].cpu() for row in rows]).square().sum(0).sqrt()
    signal = math.hypot(*(row.mean_gradient for row in rows))
    energy = math.hypot(*((row.noise_std or 0.0) * math.sqrt(row.size) for row in rows))
    entire = _row(
        _WHOLE,
        sum(row.size for row in rows),
        math.hypot(*(row.bound for row in rows)),
        norms,
        signal,
        bins,
        snr=None if noise is None or energy == 0 else signal * noise.batch_size / energy,
    )
    return Diagnosis(tuple(rows), entire, examples, public, analysis.slack())


def _used(norms: Tensor | None, bound: float) -> float | None:
    if norms is None or not 0 < bound < math.inf:
        return None
    return float(norms.mean()) / bound


def _row(name: str, size: int, bound: float, norms: Tensor, signal: float, bins: int, **more: float | None) -> ParameterDiagnosis:
    largest = float(norms.max())
    top = max(bound if math.isfinite(bound) else 0.0, largest, torch.finfo(torch.float64).tiny)
    counts, edges = torch.histogram(norms.double(), bins=bins, range=(0.0, top))
    shares = torch.tensor(_QUANTILES, dtype=torch.float64)
    return ParameterDiagnosis(
        name=name,
        size=size,
        bound=bound,
        mean=float(norms.mean()),
        largest=largest,
        quantiles=dict(zip(_QUANTILES, torch.quantile(norms.double(), shares).tolist(), strict=True)),
        counts=tuple(int(count) for count in counts.tolist()),
        edges=tuple(edges.tolist()),
        mean_gradient=signal,
        **more,
    )
