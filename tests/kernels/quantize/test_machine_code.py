"""Kernels that quantise, compiled for sm_90 without a GPU: exact, and bound by memory alone.

At 3.4 TB/s of a byte in and a byte out, an SM of 132 at 1.7 GHz has 17 instructions an element; the
other kernels, that move 3 or 4 bytes, have more. Half of them, as other things take time too.
"""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass")

from phalanx.kernels.quantize import (
    blocks_triton,
    quantize,
)
from phalanx.kernels.quantize.blocks import Quantized
from tests.kernels.triton_code import Code, launched
from tests.support.scheduling import matrix

BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
META = torch.device("meta")
TILE = 128 * 128
REGISTERS = 65536


def check(code: Code, elements: int, per_element: float, bytes_in_flight: int) -> None:
    """`elements` of a program."""
    assert not re.search(
        r"\.ftz|\bdiv\.[a-z.]*f32|\brcp\.approx\.f32|\batom\.|\bred\.global", code.ptx
    )
    assert "FTZ" not in "".join(re.findall(r"(?:FMUL|FMNMX)\S*", code.text))
    # A NaN has no part in a maximum, but stays one where a factor is bounded.
    assert not re.search(r"MNMX\S*NAN(?![^;]*32768)", code.text)
    assert code.count("") * code.threads <= per_element * elements
    resident = min(2048, REGISTERS // (code.registers + -code.registers % 8)) // code.threads
    loads = code.count(r"LDG\.E\.128") * 16 + code.count(r"LDG\.E\.64") * 8
    assert resident * loads * code.threads >= bytes_in_flight


def x_of(R: int, C: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(R, C, dtype=dtype, device=META)


@matrix(("shape", "dtype"), ((7168, 1), E4M3), ((5760, 2), E5M2))
def test_rows(shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    C, parts = shape
    x = x_of(65536, C, BF16)
    to = quantize.empty_rows(65536, C, parts, dtype=dtype, device=META)
    code = launched(
        blocks_triton, "fp8_rows", lambda: blocks_triton.write_rows(x, to, parts), tmp_path
    )
    check(code, 64 * 128, 10, 64 * 1024)
    assert code.stack == 0
    assert (code.count(r"LDG\.E\.128"), code.count(r"STG\.E\.128")) == (4, 2)
    kind = "e4m3x2" if dtype == E4M3 else "e5m2x2"
    assert code.ptx.count(f"cvt.rn.satfinite.{kind}.f32") == 16


def test_rows_back(tmp_path: Path) -> None:
    q = quantize.empty_rows(65536, 5760, 2, device=META)
    to = x_of(65536, 5760, BF16)
    code = launched(
        blocks_triton, "dequantize_fp8_rows", lambda: blocks_triton.dequantize(q, to, 2), tmp_path
    )
    check(code, 64 * 128, 12.5, 48 * 1024)
    assert code.stack == 0
    assert (code.count(r"LDG\.E\.128"), code.count(r"STG\.E\.128")) == (2, 4)
    assert "cvt.rn.f16x2.e4m3x2" in code.ptx


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
def test_weights(layouts: tuple[bool, bool], dtype: torch.dtype, tmp_path: Path) -> None:
    w = torch.empty(32, 4096, 7168, dtype=dtype, device=META)
    *both, scale = quantize.empty_weights(32, 4096, 7168, device=META)
    to = [x if wanted else None for x, wanted in zip(both, layouts, strict=True)]
    run = lambda: blocks_triton.write_weights(w, *to, scale, 1)  # noqa: E731
    code = launched(blocks_triton, "fp8_weights", run, tmp_path)
    check(code, TILE, 11, 96 * 1024)
    assert code.stack == 0
    assert code.count(r"LDG\.E\.128") == 4 * dtype.itemsize
    assert code.count(r"STG\.E\.128") == 4 * sum(layouts) and code.count(r"STG\.E ") == 1
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.ptx


@matrix(("C", "indexed"), (7168, False), (2880, True))
def test_transpose(C: int, indexed: bool, tmp_path: Path) -> None:
    rows, offsets = 32768, torch.empty(33, dtype=torch.int32, device=META)
    index = torch.empty(rows, dtype=torch.int32, device=META) if indexed else None
    q: Quantized = quantize.empty_rows(rows, C, device=META)
    to = quantize.empty_columns(rows, C, 32, device=META)
    run = lambda: blocks_triton.write_columns(*q, index, offsets, to, 1)  # noqa: E731
    code = launched(blocks_triton, "fp8_columns", run, tmp_path)
    assert "cvt.rn.f16x2.e4m3x2" in code.ptx and code.count(r"STG\.E ") == 1
    check(code, TILE, 8.75, 80 * 1024)
    assert code.stack == 0 and code.count(r"STG\.E\.128") == 4
    assert "cvt.rn.satfinite.e4m3x2.f16x2" in code.ptx


def test_columns(tmp_path: Path) -> None:
    x, offsets = x_of(65536, 2048, BF16), torch.empty(33, dtype=torch.int32, device=META)
    to = quantize.empty_columns(65536, 2048, 32, device=META)
    run = lambda: blocks_triton.write_columns(x, None, None, offsets, to, 1)  # noqa: E731
    code = launched(blocks_triton, "fp8_columns", run, tmp_path)
    check(code, TILE, 9.75, 96 * 1024)
    assert code.stack == 0
    assert (code.count(r"LDG\.E\.128"), code.count(r"STG\.E\.128")) == (8, 4)


def test_quantisers_for_blackwell(tmp_path: Path) -> None:
    """The same sources."""
    x, offsets = x_of(65536, 2048, BF16), torch.empty(33, dtype=torch.int32, device=META)
    rows = quantize.empty_rows(65536, 2048, 1, dtype=E4M3, device=META)
    columns = quantize.empty_columns(65536, 2048, 32, device=META)
    w = torch.empty(32, 4096, 2048, dtype=BF16, device=META)
    weights = quantize.empty_weights(32, 4096, 2048, device=META)
    calls = {
        (blocks_triton, "fp8_rows"): lambda: blocks_triton.write_rows(x, rows, 1),
        (blocks_triton, "fp8_columns"): lambda: blocks_triton.write_columns(
            x, None, None, offsets, columns, 1
        ),
        (blocks_triton, "fp8_weights"): lambda: blocks_triton.write_weights(w, *weights, 1),
    }
    for (module, name), call in calls.items():
        code = launched(module, name, call, tmp_path, capability=100)
        assert ".target sm_100a" in code.ptx and code.stack == 0
        assert "cvt.rn.satfinite.e4m3x2" in code.ptx
