"""Layers of `ExpertParallelGroup` over `symm`, on two GPUs or in two processes on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("expert_parallel_ranks.py")


@pytest.mark.parametrize("one_gpu", [False, True])
def test_layers_equal_those_over_collectives_bit_for_bit(one_gpu: bool) -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not hopper or torch.cuda.device_count() < 2 - one_gpu:
        pytest.skip("needs Hopper GPUs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(PROGRAM)],
        env=os.environ | {"PHALANX_ONE_GPU": str(int(one_gpu))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.count("equal:") == 21
