"""Records with several inputs: tuples and dicts of tensors, from datasets to weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lipdp
from lipdp import clipping
from lipdp.data import Columns
from lipdp.errors import CheckpointError, ConfigurationError, DataError, UnsupportedError
from lipdp.training.batches import gather, gather_lazily, microbatches
from tests.clipping.helpers import METHODS

COUNT, LENGTH, WORDS = 48, 5, 11


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Reader(torch.nn.Module):
    """Ids under a mask, with positions of its own and a table for them."""

    def __init__(self, wrapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wrapped = wrapped
        self.words, self.places = torch.nn.Embedding(WORDS, 6), torch.nn.Embedding(LENGTH, 6)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        hidden = self.words(input_ids)
        if position_ids is not None:
            hidden = hidden + self.places(position_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        logits = self.head(hidden.tanh().sum(1))
        return Output(logits, hidden) if self.wrapped else logits


def columns(count: int = COUNT) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (count, LENGTH), generator=draw)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (count, 1), generator=draw)
    places = torch.arange(LENGTH).flip(0).expand(count, -1).clone()
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": places, "label": ids[:, 0] % 3}


class Named(Dataset):
    """Hugging Face's kind: a dict of lists, with a column of labels."""

    def __init__(self, table=None) -> None:
        self.table = table or columns()

    def __len__(self) -> int:
        return len(self.table["label"])

    def __getitem__(self, number):
        return {name: values[number].tolist() for name, values in self.table.items()}


class Pairs(Named):
    def __getitem__(self, number):
        record = {name: values[number] for name, values in self.table.items()}
        return record, record.pop("label")


class Tuples(Named):
    def __getitem__(self, number):
        *parts, target = (values[number] for values in self.table.values())
        return tuple(parts), target


def stored() -> TensorDataset:
    return TensorDataset(*columns().values())


LOSS = torch.nn.CrossEntropyLoss(reduction="none")
SETS = {"named": Named, "pairs": Pairs, "tuples": Tuples, "stored": stored}


def planned(model, **changes):
    settings = {"dataset_size": COUNT, "batch_size": 12, "delta": 1e-3, "noise_multiplier": 1e-6, "steps": 3, "accountant": "rdp"}
    return lipdp.plan(model, LOSS, **{**settings, "method": "bookkeeping", "max_grad_norm": 0.5, **changes})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [tuple, dict])
def test_clipped_sums_are_those_of_a_loop(kind, method):
    model, table = Reader(wrapped=kind is dict).double(), columns(6)
    y = table.pop("label")
    x = kind(table) if kind is dict else tuple(table.values())
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    norms = []
    for i in range(6):
        output = model(*(part[i : i + 1] for part in table.values()))
        output = output.logits if kind is dict else output
        found = torch.autograd.grad(LOSS(output, y[i : i + 1]).sum(), list(model.parameters()))
        norms.append(torch.stack([g.square().sum() for g in found]).sum().sqrt())
        for name, g in zip(total, found, strict=True):
            total[name] += min(1.0, 1.75 / float(norms[-1])) * g
    assert min(norms) < 1.75 < max(norms)
    sums = clipping.clipped_gradients(model, LOSS, x, y, 1.75, method)
    assert all(torch.allclose(sums[name], total[name], rtol=1e-9, atol=1e-12) for name in total)
    assert torch.allclose(clipping.per_example_norms(model, LOSS, x, y), torch.stack(norms), rtol=1e-6)


def test_copies_masks_and_parts():
    model, table = Reader().double(), columns(6)
    y = table.pop("label")
    whole = clipping.clip_batch(model, LOSS, table, y, 1.0, copies=2)
    keep = torch.tensor([True, False, True])
    some = clipping.clip_batch(model, LOSS, table, y, 1.0, copies=2, mask=keep)
    clipper = clipping.Clipper(model, LOSS, copies=2)
    clipper._most = 2  # as if the three examples did not fit
    parts = clipper(table, y, 1.0)
    assert torch.allclose(parts.sums["head.weight"], whole.sums["head.weight"])
    middle = clipping.clip_batch(model, LOSS, {k: v[2:4] for k, v in table.items()}, y[2:4], 1.0, copies=2)
    assert torch.allclose(some.sums["words.weight"] + middle.sums["words.weight"], whole.sums["words.weight"])


