"""Programs in a process that has no CuTe DSL, with compiled kernels in a folder."""

import subprocess
import sys

_HIDES = """
import importlib.metadata, json, sys
from pathlib import Path

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, known=importlib.metadata.version):
    if name == "nvidia-cutlass-dsl":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

sys.meta_path.insert(0, Hidden())
importlib.metadata.version = version
from phalanx.kernels.sm90.jit import libraries
libraries.FOLDER = Path(sys.argv[1])
"""


def without_compiler(code: str, folder: str, *arguments: str) -> str:
    """Run a program, whose arguments begin with the folder of compiled kernels; its output."""
    code = f"{_HIDES}{code}\nassert 'cutlass' not in sys.modules"
    command = [sys.executable, "-c", code, folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
