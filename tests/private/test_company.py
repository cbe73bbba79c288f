"""What a model says of a record while it is looked at, and what a rank says of its records to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp.clipping.past import Reason
from lipdp.clipping.verify import check_alone
from lipdp.errors import CheckpointError, LipdpError, UnexpectedError, UnsupportedError
from lipdp.training.distributed import Ranks
from tests.private.marker import NUMBER, TEXT, check
from tests.private.test_runs import SIZE, settings

pytestmark = pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
LOSS = torch.nn.CrossEntropyLoss(reduction="none")


def _complain(x: torch.Tensor) -> None:
    raise RuntimeError(f"{float(x.detach().max())} is too bright for {TEXT}")


def _bright(x: torch.Tensor) -> bool:
    return bool((x.detach() > 1e6).any())


class Picky(torch.nn.Module):
    """A model whose parameters are evaluated again for one record at a time, and that complains then."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.own = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= 3 and _bright(x):
            _complain(x)
        return self.line(x) + self.own.exp()


class Shut(Sequence[float]):
    """What can't be looked into."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        raise KeyError(f"{self.number} {TEXT}")


class Keeping(torch.nn.Module):
    """A model that keeps a record's number where it can't be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.kept = torch.nn.Linear(4, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = Shut(float(x.detach().max()))  # type: ignore[assignment]
        return self.line(x)


@pytest.mark.parametrize("method", ["bookkeeping", "multiloss", "naive"])
@pytest.mark.parametrize("make", [Picky, Keeping])
def test_a_model_that_complains_while_it_is_looked_at(make: Callable[[], torch.nn.Module], method: str) -> None:
    net = make()
    decided = lipdp.plan(net, LOSS, **{**settings(method), "batch_size": SIZE}, input_shape=(4,))
    engine = lipdp.PrivacyEngine(net, LOSS, torch.optim.SGD(net.parameters(), lr=0.1), decided, input_shape=(4,))
    data = TensorDataset(torch.full((SIZE, 4), NUMBER) + torch.rand(SIZE, 4) * 0.01, torch.zeros(SIZE, dtype=torch.long))
    heard = check(lambda: [engine.step(*batch) for batch in engine.batches(data)] and None, what=method)
    assert isinstance(heard.error, LipdpError) or method == "naive"


class Alone(torch.nn.Module):
    """A model that complains of a record by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            _complain(x)
        return self.line(x)


def test_a_record_by_itself() -> None:
    x, y = torch.full((5, 4), NUMBER), torch.zeros(5, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="RuntimeError") as raised:
        check_alone(Alone(), LOSS, x, y, Reason("something", "somewhere"))
    assert TEXT not in str(raised.value)
    assert str(int(NUMBER)) not in str(raised.value)


@dataclass(frozen=True)
class Wire(Ranks):
    """Two ranks in one process, one after the other: the second one hears what the first has said."""

    said: list[bytes] = field(default_factory=list)

    def shared(self, value: bytes, of: int = 0) -> bytes:
        if self.number == of:
            self.said.append(value)
        return self.said[-1]

    def most(self, numbers: Sequence[int]) -> list[int]:
        return [1]


OURS = CheckpointError("the file is damaged. Take another.")


@pytest.mark.parametrize(
    "failure", [ValueError(f"{NUMBER} {TEXT}"), KeyError(TEXT), FileNotFoundError(2, "No", f"{TEXT}.png"), OURS]
)
@pytest.mark.parametrize("how", ["together", "by_first"])
def test_other_ranks_do_not_hear_of_a_record(how: str, failure: Exception) -> None:
    first = Wire(0, 2)
    second = Wire(1, 2, said=first.said)

    def run(ranks: Ranks, action: Callable[[], None]) -> None:
        if how == "by_first":
            ranks.by_first(action)
        else:
            with ranks.together():
                action()

    def fail() -> None:
        raise failure

    with pytest.raises(type(failure)):
        run(first, fail)
    heard = check(lambda: run(second, lambda: None), first.said)
    assert isinstance(heard.error, CheckpointError if failure is OURS else UnexpectedError)
    assert failure is not OURS or str(failure) in str(heard.error)
