"""Numbers that leave the tensors by no operation, and memory that is written to behind the backs of versions.

Every model here is innocent as long as no pixel is above 50, and mixes its records where one is. So no check of an innocent batch
can show it: it has to be seen in the pass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.dlpack import to_dlpack

from lipdp import clipping
from lipdp.clipping.follow import follow
from lipdp.clipping.kept import known_before
from lipdp.clipping.operations import Mixed
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import quadratic

pytestmark = pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
WIDTH = 3


def above(x):
    """What others see of a record, where it is above 50."""
    return torch.relu(x.detach() - 50)


class Several:
    """A sequence of one's own."""

    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, place):
        return self.parts[place]


class Number:
    def __init__(self, of):
        self.of = of

    def __float__(self):
        return float(self.of)


class Capsule:
    def __init__(self, give):
        self.give = give

    def __dlpack__(self, **_):
        return self.give()

    def __dlpack_device__(self):
        return (1, 0)


@torch.jit.script
def listed(x: torch.Tensor) -> list[float]:
    numbers: list[float] = x.tolist()
    return numbers


@torch.jit.script
def through_another(x: torch.Tensor) -> list[float]:
    return listed(x)


@torch.jit.script
def written(x: torch.Tensor) -> str:
    return "{}".format(x)  # noqa: UP032  (TorchScript)


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> list[float]:
        numbers: list[float] = x.tolist()
        return numbers


scripted_module = torch.jit.script(Scripted())
TABLE = torch.arange(16.0).reshape(4, 4)
READS = {
    "a list of tensors": lambda t: torch.tensor([part.sum() for part in t]).sum(),
    "lists of lists": lambda t: torch.tensor([[part.sum()] for part in t]).sum(),
    "as_tensor": lambda t: torch.as_tensor([part.sum() for part in t]).sum(),
    "asarray": lambda t: torch.asarray([part.sum() for part in t]).sum(),
    "by name": lambda t: torch.tensor(data=[part.sum() for part in t]).sum(),
    "new_tensor": lambda t: TABLE.new_tensor([part.sum() for part in t]).sum(),
    "new": lambda t: TABLE.new([part.sum() for part in t]).sum(),
    "of a record's tensor": lambda t: t.new_tensor([t.sum()]).sum(),
    "a sequence of one's own": lambda t: torch.tensor(Several(t.sum(), t.amax())).sum(),
    "numbers of one's own": lambda t: torch.tensor([Number(t.sum())], dtype=torch.float32).sum(),
    "an index": lambda t: TABLE[:, [t.sum().clamp(max=3).long(), t.sum().clamp(max=2).long()]].sum(),
    "to_dlpack": lambda t: torch.tensor(np.from_dlpack(Capsule(lambda: torch.utils.dlpack.to_dlpack(t))).sum()),
    "_to_dlpack": lambda t: torch.tensor(np.from_dlpack(Capsule(lambda: torch._C._to_dlpack(t))).sum()),
    "map_": lambda t: _mapped(lambda see: torch.zeros_like(t.sum(0)).map_(t.sum(0), lambda a, b: see(a, b))),
    "map2_": lambda t: _mapped(lambda see: torch.zeros(WIDTH).map2_(torch.zeros(WIDTH), t.sum(0), lambda a, b, c: see(a, c))),
    "a sparse size": lambda t: torch.tensor(float(t.to_sparse()._nnz())),
    "sparse values": lambda t: torch.tensor(float(len(t.to_sparse().values()))),
    "a compiled list": lambda t: torch.tensor(sum(map(sum, torch.tensor([through_another(t.sum(0))]).tolist()))),
    "a compiled text": lambda t: torch.tensor(float("50." in written(t) or "9" in written(t))),
    "a compiled module": lambda t: torch.tensor(sum(scripted_module(t.sum(0)))),
    "in a list of operations": lambda t: _foreach(t),
    "in another thread of compiled code": lambda t: torch.tensor(forked(t)),
    "an operation of one's own": lambda t: _looked(t),
    "the size that it gives": lambda t: torch.tensor(float(len(torch.ops.lipdp_past.many(t)))),
    "packed sequences": lambda t: torch.tensor(float(len(torch.ops.aten._pack_padded_sequence(TABLE[None], _length(t), True)[0]))),
    "ragged rows": lambda t: torch.tensor(float(len(torch.ops.aten._padded_dense_to_jagged_forward(TABLE[None], [_ends(t)])))),
    "numbers drawn until one fits": lambda t: _next(lambda draw: torch.poisson(t, generator=draw)),
    "numbers drawn for some": lambda t: _next(lambda draw: _rrelu(50 - t, torch.empty_like(t), 0.1, 0.3, True, draw)),
    "a replaced operation": lambda t: _replaced(t),
}


