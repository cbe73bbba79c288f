"""Rows that were computed before are not computed again, and everything else is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import nn
from lipdp.bounds.propagate import program_of
from lipdp.errors import UnsupportedError
from lipdp.program import check, check_program
from lipdp.program.remember import Remembering, Repeating
from tests.many import examples

SIZES = (1, 2, 3, 5, 8)


def layers(kind: str, bias: bool) -> tuple[torch.nn.Module, tuple[int, ...]]:
    made = {
        "linear": lambda: (torch.nn.Linear(6, 4, bias=bias), (6,)),
        "tokens": lambda: (torch.nn.Linear(6, 4, bias=bias), (3, 6)),
        "conv1d": lambda: (torch.nn.Conv1d(3, 4, 3, padding=1, dilation=2, bias=bias), (3, 9)),
        "conv2d": lambda: (torch.nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=bias), (4, 7, 7)),
        "circular": lambda: (torch.nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular", bias=bias), (3, 6, 6)),
        "same": lambda: (torch.nn.Conv2d(3, 5, 3, padding="same", bias=bias), (3, 6, 6)),
        "conv3d": lambda: (torch.nn.Conv3d(2, 3, 2, bias=bias), (2, 4, 4, 4)),
    }
    return made[kind]()


def gradients(layer, x, cotangent, into_x=True):
    x = x.clone().requires_grad_(into_x)
    y = layer(x)
    wanted = [*layer.parameters(), *([x] if into_x else [])]
    return [y.detach(), *torch.autograd.grad(y, wanted, cotangent)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "tokens", "conv1d", "conv2d", "circular", "same", "conv3d"])
def test_outputs_and_gradients_are_torchs_own(kind, bias):
    layer, shape = layers(kind, bias)
    layer, x = layer.double(), torch.randn(8, *shape, dtype=torch.float64)
    cotangent = torch.randn(layer(x).shape, dtype=torch.float64)
    with Remembering(SIZES):
        # The largest first, then prefixes, then rows from the middle; then once more, with and without a gradient for x.
        for rows in (slice(0, 8), *(slice(0, n) for n in SIZES), slice(2, 3), slice(3, 8), slice(0, 8)):
            for into_x in (True, False):
                found = gradients(layer, x[rows], cotangent[rows], into_x)
                with torch._C.DisableTorchFunction():
                    wanted = gradients(layer, x[rows], cotangent[rows], into_x)
                for a, b in zip(found, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@given(
    st.lists(st.sampled_from(["weight", "bias", "data", "rows", "autocast", "none"]), min_size=1, max_size=6), st.integers(0, 2**20)
)
@settings(max_examples=examples(20), deadline=None)
def test_what_has_changed_is_computed_anew(changes, seed):
    torch.manual_seed(seed)
    layer, x = torch.nn.Conv2d(2, 3, 3), torch.randn(8, 2, 5, 5)
    with Remembering(SIZES):
        layer(x)
        for change in changes:
            with torch.no_grad():
                if change == "weight":
                    layer.weight[0, 0, 0, 0] += 1
                elif change == "bias":
                    layer.bias.data[1] *= 2
                elif change == "data":
                    x.data[3, 1] *= 7  # behind the version counter
                elif change == "rows":
                    x = x.flip(0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
                found = layer(x)
                with torch._C.DisableTorchFunction():
                    wanted = layer(x)
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_results_can_be_written_to():
    layer, x = torch.nn.Conv2d(2, 3, 3), torch.randn(8, 2, 5, 5)
    with Remembering(SIZES), torch.no_grad():
        first = layer(x)
        kept = first.clone()
        first.mul_(100)
        second = layer(x)
        assert torch.equal(second, kept)
        second.zero_()
        assert torch.equal(layer(x[:3]), kept[:3])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "tokens", "conv1d", "conv2d", "circular", "same", "conv3d"])
def test_rows_that_are_all_the_same_go_through_once(kind, bias):
    layer, shape = layers(kind, bias)
    layer, row = layer.double(), torch.randn(1, *shape, dtype=torch.float64)
    same, other = row.repeat(4, *[1] * len(shape)), row.repeat(4, *[1] * len(shape))
    other[3] += 1
    with torch.no_grad():
        wanted = [layer(same), layer(other), layer(row)]
        with Repeating():
            found = [layer(same), layer(other), layer(row)]
    for a, b in zip(found, wanted, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with Repeating():
        assert layer(same).requires_grad  # with gradients everything is torch's own


def test_gradients_of_gradients():
    layer, x = torch.nn.Conv2d(2, 3, 3, bias=False).double(), torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def penalty():
        (slope,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
        return torch.autograd.grad((slope**2).sum(), layer.weight)[0]

    with Remembering(SIZES):
        found = penalty()
    torch.testing.assert_close(found, penalty())


class OfTheSize(torch.nn.Module):
    """Computes something else for some numbers of records, which the graph can't show."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__()
        self.first = nn.SpectralConv2d(1, 2, 3, padding=1, bias=False)
        self.second = nn.SpectralConv2d(2, 2, 3, padding=1, bias=False)
        self.size, self.how = size, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if isinstance(x, torch.Tensor) and x.shape[0] == self.size:
            h = {
                "detach": lambda: h.detach(),
                "scale": lambda: h * 1.01,
                "write": lambda: h.data.mul_(1.01),
                "roll": lambda: h.roll(1, 1),
            }[self.how]()
        return self.second(h).flatten(1)


@pytest.mark.parametrize("heavy", [True, False])
@pytest.mark.parametrize("how", ["detach", "scale", "write", "roll"])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_compared(size, how, heavy, monkeypatch):
    monkeypatch.setattr(check, "_HEAVY", -1 if heavy else float("inf"))
    model = torch.nn.Sequential(nn.BoundedInput((1, 4, 4)), OfTheSize(size, how))
    with pytest.raises(UnsupportedError, match=f"for {size} random examples"):
        check_program(program_of(model, None))


class Mixes(torch.nn.Module):
    """A convolution whose rows are mixed before or behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x - 0.1 * x.mean(0, keepdim=True))


def test_mixed_records_are_seen(monkeypatch):
    monkeypatch.setattr(check, "_HEAVY", -1)
    model = torch.nn.Sequential(nn.BoundedInput((1, 4, 4)), Mixes())
    program = program_of.__globals__["trace"](
        model, None, lambda m: type(m) if isinstance(m, (Mixes, nn.BoundedInput)) else None, lambda *_: None
    )
    with pytest.raises(UnsupportedError, match="in company than alone"):
        check_program(program)
