"""The router against loops over tokens in Python; forced balance; bad input; no host reads."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.cases import (
    BATCH,
    EXPERTS,
    HIDDEN,
    LOSSES,
    SCORES,
    SEQUENCE,
    TOP_K,
    best,
    build_router,
    draw,
    fill,
    hidden,
    install,
    model,
    transformer,
)
from tests.support.distributed import run_distributed
from tests.support.sync_free import sync_free

TOKENS = SEQUENCE * BATCH


# --- choice and probabilities ---------------------------------------------------------------------


def statement(logits: list[float], o: Any, top_k: int, bias: list[float]):
    """Experts and probabilities of one token, in plain Python."""
    total = sum(math.exp(x) for x in logits)
    if o.score == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    elif o.softmax_over == "all":
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = list(logits)
    ranked = [s + b for s, b in zip(scores, bias, strict=True)]
    members = len(logits) // o.groups
    if o.groups > 1:
        groups = [ranked[g * members : (g + 1) * members] for g in range(o.groups)]
        each = top_k // o.group_topk
        worth = [sum(sorted(group, reverse=True)[:each]) for group in groups]
        allowed = best(worth, o.group_topk)
        ranked = [r if i // members in allowed else -math.inf for i, r in enumerate(ranked)]
    experts = best(ranked, top_k)
    chosen = [scores[e] for e in experts]
    if o.score == "softmax" and o.softmax_over == "topk":
        chosen = [math.exp(x) for x in chosen]
        chosen = [x / sum(chosen) for x in chosen]
    elif o.normalize and top_k > 1:
        chosen = [x / sum(chosen) for x in chosen]
    return experts, [x * o.scale for x in chosen]


def same_as_statement(r: Any, x: Tensor, got: tuple[Tensor, Tensor], bias: list[float]) -> None:
    """Compare the router's choice and probabilities of tokens x with the statement's."""
    idx_TK, prob_TK = got
    logits = x.double().view(TOKENS, HIDDEN) @ r.weight.double().T
    if r.bias is not None:
        logits = logits + r.bias.double()
    for t, row in enumerate(logits.tolist()):
        experts, probs = statement(row, r.options, idx_TK.shape[1], bias)
        assert idx_TK[t].tolist() == experts
        assert prob_TK[t].tolist() == pytest.approx(probs, rel=2e-5)


def _routes(router: dict[str, Any], top_k: int, linear_bias: bool, scale: float) -> None:
    install()
    r = build_router(router, top_k=top_k, bias=linear_bias)
    bias = [0.0] * EXPERTS
    if r.expert_bias is not None:
        r.expert_bias.copy_(draw(EXPERTS, seed=9, scale=0.3))
        bias = r.expert_bias.tolist()
    x = hidden(scale=scale)
    idx_TK, prob_TK = r(x)
    assert idx_TK.dtype == torch.int32 and prob_TK.dtype == torch.float32
    assert idx_TK.shape == prob_TK.shape == (TOKENS, top_k)
    same_as_statement(r, x, (idx_TK, prob_TK), bias)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize(
    "score",
    [
        {"score": "softmax", "normalize": True},
        {"score": "softmax", "normalize": False, "scale": 2.5},
        {"score": "softmax", "softmax_over": "topk"},
        {"score": "sigmoid", "normalize": True, "scale": 2.5},
        {"score": "sigmoid", "normalize": False},
        {"score": "sigmoid", "normalize": True, "bias_rate": 1e-3},
    ],
)
def test_choice_and_probabilities(
    score: dict[str, Any], top_k: int, groups: tuple[int, int]
) -> None:
    if top_k == 1 and (score.get("softmax_over") == "topk" or groups[1] > 1):
        return  # refused, and a group worth less than one expert
    router = {**score, "groups": groups[0], "group_topk": groups[1]}
    run_distributed(_routes, 1, router, top_k, False, 1.0)


def test_bias_of_the_linear_layer() -> None:
    run_distributed(_routes, 1, {}, TOP_K, True, 1.0)


def test_scores_that_saturate_still_rank() -> None:
    # Softmax underflows to 0 and sigmoid rounds to 1 long before the logits are equal.
    run_distributed(_routes, 1, {"softmax_over": "topk"}, 4, False, 40.0)


def _ties(router: dict[str, Any]) -> None:
    install()
    r = build_router({"groups": 4, "group_topk": 2, **router}, top_k=4)
    torch.nn.init.zeros_(r.weight)
    idx_TK, _ = r(hidden())
    assert idx_TK.tolist() == [[0, 1, 2, 3]] * TOKENS


@pytest.mark.parametrize(
    "router", [{}, {"softmax_over": "topk"}, {"score": "sigmoid", "bias_rate": 1e-3}]
)
def test_ties_go_to_the_lower_expert(router: dict[str, Any]) -> None:
    run_distributed(_ties, 1, router)


def _bf16() -> None:
    install()
    r = build_router({}, dtype=torch.bfloat16)
    x = hidden(torch.bfloat16)
    idx_TK, prob_TK = r(x)
    # A bf16 logit would not tell experts apart.
    same_as_statement(r, x, (idx_TK, prob_TK), [0.0] * EXPERTS)
    prob_TK.square().sum().backward()
    assert r.weight.grad.dtype == torch.bfloat16


def test_logits_of_bf16_are_fp32() -> None:
    run_distributed(_bf16, 1)


# --- forced balance -------------------------------------------------------------------------------


def _forced(expert: int, groups: tuple[int, int], tokens: int) -> Any:
    install()
    from phalanx.moe.router.router import Router
    from phalanx.parallel.groups import create

    pg = create(expert=expert).pg
    o = {"force_balance": True, "groups": groups[0], "group_topk": groups[1]}
    m = model(o, moe={"experts": 16, "top_k": 4})
    r = Router(config=transformer(m), options=m.moe.router, top_k=4, pg_collection=pg)
    fill(r)
    x = draw(tokens, 1, HIDDEN, seed=50).requires_grad_()
    idx_TK, prob_TK = r(x)
    again, _ = r(x)
    assert torch.equal(idx_TK, again)
    chosen = (x.view(tokens, HIDDEN) @ r.weight.T).gather(1, idx_TK.long()).softmax(-1)
    torch.testing.assert_close(prob_TK, chosen)
    prob_TK.square().sum().backward()
    assert r.weight.grad.abs().sum() > 0 and x.grad.abs().sum() > 0
    return idx_TK


@pytest.mark.dist
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("tokens", [16, 24, 160])
def test_forced_balance_is_balanced(tokens: int, groups: tuple[int, int]) -> None:
    ranks = 2
    idx = torch.cat(run_distributed(_forced, ranks, ranks, groups, tokens)).long()
    counts = idx.flatten().bincount(minlength=16)
    assert counts.tolist() == [ranks * tokens * 4 // 16] * 16
    for row in idx.tolist():
        assert len(set(row)) == 4
        assert len({e // (16 // groups[0]) for e in row}) <= groups[1]
    if tokens == 160 and groups[0] == 1:  # traffic like that of random routing
        met = [len({e // 4 for e in row}) for row in idx.tolist()]
        assert 2.3 < sum(met) / len(met) < 3.1


# --- bad input, host syncs ------------------------------------------------------------------------


def _bad(router: dict[str, Any], top_k: int, match: str) -> None:
    install()
    from phalanx.configs.schema import RouterConfig
    from phalanx.moe.router.router import check

    with pytest.raises(ValueError, match=match):
        check(RouterConfig(**router), experts=EXPERTS, top_k=top_k)


@pytest.mark.parametrize(
    ("router", "top_k", "match"),
    [
        ({"score": "tanh"}, 2, r"router\.score=tanh: set it to one of softmax, sigmoid"),
        ({"softmax_over": "some"}, 2, r"router\.softmax_over=some: set it to one of all, topk"),
        ({}, EXPERTS + 1, r"top_k=9 must be between 1 and the 8 experts"),
        ({"softmax_over": "topk"}, 1, r"set model\.moe\.router\.softmax_over=all"),
        ({"bias_rate": 1e-3}, 2, r"needs model\.moe\.router\.score=sigmoid"),
        ({"groups": 3}, 2, r"router\.groups=3 does not divide the 8 experts"),
        ({"groups": 4, "group_topk": 5}, 2, r"group_topk=5 must be 1 to"),
        ({"groups": 4, "group_topk": 1}, 4, r"raise model\.moe\.router\.group_topk"),
    ],
)
def test_bad_routing_names_the_override(router: dict[str, Any], top_k: int, match: str) -> None:
    run_distributed(_bad, 1, router, top_k, match)


def _sync_free(router: dict[str, Any]) -> None:
    install()
    r = build_router({**LOSSES, **router})
    x = hidden().requires_grad_()
    with sync_free():
        _, prob_TK = r(x)
        prob_TK.square().sum().backward()


@pytest.mark.parametrize("router", [*SCORES, {"force_balance": True}])
def test_the_host_learns_nothing(router: dict[str, Any]) -> None:
    run_distributed(_sync_free, 1, router)
