"""All that is random in a run: a secret key, and what follows from it and from everything a release depends on.

The key of a step's noise is derived from the run's key, the step's number and a *trail*: the optimiser's settings in all steps so
far, the digests of the data, of the batch and of the weights, and, unless the run is a reproducible one, of the very sums that get
the noise. Whatever of it changes (one label, an augmentation, a layer, the order of a sum) changes all of the noise; an exact
repetition repeats it bit by bit, and is no new release.
"""

from __future__ import annotations

import copy
import hashlib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lipdp._checks import whole
from lipdp.data.augment import Augmentation
from lipdp.digest import Tag, content_digest
from lipdp.errors import ConfigurationError
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy import noise_cuda
from lipdp.privacy.ledger import Furthest
from lipdp.privacy.randomness import KEY_BYTES, Claim, Stream, derive_key, fresh_key, mix_key
from lipdp.training.known import Progress, batch_digest, digest_records, layout, stored_tensors, unsteady_digest, versions
from lipdp.training.positions import Claims, batches_end, claim_draw, end_of, furthest_of, know_run, refuse_taken, take_position

_MT_WORDS = 624  # 32-bit words of Mersenne-Twister state
_MT_OFFSET = 3  # in torch's CPU state, as 64-bit entries: seed, flags, position, then one entry per word


def secret_of(seed: int | None, reproducible: bool) -> bytes:
    """The secret of a run: from the operating system, or for a reproducible run (which is not private) from the user's seed."""
    if seed is not None:
        whole("seed", seed, least=0)
    if not reproducible:
        return fresh_key()
    if seed is None:
        raise ConfigurationError("reproducible=True repeats a run from its seed: pass seed= with it, e.g. seed=0.")
    return hashlib.blake2b(f"lipdp/reproducible/{seed}".encode(), digest_size=KEY_BYTES).digest()


def derive_run_key(
    secret: bytes,
    plan: PrivacyPlan,
    model: torch.nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    augmentation: Augmentation | None,
) -> bytes:
    """The run's key: the secret, bound to the plan, the program, the initial weights, the optimiser and the augmentation.

    Runs that differ in any of them never share noise even if they share the secret.
    """
    return derive_key(secret, "run", *parts_of_run(secret, plan, model, loss, optimizer, augmentation).values())


def parts_of_run(
    secret: bytes,
    plan: PrivacyPlan,
    model: torch.nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    augmentation: Augmentation | None,
) -> dict[str, Any]:
    """What a run's key depends on, by what it is called in messages."""
    values = model.state_dict()
    tag = Tag(derive_key(secret, "weights"))
    for tensor in values.values():
        tag.update(tensor)
    shapes = [(name, str(t.dtype), tuple(t.shape)) for name, t in values.items()]
    program = [str(model), *((name, _code(module)) for name, module in model.named_modules()), _code(loss)]
    return {
        "the plan": plan.to_json(),
        "the model (or the loss)": program,
        "the shapes of the model's tensors": shapes,
        "the initial weights": tag.finish(),
        "the optimiser": _settings(optimizer),
        "the augmentation": f"{augmentation!r}",
        "the augmentation's code": _code(augmentation),
    }


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """An optimiser's settings as text."""
    groups = [sorted((k, repr(v)) for k, v in group.items() if k != "params") for group in optimizer.param_groups]
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {groups}"


def _code(value: Any) -> list[str]:
    """What a value computes, as far as it can be written down: its settings, and the code of its class and of its own functions."""
    if isinstance(value, types.FunctionType):
        return [_digest_of_code(value.__code__)]
    kinds = [kind for kind in type(value).__mro__ if kind.__module__.split(".")[0] not in ("torch", "builtins", "abc", "typing")]
    own = vars(value) if hasattr(value, "__dict__") else {}
    functions = [(name, f) for place in (*map(vars, kinds), own) for name, f in place.items()]
    lines = [f"{name} {_digest_of_code(f.__code__)}" for name, f in functions if isinstance(f, types.FunctionType)]
    named = [f"{name} {getattr(f, '__qualname__', f)}" for name, f in own.items() if isinstance(f, types.BuiltinFunctionType)]
    plain = [f"{name}={v!r}" for name, v in own.items() if isinstance(v, bool | int | float | str) and name != "training"]
    return sorted([*lines, *named, *plain])


