"""`combine` without a GPU: its code on threads of the host, and its machine code."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.sm90.experts.combine import CombineConfig, CombineKernel, combine
from tests.kernels.sm90 import simt
from tests.kernels.sm90.sass import Sass

BF16 = torch.bfloat16


def slots(N: int, K: int, S: int, seed: int) -> Tensor:
    """Rows of S, none twice, and -1 for about a third of the slots."""
    g = torch.Generator().manual_seed(seed)
    inverse = torch.randperm(max(S, N * K), generator=g)[: N * K].to(torch.int32)
    inverse[(inverse >= S) | (torch.rand(N * K, generator=g) < 0.3)] = -1
    return inverse.view(N, K)


def words(x: Tensor) -> list[int]:
    return [w % (1 << 32) for w in x.view(torch.int32).flatten().tolist()]


@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8, 9, 10, 16])
@pytest.mark.parametrize("N, D, adds", [(5, 8, False), (3, 40, True), (1, 136, True)])
def test_equals_tensor_code_bit_for_bit(N, D, adds, K):
    module = simt.load("phalanx.kernels.sm90.experts.combine", THREADS=32)
    S = 2 * N * K
    inverse = slots(N, K, S, seed=D + K)
    y = torch.randn(S, D, generator=torch.Generator().manual_seed(K)).to(BF16)
    y[:, 0] = -0.0
    want = Grouped().combine(y, inverse)
    read = torch.zeros(S, dtype=torch.bool)
    read[inverse[inverse >= 0].long()] = True
    y[~read] = float("nan")
    more = torch.randn(N, D, generator=torch.Generator().manual_seed(N)).to(BF16)
    want = want + more if adds else want
    out = [0] * (N * D // 2)
    kernel = module.CombineKernel(module.CombineConfig(K, adds))
    memory = (words(y), inverse.flatten().tolist(), out, words(more) if adds else [])
    kernel(*map(simt.Pointer, memory), (N, D // 8), None)
    assert out == words(want)


@pytest.mark.parametrize("K", [1, 3, 8, 10, 16])
@pytest.mark.parametrize("adds", [False, True])
def test_loads_are_wide_and_nothing_is_on_a_stack(K, adds, tmp_path):
    config = CombineConfig(K, adds)
    code = Sass(CombineKernel, config, tmp_path)
    code.check_no_stack()
    assert code.count(r"@!?P\d LDG\.E\.128") == K * config.pieces  # of y, none by a branch
    assert code.count(r"STG\.E\.128") == config.pieces
    assert code.usages("REG")[0] <= 80  # 24 warps an SM


def test_arguments_are_checked():
    y, inverse = torch.zeros(4, 16, dtype=BF16), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="y must be on a CUDA device"):
        combine(y, inverse)
    with pytest.raises(ValueError, match="y has 12 columns"):
        combine(y[:, :12], inverse)
    with pytest.raises(ValueError, match="inverse 17 slots"):
        combine(y, torch.zeros(3, 17, dtype=torch.int32))
    with pytest.raises(ValueError, match="inverse 0 slots"):
        combine(y, torch.zeros(3, 0, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"y must be \[S, D\]"):
        combine(y.flatten(), inverse)
