"""The slow methods, which hold each example's gradient: what the others are measured against."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from lipdp._checks import no_gradient
from lipdp._numerics import Undrawn, seed_all, wide
from lipdp.clipping.arithmetic import accumulating, squared
from lipdp.clipping.batch import Clip, Group, clip_factors
from lipdp.clipping.follow import Following, follow
from lipdp.clipping.restored import Before
from lipdp.digest import same_bits
from lipdp.errors import DataError, UnsupportedError
from lipdp.fingerprint import nothing_kept
from lipdp.inputs import Inputs, call, device_of, loss_of, mapped, owned, per_row, select

PerExampleLoss = Callable[[Any, torch.Tensor], torch.Tensor]
# What a GPU's atomic additions may change when a gradient is computed again, of its largest number.
_AGAIN = 1e-4


def zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Where a parameter's gradients are summed up: in float64."""
    return torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)


def public_record(x: Inputs, y: torch.Tensor, copies: int = 1) -> Any:
    """Inputs and targets like those of one record, and nobody's: numbers between 0 and 1 that are the same each time, or zeros."""

    def like(leaf: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        return torch.rand(leaf.shape, generator=draw).to(leaf) if leaf.is_floating_point() else torch.zeros_like(leaf)

    return mapped(like, select((x, y), slice(0, copies)))


def followed_losses(
    model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor, copies: int, following: Following
) -> torch.Tensor:
    """One value per example, of a pass in which each row was kept apart from all others; else :class:`NotApartError`."""
    with following.following():
        values = loss_values(loss, call(model, x), y)
    following.conclude(values)
    return values if copies == 1 else values.reshape(-1, copies).mean(1)


def loss_values(loss: PerExampleLoss, outputs: Any, targets: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """One value per example, the mean over its ``copies`` rows; or an error that says what is wrong."""
    values: torch.Tensor = loss_of(loss, outputs, targets)
    if values.shape != (len(targets),):
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(targets)} examples; it must give one value per example "
            "(reduction='none')"
        )
    if not values.requires_grad:
        raise no_gradient()
    return values if copies == 1 else values.reshape(-1, copies).mean(1)


