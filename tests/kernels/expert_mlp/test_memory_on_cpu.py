"""Experts whose counts of rows change in every step, as routing does, keep no memory on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 48
"""MiB. With a compiled kernel kept for every count of rows 20 steps take 300 and more."""

STEPS = """
import resource, sys, torch
from phalanx.kernels.functional.module import GroupedMLP

torch.manual_seed(0)
experts = GroupedMLP(8, 64, 128, 2, backend=sys.argv[1], dtype=torch.bfloat16)


def step():
    x = torch.randn(512, 64, dtype=torch.bfloat16, requires_grad=True)
    prob, idx = (torch.randn(512, 8) + torch.randn(8)).softmax(-1).topk(2)
    experts(x, idx, prob).float().square().sum().backward()


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


for _ in range(5):
    step()
before = peak()
for _ in range(20):
    step()
print(peak() - before)
"""


@pytest.mark.parametrize("backend", ["torch", pytest.param("reference", marks=pytest.mark.slow)])
def test_memory_stays(backend: str) -> None:
    command = [sys.executable, "-c", STEPS, backend]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(run.stdout) < LIMIT, f"{run.stdout.strip()} MiB more after 20 steps"
