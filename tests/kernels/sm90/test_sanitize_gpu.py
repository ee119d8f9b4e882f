"""compute-sanitizer has nothing to say about any kernel of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("sanitize.py")
SILENT = re.compile(r"SUMMARY: 0 (errors|hazards displayed \(0 errors, 0 warnings\))")


def test_every_result_is_right():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")
    # Libraries ask the driver for functions it may not have: no errors of these kernels.
    options = ["--report-api-errors", "no", "--error-exitcode", "9"]
    command = ["compute-sanitizer", "--tool", tool, *options, sys.executable, SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and SILENT.search(said), said[-4000:]
