"""cuDNN's wrappers in torch, for tests of the adapter."""

import sys

import pytest

from tests.support import fake_cudnn


@pytest.fixture
def fake(monkeypatch):
    """In the place of nvidia-cudnn-frontend; its `CALLS` are those of the test."""
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    fake_cudnn.CALLS.clear()
    return fake_cudnn
