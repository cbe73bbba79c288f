"""Forwards that people write, and some that nobody should: drawn line by line, run as real Python."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import torch
from hypothesis import strategies as st

from lipdp import nn

T = torch.nn
WIDTH = 4
_count = itertools.count()

PLAIN = [
    "h = self.a(h)",
    "h = self.b(torch.relu(h))",
    "h = h + 0.5 * self.b(h)",
    "h = (h + self.a(h)) / 2",
    "u, v = h.chunk(2, 1)\nh = torch.cat([v, u * 2.0], 1)",
    "h = torch.tanh(h) * 3.0",
    "h = h.view(h.shape[0], 2, 2).flatten(1)",
    "h = h.reshape(h.size(0), -1)",
    "h = self.scale(h)",
    "h = self.drop(h)",
    "h = h - h.mean(1, keepdim=True)",
    "h = F.layer_norm(h, (4,))",
    "h = h * self.buf",
    "h = h + self.plain",
    "h = torch.relu(self.a(h).clone())",
    "for _ in range(2):\n    h = self.a(h)",
]
IN_PLACE = [
    "h = self.a(h)\nh += 1.0",
    "h += self.b(h)",
    "h *= 10",
    "k = h\nk *= 100\nh = h + 0",
    "u, v = h.chunk(2, 1)\nu *= 100\nh = torch.cat([u, v], 1)",
    "u, v = h.chunk(2, 1)\nu *= 100\nh = h * 1.0",
    "u = h.view(-1, 4)\nu.mul_(30.0)\nh = h + 0",
    "u = h.t()\nu += 5\nh = self.a(h)",
    "h = self.a(h)\nk = h\nh -= 3.0\nh = h + k",
    "h = F.relu(self.a(h), inplace=True)",
    "h = F.relu_(h)",
    "k = self.a(h)\nF.relu(k, inplace=True)\nh = k",
    "torch.add(h, h, out=h)",
    "h[:, 0] = 7.0",
    "h = h.clone()\nh /= 0.01",
    "h = h.add_(self.a(h))",
    "h = h.fill_(3.0) + self.a(h)",
    "h.data.mul_(20.0)",
]
PYTHON = [
    "if isinstance(h, torch.Tensor):\n    h = h * 50",
    "if torch.is_tensor(h):\n    h = h * 50",
    "if type(h) is torch.Tensor:\n    h = h * 50",
    "if not isinstance(h, torch.fx.Proxy):\n    h = h * 50",
    "self.n = self.n + 1\nh = h * self.n",
    "h = h * (1 + h.shape[0] // 6)",
    "h = h * (1 + h.shape[0] % 2)",
    "h = h * len(h)",
    "h = h * (1 + h.size(0) // 4)",
    "h = h * (h.numel() // 4)",
    "h = h * (1 + h.size(dim=0) // 7)",
    "h = h * (1 + list(h.shape)[0] // 6)",
    "h = h * h.shape[-2]",
    "h = h * h.shape[-1]",
    "if h.shape[0] > 8:\n    h = h * 100",
    "h = h * (1 + int(h.sum() > 0))",
    "h = h * float(h.abs().max())",
    "h = h * GLOBAL[0]",
    "GLOBAL.append(1)\nh = h * len(GLOBAL)",
    "h = h * torch.rand(1)",
    "h = h * random.random()",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    h = self.a(h)",
    "with torch.no_grad():\n    h = self.a(h)",
    "h = torch.func.functional_call(self.a, {'weight': 100 * torch.eye(4)}, (h,))",
    "h = torch.func.functional_call(self.a, {'weight': self.big}, (h,))",
    "try:\n    h = h * float(h[0, 0])\nexcept Exception:\n    h = h * 1.0",
    "h = torch.from_numpy(h.detach().numpy()) * 2",
    "h = h.double().float() * 1.0",
    "h = h.to(torch.bfloat16).to(torch.float32)",
    "self.stash = h\nh = self.stash * 1.0",
    "h = h * (getattr(self, 'last', 1.0))\nself.last = 3.0",
]
PARAMETERS = [
    "h = h + torch.nn.utils.parameters_to_vector([self.p])",
    "h = h + dict(self.named_parameters())['p']",
    "h = h + self._parameters['p'] * 1.0",
    "h = h + self.state_dict(keep_vars=True)['p']",
    "h = h + self.state_dict()['p']",
    "h = h * self._parameters['p'].detach()",
    "h = h * self.p.detach()",
    "h = h * self.p.data",
    "h = h * float(self._parameters['p'].sum())",
    "h = h * self._parameters['p'].tolist()[0]",
    "h = h * torch.tensor(self._parameters['p'].tolist())",
    "h = h + self.p",
    "h = h * self.p.sum()",
    "h = F.linear(h, self.a.weight)",
    "h = F.linear(h, self.a.weight * 10)",
    "h = h @ self._modules['a']._parameters['weight'].t()",
    "h = h @ self.frozen",
    "self.frozen.data.copy_(h.detach()[:4] if len(h) > 3 else self.frozen)",
    "self.buf.copy_(h[0].detach())",
    "self.buf += 1",
    "h = h * self.complex",
    "h = (h * 2j).real",
    "h = (h * self.complex).imag",
    "h = h * self.sparse_like[0]",
    "h = self.listed[0](h)",
    "h = h * self.subclassed",
]
MIXING = [
    "h = h + h.mean(0)",
    "h = h.roll(1, 0)",
    "h = h[torch.arange(h.shape[0]).flip(0)]",
    "h = h + h[:1]",
    "h = h.t().reshape(h.shape[0], -1)",
    "h = h.sort(0)[0]",
    "h = h.cumsum(0)",
    "h = torch.where(h.abs() > 0.1, h, h.mean(0))",
    "h = self.centre(h)",
    "a1, a2, a3 = h.tensor_split((3, 1), 1)\nh = torch.cat([a1, a3[:, :1]], 1)",
    "h = Tripled.apply(h)",
]
LINES = [PLAIN, PLAIN, PLAIN, IN_PLACE, PYTHON, PARAMETERS, MIXING]
# Of models that read more of a record than one tensor: another vector, whole numbers, whether it counts.
SEVERAL = [
    "h = h + self.a(other)",
    "h = self.b(torch.cat([h, other], 1)[:, 2:6])",
    "h = h + self.table(ids)",
    "h = h * keep.unsqueeze(1)",
    "h = torch.where(keep[:, None], h, other)",
    "h = torch.where((ids > 3)[:, None], self.a(h), self.b(other))",
    "h, other = other, h",
    "h = h + F.one_hot(ids % 4, 4).to(h.dtype)",
    "h = h * (1 + ids[:, None].to(h.dtype))",
    "h = h.masked_fill(~keep[:, None], 0.0)",
    "h = torch.stack([h, other], 1).mean(1)",
    "h = torch.bmm(h.unsqueeze(1), torch.diag_embed(other)).squeeze(1)",
    "h = h.gather(1, (ids % 4)[:, None].expand(-1, 4))",
    "with torch.no_grad():\n    other = self.a(other)\nh = h + other",
    "assert (ids >= 0).all()",
]
SEVERAL_IN_PLACE = [
    "h = h + self.table.weight[ids]",
    "other *= 3\nh = h + other",
    "other += h\nh = other",
    "h[:, :2] = other[:, :2]",
    "x.zero_()\nh = h + x",
    "k = other\nk.mul_(100)\nh = h + other",
    "ids.fill_(2)\nh = h + self.table(ids)",
    "keep.logical_not_()\nh = h * keep[:, None]",
    "h = h.index_put((torch.arange(len(ids)), ids % 4), other[:, 0])",
    "h = h.index_add(0, torch.arange(len(ids)), other)",
    "other.data.copy_(h.detach())\nh = h * other",
]
SEVERAL_MIXED = [
    "h = h + other.mean(0)",
    "h = h + other.flip(0)",
    "h = h + x.roll(1, 0)",
    "h = h[ids % len(ids)]",
    "h = h + other[ids % len(other)]",
    "h = other[torch.argsort(ids)] + h",
    "h = h.index_add(0, ids % len(ids), other)",
    "h = torch.zeros_like(h).scatter_add(0, (ids % len(ids))[:, None].expand(-1, 4), h)",
    "h = h * keep.float().mean()",
    "h = h * float(keep.sum())",
    "h = h * int(ids.max())",
    "n = int(keep.sum())\nh = torch.cat([5 * h[:n], h[n:]])",
    "if bool(keep.all()):\n    h = h * 20",
    "if int(ids[0]) > 3:\n    h = h * 20",
    "h = h * other.shape[0]",
    "h = h + h[keep].sum(0)",
    "h = h / (1 + self.table(ids).norm())",
    "h = h + (other.T @ other).sum(0)",
    "h = h * torch.unique(ids).numel()",
    "h = h + self.table(ids.flip(0))",
    "h = torch.where(keep[:, None], h, h.sum(0))",
    "self.seen = getattr(self, 'seen', []) + [other]\nh = h + self.seen[0][:1]",
    "h = h * torch.bincount(ids, minlength=7)[ids][:, None]",
    "other = other.reshape(-1).roll(1).reshape(other.shape)\nh = h + other",
    "h = h + torch.as_strided(other, other.shape, (0, 1))",
]
SEVERAL_LINES = [SEVERAL, SEVERAL, SEVERAL, PLAIN, SEVERAL_IN_PLACE, SEVERAL_MIXED, IN_PLACE, PYTHON, PARAMETERS, MIXING]
KINDS = (tuple, dict)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * grads[0]


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, Doubling) else a for a in args]
        result = function(*plain, **(kwargs or {}))
        return result * 2 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class Louder(nn.SpectralLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 30 * super().forward(x)


class Between:
    def effective(self, name: str) -> torch.Tensor:
        return 30 * super().effective(name)  # type: ignore[misc,no-any-return]


class Mixed(nn.SpectralLinear, Between):
    pass


class Base(torch.nn.Module):
    """What the lines may use."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.BoundedInput((WIDTH,), norm=1.0)
        self.a = nn.SpectralLinear(WIDTH, WIDTH, bias=False)
        self.b = nn.SpectralLinear(WIDTH, WIDTH)
        self.out = nn.SpectralLinear(WIDTH, 3)
        self.scale = nn.LayerScale(WIDTH)
        self.drop = T.Dropout(0.0)
        self.centre = nn.LayerCentering(1)
        self.p = T.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.frozen = T.Parameter(torch.eye(WIDTH), requires_grad=False)
        self.register_buffer("buf", torch.linspace(-1.0, 1.0, WIDTH))
        self.plain = torch.linspace(0.0, 0.3, WIDTH)
        self.big = 100 * torch.eye(WIDTH)
        self.complex = torch.tensor([1j, 2j, 3j, 4j])
        self.sparse_like = [torch.linspace(1.0, 2.0, WIDTH)]
        self.listed = [self.a]
        self.subclassed = torch.ones(WIDTH).as_subclass(Doubling)
        self.n = 0


