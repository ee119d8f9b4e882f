"""Kernels of expert replication that are built ahead of time: they compile, and all are new."""

import pytest

pytest.importorskip("cutlass")

from phalanx.extras.replication.kernels.shipped import kernels
from phalanx.kernels.sm90.jit.shipped import COMPILED, SHIPPED, with_capabilities
from tests.kernels.sm90.jit import test_compile as of_core
from tests.support.scheduling import mostly_slow

KERNELS = tuple(kernels())


def test_builds_have_them_behind_those_of_the_core() -> None:
    assert len(set(KERNELS)) == len(KERNELS) and not {*KERNELS} & {*COMPILED}
    assert with_capabilities(SHIPPED) == (*SHIPPED, *KERNELS)


@mostly_slow("number", range(len(KERNELS)), len(KERNELS) - 1)
def test_nothing_spills(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_core, "KERNELS", KERNELS)
    code, (_, config) = of_core.compile_and_read(number), KERNELS[number]
    of_core.test_nothing_spills(code, config)
    of_core.test_registers_fit_their_warp_groups(code)
