"""Models of other people, as they are: a few of benchmarks/models/zoo.py. All of them: LIPDP_ALL_MODELS=1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: no models of it to try")
pytest.importorskip("peft", reason="peft is not installed: no adapters to try")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "models"))

import table
import zoo

from lipdp import clipping

pytestmark = pytest.mark.filterwarnings("ignore")
# One for each cause: rows for all, windows, tokens, relative positions, experts, length first, bare parameters, parametrised
# weights, adapters that use their layers by hand.
FEW = (
    "BertForSequenceClassification",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "MixtralForCausalLM",
    "XLNetForSequenceClassification",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "SwinForImageClassification",
    "BeitForImageClassification",
    "Wav2Vec2ForSequenceClassification",
    "CLIPModel (pairs)",
    "BertForSequenceClassification + Lora (DoRA)",
    "LlamaForCausalLM + IA3",
)
CASES = [case for case in zoo.ZOO if case.name in FEW or os.environ.get("LIPDP_ALL_MODELS")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_clipped_sums_are_those_of_a_loop(case):
    made = zoo.build(case)
    with table.InFloat64():
        expected, c = table.reference(made)
        found = clipping.clipped_gradients(made.model, made.loss, made.x, made.y, c)
    assert table.difference(found, expected) < (1e-5 if "Mamba" in case.name else 1e-6)


@pytest.mark.parametrize("name", ["BertForSequenceClassification + Lora", "GPT2LMHeadModel"])
def test_a_private_step_in_training_mode(name):
    table.one_step(zoo.build(next(case for case in zoo.ZOO if case.name == name)))


def test_all_kinds_are_there():
    assert len(zoo.ZOO) >= 40
    assert {case.family for case in zoo.ZOO} >= {"encoder", "decoder", "vision", "sound", "encoder-decoder", "peft"}
