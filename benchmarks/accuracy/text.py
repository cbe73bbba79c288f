"""Private models of text: reviews by the words in them, reviews by a transformer with LoRA, Shakespeare letter by letter.

    python benchmarks/accuracy/text.py bag --epsilon 1 3 8 --seeds 0 1 2 [--test] [--device cuda]
    python benchmarks/accuracy/text.py lora --weights FOLDER_OR_NAME --epsilon 3 8 --seeds 0 1 2 [--test] [--device cuda]
    python benchmarks/accuracy/text.py letters --epsilon 1 3 8 --seeds 0 1 2 [--test] [--device cuda]

``bag``: logistic regression on hashed words (lipdp.data.hashed_bag) of IMDB, every step on all reviews. ``lora``: a transformer
whose weights are frozen but for adapters and the head, by peft; the weights are those of a folder, or of a name on Hugging Face's
hub (downloaded unless they are in its cache), or without ``--weights`` random ones of a small configuration, which shows what it
costs and not what it can. ``letters``: a small decoder on windows of 64 letters of the file text/tinyshakespeare.txt beside the
other data sets; perplexity of letters.

Without ``--test`` a tenth of the training data is held out, and the test set is not read: settings are chosen like that. Lines are
appended to benchmarks/results/text/NAME.jsonl. ``--epsilon inf``: the same training without privacy, as a yardstick.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
LORA = {3.0: Settings(2_000, 200, 0.3, 3e-3, None), 8.0: Settings(2_000, 200, 0.3, 3e-3, None)}
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
        method="bookkeeping", max_grad_norm=found.clip,
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


def bag(options: argparse.Namespace) -> None:
    train, labels, other, truth = texts(options.test)
    x, other_x = data.hashed_bag(train, options.buckets), data.hashed_bag(other, options.buckets)
    records = on(options.device, x, labels)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    for epsilon in options.epsilon:
        for seed in options.seeds:
            model = torch.nn.Linear(x.shape[1], 2, bias=False)  # whose gradient would be as long as that of all words
            torch.nn.init.zeros_(model.weight)
            started = time.perf_counter()
            spent = trained(model, loss, records, epsilon, settings_for(BAG, epsilon, options), seed, options.device)
            with torch.no_grad():
                right = model.cpu()(other_x).argmax(1) == truth
            note("bag", options, epsilon, seed, spent, {"accuracy": float(right.double().mean())}, started)


def transformer(weights: str | None) -> tuple[torch.nn.Module, Callable[[list[str]], tuple[torch.Tensor, ...]]]:
    """A classifier with LoRA adapters and a trained head, and what makes its two inputs: tokens and their mask.

    Without weights: a small random encoder that reads hashed words. With them, a folder or a name of Hugging Face's hub.
    """
    import peft
    import transformers

    if weights is None:
        config = transformers.BertConfig(
            vocab_size=BUCKETS, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
            max_position_embeddings=TOKENS, num_labels=2,
        )  # fmt: skip
        base: torch.nn.Module = transformers.BertForSequenceClassification(config)

        def tokens(reviews: list[str]) -> tuple[torch.Tensor, ...]:
            ids = hashed_words(reviews, TOKENS)
            return ids, (ids > 0).long()

    else:
        base = transformers.AutoModelForSequenceClassification.from_pretrained(weights, num_labels=2)
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights)

        def tokens(reviews: list[str]) -> tuple[torch.Tensor, ...]:
            made = tokenizer(reviews, truncation=True, padding="max_length", max_length=TOKENS, return_tensors="pt")
            return made["input_ids"], made["attention_mask"]

    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.0)
    return peft.get_peft_model(base, adapters), tokens


def on(device: str, *tensors: torch.Tensor) -> TensorDataset:
    """Records that are where they are needed in every step."""
    return TensorDataset(*(tensor.to(device) for tensor in tensors))


def lora(options: argparse.Namespace) -> None:
    train, labels, other, truth = texts(options.test)
    if options.records:
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: options.records]
        train, labels = [train[i] for i in chosen], labels[chosen]
        other, truth = other[: options.records], truth[: options.records]
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    for epsilon in options.epsilon:
        for seed in options.seeds:
            torch.manual_seed(seed)
            model, tokens = transformer(options.weights)
            started = time.perf_counter()
            found = settings_for(LORA, epsilon, options)
            spent = trained(model, loss, on(options.device, *tokens(train), labels), epsilon, found, seed, options.device)
            reached = lipdp.evaluate(model, loss, on(options.device, *tokens(other), truth), device=options.device)
            note("lora", options, epsilon, seed, spent, {"accuracy": reached["accuracy"], "weights": options.weights}, started)


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
    kept, out = (torch.arange(end), torch.arange(end, len(records))) if options.test else held_out(end)
    other = records[out]
    print(f"tables, not private: letters {by_tables(records[kept], other, 0):.2f}, pairs {by_tables(records[kept], other, 1):.2f}")
    train = on(options.device, records[kept, :-1], records[kept, 1:])
    for epsilon in options.epsilon:
        for seed in options.seeds:
            torch.manual_seed(seed)
            model = Letters(options.width, options.blocks)
            started = time.perf_counter()
            found = settings_for(CHARACTERS, epsilon, options)
            spent = trained(model, next_letter, train, epsilon, found, seed, options.device)
            model.eval().cpu()
            with torch.no_grad():
                value = torch.cat([next_letter(model(part[:, :-1]), part[:, 1:]) for part in other.split(256)]).mean()
            note("letters", options, epsilon, seed, spent, {"perplexity": math.exp(float(value))}, started)


def note(
    name: str, options: argparse.Namespace, epsilon: float, seed: int, spent: float, reached: dict[str, Any], started: float
) -> None:
    """A line in the file of results, and on the screen."""
    line = {
        "epsilon": epsilon, "spent": round(spent, 6), "delta": DELTA, "seed": seed, "on": "test" if options.test else "held out",
        **reached, "seconds": round(time.perf_counter() - started, 1), "device": options.device,
    }  # fmt: skip
    line |= {name: value for name in ("records", "buckets", "batch", "steps", "clip", "rate") if (value := getattr(options, name))}
    print(name, json.dumps(line), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    summary.setdefault((name, epsilon), []).append(reached.get("accuracy", reached.get("perplexity", math.nan)))


summary: dict[tuple[str, float], list[float]] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bag", "lora", "letters"])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test", action="store_true", help="train on all training data, judge by the test set")
    parser.add_argument("--weights", help="lora: a folder, or a name on the hub")
    parser.add_argument("--records", type=int, default=0, help="only so many, for a trial")
    parser.add_argument("--width", type=int, default=96, help="letters: of the decoder")
    parser.add_argument("--blocks", type=int, default=2, help="letters: of the decoder")
    parser.add_argument("--buckets", type=int, default=16_384, help="bag: of the hash")
    parser.add_argument("--batch", type=int, help="instead of the settings that were chosen; so are --steps, --clip and --rate")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    {"bag": bag, "lora": lora, "letters": letters}[options.what](options)
    for (name, epsilon), values in summary.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: ε = {epsilon:g}: {statistics.mean(values):.4f} ± {spread:.4f} ({len(values)} seeds)")


if __name__ == "__main__":
    main()
