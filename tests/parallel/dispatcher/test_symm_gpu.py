"""Layers over `symm`, with and without replication, on all GPUs of this host or on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "symm_layer.py"
REPLICATED = PROGRAM.parent / "replication" / "layer.py"


def compare(
    ranks: int,
    *given: str,
    program: Path = PROGRAM,
    least: int = 48,
    one_gpu: bool = False,
    timeout: float = 300,
) -> str:
    """Output of a program with arguments on a number of GPUs, or in as many processes on one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), str(program), *given]
    env = os.environ | {"PHALANX_ONE_GPU": str(int(one_gpu))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.count("equal:") >= least
    return done.stdout


def gpus() -> int:
    """Number of Hopper GPUs, at most 8."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return min(torch.cuda.device_count(), 8) if hopper else 0


def test_layers_equal_those_over_collectives_bit_for_bit() -> None:
    if gpus() < 2:
        pytest.skip("needs two Hopper GPUs")
    compare(gpus())


@pytest.mark.slow
def test_layers_with_replication_equal_those_without() -> None:
    if gpus() < 2:
        pytest.skip("needs two Hopper GPUs")
    compare(gpus(), program=REPLICATED, least=288, timeout=900)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["small0", "small8"])
def test_ranks_on_one_gpu(name: str, ranks: int) -> None:
    if not gpus():
        pytest.skip("needs a Hopper GPU")
    compare(ranks, name, least=48, one_gpu=True)
    compare(ranks, name, program=REPLICATED, least=48, one_gpu=True)
