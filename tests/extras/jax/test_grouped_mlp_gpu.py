"""`phalanx.jax.grouped_mlp` on Hopper: the checks of scripts/lab/bench_jax.py."""

import subprocess
import sys

import pytest

from tests.imports import ROOT

pytest.importorskip("jax", reason="needs phalanx-moe[jax]")


@pytest.mark.gpu
def test_kernels_agree_with_the_reference() -> None:
    """In a process of its own: JAX would take the GPU's memory from other tests."""
    command = [sys.executable, "scripts/lab/bench_jax.py", "--checks-only"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
