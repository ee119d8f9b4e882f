"""Machine code of a kernel for sm_90a, made and read without a GPU."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.kernels.sm90.jit.launch import compile_kernel


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("triton")  # ships a disassembler
    folders = [
        Path(p) / "backends/nvidia/bin" for p in (spec and spec.submodule_search_locations) or ()
    ]
    found = shutil.which(name) or next(
        (str(f / name) for f in folders if (f / name).exists()), None
    )
    return found or pytest.skip(f"needs {name}")


def _run(tool: str, *args: str) -> str:
    done = subprocess.run([_tool(tool), *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


class Sass:
    """The machine code of a configuration of a kernel."""

    def __init__(self, kernel: type, config: Any, folder: Path) -> None:
        cubin = folder / "kernel.cubin"
        made = compile_kernel(kernel, config, f"--keep-cubin --dump-dir {folder}")
        cubin.write_bytes(made.artifacts.CUBIN)
        self.text = _run("nvdisasm", "-c", str(cubin))
        self.usage = _run("cuobjdump", "-res-usage", str(cubin))

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.text))

    def usages(self, name: str) -> list[int]:
        """REG, STACK or LOCAL of each kernel."""
        return [int(n) for n in re.findall(rf"\b{name}:(\d+)", self.usage)]

    def check_no_stack(self) -> None:
        assert set(self.usages("STACK") + self.usages("LOCAL")) == {0}
        assert not re.search(r"\b(STL|LDL)\b", self.text)
