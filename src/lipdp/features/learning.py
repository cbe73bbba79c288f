"""How a network learns from drawings, without labels: two views of a drawing should look alike to it, those of two should not.

The loss is the contrastive one of Chen et al. (2020): for views z_i on the unit sphere with partner p(i),
−log(exp(⟨z_i, z_p(i)⟩/τ)/Σ_{k≠i} exp(⟨z_i, z_k⟩/τ)). A small network learns to foretell what a large one makes of a view.

A view is a crop of a fifth to all of the area, turned and mirrored, then changed in light and colour, blurred, sometimes grey,
with a little noise. All numbers come from one generator; an image's views depend on that image and on nothing else.

Every number depends on the lesson's seed and the step alone (not on what was drawn before), so that a run which was stopped and
resumed is the run that was not, up to the rounding of the device.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from lipdp._files import PUBLIC, written_whole
from lipdp._numerics import Undrawn
from lipdp.errors import ConfigurationError
from lipdp.features.drawings import draw_images
from lipdp.features.learned import NetworkShape, ResidualNetwork

_BETWEEN_SAVES = 60.0  # seconds
_PER_DRAW = 1024  # drawings that are made together
_VIEWS_SEED = 10**9  # apart from the seeds of drawings
# Of a view: the least share of the area, the most by which sides may differ and it may be turned, how often it is grey or blurred.
_LEAST_AREA = 0.2
_ASPECT = 4 / 3
_TURN = math.pi / 9
_GREY, _BLURRED = 0.2, 0.5

Watch = Callable[[int, float, float], None]
"""Is told the step, the loss and how often a view finds its partner first (or the share of the teacher's energy foretold)."""


@dataclass(frozen=True)
class Lesson:
    """What a network is taught with.

    Attributes:
        steps: of the optimiser.
        batch: drawings in a step.
        view: pixels of a view along each side.
        canvas: pixels of a drawing along each side.
        pool: drawings that are at hand; each step takes some of them.
        refresh: after so many steps a thousand of them are replaced by new ones.
        rate: highest learning rate.
        warm: steps until it is reached; it falls along half a cosine after that.
        decay: of the weights.
        temperature: τ.
        seed: of everything; public.
    """

    steps: int = 10_000
    batch: int = 1024
    view: int = 32
    canvas: int = 64
    pool: int = 65_536
    refresh: int = 16
    rate: float = 0.4
    warm: int = 300
    decay: float = 2e-4
    temperature: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what can't be taught."""
        for name in ("steps", "batch", "view", "canvas", "pool", "refresh"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"a lesson's {name} must be at least 1, not {getattr(self, name)!r}")
        if self.batch < 2 or self.pool < self.batch:
            raise ConfigurationError(
                f"a lesson of batches of {self.batch} needs two drawings and a pool of as many, not {self.pool}"
            )
        if not (self.rate > 0 and self.temperature > 0 and self.decay >= 0):
            raise ConfigurationError("a lesson needs a positive rate and temperature, and a decay of at least 0")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: up a line, then down half a cosine."""
        if step < self.warm:
            return self.rate * (step + 1) / self.warm
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - self.warm) / max(1, self.steps - self.warm)))


class _Pool:
    """Drawings at hand. Batch number n of the stream sits in slot n mod (slots) until the next one comes to that slot."""

    def __init__(self, lesson: Lesson, step: int, device: torch.device) -> None:
        self._lesson, self._device = lesson, device
        self._each = min(_PER_DRAW, lesson.pool)
        self._slots = max(1, lesson.pool // self._each)
        drawn = self._slots + step // lesson.refresh
        self._images = torch.empty(self._slots * self._each, 3, lesson.canvas, lesson.canvas, dtype=torch.uint8, device=device)
        for number in range(drawn - self._slots, drawn):
            self._put(number)

    def _put(self, number: int) -> None:
        seed = self._lesson.seed * 1_000_003 + number
        start = (number % self._slots) * self._each
        drawings = draw_images(self._each, self._lesson.canvas, seed, device=self._device)
        self._images[start : start + self._each] = (drawings * 255).round().to(torch.uint8)

    def views(self, step: int, count: int) -> list[torch.Tensor]:
        """``count`` views of the drawings of a step, which follow from its number; then new drawings come in where it is time."""
        lesson = self._lesson
        draw = torch.Generator(self._device).manual_seed(_VIEWS_SEED + lesson.seed * 1_000_003 + step)
        chosen = torch.randperm(len(self._images), generator=draw, device=self._device)[: lesson.batch]
        images = self._images[chosen].float() / 255
        views = [random_views(images, lesson.view, draw) for _ in range(count)]
        if (step + 1) % lesson.refresh == 0:
            self._put(self._slots + (step + 1) // lesson.refresh - 1)
        return views


def random_views(images: torch.Tensor, size: int, draw: torch.Generator) -> torch.Tensor:
    """One random view (batch, 3, size, size) of each drawing (batch, 3, height, width) with values in [0, 1]; around 0.

    Args:
        images: drawings, on the generator's device.
        size: pixels of a view along each side.
        draw: where the numbers come from.
    """
    numbers = torch.rand(len(images), 24, generator=draw, device=images.device)
    views = _crops(images, size, numbers[:, :6])
    views = _blurred(_recoloured(views, numbers[:, 6:20]), numbers[:, 20:22])
    noise = torch.randn(views.shape, generator=draw, device=views.device)
    return views - 0.5 + 0.05 * (numbers[:, 22] * numbers[:, 23])[:, None, None, None] * noise


def _crops(images: torch.Tensor, size: int, numbers: torch.Tensor) -> torch.Tensor:
    """Rectangles of a random area, shape and place, turned and mirrored at random, brought to one size."""
    area = _LEAST_AREA + (1 - _LEAST_AREA) * numbers[:, 0]
    aspect = torch.exp((2 * numbers[:, 1] - 1) * math.log(_ASPECT))
    width, height = ((area * ratio).sqrt().clamp_max(1) for ratio in (aspect, 1 / aspect))
    right, down = ((2 * number - 1) * (1 - part) for number, part in ((numbers[:, 2], width), (numbers[:, 3], height)))
    turn = (2 * numbers[:, 4] - 1) * _TURN
    mirror = torch.where(numbers[:, 5] < 0.5, -1.0, 1.0)
    cosine, sine = torch.cos(turn), torch.sin(turn)
    rows = (cosine * width * mirror, -sine * height, right, sine * width * mirror, cosine * height, down)
    grid = F.affine_grid(torch.stack(rows, 1).reshape(-1, 2, 3), [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _recoloured(views: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Light and contrast changed, channels mixed by a random matrix near the identity, a fifth of them made grey."""

    def each(number: int, low: float, high: float) -> torch.Tensor:
        return (low + (high - low) * numbers[:, number])[:, None, None, None]

    mixing = torch.eye(3, device=views.device) + 0.5 * (numbers[:, :9].reshape(-1, 3, 3) - 0.5)
    mixing = mixing / mixing.sum(2, keepdim=True)  # grey stays grey
    views = torch.einsum("bij,bjhw->bihw", mixing, views)
    grey = views.mean(1, keepdim=True)
    saturation = each(9, 0.2, 1.6) * (numbers[:, 10] > _GREY).float()[:, None, None, None]
    views = grey + saturation * (views - grey)
    mean = views.mean((1, 2, 3), keepdim=True)
    return mean + each(11, 0.5, 1.5) * (views - mean) + each(12, -0.2, 0.2) + each(13, -0.1, 0.1) * grey


def _blurred(views: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Half of them mixed with their own blur."""
    line = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=views.device) / 16
    kernel = torch.outer(line, line).expand(3, 1, 5, 5)
    soft = F.conv2d(F.pad(views, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)
    share = (numbers[:, 0] * (numbers[:, 1] < _BLURRED).float())[:, None, None, None]
    return views + share * (soft - views)


def contrastive_loss(first: torch.Tensor, second: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss, share of views whose partner is the nearest) of two views' projections, row by row partners."""
    z = F.normalize(torch.cat([first, second]).float(), dim=1)
    likeness = z @ z.T / temperature
    likeness = likeness.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(first))
    return F.cross_entropy(likeness, partner), (likeness.argmax(1) == partner).float().mean()


def learn(
    shape: NetworkShape,
    lesson: Lesson,
    *,
    device: torch.device | str = "cpu",
    checkpoint: str | os.PathLike[str] | None = None,
    watch: Watch | None = None,
) -> ResidualNetwork:
    """A network that has had the whole lesson.

    Args:
        shape: of the network.
        lesson: what it is taught with.
        device: where to compute; on a GPU in bfloat16 where that is safe.
        checkpoint: a file that is written now and then, and read where it is there: the lesson then goes on.
        watch: is told how it goes.
    """
    with Undrawn():
        torch.manual_seed(lesson.seed)
        network = ResidualNetwork(shape, learning=True)
        projector = _projector(shape.widths[-1])
    model = nn.ModuleDict({"network": network, "projector": projector})

    def loss(pool: _Pool, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = pool.views(step, 2)
        both = torch.cat([first, second]).contiguous(memory_format=torch.channels_last)
        projected = projector(network(both)[-1].mean((2, 3)))
        first, second = projected.float().chunk(2)
        return contrastive_loss(first, second, lesson.temperature)

    _teach(model, loss, lesson, torch.device(device), checkpoint, watch)
    return network.eval()


def _projector(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 1024, bias=False), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256, bias=False), nn.BatchNorm1d(256)
    )


