"""More mistakes of a first hour: those of people who come with DataFrames, pictures, schedulers and callbacks of their own.

As in ``test_mistakes.py`` each is told by lipdp, by name, without a record's text; what is no mistake just works.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import lipdp
from lipdp import nn
from lipdp.errors import LipdpError, LipdpNotice, LipdpWarning
from lipdp.estimators import numeric
from lipdp.estimators.reading import forget_rows
from tests.test_mistakes import LOSS, data, fit, model, plan

pandas = pytest.importorskip("pandas")

N = 40
SCHEMA = {"age": (18, 90), "job": ["clerk", "nurse"]}
ANSWERS = np.array(["no", "yes"] * (N // 2))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp.estimators.methods._STEPS", 3)
    monkeypatch.setattr("lipdp.estimators.images._STEPS", 3)
    forget_rows()


def people(**columns):
    draw = np.random.default_rng(0)
    held = {"age": draw.integers(18, 90, N), "job": draw.choice(["clerk", "nurse"], N), **columns}
    return pandas.DataFrame(held)


def classify(rows=None, y=ANSWERS, *, schema=SCHEMA, **options):
    return lipdp.PrivateClassifier(3.0, schema=schema, **options).fit(people() if rows is None else rows, y)


def numbers(rows, y=ANSWERS, **options):
    return classify(rows, y, schema=numeric(0, 1), **options)


def pictures(x=None, y=ANSWERS, **options):
    return lipdp.PrivateClassifier(3.0, **options).fit(np.zeros((N, 9, 9), np.uint8) if x is None else x, y)


def scheduled(make):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return fit(net, optimizer=optimizer, scheduler=make(optimizer))


def suggested():
    net = model()
    decided = plan(net)
    return lipdp.fit(net, LOSS, lipdp.suggest_optimizer(net, decided), decided, data())


def swapped():
    net = model()
    return lipdp.fit(net, LOSS, plan(net), torch.optim.SGD(net.parameters(), lr=0.1), data())


def without_gradients(mode):
    with mode():
        fit()


ROWS = np.full((N, 2), 0.5)
MISTAKES = {
    # tables
    "columns in another order": (lambda: classify().predict(people()[["job", "age"]]), "feature_names_in_"),
    "a column less": (lambda: classify().predict(people()[["age"]]), "feature_names_in_"),
    "an array after a frame": (lambda: classify().predict(people().to_numpy()), "pandas.DataFrame(X"),
    "a frame after an array": (lambda: numbers(ROWS).predict(pandas.DataFrame(ROWS, columns=["a", "b"])), "X.to_numpy()"),
    "the target in the table": (
        lambda: classify(people(label=ANSWERS), pandas.Series(ANSWERS, name="label"), schema={**SCHEMA, "label": ["no", "yes"]}),
        "X.drop(columns=['label'])",
    ),
    "an index in another order": (lambda: classify(y=pandas.Series(ANSWERS)[::-1]), "y.loc[X.index]"),
    "numbers declared as texts": (lambda: classify(schema={**SCHEMA, "age": ["18", "90"]}), "the column is of type int64"),
    "a range in brackets": (lambda: classify(schema={**SCHEMA, "age": [18, 90]}), "a range is a pair, (low, high)"),
    "a missing category": (lambda: classify(people(job=[None, "clerk"] * (N // 2))), "missing values"),
    "a schema's file": (lambda: classify(schema="schema.json"), "lipdp train --csv"),
    "types as a schema": (lambda: classify(schema=people().dtypes), "mapping from columns"),
    "a dataset as X": (lambda: numbers(TensorDataset(torch.zeros(N, 2))), "dataset.tensors"),
    "a loader as X": (lambda: numbers(DataLoader(TensorDataset(torch.zeros(N, 2)))), "DataLoader"),
    "nothing as X": (lambda: lipdp.PrivateClassifier().fit(None, ANSWERS), "NoneType"),
    "a sparse tensor": (lambda: numbers(torch.zeros(N, 2).to_sparse()), "to_dense"),
    "a masked array": (lambda: numbers(np.ma.masked_less(ROWS, 0.6)), "mask"),
    "masked labels": (lambda: numbers(ROWS, np.ma.masked_less(np.arange(N) % 2, 1)), "mask"),
    "an array of records": (lambda: numbers(np.zeros(N, dtype=[("a", float), ("b", int)])), "pandas.DataFrame"),
    "durations": (lambda: numbers(np.zeros((N, 2), "timedelta64[s]")), "durations"),
    "bytes": (lambda: _undeclared(b"secret"), "bytes"),
    "labels in bytes": (lambda: numbers(ROWS, ANSWERS.astype(bytes)), "bytes"),
    "complex labels": (lambda: numbers(ROWS, np.ones(N) * 1j), "complex"),
    "a label for each row": (lambda: numbers(ROWS, [f"secret {n}" for n in range(N)]), "different labels"),
    "labels that Arrow misses": (
        lambda: numbers(ROWS, pandas.Series([None, *ANSWERS[1:]]).astype("string")),
        "missing labels",
    ),
    "labels that pandas misses": (lambda: numbers(ROWS, np.array([pandas.NA, *ANSWERS[1:]], object)), "missing labels"),
    "declared texts and numbers": (
        lambda: numbers(ROWS, np.arange(N) % 2, classes=["0", "1"]),
        "those are texts, and y holds numbers",
    ),
    "declared numbers and texts": (lambda: numbers(ROWS, classes=[0, 1]), "those are numbers, and y holds texts"),
    "classes of two kinds": (lambda: numbers(ROWS, np.arange(N) % 2, classes=[0, "1"]), "all texts or all numbers"),
    "a target that is one number": (lambda: lipdp.PrivateRegressor(target=(1, 1)).fit(ROWS, np.ones(N)), "two different numbers"),
    "reproducible as a text": (lambda: numbers(ROWS, reproducible="no", random_state=1), "reproducible is 'no'"),
    "a device that is not built": (lambda: numbers(ROWS, device="mps"), "device is 'mps'"),
    "scores without labels": (lambda: numbers(ROWS).score(ROWS), "score(X, y)"),
    "scores of other labels": (lambda: numbers(ROWS).score(ROWS, ["secret"] * N), "none of the labels"),
    "scores of too few labels": (lambda: numbers(ROWS).score(ROWS, ANSWERS[:3]), "inconsistent"),
    # pictures
    "paths of pictures": (lambda: pictures(["secret.png"] * N), "the folder that holds"),
    "an array's file": (lambda: pictures("pictures.npy"), "numpy.load"),
    "an archive": (lambda: pictures("pictures.zip"), "Unpack"),
    "whole numbers of 64 bits": (lambda: pictures(np.zeros((N, 9, 9), int)), "astype('uint8')"),
    "transparent pictures": (lambda: pictures(np.zeros((N, 9, 9, 4), np.uint8)), "X[..., :3]"),
    "one picture": (lambda: pictures().predict(np.zeros((9, 9), np.uint8)), "X[None]"),
    # runs
    "the suggestion as a pair": (suggested, "optimizer, scheduler ="),
    "plan and optimiser swapped": (swapped, "plan is a SGD"),
    "an optimiser's class": (lambda: fit(optimizer=torch.optim.SGD), "the class SGD"),
    "an optimiser's name": (lambda: fit(optimizer="adam"), "optimizer is 'adam'"),
    "a plan's file": (lambda: fit(decided="plan.json"), "PrivacyPlan.from_json"),
    "a model's name": (lambda: plan("mlp"), "torch.nn.Module"),
    "a model's class": (lambda: plan(nn.Sequential), "the class Sequential"),
    "a model that has no shape yet": (lambda: plan(nn.Sequential(nn.BoundedInput((4,)), torch.nn.LazyLinear(3))), "lazy"),
    "a model without values": (lambda: plan(model().to("meta")), "meta"),
    "arguments of the suggestion swapped": (lambda: lipdp.suggest_optimizer(plan(), model()), "torch.nn.Module"),
    "a scheduler of another optimiser": (
        lambda: scheduled(lambda _: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model().parameters(), lr=1.0), 1)),
        "another optimiser",
    ),
    "a scheduler that follows a metric": (lambda: scheduled(torch.optim.lr_scheduler.ReduceLROnPlateau), "CosineAnnealingLR"),
    "a scheduler's class": (lambda: scheduled(lambda _: torch.optim.lr_scheduler.StepLR), "the class StepLR"),
    "a function as callbacks": (lambda: fit(callbacks=print), "callbacks"),
    "one callback without a list": (lambda: fit(callbacks=lipdp.training.ProgressBar()), "in a list"),
    "a callback's class": (lambda: fit(callbacks=[lipdp.training.ProgressBar]), "the class ProgressBar"),
    "a pair of tensors": (lambda: fit(train=(torch.rand(50, 4), torch.zeros(50).long())), "TensorDataset(inputs, targets)"),
    "an array": (lambda: fit(train=np.zeros((50, 4))), "TensorDataset(inputs, targets)"),
    "a table as records": (lambda: fit(train=people()), "PrivateClassifier takes"),
    "a path as records": (lambda: fit(train="secret/"), "PrivateClassifier takes"),
    "a subset beyond its dataset": (lambda: fit(train=Subset(data(40), range(50))), "beyond the 40"),
    "a dataset as its size": (lambda: plan(dataset_size=data()), "a TensorDataset of 50"),
    "training records for validation": (lambda: fit(train=(own := data()), validation=own), "random_split"),
    "some of the training records": (lambda: fit(train=(own := data()), validation=Subset(own, [3, 4])), "random_split"),
    "slices of the training records": (
        lambda: fit(train=(own := data()), validation=TensorDataset(*(part[:9] for part in own.tensors))),
        "random_split",
    ),
    "gradients switched off": (lambda: without_gradients(torch.no_grad), "torch.no_grad()"),
    "inference mode": (lambda: without_gradients(torch.inference_mode), "torch.inference_mode()"),
    "a softmax before the cross-entropy": (lambda: plan(nn.Sequential(*model(), torch.nn.Softmax(1))), "ends in Softmax"),
    "a shape that is a number": (lambda: lipdp.models.create("mlp", input_shape=64, classes=3), "input_shape is 64"),
    "classes as a text": (lambda: lipdp.models.create("mlp", input_shape=(64,), classes="3"), "classes is '3'"),
    "a table as records by name": (lambda: lipdp.data.Columns(people()), "to_dict('records')"),
    "resume without a file": (lambda: fit(resume=True), "checkpoint=FILE"),
}


def _undeclared(cell):
    return lipdp.PrivateClassifier(3.0).fit(np.full((N, 2), cell), ANSWERS)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore::UserWarning:sklearn")
def test_a_mistake_is_told(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, thing = MISTAKES[name]
    with pytest.warns((LipdpWarning, LipdpNotice)) if name in WARNED else pytest.raises(LipdpError) as told:
        act()
    text = str(told[0].message) if name in WARNED else str(told.value)
    assert thing.lower() in text.lower(), text
    assert len(text.split()) >= 7, f"it says too little: {text}"
    assert "secret" not in text, "it shows somebody's record"


WARNED = {
    "a softmax before the cross-entropy",
    "the target in the table",
    "an index in another order",
    "training records for validation",
    "some of the training records",
    "slices of the training records",
}


def test_there_are_sixty_more() -> None:
    assert len(MISTAKES) >= 60


def test_the_report_is_there_without_another_import() -> None:
    script = "import lipdp; lipdp.report.write; lipdp.estimators.numeric"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


@pytest.mark.parametrize("backend", ["numpy_nullable", "pyarrow"])
def test_types_of_pandas_are_numbers_and_labels(backend) -> None:
    if backend == "pyarrow":
        pytest.importorskip("pyarrow")
    rows = people().convert_dtypes(dtype_backend=backend)
    labels = pandas.Series(np.arange(N) % 2).convert_dtypes(dtype_backend=backend)
    fitted = classify(rows, labels)
    assert fitted.classes_.tolist() == [0, 1]
    assert fitted.classes_.dtype.kind == "i"
    with pytest.warns(LipdpWarning, match="1 range is found"):  # a column of numbers, whatever holds them
        lipdp.PrivateClassifier(3.0, schema={"job": SCHEMA["job"]}).fit(rows, labels)


def test_sparse_columns_are_numbers() -> None:
    rows = pandas.DataFrame({"n": pandas.arrays.SparseArray(np.arange(N) % 3)})
    with pytest.warns(LipdpWarning, match="1 range is found"):
        lipdp.PrivateClassifier(3.0).fit(rows, ANSWERS)


def test_half_precision_of_torch() -> None:
    rows = torch.rand(N, 2).bfloat16()
    assert numbers(rows, (torch.arange(N) % 2).bfloat16()).predict(rows).shape == (N,)
    target = lipdp.PrivateRegressor(3.0, schema=numeric(0, 1), target=(0, 1))
    assert target.fit(rows, rows[:, 0]).predict(rows).shape == (N,)


def test_rows_of_one_index_in_one_order_and_others_pass_without_a_word(recwarn) -> None:
    shuffled = people().sample(frac=1.0, random_state=0)
    classify(shuffled, pandas.Series(ANSWERS, index=shuffled.index))
    forget_rows()
    classify(people(), pandas.Series(ANSWERS, index=range(100, 100 + N)))
    assert not [one for one in recwarn if issubclass(one.category, LipdpWarning)]


def test_whole_numbers_of_numpy_are_counts() -> None:
    assert plan(dataset_size=np.int64(50), batch_size=np.int32(20), steps=np.int64(2)).to_json() == plan().to_json()


def test_held_out_parts_of_one_dataset_are_no_training_records() -> None:
    own = data(60)
    first, rest = torch.utils.data.random_split(own, [50, 10])
    assert fit(train=first, validation=rest).last["validation_loss"] > 0
    halves = [TensorDataset(*(tensor[part] for tensor in own.tensors)) for part in (slice(0, 50), slice(50, 60))]
    assert fit(train=halves[0], validation=halves[1]).last["validation_loss"] > 0
    assert fit(train=first, validation=own, public=True).last["validation_loss"] > 0


class Pictures:
    """A folder with what lies in folders of pictures beside them."""

    def __init__(self, place) -> None:
        self.image = pytest.importorskip("PIL.Image")
        self.place, self.draw = place, np.random.default_rng(0)
        for label in ("cat", "dog"):
            (place / label).mkdir(parents=True)
            for number in range(6):
                self.save(f"{label}/{number}.png")

    def save(self, name, pixels=None) -> None:
        pixels = self.draw.integers(0, 255, (12, 12)).astype(np.uint8) if pixels is None else pixels
        self.image.fromarray(pixels).save(self.place / name)


@pytest.fixture
def folder(tmp_path):
    return Pictures(tmp_path / "pictures")


def test_what_a_system_hides_is_no_picture_and_no_class(folder) -> None:
    (folder.place / "cat" / "._0.png").write_bytes(b"\0\5\x16\7")
    for hidden in (".ipynb_checkpoints", "__MACOSX"):
        (folder.place / hidden).mkdir()
        folder.save(f"{hidden}/0.png")
    fitted = pictures(folder.place, None)
    assert fitted.classes_.tolist() == ["cat", "dog"]
    assert "the number of images, 12" in fitted.public_[0]


def test_floating_point_pictures_are_not_black(folder) -> None:
    for white, name in ((1.0, "a.tif"), (255.0, "b.tif"), (65535.0, "c.tif")):
        folder.save(f"cat/{name}", np.full((12, 12), 0.5 * white, np.float32))
    read = lipdp.data.images.read_pictures(folder.place / "cat")
    assert read.ndim == 3  # grey
    assert [int(picture.mean()) for picture in read[-3:]] == [127, 127, 127]


def test_a_folder_that_brings_labels_takes_no_others(folder) -> None:
    with pytest.raises(LipdpError, match="leave y out"):
        pictures(folder.place, ["a", "b"] * 6)
    assert pictures(folder.place / "cat", ["a", "b"] * 3).classes_.tolist() == ["a", "b"]


def test_the_folder_above_is_told(folder) -> None:
    with pytest.raises(LipdpError, match="give that one"):
        pictures(folder.place.parent, None)


def test_a_file_without_labels(tmp_path) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((N, 9, 9), np.uint8))
    with pytest.raises(LipdpError, match="holds images, and no array labels"):
        pictures(tmp_path / "x.npz", None)
    assert len(pictures(tmp_path / "x.npz").classes_) == 2


def test_pictures_of_pillow_and_columns_of_arrays() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (N, 9, 9)).astype(np.uint8)
    column = np.empty(N, object)
    column[:] = list(pixels)
    for given in ([image.fromarray(one) for one in pixels], column):
        assert pictures(given).shape_ == (1, 9, 9)
        forget_rows()


@pytest.mark.parametrize("mode", ["P", "HSV", "YCbCr"])
def test_places_in_a_palette_are_no_pixels(mode) -> None:
    image = pytest.importorskip("PIL.Image")
    colours = np.random.default_rng(0).integers(0, 255, (N, 9, 9, 3)).astype(np.uint8)
    with pytest.raises(LipdpError, match=r"convert\('RGB'\)"):
        pictures([image.fromarray(one).convert(mode) for one in colours])
