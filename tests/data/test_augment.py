from __future__ import annotations

import math
import queue
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import lipdp
from lipdp import losses, nn
from lipdp.bounds import analyse
from lipdp.clipping import per_example_norms
from lipdp.data import Augmentation, Compose, Flip, Identity, PrecomputedCopies, RandomCrop, Shifts, TestTimeAverage
from lipdp.data.augment import FixedAugmentation, Shift, copies_of
from lipdp.errors import ConfigurationError, DataError, LipdpNotice

SIX = Shifts([(0, 0), (2, 2), (-2, -2)], flip=True)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)


def _padded(x: torch.Tensor, p: int, mode: str) -> torch.Tensor:
    return F.pad(x, (p, p, p, p), mode="reflect") if mode == "reflect" else F.pad(x, (p, p, p, p))


AUGMENTATIONS = [
    Identity(),
    Flip(),
    SIX,
    Shifts([(1, 0)], mode="zeros"),
    RandomCrop(2, 3),
    RandomCrop(3, 2, mode="zeros", flip=False),
    Compose(Flip(), RandomCrop(1, 2, flip=False), Shifts([(0, 0), (0, 1)])),
]


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=repr)
def test_each_example_is_treated_on_its_own(augmentation: Augmentation) -> None:
    """Changing one example changes its copies only: what the sensitivity of the mean over copies rests on."""
    x = _images(5, 3, 6, 7)
    other = x.clone()
    other[2] = _images(3, 6, 7, seed=9)
    before, after = augmentation(x, _generator()), augmentation(other, _generator())
    assert before.shape == (5, augmentation.copies, 3, 6, 7)
    keep = [0, 1, 3, 4]
    assert torch.equal(before[keep], after[keep])
    assert not torch.equal(before[2], after[2])
    assert torch.equal(before, augmentation(x, _generator()))
    assert isinstance(augmentation, Augmentation)


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize("flip", [False, True])
def test_crops_are_crops_of_the_padded_image(mode: str, flip: bool) -> None:
    """Every copy is one of the (2p+1)² windows of torch's own padding, or its mirror; and all of them come up."""
    p, x = 1, _images(1, 2, 4, 5)
    windows = [_padded(x, p, mode)[0, :, i : i + 4, j : j + 5] for i in range(3) for j in range(3)]
    windows += [window.flip(-1) for window in windows] if flip else []
    copies = RandomCrop(p, 400, mode=mode, flip=flip)(x, _generator())[0]  # type: ignore[arg-type]
    found = torch.stack([(copies == window).all(dim=(1, 2, 3)) for window in windows])
    assert bool((found.sum(0) == 1).all())
    counts = found.sum(1)
    assert bool((counts > 0.4 * 400 / len(windows)).all()), counts


def test_draws_differ_between_examples_copies_and_generators() -> None:
    x = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(50, 1, 1, 1)
    copies = RandomCrop(3, 2, flip=False)(x, _generator())
    assert len(torch.unique(copies[:, 0, 0, 0, 0])) > 10
    assert not torch.equal(copies[:, 0], copies[:, 1])
    assert not torch.equal(copies, RandomCrop(3, 2, flip=False)(x, _generator(1)))


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, 0), (-1, 3), (1, -2)])
def test_shifts_against_padding(mode: str, down: int, right: int) -> None:
    x = _images(2, 3, 5, 6)
    expected = _padded(x, 3, mode)[..., 3 - down : 8 - down, 3 - right : 9 - right]
    assert torch.equal(Shift(down, right, mode=mode)(x), expected)  # type: ignore[arg-type]
    assert torch.equal(Shift(down, right, flip=True, mode=mode)(x), expected.flip(-1))  # type: ignore[arg-type]


def test_copies_and_order_of_a_composition() -> None:
    x = _images(2, 1, 4, 4)
    both = Compose(Flip(), Shifts([(0, 0), (1, 0)]))
    assert both.copies == 4
    made = both(x)
    assert torch.equal(made[:, 0], x)
    assert torch.equal(made[:, 1], Shift(1, 0)(x))
    assert torch.equal(made[:, 3], Shift(1, 0)(x.flip(-1)))
    stored = Flip()(x)
    assert torch.equal(Compose(PrecomputedCopies(2), Shifts([(0, 0), (1, 0)]))(stored), made)


