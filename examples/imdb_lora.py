"""Fine-tune a transformer on IMDB's reviews, privately: LoRA adapters and the head, every review's gradient clipped.

    python examples/imdb_lora.py distilbert-base-uncased       # weights of Hugging Face's hub, or of a folder
    python examples/imdb_lora.py                               # a small one with random weights: what it costs, not what it can

ε is about the reviews. It says nothing of the text that the weights were learned from.
"""

from __future__ import annotations

import sys
from typing import Any

import peft
import torch
import transformers

import lipdp

LENGTH = 128  # tokens of a review: a public number


def pretrained(weights: str) -> tuple[Any, Any]:
    """A classifier with a new head, and its tokenizer: of a folder, or of the hub (downloaded once, into its own cache)."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(weights, num_labels=2)
    return model, transformers.AutoTokenizer.from_pretrained(weights)


def small() -> tuple[Any, Any]:
    """A little encoder of bytes, with random weights."""
    config = transformers.BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_labels=2
    )

    def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    return transformers.BertForSequenceClassification(config), tokenizer


def records(texts: list[str], labels: torch.Tensor, tokenizer: Any) -> Any:
    """Tokens of one length with a mask, and the label."""
    tokens = tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
    rows = [{"input_ids": row, "label": int(label)} for row, label in zip(tokens, labels, strict=True)]
    return lipdp.data.Columns(rows, length=LENGTH)


def main(
    weights: str | None = None, epsilon: float = 3.0, steps: int = 200, batch_size: int = 1000, device: str | None = None
) -> float:
    """Train, and give the accuracy on the test set."""
    torch.manual_seed(0)
    base, tokenizer = small() if weights is None else pretrained(weights)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16))
    train = records(*lipdp.data.reviews("train"), tokenizer)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    plan = lipdp.plan(
        model, loss, dataset_size=len(train), batch_size=batch_size, delta=1e-5, epsilon=epsilon, steps=steps,
        method="bookkeeping", max_grad_norm=0.3,
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    history = lipdp.fit(model, loss, optimizer, plan, train, scheduler=scheduler, device=device)
    test = records(*lipdp.data.reviews("test"), tokenizer)
    accuracy = lipdp.evaluate(model, loss, test, device=device)["accuracy"]
    print(
        f"{sum(p.numel() for p in trained):,} parameters trained: {accuracy:.1%} at "
        f"{lipdp.privacy.guarantee(history.epsilon, plan.delta)}"
    )
    return accuracy


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else None,
        device="cuda" if torch.cuda.is_available() else None,
    )
