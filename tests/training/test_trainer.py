"""docs/scale.md on Hugging Face's Trainer: the private loop is ours; evaluation, prediction and saving are its."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lipdp
from lipdp.data import Columns
from lipdp.errors import ConfigurationError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
LENGTH = 8


def _texts(count):
    draw = np.random.default_rng(0)
    rows = draw.integers(10, 60, size=(count, LENGTH))
    rows[:, 1] = 2 + np.arange(count) % 2  # one word decides
    return [{"input_ids": row.tolist(), "attention_mask": [1] * LENGTH, "label": int(row[1] == 3)} for row in rows]


def _model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def _trainer(model, folder, texts):
    settings = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], per_device_eval_batch_size=64, max_steps=1, disable_tqdm=True
    )

    def accuracy(predicted):
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    return transformers.Trainer(model, settings, train_dataset=texts, eval_dataset=texts, compute_metrics=accuracy)


def test_a_private_model_is_evaluated_used_and_saved_by_the_trainer(tmp_path):
    texts, model = _texts(256), _model()
    loss, train = torch.nn.CrossEntropyLoss(reduction="none"), Columns(texts, length=LENGTH)
    plan = lipdp.plan(
        model, loss, dataset_size=256, batch_size=256, delta=1e-3, epsilon=50.0, steps=25, method="bookkeeping", max_grad_norm=1.0
    )
    trainer = _trainer(model, tmp_path, texts)
    before = trainer.evaluate()["eval_accuracy"]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    history = lipdp.fit(model, loss, optimizer, plan, train, seed=0, reproducible=True)
    assert history.epsilon <= 50.0
    after = trainer.evaluate()
    assert after["eval_accuracy"] > before + 0.15
    ours = lipdp.evaluate(model, loss, train)
    assert ours["accuracy"] == pytest.approx(after["eval_accuracy"])
    assert ours["loss"] == pytest.approx(after["eval_loss"], rel=1e-4)
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    x = torch.tensor([row["input_ids"] for row in texts[:16]])
    assert torch.equal(again(x).logits, model.eval()(x).logits)


def test_its_own_training_is_refused_while_an_engine_lives(tmp_path):
    """Its loop steps without noise, with an optimiser of its own over the same parameters."""
    texts, model = _texts(64), _model()
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    plan = lipdp.plan(
        model, loss, dataset_size=64, batch_size=16, delta=1e-3, epsilon=8.0, steps=2, method="bookkeeping", max_grad_norm=1.0
    )
    trainer, before = _trainer(model, tmp_path, texts), {name: p.detach().clone() for name, p in model.named_parameters()}
    with lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan) as engine:
        with pytest.raises(ConfigurationError, match="has no noise"):
            trainer.train()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert engine.steps == 0
