"""Every `rows` kernel compiles for sm_90a without a GPU, and its machine code is what is meant."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from kernels.sm90.launch import compile_rows, rows
from kernels.sm90.mainloop import LOAD_REGISTERS, MATH_REGISTERS, THREADS
from kernels.sm90.rows import SMEM_BYTES, RowsConfig

CONFIGS = [
    *(RowsConfig(columns, 2, w_transposed=t) for columns in (128, 192, 256) for t in (False, True)),
    RowsConfig(256, 1),
    RowsConfig(192, 1, w_transposed=True, bias=True),
    RowsConfig(256, 2, bias=True),
    RowsConfig(192, 2, bias=True),
    RowsConfig(256, 2, dynamic=False),
]


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("triton")  # ships a disassembler
    folders = [
        Path(p) / "backends/nvidia/bin" for p in (spec and spec.submodule_search_locations) or ()
    ]
    found = shutil.which(name) or next(
        (str(f / name) for f in folders if (f / name).exists()), None
    )
    return found or pytest.skip(f"needs {name}")


class Code:
    """The machine code of a configuration."""

    def __init__(self, config: RowsConfig, folder: Path) -> None:
        kernel = compile_rows(config, f"--keep-cubin --dump-dir {folder}")
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(kernel.artifacts.CUBIN)
        self.config = config
        self.sass = self._run("nvdisasm", "-c", str(cubin))
        self.usage = self._run("cuobjdump", "-res-usage", str(cubin))

    def _run(self, tool: str, *args: str) -> str:
        done = subprocess.run([_tool(tool), *args], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def count(self, opcode: str) -> int:
        return len(re.findall(rf"\b{opcode}\b", self.sass))

    def registers(self, code: str) -> int:
        return 1 + max(int(r) for r in re.findall(r"\bR(\d+)\b", code))


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def code(request, tmp_path_factory) -> Iterator[Code]:
    yield Code(request.param, tmp_path_factory.mktemp("cubin"))


def test_multiplies_with_wgmma(code):
    shape = rf"HGMMA\.64x{code.config.columns}x16\.F32\.BF16"
    assert len(re.findall(shape, code.sass)) == 8  # the first stage, and the loop over the others
    assert len(re.findall("HGMMA", code.sass)) == 8
    assert code.sass.count("WARPGROUP.DEPBAR") == 2  # one wait a stage, one a tile: not serialised


def test_loads_and_stores_by_tma(code):
    multicast = code.sass.count(".MULTICAST")
    assert (multicast > 0) == (code.config.cluster > 1)
    assert code.count(r"UTMALDG\.2D") == 2 and code.count(r"UTMALDG\.3D") >= 2
    assert code.count(r"UTMASTG\.2D") == code.config.columns // 64
    assert ("ATOMG" in code.sass) == code.config.dynamic


def test_nothing_spills(code):
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", code.usage))
    assert usage["STACK"] == "0" and usage["LOCAL"] == "0"
    assert int(usage["REG"]) * THREADS <= 65536
    assert not re.search(r"\b(STL|LDL)\b", code.sass)


def test_registers_fit_their_warp_groups(code):
    _, rest = re.split(r"USETMAXREG\.DEALLOC", code.sass, maxsplit=1)
    load, math = re.split(r"USETMAXREG\.TRY_ALLOC", rest, maxsplit=1)
    assert code.registers(load) <= LOAD_REGISTERS
    assert code.registers(math) <= MATH_REGISTERS


def test_shared_memory_fits(code):
    loop, epilogue = code.config.mainloop, code.config.epilogue
    used = loop.stages * loop.stage_bytes + epilogue.bytes
    assert loop.stages >= 4
    assert used + 2048 <= SMEM_BYTES


def test_impossible_tiles_are_refused():
    with pytest.raises(ValueError, match="columns=100, cluster=2: tiles have 128, 192 or 256"):
        RowsConfig(100)
    with pytest.raises(ValueError, match="clusters 1 or 2"):
        RowsConfig(256, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_SK": torch.zeros(8, 96)}, "multiples of 64"),
        ({"w_LNK": torch.zeros(128, 64)}, r"w \[L, N, K\]"),
        ({"bias_LN": torch.zeros(2, 128)}, "bias and scale"),
        ({}, "a must be on the CUDA device of a, not on cpu"),
    ],
)
def test_arguments_are_checked(change, message):
    given = {"a_SK": torch.zeros(8, 64), "w_LNK": torch.zeros(2, 128, 64), **change}
    with pytest.raises(ValueError, match=message):
        rows(**given, offsets=torch.tensor([0, 4, 8], dtype=torch.int32))
