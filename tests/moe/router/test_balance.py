"""Balancing losses as their papers state them, exact counts, and what is logged, on any layout."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    hidden,
    install,
    model,
    transformer,
)
from tests.support.distributed import run_distributed

TOKENS = SEQUENCE * BATCH


def switch(scores_TE: Tensor, experts_TK: list[list[int]]) -> Tensor:
    """E * sum_i f_i P_i of these tokens, in the words of the paper."""
    loss = scores_TE.new_zeros(())
    for e in range(EXPERTS):
        chosen = sum(row.count(e) for row in experts_TK) / (len(experts_TK) * len(experts_TK[0]))
        loss = loss + EXPERTS * chosen * scores_TE[:, e].mean()
    return loss


def loss_statement(weight: Tensor, batches: list[Tensor], o: Any) -> dict[str, Tensor]:
    """Each loss, averaged over micro-batches [S, B, D]; the weight's gradient flows."""
    total: dict[str, Any] = dict.fromkeys(LOSSES, 0)
    seen: list[list[int]] = []
    for x in batches:
        logits = x @ weight.T
        scores = 1 / (1 + torch.exp(-logits)) if o.score == "sigmoid" else torch.exp(logits)
        scores = scores / scores.sum(-1, keepdim=True)
        chosen = [[best(row, TOP_K) for row in seq] for seq in logits.transpose(0, 1).tolist()]
        flat = [row for seq in chosen for row in seq]
        seen += flat
        all_scores = scores.transpose(0, 1).flatten(0, 1)
        total["aux_loss"] += switch(all_scores, flat)
        per_sequence = [switch(scores[:, b], chosen[b]) for b in range(x.size(1))]
        total["seq_aux_loss"] += sum(per_sequence) / x.size(1)
        fractions = [sum(r.count(e) for r in seen) / (len(seen) * TOP_K) for e in range(EXPERTS)]
        mean = all_scores.mean(0)
        total["global_aux_loss"] += EXPERTS * sum(f * mean[e] for e, f in enumerate(fractions))
        total["z_loss"] += (torch.exp(logits).sum(-1).log() ** 2).mean()
    return {name: value / len(batches) for name, value in total.items()}


def _losses(score: dict[str, Any], names: list[str]) -> None:
    install()
    r = build_router({**score, **{n: LOSSES[n] for n in names}}, dtype=torch.float64)
    if r.expert_bias is not None:
        r.expert_bias.copy_(draw(EXPERTS, seed=9, scale=0.3))
    weight = r.weight.detach().clone().requires_grad_()
    batches = [draw(SEQUENCE, BATCH, HIDDEN, seed=s, dtype=torch.float64) for s in (60, 61)]
    for x in batches:
        _, prob_TK = r(x)
        prob_TK.backward(torch.zeros_like(prob_TK))  # leaves the gradient of the losses alone
    expected = loss_statement(weight, batches, r.options)
    sum(LOSSES[n] * expected[n] for n in names).backward()
    torch.testing.assert_close(r.weight.grad / 2, weight.grad, rtol=1e-10, atol=1e-12)
    from phalanx.moe.router.balance import LOSSES as ORDER

    got = (r.statistics.losses / r.statistics.micro_batches).tolist()
    for name, value in zip(ORDER, got, strict=True):
        assert value == pytest.approx(expected[name].item() if name in names else 0.0, rel=1e-6)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("names", [[n] for n in LOSSES] + [list(LOSSES)])
def test_losses_and_their_gradients(score: dict[str, Any], names: list[str]) -> None:
    run_distributed(_losses, 1, score, names)


def _uniform() -> None:
    install()
    r = build_router(LOSSES)
    torch.nn.init.zeros_(r.weight)
    r(hidden())
    aux, seq, everywhere, z, _ = r.statistics.losses.tolist()
    assert (aux, seq, everywhere) == pytest.approx((1, 1, 1))
    assert z == pytest.approx(math.log(EXPERTS) ** 2)


def test_loss_of_equal_scores_is_one() -> None:
    run_distributed(_uniform, 1)


def collected(chunks: list[Any], config: Any, pg: Any, counts: Any = None) -> Any:
    """Summary of all ranks' statistics, collected as in a step."""
    from phalanx.moe.router.balance import Collector

    collector = Collector(chunks, config, pg, counts)
    table = collector.table()
    dist.all_reduce(table)
    return collector.read(table.flatten())


