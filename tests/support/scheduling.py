"""Selection and scheduling of tests: unit tests, order of files, exclusive use of the machine."""

import fcntl
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SLOW_HELPERS = (
    "multiprocessing.context",
    "subprocess",
    "phalanx.kernels.sm90.jit.launch",
    "phalanx.scripts.lab.proof.run_experiments",
    "tests.kernels.compiling",
    "tests.kernels.interpreter",
    "tests.kernels.sm90.recording",
    "tests.kernels.sm90.sass",
    "tests.kernels.sm90.simt",
    "tests.kernels.triton_code",
    "tests.support.launch",
    "tests.extras.blackwell.offline_cudnn",
    "tests.support.torchrun",
)
"""Modules that compile or interpret kernels, or start processes."""


_OF_EXTRAS = re.compile(
    "muon|[Qq]wen3[_-][Nn]ext|blackwell|linear_(attention|recompute)|megatron|cudnn|hier|mxfp8|nvfp4"
    "|replica|expert_replication|overlap_microbatches=on|two micro-batches|recipe2|zero3|_host\\b"
    "|[Cc]ontext[_ ]par|parallel\\.context|\\bcontext\\b|\\bcp[24]|share_out_heads"
    "|--help \\w"
    "|deepseek_v32|DeepSeek-V3\\.2|[Gg][Ll][Mm]([_-]5|_moe_dsa)|model\\.variants|machine=(b200|h800)"
)
"""Words in the name of a test, or in its parameters, for what only an extra has."""


def needs_extras(item: pytest.Item) -> bool:
    """True for a test that needs extras/: by its folder, its name or its marker."""
    if {"extras", "plan"} & {*item.path.parts} or item.get_closest_marker("extras"):
        return True  # the planner weighs all of them
    if "lab" in item.path.parts:
        return False
    case = getattr(item, "callspec", None)
    return bool(_OF_EXTRAS.search(f"{item.name} {case.params if case is not None else ''}"))


def is_unit(item: pytest.Item) -> bool:
    """True for a unit test: in one process, without compilers, interpreters and child processes.

    A test is none if it is marked dist, alone, slow or gpu, is in tests/end_to_end, or if its file
    imports a module of `SLOW_HELPERS` or something from one.
    """
    if any(item.get_closest_marker(name) for name in ("dist", "alone", "slow", "gpu")):
        return False
    if "end_to_end" in item.path.parts:
        return False
    names = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in vars(getattr(item, "module", None)).values()
    }
    return names.isdisjoint(SLOW_HELPERS)


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort test files: those with ranks, other slow ones, unit tests, those for an idle machine.

    The first take longest, so that the processes end together; the last wait for tests of the other
    processes, which are short by then.
    """
    place: dict[Path, int] = {}
    for item in items:
        alone, ranks, unit = (
            item.get_closest_marker(n) is not None for n in ("alone", "dist", "unit")
        )
        own = 3 if alone else 0 if ranks else 2 if unit else 1
        known = place.setdefault(item.path, own)
        place[item.path] = 3 if 3 in (own, known) else min(own, known)
    return sorted(items, key=lambda item: place[item.path])


def slow(*cases: object) -> list[Any]:
    """Values of one parameter, or tuples of those of several, of tests that are slow."""
    together = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in together]


def mostly_slow(name: str, values: Iterable[object], *default: object) -> pytest.MarkDecorator:
    """Parametrize by values that make slow tests, but for these."""
    others = [value for value in values if value not in default]
    return pytest.mark.parametrize(name, [*default, *slow(*((value,) for value in others))])


def matrix(names: tuple[str, str], *default: tuple[object, object]) -> pytest.MarkDecorator:
    """Parametrize by these pairs, and by all other pairs of their values as slow tests."""
    values = (dict.fromkeys(column) for column in zip(*default, strict=True))
    others = [pair for pair in itertools.product(*values) if pair not in default]
    return pytest.mark.parametrize(names, [*default, *slow(*others)])


@contextmanager
def shared(folder: Path, *, alone: bool) -> Iterator[None]:
    """Share the machine with other processes inside, or use it `alone`.

    Args:
        folder: folder of the two lock files, the same for all processes.
    """
    with open(folder / "gate.lock", "w") as gate, open(folder / "ranks.lock", "w") as ranks:
        fcntl.flock(gate, fcntl.LOCK_EX)  # a waiting exclusive user blocks new shared ones
        fcntl.flock(ranks, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
