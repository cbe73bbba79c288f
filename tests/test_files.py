"""Files are there whole or not at all."""

import stat

import pytest

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
