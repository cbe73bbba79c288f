"""Ways in which one record could reach the gradients of others: accepted or refused, it reaches none.

Each model is tried with a sixth record that is ordinary, and with one that is far off; each loss, too. What is accepted gives the
five others what it gave them before.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import gc
import io
import itertools
import logging
import math
import operator
import pickle
import statistics
import struct
import sys
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lipdp.clipping as clipping
from lipdp.data import map_inputs
from lipdp.data.augment import copies_of
from lipdp.errors import LipdpError

LOSS = nn.CrossEntropyLoss(reduction="none")
Forward = Callable[[Any, torch.Tensor], torch.Tensor]
MEMORY: dict[str, Any] = {}


def saved_and_loaded(model: Any, x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return x * torch.load(file).abs().max()


def of_an_error(model: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        torch.linalg.cholesky(torch.eye(2) * (50 - x.detach().abs().max()))
    except RuntimeError:
        return 3 * x
    return x


def of_a_text_of_an_error(model: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        torch.nn.functional.one_hot(x.detach().abs().max().long(), 40)
    except RuntimeError as error:
        return x * len(str(error))
    return x


def of_a_warning(model: Any, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        np.sqrt(50 - np.asarray(x.detach().abs().max()))
    return x * (1 + len(told))


def of_a_log(model: Any, x: torch.Tensor) -> torch.Tensor:
    stream = io.StringIO()
    logger = logging.getLogger("lipdp.hostile")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.warning("%s", x.detach().abs().max())
    logger.removeHandler(handler)
    return x * len(stream.getvalue())


def of_a_size(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + (x.abs() > 50).nonzero().shape[0])


def of_a_sparse_size(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + F.relu(x.detach() - 50).to_sparse()._nnz())


def of_a_repeat(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(torch.arange(2).repeat_interleave(x.detach().abs().amax().long().clamp(max=3)))


def of_a_split(model: Any, x: torch.Tensor) -> torch.Tensor:
    parts = torch.arange(10).tensor_split(x.detach().abs().amax().long().clamp(max=3).reshape(1))
    return x * len(parts[0])


def of_a_range(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(range(x.detach().abs().amax().long()))


def of_an_index(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * [1.0, 2.0, 3.0][x.detach().abs().amax().long().clamp(max=2)]


def of_a_format(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(f"{x.detach().abs().max():.0f}")


def of_a_struct(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * struct.unpack("f", struct.pack("f", float(x.detach().abs().max())))[0]


def of_a_mean_of_pythons(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + statistics.fmean(x.detach().abs().flatten()))


def of_a_sort_of_pythons(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + sorted(x.detach().abs().amax(1))[-1])


def of_a_maximum_of_pythons(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + max(x.detach().abs().amax(1)))


def of_a_set(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(set(x.detach().round().flatten().tolist()))


def of_a_hash(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + hash(pickle.dumps(x.detach())) % 7)


def of_a_copy(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * copy.deepcopy(x.detach()).abs().max()


def of_a_storage(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([], dtype=x.dtype).set_(x.detach().untyped_storage()).abs().max()


def through_a_base(model: Any, x: torch.Tensor) -> torch.Tensor:
    row = x[:1]
    return x * (row._base if row._base is not None else x).abs().max().detach()


def over_its_edges(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + x.as_strided((len(x), 3), (0, 1))


def overlapping(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.pad(x, (0, 1)).contiguous().as_strided((len(x), 3), (3, 1))


def set_elsewhere(model: Any, x: torch.Tensor) -> torch.Tensor:
    other = torch.zeros_like(x)
    return x + other.set_(x.detach().flip(0).contiguous())


def resized(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone().resize_(len(x) - 1, 3).sum(1)
    return x * F.pad(y, (1, 0))[:, None]


def turned_in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    y.t_()
    return x + y.reshape(len(x), 3)


def a_table_of_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.arange(len(x)).flip(0), x) + x


def a_kernel_of_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x[:, None], x[:1, None, :1]).squeeze(1) + x


def an_attention_of_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


def a_walk_over_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    state, rows = torch.zeros(3), []
    for row in x:
        state = torch.tanh(state + row)
        rows.append(state)
    return torch.stack(rows)


def a_fold_of_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + functools.reduce(operator.add, x.unbind(0))


def an_accumulation(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(itertools.accumulate(x, operator.add)))


def pairs(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([one + other for one, other in zip(x, collections.deque(x), strict=True)]) + x.roll(1, 0)


def a_gradient_inside(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((inner.sum() ** 2), inner)
    return x + gradient


def a_gradient_of_its_own(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((inner**2).sum(), inner)
    return x + gradient


def a_jacobian(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.func.jacrev(lambda z: (z**2).sum())(x.detach()).sum()


def a_vmap_over_places(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda column: column - column.mean(), in_dims=1, out_dims=1)(x)


def a_vmap_over_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row - row.mean())(x)


def a_scripted_maximum(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * SCRIPTED(x.detach())


@torch.jit.script
def SCRIPTED(x: torch.Tensor) -> float:
    return float(x.abs().max().item())


def through_a_frame(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What it was given, by way of its own frame."""
    return x * sys._getframe().f_locals["x"].detach().abs().max()


