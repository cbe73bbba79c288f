"""Private models of text: reviews by the words in them, reviews by a transformer with LoRA, Shakespeare letter by letter.

    python benchmarks/accuracy/text.py bag --epsilon 1 3 8 --seeds 0 1 2 [--test] [--device cuda]
    python benchmarks/accuracy/text.py lora --weights FOLDER_OR_NAME --epsilon 3 8 --seeds 0 1 2 [--test] [--device cuda]
    python benchmarks/accuracy/text.py letters --epsilon 1 3 8 --seeds 0 1 2 [--test] [--device cuda]
    python benchmarks/accuracy/text.py letters --choose 0.002 0.004 0.008 --test --device cuda

``bag``: logistic regression on hashed words (lipdp.data.hashed_bag) of IMDB, every step on all reviews. ``lora``: an encoder
whose weights are frozen but for adapters, by peft, and a head on the mean over a review's tokens; the weights are those of a
folder, or of a name on Hugging Face's hub (downloaded unless they are in its cache), or without ``--weights`` random ones of a
small configuration, which shows what it costs and not what it can. ``letters``: a small decoder on windows of 64 letters of the
file text/tinyshakespeare.txt beside the other data sets; perplexity of letters.

Without ``--test`` a tenth of the training data is held out, and the test set is not read: settings are chosen like that. With
``--choose`` that is done first, for each ε, by one more seed, and what follows takes the best of these rates: with ``--test``
the test set is read when nothing is to be chosen any more. As usual with such figures, ε is that of one run: what choosing has
told of the records is not in it. Lines are appended to NAME.jsonl in ``--results``, benchmarks/results/text by default.
``--epsilon inf``: the same training without privacy, as a yardstick.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import data
from lipdp.data.files import data_root
from lipdp.data.text import BUCKETS, hashed_words

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "text"
HELD_OUT, DELTA = 0.1, 1e-5
LENGTH, LETTERS = 64, 128
TOKENS = 128  # of a review that a transformer reads
CHOOSING = 100  # the seed of runs that settings are chosen by


@dataclass(frozen=True)
class Settings:
    """Of a run: batch (0: everybody in every step), steps, norm to clip at, rate (falling to 0), momentum (None: Adam)."""

    batch: int
    steps: int
    clip: float
    rate: float
    momentum: float | None = 0.9


# Chosen on a held-out tenth of the training set, by ε.
BAG = {
    1.0: Settings(0, 30, 0.7, 50.0),
    3.0: Settings(0, 70, 0.42, 75.0),
    8.0: Settings(0, 70, 0.7, 100.0),
}
LORA = {3.0: Settings(2_000, 100, 0.3, 2e-3, None), 8.0: Settings(2_000, 100, 0.3, 2e-3, None)}
CHARACTERS = {
    1.0: Settings(4_000, 150, 0.3, 4e-3, None),
    3.0: Settings(4_000, 300, 0.3, 4e-3, None),
    8.0: Settings(4_000, 500, 0.3, 4e-3, None),
}


def settings_for(table: dict[float, Settings], epsilon: float, options: argparse.Namespace) -> Settings:
    """Those of the nearest budget, but for what the command line says."""
    nearest = table[min(table, key=lambda known: abs(math.log(known / min(epsilon, 1e3))))]
    given = {name: getattr(options, name) for name in ("batch", "steps", "clip", "rate")}
    return replace(nearest, **{name: value for name, value in given.items() if value is not None})


def trained(
    model: torch.nn.Module, loss: Callable[[Any, torch.Tensor], torch.Tensor], train: TensorDataset, epsilon: float,
    found: Settings, seed: int, device: str,
) -> float:  # fmt: skip
    """Train in place; the ε that was spent."""
    size = len(train)
    batch = min(found.batch or size, size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    momentum = found.momentum
    optimizer = torch.optim.Adam(parameters, found.rate) if momentum is None else torch.optim.SGD(parameters, found.rate, momentum)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / found.steps))
    if math.isinf(epsilon):
        return _without_privacy(model, loss, train, optimizer, scheduler, found.steps, batch, seed, device)
    plan = lipdp.plan(
        model, loss, dataset_size=size, batch_size=batch, delta=DELTA, epsilon=epsilon, steps=found.steps,
        method="bookkeeping", max_grad_norm=found.clip, precision="tf32" if device == "cuda" else None,
    )  # fmt: skip
    history = lipdp.fit(model, loss, optimizer, plan, train, scheduler=scheduler, seed=seed, device=device)
    return float(history.epsilon)


def _without_privacy(
    model: torch.nn.Module, loss: Any, train: TensorDataset, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int,
    batch: int, seed: int, device: str,
) -> float:  # fmt: skip
    from lipdp.inputs import call, loss_of

    draw = torch.Generator().manual_seed(seed)
    model.to(device).train()
    for _ in range(steps):
        rows = torch.randperm(len(train), generator=draw)[:batch].to(device)
        *x, y = (part.index_select(0, rows) for part in train.tensors)
        optimizer.zero_grad()
        loss_of(loss, call(model, tuple(x)), y).mean().backward()
        optimizer.step()
        scheduler.step()
    return math.inf


def held_out(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Records to train on and those that are held out, the same for all seeds."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(12))
    count = int(HELD_OUT * size)
    return order[count:], order[:count]


def texts(test: bool) -> tuple[list[str], torch.Tensor, list[str], torch.Tensor]:
    """Reviews to train on and to judge by, with labels."""
    train, labels = data.reviews("train")
    if test:
        return train, labels, *data.reviews("test")
    kept, out = held_out(len(train))
    return [train[i] for i in kept], labels[kept], [train[i] for i in out], labels[out]


Once = Callable[[bool, float, Settings, int], dict[str, float]]


def runs(name: str, options: argparse.Namespace, table: dict[float, Settings], once: Once) -> None:
    """All budgets and seeds; ``once(test, epsilon, settings, seed)`` trains and gives what is reached, and the ε that was spent."""
    for epsilon in options.epsilon:
        found = settings_for(table, epsilon, options)
        tried = {}
        for rate in options.choose:
            reached = note(name, options, False, epsilon, replace(found, rate=rate), CHOOSING, once)
            tried[rate] = reached.get("accuracy", -reached.get("perplexity", math.inf))
        if tried:
            found = replace(found, rate=max(tried, key=tried.__getitem__))
            print(f"{name}: at ε = {epsilon:g} the rate is {found.rate:g} from now on", flush=True)
        for seed in options.seeds:
            reached = note(name, options, options.test, epsilon, found, seed, once)
            summary.setdefault((name, epsilon), []).append(reached.get("accuracy", reached.get("perplexity", math.nan)))


def bag(options: argparse.Namespace) -> None:
    @functools.cache
    def parts(test: bool) -> tuple[TensorDataset, TensorDataset]:
        train, labels, other, truth = texts(test)
        both = (data.hashed_bag(train, options.buckets), labels), (data.hashed_bag(other, options.buckets), truth)
        return on(options.device, *both[0]), on(options.device, *both[1])

    def once(test: bool, epsilon: float, found: Settings, seed: int) -> dict[str, float]:
        train, other = parts(test)
        model = torch.nn.Linear(options.buckets, 2, bias=False)  # a bias' gradient would be as long as that of all words
        torch.nn.init.zeros_(model.weight)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        spent = trained(model, loss, train, epsilon, found, seed, options.device)
        return {"spent": spent, "accuracy": lipdp.evaluate(model, loss, other, device=options.device)["accuracy"]}

    runs("bag", options, BAG, once)


class Reader(torch.nn.Module):
    """An encoder, the mean of what it makes of a text's real positions, and a linear head."""

    def __init__(self, encoder: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, torch.nn.Linear(width, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask.unsqueeze(-1).to(hidden.dtype)
        logits: torch.Tensor = self.head((hidden * real).sum(1) / real.sum(1).clamp(min=1))
        return logits


def reader(weights: str | None) -> Reader:
    """With adapters and a head to be trained. Without weights a small random encoder; else of a folder or a name of the hub."""
    import peft
    import transformers

    if weights is None:
        config = transformers.BertConfig(
            vocab_size=BUCKETS, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
        )  # fmt: skip
        base: Any = transformers.BertModel(config, add_pooling_layer=False)
    else:
        base = transformers.AutoModel.from_pretrained(weights, dtype=torch.float32)
    adapters = peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=8, lora_alpha=16, lora_dropout=0.0)
    return Reader(peft.get_peft_model(base, adapters), base.config.hidden_size)


def tokens(weights: str | None, reviews: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of words and their mask: hashed, or as the weights' own tokenizer has them."""
    import transformers

    if weights is None:
        ids = hashed_words(reviews, length)
        return ids, (ids > 0).long()
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    made = tokenizer(reviews, truncation=True, padding="max_length", max_length=length, return_tensors="pt")
    return made["input_ids"], made["attention_mask"]


def on(device: str, *tensors: torch.Tensor) -> TensorDataset:
    """Records that are where they are needed in every step."""
    return TensorDataset(*(tensor.to(device) for tensor in tensors))


def lora(options: argparse.Namespace) -> None:
    @functools.cache
    def parts(test: bool) -> tuple[TensorDataset, TensorDataset]:
        train, labels, other, truth = texts(test)
        if options.records:
            chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: options.records]
            train, labels = [train[i] for i in chosen], labels[chosen]
            some = torch.randperm(len(other), generator=torch.Generator().manual_seed(1))[: options.records]
            other, truth = [other[i] for i in some], truth[some]
        both = ((*tokens(options.weights, part, options.length), y) for part, y in ((train, labels), (other, truth)))
        kept, out = (on(options.device, *part) for part in both)
        return kept, out

    def once(test: bool, epsilon: float, found: Settings, seed: int) -> dict[str, float]:
        train, other = parts(test)
        torch.manual_seed(seed)
        model, loss = reader(options.weights), torch.nn.CrossEntropyLoss(reduction="none")
        spent = trained(model, loss, train, epsilon, found, seed, options.device)
        return {"spent": spent, "accuracy": lipdp.evaluate(model, loss, other, device=options.device)["accuracy"]}

    runs("lora", options, LORA, once)


class Letters(torch.nn.Module):
    """A decoder of a few blocks: letters so far (batch, length) to logits of the next (batch, length, 128)."""

    def __init__(self, width: int = 96, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(LETTERS, width), torch.nn.Parameter(0.02 * torch.randn(1, LENGTH, width))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, LETTERS)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.letters(x) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.future)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def next_letter(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over a record's letters."""
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def by_tables(train: torch.Tensor, other: torch.Tensor, before: int) -> float:
    """The perplexity of counts: of letters (``before`` = 0) or of letters after one other (1)."""
    counts = torch.full((LETTERS if before else 1, LETTERS), 0.05, dtype=torch.float64)
    rows = train[:, :-1] * before
    counts.index_put_((rows.flatten(), train[:, 1:].flatten()), torch.ones((), dtype=torch.float64), accumulate=True)
    likely = counts / counts.sum(1, keepdim=True)
    return math.exp(-float(likely[(other[:, :-1] * before).flatten(), other[:, 1:].flatten()].log().mean()))


def letters(options: argparse.Namespace) -> None:
    """The last tenth of the text is the test set; what is held out is drawn from the rest."""
    records = data.windows((data_root() / "text" / "tinyshakespeare.txt").read_bytes(), LENGTH)
    if options.records:
        records = records[: options.records]
    end = len(records) - len(records) // 10

    @functools.cache
    def parts(test: bool) -> tuple[TensorDataset, torch.Tensor]:
        kept, out = (torch.arange(end), torch.arange(end, len(records))) if test else held_out(end)
        train, other = records[kept], records[out]
        print(f"tables, not private: letters {by_tables(train, other, 0):.2f}, pairs {by_tables(train, other, 1):.2f}")
        return on(options.device, train[:, :-1], train[:, 1:]), other.to(options.device)

    def once(test: bool, epsilon: float, found: Settings, seed: int) -> dict[str, float]:
        train, other = parts(test)
        torch.manual_seed(seed)
        model = Letters(options.width, options.blocks)
        spent = trained(model, next_letter, train, epsilon, found, seed, options.device)
        model.eval()
        with torch.no_grad():
            value = torch.cat([next_letter(model(part[:, :-1]), part[:, 1:]) for part in other.split(256)]).mean()
        return {"spent": spent, "perplexity": math.exp(float(value))}

    runs("letters", options, CHARACTERS, once)


def note(
    name: str, options: argparse.Namespace, test: bool, epsilon: float, found: Settings, seed: int, once: Once
) -> dict[str, float]:
    """Run it; a line in the file of results, and on the screen."""
    started = time.perf_counter()
    reached = once(test, epsilon, found, seed)
    line = {
        "epsilon": epsilon, "delta": DELTA, "seed": seed, "on": "test" if test else "held out", **reached,
        "seconds": round(time.perf_counter() - started, 1), "device": options.device, **asdict(found),
    }  # fmt: skip
    shown = {"bag": ("buckets",), "lora": ("weights", "length", "records"), "letters": ("width", "blocks", "records")}[name]
    line |= {what: Path(str(value)).name if what == "weights" else value for what in shown if (value := getattr(options, what))}
    print(name, json.dumps(line), flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return reached


summary: dict[tuple[str, float], list[float]] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bag", "lora", "letters"])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test", action="store_true", help="train on all training data, judge by the test set")
    parser.add_argument("--choose", type=float, nargs="+", default=[], help="rates, of which a held-out part chooses one first")
    parser.add_argument("--weights", help="lora: a folder, or a name on the hub")
    parser.add_argument("--length", type=int, default=TOKENS, help="lora: tokens of a review that are read")
    parser.add_argument("--records", type=int, default=0, help="only so many, for a trial")
    parser.add_argument("--width", type=int, default=96, help="letters: of the decoder")
    parser.add_argument("--blocks", type=int, default=2, help="letters: of the decoder")
    parser.add_argument("--buckets", type=int, default=16_384, help="bag: of the hash")
    parser.add_argument("--batch", type=int, help="instead of the settings that were chosen; so are --steps, --clip and --rate")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that lines are appended in")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    {"bag": bag, "lora": lora, "letters": letters}[options.what](options)
    for (name, epsilon), values in summary.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: ε = {epsilon:g}: {statistics.mean(values):.4f} ± {spread:.4f} ({len(values)} seeds)")


if __name__ == "__main__":
    main()
