"""Machine code of a kernel for sm_90a, compiled and read without a GPU, and cached."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.kernels.sm90.jit.launch import compile_kernel
from tests.kernels.sm90 import remembered


def tool(name: str) -> Path:
    """A program of the CUDA toolkit; skips the test where there is none."""
    spec = importlib.util.find_spec("triton")  # ships a disassembler
    folders = [
        Path(p) / "backends/nvidia/bin" for p in (spec and spec.submodule_search_locations) or ()
    ]
    own = (f / name for f in folders if (f / name).exists())
    found = shutil.which(name) or next(own, None)
    return Path(found) if found else pytest.skip(f"needs {name}")


def run(name: str, *args: str) -> str:
    """Output of a program of the CUDA toolkit."""
    done = subprocess.run([tool(name), *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def disassembled(cubin: Path) -> tuple[str, str]:
    """The instructions of a cubin, and what its kernels use of registers and memory."""
    return run("nvdisasm", "-c", str(cubin)), run("cuobjdump", "-res-usage", str(cubin))


class Sass:
    """The machine code of a configuration of a kernel."""

    def __init__(self, kernel: type, config: Any, folder: Path) -> None:
        def make() -> bytes:
            cubin = folder / "kernel.cubin"
            made = compile_kernel(kernel, config, f"--keep-cubin --dump-dir {folder}")
            cubin.write_bytes(made.artifacts.CUBIN)
            return json.dumps(disassembled(cubin)).encode()

        made_by = ["machine code", tool("nvdisasm"), tool("cuobjdump")]
        self.text, self.usage = json.loads(remembered.fetch(kernel, config, made_by, make))

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.text))

    def usages(self, name: str) -> list[int]:
        """REG, STACK or LOCAL of each kernel."""
        return [int(n) for n in re.findall(rf"\b{name}:(\d+)", self.usage)]

    def check_no_stack(self) -> None:
        assert set(self.usages("STACK") + self.usages("LOCAL")) == {0}
        assert not re.search(r"\b(STL|LDL)\b", self.text)
