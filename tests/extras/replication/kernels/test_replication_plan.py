"""Expert replication: the plan against loops, a brute-force optimum and what always holds."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.configs.tables.machines import MACHINES
from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    assign_pairs,
    count_rows,
    make_replication_plan,
    pair_numbers,
    reference_replication_plan,
    replica_cost,
)
from tests.kernels.interpreter import interpret
from tests.support.sync_free import sync_free

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FACTOR = 1.25
"""Largest load of the plan over that of the best one, of small cases."""


def zipf(experts: int, rows: int, seed: int, power: float = 1.0) -> list[int]:
    """Rows of experts in a random order, of a Zipf distribution."""
    g = torch.Generator().manual_seed(seed)
    share = torch.arange(1, experts + 1, dtype=torch.float64) ** -power
    share = share[torch.randperm(experts, generator=g)]
    return (share / share.sum() * rows).long().tolist()


CASES: dict[str, tuple[list[int], ReplicationSize]] = {
    "balanced": ([512] * 8, ReplicationSize(4, 2, 10)),
    "nearly balanced": ([512, 640, 512, 512], ReplicationSize(4, 1, 100)),
    "nearly balanced, free": ([512, 640, 512, 512], ReplicationSize(4, 1, 0, 16)),
    "one expert with all": ([4096, 0, 0, 0, 0, 0, 0, 0], ReplicationSize(4, 1, 100)),
    "one expert with all, two ranks": ([1000, 0, 0, 0], ReplicationSize(2, 2, 30, 1)),
    "one rank with all": ([700, 900, 0, 0, 0, 0, 0, 0], ReplicationSize(4, 2, 20, 64)),
    "ties": ([900, 900, 0, 0, 900, 900, 0, 0], ReplicationSize(4, 2, 20, 64)),
    "two equal ranks, one cannot give": (
        [800, 0] + [10] * 80 + [0, 0],
        ReplicationSize(3, 1, 0, 1),
    ),
    "more hot experts than slots": ([1000] * 6 + [0] * 6, ReplicationSize(2, 1, 10, 1)),
    "whole experts": ([100, 100, 100, 100, 1, 1, 1, 1], ReplicationSize(2, 3, 5, 128)),
    "no slots": ([4096, 0, 0, 0], ReplicationSize(4, 0, 0)),
    "no rows": ([0] * 8, ReplicationSize(2, 2, 0, 1)),
    "one rank": ([5, 7], ReplicationSize(1, 2, 0, 1)),
    "a replica costs more than it saves": ([4096, 0, 0, 0], ReplicationSize(4, 2, 4096)),
    "256 experts on 8 ranks": (zipf(256, 65536, 1), ReplicationSize(8, 2, 300)),
    "512 experts on 8 ranks": (zipf(512, 90000, 2, 1.3), ReplicationSize(8, 8, 100)),
    "128 experts on 4 ranks": (zipf(128, 65536, 3), ReplicationSize(4, 3, 200)),
    "6 experts on 3 ranks": (zipf(6, 5000, 4), ReplicationSize(3, 2, 40, 16)),
    "64 experts on 2 ranks": (zipf(64, 30000, 5, 2.0), ReplicationSize(2, 1, 400)),
    "just worth it": ([1000, 0, 0, 0], ReplicationSize(2, 1, 0, 1, 500)),
    "not quite worth it": ([1000, 0, 0, 0], ReplicationSize(2, 1, 0, 1, 501)),
}


def counts(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def slow_plan(rows: list[int], size: ReplicationSize) -> list[list[tuple[int, int, int]]]:
    """(expert, begin, end) of the filled slots of each rank, by loops over Python's integers."""
    R, N, cost, tile, enough = size
    local, kept = len(rows) // R, list(rows)
    load = [sum(rows[r * local : (r + 1) * local]) for r in range(R)]
    slots: list[list[tuple[int, int, int]]] = [[] for _ in range(R)]
    before, none = max(load), [list(s) for s in slots]
    best = (before, none)
    while True:
        owner = load.index(max(load))
        expert = max(range(owner * local, (owner + 1) * local), key=lambda e: kept[e])
        borrowers = [
            r
            for r in range(R)
            if r != owner and len(slots[r]) < N and expert not in (e for e, _, _ in slots[r])
        ]
        if not borrowers:
            break
        borrower = min(borrowers, key=lambda r: load[r])
        level = load[owner]
        for copies in range(1, len(borrowers) + 1):
            least = sorted(load[r] for r in borrowers)[:copies]
            mean = -(-(load[owner] + sum(least) + 2 * copies * cost) // (copies + 1))
            level = min(level, max(mean, copies * cost))
        level = max(level, -(-(sum(load) + 2 * cost) // R))
        most = min(kept[expert], load[owner] + cost - level, level - load[borrower] - cost)
        begin = -(-(kept[expert] - most) // tile) * tile
        moved = kept[expert] - begin
        after = load[owner] + cost - moved, load[borrower] + cost + moved
        if moved <= 0 or max(after) >= load[owner]:
            break
        slots[borrower].append((expert, begin, kept[expert]))
        kept[expert], load[owner], load[borrower] = begin, *after
        if max(load) < best[0]:
            best = (max(load), [list(s) for s in slots])
    return best[1] if before - best[0] >= enough else none


def filled(plan: ReplicationPlan) -> list[list[tuple[int, int, int]]]:
    """The same of a plan, with its empty slots checked."""
    slots = []
    for rank in zip(*(t.tolist() for t in plan[:3]), strict=True):
        of_rank = list(zip(*rank, strict=True))
        slots.append([slot for slot in of_rank if slot[0] >= 0])
        assert of_rank[len(slots[-1]) :] == [(-1, 0, 0)] * (len(of_rank) - len(slots[-1]))
    return slots


def check(rows: list[int], size: ReplicationSize, plan: ReplicationPlan) -> None:
    """Check the invariants of a plan."""
    R, N, cost, tile, _ = size
    local, slots, kept = len(rows) // R, filled(plan), plan.owner_rows_E.tolist()
    assert plan.expert_RN.shape == (R, N)
    assert all(t.dtype == torch.int32 for t in plan)
    parts: list[list[tuple[int, int]]] = [[(0, kept[e])] for e in range(len(rows))]
    for rank, of_rank in enumerate(slots):
        assert len({expert for expert, _, _ in of_rank}) == len(of_rank), "a copy is there twice"
        for expert, begin, end in of_rank:
            assert expert // local != rank, "a replica at home"
            assert begin < end and begin % tile == 0
            parts[expert].append((begin, end))
    for e, of_expert in enumerate(parts):  # every row goes to exactly one copy
        ends = sorted(of_expert)
        assert ends[0][0] == 0 and ends[-1][1] == rows[e]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    before = [sum(rows[r * local : (r + 1) * local]) for r in range(R)]
    after = [sum(kept[r * local : (r + 1) * local]) for r in range(R)]
    for rank, of_rank in enumerate(slots):
        for expert, begin, end in of_rank:
            after[rank] += end - begin + cost
            after[expert // local] += cost
    assert plan.load_2R.tolist() == [before, after]
    assert max(after) < max(before) or not any(slots), "replicas that gain nothing"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_slow_statement(name: str, device: str) -> None:
    rows, size = CASES[name]
    plan = make_replication_plan(counts(rows).to(device), size)
    plan = ReplicationPlan(*(t.cpu() for t in plan))
    check(rows, size, plan)
    assert filled(plan) == slow_plan(rows, size)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_random_zipf(ranks: int, slots: int) -> None:
    gained = 0
    for seed in range(12):
        rows = zipf(16 * ranks, 8192 * ranks, seed, 0.5 + seed / 8)
        size = ReplicationSize(ranks, slots, 37 * seed)
        plan = reference_replication_plan(counts(rows), size)
        check(rows, size, plan)
        assert filled(plan) == slow_plan(rows, size)
        gained += int((plan.expert_RN >= 0).any())
    assert gained > 8


@pytest.mark.parametrize("name", ["balanced", "nearly balanced", "no slots", "no rows", "one rank"])
def test_what_needs_no_replica_has_none(name: str) -> None:
    rows, size = CASES[name]
    plan = reference_replication_plan(counts(rows), size)
    assert (plan.expert_RN == -1).all() and plan.owner_rows_E.tolist() == rows
    assert plan.load_2R[0].tolist() == plan.load_2R[1].tolist()


def test_one_expert_with_everything_is_spread_over_all_ranks() -> None:
    plan = reference_replication_plan(counts([4096] + [0] * 7), ReplicationSize(4, 1, cost=64))
    assert filled(plan) == [[], [(0, 3072, 4096)], [(0, 2048, 3072)], [(0, 1024, 2048)]]
    assert plan.load_2R.tolist() == [[4096, 0, 0, 0], [1024 + 3 * 64, 1088, 1088, 1088]]


def optimum(rows: list[int], size: ReplicationSize) -> int:
    """The smallest largest load of any choice of experts for slots and any division of rows.

    Of one choice it is, by Hall's theorem, the largest over sets of ranks of what only they can
    compute, with what their copies cost, over their number.
    """
    R, N, cost, *_ = size
    local, best = len(rows) // R, sum(rows)
    choices = [[e for e in (-1, *range(len(rows))) if e // local != r] for r in range(R)]
    of_rank = [list(itertools.combinations_with_replacement(c, N)) for c in choices]
    sets = [s for n in range(1, R + 1) for s in itertools.combinations(range(R), n)]
    for chosen in itertools.product(*of_rank):
        holders = [{e // local} for e in range(len(rows))]
        costs = [0] * R
        for rank, experts in enumerate(chosen):
            for e in experts:
                if e >= 0:
                    holders[e].add(rank)
                    costs[rank] += cost
                    costs[e // local] += cost
        most = 0
        for ranks in sets:
            own = sum(n for n, held in zip(rows, holders, strict=True) if held <= set(ranks))
            most = max(most, -(-(own + sum(costs[r] for r in ranks)) // len(ranks)))
        best = min(best, most)
    return best


def test_is_near_the_optimum_of_small_cases() -> None:
    worst, means = 1.0, []
    g = torch.Generator().manual_seed(0)
    for R, N, local, runs in ((2, 1, 3, 150), (2, 2, 2, 100), (3, 1, 2, 100), (4, 1, 1, 60)):
        for _ in range(runs):
            rows = (torch.rand(R * local, generator=g) ** 4 * 400).long().tolist()
            cost = int(torch.randint(0, 40, (), generator=g))
            size = ReplicationSize(R, N, cost, tile=1)
            load = int(reference_replication_plan(counts(rows), size).load_2R[1].max())
            ratio = load / max(1, optimum(rows, size))
            assert ratio >= 1 or not any(rows)
            worst, means = max(worst, ratio), [*means, ratio]
    assert worst <= FACTOR
    assert sum(means) / len(means) < 1.015


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        ([1, 2, 3], ReplicationSize(2, 1, 0), "3 experts do not divide over 2 ranks"),
        (
            [1] * 1024,
            ReplicationSize(8, 1, 0),
            "at most 512 experts on 8 ranks.*parallel.expert_replication=0",
        ),
        ([1] * 16, ReplicationSize(16, 1, 0), "not 16 on 16: set parallel.expert_replication=0"),
        ([1] * 16, ReplicationSize(4, -1, 0), "must be at least"),
        ([1] * 16, ReplicationSize(4, 1, 0, 0), "must be at least"),
        ([1] * 16, ReplicationSize(4, 1, 0, 1, -1), "must be at least"),
    ],
)
def test_what_cannot_be_is_named(rows: list[int], size: ReplicationSize, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_replication_plan(counts(rows), size)


def test_rows_of_another_dtype_are_named() -> None:
    with pytest.raises(ValueError, match="must be int32"):
        make_replication_plan(torch.zeros(4, dtype=torch.int64), ReplicationSize(2, 1, 0))


def test_cost_from_rates() -> None:
    rates = dict(bytes_per_second=300e9, seconds_per_row=2e-9)
    assert replica_cost(9_437_184, **rates) == 15729
    assert replica_cost(9_437_184, **rates, exposed=0.25) == 3933
    assert replica_cost(9_437_184, **rates, exposed=0.0) == 0
    with pytest.raises(ValueError, match="cannot be weighed"):
        replica_cost(1, bytes_per_second=0.0, seconds_per_row=1.0)


def routing(tokens: int, top_k: int, experts: int, seed: int, hot: float = 0.6) -> Tensor:
    """Ids with some hot experts and some slots without one."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=g)
    scores[:, :2] += hot
    idx = scores.topk(top_k, dim=1).indices.int()
    return idx.masked_fill(torch.rand(tokens, top_k, generator=g) < 0.05, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("ranks", "slots", "tile"), [(2, 1, 1), (4, 2, 8), (4, 0, 8)])
def test_every_pair_goes_to_the_copy_that_has_its_row(
    ranks: int, slots: int, tile: int, device: str
) -> None:
    idx, experts = routing(96, 3, 8, ranks), 8
    with sync_free():
        rows = count_rows(idx.to(device), experts)
        plan = make_replication_plan(rows, ReplicationSize(ranks, slots, 4, tile))
        pair_slots = assign_pairs(idx.to(device), plan)
    pair_slots, plan = pair_slots.cpu(), ReplicationPlan(*(t.cpu() for t in plan))
    assert rows.tolist() == [int((idx == e).sum()) for e in range(experts)]
    replicas, local = filled(plan), experts // ranks
    assert any(replicas) == (slots > 0)
    seen = [0] * experts
    for expert, slot in zip(idx.flatten().tolist(), pair_slots.flatten().tolist(), strict=True):
        if expert < 0:
            assert slot == -1
            continue
        number, seen[expert] = seen[expert], seen[expert] + 1
        rank, at = divmod(slot, local + slots)
        if number < plan.owner_rows_E[expert]:
            assert (rank, at) == (expert // local, expert % local)
        else:
            held, begin, end = replicas[rank][at - local]
            assert held == expert and begin <= number < end


def test_numbers_count_pairs_of_an_expert_in_order() -> None:
    expert = torch.tensor([3, 0, 3, -1, 0, 3, 1], dtype=torch.int32)
    assert pair_numbers(expert, 4)[expert >= 0].tolist() == [0, 0, 1, 1, 2, 0]


def test_the_kernel_in_the_interpreter() -> None:
    interpret(__name__)


@pytest.mark.parametrize("rows", [zipf(64, 60000, 1), zipf(24, 60000, 2), [4096] + [0] * 23])
def test_there_are_copies_only_if_the_largest_load_falls_by_enough(rows: list[int]) -> None:
    free = reference_replication_plan(counts(rows), ReplicationSize(4, 2, 50))
    before, after = free.load_2R.max(1).values.tolist()
    assert after < before
    for least, taken in ((before - after, free), (before - after + 1, None)):
        plan = reference_replication_plan(counts(rows), ReplicationSize(4, 2, 50, least=least))
        taken = taken or reference_replication_plan(counts(rows), ReplicationSize(4, 0, 50))
        assert all(map(torch.equal, plan[3:], taken[3:]))
        assert (plan.expert_RN >= 0).any() == (taken is free)


def _in_chunks(count_E: torch.Tensor, chunks: int) -> torch.Tensor:
    """int32 [chunks, E] that add up to the counts."""
    part = torch.arange(chunks, dtype=torch.int32)[:, None]
    return (count_E + part) // chunks


def interpreted() -> None:
    from phalanx.extras.replication.kernels.replication_plan_triton import (
        replication_plan_in_triton,
    )

    given = list(CASES.values())
    for seed in range(6):
        ranks = (2, 4, 8)[seed % 3]
        size = ReplicationSize(ranks, 1 + seed, 50 * seed, (1, 128)[seed % 2], 5000 * (seed % 3))
        given.append((zipf(ranks * 24, 60000, seed), size))
    for number, (rows, size) in enumerate(given):
        plan = ReplicationPlan(
            *replication_plan_in_triton(_in_chunks(counts(rows), 1 + 7 * number), size)
        )
        for name, got, want in zip(
            ReplicationPlan._fields,
            plan,
            reference_replication_plan(counts(rows), size),
            strict=True,
        ):
            assert torch.equal(got, want), f"{name} of {size}"


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(128, 4, 2), (256, 8, 2), (512, 8, 4)])
def test_the_kernel_compiles_for_hopper(
    experts: int, ranks: int, slots: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from phalanx.extras.replication.kernels import replication_plan_triton
    from tests.kernels.triton_code import launched

    rows = torch.empty(64, experts, dtype=torch.int32, device="meta")

    def call() -> None:
        replication_plan_triton.replication_plan_in_triton(
            rows, ReplicationSize(ranks, slots, 1000)
        )

    code = launched(replication_plan_triton, "replication_plan_kernel", call, tmp_path)
    assert code.stack == 0, "it spills"
    assert code.threads <= 128
    assert not code.count(r"ATOM|RED\.")


def test_loads_in_the_documentation() -> None:
    """Table of docs/dispatch.md; a copy costs a quarter of its exposed cost."""
    machine, expert = MACHINES["h200"], 3 * 2048 * 768
    unhidden = dict(
        bytes_per_second=machine.node_gbs * 1e9,
        seconds_per_row=6 * expert / (machine.expert_tflops * 1e12),
    )
    cost = replica_cost(8 * expert, **unhidden, exposed=0.25)  # bf16 twice, and fp32
    page = (Path(__file__).resolve().parents[4] / "docs" / "dispatch.md").read_text()
    assert f"a copy costs {cost} rows" in page
    of_one = [2**19 // 32] * 32 + [0] * 224
    half = [2**15] + [(2**19 - 2**15) // 255] * 255
    for name, rows, ranks, slots in (
        ("balanced", [2048] * 128, 4, 2),
        ("Zipf, exponent 1", zipf(128, 2**18, 0), 4, 2),
        ("half of all tokens take one expert", half, 8, 2),
        ("Zipf, exponent 1", zipf(256, 2**19, 0), 8, 2),
        ("all to one rank, its experts alike", of_one, 8, 2),
        ("all to one rank, its experts alike", of_one, 8, 4),
    ):
        before, after = reference_replication_plan(
            counts(rows), ReplicationSize(ranks, slots, cost)
        ).load_2R.tolist()
        mean = sum(before) / ranks
        loads = f"{max(before) / mean:.2f} | {max(after) / mean:.2f}"
        assert f"| {name} | {len(rows)}, {ranks} | {slots} | {loads} |" in page


@pytest.mark.gpu
def test_the_kernel_in_a_graph() -> None:
    from tests.kernels.capture import check_replay

    size, rows = ReplicationSize(4, 2, 100), counts(zipf(128, 65536, 3)).cuda()
    check_replay(lambda: list(make_replication_plan(rows, size)), rows, rows.flip(0))
