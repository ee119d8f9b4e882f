"""`topk` and its gradient on a Hopper GPU, against the router's own statement of both."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.sm90.routing.topk import topk, topk_backward
from phalanx.moe.router.router import choose, probabilities
from tests.kernels.sm90.timing import microseconds

pytestmark = pytest.mark.gpu

OPTIONS = [
    dict(score=score, normalize=normalize, softmax_over=over, scale=scale)
    for score, normalize, over, scale in (
        ("softmax", True, "all", 1.0),
        ("softmax", False, "all", 2.5),
        ("softmax", False, "topk", 1.0),
        ("sigmoid", True, "all", 2.5),
        ("sigmoid", False, "all", 1.0),
    )
]
SIZES = [(1, 8, 1), (7, 8, 8), (1000, 64, 6), (1001, 128, 8), (333, 264, 10), (4096, 512, 16)]
DTYPES = [torch.float32, torch.bfloat16]


def draw(T: int, E: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return (2 * torch.randn(T, E, generator=g, device="cuda")).to(dtype)


def weigh(logits_TE: Tensor, idx_TK: Tensor, options: dict) -> Tensor:
    return probabilities(logits_TE, idx_TK.long(), SimpleNamespace(**options))


def check(x: Tensor, K: int, options: dict) -> tuple[Tensor, Tensor]:
    idx, prob = topk(x, top_k=K, **options)
    want = choose(x.float(), K)
    assert idx.dtype == torch.int32 and prob.dtype == torch.float32
    assert torch.equal(idx.long(), want)
    exact = weigh(x.double(), want, options).float()
    torch.testing.assert_close(prob, exact, rtol=1e-5, atol=1e-7, equal_nan=True)
    return idx, prob


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("T", "E", "K"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_router(dtype, T, E, K, options):
    check(draw(T, E, dtype), K, options)


@pytest.mark.parametrize("K", range(1, 17))
def test_every_number_of_slots(K):
    for E in (16, 40, 128, 256, 384):
        check(draw(257, E, seed=K), K, OPTIONS[0])


@pytest.mark.parametrize("E", [*range(8, 129, 8), 136, 248, 256, 264, 376, 384, 392, 504, 512])
def test_every_number_of_experts(E):
    for dtype in DTYPES:
        check(draw(129, E, dtype), min(E, 10), OPTIONS[1])


@pytest.mark.parametrize(("E", "K"), [(16, 16), (128, 8), (512, 16)])
def test_ties_go_to_the_lower_expert(E, K):
    x = draw(2000, E)
    for tied in (
        x.round(),
        (x > 0).float(),
        torch.zeros_like(x),
        x.sign() * 3e38,
    ):
        check(tied, K, OPTIONS[0])


def test_both_zeros_are_the_same():
    idx, prob = topk(torch.where(draw(100, 128) > 1, 0.0, -0.0), top_k=8, **OPTIONS[0])
    assert (idx == torch.arange(8, device="cuda")).all() and (prob == 0.125).all()


def test_numbers_that_are_none():
    x = draw(500, 128)
    some = torch.where(x > 1.5, float("inf"), torch.where(x < -1, float("-inf"), x))
    for strange in (some, torch.full_like(x, float("-inf"))):
        idx, _ = topk(strange, top_k=8, **OPTIONS[0])
        assert torch.equal(idx.long(), choose(strange, 8))
    # Where NaN ranks is nobody's business, but the choice is one of experts that exist.
    idx, _ = topk(torch.where(x < -3, float("nan"), some), top_k=8, **OPTIONS[0])
    ranked = idx.sort(-1).values
    assert (ranked[:, 1:] > ranked[:, :-1]).all() and (ranked >= 0).all() and (ranked < 128).all()


@pytest.mark.parametrize(("T", "E", "K"), [(999, 64, 6), (32768, 256, 8), (500, 512, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_decides_but_does_not_weigh(dtype, T, E, K):
    x, bias = draw(T, E, dtype), draw(1, E, seed=1)[0] / 4
    options = OPTIONS[3]
    idx, prob = topk(x, top_k=K, bias_E=bias, **options)
    score = x.float().sigmoid() + bias
    want = choose(score, K)
    assert (idx.long() != want).any(1).sum() <= T / 1000  # two that differ in the last bit
    torch.testing.assert_close(score.gather(1, idx.long()), score.gather(1, want))
    assert (idx.sort(1).values.diff(dim=1) > 0).all()
    exact = weigh(x.double(), idx, options).float()
    torch.testing.assert_close(prob, exact, rtol=1e-5, atol=1e-7)


GROUPED = [  # E, K, groups
    (256, 8, (8, 4)),  # DeepSeek-V3
    (160, 6, (8, 3)),
    (64, 3, (16, 2)),
    (16, 2, (2, 1)),
    (512, 16, (32, 8)),
    (512, 16, (32, 16)),
    (384, 8, (8, 7)),
]


def check_groups(x: Tensor, K: int, groups: tuple[int, int], bias: Tensor | None) -> None:
    """Scores as torch computes them must lead to the same choice, bit for bit."""
    idx, prob = topk(x, top_k=K, bias_E=bias, groups=groups, **OPTIONS[3])
    score = x.float().sigmoid() if bias is None else x.float().sigmoid() + bias
    want = choose(score, K, *groups)
    assert torch.equal(idx.long(), want)
    exact = weigh(x.double(), want, OPTIONS[3]).float()
    torch.testing.assert_close(prob, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("E", "K", "groups"), GROUPED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_come_from_the_best_groups(dtype, E, K, groups):
    x, bias = draw(4001, E, dtype), draw(1, E, seed=1)[0] / 8
    check_groups(x, K, groups, None)
    check_groups(x, K, groups, bias)


@pytest.mark.parametrize(("E", "K", "groups"), GROUPED)
def test_ties_of_groups_go_to_the_lower(E, K, groups):
    x, bias = draw(2000, E), (draw(1, E, seed=1)[0] * 2).round() / 8
    for tied in (x.round(), (x > 0).float(), torch.zeros_like(x), x.sign() * 3e38):
        check_groups(tied, K, groups, None)
        check_groups(tied, K, groups, bias)


@pytest.mark.parametrize("left", [0, 3, 40, 200])
def test_masked_experts_of_groups(left):
    """With too few unmasked experts, masked ones and those of other groups follow, lowest first."""
    x, bias = draw(2000, 256), torch.full((256,), float("-inf"), device="cuda")
    g = torch.Generator("cuda").manual_seed(left)
    bias[torch.randperm(256, generator=g, device="cuda")[:left]] = 0
    check_groups(x, 8, (8, 4), bias)
    check_groups(torch.where(x > 1, float("-inf"), x), 8, (8, 4), bias)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("T", "E", "K"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(dtype, T, E, K, options):
    x = draw(T, E, dtype)
    idx, prob = topk(x, top_k=K, **options)
    dprob = draw(T, K, seed=1)
    leaf = x.double().requires_grad_()
    weigh(leaf, idx, options).backward(dprob.double())
    ours = topk_backward(dprob, idx, prob, x, **options)
    assert ours.dtype == dtype
    rtol = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.double(), leaf.grad, rtol=rtol, atol=3e-6)


def test_repeats_are_equal_and_the_host_never_waits():
    x, dprob = draw(4096, 128), draw(4096, 8)

    def both() -> tuple[Tensor, ...]:
        idx, prob = topk(x, top_k=8, **OPTIONS[1])
        return idx, prob, topk_backward(dprob, idx, prob, x, **OPTIONS[1])

    first = both()
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeats = [both() for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(all(map(torch.equal, r, first)) for r in repeats)


def test_a_graph_serves_every_batch():
    x, dprob = draw(1000, 256), draw(1000, 8)
    idx, prob = topk(x, top_k=8, **OPTIONS[0])  # compiles
    topk_backward(dprob, idx, prob, x, **OPTIONS[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        idx, prob = topk(x, top_k=8, **OPTIONS[0])
        dx = topk_backward(dprob, idx, prob, x, **OPTIONS[0])
    for seed in range(100):
        x.copy_(draw(1000, 256, seed=seed))
        dprob.copy_(draw(1000, 8, seed=seed))
        for out in (idx, prob, dx):
            out.fill_(7)
        graph.replay()
        want, want_prob = check(x, 8, OPTIONS[0])
        assert torch.equal(idx, want) and torch.equal(prob, want_prob)
        assert torch.equal(dx, topk_backward(dprob, want, want_prob, x, **OPTIONS[0]))


def test_no_tokens():
    idx, prob = topk(draw(0, 64), top_k=4, **OPTIONS[0])
    assert idx.shape == prob.shape == (0, 4)
    assert topk_backward(prob, idx, prob, draw(0, 64), **OPTIONS[0]).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_TE": torch.zeros(16, 4, device="cuda").T}, r"logits \[4, 16\]|contiguous"),
        ({"bias_E": torch.zeros(8, device="cuda")}, r"bias must be torch.float32 \[16\]"),
        ({"logits_TE": torch.zeros(65, device="cuda")[1:].view(4, 16)}, "16 bytes|align|multiple"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_errors_name_the_argument(change, message):
    given = dict(logits_TE=torch.zeros(4, 16, device="cuda"), top_k=2, **OPTIONS[3])
    with pytest.raises(ValueError, match=message):
        topk(**{**given, **change})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "E", "K", "limit"), [(32768, 128, 8, 15), (32768, 256, 16, 30), (32768, 512, 10, 40)]
)
def test_time(T, E, K, limit):
    x, dprob = draw(T, E), draw(T, K)
    for options in OPTIONS:
        idx, prob = topk(x, top_k=K, **options)
        there = microseconds(lambda o=options: topk(x, top_k=K, **o))
        back = microseconds(lambda o=options, i=idx, p=prob: topk_backward(dprob, i, p, x, **o))
        print(f"topk {T} x {E}, {K} best, {options}: {there:.1f} us, gradient {back:.1f} us")
        if options is OPTIONS[0]:
            assert there <= limit
