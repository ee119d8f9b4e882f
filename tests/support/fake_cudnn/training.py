"""Training on a CPU with the experts of `kernels=cudnn`, which `kernels=auto` then selects."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.registry import Facts
from tests.support import fake_cudnn


@contextmanager
def experts_on_cpu(rank: int = 0) -> Iterator[None]:
    """In a process of a run, replace the package by the fake and accept the CPU."""
    facts = EXPERT_BACKENDS["cudnn"]
    on_cpu = replace(facts, unavailable=f"{__name__}:unavailable", limits="")
    with (
        mock.patch.dict(sys.modules, cudnn=fake_cudnn),
        mock.patch.dict(EXPERT_BACKENDS, cudnn=on_cpu),
    ):
        yield


def unavailable(facts: Facts) -> str | None:
    """Conditions of the package that do not depend on the GPU."""
    from phalanx.extras.blackwell.availability import runs_here

    return runs_here(replace(facts, packages=facts.packages | {"nvidia_cudnn_frontend"}))
