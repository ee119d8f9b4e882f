"""Compiled kernels as libraries: linked, found and loaded without the compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels import compiled_libraries as libraries
from phalanx.kernels.cache import Cache
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.pointers import arguments_of
from phalanx.kernels.sm90.jit.program import Program
from phalanx.kernels.sm90.jit.shipped import COMPILED, SHIPPED
from phalanx.kernels.sm90.routing.plan import GatherConfig, GatherKernel
from tests.kernels.sm90.without_compiler import without_compiler

_NAMES = """
from phalanx.kernels.registry import Facts
assert "compiled_kernels" in Facts("cuda", (9, 0), None).packages
from phalanx.kernels.sm90.jit.stand_ins import import_kernels
import_kernels()
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.shipped import COMPILED
found = [
    (launch.library_name(*kernel), launch.arguments_of(kernel[0]).kinds) for kernel in COMPILED
]
print(json.dumps(found))
for number in (found.index(tuple(name)) for name in json.loads(sys.argv[2])):
    kernel, config = COMPILED[number]
    try:
        launch._program(kernel, config)
    except launch.KernelUnavailable as error:
        print(error)
"""


def test_wheels_have_what_runs_use() -> None:
    assert set(SHIPPED) < set(COMPILED) and len(COMPILED) == len(set(COMPILED))
    assert len({launch.library_name(*kernel) for kernel in COMPILED}) == len(COMPILED)


def test_loads_without_the_compiler(tmp_path: Path) -> None:
    """Names and arguments of all kernels are those with the compiler; one is there, another not."""
    kernel, config = GatherKernel, GatherConfig()
    data = launch.build(kernel, config, Cache(tmp_path / "cache"))
    path = tmp_path / launch.library_name(kernel, config)
    libraries.link(data, launch.PREFIX, path)
    program = Program(libraries.symbols(path, launch.PREFIX), arguments_of(kernel).kinds)
    assert program is not None

    missing = next(k for k in COMPILED if k[0] is not kernel)
    tried = [
        (launch.library_name(*k), arguments_of(k[0]).kinds) for k in ((kernel, config), missing)
    ]
    names, refusal = without_compiler(_NAMES, str(tmp_path), json.dumps(tried)).splitlines()
    want = [[launch.library_name(*k), arguments_of(k[0]).kinds] for k in COMPILED]
    assert json.loads(names) == want
    assert refusal.startswith(f"{missing[0].__name__} ")
    assert "is not among the compiled kernels: pip install 'nvidia-cutlass-dsl" in refusal


def test_a_link_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no host function"):
        libraries.link(b"", launch.PREFIX, tmp_path / "kernel.so")


_OTHER = """
import importlib.metadata, sys
import cutlass, cutlass.cute
from pathlib import Path
known = importlib.metadata.version
importlib.metadata.version = lambda name: "4.4.2" if "cutlass" in name else known(name)
from phalanx.kernels.sm90.jit import stand_ins
from phalanx.kernels import compiled_libraries as libraries
libraries.FOLDER = Path(sys.argv[1])
stand_ins.import_kernels()
from phalanx.kernels.sm90.experts import fc1_act
assert sys.modules["cutlass"] is cutlass and fc1_act.cute is not cutlass.cute
"""


def test_another_version_of_the_compiler_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "Kernel.so").touch()
    command = [sys.executable, "-c", _OTHER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