@lru_cache(maxsize=4096)
def _digest_of_code(code: types.CodeType) -> str:
    constants = [_digest_of_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return content_digest(code.co_code, list(code.co_names), constants).hex()


class Prepared(NamedTuple):
    """What the noise of a release depends on.

    Attributes:
        position: the step's number, or the release's name.
        trail: a digest of what the host knows.
        seen: digests of what is on a device, still being computed there.
        batch: the number of the batch that the run has drawn for it; ``None`` for others.
    """

    position: int | str
    trail: bytes
    seen: torch.Tensor
    batch: int | None = None


class Streams:
    """What a run draws from its key.

    Attributes:
        key: the secret. Whoever knows it can subtract the noise.
        private: whether it came from the operating system. From a seed that a person chose the run is reproducible, not private.
        trail: a digest of what the noise of all steps so far depended on, as far as the host knows it.
        data: a digest of the records that the run is bound to; ``None`` before they are seen.
        kept: how their dataset keeps them; a text, empty before they are seen.
        steady: whether they are the same at every reading, so that steps that are done again are the same releases.
        left: of a reproducible run: a digest of the weights as its last step left them; ``None`` before the first.
        furthest: what is known to have been charged by the run. (Another run from the same seed starts from nothing: it has no
            secret that its releases could be told by.)
    """

    def __init__(self, key: bytes, device: torch.device, *, private: bool) -> None:
        self.device, self.key = device, b""
        self._begin(key, private)
        self.trail = bytes(KEY_BYTES)
        self.data: bytes | None = None
        self.left: bytes | None = None
        self.kept = ""

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        texts = {name: None if value is None else value.hex() for name, value in (("data", self.data), ("left", self.left))}
        return {"key": self.key.hex(), "trail": self.trail.hex(), "private": self.private, "kept": self.kept, **texts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        key, trail = bytes.fromhex(state["key"]), bytes.fromhex(state["trail"])
        data, left = (None if state[name] is None else bytes.fromhex(state[name]) for name in ("data", "left"))
        if len(key) != KEY_BYTES or len(trail) != KEY_BYTES:
            raise ValueError(f"its key and its trail have {KEY_BYTES} bytes")
        private = bool(state["private"])
        if data is None or (key, data, private) != (self.key, self.data, self.private):  # else rewound: it still knows the records
            self._begin(key, private)
        self.trail, self.data, self.left, self.kept = trail, data, left, str(state["kept"])

    def _begin(self, key: bytes, private: bool) -> None:
        again = key == self.key
        self.key, self.private = key, private
        self.run = derive_key(key, "run's name")
        if private or not again:
            self.furthest = furthest_of(self.run) if private else Furthest()
        self.words_key = derive_key(key, "words")
        self._batch_key = derive_key(key, "batch")
        self._known: list[torch.Tensor] = []
        self._versions: list[tuple[int, int, int]] = []
        self._dataset: Any = None
        self.steady = True
        know_run(self.run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Streams:
        """A copy that knows the same dataset: not one of its records."""
        return copy.copy(self)

    # ------------------------------------------------------------------ the data

    def digest(self, dataset: Any, progress: Progress | None = None) -> bytes:
        """That of all records; computed once for each dataset, and again where its tensors were written to."""
        if self.data is not None and self._dataset is dataset and versions(stored_tensors(dataset)) == self._versions:
            return self.data
        return digest_records(dataset, derive_key(self.key, "data"), progress)

    def bind(self, dataset: Any, digest: bytes) -> None:
        """From here on samples and noise depend on these records."""
        self.data, self.kept = digest, layout(dataset)
        self.steady = digest != unsteady_digest(dataset, derive_key(self.key, "data"))
        self.know(dataset)

    def know(self, dataset: Any) -> None:
        """What is stored here stands for the data that the run is bound to: those records, or what fixed layers made of them."""
        self._dataset, self._known = dataset, stored_tensors(dataset)
        self._versions = versions(self._known)

    @property
    def dataset(self) -> Any:
        """That of :meth:`know`; ``None`` before there is one."""
        return self._dataset

    # ------------------------------------------------------------------ draws

    def sample(self, number: int) -> Stream:
        """For drawing batch ``number``."""
        return Stream(derive_key(self.key, "sample", number, self.data))

    def seats(self, number: int, purpose: str = "seats") -> Stream:
        """For seating the records of batch ``number``."""
        return Stream(derive_key(self.key, purpose, number, self.data))

    def draw(self, number: int, purpose: str, generator: torch.Generator | None = None, microbatch: int = 0) -> torch.Generator:
        """For one use of torch in one step (augmentation), on the model's device. Such draws are secret too, and no noise.

        Given a ``generator``, that one is brought there. Each microbatch has a stream of its own, whichever process computes it.
        """
        chosen = torch.Generator(device=self.device) if generator is None else generator
        _seed(chosen, derive_key(self.key, "torch", number, purpose, *([microbatch] if microbatch else [])))
        return chosen

    def model(self, number: int, *, on_host: bool = True) -> tuple[Callable[[int], None], Callable[[], None]]:
        """Streams of a step for dropout and the like: a resumed run repeats it.

        The first function that it gives brings torch's generators to the stream of a microbatch, the second one back to where they
        are now. ``on_host=False``: all of it runs on a device, and the host's generator is left alone, which costs time to seed.
        """
        # Not torch.manual_seed: where CUDA is installed but unused, it queues another call (with its stack) for ever.
        on_cuda = self.device.type == "cuda"
        there = [torch.cuda.default_generators[self.device.index or 0]] if on_cuda else []
        generators = [*([torch.default_generator] if on_host or not there else []), *there]
        kept = [generator.get_state() for generator in generators]

        def begin(microbatch: int) -> None:
            for generator in generators:
                self.draw(number, "model", generator, microbatch)

        def restore() -> None:
            for generator, state in zip(generators, kept, strict=True):
                generator.set_state(state)

        return begin, restore

    def prepare(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        inputs: Any,
        targets: torch.Tensor,
        seen: Sequence[torch.Tensor] = (),
    ) -> Prepared:
        """For the noise of a step on this batch: what it depends on. Nothing is drawn or taken yet.

        ``seen``: digests under :attr:`words_key` of the batch and the weights that are on a device, where there are some already.
        """
        known = self._known if versions(self._known) == self._versions else []
        host, on_device = batch_digest(inputs, targets, self._batch_key, known)
        if self.private and seen:
            trail = derive_key(self.key, "trail", self.trail, number, _settings(optimizer), self.data, host, b"")
            return Prepared(number, trail, seen[0].clone() if len(seen) == 1 else torch.cat(list(seen)))
        if self.private:
            weights, more = self._weights(parameters)
            on_device = [*more, *on_device]
        else:  # only those that somebody changed: the rounding of one machine is not that of another
            present = self._weights_at_rest(parameters)
            weights = b"" if self.left in (None, present) else present
        trail = derive_key(self.key, "trail", self.trail, number, _settings(optimizer), self.data, host, weights)
        return Prepared(number, trail, self._words(on_device))

    def told(self, prepared: Prepared, parameters: Sequence[torch.Tensor]) -> bytes:
        """All that a release depends on as one digest, the weights of a reproducible run too; waits for the device."""
        weights = b"" if self.private else self._weights_at_rest(parameters)
        return mix_key(derive_key(prepared.trail, weights), [prepared.seen] if len(prepared.seen) else [])

    def noise(self, prepared: Prepared, claims: list[tuple[int, Claim]] | None = None) -> Stream:
        """The stream of a step's noise, whose position was taken. What is drawn from it is claimed in the book, or refused there.

        ``claims``: the position was not taken yet, nor may be; what is drawn is noted here, and may leave once :meth:`take` has it.
        """
        stream = self._stream("noise", prepared)
        if claims is not None and self.private:
            stream.claim = lambda number, tag: claims.append((number, tag))
        return stream

    def refuse_taken(self, prepared: Prepared, claims: Claims = ()) -> None:
        """Refuse a step whose position in the book was taken for something else; to be asked before it is charged."""
        if self.private:
            refuse_taken(self.run, *prepared[:3], claims, prepared.batch)

    def take(self, prepared: Prepared, claims: Claims = ()) -> None:
        """Take a step's position in the book, for what was drawn ahead."""
        self._take(prepared, claims)
        self.trail = prepared.trail

    @property
    def end(self) -> int:
        """The number behind the last step of this run that is known to have been made, here or by an earlier process."""
        return end_of(self.run)

    @property
    def batches_end(self) -> int:
        """The number behind the last batch that a step of this run is known to have been made with."""
        return batches_end(self.run)

    def step_done(self, parameters: Sequence[torch.Tensor]) -> None:
        """The weights are as the step leaves them."""
        if not self.private:
            self.left = self._weights_at_rest(parameters)

    def _weights_at_rest(self, parameters: Sequence[torch.Tensor]) -> bytes:
        tag, on_device = self._weights(parameters)
        key = tag.ljust(KEY_BYTES, b"0")
        return mix_key(key, [noise_cuda.words_of(on_device, self.words_key)] if on_device else [])

    def release_noise(self, name: str, *about: Any) -> Stream:
        """For the noise of a release beside the steps."""
        prepared = Prepared(name, derive_key(self.key, "release", name, self.data, *about), self._words([]))
        self._take(prepared)
        return self._stream(name, prepared)

    def _take(self, prepared: Prepared, claims: Claims = ()) -> None:
        if self.private:
            take_position(self.run, *prepared[:3], claims, prepared.batch)

    def _stream(self, purpose: str, prepared: Prepared) -> Stream:
        position, trail, seen, _ = prepared
        stream = Stream(derive_key(self.key, purpose, position, trail), bound=self.private)
        if len(seen):
            stream.absorb(seen)
        if self.private:
            stream.claim = partial(claim_draw, self.run, position)
        return stream

    def _words(self, on_device: list[torch.Tensor]) -> torch.Tensor:
        """Digests of what is on a device, computed there."""
        return noise_cuda.words_of(on_device, self.words_key) if on_device else torch.zeros(0, 2, dtype=torch.int64)

    def _weights(self, parameters: Sequence[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
        """A digest of the weights on the processor, and those on a device, joined."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        tag = None
        for parameter in parameters:
            if parameter.device.type == "cuda":
                by_type.setdefault(parameter.dtype, []).append(parameter.detach().reshape(-1))
            else:
                tag = (tag or Tag(derive_key(self.key, "weights"))).update(parameter)
        return b"" if tag is None else tag.finish(), [torch.cat(parts) for parts in by_type.values()]


def _seed(generator: torch.Generator, key: bytes) -> None:
    """Seed one of torch's generators.

    On accelerators with 63 bits (they use all of their seed as a key). torch's CPU generator looks at 32 bits of its seed only,
    which could be found by trying them all. So there the whole 19,937-bit state is filled, from SHAKE-256 of the key.
    """
    seed = int.from_bytes(key[:8], "big") >> 1
    generator.manual_seed(seed)
    if generator.device.type == "cpu":
        state = generator.get_state()
        entries = state.view(torch.int64)
        if entries.numel() < _MT_OFFSET + _MT_WORDS or int(entries[_MT_OFFSET]) != seed & 0xFFFFFFFF:
            raise ConfigurationError(
                f"torch {torch.__version__} lays out its CPU generator's state in a way that this lipdp does not know, so it can't "
                "be seeded with more than 32 bits. Use a torch version that lipdp was tested with."
            )
        filling = hashlib.shake_256(key).digest(4 * _MT_WORDS)
        entries[_MT_OFFSET : _MT_OFFSET + _MT_WORDS] = torch.from_numpy(np.frombuffer(filling, dtype="<u4").astype(np.int64))
        generator.set_state(state)
