"""Texts as numbers by public rules; and the benchmark's way to weights in a folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import lipdp
from lipdp import data
from lipdp.data.text import COMMON_WORDS
from lipdp.errors import ConfigurationError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "text.py"


def test_a_bag_has_norm_one_and_no_order():
    vectors = data.hashed_bag(["Not a bad film, not at all.<br />", "film bad NOT", "", "the of and"], buckets=512)
    assert torch.equal(vectors[0], vectors[1])
    torch.testing.assert_close(vectors[0].norm(), torch.tensor(1.0))
    assert vectors[0].count_nonzero() == 3
    assert not vectors[2:].any()  # no words, and none but common ones


def test_a_record_has_no_say_in_another_ones_numbers():
    one = data.hashed_bag(["some words of mine", "others"], buckets=64)
    two = data.hashed_bag(["some words of mine", "unheard of words, a great many"], buckets=64)
    assert torch.equal(one[0], two[0])


def test_signs_keep_collisions_from_adding_up():
    """The product of two texts without a common word is 0 on average, whatever the number of buckets."""
    texts = [" ".join(f"word{300 * k + n}" for n in range(300)) for k in range(40)]
    vectors = data.hashed_bag(texts, buckets=64)
    products = (vectors @ vectors.T)[~torch.eye(40, dtype=torch.bool)]
    assert abs(float(products.mean())) < 0.03


def test_words_to_leave_out():
    assert "the" in COMMON_WORDS
    assert "not" not in COMMON_WORDS
    assert data.hashed_bag(["the"], leave_out=()).any()


def test_windows_share_no_letter():
    text = "".join(map(chr, range(32, 127)))
    records = data.windows(text, 9)
    assert records.shape == (9, 10)
    assert records.flatten().tolist() == [ord(letter) for letter in text[:90]]


def test_what_can_not_be_is_refused():
    with pytest.raises(ConfigurationError, match="list of texts"):
        data.hashed_bag("one text")
    with pytest.raises(ConfigurationError, match="fewer than one record"):
        data.windows("abc", 5)
    with pytest.raises(ConfigurationError, match="buckets"):
        data.hashed_bag(["a"], buckets=1)
    with pytest.raises(ConfigurationError, match="'train' or 'test'"):
        data.reviews("validation")


def test_weights_of_a_folder_are_fine_tuned(tmp_path, monkeypatch):
    """No network: the folder has it all."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "great", "dull", "film"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=128
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    spec = importlib.util.spec_from_file_location("text_benchmark", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "text_benchmark", script)
    spec.loader.exec_module(script)

    model = script.reader(str(tmp_path))
    ids, mask = script.tokens(str(tmp_path), ["great film", "dull film"] * 8, 12)
    assert ids.shape == mask.shape == (16, 12)
    assert ids[0, 1:4].tolist() == [5, 7, 3]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train, loss = script.on("cpu", ids, mask, torch.arange(16) % 2), torch.nn.CrossEntropyLoss(reduction="none")
    spent = script.trained(model, loss, train, 8.0, script.Settings(8, 2, 0.5, 1e-2, None), 0, "cpu")
    assert 0 < spent <= 8.0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora" in name or "head" in name for name in moved)
    assert 0 <= lipdp.evaluate(model, loss, train)["accuracy"] <= 1
