"""Environment and skips of all tests; the environment is inherited by every child process."""

import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # libraries', once in every new rank's output

import torch  # reads OMP_NUM_THREADS when it is imported

from phalanx.parallel.megatron.imports import importing_megatron
from tests.support.scheduling import in_order, is_unit, needs_extras, shared

gc.disable()  # until all test files are imported, which creates little garbage
with importing_megatron():  # as a run does, in half of the time that the test files would take
    import megatron.core.optimizer
    import megatron.core.transformer.attention  # noqa: F401

    from tests.support.gpu_runs import outcomes, pytest_generate_tests  # noqa: F401

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TORCHDYNAMO_DISABLE", "1"
    )  # the first compilation on a CPU takes minutes
    if hasattr(os, "SCHED_BATCH"):
        # A rank that is preempted where it wakes another one up may hold a lock of gloo, whose
        # thread then asks for it without a pause: a tenth of the time. Children inherit the policy.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """If nothing is compiled yet, one process imports all test files before the others do.

    Side by side each would compile all modules, in twice the time of their imports.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with open(Path(session.config.option.basetemp).parent / "imports.lock", "w") as lock:
        if not _compiled():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _compiled():
            fcntl.flock(lock, fcntl.LOCK_UN)
        return (yield)


def _compiled() -> bool:
    """True once test files of this folder, the last that are imported, have been compiled."""
    return any(Path(__file__).parent.glob("__pycache__/test_*"))


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_unit(item):
            item.add_marker("unit")
        if needs_extras(item):
            item.add_marker("extras")
    items[:] = in_order(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exclude imported modules from later garbage collections, a fifth of the time."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def _turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keep other tests from running next to one that measures latencies."""
    alone = request.node.get_closest_marker("alone") is not None
    base = tmp_path_factory.getbasetemp()
    with shared(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, alone=alone):
        yield
