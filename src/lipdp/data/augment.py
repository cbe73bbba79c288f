"""Augmentation multiplicity: each example becomes K copies, and its gradient is the mean of theirs.

Copies do not change the sensitivity: each copy's gradient is at most Δ long (the bound holds for *every* input), and the mean of
K vectors of norm ≤ Δ has norm ≤ Δ. What has to hold is that an example's copies depend on that example and on public randomness
only. So nothing here mixes examples (no mixup), and random draws are independent of the data and, from one example to
the next, of each other.

An augmentation maps ``(batch, *shape)`` to ``(batch, K, *shape)``. Where pixels are moved, the last two dimensions are rows and
columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from lipdp._checks import one_of, whole
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.data.alone import alone_or_together
from lipdp.errors import ConfigurationError, DataError


@runtime_checkable
class Augmentation(Protocol):
    """K copies of each example, a function of the example and the generator alone."""

    @property
    def copies(self) -> int:
        """K."""
        ...

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(batch, *shape) to (batch, K, *shape). Random augmentations need the generator, fixed ones ignore it."""
        ...


def copies_of(augmentation: Augmentation, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """(batch, …) to (batch, K, …). One of the user's own is followed: each copy has to depend on its own example alone.

    Where that can't be followed because it takes the examples out of the batch (a loop over pictures, numpy), it is given each by
    itself, with random numbers of that example's own.
    """
    if _is_ours(augmentation):
        return augmentation(x, generator)
    copies = alone_or_together(augmentation, x, generator)
    if not isinstance(copies, Tensor):
        raise DataError(
            f"the augmentation {type(augmentation).__name__} gives {type(copies).__name__}, not a tensor (batch, copies, …)"
        )
    return copies


def _is_ours(augmentation: object) -> bool:
    """Whether it is one of this library's, of views that are too; what :class:`Compose` is made of is asked by itself."""
    if type(augmentation).__module__ != __name__:
        return False
    parts = [part for view in getattr(augmentation, "views", ()) for part in view.modules()]
    known = all(type(part).__module__ == __name__ or type(part) is torch.nn.Identity for part in parts)
    return known and not any("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks for part in parts)


class FixedAugmentation:
    """Copies that are the same functions for every example: no randomness, so they also serve at test time.

    Attributes:
        views: the K functions, as modules with bounds of their own.
    """

    def __init__(self, views: Sequence[torch.nn.Module]) -> None:
        if not views:
            raise ConfigurationError("an augmentation without copies leaves nothing to train on; give at least one view")
        self.views = tuple(views)

    @property
    def copies(self) -> int:
        """K."""
        return len(self.views)

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Every view of every example."""
        return torch.stack([view(x) for view in self.views], dim=1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Identity(FixedAugmentation):
    """The example itself: K = 1."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Identity()])


class Flip(FixedAugmentation):
    """The image and its mirror (last dimension reversed): K = 2."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Identity(), Shift(0, 0, flip=True)])


class Shifts(FixedAugmentation):
    """The image moved by each of ``offsets`` (rows down, columns right), and with ``flip`` the mirrors of these too.

    Args:
        offsets: in pixels, negative ones up and left; (0, 0) is the image as it is. One copy each.
        flip: whether to add their mirrors, which doubles K.
        mode: what moves in from outside: "reflect", the image's reflection, or "zeros".

    Example:
        >>> from lipdp.data import Shifts
        >>> Shifts([(0, 0), (2, 2), (-2, -2)], flip=True).copies
        6
    """

    def __init__(self, offsets: Sequence[tuple[int, int]], *, flip: bool = False, mode: Padding = "reflect") -> None:
        mirrors = (False, True) if flip else (False,)
        super().__init__([Shift(down, right, flip=mirror, mode=mode) for mirror in mirrors for down, right in offsets])
        self.offsets, self.flip, self.mode = tuple(offsets), flip, mode

    def __repr__(self) -> str:
        return f"Shifts({list(self.offsets)}, flip={self.flip}, mode={self.mode!r})"


class PrecomputedCopies(FixedAugmentation):
    """For datasets whose examples already are K copies, (K, *shape), e.g. features of augmented images, computed once.

    Args:
        copies: K, at least 1: the size of the first dimension of every example.
    """

    def __init__(self, copies: int) -> None:
        count = whole("PrecomputedCopies copies", copies)
        super().__init__([Copy(number, count) for number in range(count)])

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """x itself, checked."""
        if x.ndim < 2 or x.shape[1] != self.copies:
            raise DataError(
                f"PrecomputedCopies({self.copies}) expects a batch of shape (batch, {self.copies}, …), not {tuple(x.shape)}: each "
                "example has to hold its copies along its first dimension"
            )
        return x

    def __repr__(self) -> str:
        return f"PrecomputedCopies({self.copies})"


class RandomCrop:
    """K random crops, of the image's own size, of the image padded by ``padding`` on each side: shifts by up to ``padding``.

    With ``flip`` each copy is mirrored with probability one half. Shifts and mirrors are drawn for each copy of each example.

    Args:
        padding: pixels, 0 and up; below the image's size for mode "reflect".
        copies: K.
        mode: what lies beyond the border: the image's reflection, or zeros.
        flip: whether to mirror at random.
    """

    def __init__(self, padding: int, copies: int, *, mode: Padding = "reflect", flip: bool = True) -> None:
        self.padding = whole("RandomCrop padding", padding, least=0)
        self.copies = whole("RandomCrop copies", copies)
        self.mode: Padding = one_of("RandomCrop mode", mode, get_args(Padding))
        self.flip = flip

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draws on the generator's device, so that one CPU generator gives the same copies wherever the images are."""
        if generator is None:
            raise ConfigurationError(
                "RandomCrop draws at random and was given no generator. Pass one: lipdp.privacy.generator(seed, step, 'augment'). "
                "Where nothing should be random, as at test time, use Shifts or Flip."
            )
        check_shift(x, self.padding, self.padding, self.mode)
        drawn, on = (len(x), self.copies), generator.device
        down, right = torch.randint(-self.padding, self.padding + 1, (2, *drawn), generator=generator, device=on).to(x.device)
        mirrored = None
        if self.flip:
            mirrored = torch.randint(0, 2, drawn, generator=generator, device=on).bool().to(x.device)
        rows, inside_rows = source_index(x.shape[-2], down, None, self.mode)
        columns, inside_columns = source_index(x.shape[-1], right, mirrored, self.mode)
        copies = _gather(x, rows, columns)
        if inside_rows is None or inside_columns is None:
            return copies
        outside = ~(inside_rows[..., :, None] & inside_columns[..., None, :])
        return copies.masked_fill(outside.reshape(*drawn, *[1] * (x.ndim - 3), *x.shape[-2:]), 0)

    def __repr__(self) -> str:
        return f"RandomCrop({self.padding}, {self.copies}, mode={self.mode!r}, flip={self.flip})"


def _gather(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """y[b, k, …, i, j] = x[b, …, rows[b, k, i], columns[b, k, j]]."""
    batch, copies, height = rows.shape
    width = columns.shape[-1]
    planes = math.prod(x.shape[1:-2])
    shape = (batch, copies, planes, height * width)
    places = (rows[..., :, None] * width + columns[..., None, :]).reshape(batch, copies, 1, height * width)
    flat = x.reshape(batch, 1, planes, height * width)
    return flat.expand(shape).gather(3, places.expand(shape)).reshape(batch, copies, *x.shape[1:])


class Compose:
    """Every copy that the first augmentation makes goes through the second, and so on: K = the product of theirs."""

    def __init__(self, *augmentations: Augmentation) -> None:
        if not augmentations:
            raise ConfigurationError("Compose() of nothing: give one augmentation or more, or use Identity()")
        self.augmentations = augmentations

    @property
    def copies(self) -> int:
        """The product of the parts' copies."""
        return math.prod(augmentation.copies for augmentation in self.augmentations)

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """In order; the parts draw from the one generator, in order."""
        copies = x.unsqueeze(1)
        for augmentation in self.augmentations:
            more = copies_of(augmentation, copies.flatten(0, 1), generator)
            copies = more.reshape(len(x), copies.shape[1] * augmentation.copies, *more.shape[2:])
        return copies

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.augmentations))})"