def test_an_example_that_is_not_finite_is_left_out():
    class Scaled(Reader):
        def forward(self, input_ids, scale):
            return super().forward(input_ids) * scale

    model, ids, y = Scaled(), columns(4)["input_ids"], torch.zeros(4, dtype=torch.long)
    scale = torch.ones(4, 1, dtype=torch.float64)
    alone = clipping.clipped_gradients(model, LOSS, (ids[1:], scale[1:]), y[1:], 0.1)
    scale[0] = float("nan")
    for method in ("bookkeeping", "multiloss", "naive"):
        found = clipping.clipped_gradients(model, LOSS, (ids, scale), y, 0.1, method)
        assert all(torch.allclose(found[name], alone[name], atol=1e-6) for name in alone)


@pytest.mark.parametrize("kind", SETS)
def test_runs_on_all_sorts_of_datasets_are_the_same(kind):
    weights = []
    for make in (SETS["stored"], SETS[kind]):
        model = Reader()
        # lr=0.3: three steps that differ in anything would show
        history = lipdp.fit(
            model, LOSS, torch.optim.SGD(model.parameters(), 0.3), planned(model), make(), validation=make(), seed=0,
            reproducible=True, evaluations=1,
        )  # fmt: skip
        weights.append(model.state_dict())
        assert 0 <= history.metrics["validation_accuracy"][-1] <= 1
    # The key is bound to the names of the inputs too, so other noise (of 1e-6) and other samples: only tuples are the same records.
    same = kind in ("stored", "tuples")
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0]) == same


def test_steps_are_on_the_sum_of_what_is_in_the_batch():
    model = Reader()
    engine = lipdp.PrivacyEngine(model, LOSS, torch.optim.SGD(model.parameters(), 1.0), planned(model), microbatch_size=5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = next(engine.batches(Named()))
    expected = clipping.clipped_gradients(model, LOSS, x, y, 0.5)
    engine.step(x, y)
    for name, p in model.named_parameters():
        assert torch.allclose(before[name] - p.detach(), expected[name] / 12, atol=1e-5)
    with pytest.raises(ConfigurationError, match="used in a step before"):
        engine.step(x, y)


def test_a_checkpoint_goes_on_and_its_key_is_bound_to_every_input(tmp_path):
    def run(table, stop=None, **options):
        model = Reader()

        class Stop(lipdp.training.Callback):
            def on_step(self, run):
                if run.engine.steps == stop:
                    run.stop = True

        lipdp.fit(
            model, LOSS, torch.optim.SGD(model.parameters(), 0.3), planned(model, noise_multiplier=1.0), Named(table),
            callbacks=[Stop()], **options,
        )  # fmt: skip
        return model.state_dict()

    whole = run(columns(), seed=0, reproducible=True)
    file = tmp_path / "run.pt"
    run(columns(), stop=2, seed=0, reproducible=True, checkpoint=file)
    changed = columns()
    changed["attention_mask"][7, 0] = 1 - changed["attention_mask"][7, 0]
    with pytest.raises(CheckpointError, match="not the records"):
        run(changed, seed=0, reproducible=True, checkpoint=file, resume=True)
    resumed = run(columns(), seed=0, reproducible=True, checkpoint=file, resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_empty_batches_have_the_structure():
    for make in SETS.values():
        x, y = gather(make(), torch.zeros(0, dtype=torch.long))
        assert all(leaf.shape == (0, LENGTH) for leaf in (x.values() if isinstance(x, dict) else x))
        assert y.shape == (0,)
    model = Reader()
    engine = lipdp.PrivacyEngine(model, LOSS, torch.optim.SGD(model.parameters(), 1.0), planned(model))
    engine.step(x, y, sample="own")
    assert engine.steps == 1


def test_microbatches_pad_with_records_under_a_mask():
    x, y = gather_lazily(stored(), torch.arange(7))
    found = list(microbatches(x, y, 5, torch.device("cpu")))
    assert [int(mask.sum()) for _, _, mask in found] == [5, 2]
    assert all(leaf.shape == (5, LENGTH) for inputs, _, _ in found for leaf in inputs)
    assert torch.equal(found[1][0][0][:2], columns()["input_ids"][5:7])


def test_proofs_are_of_one_input():
    model = lipdp.nn.Sequential(lipdp.nn.BoundedInput((4,)), lipdp.nn.SpectralLinear(4, 3))
    loss = lipdp.losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=8, batch_size=4, delta=1e-3, noise_multiplier=1.0, steps=1)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), 1.0), plan)
    with pytest.raises(DataError, match="plan is for examples of shape"):
        engine.step((torch.zeros(2, 4), torch.zeros(2, 4)), torch.zeros(2).long())
    with pytest.raises(UnsupportedError, match=r"clipless.*one input tensor"):
        engine.step((torch.zeros(2, 4),), torch.zeros(2).long())


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"input_ids": [1, 2], "text": "no", "label": 1}, "input 'text' must be .* a str: tokenize it"),
        ({"input_ids": [1, 2], "label": 1, "labels": 1}, "one column 'label' or 'labels'"),
        ({"label": 1}, "one column"),
        (({"input_ids": torch.ones(2)}, {"a": 1}), "target must be one tensor"),
    ],
)
def test_records_that_can_not_be_meant(record, text):
    with pytest.raises(DataError, match=text):
        gather([record] * 3, torch.arange(2))


