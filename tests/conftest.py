"""Environment and skips of all tests; the environment is inherited by every child process."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # libraries', once in every new rank's output

import torch  # noqa: E402  (reads OMP_NUM_THREADS when it is imported)

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TORCHDYNAMO_DISABLE", "1"
    )  # the first compilation on a CPU takes minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
