"""The plan's kernels without a GPU: their code on threads of the host, and their machine code."""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.jit.pointers import arguments_of
from phalanx.kernels.sm90.routing import plan as host
from phalanx.kernels.sm90.routing.place import MAX_PAIRS, WARPS, PlanConfig, PlanKernel
from phalanx.kernels.sm90.routing.plan import (
    MAX_EXPERTS,
    GatherConfig,
    GatherKernel,
    chunks,
    plan,
    plan_backward,
)
from tests.kernels.sm90 import simt
from tests.kernels.sm90.sass import Sass

UNTOUCHED = -77


@pytest.fixture(scope="module")
def emulated():
    return simt.load("phalanx.kernels.sm90.routing.place", THREADS=64, WARPS=2)


def routing(N: int, K: int, experts: range, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    idx = torch.randint(experts.start, experts.stop, (N, K), generator=g, dtype=torch.int32)
    return idx, torch.rand(N, K, generator=g)


@pytest.mark.parametrize(
    ("N", "K", "experts", "first", "L", "S", "capacity", "span"),
    [
        pytest.param(50, 3, range(-1, 20), 2, 13, 90, 64, 32, id="some elsewhere, exact buffer"),
        pytest.param(40, 5, range(0, 9), 0, 9, 260, 64, 32, id="several chunks, padding"),
        pytest.param(33, 8, range(0, 9), 0, 9, 100, 64, 160, id="overflow, batches of a warp"),
        pytest.param(90, 1, range(3, 4), 0, 6, 96, 64, 64, id="all to one expert"),
        pytest.param(20, 2, range(7, 9), 0, 7, 30, 64, 32, id="nobody"),
        pytest.param(70, 2, range(0, 250), 30, 200, 140, 256, 64, id="four experts a thread"),
        pytest.param(0, 2, range(0, 3), 0, 3, 5, 64, 32, id="no rows"),
        pytest.param(1, 1, range(0, 1), 0, 1, 1, 64, 32, id="one of each"),
    ],
)
def test_equals_the_plan_in_tensor_code(emulated, N, K, experts, first, L, S, capacity, span):
    idx, prob = routing(N, K, experts)
    P, width = N * K, -(-L // 4) * 4
    blocks = max(1, -(-P // (2 * span)))
    sizes = [S, S, L + 1, P, 1, L, blocks * width]
    out = [[UNTOUCHED] * n for n in sizes]
    kernel = emulated.PlanKernel(emulated.PlanConfig(capacity))
    memory = (idx.flatten().tolist(), prob.flatten().tolist(), *out)
    kernel(*(simt.Pointer(m) for m in memory), P, K, first, L, S, blocks, span, None)
    want = make_plan(idx, prob, first_expert=first, local_experts=L, rows=S)
    order = want.offsets.diff().neg().sort(stable=True).indices
    wanted = (*want[:5], order)
    assert out[:6] == [w.flatten().tolist() for w in wanted]
    assert UNTOUCHED not in out[6]


def test_gradient_is_gathered():
    module = simt.load("phalanx.kernels.sm90.routing.plan")
    kernel = module.GatherKernel(module.GatherConfig(32))
    values = [0.5 * i for i in range(40)]
    index = [random.Random(i).randrange(-1, 40) for i in range(300)]
    out = [UNTOUCHED] * 300
    kernel(*map(simt.Pointer, (values, index, out)), 40, 300, None)
    assert out == [values[i] if i >= 0 else 0 for i in index]


@pytest.mark.parametrize("pairs", [0, 1, 511, 65536, 8 * 32768, 16 * 32768 + 7, MAX_PAIRS])
@pytest.mark.parametrize("experts", [1, 128, 256, 512, MAX_EXPERTS])
def test_chunks_cover_the_pairs_and_fit_the_chip(pairs, experts):
    made = chunks(pairs, experts, 132)
    assert 1 <= made.blocks <= 132
    assert made.span % 32 == 0
    assert (made.blocks - 1) * WARPS * made.span < max(pairs, 1) <= made.blocks * WARPS * made.span


def test_rows_of_pairs_are_divided_exactly(emulated):
    rng = random.Random(0)
    for K in range(1, 257):
        inverse = 0xFFFFFFFF // K + 1
        for quotient in [0, 1, MAX_PAIRS // K, *(rng.randrange(MAX_PAIRS // K) for _ in range(20))]:
            for pair in (quotient * K - 1, quotient * K, quotient * K + K - 1):
                if 0 <= pair < MAX_PAIRS:
                    assert emulated._divide(pair, K, inverse) == pair // K


@pytest.mark.parametrize("config", [PlanConfig(64), PlanConfig(256), PlanConfig(1024, False)])
def test_plan_compiles_without_a_stack(config, tmp_path):
    code = Sass(PlanKernel, config, tmp_path)
    code.check_no_stack()
    assert len(code.usages("REG")) == 2  # launches
    assert sum(code.usages("REG")) * 512 <= 65536  # the second may start beside the first
    assert code.count("MATCH.ANY") == 4 and code.count(r"LDG\.E\.128") == 8
    assert code.count("PREEXIT") == code.count("ACQBULK") == config.overlap
    assert not code.count("ATOMG|RED[. ]G")


def test_gather_compiles_without_a_stack(tmp_path):
    Sass(GatherKernel, GatherConfig(), tmp_path).check_no_stack()


def test_the_kernel_gets_all_its_arguments(monkeypatch):
    launched = []
    monkeypatch.setattr(
        host, "launch", lambda kernel, config, **given: launched.append((kernel, given))
    )
    monkeypatch.setattr(host, "check", lambda *_: None)
    monkeypatch.setattr(host, "sms", lambda _: 132)
    made = plan(*routing(4, 2, range(3)), first_expert=0, local_experts=3, rows=8)
    ((kernel, given),) = launched
    assert given.keys() == arguments_of(kernel).parameters.keys()
    names = "row_index", "row_prob", "offsets", "inverse", "needed", "order"
    assert all(given[name] is b for name, b in zip(names, made, strict=False))


def test_arguments_are_checked():
    idx, prob = routing(4, 2, range(3))
    given = dict(first_expert=0, local_experts=3, rows=8)
    with pytest.raises(ValueError, match="topk_idx must be on a CUDA device"):
        plan(idx, prob, **given)
    with pytest.raises(ValueError, match=r"topk_idx must be \[rows, top_k\]"):
        plan(idx.flatten(), prob, **given)
    with pytest.raises(ValueError, match="inverse must be on a CUDA device"):
        plan_backward(prob.flatten(), idx)
    with pytest.raises(ValueError, match="capacity=100"):
        PlanConfig(100)