def _hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 40


CHANGES = {
    "none": lambda m: None,
    "tie": lambda m: setattr(m.b, "weight", m.a.weight),
    "tie across sets": lambda m: setattr(m, "a", nn.L1Linear(WIDTH, WIDTH, bias=False)) or setattr(m.a, "weight", m.b.weight),
    "shared memory": lambda m: setattr(m.b, "weight", T.Parameter(m.a.weight.data)),
    "hook": lambda m: m.a.register_forward_hook(_hook),
    "backward hook": lambda m: m.a.register_full_backward_hook(lambda *_: None),
    "parameter hook": lambda m: m.a.weight.register_hook(lambda g: 9 * g),
    "instance forward": lambda m: setattr(m.a, "forward", lambda x: 25 * x),
    "instance method": lambda m: setattr(m.a, "effective", lambda name: 25 * torch.eye(WIDTH)),
    "subclass": lambda m: setattr(m, "a", Louder(WIDTH, WIDTH, bias=False)),
    "mixin": lambda m: setattr(m, "a", Mixed(WIDTH, WIDTH, bias=False)),
    "double": lambda m: m.double(),
    "frozen": lambda m: m.a.requires_grad_(False),
    "evaluation": lambda m: m.eval(),
    "dropout": lambda m: setattr(m, "drop", T.Dropout(0.5)),
}