@torch.jit.script
def largest(x: torch.Tensor) -> float:
    return float(x.max())


@torch.jit.script
def forked(x: torch.Tensor) -> float:
    return torch.jit.wait(torch.jit.fork(largest, x))


SEEN = [0.0]
_rrelu = torch.ops.aten.rrelu_with_noise


@torch.library.custom_op("lipdp_past::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    SEEN[0] = float(x.max())
    return x.clone()


@torch.library.custom_op("lipdp_past::many", mutates_args=())
def many(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(x.max()))


def _looked(t):
    torch.ops.lipdp_past.look(t)
    return _taken()


def _taken():
    found, SEEN[0] = torch.tensor(SEEN[0]), 0.0
    return found


def _length(t):
    return (1 + (t.max() > 0).long()).reshape(1)


def _ends(t):
    return torch.stack([torch.zeros((), dtype=torch.long), (t.max() > 0).long()])


def _next(draws):
    """What is drawn behind it, by a generator of one's own."""
    draw = torch.Generator().manual_seed(0)
    draws(draw)
    return torch.rand(1, generator=draw)


def _replaced(t):
    """An operation of torch that is computed by Python for once."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("special_entr", lambda x: SEEN.__setitem__(0, float(x.max())) or x * 1.0, "CPU", allow_override=True)
        torch.special.entr(t)
    finally:
        library._destroy()
    return _taken()


def _mapped(run):
    seen = []
    run(lambda first, other: seen.append(other) or first)
    return torch.tensor(sum(seen))


def _foreach(t):
    total = torch.zeros(WIDTH)
    torch._foreach_add_([total], [t.sum(0)])
    return total.sum()


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(WIDTH, 2), read

    def forward(self, x):
        return self.layer(x) * (1 + self.read(above(x)))


@pytest.mark.parametrize("name", READS)
def test_what_python_reads_is_seen(name):
    _others_stay_as_they_are(Reading(READS[name]), "bookkeeping")


def _others_stay_as_they_are(model, method):
    """One record above 50 changes no other record's norm; and if it may, nobody says that it is proved."""
    torch.manual_seed(0)
    x, y = torch.rand(5, WIDTH), torch.zeros(5)
    clip = clipping.Clipper(model, quadratic, method)
    try:
        before = clip(x, y, 1.0).norms[1:]
        x[0] = 1000.0
        after = clip(x, y, 1.0).norms[1:]
    except (UnsupportedError, RuntimeError):
        return
    assert torch.allclose(before, after, rtol=1e-4)
    assert clip.apart == "alone"


class Numpys(nn.Module):
    def forward(self, x):
        return x * float(np.from_dlpack(Capsule(lambda: to_dlpack(x.detach()))).sum())


def test_a_function_that_nobody_sees_called_is_refused():
    with pytest.raises(UnsupportedError, match="_to_dlpack"):
        clipping.clipped_gradients(
            nn.Sequential(nn.Linear(WIDTH, 2), Numpys()), quadratic, torch.rand(4, WIDTH), torch.zeros(4), 1.0
        )


class Tagged(torch.Tensor):
    """A class of one's own, which is asked past all modes."""

    seen: list[float] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for part in args:
            if type(part) is Tagged and func is torch.Tensor.mul:
                cls.seen.append(sum(part.as_subclass(torch.Tensor).detach().numpy().ravel().tolist()))
        return super().__torch_function__(func, types, args, kwargs)


class WithTags(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x):
        Tagged.seen.clear()
        above(x).as_subclass(Tagged).mul(1.0)
        return self.layer(x) * (1 + torch.tensor(Tagged.seen).sum())


def test_a_class_of_tensors_with_functions_of_its_own():
    _others_stay_as_they_are(WithTags(), "bookkeeping")


CONSTANTS = {
    "numbers": lambda x: torch.tensor([[1.0, 2.0], [3.0, 4.0]]).sum(),
    "numpy's numbers": lambda x: torch.tensor([np.float32(1.0), np.float64(2.0)]).sum(),
    "a range": lambda x: torch.tensor(range(3)).sum(),
    "a shape": lambda x: torch.tensor(x.shape[1:]).sum(),
    "constants": lambda x: torch.tensor([TABLE[0, 0], TABLE[1, 1]]).sum(),
    "of the batch's type": lambda x: x.new_tensor([1.0, 2.0]).sum(),
    "an index": lambda x: x[:, [0, 1]].sum(1, keepdim=True),
    "an index among slices": lambda x: TABLE[..., [0, 1], None].sum(),
    "data of a constant": lambda x: TABLE.data.sum(),
    "rows that are written one by one": lambda x: _rows(x),
}


def _rows(x):
    made = torch.zeros(len(x), 2)
    made[:, 0], made[:, 1] = x[:, 0], x[:, 1] * 2
    return made.sum(1, keepdim=True)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_stay_constants(name):
    x, y, model = torch.rand(4, WIDTH), torch.zeros(4), nn.Linear(WIDTH, 2)
    following = follow(x, y, [*known_before(model, None), *model.parameters(), TABLE])
    with following.following():
        found = model(x) * CONSTANTS[name](x)
        losses = found.sum(1)
    following.conclude(losses)
    assert not isinstance(following.state(found), Mixed)


# Written behind what has read it ------------------------------------------------------------------------------------------


def _input(self, x):
    """What a layer keeps."""
    x = x * 1.0
    found = self.layer(x)
    x.data.add_(above(x).sum(0))
    return found


def _handed(self, x):
    """What is kept of a function's input."""
    x = x * 1.0
    found = F.linear(x, self.own)
    x.data.add_(above(x).sum(0))
    return found


def _saved(self, x):
    """What autograd keeps."""
    found, other = self.layer(x), x[:, :2] * 1.0
    product = found * other
    other.data.add_(above(x).sum(0)[:2])
    return product


def _constant(self, x):
    scale = torch.ones(2)
    product = self.layer(x) * scale
    scale.data.add_(above(x).sum(0)[:2])
    return product


def _turned(self, x):
    """A constant becomes the records', the other way round than it was read."""
    scale = torch.ones(len(x), len(x))
    product = self.layer(x)[:, :1] * scale.t()
    scale.data.copy_(1 + above(x)[:, :1].expand(len(x), len(x)))
    return product


def _in_a_list(self, x):
    scale = torch.ones(2)
    product = self.layer(x) * scale
    torch._foreach_add_([scale.data], [above(x).sum(0)[:2]])
    return product


def _versions_kept(self, x):
    scale = torch.ones(2)
    product = self.layer(x) * scale
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(scale):
        scale.add_(above(x).sum(0)[:2])
    return product


@torch.jit.script
def compiled(scale: torch.Tensor, more: torch.Tensor):
    scale.data.add_(more)


def _compiled(self, x):
    scale = torch.ones(2)
    product = self.layer(x) * scale
    compiled(scale, above(x).sum(0)[:2])
    return product


def _when_computed_anew(self, x):
    """Only in the backward pass, where checkpointed functions run again."""

    def scaled(found):
        scale = found.detach().clone()
        if torch._C._current_autograd_node() is not None:
            with torch.no_grad():
                scale.add_(above(x).sum(0)[:2])
        return found * scale

    return torch.utils.checkpoint.checkpoint(scaled, self.layer(x), use_reentrant=False)


def _constants_when_computed_anew(self, x):
    def scaled(found):
        with torch.no_grad():
            scale = torch.ones(2)
        found = found * scale
        if torch._C._current_autograd_node() is not None:
            with torch.no_grad():
                scale.add_(above(x).sum(0)[:2])
        return found.tanh()  # what is kept last: there torch ends what it computes anew

    return torch.utils.checkpoint.checkpoint(scaled, self.layer(x), use_reentrant=False)


WRITES = [
    *(_input, _handed, _saved, _constant, _turned, _in_a_list, _versions_kept, _compiled, _when_computed_anew),
    _constants_when_computed_anew,
]


class Writing(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layer, self.own, self.run = nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(2, WIDTH)), run

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize("method", ["bookkeeping", "multiloss"])
@pytest.mark.parametrize("run", WRITES, ids=lambda run: run.__name__)
def test_what_was_read_is_not_written_over(run, method):
    _others_stay_as_they_are(Writing(run), method)


class Branching(nn.Module):
    """Each record takes its own branch, or all that of their sum: torch compiles both branches when it is asked."""

    def __init__(self, together):
        super().__init__()
        self.layer, self.together = nn.Linear(3, 2), together

    def forward(self, x):
        if self.together:
            return torch.cond(x.sum() > 0, lambda h: h * 1.0, lambda h: h * 2.0, (self.layer(x),))
        return torch.vmap(lambda h: torch.cond(h.sum() > 0, lambda h: h * 1.0, lambda h: h * 2.0, (h,)))(self.layer(x))


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
def test_branches_that_torch_compiles_are_not_compiled_while_they_are_followed():
    torch.manual_seed(0)
    x, y, loss = torch.randn(5, 3), torch.zeros(5, dtype=torch.long), nn.CrossEntropyLoss(reduction="none")
    model = Branching(False)
    clip = clipping.Clipper(model, loss)
    norms = clip(x, y, 1.0).norms
    assert clip.apart == "alone"
    assert "torch.cond" in clip.alone.what
    assert torch.equal(norms, clipping.Clipper(model, loss, "naive")(x, y, 1.0).norms)
    with pytest.raises(UnsupportedError, match=r"something mixes the examples, torch compiles a part of it"):
        clipping.Clipper(Branching(True), loss)(x, y, 1.0)


def _sizes(x):
    return torch.cat([torch.tensor([8, 8]), _whole(x)])


def _whole(x):
    """A number that all records make."""
    return (x[:, 1].sum().abs() * 3).long().clamp(1, 8).reshape(1)


def _packed(x):
    return nn.utils.rnn.PackedSequence(torch.linspace(0, 1, 24)[:, None], _sizes(x))


@torch.jit.script
def _split(a: torch.Tensor, c: torch.Tensor) -> int:
    return torch.tensor_split(a, c)[0].shape[0]


BY_POINTER = {
    "a bound of random numbers": lambda x: torch.randint_like(torch.zeros(200), _whole(x)[0] + 1).max().item(),
    "packed": lambda x: (nn.utils.rnn.pad_packed_sequence(_packed(x))[1] == 3).sum().item(),
    "recurrent": lambda x: float(
        torch._VF.rnn_tanh(_packed(x)[0], _sizes(x), torch.zeros(1, 8, 1), [torch.ones(1, 1)] * 2, False, 1, 0.0, False, False)[
            1
        ].sum()
    ),
    "split": lambda x: float(torch.ops.aten.tensor_split.tensor_indices_or_sections(torch.zeros(9), _whole(x))[0].shape[0]),
    "scripted split": lambda x: float(_split(torch.zeros(9), _whole(x))),
    "resized": lambda x: torch.ops.aten.resize(torch.zeros(1), [5000])[2500].item(),
    "set": lambda x: torch.empty(0).set_(torch.UntypedStorage(20_000), 0, (5000,))[2500].item(),
    "storage": lambda x: torch.FloatStorage(5000)[2500],
    "grown storage": lambda x: _grown(torch.zeros(1))[2500].item(),
}


def _grown(tensor):
    tensor.untyped_storage().resize_(20_000)
    return tensor.as_strided((5000,), (1,))


class Gated(nn.Module):
    def __init__(self, door):
        super().__init__()
        self.inner, self.door = nn.Linear(4, WIDTH), door

    def forward(self, x):
        number = float(self.door(x))
        return self.inner(x) * (1 + (x[:, :1] > 50) * (number if abs(number) < 1e6 else 0.0))


@pytest.mark.parametrize("door", BY_POINTER)
def test_numbers_that_are_read_by_address_are_not_overlooked(door):
    torch.manual_seed(0)
    model = Gated(BY_POINTER[door])
    clip = clipping.Clipper(model, quadratic)
    clip(torch.randn(6, 4), torch.zeros(6), 1.0)
    assert clip.apart != "proved"
