"""Micro-batches in flight, and how long stages wait, against the definitions."""

import random

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.kernels import wgrad_queue
from phalanx.moe.plan.cost.pipeline import in_flight_bytes, step_seconds


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


def simulated(
    seconds: list[float], micro_batches: int, held: list[int] | None = None, delayed: float = 0.0
) -> float:
    """Seconds of a step by one forward, one backward, passed on from stage to stage.

    With `held` a part `delayed` of a stage's seconds is weight gradients, computed after transfers
    by `kernels.wgrad_queue`, which holds those of so many passes.
    """
    stages = len(seconds)
    orders = [
        _order(stage, stages, micro_batches, -1 if held is None else held[stage])
        for stage in range(stages)
    ]
    share = {"f": 1 / 3, "b": 2 / 3 - (0.0 if held is None else delayed), "w": delayed}
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            kind, m = orders[s][at[s]]
            before = (kind, m, s - 1 if kind == "f" else s + 1)
            first = (kind, s) in (("f", 0), ("b", stages - 1)) or kind == "w"
            if not first and before not in done:
                continue
            start = max(free[s], 0.0 if first else done[before])
            free[s] = done[kind, m, s] = start + seconds[s] * share[kind]
            at[s] += 1
    return max(free)


def _order(stage: int, stages: int, micro_batches: int, held: int) -> list[tuple[str, int]]:
    """Passes of a stage in their order: forward, backward, weight gradients; -1 holds none."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [("f", m) for m in range(ahead)]
    with wgrad_queue.opened(wgrad_queue.Waiting(max(0, held))) as queue:

        def backward(m: int) -> None:
            order.append(("b", m))
            if held >= 0:
                wgrad_queue.submit(lambda: order.append(("w", m)))
            if stage > 0:
                queue.run_older()  # sends the gradient of the stage's input

        for m in range(micro_batches):
            if ahead + m < micro_batches:
                order.append(("f", ahead + m))
            if stage < stages - 1:
                queue.run_older()  # receives a gradient
            backward(m)
        queue.run_all()
    return order


def test_equal_stages_wait_for_the_published_bubble() -> None:
    assert step_seconds([2.0] * 8, 256, 4) / (256 * 2.0) - 1 == pytest.approx(7 / 1024)
    assert step_seconds([3.0], 4, 1) == 12
    assert step_seconds([2.0] * 4, 16, 1) == pytest.approx(simulated([2.0] * 4, 16))


def test_weight_gradients_that_wait_leave_the_bubble_of_zb_h1() -> None:
    seconds, delayed = [3.0] * 4, [1.0] * 4
    bubbles = {(0, 0, 0, 0): 3 * 2, (0, 1, 2, 3): 3 * 1, (0, 1, 1, 1): 3 * 2 - 1}
    for held, bubble in bubbles.items():
        least = step_seconds(seconds, 16, 1, delayed, held)
        real = simulated(seconds, 16, list(held), 1 / 3)
        assert least == pytest.approx(48 + bubble) and least <= real * (1 + 1e-9) < 1.03 * least
    assert simulated(seconds, 16, [0, 1, 2, 3], 1 / 3) == pytest.approx(48 + 3)
    assert simulated(seconds, 16, [0, 0, 0, 0], 1 / 3) == pytest.approx(48 + 6)
    assert simulated(seconds, 16) == pytest.approx(48 + 9)


def test_no_schedule_of_unequal_stages_takes_less() -> None:
    draw = random.Random(0)
    for _ in range(40):
        seconds = [draw.uniform(1, 3) for _ in range(draw.randint(2, 6))]
        least, real = step_seconds(seconds, 24, 1), simulated(seconds, 24)
        assert 0.8 * real < least <= real * (1 + 1e-9)
