"""Micro-batches in flight, and copies of tokens, against the definitions."""

import itertools
import random

import pytest

from configs.load import load
from configs.schema import Config
from moe.estimate.pipeline import bubble, held
from moe.estimate.traffic import traffic


def staged(stages: int, chunks: int, micro_batches: int) -> Config:
    cfg = load(["model=tiny"])
    cfg.parallel.pipeline, cfg.parallel.virtual_pipeline = stages, chunks
    cfg.data.micro_batch, cfg.data.global_batch = 1, micro_batches
    return cfg


@pytest.mark.parametrize("stage", range(4))
def test_one_forward_one_backward_holds_a_micro_batch_for_each_stage_to_come(stage: int) -> None:
    assert held(staged(4, 1, 16), 4, stage, [10]) == 10 * (4 - stage)
    assert held(staged(4, 1, 2), 4, stage, [10]) == 10 * min(2, 4 - stage)


def test_no_pipeline_holds_one_micro_batch() -> None:
    assert held(staged(1, 1, 16), 1, 0, [7]) == 7


def test_interleaved_schedule_holds_more() -> None:
    """Stage 0 of 4 with 2 chunks: 10 passes warm up, one more runs before the first backward."""
    assert held(staged(4, 2, 16), 4, 0, [1, 1]) == 11
    # Four of the first chunk, four of the second, then three of the first again.
    assert held(staged(4, 2, 16), 4, 0, [1, 0]) == 8
    assert held(staged(4, 2, 16), 4, 3, [1, 1]) == 5


def test_bubble() -> None:
    assert bubble(staged(8, 4, 256), 8) == pytest.approx(7 / 1024)
    assert bubble(staged(1, 1, 4), 1) == 0


def drawn(cfg: Config, ranks: int, draws: int) -> float:
    """Mean number of ranks that hold one of a token's experts."""
    e, r = cfg.model.moe, cfg.model.moe.router
    size, total, rng = e.experts // r.groups, 0, random.Random(1)
    for _ in range(draws):
        groups = rng.sample(range(r.groups), r.group_topk)
        pool = list(itertools.chain(*(range(g * size, (g + 1) * size) for g in groups)))
        total += len({x * ranks // e.experts for x in rng.sample(pool, e.top_k)})
    return total / draws


@pytest.mark.parametrize(
    ("model", "ranks"),
    [("gpt_oss_20b", 8), ("qwen3_30b_a3b", 4), ("deepseek_v3", 8), ("deepseek_v3", 64),
     ("deepseek_v3", 2)],
)  # fmt: skip
def test_ranks_of_a_token_are_those_of_random_routing(model: str, ranks: int) -> None:
    cfg = load([f"model={model}", f"parallel.expert={ranks}", "parallel.dispatch=symm"])
    t = traffic(cfg, ranks)
    assert t.ranks == pytest.approx(drawn(cfg, ranks, 4000), rel=0.02)
    assert t.copies == pytest.approx(t.ranks * (ranks - 1) / ranks)
    row = 2 * cfg.model.hidden * t.copies
    assert (t.forward, t.backward) == pytest.approx((2 * row, 3 * row))


def test_published_bytes_of_a_token_without_groups() -> None:
    """66.4 kB a direction for DeepSeek-V3's shape over 8 ranks."""
    cfg = load(["model=deepseek_v3", "model.moe.router.groups=1", "model.moe.router.group_topk=1"])
    cfg.parallel.expert, cfg.parallel.dispatch = 8, "symm"
    assert traffic(cfg, 8).forward / 2 == pytest.approx(66.4e3, rel=2e-3)


def test_dense_transport_sends_every_token_to_every_rank() -> None:
    cfg = load(["model=gpt_oss_20b", "parallel.expert=8", "parallel.dispatch=alltoall"])
    assert traffic(cfg, 8).copies == 7


@pytest.mark.parametrize(("precision", "inside"), [("bf16", 64), ("fp32", 8 * 7)])
def test_a_token_goes_once_to_each_node_and_from_there_to_its_ranks(
    precision: str, inside: int
) -> None:
    """DeepSeek-V3 over eight nodes of eight, counted copy by copy where pushes carry them on."""
    cfg = load(["model=deepseek_v3", f"run.precision={precision}"])
    cfg.parallel.expert, cfg.parallel.dispatch = 64, "hier"
    t = traffic(cfg, 64)
    if precision == "bf16":  # ranks of its experts, but for the one in each node that has it
        e, r, rng, inside = cfg.model.moe, cfg.model.moe.router, random.Random(2), 0
        for _ in range(2000):
            groups = rng.sample(range(r.groups), r.group_topk)
            pool = [x for g in groups for x in range(32 * g, 32 * g + 32)]
            inside += sum(x % 8 != 3 for x in {x * 64 // e.experts for x in rng.sample(pool, 8)})
        inside /= 2000
    assert t.crossings == 7 and t.copies == pytest.approx(7 + inside, rel=0.02)
    row = 7168 * (2 if precision == "bf16" else 4)
    assert t.forward == pytest.approx(2 * t.copies * row)
    again = t.copies - 7 if precision == "bf16" else 0
    assert t.backward == pytest.approx((2 * t.copies + again) * row)
    assert t.network == 4 * 7 * row


def test_collectives_send_most_rows_to_other_nodes() -> None:
    cfg = load(["model=deepseek_v3"])
    cfg.parallel.expert, cfg.parallel.dispatch = 64, "alltoall"
    t = traffic(cfg, 64)
    assert (t.copies, t.crossings, t.network) == (63, 56, 4 * 56 * 2 * 7168)
    cfg.parallel.expert = 8
    assert traffic(cfg, 8).crossings == traffic(cfg, 8).network == 0
