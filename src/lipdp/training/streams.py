"""All that is random in a run: streams of numbers that follow from its secret key, the step's number and the purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from lipdp.data.augment import Augmentation
from lipdp.privacy.randomness import derive_seed, generator
from lipdp.training.plan import PrivacyPlan

__all__ = ["Streams", "derive_key"]


def derive_key(
    seed: int,
    plan: PrivacyPlan,
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    augmentation: Augmentation | None,
) -> int:
    """The run's secret key: the seed, bound to the plan, the layers and the initial weights.

    Runs that differ in any of them never share noise even if they share the seed.
    """
    digest = hashlib.sha256(f"{seed}|{plan.to_json()}|{model}|{augmentation!r}".encode())
    for parameter in parameters.values():
        digest.update(parameter.detach().to("cpu", torch.float64).numpy().tobytes())
    return int.from_bytes(digest.digest()[:16], "big")


class Streams:
    """What a run draws from its key.

    Attributes:
        key: the secret. Whoever knows it can subtract the noise.
        trail: a digest of the optimiser's settings in all steps so far; it is part of the noise's purpose.
    """

    def __init__(self, key: int, device: torch.device) -> None:
        self.key, self.trail = key, ""
        self.device = device

    def sample(self, number: int) -> torch.Generator:
        """For drawing batch ``number``: on the CPU wherever the model is, so that a run resumed elsewhere sees the same."""
        return generator(self.key, number, "sample")

    def draw(self, number: int, purpose: str) -> torch.Generator:
        """For one use in one step, on the model's device."""
        return generator(self.key, number, purpose, self.device)

    def noise(self, number: int, optimizer: torch.optim.Optimizer) -> torch.Generator:
        """For the noise of a step with this optimiser.

        Its settings so far are part of the key: two runs from one seed that differ in, say, the learning rate of some step must not
        share noise from there on, or the difference of their releases would be free of it.
        """
        groups = [sorted((k, repr(v)) for k, v in group.items() if k != "params") for group in optimizer.param_groups]
        self.trail = hashlib.sha256(f"{self.trail}|{type(optimizer).__name__}|{groups}".encode()).hexdigest()
        return self.draw(number, f"noise {self.trail}")

    @contextmanager
    def model(self, number: int) -> Iterator[None]:
        """Within the block dropout and the like draw from a stream of the step: a resumed run repeats it."""
        seed = derive_seed(self.key, number, "model")
        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_cuda else []):
            # Not torch.manual_seed: where CUDA is installed but unused, it queues another call (with its stack) for ever.
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
            yield
