"""A private model of Shakespeare, letter by letter: perplexity on the last tenth of the text, against ε.

    python examples/shakespeare.py tinyshakespeare.txt 8

A record is a window of 65 letters, and no two share one: the guarantee is for each of them, not for a work or its author.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lipdp

LENGTH, LETTERS = 64, 128


class Decoder(torch.nn.Module):
    """Letters so far (batch, length) to logits of the next ones (batch, length, 128)."""

    def __init__(self, width: int = 64, blocks: int = 1) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(LETTERS, width), torch.nn.Parameter(0.02 * torch.randn(1, LENGTH, width))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, LETTERS)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No letter sees a later one."""
        hidden = self.letters(x) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.future)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def next_letter(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One value for each record: the mean over its letters."""
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def main(text: str, epsilon: float = 8.0, steps: int = 300, batch_size: int = 4000, device: str | None = None) -> float:
    """Train on nine tenths, and give the perplexity of the last."""
    torch.manual_seed(0)
    windows = lipdp.data.windows(text, LENGTH)
    train, test = windows[: -(len(windows) // 10)], windows[-(len(windows) // 10) :]
    model, batch = Decoder(), min(batch_size, len(train))
    plan = lipdp.plan(
        model, next_letter, dataset_size=len(train), batch_size=batch, delta=1e-5, epsilon=epsilon, steps=steps,
        method="bookkeeping", max_grad_norm=0.3,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    data = TensorDataset(train[:, :-1], train[:, 1:])
    history = lipdp.fit(model, next_letter, optimizer, plan, data, scheduler=scheduler, device=device)
    model.eval().cpu()
    with torch.no_grad():
        value = torch.cat([next_letter(model(part[:, :-1]), part[:, 1:]) for part in test.split(256)]).mean()
    perplexity = math.exp(float(value))
    print(f"perplexity {perplexity:.2f} of letters at {lipdp.privacy.guarantee(history.epsilon, plan.delta)}")
    return perplexity


if __name__ == "__main__":
    place = "cuda" if torch.cuda.is_available() else None
    main(Path(sys.argv[1]).read_text(), float(sys.argv[2]) if len(sys.argv) > 2 else 8.0, device=place)