def learn_from(
    teacher: nn.Module,
    shape: NetworkShape,
    lesson: Lesson,
    *,
    device: torch.device | str = "cpu",
    checkpoint: str | os.PathLike[str] | None = None,
    watch: Watch | None = None,
) -> ResidualNetwork:
    """A network (of ``shape``) from whose last two stages those of a ``teacher`` follow linearly, as well as it can.

    Both are averaged over cells (4 × 4 of the last stage but one, 2 × 2 of the last), and the teacher's square roots are brought to
    deviation 1 in every batch; the loss is the mean squared error of a linear guess.
    """
    place = torch.device(device)
    teacher = teacher.to(place).eval().requires_grad_(False)
    with Undrawn():
        torch.manual_seed(lesson.seed)
        network = ResidualNetwork(shape, learning=True)
        with torch.no_grad():
            widths = [maps.shape[1] for maps in teacher(torch.zeros(1, 3, lesson.view, lesson.view, device=place))[-2:]]
        guesses = nn.ModuleList([nn.Linear(own, other) for own, other in zip(shape.widths[-2:], widths, strict=True)])
    model = nn.ModuleDict({"network": network, "guesses": guesses})

    def loss(pool: _Pool, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        views = pool.views(step, 1)[0].contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            wanted = [_cells(maps, cells) for maps, cells in zip(teacher(views)[-2:], (4, 2), strict=True)]
        own = [_cells(maps, cells) for maps, cells in zip(network(views)[-2:], (4, 2), strict=True)]
        errors = []
        for guess, mine, other in zip(guesses, own, wanted, strict=True):
            mean, std = other.mean((0, 1)), other.std((0, 1)).clamp_min(1e-3)
            errors.append(((guess(mine).float() - (other - mean) / std) ** 2).mean())
        error = torch.stack(errors).mean()
        return error, 1 - error.detach()

    _teach(model, loss, lesson, place, checkpoint, watch)
    return network.eval()


def _cells(maps: torch.Tensor, cells: int) -> torch.Tensor:
    """(batch, cells², channels): square roots of averages."""
    return torch.sqrt(F.adaptive_avg_pool2d(maps.float(), cells) + 1e-5).flatten(2).transpose(1, 2)


def _teach(
    model: nn.ModuleDict,
    loss: Callable[[_Pool, int], tuple[torch.Tensor, torch.Tensor]],
    lesson: Lesson,
    device: torch.device,
    checkpoint: str | os.PathLike[str] | None,
    watch: Watch | None,
) -> None:
    """The loop of both kinds of lesson: SGD with momentum, saved now and then."""
    model.to(device).train()
    for weight in (w for w in model.parameters() if w.ndim == 4):
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=lesson.rate, momentum=0.9, weight_decay=lesson.decay, nesterov=True)
    file = None if checkpoint is None else Path(checkpoint)
    begin = 0 if file is None or not file.exists() else _restore(file, model, optimizer, lesson)
    pool, saved = _Pool(lesson, begin, device), time.monotonic()
    for step in range(begin, lesson.steps):
        for group in optimizer.param_groups:
            group["lr"] = lesson.rate_at(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value, right = loss(pool, step)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        optimizer.step()
        if watch is not None and (step % 100 == 0 or step + 1 == lesson.steps):
            watch(step, float(value.detach()), float(right))
        if file is not None and time.monotonic() - saved > _BETWEEN_SAVES:
            _save(file, model, optimizer, lesson, step + 1)
            saved = time.monotonic()


def _save(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, lesson: Lesson, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lesson": asdict(lesson), "step": step}
    with written_whole(file, PUBLIC) as stream:
        torch.save(state, stream)


def _restore(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, lesson: Lesson) -> int:
    state = torch.load(file, map_location="cpu", weights_only=True)
    if state["lesson"] != asdict(lesson):
        raise ConfigurationError(f"'{file}' holds another lesson, {state['lesson']}; delete it, or take another file")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
