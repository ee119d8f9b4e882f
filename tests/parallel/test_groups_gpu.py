"""GPU memory of the process groups of a layout, beside PyTorch's own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from phalanx.parallel.runtime import start, stop

def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] / 2**30

torch.zeros(1, device="cuda")
context = free()
here = start(seed=1, timeout=60, deterministic=False)
world = free()
from phalanx.parallel.groups import create
pg = create().pg
for group in (pg.tp, pg.dp, pg.ep, pg.expt_dp):
    torch.distributed.all_reduce(torch.ones(1, device="cuda"), group=group)
print("GiB of the world and of a layout", context - world, world - free())
stop(here)
"""


def test_groups_of_one_rank_share_a_communicator() -> None:
    """Twenty of them took 8 GiB. Nothing else may start on the GPU meanwhile."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    world, layout = map(float, done.stdout.split()[-2:])
    assert layout <= max(2 * world, 1.0)
