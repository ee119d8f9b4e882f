"""Loads of a recorded routing against counts made by hand."""

import numpy as np
import pytest
import torch

from phalanx.configs.tables.machines import CPU_RANKS, rates_of
from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationSize,
    make_replication_plan,
)
from phalanx.extras.replication.options import (
    ReplicationOptions,
    copy_cost,
    copy_costs,
)
from phalanx.moe.router.recording import Ids
from phalanx.scripts.lab.recorded_load import (
    RecordedLoad,
    least_factor,
    recorded_load,
    rows_of_ranks,
)

UNEVEN, EVEN = (768, 64, 128, 64), (256, 256, 256, 256)
"""Tokens of each of four experts in a micro-batch of two ranks with 512 tokens each."""


def tokens_of(*batches: tuple[int, ...]) -> Ids:
    """Choices [N, 1], micro-batch by micro-batch."""
    return np.concatenate([np.repeat(np.arange(4), of) for of in batches])[:, None]


def load(ids: Ids, slots: int = 0, cost: int = 0, m: int | None = None) -> RecordedLoad:
    options = ReplicationOptions(slots, cost)
    return recorded_load(
        {"layer.1": ids}, 4, ranks=2, tokens=512, replication=options, micro_batches=m
    )


def test_without_replication() -> None:
    """Ranks have 832 and 192 rows of 512; six tiles of 128 are more than 1.50 x 512 rows keep."""
    found = load(tokens_of(UNEVEN))
    assert (found.load_max, found.busiest_rank, found.replicas) == (3.0, 1.625, 0.0)
    assert (found.micro_batches, found.layers["layer.1"].rows) == (1, 832)
    assert found.capacity_factor == 1.51


@pytest.mark.parametrize("cost", [0, 100])
def test_with_a_replica(cost: int) -> None:
    """A replica takes full tiles, 256 of the 320 rows above the mean.

    The busiest rank bears the cost too, but needs no row for it.
    """
    found = load(tokens_of(UNEVEN), 1, cost)
    assert (found.load_max, found.replicas) == (3.0, 1.0)
    assert found.busiest_rank == (576 + cost) / 512
    assert (found.layers["layer.1"].rows, found.capacity_factor) == (576, 1.01)


def test_rows_of_replicas_are_those_of_their_rank() -> None:
    plan = make_replication_plan(
        torch.tensor(UNEVEN, dtype=torch.int32), ReplicationSize(2, slots=1, cost=100)
    )
    assert rows_of_ranks(plan).tolist() == [832 - 256, 192 + 256]


def test_micro_batches_count_one_by_one() -> None:
    """The expert's load is that of their sum, the rank's their mean, and rows are the most."""
    ids = tokens_of(EVEN, UNEVEN, (900, 10, 10, 10))
    found = load(ids, 1)
    assert (found.micro_batches, found.load_max) == (2, 2.0)
    assert (found.busiest_rank, found.replicas) == ((1 + 1.125) / 2, 0.5)
    assert load(ids).busiest_rank == (1 + 1.625) / 2 and load(ids).capacity_factor == 1.51
    first = load(ids, m=1)
    assert (first.micro_batches, first.busiest_rank, first.capacity_factor) == (1, 1.0, 1.0)


def test_few_tokens_are_taken_again() -> None:
    half = tuple(n // 2 for n in UNEVEN)
    assert load(tokens_of(half)) == load(tokens_of(half, half))


@pytest.mark.parametrize(
    ("rows", "factor"),
    [(100, 1.0), (512, 1.0), (513, 1.01), (640, 1.01), (641, 1.26), (1024, 1.76)],
)
def test_the_least_factor_keeps_whole_tiles(rows: int, factor: float) -> None:
    """512 balanced rows are four tiles of 128 at 1.00, five above it and six above 1.25."""
    assert least_factor(rows, tokens=256, top_k=2) == factor


def test_a_copy_costs_what_a_run_says() -> None:
    """8 bytes a weight at 335 GB/s; 6 FLOP a weight at 560 TFLOP/s."""
    assert copy_cost(rates_of("", "h200"), width=2, keep=False) == 2229
    assert copy_cost(rates_of("", "h200"), width=2, keep=True) == 1672
    assert copy_cost(CPU_RANKS, width=2, keep=False) == 27
    small, large = 3 * 2048 * 768, 3 * 7168 * 2048
    for rates, weights, least in (
        (rates_of("", "h200"), small, 7912),
        (rates_of("", "h200"), large, 848),
        (CPU_RANKS, small, 0),
    ):
        costs = copy_costs(rates, weights=weights, width=2, keep=False)
        assert costs == (copy_cost(rates, width=2, keep=False), least)


@pytest.mark.parametrize(
    ("ranks", "slots", "m", "why"),
    [
        (3, 0, None, "4 experts do not divide over 3 ranks"),
        (0, 0, None, "ranks, tokens and micro-batches must be at least 1"),
        (2, 0, 0, "ranks, tokens and micro-batches must be at least 1"),
        (2, -1, None, "and replica slots 0"),
    ],
)
def test_what_cannot_be(ranks: int, slots: int, m: int | None, why: str) -> None:
    options, ids = ReplicationOptions(slots, 0), {"layer.1": tokens_of(EVEN)}
    with pytest.raises(ValueError, match=why):
        recorded_load(ids, 4, ranks=ranks, tokens=512, replication=options, micro_batches=m)
