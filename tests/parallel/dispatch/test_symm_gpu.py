"""Layers over `symm` on all GPUs of this host that it serves; see `symm_layer`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "symm_layer.py"


def compare(ranks: int, *given: str, timeout: float = 300) -> None:
    """Run the program with arguments on a number of GPUs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), str(PROGRAM), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.count("equal:") >= 48


def test_layers_equal_those_over_collectives_bit_for_bit() -> None:
    ranks = min(torch.cuda.device_count(), 8)
    if ranks < 2 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs two Hopper GPUs")
    compare(ranks)
