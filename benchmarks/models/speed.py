"""A private step of a transformer against an ordinary one: time and peak memory, as ratios in one run.

    python benchmarks/models/speed.py --device cuda --output speed.json            # BERT, GPT-2, ViT and Llama of their usual size
    python benchmarks/models/speed.py --small                                      # small ones, on a processor

Both train all parameters with SGD in training mode (dropout as configured), from random weights of a configuration, on the same
batch, in microbatches of as many rows. *Ordinary*: loss, backward, optimiser, in eager PyTorch. *Book-keeping*: the whole step of
the engine: clipped sum over all seats of a Poisson sample of as many records on average (1,088 for 1,024), checks, digests, noise
of ChaCha20, optimiser. *Sum only*: the clipped sum of as many rows as the ordinary step has. TF32 is allowed to all on CUDA. Time
is the median over steps after a warm-up, the device waited for at the end of each block; memory is the peak of what was allocated
in those steps (``first``: with the self-checks of the first step). Where dp-accounting is not installed, ε is not computed (a step
does not depend on it).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import lipdp
from lipdp.inputs import call, loss_of, select

Step = Callable[[], object]
Made = tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor, Callable[..., torch.Tensor]]
PARTS = ("ordinary", "bookkeeping", "sum only")


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), y, reduction="none")


def next_token(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over the positions of each text."""
    each = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten(), reduction="none")
    return each.reshape(len(y), -1).mean(1)


def _ids(batch: int, length: int, words: int) -> torch.Tensor:
    return torch.randint(5, words, (batch, length), generator=torch.Generator().manual_seed(1))


def bert(small: bool, batch: int) -> Made:
    size = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 500}
        if small
        else {}
    )
    config = transformers.BertConfig(num_labels=2, **size)
    ids = _ids(batch, 32 if small else 128, config.vocab_size)
    x = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return transformers.BertForSequenceClassification(config), x, torch.arange(batch) % 2, cross_entropy


def gpt2(small: bool, batch: int) -> Made:
    config = transformers.GPT2Config(
        **({"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500} if small else {}), use_cache=False
    )
    ids = _ids(batch, 32 if small else 128, config.vocab_size)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids}, ids.clone(), next_token


def vit(small: bool, batch: int) -> Made:
    size = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 64}
        if small
        else {}
    )
    config = transformers.ViTConfig(num_labels=10, **size)
    pixels = torch.randn(batch, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(1))
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels}, torch.arange(batch) % 10, cross_entropy


def llama(small: bool, batch: int) -> Made:
    """Llama's blocks (RMSNorm, rotary positions, grouped keys, gated units) in GPT-2's size."""
    size = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32_000,
    }
    if small:
        size = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 500}
    config = transformers.LlamaConfig(num_hidden_layers=2 if small else 12, max_position_embeddings=512, use_cache=False, **size)
    ids = _ids(batch, 32 if small else 128, config.vocab_size)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids}, ids.clone(), next_token


MODELS: dict[str, Callable[[bool, int], Made]] = {"bert": bert, "gpt2": gpt2, "vit": vit, "llama": llama}


def ordinary(made: Made, rows: int) -> Step:
    model, x, y, loss = made
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, len(y), rows):
            part = slice(start, start + rows)
            (loss_of(loss, call(model, select(x, part)), y[part]).sum() / len(y)).backward()
        optimizer.step()

    return step


def bookkeeping(made: Made, rows: int, precision: str | None) -> Step:
    model, x, y, loss = made
    sizes = {"dataset_size": 100 * len(y), "batch_size": len(y), "steps": 100_000, "delta": 1e-6, "max_grad_norm": 1.0}
    plan = lipdp.plan(model, loss, noise_multiplier=4.0, accountant="rdp", method="bookkeeping", precision=precision, **sizes)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=1e-4), plan, microbatch_size=rows)
    return lambda: engine.step(x, y, sample="own")


