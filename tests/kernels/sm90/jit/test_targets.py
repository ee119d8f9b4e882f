"""Kernels that do not multiply compile for Blackwell too, on a CPU; the others say why not."""

import re

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.shipped import SHIPPED
from tests.kernels.sm90.echo import EchoConfig, EchoKernel
from tests.support.scheduling import mostly_slow

FIRST = {kernel: config for kernel, config in reversed(SHIPPED)}
"""A configuration of each kernel class."""
MULTIPLY = {
    "GroupedGemmKernel",
    "Fc1Kernel",
    "DgradKernel",
    "WgradKernel",
    "WgradPairKernel",
}


@mostly_slow("arch", ["sm_100a", "sm_103a"], "sm_103a")
@pytest.mark.parametrize("kernel", FIRST, ids=lambda kernel: kernel.__name__)
def test_kernels_for_blackwell(tmp_path, kernel, arch):
    keep = f"--keep-ptx --keep-cubin --dump-dir {tmp_path}"
    if kernel.__name__ in MULTIPLY:
        why = f"{kernel.__name__} uses warpgroup instructions, which exist on sm_90a but not on"
        with pytest.raises(ValueError, match=re.escape(why)):
            launch.compile_kernel(kernel, FIRST[kernel], keep, arch)
        return
    artifacts = launch.compile_kernel(kernel, FIRST[kernel], keep, arch).artifacts
    assert f".target {arch}" in artifacts.PTX
    assert artifacts.CUBIN[:4] == b"\x7fELF"


def test_a_kernel_has_a_name_for_each_target():
    names = {launch.entry_name(EchoKernel, EchoConfig(), arch) for arch in launch.ARCHES.values()}
    assert len(names) == 3
    assert launch.entry_name(EchoKernel, EchoConfig()) in names


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")]
)
def test_the_target_is_that_of_the_gpu(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    launch._arch.cache_clear()
    assert launch._arch() == arch
    launch._arch.cache_clear()
