"""The plan's kernels on a Hopper GPU: bit for bit the plan in tensor code, whatever the routing."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.routing.place import MAX_PAIRS
from phalanx.kernels.sm90.routing.plan import plan, plan_backward
from tests.kernels.sm90.timing import microseconds

pytestmark = pytest.mark.gpu


def draw(N: int, K: int, low: int, high: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any K of the experts low .. high - 1 for each row, the same one twice too."""
    g = torch.Generator("cuda").manual_seed(seed)
    idx = torch.randint(low, high, (N, K), generator=g, device="cuda", dtype=torch.int32)
    return idx, torch.rand(N, K, generator=g, device="cuda")


def distinct(N: int, K: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    prob, idx = torch.rand(N, experts, generator=g, device="cuda").topk(K, dim=1)
    return idx.to(torch.int32), prob


def check(idx: Tensor, prob: Tensor, first: int, L: int, S: int) -> ExpertPlan:
    size = dict(first_expert=first, local_experts=L, rows=S)
    ours, want = plan(idx, prob, **size), make_plan(idx, prob, **size)
    for name in ("row_index_S", "offsets", "inverse_NK", "needed"):
        assert torch.equal(getattr(ours, name), getattr(want, name)), name
        assert getattr(ours, name).dtype == torch.int32
    assert torch.equal(ours.row_prob_S.view(torch.int32), want.row_prob_S.view(torch.int32))
    count = want.offsets.diff()
    assert torch.equal(ours.order_L.long(), count.neg().sort(stable=True).indices)
    return ours


def tensors(plan: ExpertPlan) -> list[Tensor]:
    """Tensors of a plan, of which only some plans have all."""
    return [t for t in plan if t is not None]


def equal(ours: ExpertPlan, want: ExpertPlan) -> bool:
    return len(tensors(ours)) == len(tensors(want)) and all(
        map(torch.equal, tensors(ours), tensors(want))
    )


@pytest.mark.parametrize("K", range(1, 17))
def test_every_number_of_slots(K):
    idx, prob = distinct(1013, K, 40, seed=K)
    check(idx, prob, 0, 40, 1013 * K)
    check(idx, prob, 8, 16, 1013 * K // 2 + 5)


@pytest.mark.parametrize("L", [1, 2, 3, 31, 64, 65, 127, 128, 200, 256, 257, 384, 512, 513, 1024])
def test_every_number_of_experts(L):
    idx, prob = draw(3001, 6, -3, 2 * L + 5, seed=L)
    for first in (0, 1, L, -2):
        check(idx, prob, first, L, 3001 * 6)


@pytest.mark.parametrize("N", [1, 2, 31, 33, 511, 512, 513, 4099, 8192, 65537])
def test_every_number_of_rows(N):
    for K in (1, 7, 8):
        idx, prob = draw(N, K, 0, 96, seed=N)
        check(idx, prob, 32, 33, max(1, N * K))


@pytest.mark.parametrize(
    ("N", "K", "E"),
    [(8192, 8, 256), (32768, 8, 128), (32768, 10, 512), (32768, 16, 256), (24577, 8, 64)],
)
def test_sizes_of_models(N, K, E):
    idx, prob = distinct(N, K, E)
    check(idx, prob, 0, E, N * K)
    check(idx, prob, E // 4, E // 4, N * K // 4 + 1000)


def test_as_many_pairs_as_it_takes():
    idx, prob = draw(MAX_PAIRS // 16, 16, 0, 300)
    check(idx, prob, 20, 256, MAX_PAIRS)


@pytest.mark.parametrize("S", [1, 17, 4000, 8191, 8192, 8193, 100_000])
@pytest.mark.parametrize(
    ("low", "high", "first", "L"),
    [
        pytest.param(5, 6, 0, 16, id="one expert has all"),
        pytest.param(5, 6, 5, 1, id="the only expert has all"),
        pytest.param(0, 8, 8, 8, id="all elsewhere"),
        pytest.param(-1, 0, 0, 8, id="nobody chosen"),
        pytest.param(2, 4, 0, 300, id="most are empty"),
        pytest.param(-(1 << 31), -(1 << 31) + 9, 0, 4, id="ids that wrap around"),
        pytest.param(0, 16, 0, 16, id="even"),
    ],
)
def test_skewed_routing_in_any_buffer(low, high, first, L, S):
    idx, prob = draw(2048, 4, low, high)
    check(idx, prob, first, L, S)


def test_no_rows():
    idx, prob = draw(0, 4, 0, 8)
    made = plan(idx, prob, first_expert=0, local_experts=8, rows=5)
    assert made.row_index_S.tolist() == [0] * 5 and made.row_prob_S.tolist() == [0] * 5
    assert made.offsets.tolist() == [0] * 9 and made.needed.item() == 0
    assert made.inverse_NK.shape == (0, 4) and made.order_L.tolist() == list(range(8))
    assert plan_backward(made.row_prob_S, made.inverse_NK).shape == (0, 4)


def test_sorted_and_reversed_routing():
    prob = torch.rand(4096, 4, device="cuda")
    idx = (torch.arange(4096 * 4, device="cuda", dtype=torch.int32) // 64).view(4096, 4)
    check(idx, prob, 0, 256, 4096 * 4)
    check(idx.flip(0).contiguous(), prob, 0, 256, 4096 * 4)


def test_probabilities_elsewhere_do_not_show():
    idx, prob = draw(3000, 8, 0, 64)
    prob[(idx < 16) | (idx >= 32)] = float("nan")
    ours = check(idx, prob, 16, 16, 3000 * 8)
    assert ours.row_prob_S.isfinite().all()


def test_gradient_is_that_of_the_plan_in_tensor_code():
    for N, K, S in ((1, 1, 1), (1000, 3, 1500), (4097, 8, 20_000)):
        idx, prob = draw(N, K, 0, 12)
        prob.requires_grad_()
        want = make_plan(idx, prob, first_expert=2, local_experts=7, rows=S)
        grad = torch.randn(S, device="cuda")
        want.row_prob_S.backward(grad)
        used = torch.arange(S, device="cuda") < want.offsets[-1]
        ours = plan_backward(grad.masked_fill(~used, float("nan")), want.inverse_NK)
        assert torch.equal(ours, prob.grad)


def test_repeats_are_equal():
    idx, prob = distinct(32768, 8, 256)
    size = dict(first_expert=0, local_experts=256, rows=32768 * 8)
    first = plan(idx, prob, **size)
    for _ in range(30):
        assert equal(plan(idx, prob, **size), first)


def test_host_never_waits():
    idx, prob = draw(4096, 8, 0, 64)
    size = dict(first_expert=0, local_experts=64, rows=4096 * 8)
    expected = plan(idx, prob, **size)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = plan(idx, prob, **size)
        gradient = plan_backward(ours.row_prob_S, ours.inverse_NK)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert equal(ours, expected)
    assert torch.equal(gradient, prob)


def test_a_graph_serves_every_routing():
    N, K, E, S = 6000, 8, 128, 20_000
    idx, prob = draw(N, K, 0, E)
    size = dict(first_expert=32, local_experts=64, rows=S)
    plan(idx, prob, **size)  # compiles
    plan_backward(prob.flatten(), idx)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = plan(idx, prob, **size)
        gradient = plan_backward(ours.row_prob_S, ours.inverse_NK)
    for seed in range(100):
        new_idx, new_prob = draw(N, K, -1, 1 + seed * 3, seed=seed)
        idx.copy_(new_idx)
        prob.copy_(new_prob)
        for tensor in (*tensors(ours), gradient):
            tensor.fill_(7)
        graph.replay()
        want = plan(new_idx, new_prob, **size)
        assert equal(ours, want)
        assert torch.equal(gradient, new_prob.masked_fill(want.inverse_NK < 0, 0))
        if seed % 10 == 0:
            check(new_idx, new_prob, 32, 64, S)


def test_other_stream_than_the_default():
    idx, prob = draw(4096, 8, 0, 64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check(idx, prob, 0, 64, 4096 * 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_idx_NK": torch.zeros(8, 2, device="cuda")}, "topk_idx must be torch.int32"),
        ({"topk_prob_NK": torch.zeros(8, 3, device="cuda")}, "topk_prob must be"),
        ({"topk_prob_NK": torch.zeros(2, 8, device="cuda").T}, "topk_prob must be contiguous"),
        ({"local_experts": 1025}, "local_experts=1025: must be 1 to 1024"),
        ({"rows": 0}, "rows=0"),
    ],
)
def test_errors_name_the_argument(change, message):
    idx, prob = draw(8, 2, 0, 4)
    given = dict(topk_idx_NK=idx, topk_prob_NK=prob, first_expert=0, local_experts=4, rows=16)
    with pytest.raises(ValueError, match=message):
        plan(**{**given, **change})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "K", "E", "limit"), [(8192, 8, 256, 20), (32768, 8, 128, 25), (32768, 16, 512, 35)]
)
def test_time(N, K, E, limit):
    idx, prob = distinct(N, K, E)
    size = dict(first_expert=0, local_experts=E, rows=N * K)
    time = microseconds(lambda: plan(idx, prob, **size))
    print(f"plan of {N} x {K} pairs, {E} experts: {time:.1f} us")
    assert time <= limit
