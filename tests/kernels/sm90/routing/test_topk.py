"""`topk` and its gradient without a GPU: their code on threads of the host, their machine code."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.kernels.routing.topk_scores import choose
from phalanx.kernels.sm90.routing.logits import WEIGHTS, ExpertGroups, TopkConfig
from phalanx.kernels.sm90.routing.topk import TopkKernel, _bits, topk, topk_backward
from phalanx.kernels.sm90.routing.topk_gradient import TopkGradientKernel
from tests.kernels.sm90 import simt
from tests.kernels.sm90.sass import Sass

UNTOUCHED = -77


@pytest.fixture(scope="module")
def forward():
    return simt.load("phalanx.kernels.sm90.routing.topk", WARPS=2)


@pytest.fixture(scope="module")
def backward():
    return simt.load("phalanx.kernels.sm90.routing.topk_gradient", WARPS=2)


def weigh(logits_TE: Tensor, idx_TK: Tensor, weights: str, scale: float) -> Tensor:
    """The probabilities of chosen experts."""
    chosen_TK = logits_TE.gather(1, idx_TK)
    if weights == "softmax_all":
        prob_TK = logits_TE.softmax(1).gather(1, idx_TK)
    elif weights == "softmax":
        prob_TK = chosen_TK.softmax(1)
    else:
        prob_TK = chosen_TK.sigmoid()
        if weights == "sigmoid_sum":
            prob_TK = prob_TK / (prob_TK.sum(1, keepdim=True) + 1e-20)
    return prob_TK * scale


def best(score_TE: Tensor, K: int) -> Tensor:
    return score_TE.sort(dim=1, descending=True, stable=True).indices[:, :K]


def draw(kind: str, T: int, E: int) -> Tensor:
    g = torch.Generator().manual_seed(E)
    x = torch.randn(T, E, generator=g)
    return {
        "different": x,
        "coarse": (x * 2).round() / 2,
        "same": torch.zeros(T, E),
        "two values": (x > 0).float(),
        "extreme": torch.where(x > 1, float("-inf"), x * 1e30).where(x > -2, float("nan")),
    }[kind]


def words(x: Tensor) -> list[int]:
    return [w % (1 << 32) for w in x.contiguous().view(torch.int32).flatten().tolist()]


def run(forward, logits: Tensor, K: int, weights: str, scale=1.0, bias=None, groups=(1, 1)):
    T, E = logits.shape
    bf16 = logits.dtype == torch.bfloat16
    limit = forward._expert_groups(*groups, experts=E, top_k=K)
    config = forward.TopkConfig(K, -(-E // 128), bf16, weights, bias is not None, limit)
    idx, prob = [UNTOUCHED] * (T * K), [UNTOUCHED] * (T * K)
    memory = (words(logits), [] if bias is None else list(bias.numpy()), idx, prob)
    forward.TopkKernel(config)(*map(simt.Pointer, memory), T, E, _bits(scale), None)
    return torch.tensor(idx).view(T, K), torch.tensor(prob).view(T, K)


ALL_EXPERTS = [  # E, K, bf16
    *[(8, 3, False), (16, 16, True), (40, 1, False), (128, 8, True), (512, 10, False)],
]


@pytest.mark.parametrize(
    ("E", "K", "bf16", "kind"),
    [
        # Of the largest number the kind with most ties between different values.
        pytest.param(*case, kind, marks=() if small or kind == "coarse" else pytest.mark.slow)
        for case in ALL_EXPERTS
        for small in [case[0] < 512]
        for kind in ("different", "coarse", "same", "two values", "extreme")
    ],
)
def test_the_best_come_first_and_ties_go_to_the_lower(forward, bf16, E, K, kind):
    x = draw(kind, 2, E).to(torch.bfloat16 if bf16 else torch.float32)
    idx, prob = run(forward, x, K, "softmax")
    want = best(x.float(), K)
    assert idx.tolist() == want.tolist()
    torch.testing.assert_close(prob, weigh(x.float(), want, "softmax", 1.0), equal_nan=True)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("E", "K"), [(16, 1), (136, 6)])
def test_probabilities(forward, E, K, weights):
    x = 3 * draw("different", 2, E)
    idx, prob = run(forward, x, K, weights, scale=2.5)
    assert idx.tolist() == best(x, K).tolist()
    torch.testing.assert_close(prob, weigh(x, idx, weights, 2.5))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_bias_decides_but_does_not_weigh(forward, bf16):
    x = draw("different", 4, 136).to(torch.bfloat16 if bf16 else torch.float32)
    bias = torch.randn(136, generator=torch.Generator().manual_seed(1))
    idx, prob = run(forward, x, 5, "sigmoid_sum", bias=bias)
    want = best(x.float().sigmoid() + bias, 5)
    assert idx.tolist() == want.tolist() != best(x.float(), 5).tolist()
    torch.testing.assert_close(prob, weigh(x.float(), want, "sigmoid_sum", 1.0))


def scores(logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
    """Compared scores, with the exponential of the stand-in, to the last bit."""
    one = np.float32(1)
    with np.errstate(over="ignore"):
        score_TE = torch.from_numpy(one / (one + np.exp(-logits_TE.float().numpy())))
    return score_TE if bias_E is None else score_TE + bias_E


GROUPED = [  # E, K, groups, bf16
    (256, 8, (8, 4), False),  # DeepSeek-V3
    (160, 6, (8, 3), True),
    (64, 3, (16, 2), False),
    (16, 2, (2, 1), False),
    (40, 4, (5, 2), False),
    (512, 16, (32, 8), False),
]


def check_groups(forward, x: Tensor, K: int, groups: tuple[int, int], bias: Tensor | None) -> None:
    idx, prob = run(forward, x, K, "sigmoid_sum", 2.5, bias, groups)
    want = choose(scores(x, bias), K, *groups)
    assert idx.tolist() == want.tolist()
    torch.testing.assert_close(prob, weigh(x.float(), want, "sigmoid_sum", 2.5), equal_nan=True)


@pytest.mark.parametrize(
    ("E", "K", "groups", "bf16", "kind"),
    [
        # Ties everywhere; of the other kinds the smallest.
        pytest.param(*case, kind, marks=() if small or kind == "coarse" else pytest.mark.slow)
        for case in GROUPED
        for small in [case[0] == 16]
        for kind in ("different", "coarse", "same", "two values")
    ],
)
def test_experts_come_from_the_best_groups(forward, bf16, E, K, groups, kind):
    x = draw(kind, 2, E).to(torch.bfloat16 if bf16 else torch.float32)
    check_groups(forward, x, K, groups, None)
    bias = draw("coarse", 1, E)[0].roll(3) / 4
    check_groups(forward, x, K, groups, bias)
    if kind == "different":
        assert choose(scores(x, bias), K, *groups).tolist() != best(scores(x, bias), K).tolist()


@pytest.mark.parametrize("left", [0, 3, 40], ids=lambda n: f"{n} left")
def test_experts_that_are_masked(forward, left):
    """With too few unmasked experts, masked ones and those of other groups follow, lowest first."""
    x, bias = draw("different", 2, 256), torch.full((256,), float("-inf"))
    bias[torch.randperm(256, generator=torch.Generator().manual_seed(left))[:left]] = 0
    check_groups(forward, x, 8, (8, 4), bias)
    check_groups(forward, torch.where(x > 0, float("-inf"), x), 8, (8, 4), bias)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("E", "K", "bf16"), [(16, 1, False), (136, 6, False), (40, 16, True)])
def test_gradient(backward, bf16, E, K, weights):
    dtype, T, scale = torch.bfloat16 if bf16 else torch.float32, 3, 2.5
    x = draw("different", T, E).to(dtype)
    idx = best(x.float(), K)
    leaf = x.float().requires_grad_()
    prob = weigh(leaf, idx, weights, scale)
    dprob = torch.randn(T, K, generator=torch.Generator().manual_seed(K))
    prob.backward(dprob)
    config = backward.TopkConfig(K, -(-E // 128), bf16, weights)
    out = [UNTOUCHED] * len(words(x))
    lists = (dprob.flatten().numpy(), idx.flatten().tolist(), prob.detach().flatten().numpy())
    memory = (*map(list, lists), words(x), out)
    backward.TopkGradientKernel(config)(*map(simt.Pointer, memory), T, E, _bits(scale), None)
    signed = torch.tensor(out).sub(torch.tensor(out).ge(1 << 31).long() << 32).to(torch.int32)
    ours = signed.view(dtype).view(T, E).float()
    torch.testing.assert_close(ours, leaf.grad, rtol=1e-2 if bf16 else 1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TopkConfig(8, 1, False, "softmax"), marks=pytest.mark.slow),
        TopkConfig(8, 1, False, "softmax_all"),
        TopkConfig(8, 2, False, "sigmoid_sum", biased=True),
        pytest.param(TopkConfig(16, 4, False, "softmax"), marks=pytest.mark.slow),
        TopkConfig(10, 4, True, "sigmoid"),
        TopkConfig(8, 2, False, "sigmoid_sum", True, ExpertGroups(8, 32, 4, 2)),
        TopkConfig(6, 2, True, "sigmoid_sum", False, ExpertGroups(8, 20, 3, 2)),
        TopkConfig(16, 4, False, "sigmoid", True, ExpertGroups(32, 16, 16, 1)),
    ],
    ids=str,
)
def test_topk_compiles_without_a_stack(config, tmp_path):
    code = Sass(TopkKernel, config, tmp_path)
    code.check_no_stack()
    wide = r"LDG\.E\.64" if config.bf16 else r"LDG\.E\.128"
    assert code.count(wide) == config.vectors * (1 + config.biased)
    # Rounds for the threshold, and the two of the search that is seldom taken.
    assert code.count("REDUX") == config.top_k + 2
    assert code.usages("REG")[0] <= 64
    assert not code.count(r"REDUX\.MAX\.S32|VIMNMX3?\.S32")  # keys have no sign


@pytest.mark.parametrize(
    "weights",
    [
        name
        if name in ("softmax_all", "sigmoid_sum")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in WEIGHTS
    ],
)
def test_gradient_compiles_without_a_stack(weights, tmp_path):
    for bf16 in (False, True):
        code = Sass(TopkGradientKernel, TopkConfig(8, 2, bf16, weights), tmp_path)
        code.check_no_stack()
        assert code.count(r"STG\.E\.64" if bf16 else r"STG\.E\.128") == 2


def test_arguments_are_checked():
    x = torch.zeros(4, 16)
    given = dict(top_k=2, score="softmax", normalize=True, softmax_over="all", scale=1.0)
    for change, message in (
        ({}, "logits must be on a CUDA device"),
        ({"top_k": 17}, "top_k=17: must be 1 to 16"),
        ({"score": "tanh"}, "score=tanh"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"bias_E": torch.zeros(16)}, "bias needs score=sigmoid"),
        ({"groups": (2, 1)}, "groups need score=sigmoid"),
        ({"groups": (3, 1)}, "cannot come from 1 of 3 equal groups"),
        ({"groups": (4, 5)}, "cannot come from 5 of 4 equal groups"),
        ({"groups": (16, 1)}, "2 of 16 experts cannot come from 1 of 16"),
        ({"groups": (8, 4), "score": "sigmoid"}, "groups of 2 experts: must be a multiple of 4"),
        ({"groups": (4, 1), "top_k": 3, "score": "sigmoid"}, "by the sum of 3 scores"),
    ):
        with pytest.raises(ValueError, match=message):
            topk(x, **{**given, **change})
    with pytest.raises(ValueError, match=r"logits \[4, 12\]"):
        topk(x[:, :12], **given)
    with pytest.raises(ValueError, match="float64"):
        topk(x.double(), **given)
    del given["top_k"]
    idx = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="scale=0"):
        topk_backward(x[:, :2], idx, x[:, :2], x, **{**given, "scale": 0.0})
