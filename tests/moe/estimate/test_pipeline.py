"""Micro-batches in flight, and how long stages wait, against the definitions."""

import random

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.moe.estimate.pipeline import in_flight_bytes, step_seconds


def staged(stages: int, chunks: int, micro_batches: int) -> Config:
    cfg = load(["model=tiny"])
    cfg.parallel.pipeline, cfg.parallel.virtual_pipeline = stages, chunks
    cfg.data.micro_batch, cfg.data.global_batch = 1, micro_batches
    return cfg


@pytest.mark.parametrize("stage", range(4))
def test_one_forward_one_backward_holds_a_micro_batch_for_each_stage_to_come(stage: int) -> None:
    assert in_flight_bytes(staged(4, 1, 16), 4, stage, [10]) == 10 * (4 - stage)
    assert in_flight_bytes(staged(4, 1, 2), 4, stage, [10]) == 10 * min(2, 4 - stage)


def test_no_pipeline_holds_one_micro_batch() -> None:
    assert in_flight_bytes(staged(1, 1, 16), 1, 0, [7]) == 7


def test_interleaved_schedule_holds_more() -> None:
    """Stage 0 of 4 with 2 chunks: 10 passes warm up, one more runs before the first backward."""
    assert in_flight_bytes(staged(4, 2, 16), 4, 0, [1, 1]) == 11
    # Four of the first chunk, four of the second, then three of the first again.
    assert in_flight_bytes(staged(4, 2, 16), 4, 0, [1, 0]) == 8
    assert in_flight_bytes(staged(4, 2, 16), 4, 3, [1, 1]) == 5


def simulated(seconds: list[float], micro_batches: int) -> float:
    """Seconds of a step by one forward, one backward, passed on from stage to stage."""
    stages = len(seconds)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        order = [("f", m) for m in range(ahead)]
        for m in range(micro_batches - ahead):
            order += [("f", ahead + m), ("b", m)]
        orders.append(order + [("b", m) for m in range(micro_batches - ahead, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            kind, m = orders[s][at[s]]
            before = (kind, m, s - 1 if kind == "f" else s + 1)
            first = (kind == "f" and s == 0) or (kind == "b" and s == stages - 1)
            if not first and before not in done:
                continue
            start = max(free[s], 0.0 if first else done[before])
            free[s] = done[kind, m, s] = start + seconds[s] * (1 / 3 if kind == "f" else 2 / 3)
            at[s] += 1
    return max(free)


def test_equal_stages_wait_for_the_published_bubble() -> None:
    assert step_seconds([2.0] * 8, 256, 4) / (256 * 2.0) - 1 == pytest.approx(7 / 1024)
    assert step_seconds([3.0], 4, 1) == 12
    assert step_seconds([2.0] * 4, 16, 1) == pytest.approx(simulated([2.0] * 4, 16))


def test_no_schedule_of_unequal_stages_takes_less() -> None:
    draw = random.Random(0)
    for _ in range(40):
        seconds = [draw.uniform(1, 3) for _ in range(draw.randint(2, 6))]
        least, real = step_seconds(seconds, 24, 1), simulated(seconds, 24)
        assert 0.8 * real < least <= real * (1 + 1e-9)