def is_fixed(augmentation: object) -> bool:
    """Whether it makes the same copies every time: nothing is drawn."""
    if isinstance(augmentation, Compose):
        return all(map(is_fixed, augmentation.augmentations))
    return isinstance(augmentation, FixedAugmentation)


def fixed_views(augmentation: Augmentation) -> tuple[torch.nn.Module, ...]:
    """The functions that a fixed augmentation (or a composition of fixed ones) applies; refuses random ones."""
    if isinstance(augmentation, FixedAugmentation):
        return augmentation.views
    if isinstance(augmentation, Compose):
        parts = itertools.product(*map(fixed_views, augmentation.augmentations))
        return tuple(torch.nn.Sequential(*chain) for chain in parts)
    raise ConfigurationError(
        f"{augmentation!r} is random: a prediction that averages over it is neither repeatable nor certifiable. Use fixed copies: "
        "Flip(), Shifts([...]), PrecomputedCopies(K), or Compose of these."
    )


class TestTimeAverage(torch.nn.Module):
    """The mean of the model's outputs over fixed copies of the input: x ↦ (1/K)·Σ_k model(view_k(x)).

    Its Lipschitz constant is ℓ_model times the mean of the views' own constants (1 for mirrors and zero-filled shifts, √2 for each
    axis of a reflected shift). The calculus derives that from the views' rules, so certificates of the average are sound.

    Args:
        model: what is averaged; it is called once for each view.
        augmentation: a fixed one, or a composition of fixed ones; random ones are refused.
    """

    __test__ = False  # not a test case, whatever its name says to test runners

    def __init__(self, model: torch.nn.Module, augmentation: Augmentation) -> None:
        super().__init__()
        self.model = model
        self.views = torch.nn.ModuleList(fixed_views(augmentation))

    def forward(self, x: Tensor) -> Tensor:
        """One pass for each view: copies along the batch dimension would look to the calculus like examples that mix."""
        first, *others = self.views
        total: Tensor = self.model(first(x))
        for view in others:
            total = total + self.model(view(x))
        return total * (1 / len(self.views))


