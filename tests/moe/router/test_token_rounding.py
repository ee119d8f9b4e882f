"""Token rounding against loops in Python; in the router; and in a layer on 1 and 2 ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.moe.router.token_rounding import keep, round_counts, surplus
from tests.moe.cases import EXPERTS, HIDDEN, build_router, draw, fill, hidden, install
from tests.moe.test_layer import expert
from tests.support.distributed import run_distributed
from tests.support.sync_free import sync_free
from tests.support.training import trained

E, K, TILE = 8, 2, 4


def scores(tokens: int, skew: float = 0.0, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, E, generator=g) + torch.linspace(skew, 0, E)).softmax(-1)


def candidates(score_TE: Tensor, width: int = 2 * K) -> tuple[Tensor, Tensor]:
    score, idx = torch.sort(score_TE, dim=-1, descending=True, stable=True)
    return idx[:, :width].contiguous(), score[:, :width].contiguous()


def rounded(count: int, tile: int, mode: str) -> int:
    """In floating point, as the paper's code."""
    tiles = {"nearest": round(count / tile), "up": -(-count // tile), "down": count // tile}
    return tiles[mode] * tile


def slow(idx: Tensor, score: Tensor, tile: int, mode: str) -> list[list[bool]]:
    kept = [[False] * idx.shape[1] for _ in range(len(idx))]
    for e in range(E):
        offers = [
            (k >= K, -score[t, k].item(), t, k)
            for t, row in enumerate(idx.tolist())
            for k, chosen in enumerate(row)
            if chosen == e
        ]
        count = sum(not late for late, *_ in offers)
        size = rounded(count, tile, mode)
        if size > len(offers):
            size = rounded(count, tile, "down")
        for _, _, t, k in sorted(offers)[:size]:
            kept[t][k] = True
    return kept


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
@pytest.mark.parametrize("skew", [0.0, 2.0, 8.0])
@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_equals_the_slow_statement(tokens: int, tile: int, skew: float, mode: str) -> None:
    idx, score = candidates(scores(tokens, skew))
    how = dict(top_k=K, experts=E, tile=tile, mode=mode)
    with sync_free():
        kept = keep(idx, score, **how)
    assert kept.tolist() == slow(idx, score, tile, mode)
    assert torch.equal(keep(idx, score, **how), kept)
    counts = torch.bincount(idx[kept], minlength=E)
    chosen = torch.bincount(idx[:, :K].flatten(), minlength=E)
    assert not (counts % tile).any()
    assert (counts - chosen).max() <= surplus(mode, tile)
    assert (chosen - counts).max() < tile


def test_ties_go_to_the_lower_token() -> None:
    """Six tokens alike for two experts: tiles of 4 keep the first four, and the rest nothing."""
    idx = torch.tensor([[0, 1]]).repeat(6, 1)
    kept = keep(idx, torch.full((6, 2), 0.25), top_k=1, experts=2, tile=4, mode="down")
    assert kept.tolist() == [[True, False]] * 4 + [[False, False]] * 2


def test_own_tokens_come_before_better_ones_of_others() -> None:
    """Expert 0 was chosen by token 2 alone; of the others, the higher score joins."""
    idx = torch.tensor([[1, 0], [1, 0], [0, 1]])
    score = torch.tensor([[0.5, 0.3], [0.5, 0.4], [0.2, 0.1]])
    kept = keep(idx, score, top_k=1, experts=2, tile=2, mode="up")
    assert kept[:, 1].tolist() == [False, True, False] and kept[2, 0]


def test_halves_go_to_even_multiples() -> None:
    counts = torch.tensor([0, 1, 2, 3, 5, 6, 7, 10, 14])
    assert round_counts(counts, 4, "nearest").tolist() == [0, 0, 0, 4, 4, 8, 8, 8, 16]
    assert round_counts(counts, 4, "up").tolist() == [0, 4, 4, 4, 8, 8, 8, 12, 16]
    assert round_counts(counts, 4, "down").tolist() == [0, 0, 0, 0, 4, 4, 4, 8, 12]


def test_too_few_candidates_round_down() -> None:
    idx, score = candidates(scores(5))
    kept = keep(idx, score, top_k=K, experts=E, tile=128, mode="up")
    assert not kept.any()


# --- in the router --------------------------------------------------------------------------------

SCORES = [
    {"score": "softmax"},
    {"score": "softmax", "normalize": False, "scale": 2.5},
    {"score": "softmax", "softmax_over": "topk", "z_loss": 0.1, "aux_loss": 0.1},
    {"score": "sigmoid", "scale": 2.5, "bias_rate": 1e-3, "groups": 4, "group_topk": 2},
]


def _router(score: dict[str, Any], mode: str) -> None:
    install()
    r = build_router({**score, "rounding": mode, "rounding_tile": 4})
    plain = build_router(score)
    x = hidden().requires_grad_()
    with sync_free():
        idx_TC, prob_TC = r(x)
        prob_TC.square().sum().backward()
    want_idx, want_prob = plain(hidden())
    used = idx_TC >= 0
    assert idx_TC.dtype == torch.int32 and prob_TC.dtype == torch.float32
    assert idx_TC.shape == prob_TC.shape == (len(want_idx), r.slots.width)
    assert not prob_TC[~used].any() and (prob_TC[used] > 0).all()
    counts = torch.bincount(idx_TC[used], minlength=EXPERTS)
    assert not (counts % 4).any() and counts.any()
    for row in idx_TC.tolist():
        taken = [e for e in row if e >= 0]
        assert len(set(taken)) == len(taken)
    if r.options.normalize:
        total = prob_TC.sum(1)[used.any(1)]
        torch.testing.assert_close(total, torch.full_like(total, r.options.scale))
    assert x.grad.any() and r.weight.grad.isfinite().all()
    # Losses, bias and statistics see the choices of the tokens.
    assert r.statistics.tokens_per_expert.equal(plain.statistics.tokens_per_expert)
    assert torch.equal(r.statistics.losses, plain.statistics.losses)
    r.eval()
    idx_TC, prob_TC = r(hidden())
    assert torch.equal(idx_TC[:, : r.top_k], want_idx) and (idx_TC[:, r.top_k :] == -1).all()
    torch.testing.assert_close(prob_TC[:, : r.top_k], want_prob)
    assert not prob_TC[:, r.top_k :].any()


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
@pytest.mark.parametrize("score", SCORES)
def test_router(score: dict[str, Any], mode: str) -> None:
    run_distributed(_router, 1, score, mode)


def _fits(mode: str) -> None:
    install()
    r, plain = build_router({"rounding": mode, "rounding_tile": 1}), build_router({})
    (idx_TC, prob_TC), (want_idx, want_prob) = r(hidden()), plain(hidden())
    assert torch.equal(idx_TC[:, : r.top_k], want_idx) and (idx_TC[:, r.top_k :] == -1).all()
    torch.testing.assert_close(prob_TC[:, : r.top_k], want_prob)


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
def test_counts_that_fit_leave_the_choice_alone(mode: str) -> None:
    run_distributed(_fits, 1, mode)


def _refusals() -> None:
    install()
    for router, message in (
        ({"rounding": "stochastic"}, "rounding=stochastic: set it to one of none, nearest"),
        ({"rounding": "up", "rounding_tile": 0}, "rounding_tile=0 must be at least 1"),
        ({"rounding": "up", "force_balance": True}, "set model.moe.router.rounding=none"),
    ):
        with pytest.raises(ValueError, match=message):
            build_router(router)


def test_what_cannot_be_is_refused() -> None:
    run_distributed(_refusals, 1)


# --- in a layer -----------------------------------------------------------------------------------


def _layer(mode: str, backend: str, recompute: str) -> None:
    """fp64, token by token, with the experts that the router gave each."""
    install()
    from phalanx.moe.layer import MoE
    from phalanx.parallel.groups import create
    from tests.moe.cases import model, options, recomputing, transformer

    ranks, rank = dist.get_world_size(), dist.get_rank()
    m = model({"rounding": mode, "rounding_tile": 8})
    config = transformer(m, expert=ranks)
    pg = create(expert=ranks).pg
    layer = MoE(config, pg, options=options(m, pg, backend))
    fill(layer.router)
    w1, w2 = draw(EXPERTS, 16, HIDDEN, seed=1, scale=0.4), draw(EXPERTS, HIDDEN, 8, seed=2)
    with torch.no_grad():
        layer.experts.w1.copy_(w1.chunk(ranks)[rank])
        layer.experts.w2.copy_(w2.chunk(ranks)[rank])
    x = draw(16, 4, HIDDEN, seed=3 + rank).requires_grad_()
    with sync_free():
        with recomputing(recompute):
            out, _ = layer(x)
        out.sum().backward()
    exact = x.detach().double().requires_grad_()
    idx, prob = layer.router(exact.float())
    rows = []
    for t, x_D in enumerate(exact.flatten(0, 1)):
        total = 0 * x_D
        for k, e in enumerate(idx[t].tolist()):
            if e >= 0:
                y = expert(x_D, w1[e].double(), w2[e].double(), None, None, m.moe)
                total = total + prob[t, k].double() * y
        rows.append(total)
    want = torch.stack(rows).view_as(exact)
    want.sum().backward()
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["none", "moe"])
@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_layer(ranks: int, mode: str, recompute: str) -> None:
    run_distributed(_layer, ranks, mode, "torch", recompute)


@pytest.mark.dist
@pytest.mark.parametrize(
    "mode", ["nearest", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("up", "down"))]
)
def test_training(mode: str) -> None:
    """Losses are close to those without rounding, on tokens with little to learn; with reruns."""
    overrides = ["model=tiny", "run.steps=4", "data.global_batch=4", "data.micro_batch=1"]
    changes = {
        "model.layers": 2,
        "data.sequence_length": 64,
        "parallel.capacity_factor": 1.0,
    }
    rounding = {"model.moe.router.rounding": mode, "model.moe.router.rounding_tile": 8}
    plain, run = trained(2, overrides, changes), trained(2, overrides, {**changes, **rounding})
    assert run.series("loss") == pytest.approx(plain.series("loss"), abs=0.05)
    assert run.series("loss") != plain.series("loss")
    assert run.series("reruns")[-1] > 0