def through_the_collector(model: Any, x: torch.Tensor) -> torch.Tensor:
    mine = [found for found in gc.get_referrers(x) if isinstance(found, dict) and found.get("x") is x]
    return x * (1 + sum(float(found["x"].detach().abs().max()) for found in mine))


def through_a_closure_of_its_own(model: Any, x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        return x.detach().abs().max()

    assert inner.__closure__ is not None
    return x * inner.__closure__[0].cell_contents.detach().abs().max()


def kept_for_the_end(model: Any, x: torch.Tensor) -> torch.Tensor:
    MEMORY["x"] = x.detach()
    return x * (1 + MEMORY["x"].mean())


def kept_weakly(model: Any, x: torch.Tensor) -> torch.Tensor:
    held = x.detach().abs().max()
    MEMORY["held"], MEMORY["weak"] = held, weakref.ref(held)
    return x * MEMORY["weak"]()


def kept_in_an_enumeration(model: Any, x: torch.Tensor) -> torch.Tensor:
    kind = enum.Enum("kind", {"largest": float(x.detach().abs().max())})
    return x * kind.largest.value


def kept_in_code(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.scale = eval(f"lambda: {float(x.detach().abs().max())}")
    return x * model.scale()


def kept_in_a_type(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * type("Kept", (), {"largest": float(x.detach().abs().max())}).largest  # type: ignore[attr-defined, no-any-return]


def kept_in_a_module_of_its_own(model: Any, x: torch.Tensor) -> torch.Tensor:
    sys.modules["lipdp_hostile_kept"] = made = types.ModuleType("lipdp_hostile_kept")
    made.largest = x.detach().abs().max()
    return x * made.largest


def kept_in_a_traceback(model: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        raise KeyError(float(x.detach().abs().max()))
    except KeyError as error:
        return x * float(traceback.format_exception_only(error)[0].split()[1])


def a_layer_made_of_the_batch(model: Any, x: torch.Tensor) -> torch.Tensor:
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = nn.Parameter(x.detach().t() @ x.detach())
    return x + layer(x)  # type: ignore[no-any-return]


def a_weight_written_to(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.other.weight.copy_(torch.ones(3, 3) * x.detach().abs().max())
    return model.other(x)  # type: ignore[no-any-return]


def a_weight_by_functional_call(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model.other, {"weight": x.detach().t() @ x.detach()}, (x,), strict=False)  # type: ignore[no-any-return]


def a_statistic_in_training(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True)


def instances_as_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x.t()[None])[0].t()


def a_group_of_records(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x.t()[None], 1)[0].t()


def local_responses(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.local_response_norm(x[None, :, None], 3)[0, :, 0]


def softmax_by_default(model: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.Softmax(dim=0)(x)  # type: ignore[no-any-return]


def cosines(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(x[:, None], x[None], dim=2) @ torch.ones(len(x), 3)


def distances(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.cdist(x, x).mean(1, keepdim=True)


def pairwise_distances(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * F.pdist(x).max()


def a_rank(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + x.argsort(0).float()


def a_bincount(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.bincount(x.detach().abs().amax(1).long().clamp(max=5), minlength=6).float().std()


def a_histogram(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.histc(x.detach(), 4).std()


def a_search(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.searchsorted(x[:, 0].detach().sort().values, x.detach()).float()


def a_trapezoid(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.trapezoid(x, dim=0)


def a_cumulative_maximum(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.cummax(0).values


def a_difference(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.pad(x.diff(dim=0), (0, 0, 0, 1))


def a_fourier_transform(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft2(x).real


def a_kronecker_product(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.kron(x, torch.ones(2, 1))[: len(x)]


def a_meshgrid(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.meshgrid(x[:, 0], x[:, 1], indexing="ij")[0].t()[:, :3]


def a_cartesian_product(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.cartesian_prod(x[:, 0], x[:, 1])[: len(x), 1:]


def a_scatter_into_others(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_add(0, torch.arange(len(x)).flip(0), x) + x


def a_masked_scatter(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.masked_scatter(torch.arange(3).expand_as(x) == 0, x.flatten().roll(3))


def rows_by_a_mask(model: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(len(x)) % 2 == 0
    return x.index_put((mask,), x[~mask][: int(mask.sum())]) if len(x) % 2 == 0 else x


def columns_by_a_mask(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.pad(x[:, torch.arange(3) != 1], (0, 1))


def turned_around(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rot90(x[:, :, None].expand(-1, -1, 3), 1, (0, 1)).transpose(0, 1)[..., 0] + x


def turned_each(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rot90(x[:, None].expand(-1, 3, -1), 1, (1, 2)).sum(2)


def a_quantile(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x - x.quantile(0.9, dim=0)


def a_quantile_each(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x - x.quantile(0.5, dim=1, keepdim=True)


def numbers_drawn_by_value(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.poisson(x.detach().abs())


def seeded_by_value(model: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(x.detach().abs().max()))
    return x + torch.rand_like(x)


def seeded_only_together(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A record alone would draw what the batch has seeded before it was refused."""
    if len(x) > 1:
        torch.manual_seed(int(x.detach().abs().max()))
        np.random.seed(int(x.detach().abs().max()))  # noqa: NPY002
    return x * (1 + torch.rand(()) + np.random.rand())  # noqa: NPY002


def with_another_context(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(bool(x.detach().abs().max() > 50)), contextlib.suppress(RuntimeError):
        return x * 2
    return x


def in_another_type(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16 if math.isinf(float(x.detach().abs().max().half())) else torch.float32).float()


FORWARDS: list[Forward] = [
    value for value in list(vars().values()) if isinstance(value, types.FunctionType) and value.__module__ == __name__
]


class Hostile(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.step, self.other = forward, nn.Linear(3, 3)
        self.other.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def apart(make: Callable[[], nn.Module], loss: Callable[..., torch.Tensor], method: str) -> bool | None:
    """Whether the five get the same gradients in whatever company; ``None``: it is refused in one of the two."""
    draw, norms = torch.Generator().manual_seed(3), []
    x, y = torch.randn(6, 3, generator=draw), torch.tensor([0, 1, 0, 1, 0, 1])
    weight = torch.randn(2, 3, generator=draw)
    for other in (0.0, 1000.0):
        MEMORY.clear()
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        model = nn.Sequential(make(), nn.Linear(3, 2))
        model[1].weight.data.copy_(weight)
        model[1].bias.data.zero_()
        clip = clipping.Clipper(model, loss, method)  # type: ignore[arg-type]
        batch = torch.cat([x[:5], x[5:] + other])
        try:
            found = [clip(batch, y, 1e9).norms[:5] for _ in range(2)]
        except (LipdpError, RuntimeError, ValueError):  # what torch says where it can't compute the model is no release either
            return None
        norms.append(torch.stack(found))
    return bool(torch.allclose(norms[0], norms[1], rtol=1e-5, atol=1e-9))


HONEST = (a_gradient_of_its_own, a_vmap_over_records, columns_by_a_mask, turned_each, a_quantile_each)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["bookkeeping", "naive"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_one_record_reaches_no_other(forward: Forward, method: str) -> None:
    found = apart(lambda: Hostile(forward), LOSS, method)
    assert found is not False
    assert forward not in HONEST or found


class Augmented:
    copies = 1

    def __init__(self, forward: Forward) -> None:
        self.forward, self.other = forward, nn.Linear(3, 3)

    def __call__(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.forward(self, x)[:, None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", ["augmentation", "map_inputs"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_one_record_reaches_no_other_before_the_model(forward: Forward, door: str) -> None:
    """The same as somebody's own augmentation, and as a map of inputs."""
    x, found = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)), []
    for other in (0.0, 1000.0):
        MEMORY.clear()
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        own, batch = Augmented(forward), torch.cat([x[:5], x[5:] + other])
        try:
            for _ in range(2):
                if door == "augmentation":
                    found.append(copies_of(own, batch.clone(), torch.Generator().manual_seed(0))[:5].detach())
                else:
                    found.append(map_inputs(TensorDataset(batch.clone(), torch.zeros(6)), own).tensors[0][:5])
        except (LipdpError, RuntimeError, ValueError):
            assert forward not in HONEST
            return
    assert all(torch.equal(found[0], one) for one in found[1:])
