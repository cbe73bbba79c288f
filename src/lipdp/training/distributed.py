"""Several processes that train one model: who they are, what they agree on, and how their sums become one.

Every rank draws the same sample and the same seats from the same key, computes the microbatches that are its own, and gets the sum
over all of them. From there on all ranks do the same: the same noise, drawn from the same key for the same sum, is *one* draw,
whoever computes it; the optimiser and the projection are repeated on every rank. docs/scale.md argues why that is the release that
was planned. Without a process group there is one rank, and nothing here costs anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lipdp import errors
from lipdp._checks import as_told
from lipdp.digest import content_digest
from lipdp.errors import ConfigurationError, LipdpError, UnsupportedError
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import usual_seats
from lipdp.training.query import Answer, Turn, carried, check_range, exact, floating, unit_of

T = TypeVar("T")
_DIGEST = 32  # bytes
_SENT = 1 << 22  # numbers that are sent at once


@dataclass(frozen=True)
class Ranks:
    """The processes that train together.

    Attributes:
        number: of this one.
        count: how many there are.
        grouped: whether they are a process group of torch.distributed, if only of one; sums are then exact (:mod:`.totals`), so
            that they do not depend on the number of ranks.
    """

    number: int = 0
    count: int = 1
    grouped: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this one pays, prints and writes files."""
        return self.number == 0

    def agree(self, parts: Mapping[str, Any], why: str = "") -> None:
        """Refuse to go on where some rank has another value of some part; values are told by their digests."""
        if self.count == 1:
            return
        own = b"".join(content_digest(value) for value in parts.values())
        everybody = [torch.empty(len(own), dtype=torch.uint8, device=self._carrier) for _ in range(self.count)]
        dist.all_gather(everybody, torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self._carrier))
        digests = [bytes(each.cpu().numpy().tobytes()) for each in everybody]
        for at, what in enumerate(parts):
            values = [each[at * _DIGEST : (at + 1) * _DIGEST] for each in digests]
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            if others:
                raise ConfigurationError(
                    f"the ranks do not train the same thing: {what} of rank {others[0]} differs from that of rank 0. Every rank "
                    f"has to be given the same; nothing was released.{' ' + why if why else ''}"
                )

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors of one type by their sums over all ranks, in place. Whole numbers: exact, in whatever order.

        Many small ones travel together, and of large ones a part at a time, so that little memory is needed beside them.
        """
        if self.count == 1:
            return
        waiting: list[torch.Tensor] = []
        for tensor in tensors:
            for piece in torch.split(tensor.view(-1), _SENT):
                if waiting and sum(part.numel() for part in waiting) + piece.numel() > _SENT:
                    self._add_joined(waiting)
                    waiting = []
                waiting.append(piece)
        if waiting:
            self._add_joined(waiting)

    def _add_joined(self, pieces: list[torch.Tensor]) -> None:
        flat = torch.cat(pieces).to(self._carrier)
        dist.all_reduce(flat)
        for piece, total in zip(pieces, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
            piece.copy_(total)

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks."""
        if self.count == 1:
            return list(numbers)
        flat = torch.tensor(list(numbers), dtype=torch.int64, device=self._carrier)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return [int(number) for number in flat.tolist()]

    def shared(self, value: bytes, of: int = 0) -> bytes:
        """The value of one rank, the first by default, on all of them."""
        if self.count == 1:
            return value
        length = torch.tensor([len(value)], dtype=torch.int64, device=self._carrier)
        dist.broadcast(length, of)
        content = torch.zeros(int(length), dtype=torch.uint8, device=self._carrier)
        if self.number == of and value:
            content.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        dist.broadcast(content, of)
        return content.cpu().numpy().tobytes()

    def together(self) -> AbstractContextManager[None]:
        """What is refused on one rank in the block is refused on all of them at its end: else they would wait for it for ever.

        Nothing in the block may wait for other ranks.
        """
        return nullcontext() if self.count == 1 else self._together()

    @contextmanager
    def _together(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as raised:
            failure = raised
        (refusing,) = self.most([0 if failure is None else self.number + 1])
        if refusing:
            told = self.shared(b"" if failure is None else _told(failure), refusing - 1).decode()
            if failure is not None:
                raise failure
            kind, _, message = told.partition("\n")
            raise _error_of(kind)(f"rank {refusing - 1}: {message}")

    def by_first(self, action: Callable[[], T]) -> T | None:
        """Let the first rank do something. Where it is refused, it is refused on all ranks, so that none waits for the others."""
        if self.count == 1:
            return action()
        result, error = None, b""
        failure: Exception | None = None
        if self.is_first:
            try:
                result = action()
            except Exception as raised:
                failure, error = raised, _told(raised)
        told = self.shared(error).decode()
        if failure is not None:
            raise failure
        if told:
            kind, _, message = told.partition("\n")
            raise _error_of(kind)(message)
        return result

    def state_of_first(self, read: Callable[[], Any]) -> Any:
        """Plain data that the first rank reads from a file, on all ranks."""
        if self.count == 1:
            return read()
        state = self.by_first(read)
        buffer = BytesIO()
        if self.is_first:
            torch.save(state, buffer)
        content = self.shared(buffer.getvalue())
        return state if self.is_first else torch.load(BytesIO(content), map_location="cpu", weights_only=True)

    def turn(self, stds: Mapping[str, float], begin: Callable[[int], None]) -> Turn:
        """Which microbatches this one computes: all, or every so many of a group's, whose sums are then whole numbers."""
        units = {name: unit_of(std) for name, std in stds.items()} if self.grouped else None
        return Turn(self.number, self.count, begin, units)

    def agree_on_run(self, plan: PrivacyPlan, parts: Mapping[str, Any], microbatch_size: int) -> None:
        """Refuse ranks that were not given the same, and runs whose sums could not be added up exactly."""
        why = "Build it in the same way on every rank (torch.manual_seed with one seed before the model), or load one state_dict."
        self.agree(parts, why)
        seats = usual_seats(plan.batch_size, whole=plan.sampling_rate == 1)
        least = plan.noise_multiplier * min(phase.noise for phase in plan.phases)
        check_range(plan.dataset_size, math.ceil(seats / microbatch_size), self.count, least)

    @property
    def _carrier(self) -> torch.device:
        """Where tensors have to be to be sent."""
        return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def added_up(ranks: Ranks, answer: Answer, units: Mapping[str, float], count_std: float) -> Answer:
    """The answer of all ranks together, the same to the bit on each, however many they are; the noise will be the same too."""
    unit = unit_of(count_std)
    for pair in answer.sums.values():
        carried(pair)
    counts = {name: exact(value, unit) for name, value in answer.counts.items()}
    clipped = [] if answer.clipped is None else [answer.clipped[0].to(torch.int64).reshape(1)]
    ranks.add([*answer.sums.values(), *counts.values(), *clipped])
    return Answer(
        {name: floating(answer.sums.pop(name), units[name]) for name in list(answer.sums)},
        {name: floating(pair, unit) for name, pair in counts.items()},
        None if answer.clipped is None else (clipped[0][0], answer.clipped[1]),
    )


def _told(failure: Exception) -> bytes:
    """What other ranks hear of it: nothing that this one's records have said."""
    failure = as_told(failure)
    return f"{type(failure).__name__}\n{failure}".encode()


def _error_of(kind: str) -> type[LipdpError]:
    """The class of an error of ours by its name; of other people's errors, the one that all of ours are."""
    found = getattr(errors, kind, LipdpError)
    return found if isinstance(found, type) and issubclass(found, LipdpError) else LipdpError


def present_ranks() -> Ranks:
    """The process group of torch.distributed, where there is one.

    A process that a launcher has started beside others, and that belongs to no group, is refused: each would train by itself, on
    the same data, and every one of them would be a release of its own.
    """
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), grouped=True)
    count = os.environ.get("WORLD_SIZE", "1")
    if count.isdigit() and int(count) > 1:
        raise ConfigurationError(
            f"this is one of {count} processes (WORLD_SIZE={count}, as torchrun sets it) that are not joined: each would train "
            "alone, and each would be a release that its own privacy is spent on. Call torch.distributed.init_process_group() "
            "before, with 'gloo' or 'nccl'; or start one process; or remove WORLD_SIZE from the environment."
        )
    return Ranks()


def check_unwrapped(model: torch.nn.Module) -> None:
    """Refuse wrappers that change gradients behind the engine's back."""
    sharded = any(kind.__name__ == "DTensor" for p in model.parameters() for kind in type(p).__mro__)
    if sharded and not any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        raise UnsupportedError(
            "the model's parameters are divided among ranks, and not by fully_shard(model) (tensor parallel, or only some of its "
            "layers): the engine computes with a whole copy of the model, and knows how to make one of what fully_shard has "
            "divided. Pass the model as it was before, on every rank; or fully_shard the model itself, too."
        )
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
    if {"DistributedDataParallel", "DataParallel"} & kinds:
        raise UnsupportedError(
            "the model is wrapped for data parallelism, which averages gradients of whole batches. Pass the model itself "
            "(wrapped.module) on every rank: the engine sums over the ranks of the process group, before it adds noise once."
        )
