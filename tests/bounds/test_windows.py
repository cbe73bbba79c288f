"""Counting windows: m against brute force and against theory.md's formula; average pools against their dense matrix."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lipdp.bounds.operator_norm import average_gain, has_empty_window, multiplicity, output_length, same_padding
from tests.soundness.harness import impulse_jacobian, largest_singular_value

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def brute_force(size: int, k: int, s: int, d: int, pads: tuple[int, int], mode: str) -> int:
    """Pad an index image with torch itself, unfold it, and count how often each index is read."""
    index = torch.arange(1, size + 1, dtype=torch.float64).reshape(1, 1, size)
    padded = F.pad(index, pads, mode=MODES[mode])[0, 0]
    reads = [int(padded[p * s + t * d]) for p in range((len(padded) - d * (k - 1) - 1) // s + 1) for t in range(k)]
    return max([reads.count(i) for i in range(1, size + 1)], default=0)


@pytest.mark.parametrize("mode", MODES)
def test_multiplicity_equals_brute_force_along_one_axis(mode: str) -> None:
    seen = 0
    for size, k, s, d in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 4, 5), (1, 2, 3), (1, 2, 3)):
        most = {"zeros": 4, "replicate": 4, "circular": size, "reflect": size - 1}[mode]
        for pads in {(0, 0), (min(1, most), min(1, most)), (min(2, most), min(2, most)), (min(1, most), min(2, most))}:
            if output_length(size, k, s, d, *pads) < 1:
                continue
            expected = max(1, brute_force(size, k, s, d, pads, mode))
            assert multiplicity([size], [k], [s], [d], [pads], mode) == expected, (size, k, s, d, pads)
            seen += 1
    assert seen > 300


def test_zero_padding_matches_the_closed_formula() -> None:
    """Π min(⌈k/(s/gcd(s, d))⌉, n_out): an upper bound always, and equal wherever the input is long enough."""
    equal = total = 0
    for size, k, s, d, p in itertools.product((3, 6, 12), (1, 2, 3, 5), (1, 2, 3), (1, 2, 3), (0, 1, 2)):
        outputs = output_length(size, k, s, d, p, p)
        if outputs < 1:
            continue
        formula = min(math.ceil(k / (s // math.gcd(s, d))), outputs)
        counted = multiplicity([size], [k], [s], [d], [(p, p)])
        assert counted <= formula
        if size == 12:
            total, equal = total + 1, equal + (counted == formula)
    assert equal >= 0.9 * total


def test_axes_multiply_and_the_known_values_come_out() -> None:
    assert multiplicity((28, 28), (3, 3), (1, 1), (1, 1), [(1, 1)] * 2) == 9
    assert multiplicity((28, 28), (3, 3), (2, 2), (1, 1), [(1, 1)] * 2) == 4
    assert multiplicity((28, 28), (3, 2), (3, 1), (1, 1), [(0, 0)] * 2) == 2
    assert multiplicity((2, 2), (5, 5), (1, 1), (1, 1), [(2, 2)] * 2) == 4  # capped by the 2×2 outputs
    # Reflection reads 1 and its mirror image: 4 of 3 taps reach the second element.
    assert multiplicity((8,), (3,), (1,), (1,), [(1, 1)], "reflect") == 4
    assert multiplicity((8,), (3,), (2,), (1,), [(0, 0)], "zeros", [0]) == 1


def test_same_padding_is_torchs() -> None:
    for k, d in itertools.product(range(1, 6), range(1, 4)):
        conv = torch.nn.Conv1d(1, 1, k, padding="same", dilation=d, padding_mode="circular")
        left, right = same_padding(k, d)
        assert conv._reversed_padding_repeated_twice == [left, right]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_average_gain_covers_the_dense_matrix_in_every_mode(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    kernel = (data.draw(st.integers(1, min(4, height + 2))), data.draw(st.integers(1, min(4, width + 2))))
    stride = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    ceil, include = data.draw(st.booleans()), data.draw(st.booleans())
    divisor = data.draw(st.sampled_from([None, None, 1, 3]))
    pool = torch.nn.AvgPool2d(kernel, stride, padding, ceil, include, divisor)
    try:
        outputs = tuple(pool(torch.zeros(1, 1, height, width)).shape[2:])
    except RuntimeError:
        return  # torch itself refuses the window
    actual = largest_singular_value(impulse_jacobian(pool, (1, height, width)))
    claimed = average_gain((height, width), kernel, stride, padding, outputs, include, divisor)
    assert actual <= claimed * (1 + 1e-12)
    if all(s >= k for s, k in zip(stride, kernel, strict=True)):  # disjoint windows: exact
        assert actual >= claimed * (1 - 1e-9)


def test_windows_of_padding_only_are_found() -> None:
    assert has_empty_window((3,), (2,), (2,), (2,), (1,), (3,))
    assert not has_empty_window((4,), (2,), (2,), (1,), (1,), (3,))
