"""Launches without a GPU: a process whose CUDA runtime only notes what it is asked to launch.

`Scripts` runs scripts in such processes; there, `Runtime` reads the notes and `as_device` stands in
for the parts of torch that `kernels.sm90.jit.launch` asks about devices and streams.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("fake_runtime.c")
LIBRARY = "libcute_dsl_runtime.so"  # the DSL knows its runtime by this name
VARIABLE = "CUTE_DSL_LIBS"


def build(folder: Path) -> Path | None:
    """The runtime's library in a folder, for `VARIABLE`; None if there is no C compiler."""
    library, compiler = folder / LIBRARY, shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    if not library.exists():
        command = [compiler, "-shared", "-fPIC", "-O1", "-pthread", "-o", library, SOURCE]
        subprocess.run(command, check=True, capture_output=True)
    return library


class Scripts:
    """Scripts with the runtime built in a folder, which is also their kernel cache.

    Each runs in a fork of a process that has imported the DSL and has not used it yet. Skips the
    test if there is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        library = build(folder) or pytest.skip("needs a C compiler")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKING],
            cwd=ROOT,
            env=os.environ | {VARIABLE: str(library), "PHALANX_KERNEL_CACHE": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._out = folder / "printed"

    def __call__(self, script: str) -> Any:
        """The last line that a script prints, parsed as JSON."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([script, str(self._out)]), file=self._process.stdin, flush=True)
        code, printed = int(self._process.stdout.readline()), self._out.read_text()
        assert code == 0, printed
        return json.loads(printed.splitlines()[-1])

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


_FORKING = """
import json, os, sys, traceback
import phalanx.kernels.sm90.jit.launch, tests.kernels.sm90.echo, tests.kernels.sm90.recording

for line in sys.stdin:
    script, out = json.loads(line)
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(out, "w")
        code = 1
        try:
            exec(script, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("padding", ctypes.c_uint32),
        ("smem", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 8),
        ("name", ctypes.c_char_p),
    ]


class Runtime:
    """The runtime of this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])

    def get(self, counter: str) -> int:
        return ctypes.c_int.in_dll(self._library, counter).value

    def set(self, counter: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, counter).value = value

    def launches(self) -> list[dict[str, Any]]:
        """Launches since the last call."""
        notes = (_Launch * (1 << 16)).in_dll(self._library, "launches")
        made = notes[: self.get("launch_count")]
        self.set("launch_count", 0)
        return [
            {
                "name": n.name.decode(),
                "grid": list(n.grid),
                "block": list(n.block),
                "cluster": list(n.cluster),
                "smem": n.smem,
                "stream": n.stream,
                "arguments": list(n.arguments),
            }
            for n in made
        ]


class Address:
    """Stand-in with as much of a CUDA tensor as a launch looks at."""

    def __init__(self, address: int, device: int = 0) -> None:
        self.address, self.device = address, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


@contextmanager
def as_device(stream: int = 0) -> Iterator[list[int]]:
    """Device 0 is current, of whose streams the current one is `stream`, of device d stream + d.

    Yields the devices that were made current for a while.
    """
    visited: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        visited.append(index)
        yield

    with (
        patch("torch.cuda.current_device", lambda: 0),
        patch("torch.cuda.device", device),
        patch("torch._C._cuda_getCurrentRawStream", lambda d: stream + d, create=True),
    ):
        yield visited
