"""Several processes behind one command: starting them with torchrun, and joining them to one group."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.training.distributed import Ranks

__all__ = ["is_rank", "joined", "shared_seed", "start_ranks"]


def is_rank() -> bool:
    """Whether this process is one of those that a launcher has started."""
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(count: int) -> int:
    """Run this very command in ``count`` processes of this machine; what they ended with."""
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word == "--nproc":
            next(given, None)
        elif not word.startswith("--nproc="):
            words.append(word)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*launcher, "-m", "lipdp", *words], check=False).returncode


@contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, str]]:
    """This process as a member of the launcher's group (alone, where none has started it), and the device that it computes on."""
    import torch
    import torch.distributed as dist

    from lipdp.training.distributed import present_ranks

    if not is_rank() or dist.is_initialized():
        yield present_ranks(), device
        return
    on_cuda = device.startswith("cuda")
    if on_cuda:
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ConfigurationError(
                f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}. Take as many processes "
                "(--nproc) as there are GPUs, or --device cpu."
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        yield present_ranks(), device
    finally:
        dist.destroy_process_group()


def shared_seed(seed: int | None, ranks: Ranks) -> int | None:
    """The seed of the initial weights, the same for all ranks: the user's, or the operating system's."""
    if seed is not None or ranks.count == 1:
        return seed
    return int.from_bytes(ranks.shared(secrets.token_bytes(7)), "big")
