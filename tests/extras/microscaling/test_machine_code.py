"""Machine code of the emulation of MXFP8 and NVFP4 on Hopper."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass")

from phalanx.extras.microscaling import emulate_triton
from tests.kernels.quantize.test_machine_code import BF16, META, x_of
from tests.kernels.triton_code import Code, launched
from tests.support.scheduling import matrix, mostly_slow


def check_emulation(code: Code, elements: int, loads: tuple[str, int], random: bool) -> None:
    """Exact, without memory of a thread's own. Reading and writing bf16 takes the time of 34
    instructions an element; stochastic rounding may take that of 60."""
    per_element = 60 if random else 34
    assert not re.search(r"\.ftz|\.approx|\bdiv\.full|\batom\.|\bred\.global", code.ptx)
    assert code.stack == 0 and code.count("") * code.threads <= per_element * elements
    kind, count = loads
    assert code.count(kind) >= count


def scales(stochastic: bool) -> emulate_triton.Scales:
    factor, inverse = (torch.empty(32, device=META) for _ in range(2))
    return emulate_triton.Scales(factor, inverse, counts(32) if stochastic else None)


def counts(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32, device=META)


@matrix(("form", "shape"), ("mxfp8", (5760, 2)), ("nvfp4", (2048, 1)), ("random", (5760, 2)))
def test_emulated_rows(form: str, shape: tuple[int, int], tmp_path: Path) -> None:
    C, parts = shape
    x, rows = x_of(65536, C, BF16), counts(65536)
    block, given = 32, dict[str, object]()
    if form != "mxfp8":
        block, given = 16, dict(scales=scales(form == "random"), expert_S=rows, row_in_S=rows)
    run = lambda: emulate_triton.rows(x, parts, block=block, **given)  # noqa: E731
    code = launched(emulate_triton, "row_blocks", run, tmp_path)
    check_emulation(code, emulate_triton._ELEMENTS, (r"LDG\.E\.128", 2), form == "random")
    assert ("div.rn.f32" in code.ptx) == (form != "mxfp8")


@mostly_slow("parts", [1, 2], 2)
def test_emulated_rows_of_any_width_have_one_code(parts: int, tmp_path: Path) -> None:
    def code(width: int) -> str:
        x = x_of(4096, parts * width, BF16)
        run = lambda: emulate_triton.rows(x, parts, block=32)  # noqa: E731
        return launched(emulate_triton, "row_blocks", run, tmp_path).text

    assert code(2048) == code(1408) == code(32)
    assert code(2048) != code(2050)


@pytest.mark.parametrize(
    ("form", "of_weights"),
    [("mxfp8", False), ("mxfp8", True), ("nvfp4", False), ("nvfp4", True), ("random", False)],
)
def test_emulated_columns(form: str, of_weights: bool, tmp_path: Path) -> None:
    block = 32 if form == "mxfp8" else 16
    x, groups = x_of(65536, 2048, BF16), counts(5, 65536 // block)
    run = lambda: emulate_triton.columns(  # noqa: E731
        x,
        groups,
        x_of(65536, 2048, BF16),
        block=block,
        scales=None if form == "mxfp8" else scales(form == "random"),
        of_weights=of_weights,
    )
    code = launched(emulate_triton, "column_blocks", run, tmp_path)
    elements = block * emulate_triton._CHANNELS
    check_emulation(code, elements, (r"LDG\.E ", block), form == "random")
    assert ("div.rn.f32" in code.ptx) == (form != "mxfp8")


@pytest.mark.parametrize("keyed", [False, True], ids=["amax", "with keys"])
def test_amax_of_tensors(keyed: bool, tmp_path: Path) -> None:
    x, rows = x_of(65536, 2048, BF16), counts(65536)
    run = lambda: emulate_triton.amax_of_rows(x, rows if keyed else None)  # noqa: E731
    code = launched(emulate_triton, "row_amax", run, tmp_path)
    check_emulation(code, 2048, (r"LDG\.E\.128", 1), False)
    run = lambda: emulate_triton.amax_of_groups(x, counts(5, 4096), keyed=keyed)  # noqa: E731
    code = launched(emulate_triton, "column_amax", run, tmp_path)
    check_emulation(code, 16 * emulate_triton._CHANNELS, (r"LDG\.E ", 16), False)