def test_refusals() -> None:
    with pytest.raises(ConfigurationError, match="generator"):
        RandomCrop(1, 2)(_images(1, 1, 4, 4))
    with pytest.raises(DataError, match="reflection"):
        RandomCrop(4, 2)(_images(1, 1, 4, 4), _generator())
    with pytest.raises(DataError, match="images"):
        Flip()(_images(3, 4))
    with pytest.raises(DataError, match="first dimension"):
        PrecomputedCopies(3)(_images(5, 2, 4))
    with pytest.raises(ConfigurationError, match="random"):
        TestTimeAverage(torch.nn.Identity(), Compose(Flip(), RandomCrop(1, 2)))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError):
            RandomCrop(1, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mode"):
        Shifts([(0, 0)], mode="wrap")  # type: ignore[arg-type]


@given(down=st.integers(-4, 4), right=st.integers(-4, 4), flip=st.booleans(), mode=st.sampled_from(["reflect", "zeros"]))
@settings(max_examples=40, deadline=None)
def test_the_rule_of_a_shift_is_its_operator_norm(down: int, right: int, flip: bool, mode: str) -> None:
    """The matrix of the shift on 5×6 images, column by column: the rule's gain is its largest singular value."""
    shift = Shift(down, right, flip=flip, mode=mode)  # type: ignore[arg-type]
    matrix = shift(torch.eye(30, dtype=torch.float64).reshape(30, 5, 6)).reshape(30, 30)
    true = float(torch.linalg.matrix_norm(matrix, 2))
    claimed = analyse(torch.nn.Sequential(shift), 1.0, input_shape=(5, 6)).lipschitz
    assert true <= claimed * (1 + 1e-12)
    if true > 0:
        assert claimed == pytest.approx(true, rel=1e-9)


def _classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((1, 4, 4), norm=2.0), nn.Flatten(), nn.SpectralLinear(16, 8), nn.GroupSort(2), nn.SpectralLinear(8, 3)
    )


def test_mean_over_copies_stays_below_the_sensitivity() -> None:
    """The gradient of the mean over copies, attacked with inputs far outside the ball, against Δ of the model alone."""
    model, loss = _classifier().double(), losses.MulticlassKR()
    bounds = lipdp.sensitivities(model, loss)
    copies = RandomCrop(2, 4)(100 * _images(16, 1, 4, 4), _generator())
    y = torch.arange(16) % 3

    def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(outputs.flatten(0, 1), targets.repeat_interleave(4)).reshape(16, 4).mean(1)

    for row in range(16):
        value = mean_loss(torch.stack([model(c) for c in copies.unbind(0)]), y)[row]
        for (name, _), gradient in zip(model.named_parameters(), torch.autograd.grad(value, list(model.parameters())), strict=True):
            assert float(gradient.norm()) <= bounds[name] * (1 + 1e-9)


@pytest.mark.parametrize("augmentation", [Flip(), SIX, Compose(Flip(), Shifts([(0, 0), (1, 0)], mode="zeros"))], ids=repr)
def test_test_time_average(augmentation: Augmentation) -> None:
    model = _classifier().double()
    average = TestTimeAverage(model, augmentation)
    x = _images(6, 1, 4, 4)
    copies = augmentation(x)
    expected = model(copies.flatten(0, 1)).reshape(6, augmentation.copies, 3).mean(1)
    assert torch.allclose(average(x), expected, rtol=1e-12, atol=1e-12)


