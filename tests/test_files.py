"""Files are there whole or not at all; pickles of earlier versions are read."""

import pickle
import stat

import numpy as np
import pytest

import lipdp
from lipdp._files import PUBLIC, written_whole


def test_a_file_takes_its_place_when_all_is_written(tmp_path):
    file = tmp_path / "new" / "file"
    for content, mode in ((b"one", 0o600), (b"two", PUBLIC)):
        with written_whole(file, mode) as stream:
            stream.write(content)
            assert not file.exists() or file.read_bytes() == b"one"
        assert file.read_bytes() == content
        assert stat.S_IMODE(file.stat().st_mode) == mode
    assert [path.name for path in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_who_is_interrupted_leaves_what_was_there(tmp_path, error):
    file = tmp_path / "file"
    file.write_bytes(b"before")

    def interrupted():
        with written_whole(file) as stream:
            stream.write(b"half of ")
            raise error

    with pytest.raises(error):
        interrupted()
    assert file.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_writers_do_no_harm(tmp_path):
    file = tmp_path / "file"
    with written_whole(file) as one, written_whole(file) as other:
        one.write(b"1" * 100_000)
        other.write(b"2" * 10)
    assert file.read_bytes() == b"1" * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


STOOD = [
    "audit.curves.GaussianCurve",
    "features.straighten.Straighten",
    "mechanisms.lattice.Lattice",
    "mechanisms.robust.Robust",
    "mechanisms.squares.SquaresMechanism",
    "models.mixer.MixerBlock",
    "models.mixer.Tokens",
    "parametrize.orthogonal_conv.AOC",
    "parametrize.orthogonal_conv.BCOP",
    "parametrize.orthogonal_conv.SOC",
    "privacy.adaptive.AdaptiveClip",
    "training.averaging.TailAverage",
    "training.averaging.WeightAverage",
    "training.history.History",
]


@pytest.mark.parametrize("place", STOOD)
def test_a_pickle_finds_a_class_where_it_stood_when_it_was_written(place):
    module, name = f"lipdp.{place}".rsplit(".", 1)
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert found.__name__ == name
    assert found.__module__ != module


def test_an_estimator_that_was_pickled_before_modules_were_folded_is_read():
    rows, labels = np.random.default_rng(0).uniform(size=(40, 2)), np.array(["no", "yes"] * 20)
    fitted = lipdp.PrivateClassifier(3.0, schema=(0, 1)).fit(rows, labels)
    then = pickle.dumps(fitted, protocol=0).replace(b"lipdp.training.callbacks\n", b"lipdp.training.history\n")
    assert b"lipdp.training.history" in then
    assert (pickle.loads(then).predict(rows) == fitted.predict(rows)).all()
