"""Triton kernels on CPU tensors: run by Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys


def interpret(module: str) -> None:
    """Call `interpreted` of a test module there; AssertionError if it fails.

    Args:
        module: `__name__` of the caller.
    """
    run = subprocess.run(
        [sys.executable, "-c", f"from {module} import interpreted; interpreted()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
