"""`combine` without a GPU: its code on threads of the host, and its machine code."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.sm90.experts.combine import MAX_ADDENDS, CombineConfig, CombineKernel, combine
from tests.kernels.sm90 import simt
from tests.kernels.sm90.sass import Sass

BF16 = torch.bfloat16


def slots(N: int, K: int, S: int, seed: int) -> Tensor:
    """Rows of S, none twice, and -1 for about a third of the slots."""
    g = torch.Generator().manual_seed(seed)
    inverse = torch.randperm(max(S, N * K), generator=g)[: N * K].to(torch.int32)
    inverse[(inverse >= S) | (torch.rand(N * K, generator=g) < 0.3)] = -1
    return inverse.view(N, K)


def draw(N: int, D: int, seed: int) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed)).to(BF16)


def in_order(y: Tensor, inverse: Tensor, addends: Sequence[Tensor]) -> Tensor:
    """In fp32, slot after slot and addend after addend, rounded once."""
    total = torch.zeros(inverse.shape[0], y.shape[1])
    for row in inverse.unbind(1):
        total += y[row.clamp(min=0)].float().masked_fill(row[:, None] < 0, 0)
    for addend in addends:
        total += addend.float()
    return total.to(BF16)


def words(x: Tensor) -> list[int]:
    return [w % (1 << 32) for w in x.view(torch.int32).flatten().tolist()]


@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8, 9, 10, 16])
@pytest.mark.parametrize(("N", "D", "addends"), [(5, 8, 0), (3, 40, 1), (1, 136, 1), (3, 72, 2)])
def test_equals_tensor_code_bit_for_bit(N, D, addends, K):
    module = simt.load("phalanx.kernels.sm90.experts.combine", THREADS=32)
    S = 2 * N * K
    inverse = slots(N, K, S, seed=D + K)
    y = draw(S, D, K)
    y[:, 0] = -0.0
    added = [draw(N, D, seed) for seed in range(addends)]
    want = in_order(y, inverse, added)
    if not addends:
        assert words(want) == words(Grouped().combine(y, inverse))
    read = torch.zeros(S, dtype=torch.bool)
    read[inverse[inverse >= 0].long()] = True
    y[~read] = float("nan")
    out = [0] * (N * D // 2)
    kernel = module.CombineKernel(module.CombineConfig(K, addends))
    unused: list[list[int]] = [[]] * (MAX_ADDENDS - addends)
    memory = (words(y), inverse.flatten().tolist(), out, *map(words, added), *unused)
    kernel(*map(simt.Pointer, memory), N, D // 8, None)
    assert out == words(want)


def test_rounds_once_with_what_is_added():
    """A sum of three bf16 that two roundings would lose."""
    module = simt.load("phalanx.kernels.sm90.experts.combine", THREADS=32)
    y = torch.ones(1, 8, dtype=BF16)
    added = [torch.full((1, 8), 2**-8, dtype=BF16), torch.full((1, 8), 2**-8, dtype=BF16)]
    out = [0] * 4
    memory = (words(y), [0], out, *map(words, added))
    module.CombineKernel(module.CombineConfig(1, 2))(*map(simt.Pointer, memory), 1, 1, None)
    assert out == words(torch.full((1, 8), 1 + 2**-7, dtype=BF16))
    assert torch.equal(y + added[0] + added[1], y)


@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8, 10, 16])
@pytest.mark.parametrize("addends", [0, 1, 2])
def test_loads_are_wide_and_nothing_is_on_a_stack(K, addends, tmp_path):
    config = CombineConfig(K, addends)
    code = Sass(CombineKernel, config, tmp_path)
    code.check_no_stack()
    loads = (K + addends) * config.pieces  # none by a branch
    assert code.count(r"@!?P\d LDG\.E\.128") == loads
    assert code.count(r"STG\.E\.128") == config.pieces
    # 24 warps an SM; 16 where most is loaded, which no model in configs/model asks for.
    assert code.usages("REG")[0] <= (80 if K + addends < 18 else 96)


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
