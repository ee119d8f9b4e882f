"""Programs in a process that has no CuTe DSL, with compiled kernels in a folder."""

import subprocess
import sys

_HIDES = """
import importlib.metadata, json, sys
from pathlib import Path

def version(name, known=importlib.metadata.version):
    if name == "nvidia-cutlass-dsl":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

sys.modules |= dict.fromkeys(("cutlass", "nvidia_cutlass_dsl"))  # they are not found
importlib.metadata.version = version
from phalanx.kernels import compiled_libraries as libraries
libraries.FOLDER = Path(sys.argv[1])
"""


def without_compiler(code: str, folder: str, *arguments: str) -> str:
    """Run a program, whose arguments begin with the folder of compiled kernels; its output."""
    code = f"{_HIDES}{code}\nassert sys.modules['cutlass'] is None"
    command = [sys.executable, "-c", code, folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
