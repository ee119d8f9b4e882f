"""Kernels over living blocks compile for sm_90a, without a GPU, to what the dense ones are."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.extras.block_sparse.kernels.gemm import (
    Plain,
    SparseGemmKernel,
    sparse_gemm,
    sparse_loop,
)
from phalanx.extras.block_sparse.kernels.lists import Blocks
from phalanx.extras.block_sparse.kernels.wgrad import SparseWgradKernel, sparse_wgrad
from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad
from phalanx.kernels.sm90.gemm.gemm import GemmConfig
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.wgrad.bf16 import Contraction, D, V
from phalanx.kernels.sm90.wgrad.kernel import WgradConfig
from tests.extras.block_sparse.kernels.test_lists import drawn
from tests.kernels.problems import SWIGLU
from tests.kernels.sm90.sass import Sass

GEMMS = {
    "fc1": (Act(SWIGLU), dict(transposed=False, gather=False)),
    "fc1, gathered": (Act(SWIGLU), dict(transposed=False, gather=True)),
    "fc2": (Plain(), dict(transposed=False, gather=False)),
    "gradient of fc2": (ActGrad(SWIGLU), dict(transposed=True, gather=False)),
    "gradient of fc2, gathered": (ActGrad(SWIGLU), dict(transposed=True, gather=True)),
    "gradient of fc1": (Plain(), dict(transposed=True, gather=False)),
}


@pytest.mark.parametrize("name", GEMMS)
def test_a_stage_is_that_of_the_dense_kernel(name, tmp_path):
    epilogue, how = GEMMS[name]
    loop = sparse_loop(epilogue.product_parts, **how)
    code = Sass(SparseGemmKernel, GemmConfig(epilogue, loop), tmp_path)
    code.check_no_stack()
    # Of 64 channels 4 instructions, in the first block and in the loop; ping-pong has a second
    # accumulator, and each of both for tiles of up to 64 rows.
    assert code.count("HGMMA") == (24 if loop.pingpong else 8)
    # Both halves of a tile take their block from the lanes that hold the list.
    assert code.count(r"SHFL\.IDX") >= 4


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("gathered", [None, D, V])
def test_a_weight_gradient(gathered, fp32, tmp_path):
    config = WgradConfig(Contraction(128, gathered), fp32_out=fp32, add=fp32, zeros=False)
    code = Sass(SparseWgradKernel, config, tmp_path)
    code.check_no_stack()
    assert code.count("HGMMA") == 8


def test_a_kept_kernel_is_another_when_its_file_changes(monkeypatch):
    config = GemmConfig(Plain(), sparse_loop(1, transposed=False, gather=False))
    before, real = launch.entry_name(SparseGemmKernel, config), launch.digest_of
    for name in ("extras/block_sparse/kernels/gemm.py", "extras/block_sparse/kernels/mainloop.py"):

        def digest(files: Any, name: str = name) -> str:
            return real(files) + "x" * any(str(file).endswith(name) for file in files)

        monkeypatch.setattr(launch, "digest_of", digest)
        assert launch.entry_name(SparseGemmKernel, config) != before
        monkeypatch.setattr(launch, "digest_of", real)
    assert launch.entry_name(SparseGemmKernel, config) == before


def test_arguments():
    blocks, offsets = Blocks(drawn(2, 2, 3, 4)), torch.tensor([0, 2, 5], dtype=torch.int32)
    a, b = torch.zeros(8, 384).bfloat16(), torch.zeros(2, 256, 384).bfloat16()
    with pytest.raises(ValueError, match=r"b is \[2, 256, 320\]: 1 part\(s\) of N and K must be"):
        sparse_gemm(a[:, :320], b[..., :320], blocks.forward, offsets, Plain())
    with pytest.raises(ValueError, match="block must be on a CUDA device, not on cpu"):
        sparse_gemm(a, b, blocks.forward, offsets, Plain())
    rows = ExpertRows(Operand(a[:, :320]), Operand(a), offsets)
    with pytest.raises(ValueError, match="320 and 384 channels: must be multiples of 128"):
        sparse_wgrad(rows, blocks.tiles, torch.zeros(2, 320, 384))
    rows = ExpertRows(Operand(a[:, :256]), Operand(a), offsets)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16 or torch\.float32"):
        sparse_wgrad(rows, blocks.tiles, torch.zeros(2, 256, 384).half())
