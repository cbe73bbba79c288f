"""Public constants are computed once on a machine, and what is read is what was computed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lipdp.features import stacks
from lipdp.features.patches import PatchFeatures, _learn_from_leaves, kept_constants

SHAPE = (1, 12, 12)
BLOCK = stacks.PatchBlock(patch=3, filters=6, grid=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIPDP_DATA", str(tmp_path))
    forget()
    yield tmp_path / "constants"
    forget()


def forget() -> None:
    """As a new program would begin."""
    stacks._block_constants.cache_clear()
    _learn_from_leaves.cache_clear()


def features(images: torch.Tensor) -> torch.Tensor:
    front = torch.nn.Sequential(*stacks.feature_front(SHAPE, blocks=[BLOCK])[0])
    return front(images)


def test_the_next_program_reads_what_the_first_computed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    first = features(images)
    assert len(list(cache.iterdir())) == 2  # the dictionary, and the scales of its responses
    forget()
    monkeypatch.setattr("lipdp.features.patches.leaf_images", lambda *_, **__: pytest.fail("drawn again"))
    monkeypatch.setattr(stacks, "leaf_images", lambda *_, **__: pytest.fail("measured again"))
    assert torch.equal(features(images), first)
    with pytest.raises(pytest.fail.Exception, match="drawn again"):
        PatchFeatures(SHAPE, patch=3, filters=8, grid=2)  # other settings have other constants


def test_a_broken_file_is_computed_again(cache: Path) -> None:
    images = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    first = features(images)
    for number, file in enumerate(sorted(cache.iterdir())):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if number else b"no archive")
    forget()
    assert torch.equal(features(images), first)
    forget()
    assert torch.equal(features(images), first)  # and is whole again


def test_a_file_of_other_settings_is_not_taken(cache: Path) -> None:
    kept_constants("things", (1, 2), lambda: {"a": torch.ones(2)})
    (own,) = cache.iterdir()
    kept_constants("things", (1, 3), lambda: {"a": torch.zeros(2)})
    (other,) = set(cache.iterdir()) - {own}
    other.write_bytes(own.read_bytes())
    assert torch.equal(kept_constants("things", (1, 3), lambda: {"a": torch.zeros(2)})["a"], torch.zeros(2))


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO, "lipdp"):
        assert torch.equal(kept_constants("things", 1, lambda: {"a": torch.ones(2)})["a"], torch.ones(2))
    assert "computing public constants of things" in caplog.text
    assert "not kept" in caplog.text