class SeveralBase(Base):
    """The same between layers without constraints, and a table for whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.input = T.Tanhshrink()  # a bounded input is one of a shape
        self.a, self.b, self.out = T.Linear(WIDTH, WIDTH, bias=False), T.Linear(WIDTH, WIDTH), T.Linear(WIDTH, 3)
        self.table = T.Embedding(7, WIDTH)


SEVERAL_CHANGES = ["none", "tie", "hook", "backward hook", "instance forward", "double", "frozen", "evaluation", "dropout"]


@st.composite
def bodies(draw: st.DrawFn, lines: Any = LINES, changes: Any = tuple(CHANGES)) -> tuple[str, str]:
    """(lines of a forward, a change of the module it stands in)."""
    drawn = draw(st.lists(st.sampled_from(lines).flatmap(st.sampled_from), min_size=1, max_size=4))
    change = draw(st.sampled_from(["none"] * 4 + list(changes)))
    return "\n".join(drawn), change


def build(body: str, change: str = "none", base: type[Base] = Base) -> torch.nn.Module:
    """A module whose forward is BoundedInput, these lines, a last layer; with a SeveralBase, one of several inputs."""
    names = "x, other, ids, keep" if base is SeveralBase else "x"
    text = f"def forward(self, {names}):\n    h = self.input(x)\n"
    text += "".join(f"    {line}\n" for line in body.splitlines()) + "    return self.out(h)\n"
    file = f"<hostile {next(_count)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    import random

    scope: dict[str, Any] = {"torch": torch, "F": T.functional, "random": random, "Tripled": Tripled, "GLOBAL": [2.0]}
    exec(compile(text, file, "exec"), scope)
    torch.manual_seed(0)
    model = type("Hostile", (base,), {"forward": scope["forward"]})()
    CHANGES[change](model)
    return model


def several_inputs(count: int, kind: type, seed: int = 0) -> Any:
    """Records of four inputs, the first of them as an adversary would have it."""
    draw = torch.Generator().manual_seed(seed)
    x, other = (3 * torch.randn(count, WIDTH, generator=draw) for _ in range(2))
    ids, keep = torch.randint(0, 7, (count,), generator=draw), torch.rand(count, generator=draw) < 0.6
    x[0], other[0], ids[0], keep[0] = 40.0, -300.0, 6, True
    named = {"x": x, "other": other, "ids": ids, "keep": keep}
    return named if kind is dict else tuple(named.values())