def test_ragged_records_are_refused_unless_padded_to_a_public_length():
    ragged = [{"input_ids": list(range(1, 2 + n % 4)), "label": n % 3} for n in range(12)]
    with pytest.raises(DataError, match=r"lipdp.data.Columns\(dataset, length="):
        gather(ragged, torch.arange(4))
    padded = Columns(ragged, length=3, pad={"input_ids": 10})
    x, y = gather(padded, torch.arange(4))
    assert x["input_ids"].tolist() == [[1, 10, 10], [1, 2, 10], [1, 2, 3], [1, 2, 3]]
    assert x["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert y.tolist() == [0, 1, 2, 0]
    model = Reader()
    lipdp.fit(model, LOSS, torch.optim.SGD(model.parameters(), 0.1), planned(model, dataset_size=12), padded)


def test_columns_choose_and_say_what_is_missing():
    records = [({"input_ids": [4, 5, 6], "text": "x"}, [0, 1, 2])] * 2
    x, y = Columns(records, ("input_ids",), length=4)[0]
    assert x.keys() == {"input_ids"}
    assert y.tolist() == [0, 1, 2, -100]
    with pytest.raises(DataError, match="column 'text' holds a str"):
        Columns(records)[0]
    with pytest.raises(DataError, match="no column 'ids'; it has input_ids, text"):
        Columns(records, ("ids",))[0]
    with pytest.raises(DataError, match="no column 'label'"):
        Columns([{"a": 1}])[0]
    with pytest.raises(ConfigurationError, match="names of columns"):
        Columns(records, "input_ids")
    with pytest.raises(ConfigurationError, match="pass one of its parts"):
        lipdp.evaluate(Reader(), LOSS, {"train": records})


def test_evaluation_is_tried_before_anything_is_released():
    model = Reader()
    engine_steps = []

    class Count(lipdp.training.Callback):
        def on_step(self, run):
            engine_steps.append(run.engine.steps)

    bad = [({"input_ids": torch.zeros(LENGTH, dtype=torch.long), "strange": torch.zeros(2)}, 1)] * 4
    with pytest.raises(TypeError, match="strange"):
        lipdp.fit(
            model, LOSS, torch.optim.SGD(model.parameters(), 0.1), planned(model), Pairs(), validation=bad, callbacks=[Count()]
        )
    assert not engine_steps