def _layout(sizes: dict[str, int], per_token: bool) -> Any:
    """Gradient of the router's weight as training reduces it, and what is logged."""
    install()
    from phalanx.parallel.groups import create

    groups = create(**sizes)
    pg, dtype = groups.pg, torch.float64
    r = build_router(
        {**LOSSES, "score": "sigmoid", "bias_rate": 1e-3},
        dtype=dtype,
        pg=pg,
        calculate_per_token_loss=per_token,
        **sizes,
    )
    r.set_layer_number(1)
    x = draw(SEQUENCE, 4, HIDDEN, seed=60, dtype=dtype)
    x = x.chunk(groups.data, 1)[groups.data_rank]
    x = x.chunk(pg.tp_cp.size())[pg.tp_cp.rank()].contiguous()
    _, prob_TK = r(x)
    prob_TK.backward(torch.zeros_like(prob_TK))
    grad = r.weight.grad
    dist.all_reduce(grad)
    grad /= SEQUENCE * 4 if per_token else groups.data
    record = collected([r], r.config, pg)
    counts = r.local_tokens_per_expert.clone()
    dist.all_reduce(counts)
    return grad, record, counts


@functools.cache
def on_one_rank(per_token: bool) -> Any:
    return run_distributed(_layout, 1, {}, per_token)[0]


@pytest.mark.dist
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"context": 2}, {}, {"tensor": 2, "context": 2}, {"tensor": 2, "n": 4}]
)
def test_losses_are_the_same_on_any_layout(sizes: dict[str, int], per_token: bool) -> None:
    sizes = dict(sizes)
    world = sizes.pop("n", max(2, math.prod(sizes.values())))
    data = world // math.prod(sizes.values())
    grad, record, counts = run_distributed(_layout, world, sizes, per_token)[0]
    one_grad, one_record, one_counts = on_one_rank(per_token)
    assert torch.equal(counts, one_counts)
    assert record.load == one_record.load and record.dead == one_record.dead
    if data > 1:  # the batch loss is that of each replica's own tokens
        assert record.losses["global_aux_loss"] == pytest.approx(
            one_record.losses["global_aux_loss"], rel=1e-6
        )
        return
    assert record.losses == pytest.approx(one_record.losses, rel=1e-6)
    torch.testing.assert_close(grad, one_grad, rtol=1e-9, atol=1e-12)


def _replicas(losses: dict[str, float]) -> Tensor:
    install()
    from phalanx.parallel.groups import create

    groups = create()
    r = build_router(losses, dtype=torch.float64, pg=groups.pg)
    x = draw(SEQUENCE, 4, HIDDEN, seed=60, dtype=torch.float64).chunk(groups.data, 1)
    _, prob_TK = r(x[groups.data_rank].contiguous())
    prob_TK.backward(torch.zeros_like(prob_TK))
    dist.all_reduce(r.weight.grad)
    return r.weight.grad / groups.data


@pytest.mark.dist
def test_data_parallel_ranks_share_global_sequence_and_z_losses() -> None:
    losses = {n: LOSSES[n] for n in ("global_aux_loss", "seq_aux_loss", "z_loss")}
    two, one = (run_distributed(_replicas, n, losses)[0] for n in (2, 1))
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)


# --- counts, bias, statistics ---------------------------------------------------------------------


def _counts() -> None:
    install()
    from megatron.core.distributed.finalize_model_grads import (
        _update_router_expert_bias,
        reset_model_temporary_tensors,
    )

    r = build_router({"score": "sigmoid", "bias_rate": 0.25})
    idx_TK, _ = r(hidden())
    once = torch.tensor([idx_TK.flatten().tolist().count(e) for e in range(EXPERTS)])
    assert r.local_tokens_per_expert.tolist() == once.tolist()
    many = 2**40 + 1  # beyond what fp32 counts
    for counter in (r.local_tokens_per_expert, r.statistics.tokens_per_expert):
        counter.fill_(many)
    with torch.no_grad():
        r(hidden())
    r.eval()
    r(hidden())
    r.train()
    r(hidden())
    for counter in (r.local_tokens_per_expert, r.statistics.tokens_per_expert):
        assert counter.dtype == torch.int64
        assert (counter - many).tolist() == once.tolist()

    # Megatron-Core's update takes them as they are: one token in four million moves the bias.
    world = r.world
    r.local_tokens_per_expert.fill_(2**22)
    r.local_tokens_per_expert[0] += 1
    r.local_tokens_per_expert[1] -= 1
    _update_router_expert_bias([r], r.config, tp_dp_cp_group=world)
    assert r.expert_bias.tolist() == [-0.25, 0.25] + [0.0] * (EXPERTS - 2)
    reset_model_temporary_tensors(r.config, [r])
    assert not r.local_tokens_per_expert.any()
    assert r.statistics.tokens_per_expert.min() >= many