def test_certificates_of_the_average_are_those_of_its_views() -> None:
    """Mirrors keep the constant; reflected shifts raise it by √2 an axis, and the certificate falls accordingly."""
    model = _classifier()
    one = analyse(model, 1.0).lipschitz
    assert analyse(TestTimeAverage(model, Flip()), 1.0, input_shape=(1, 4, 4)).lipschitz == pytest.approx(one)
    shifted = TestTimeAverage(model, Shifts([(0, 0), (2, 0), (2, 2)]))
    assert analyse(shifted, 1.0, input_shape=(1, 4, 4)).lipschitz == pytest.approx(one * (1 + math.sqrt(2) + 2) / 3)
    x = _images(20, 1, 4, 4).float()
    labels = shifted(x).argmax(1)
    radii = lipdp.certify(shifted, x, labels)
    assert bool((radii > 0).any())
    for seed in range(5):
        step = _images(20, 1, 4, 4, seed=seed).float()
        step = step / step.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1) * radii.reshape(-1, 1, 1, 1).to(step) * 0.999
        assert torch.equal(shifted(x + step).argmax(1), labels)


def test_gradient_of_the_average_is_bounded_too() -> None:
    """Trained through, an averaging model still has a proved Δ."""
    model = TestTimeAverage(_classifier().double(), Shifts([(0, 0), (1, 1)]))
    loss = losses.CrossEntropy()
    bound = math.hypot(*analyse(model, loss, input_shape=(1, 4, 4)).sensitivities.values())
    norms = per_example_norms(model, loss, 50 * _images(8, 1, 4, 4), torch.arange(8) % 3)
    assert float(norms.max()) <= bound


class Own:
    """An augmentation of somebody's own, one copy."""

    copies = 1

    def __init__(self, function):
        self.function = function

    def __call__(self, x, generator=None):
        return self.function(x, generator)[:, None]


class View(torch.nn.Module):
    def forward(self, x):
        return x * (1 - 2 * (x.max() > 50).to(x.dtype))


def _rotated(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    angle = torch.rand(len(x), generator=draw)
    turn = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), 0 * angle], 1), torch.stack([angle.sin(), angle.cos(), 0 * angle], 1)], 1
    )
    return F.grid_sample(x, F.affine_grid(turn.to(x), list(x.shape), align_corners=False), align_corners=False)


MIXING = {
    "mixup": Own(lambda x, g: 0.5 * (x + x[torch.randperm(len(x), generator=g)])),
    "a statistic": Own(lambda x, g: x - x.mean(0)),
    "where one is large": Own(lambda x, g: torch.where(x.amax() > 50, -x, x)),
    "a number that is read": Own(lambda x, g: x * (2.0 if float(x.amax()) > 50 else 1.0)),
    "among others": Compose(Flip(), Own(lambda x, g: x.roll(1, 0))),
    "a view": FixedAugmentation([torch.nn.Identity(), View()]),
    "numbers drawn until one fits": Own(
        lambda x, g: x + 0 * torch.poisson(x.clamp(min=0), generator=g) + torch.rand(x.shape, generator=g)
    ),
}
APART = {
    "noise": Own(lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g, dtype=x.dtype)),
    "turned": Own(_rotated),
    "cut out": Own(lambda x, g: x * (torch.rand(len(x), 1, *x.shape[2:], generator=g) > 0.2)),
    "brightness": Own(lambda x, g: x * (1 + 0.2 * torch.rand(len(x), 1, 1, 1, generator=g))),
    "turned by a right angle": Own(lambda x, g: torch.rot90(x, 1, (2, 3))),
    "by its median": Own(lambda x, g: x - x.flatten(1).quantile(0.5, dim=1)[:, None, None, None]),
    "in steps": Own(lambda x, g: torch.bucketize(x, torch.linspace(0, 1, 5)) / 4),
    "columns left out": Own(lambda x, g: F.pad(x[..., torch.arange(4) != 2], (0, 1))),
    "noise by torch.normal": Own(lambda x, g: torch.normal(x, 0.1, generator=g)),
    "normalised": Own(lambda x, g: (x - x.mean((1, 2, 3), keepdim=True)) / (x.std((1, 2, 3), keepdim=True) + 1e-3)),
    "one by one": Compose(
        Flip(), Own(lambda x, g: torch.stack([one.roll(int(torch.randint(4, (), generator=g)), 2) for one in x]))
    ),
    "each among others": Compose(Own(lambda x, g: x.flip(3)), Flip(), RandomCrop(1, 2)),
}


