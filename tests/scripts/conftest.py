"""Fixtures of several commands' tests."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Figures that are drawn, still open."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", drawn.append)
        yield drawn
    pyplot.close("all")
