"""Kernels for a GPU behind one door: tried once on each device, and not used where the trial fails. No GPU is needed here."""

import types

import pytest
import torch

from lipdp import _kernels
from lipdp._kernels import Kernels, power_of_two
from lipdp.errors import LipdpNotice

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch):
    """As if there were one that nothing is recorded on, with Triton."""
    state = types.SimpleNamespace(recording=False, capability=(9, 0), triton=object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.recording)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    monkeypatch.setattr(_kernels.importlib.util, "find_spec", lambda name: state.triton)
    monkeypatch.setattr(torch.version, "hip", None)
    return state


def door(right=lambda device: True, **options):
    return Kernels("types", "this test", right, **options)


def test_they_are_tried_once_on_each_device(gpu):
    tried = []
    kernels = door(lambda device: tried.append(device) is None)
    assert [kernels.on(device) for device in (FIRST, SECOND, FIRST, torch.device("cpu"))] == [True, True, True, False]
    assert tried == [FIRST, SECOND]
    assert kernels.module is types


def test_what_computes_something_else_is_not_used(gpu):
    kernels = door(lambda device: False, instead="the processor does it")
    with pytest.warns(LipdpNotice, match="for this test are not used on cuda:0, the processor does it: they do not compute what"):
        assert not kernels.on(FIRST)
    assert not kernels.on(FIRST)  # and nothing is said again: warnings are errors here


def test_what_does_not_compile_is_not_used(gpu):
    def failing(device):
        raise RuntimeError("no compiler\nand more")

    with pytest.warns(LipdpNotice, match="torch does it: RuntimeError: no compiler$"):
        assert not door(failing).on(FIRST)


def test_nothing_is_tried_while_a_graph_is_recorded(gpu):
    kernels, gpu.recording = door(), True
    assert not kernels.on(FIRST)
    gpu.recording = False
    assert kernels.on(FIRST)


@pytest.mark.parametrize(("least", "old", "amd"), [(8, False, False), (0, True, False), (None, True, True)])
def test_which_gpus_they_are_for(gpu, monkeypatch, least, old, amd):
    gpu.capability = (7, 5)
    assert door(least=least).on(FIRST) is old
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert door(least=least).on(FIRST) is amd


def test_without_triton_there_are_none(gpu):
    gpu.triton = None
    kernels = door()
    assert not kernels.on(FIRST)
    assert kernels.module is None


def test_sides_of_tiles():
    assert [power_of_two(value, 16, 64) for value in (0, 16, 17, 33, 1000)] == [16, 16, 32, 64, 64]
