"""Fusions that are declared outside of the package compile for sm_90a, without a GPU, to what is
declared."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.experts.fused_gemm import (
    FusedGemmKernel,
    fused_gemm,
    sum_of_experts,
)
from phalanx.kernels.sm90.fp8.act import BlockStore
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm.gemm import GemmConfig
from phalanx.kernels.sm90.gemm.tiles import configured
from phalanx.kernels.sm90.jit import launch
from tests.kernels.sm90.gemm.scaled_squared_relu import ScaledSquaredRelu
from tests.kernels.sm90.gemm.scaled_squared_relu_grad import ScaledSquaredReluGrad
from tests.kernels.sm90.sass import Sass

FORWARD, GRADIENT = ScaledSquaredRelu(), ScaledSquaredReluGrad()
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


@dataclass(frozen=True)
class InFp8(ScaledSquaredRelu):
    row_store = BlockStore


@pytest.mark.parametrize("tile", ["pp128", "co256"])
@pytest.mark.parametrize(("epilogue", "stored"), [(FORWARD, 2), (GRADIENT, 1)])
def test_a_fusion_stores_and_loads_what_it_declares(epilogue, stored, tile, tmp_path):
    """For 32 columns of 64 rows: a TMA store of each output, and a load of each loaded row."""
    loop = configured(tile, gather=True, transposed=epilogue is GRADIENT)
    code = Sass(FusedGemmKernel, GemmConfig(epilogue, loop), tmp_path)
    code.check_no_stack()
    steps = loop.group_rows // 64 * loop.columns // 32
    assert code.count("UTMASTG") == stored * steps
    boxes = 2 * loop.columns // loop.box  # of B; the loads of a tile are there twice
    loads = code.count("UTMALDG") - boxes
    assert loads >= steps if epilogue.loaded else loads == 0
    # Both rows' sums, over four lanes.
    assert code.count(r"SHFL\.BFLY") == (4 * loop.group_rows // 64 if epilogue.sums else 0)


def test_the_same_function_stores_rows_in_fp8(tmp_path):
    """h in bf16, 32 columns a store, and a in blocks of 128."""
    loop = Fp8Mainloop(256)
    code = Sass(FusedGemmKernel, GemmConfig(InFp8(), loop), tmp_path)
    code.check_no_stack()
    blocks = loop.columns // 128
    assert code.count("UTMASTG") == (4 + 1) * blocks
    assert code.count(r"F2FP\.SATFINITE\.E4M3") == 32 * blocks


def test_a_kept_kernel_is_another_when_the_file_of_its_fusion_changes(monkeypatch):
    configs = [GemmConfig(e, configured("pp128", transposed=False)) for e in (FORWARD, GRADIENT)]

    def names() -> list[str]:
        return [launch.entry_name(FusedGemmKernel, config) for config in configs]

    before, real = names(), launch.digest_of
    assert before == names()

    def digest(files: list[Path]) -> str:
        return real(files) + "x" * ("scaled_squared_relu.py" in [file.name for file in files])

    monkeypatch.setattr(launch, "digest_of", digest)
    assert names()[0] != before[0] and names()[1] == before[1]


def test_sums_of_experts_take_their_rows_alone():
    partial = torch.arange(14, dtype=torch.float32).view(2, 7)
    partial[:, 5:] = float("nan")  # padding
    rows = partial.sum(0)
    expected = torch.stack([rows[0] + rows[1], torch.tensor(0.0), rows[2:5].sum()])
    assert torch.equal(sum_of_experts(partial, OFFSETS), expected)


@pytest.mark.parametrize(
    ("epilogue", "given", "message"),
    [
        (FORWARD, {}, r"ScaledSquaredRelu takes \['scale'\], not \[\]"),
        (FORWARD, {"scale": torch.ones(3), "prob": torch.ones(8)}, r"not \['prob', 'scale'\]"),
        (FORWARD, {"scale": torch.ones(3), "loaded": torch.ones(8, 128)}, "and none otherwise"),
        (GRADIENT, {"scale": torch.ones(3)}, "loaded: give the rows that the epilogue loads"),
        (FORWARD, {"scale": torch.ones(3)}, "b must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments(epilogue, given, message):
    a, b = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((8, 64), (3, 128, 64)))
    with pytest.raises(ValueError, match=message):
        fused_gemm(a, b, OFFSETS, epilogue, **given)
