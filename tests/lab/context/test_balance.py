"""Balance of documents over context ranks, by small cases that can be counted by hand."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from phalanx.scripts.lab.context import balance

PAGE = (Path(__file__).parents[3] / "docs/long_context.md").read_text("utf-8")


def test_splits_give_each_rank_as_many_tokens() -> None:
    for split in (balance.contiguous, balance.zigzag):
        assert np.bincount(split([5, 11, 16], 4)).tolist() == [8, 8, 8, 8]
    assert balance.zigzag([8], 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert balance.by_document([4, 4], 2).tolist() == [0, 1, 1, 0] * 2


def test_one_document_is_what_zigzag_is_for() -> None:
    rows = [[4096]]
    assert balance.imbalance(rows, balance.zigzag, 8) == pytest.approx(1.0)
    # The last of R parts has (2 R - 1) / R^2 of the pairs.
    assert balance.imbalance(rows, balance.contiguous, 8) == pytest.approx(15 / 8, rel=1e-3)


def test_two_documents_are_uneven_by_zigzag() -> None:
    """Rank 0 of two has the short beginnings of a document and the end of the other."""
    rows = [[3072, 1024]]
    pairs = np.arange(1, 3073), np.arange(1, 1025)
    ends = pairs[0][:1024].sum() + pairs[1].sum()
    expected = max(ends, pairs[0][1024:].sum()) / (sum(map(np.sum, pairs)) / 2)
    assert balance.imbalance(rows, balance.zigzag, 2) == pytest.approx(expected)
    assert balance.imbalance(rows, balance.by_document, 2) == pytest.approx(1.0)


def test_documents_follow_one_another_and_are_cut() -> None:
    lengths = np.array([3, 10, 7])
    rows = list(islice(balance.sequences(lengths, 8, seed=0), 5))
    assert all(sum(row) == 8 for row in rows)
    assert sum(map(len, rows)) > 5 and sum(map(sum, rows)) == 2 * lengths.sum()
    assert balance.pairs([[8]]) == 1 and balance.pairs([[4, 4]]) == 20 / 36
    assert balance.kept([[4, 4], [8]], 4) == 0.5


@pytest.mark.parametrize("name", ["one", "qwen3"])
def test_the_page_has_the_figures_of_the_program(name: str) -> None:
    rows = balance.drawn(name, 32768)
    figures = [f"{balance.imbalance(rows, each, 2):.2f}" for each in balance.SPLITS.values()]
    row = re.search(rf"^\| 32,768, 2 \| `{name}` \| ([\d,]+) \| (.*) \| 1.00 \|$", PAGE, re.M)
    assert row and row[2].split(" | ") == figures
    mean = sum(map(sum, rows)) / sum(map(len, rows))
    assert row[1] == f"{mean:,.0f}"
