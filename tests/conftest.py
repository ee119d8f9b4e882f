"""Environment and skips of all tests; the environment is inherited by every child process."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # libraries', once in every new rank's output

import torch  # noqa: E402  (reads OMP_NUM_THREADS when it is imported)

from tests.support.turns import in_order, shared  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TORCHDYNAMO_DISABLE", "1"
    )  # the first compilation on a CPU takes minutes


def _require_own_kernels() -> None:
    """Hugging Face publishes a package of the same top-level name; it must not shadow ours."""
    own = Path(__file__).resolve().parent.parent / "kernels"
    spec = importlib.util.find_spec("kernels")
    found = {Path(p).resolve() for p in (spec and spec.submodule_search_locations) or ()}
    if found != {own}:
        others = ", ".join(map(str, found - {own})) or "no folder"
        raise pytest.UsageError(
            f"package `kernels` comes from {others}, not {own}: pip uninstall kernels"
        )


_require_own_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests with ranks do not run beside a test that measures how soon something happens."""
    node = request.node
    alone = node.get_closest_marker("alone") is not None
    if not alone and node.get_closest_marker("dist") is None:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    with shared(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, alone=alone):
        yield
