"""The programs in examples/ run, in small form; tests/test_first_hour.py lets them learn."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp

FOLDER = Path(__file__).parent.parent / "examples"


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_tested() -> None:
    known = {"batchnorm_resnet", "imdb_lora", "lightning_module", "opacus_mnist", "shakespeare"}
    assert {file.stem for file in FOLDER.glob("*.py")} == known


def test_the_example_of_opacus(monkeypatch, capsys) -> None:
    """On drawn images of MNIST's shape, so that it needs no files."""
    example = _example("opacus_mnist")
    draw = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.rand(64, 1, 28, 28, generator=draw), torch.arange(64) % 10)
    info = lipdp.data.info("mnist")
    monkeypatch.setattr(lipdp.data, "load", lambda name: (images, images, info))
    assert sum(p.numel() for p in example.network().parameters()) == 26_010
    assert math.isfinite(example.main(records=48, batch_size=16, steps=2, epsilon=3.0))
    assert "ε = 3.000, δ = 1e-05" in capsys.readouterr().out


def test_a_resnet_with_batch_normalisation(capsys) -> None:
    _example("batchnorm_resnet").main(steps=1, epsilon=8.0)
    told = capsys.readouterr().out
    assert "as it is: layer '1' (BatchNorm2d) can't be trained by clipping" in told
    assert told.count("GroupNorm(4, 16)") == 5


def test_lightning(tmp_path, monkeypatch) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    assert _example("lightning_module").main(epochs=20, epsilon=8.0) > 0.5
    assert list(tmp_path.glob("lightning_logs/**/metrics.csv"))


def _reviews(part: str) -> tuple[list[str], torch.Tensor]:
    return [f"a {'great' if n % 2 else 'dull'} film" for n in range(48)], torch.arange(48) % 2


@pytest.mark.parametrize("local", [False, True], ids=["random weights", "weights in a folder"])
def test_lora_on_reviews(local, tmp_path, monkeypatch, capsys) -> None:
    """The loader of pretrained weights is the real one, with a model that was saved here: nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    example = _example("imdb_lora")
    monkeypatch.setattr(lipdp.data, "reviews", _reviews)
    monkeypatch.setattr(example, "LENGTH", 12)
    weights = None
    if local:
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "great", "dull", "film"]
        (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
        transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        transformers.BertModel(transformers.BertConfig(vocab_size=len(names), **size)).save_pretrained(tmp_path)
        weights = str(tmp_path)
        base, tokenizer = example.pretrained(weights)
        stored = transformers.BertModel.from_pretrained(tmp_path)
        assert torch.equal(base.bert.embeddings.word_embeddings.weight, stored.embeddings.word_embeddings.weight)
        assert tokenizer(["a great film"])["input_ids"] == [[2, 5, 6, 8, 3]]
    assert 0 <= example.main(weights, epsilon=8.0, steps=2, batch_size=16) <= 1
    assert "at ε = 8" in capsys.readouterr().out


def test_letters(capsys) -> None:
    perplexity = _example("shakespeare").main("Shall I compare thee to a summer's day? " * 150, 8.0, steps=2, batch_size=20)
    assert 1 < perplexity < 400
    assert "at ε = 8" in capsys.readouterr().out
