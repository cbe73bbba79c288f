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


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str]:
    """(lines of a forward, a change of the module it stands in)."""
    lines = draw(st.lists(st.sampled_from(LINES).flatmap(st.sampled_from), min_size=1, max_size=4))
    change = draw(st.sampled_from(["none"] * 4 + list(CHANGES)))
    return "\n".join(lines), change


def build(body: str, change: str = "none") -> torch.nn.Module:
    """A module whose forward is BoundedInput, these lines, a last layer."""
    text = "def forward(self, x):\n    h = self.input(x)\n"
    text += "".join(f"    {line}\n" for line in body.splitlines()) + "    return self.out(h)\n"
    file = f"<hostile {next(_count)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    import random

    scope: dict[str, Any] = {"torch": torch, "F": T.functional, "random": random, "Tripled": Tripled, "GLOBAL": [2.0]}
    exec(compile(text, file, "exec"), scope)
    torch.manual_seed(0)
    model = type("Hostile", (Base,), {"forward": scope["forward"]})()
    CHANGES[change](model)
    return model
