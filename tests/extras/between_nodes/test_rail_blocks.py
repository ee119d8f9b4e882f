"""Blocks of rows between nodes, against loops over tokens; their kernels, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.extras.between_nodes.rail_blocks import (
    RailBlocks,
    pack_rows,
    plan_blocks,
    plan_blocks_by_sums,
    sum_rows,
)
from phalanx.kernels.elementwise.sums import block_sum
from tests.kernels.interpreter import interpret

CASES = [
    # T, K, M, experts of a node, C
    (1, 1, 2, 1, 1),
    (7, 3, 2, 4, 7),
    (40, 2, 4, 2, 12),  # blocks that are too small for some nodes
    (1300, 8, 3, 5, 1300),
    (1300, 3, 8, 4, 400),
]


def routing(T: int, K: int, experts: int) -> tuple[Tensor, Tensor]:
    """Ids from -1 on, with a token without experts, one of all, and skewed towards low ids."""
    g = torch.Generator().manual_seed(T + K)
    idx = (torch.rand(T, K, generator=g) ** 2 * (experts + 1)).int() - 1
    idx[0] = -1
    if T > 1:
        idx[-1] = torch.arange(K) * experts // K
    prob = torch.rand(T, K, generator=g)
    prob[-1, 0] = float("nan")
    return idx, prob


def looped(
    idx_TK: Tensor, prob_TK: Tensor, nodes: int, experts: int, rows: int
) -> tuple[list[int], list[list[int]], list[Any], int]:
    (T, K), bits = idx_TK.shape, prob_TK.view(torch.int32)
    tokens, routed = [-1] * (nodes * rows), [[[-1] * K, [0] * K] for _ in range(nodes * rows)]
    row_TM, most = [[-1] * nodes for _ in range(T)], 0
    for m in range(nodes):
        wanted = [t for t in range(T) if any(e // experts == m for e in idx_TK[t].tolist())]
        most = max(most, len(wanted))
        for j, t in enumerate(wanted[:rows]):
            b = m * rows + j
            tokens[b], row_TM[t][m] = t, b
            ids = [e % experts if e // experts == m else -1 for e in idx_TK[t].tolist()]
            routed[b] = [ids, bits[t].tolist()]
    return tokens, row_TM, routed, most


def same(a: RailBlocks, b: RailBlocks) -> bool:
    return all(
        torch.equal(x.cpu(), y.cpu()) and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(("T", "K", "M", "experts", "C"), CASES)
def test_a_token_has_a_row_for_each_node_with_one_of_its_experts(
    T: int, K: int, M: int, experts: int, C: int
) -> None:
    idx, prob = routing(T, K, M * experts)
    got = plan_blocks(idx, prob, nodes=M, experts=experts, rows=C)
    tokens, row_TM, routed, most = looped(idx, prob, M, experts, C)
    assert got.token_B.tolist() == tokens and got.row_TM.tolist() == row_TM
    assert got.routing_B2K.tolist() == routed and got.needed.item() == most
    assert {t.dtype for t in got} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_of_tokens_are_copied(dtype: torch.dtype) -> None:
    x = (100 * torch.rand(5, 3)).to(dtype)
    token = torch.tensor([4, -1, 0, 0], dtype=torch.int32)
    got = pack_rows(x, token)
    assert got.dtype == dtype and torch.equal(got[token >= 0], x[[4, 0, 0]])


@pytest.mark.parametrize("addends", [0, 1, 2])
def test_sums_are_those_of_blocks_with_zeros(addends: int) -> None:
    """A token of three nodes, one of a single node and one of none; other rows are not read."""
    rows, more = torch.full((6, 4), float("nan")), list(torch.randn(addends, 3, 4).bfloat16())
    rows[1:4] = torch.randn(3, 4)
    rows = rows.bfloat16()
    row_TM = torch.tensor([[1, 2, 3], [-1, 3, -1], [-1, -1, -1]], dtype=torch.int32)
    zero = torch.zeros(4, dtype=torch.bfloat16)
    dense = torch.stack(
        [torch.stack([rows[b] if b >= 0 else zero for b in r]) for r in row_TM.T.tolist()]
    )
    assert torch.equal(sum_rows(rows, row_TM, more), block_sum(dense, more))


def test_the_kernels_in_the_interpreter() -> None:
    interpret(__name__)


def interpreted() -> None:
    from phalanx.extras.between_nodes import rail_blocks_triton as kernels

    kernels._TOKENS = 16  # so that few tokens are several blocks of them
    for T, K, M, experts, C in (*CASES[:3], (50, 8, 3, 5, 50), (50, 3, 8, 4, 20)):
        idx, prob = routing(T, K, M * experts)
        want = plan_blocks_by_sums(idx, prob, M, experts, C)
        assert same(kernels.plan_blocks_in_triton(idx, prob, M, experts, C), want), (T, M, C)
        x = torch.randn(T, 5)
        packed, used = kernels.pack_rows_in_triton(x, want.token_B), want.token_B >= 0
        assert torch.equal(packed[used], pack_rows(x, want.token_B)[used])
        packed[~used] = float("nan")
        packed[0] = -0.0
        for more in ([], [x], [x, -x]):
            got = kernels.sum_rows_in_triton(packed, want.row_TM, more)
            expected = sum_rows(packed, want.row_TM, more)
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kernel", ["plan_node", "copy_rows", "add_rows"])
def test_the_kernels_compile_for_hopper(kernel: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from phalanx.extras.between_nodes import rail_blocks_triton as kernels
    from tests.kernels.triton_code import launched

    idx = torch.empty(8192, 8, dtype=torch.int32, device="meta")
    rows = torch.empty(8 * 5000, 7168, dtype=torch.bfloat16, device="meta")
    calls = {
        "plan_node": lambda: kernels.plan_blocks_in_triton(idx, idx.float(), 8, 32, 5000),
        "copy_rows": lambda: kernels.pack_rows_in_triton(rows, idx.view(-1)[:40000]),
        "add_rows": lambda: kernels.sum_rows_in_triton(rows, idx, [rows[:8192]]),
    }
    code = launched(kernels, kernel, calls[kernel], tmp_path)
    assert code.stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K", "M", "experts", "C"), CASES)
def test_the_kernels_on_a_gpu(T: int, K: int, M: int, experts: int, C: int) -> None:
    idx, prob = routing(T, K, M * experts)
    want = plan_blocks(idx, prob, nodes=M, experts=experts, rows=C)
    assert same(plan_blocks(idx.cuda(), prob.cuda(), nodes=M, experts=experts, rows=C), want)
    x, used = torch.randn(T, 2100).bfloat16(), want.token_B >= 0
    packed = pack_rows(x.cuda(), want.token_B.cuda()).cpu()
    assert torch.equal(packed[used], pack_rows(x, want.token_B)[used])
    packed[~used] = float("nan")
    got = sum_rows(packed.cuda(), want.row_TM.cuda())
    assert torch.equal(got.cpu(), sum_rows(packed, want.row_TM))
