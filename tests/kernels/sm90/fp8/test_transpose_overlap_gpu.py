"""Transposes beside a GEMM on a GPU: the bits of one after the other, in a graph too."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.backend import SequentialMixin
from phalanx.kernels.expert_mlp.calls import Linear, Operand, RowsCall
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.launch_options import DEFAULT
from phalanx.kernels.quantize.quantize import quantize_rows
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.experts.backend import FusedFP8

pytestmark = pytest.mark.gpu


def test_bits_do_not_depend_on_who_runs_when() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    S, D, H, counts = 16384, 2048, 1536, [5000, 0, 129, 127, 9000, 1000]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g).bfloat16()

    ends = torch.tensor([0, *counts]).cumsum(0)
    plan = ExpertPlan(None, None, ends.int().cuda(), None, None, None)
    w = drawn(len(counts), H, D)
    fc1 = Linear(w, parts=2, source=w).transposed
    dh, dy = quantize_rows(drawn(S, H), 2), quantize_rows(drawn(S, D))
    operands = [Operand(dh, parts=2, gradient=True), Operand(dy, gradient=True)]
    ops = FusedFP8(DEFAULT, Fp8Block(), keep=True)
    call = RowsCall(dh, fc1, plan)
    want = SequentialMixin.rows_and_columns(ops, call, plan, operands)

    def check(got: tuple) -> None:
        used = sum(counts)
        assert torch.equal(got[0][:used], want[0][:used])
        for a, b in zip(got[1], want[1], strict=True):
            assert torch.equal(
                a.matrix.data_CT.view(torch.uint8), b.matrix.data_CT.view(torch.uint8)
            )
            assert torch.equal(a.matrix.scale, b.matrix.scale)

    for _ in range(10):
        check(ops.rows_and_columns(call, plan, operands))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ops.rows_and_columns(call, plan, operands)
    for _ in range(10):
        graph.replay()
        check(made)