# Fixed views of an example: shifts, mirrors, one of its stored copies. They bring their bounds, so certificates see them.

Padding = Literal["reflect", "zeros"]


def source_index(size: int, shift: Tensor, mirrored: Tensor | None, mode: Padding) -> tuple[Tensor, Tensor | None]:
    """Where each of ``size`` places reads after a shift, then (where ``mirrored``) a mirror: indices shaped (*shift.shape, size).

    Mode "reflect" folds places beyond the border back (without repeating the border itself); "zeros" also returns
    which places read inside.
    """
    place = torch.arange(size, device=shift.device).expand(*shift.shape, size)
    if mirrored is not None:
        place = torch.where(mirrored[..., None], size - 1 - place, place)
    source = place - shift[..., None]
    if mode == "zeros":
        return source.clamp(0, size - 1), (source >= 0) & (source < size)
    last = size - 1
    return last - (last - source.abs()).abs(), None


def check_shift(x: Tensor, down: int, right: int, mode: Padding) -> None:
    """Refuse tensors that are no images, and reflections of more than there is."""
    if x.ndim < 3:
        raise DataError(f"moving pixels needs a batch of images (batch, …, rows, columns), not a tensor of shape {tuple(x.shape)}")
    for size, shift, what in ((x.shape[-2], down, "rows"), (x.shape[-1], right, "columns")):
        if mode == "reflect" and abs(shift) >= size:
            raise DataError(f"a shift by {shift} of images with {size} {what} can't be filled by reflection; use mode='zeros'")