@dataclass
class Loops:
    """Σ_i ν_i·g_i, one example after the other."""

    model: torch.nn.Module
    loss: PerExampleLoss
    parameters: Mapping[str, torch.nn.Parameter]
    groups: tuple[Group, ...]
    bounds: torch.Tensor
    clip: Clip
    stability: float
    copies: int = 1
    answering: bool = True
    known: Sequence[torch.Tensor] = ()
    repeating: bool = True
    kept: Callable[[], Hashable] | None = None
    """The state of the settings and of what is not trained, to be the same behind all records."""

    def naive(self, x: Inputs, y: torch.Tensor, keep: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """A forward and a backward pass for each example (nxBP). Returns sums, norms and factors (batch, groups).

        A record's gradient has to be a function of the record, the weights and the random numbers drawn for it. Those are its
        seat's own: how many another record has drawn, which its values may decide, changes none of them. What the model's
        attributes hold is put back after each. What is kept elsewhere is looked for, behind each record and behind all of them: a
        made-up record is computed before all others and twice behind them, a record that is chosen in secret once more, with the
        same random numbers.
        """
        kept = torch.nonzero(keep).flatten().tolist()
        made_up, draws = public_record(x, y, self.copies), int(torch.randint(2**62, ()))
        secret = kept[secrets.randbelow(len(kept))] if kept and self.repeating else None
        seen: list[tuple[Any, int, tuple[torch.Tensor | None, ...]]] = []

        def alone(record: Any, seat: int) -> tuple[torch.Tensor | None, ...]:
            one, target = owned(record)
            seed_all(draws + seat)
            with nothing_kept(self.model):  # what one record leaves there never reaches the next
                value = loss_values(self.loss, call(self.model, one), target, self.copies).sum()
            return torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)

        def look_behind() -> None:
            if self.kept is None:
                before.put_back_all()
            elif not before.stays():  # the next one could use it, and forget it
                raise self._changes()

        def gradients(i: int) -> tuple[torch.Tensor | None, ...]:
            record = select((x, y), slice(i * self.copies, (i + 1) * self.copies))
            found = alone(record, i)
            look_behind()
            if i == secret:
                seen.append((record, i, found))
            return found

        with Undrawn(device_of(x)):
            if secret is not None:
                with suppress(Exception), torch.enable_grad():  # what the model can't take is no concern here
                    seen += [(made_up, len(keep), alone(made_up, len(keep)))] * 2
            # Behind the made-up record: what is kept of that one (tables of positions, say) is nobody's.
            state = None if self.kept is None else self.kept()
            before = Before(self.model, self.loss, weights=True)
            result = self._over(gradients, keep)
            with torch.enable_grad():
                for record, seat, found in seen:
                    _refuse_other(type(self.model).__name__, found, alone(record, seat))
                    look_behind()
        if self.kept is not None and self.kept() != state:
            raise self._changes()
        return result

    def _changes(self) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self.model).__name__} or its loss changes while it runs (a counter, a buffer, what it keeps, a random "
            "generator of its own). What one record has left there may reach the next. Make it a function of its inputs; "
            "random numbers come from torch's own generators."
        )

    def multiloss(
        self, x: Inputs, y: torch.Tensor, keep: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """One forward pass, a backward pass for each example's loss.

        A single example that is not finite spoils every backward pass here (0·inf). It is then found by itself and replaced by
        zeros, so that the others are computed as they would have been without it.
        """
        found = self._of_one_pass(x, y, keep)
        if bool(torch.isfinite(found[1]).all()):
            return found
        bad = ~torch.isfinite(replace(self, repeating=False).naive(x, y, torch.ones_like(keep))[1]).all(1)
        rows = bad.repeat_interleave(self.copies)
        clean = mapped(lambda part: part.masked_fill(per_row(rows, part), 0), (x, y))
        sums, norms, factors = self._of_one_pass(clean[0], clean[1], keep & ~bad)
        norms[bad] = float("nan")
        return sums, norms, factors

    def _of_one_pass(
        self, x: Inputs, y: torch.Tensor, keep: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            following = follow(x, y, self.known, answering=self.answering)
            values = followed_losses(self.model, self.loss, x, y, self.copies, following)

        def gradients(i: int) -> tuple[torch.Tensor | None, ...]:
            value = values[i]
            with following.going_back():
                return torch.autograd.grad(value, list(self.parameters.values()), retain_graph=True, allow_unused=True)

        return self._over(gradients, keep)

    def _over(
        self, gradients: Callable[[int], tuple[torch.Tensor | None, ...]], keep: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        sums = {name: zeros(p) for name, p in self.parameters.items()}
        like = next(iter(sums.values()))
        norms, factors = (like.new_zeros(len(keep), len(self.groups)) for _ in range(2))
        for i in torch.nonzero(keep).flatten().tolist():
            with torch.enable_grad():
                found = dict(zip(self.parameters, gradients(i), strict=True))
            squares = {
                name: like.new_zeros(()) if g is None else squared(accumulating(g)[0].reshape(1, -1), (1,))[0]
                for name, g in found.items()
            }
            norms[i] = torch.stack(
                [torch.stack([squares[name] for name in group.parameters]).sum().sqrt() for group in self.groups]
            )
            factors[i] = clip_factors(norms[i][None], self.bounds, keep[i][None], self.clip, self.stability)[0]
            if not bool(torch.isfinite(norms[i]).all()):
                continue
            for number, group in enumerate(self.groups):
                for name in group.parameters:
                    gradient = found[name]
                    if gradient is not None:
                        sums[name] += factors[i, number] * gradient.to(sums[name].dtype)
        return sums, norms, factors


def _refuse_other(name: str, before: Sequence[torch.Tensor | None], now: Sequence[torch.Tensor | None]) -> None:
    """A record's gradient, computed again behind other records, is the same: to the bit, but for a GPU's order of additions."""
    if not all(map(_is_same, before, now)):
        raise UnsupportedError(
            f"{name} or its loss remembers: a record's gradient is another one after other records. Something that is kept outside "
            "of the model's attributes changes with every record (a counter, a mean, a number in a global object or a file), or "
            "random numbers are drawn from elsewhere than torch's, Python's and numpy's own generators. Make it a function of its "
            "inputs."
        )


def _is_same(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if before is None or now is None:
        return before is now
    if bool(same_bits(before, now)):
        return True
    most = before.abs().max() if before.device.type != "cpu" and before.numel() else None
    return most is not None and bool(((before - now).abs() <= _AGAIN * most).all())