def sum_only(made: Made, rows: int) -> Step:
    """The clipped sums of as many rows as the ordinary step has: no empty seats, noise, digests or optimiser."""
    model, x, y, loss = made
    clip = lipdp.clipping.Clipper(model, loss, "bookkeeping")

    def step() -> None:
        for start in range(0, len(y), rows):
            part = slice(start, start + rows)
            clip(select(x, part), y[part], 1.0)

    return step


def measure(make: Callable[[], Step], device: torch.device, seconds: float) -> dict[str, float]:
    """Median milliseconds of a step; MiB at the peak of those steps and of the first; seconds that the first step took."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None

    def peak() -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count

    started = time.perf_counter()
    step = make()
    block(1)
    row = {"started": time.perf_counter() - started, "first": peak()}
    for _ in range(4 if cuda else 1):
        once = block(1)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    size = max(1, min(10, int(0.1 * seconds / once)))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 40):
        times.append(block(size))
    return {**row, "ms": 1e3 * statistics.median(times), "mib": peak()}


def cell(model: str, part: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One row of the table; what can't be run is a result, too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    row: dict[str, Any] = {"model": model, "batch": options.batch, "rows": options.rows, "part": part}
    precision = "tf32" if device.type == "cuda" else None

    def make() -> Step:
        net, x, y, loss = MODELS[model](options.small, options.batch)
        row["parameters"] = sum(p.numel() for p in net.parameters())
        made = net.to(device).train(), {name: value.to(device) for name, value in x.items()}, y.to(device), loss
        if part == "ordinary":
            return ordinary(made, options.rows)
        return sum_only(made, options.rows) if part == "sum only" else bookkeeping(made, options.rows, precision)

    try:
        row |= measure(make, device, options.seconds)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    return row


def profiled(model: str, options: argparse.Namespace, device: torch.device) -> str:
    """Where the time of a step goes: kernels, by the device's time."""
    net, x, y, loss = MODELS[model](options.small, options.batch)
    made = net.to(device).train(), {name: value.to(device) for name, value in x.items()}, y.to(device), loss
    step = bookkeeping(made, options.rows, "tf32" if device.type == "cuda" else None)
    for _ in range(4):
        step()
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        step()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--batch", type=int, default=None, help="records of a step (expected, in the private one)")
    parser.add_argument("--rows", type=int, default=None, help="of a microbatch")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, for each cell")
    parser.add_argument("--profile", nargs="*", default=[], choices=list(MODELS), help="print where the time goes, too")
    parser.add_argument("--output", default=None, help="a file for the rows, as JSON")
    options = parser.parse_args()
    options.batch, options.rows = options.batch or (256 if options.small else 1024), options.rows or (32 if options.small else 128)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'model':6} {'batch':>5} {'part':12} {'ms':>9} {'× time':>7} {'MiB':>8} {'× mem':>6} {'first MiB':>10} {'first s':>8}")
    rows: list[dict[str, Any]] = []
    for model in options.models:
        base: dict[str, Any] | None = None
        for part in options.parts:
            row = cell(model, part, options, device)
            rows.append(row)
            shown = row.get("error", "")
            if not shown:
                base = base or row
                row["times"], row["memory"] = row["ms"] / base["ms"], row["mib"] / base["mib"] if base["mib"] else 0.0
                shown = f"{row['ms']:9.2f} {row['times']:7.2f} {row['mib']:8.0f} {row['memory']:6.2f} {row['first']:10.0f}"
                shown += f" {row['started']:8.1f}"
            print(f"{model:6} {options.batch:5} {part:12} {shown}", flush=True)
            if options.output:  # after every row: a run that is stopped has left what it had
                found = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
                Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
    for model in options.profile:
        print(model, profiled(model, options, device), sep="\n", flush=True)


if __name__ == "__main__":
    if importlib.util.find_spec("dp_accounting"):
        main()
    else:  # what a run costs is no part of what a step takes
        with ExitStack() as stack:
            for place in ("lipdp.planning.decide", "lipdp.training.run", "lipdp.privacy.ledger"):
                stack.enter_context(mock.patch(f"{place}.run_epsilon", return_value=1.0))
            main()
