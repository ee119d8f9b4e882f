"""Whole rows are packed into sequences with little padding."""

import numpy as np
import pytest

from phalanx.extras.chat.packing import packed


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_in_one_sequence(seed: int) -> None:
    size = 64
    lengths = np.random.default_rng(seed).integers(1, size + 1, 500)
    sequences = packed(lengths, size)
    assert sorted(row for rows in sequences for row in rows) == list(range(500))
    filled = [int(lengths[rows].sum()) for rows in sequences]
    assert max(filled) <= size
    # Best fit decreasing is within 11/9 of the best, which is no less than the sum by the size.
    assert len(sequences) <= 11 / 9 * np.ceil(lengths.sum() / size) + 1
    assert packed(lengths, size) == sequences


def test_rows_fit_where_the_least_room_is() -> None:
    assert sorted(map(sorted, packed([5, 7, 3, 3, 2], 10))) == [[0, 3, 4], [1, 2]]
    assert packed([], 10) == []


def test_the_order_does_not_tell_the_lengths() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 65, 4000))
    sequences = packed(lengths, 64)
    longest = [int(lengths[rows].max()) for rows in sequences]
    half = len(longest) // 2
    assert abs(np.mean(longest[:half]) - np.mean(longest[half:])) < 2