class Shift(torch.nn.Module):
    """Each image moved ``down`` and ``right`` (negative: up, left), then mirrored if ``flip``.

    What moves in from outside is the image's reflection, or zeros.
    """

    def __init__(self, down: int, right: int, *, flip: bool = False, mode: Padding = "reflect") -> None:
        super().__init__()
        for name, value in (("down", down), ("right", right)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigurationError(f"Shift {name} is a number of pixels, a whole number, not {value!r}")
        self.down, self.right, self.flip = down, right, bool(flip)
        self.mode: Padding = one_of("Shift mode", mode, get_args(Padding))

    def forward(self, x: Tensor) -> Tensor:
        """Move."""
        if isinstance(x, Tensor):  # torch.fx traces with stand-ins that have no shape yet
            check_shift(x, self.down, self.right, self.mode)
        if self.down:
            x = _moved(x.transpose(-1, -2), self.down, self.mode).transpose(-1, -2)
        if self.right:
            x = _moved(x, self.right, self.mode)
        return torch.flip(x, (-1,)) if self.flip else x

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.down}, {self.right}, flip={self.flip}, mode={self.mode!r}"


def _moved(x: Tensor, shift: int, mode: Padding) -> Tensor:
    """Along the last dimension; slices and joins only, so that the layer can be exported."""
    if shift > 0:
        come = x[..., 1 : shift + 1].flip(-1) if mode == "reflect" else torch.zeros_like(x[..., :shift])
        return torch.cat([come, x[..., :-shift]], -1)
    come = x[..., shift - 1 : -1].flip(-1) if mode == "reflect" else torch.zeros_like(x[..., :-shift])
    return torch.cat([x[..., -shift:], come], -1)


@rule(Shift, rounds="each")
def _shift(layer: Shift, call: Call) -> Transfer:
    """A selection of pixels, each read at most m = m_rows·m_columns times: ‖y‖² ≤ m·‖x‖², reached by a pixel that is read so often.

    Zeros are read from nowhere, so there m = 1. A reflection reads a few pixels twice along each axis that it moves.
    """
    x = call.inputs[0]
    rows, columns = (_most_reads(layer, x.shape[dim], shift) for dim, shift in ((-2, layer.down), (-1, layer.right)))
    gain = math.sqrt(rows * columns)
    row_norm = times(math.sqrt(columns), x.row_norm)
    return Transfer(Bound(times(gain, x.norm), x.shape, row_norm, x.max_abs), (gain,))


def _most_reads(layer: Shift, size: int, shift: int) -> int:
    index, inside = source_index(size, torch.tensor(shift), None, layer.mode)
    return max(1, int(torch.bincount(index if inside is None else index[inside], minlength=1).max()))


class Copy(torch.nn.Module):
    """The stored copy number ``number`` of examples (K, *shape)."""

    def __init__(self, number: int, copies: int) -> None:
        super().__init__()
        self.number, self.copies = number, copies

    def forward(self, x: Tensor) -> Tensor:
        """One copy of each example."""
        if isinstance(x, Tensor) and (x.ndim < 2 or x.shape[1] != self.copies):
            raise DataError(f"examples should hold {self.copies} copies along their first dimension; got shape {tuple(x.shape)}")
        return x[:, self.number]

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.number} of {self.copies}"


@rule(Copy, rounds="each")
def _copy(layer: Copy, call: Call) -> Transfer:
    """A slice: norms can only fall."""
    x = call.inputs[0]
    return Transfer(Bound(x.norm, call.output_shape, x.row_norm, x.max_abs))