def test_counts_are_exact_and_move_the_bias() -> None:
    run_distributed(_counts, 1)


def _global_batch() -> None:
    install()
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

    r = build_router({"global_aux_loss": 0.1})
    r(hidden())
    assert r.global_tokens_per_expert.sum() == TOKENS * TOP_K
    reset_model_temporary_tensors(r.config, [r])
    assert not r.global_tokens_per_expert.any()


def test_global_counts_start_anew_with_each_step() -> None:
    run_distributed(_global_batch, 1)


def _precision() -> None:
    install()
    from megatron.core.transformer.module import Float16Module

    r = build_router({**LOSSES, "score": "sigmoid", "bias_rate": 1e-3})
    r.expert_bias.fill_(1.001)
    r.statistics.losses.fill_(1.001)
    r.config.bf16 = True
    r = Float16Module(r.config, r).module
    assert r.weight.dtype == torch.bfloat16
    assert r.expert_bias.tolist() == pytest.approx([1.001] * EXPERTS, rel=1e-6)
    assert r.statistics.losses.tolist() == pytest.approx([1.001] * 5, rel=1e-6)
    assert r.statistics.tokens_per_expert.dtype == r.local_tokens_per_expert.dtype == torch.int64
    state = r.state_dict()
    assert set(state) == {"weight", "expert_bias"} and state["expert_bias"].dtype == torch.float32


def test_a_cast_of_the_model_leaves_bias_and_statistics_alone() -> None:
    run_distributed(_precision, 1)


def _sequence_parallel() -> None:
    install()
    for split in (False, True):
        r = build_router({}, bias=True, sequence_parallel=split)
        assert r.weight.sequence_parallel is split and r.bias.sequence_parallel is split


def test_parameters_tell_sequence_parallelism() -> None:
    run_distributed(_sequence_parallel, 1)


def _pipeline() -> Any:
    """Four layers on two stages: dense, then experts; each layer loads its experts differently."""
    install()
    from phalanx.moe.router import balance
    from phalanx.parallel.groups import create

    groups = create(pipeline=2)
    stage = groups.pg.pp.rank()
    m = model({"aux_loss": 0.1, "z_loss": 0.1})
    m.layers = 4
    config = transformer(m)
    chunk = torch.nn.ModuleList()
    for layer in ((2,), (3, 4))[stage]:
        r = build_router({"aux_loss": 0.1, "z_loss": 0.1}, pg=groups.pg)
        r.set_layer_number(layer)
        count = torch.ones(EXPERTS, dtype=torch.int64)
        count[:layer] = 0
        r.statistics.add_counts(count)
        r.statistics.add_loss("aux_loss", torch.tensor(float(layer)))
        chunk.append(r)
    record = collected([chunk], config, groups.pg)
    balance.reset([chunk])
    empty = collected([chunk], config, groups.pg)
    return record, empty


@pytest.mark.dist
def test_statistics_are_gathered_over_the_pipeline() -> None:
    first, second = run_distributed(_pipeline, 2)
    assert first == second
    record, empty = first
    assert record.load == pytest.approx({n: EXPERTS / (EXPERTS - n) for n in (2, 3, 4)})
    assert record.dead == 2 + 3 + 4
    assert record.losses == pytest.approx(
        {**dict.fromkeys((*LOSSES, "indexer_loss"), 0.0), "aux_loss": 3.0}
    )
    assert record.worst == pytest.approx(2.0)
    ordered = sorted(record.load.values())
    assert record.p95 == pytest.approx(ordered[1] + 0.9 * (ordered[2] - ordered[1]))
    assert (empty.load, empty.dead, empty.worst, empty.p95) == ({}, 0, 0.0, 0.0)


def _rerun() -> None:
    install()
    from phalanx.moe.router import balance

    r = build_router({**LOSSES, "score": "sigmoid", "bias_rate": 1e-3})
    r(hidden())
    before = {name: value.clone() for name, value in r.named_buffers()}
    saved = balance.snapshot([r])
    r(hidden(scale=2.0))
    r.expert_bias += 1
    balance.restore([r], saved)
    for name, value in r.named_buffers():
        assert torch.equal(value, before[name]), name


def test_a_step_can_be_taken_back() -> None:
    run_distributed(_rerun, 1)