@pytest.mark.parametrize("method", ["clipless", "bookkeeping", "naive"])
@pytest.mark.parametrize("name", [*MIXING, *APART])
def test_copies_depend_on_their_own_example_alone(name: str, method: str) -> None:
    """Somebody's own augmentation is followed: mixup is refused, at whatever door it comes in."""
    torch.manual_seed(0)
    clipless = method == "clipless"
    loss = losses.CrossEntropy(tau=4.0) if clipless else torch.nn.CrossEntropyLoss(reduction="none")
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    model = nn.Sequential(nn.BoundedInput((1, 4, 4)), torch.nn.Flatten(), nn.SpectralLinear(16, 3)) if clipless else own
    plan = lipdp.plan(
        model, loss, dataset_size=100, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=3, accountant="rdp",
        method=method, max_grad_norm=None if clipless else 1.0,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lipdp.PrivacyEngine(model, loss, optimizer, plan, augmentation={**MIXING, **APART}[name]) as engine:
        if name in APART:
            engine.step(torch.rand(8, 1, 4, 4), torch.arange(8) % 3, sample="own")
        else:
            with pytest.raises(DataError, match=r"may mix examples"):
                engine.step(torch.rand(8, 1, 4, 4), torch.arange(8) % 3, sample="own")


def _cropped(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    crops = []
    for picture in F.pad(x, (1, 1, 1, 1)):
        i, j = torch.randint(0, 3, (2,), generator=draw).tolist()
        crops.append(picture[:, i : i + 4, j : j + 4])
    return torch.stack(crops)


def _cut_out(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    for picture in x:
        at = int(torch.randint(0, 3, (), generator=draw))
        picture[:, at : at + 2] = 0
    return x


def _mirrored_by_mask(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(len(x), generator=draw) < 0.5
    x[chosen] = x[chosen].flip(3)
    return x


def _noisy_where_bright(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """How many numbers an example draws is told by what is in it."""
    rows = [one + torch.randn(one.shape, generator=draw) if float(one.sum()) > 50 else one for one in x]
    return torch.stack([row + torch.rand((), generator=draw) + random.random() + np.random.rand() for row in rows]).to(x.dtype)  # noqa: NPY002


LOOPS = {
    "mirrored": lambda x, g: torch.stack([one.flip(-1) if torch.rand((), generator=g) < 0.5 else one for one in x]),
    "mirrored by Python's numbers": lambda x, g: torch.stack([one.flip(-1) if random.random() < 0.5 else one for one in x]),
    "cropped": _cropped,
    "cut out in place": _cut_out,
    "by numpy": lambda x, g: torch.from_numpy(np.ascontiguousarray(x.numpy()[..., ::-1])),
    "noisy where it is bright": _noisy_where_bright,
    "mirrored by a mask": lambda x, g: _mirrored_by_mask(x, g),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_examples_are_given_them_one_by_one(name: str) -> None:
    """Whatever the others are, an example's copies are the same; once a notice says so."""
    own, x = Own(LOOPS[name]), torch.rand(6, 1, 4, 4)
    others = torch.cat([x[:1], x[1:] + 60])
    with pytest.warns(LipdpNotice, match=r"by itself, more slowly"):
        first = copies_of(own, x.clone(), _generator(3))
    torch.rand(5)
    assert torch.equal(first, copies_of(own, x.clone(), _generator(3)))
    assert torch.equal(first[:1], copies_of(own, others, _generator(3))[:1])
    assert first.shape == (6, 1, 1, 4, 4)
    if name != "by numpy":
        assert not torch.equal(first, copies_of(own, x.clone(), _generator(4)))
        same = copies_of(own, x[:1].repeat(32, 1, 1, 1), _generator(3))
        assert len({tuple(one.flatten().tolist()) for one in same}) > 1  # each draws for itself


class Remembering:
    """Each example with a part of the one before it."""

    copies = 1

    def __init__(self) -> None:
        self.before = [0.0]

    def __call__(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        rows = []
        for one in x:
            rows.append(one + self.before[0])
            self.before[0] = float(one.sum())
        return torch.stack(rows)[:, None]


@pytest.mark.parametrize("place", ["an attribute", "a list", "a function"])
def test_what_was_seen_of_one_example_scales_no_others(place: str) -> None:
    """Of a batch of one nothing is followed: a number that it left was found by the next, as if it were a constant."""
    kept: list[float] = []

    def scaled(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        held = {"an attribute": own.__dict__.setdefault("kept", []), "a list": kept}.get(place, scaled.__dict__.setdefault("k", []))
        if len(x) == 1 and not held and bool(x.max() > 1):
            held.append(float(x.max()))
        return x * (held[0] if held else 1.0)

    found = []
    for other in (2.0, 50.0):
        own = Own(scaled)
        kept.clear(), scaled.__dict__.clear()
        torch.manual_seed(0)
        batch = torch.rand(3, 1, 4, 4)
        copies_of(own, batch, _generator())
        copies_of(own, torch.full((1, 1, 4, 4), other), _generator())
        found.append(copies_of(own, batch, _generator()))
    assert torch.equal(*found)


def test_what_one_example_hands_on_to_the_next_is_refused() -> None:
    """A large one is remembered by the next, and forgotten: behind all of them nothing has changed."""
    kept = [0.0]

    def handed_on(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        rows = []
        for one in x:
            rows.append(one + kept[0])
            kept[0] = float(one.sum()) if float(one.max()) > 20 else 0.0
        return torch.stack(rows)

    own, x = Own(handed_on), torch.rand(6, 1, 4, 4)
    with pytest.warns(LipdpNotice):
        copies_of(own, x, _generator())
    x[2] += 50
    with pytest.raises(DataError, match=r"keeps something from one to the next"):
        copies_of(own, x, _generator())


def test_loops_that_keep_something_are_refused() -> None:
    own = Remembering()
    for _ in range(2):
        with pytest.warns(LipdpNotice), pytest.raises(DataError, match=r"keeps something from one to the next"):
            copies_of(own, torch.rand(4, 1, 4, 4), _generator())


def test_one_example_of_a_batch_leads_to_no_other() -> None:
    reaching = Own(lambda x, g: x + (x if x._base is None else x._base).mean())
    batch = torch.rand(4, 1, 4, 4)
    first = copies_of(reaching, batch[:1], _generator())
    batch[1:] += 5
    assert torch.equal(first, copies_of(reaching, batch[:1], _generator()))


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(DataError, match=r"Own gives ndarray, not a tensor"):
        copies_of(Own(lambda x, g: x.numpy()), torch.rand(4, 1, 4, 4), _generator())


@pytest.mark.parametrize("key", ["FuncTorchBatched", "CPU"])
def test_what_vmap_takes_instead_of_operations_replaces_none(key: str) -> None:
    """torch registers its own where torch.vmap is first called, in the middle of a pass."""
    library = torch.library.Library(f"lipdp_tests_{key.lower()}", "DEF")
    library.define("same(Tensor x) -> Tensor")

    def mirrored(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        if len(x) > 1:  # the made-up one is not followed
            library.impl("same", lambda x: x, key)
        return x.flip(-1)

    if key == "CPU":
        with pytest.raises(DataError, match=r"an operation is replaced"):
            copies_of(Own(mirrored), torch.rand(4, 1, 4, 4), _generator())
    else:
        assert len(copies_of(Own(mirrored), torch.rand(4, 1, 4, 4), _generator())) == 4


def test_what_is_called_again_begins_anew() -> None:
    """A thread ran beside it by chance; it writes into the pictures that it gets."""
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()  # a list would begin anew, too

    def brighter(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        if len(x) > 1:
            calls.put(len(x))
            if calls.qsize() == 1:
                thread = threading.Thread(target=sum, args=([1],))
                thread.start()
                thread.join()
        return x.add_(1)

    x = torch.rand(4, 1, 4, 4)
    before = x.clone()
    assert torch.equal(copies_of(Own(brighter), x, _generator()), before[:, None] + 1)
    assert calls.qsize() == 2
    assert torch.equal(x, before)
