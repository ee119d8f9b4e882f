"""`push` and `combine_push` without a GPU: their code on threads of the host, ranks in turn.

Every wait must find what it waits for: nobody runs meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.exchange.peer_buffers import ALLOWED, MAX_RANKS, STATE
from tests.kernels.sm90 import simt
from tests.kernels.sm90.experts.test_combine import BF16, words
from tests.support.scheduling import mostly_slow

LIMIT = 1000
CANARY = 7.0
PUSH = simt.load("phalanx.kernels.sm90.exchange.push", WARPS=2)
SUMS = simt.load("phalanx.kernels.sm90.exchange.combine_push", WARPS=2)
wave_of = simt.load("phalanx.kernels.sm90.exchange.waves").wave_of


class Ranks:
    """Memory of R ranks: what each receives, its flags, its state."""

    def __init__(self, R: int, T: int, D: int, side: int) -> None:
        self.R, self.T, self.D = R, T, D
        self.canary = words(torch.full((1, D), CANARY, dtype=BF16))
        self.rows = [self.canary * (R * T) for _ in range(R)]
        self.side = [[0] * (R * side) for _ in range(R)]
        self.flags = [[0] * ALLOWED + [1] * MAX_RANKS for _ in range(R)]
        self.state = [[0] * STATE for _ in range(R)]
        self.report = [0] * 4

    def buffers(self, rank: int, *memory: list) -> list[simt.Pointer]:
        """The pointers that kernels share, with those of `memory` before them."""
        addresses = [[simt.Pointer(m).toint() for m in of] for of in memory]
        return list(map(simt.Pointer, (*addresses, self.state[rank], self.report)))

    def check(self, rank: int, wanted: dict[int, list[int]]) -> None:
        """The rows that a rank received, and no others."""
        size = self.D // 2
        for row in range(self.R * self.T):
            got = self.rows[rank][row * size : (row + 1) * size]
            assert got == wanted.get(row, self.canary), (rank, row)


def routing(N: int, K: int, experts: int, absent: float, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(N, experts, generator=g).topk(K).indices.int()
    table[torch.rand(N, K, generator=g) < absent] = -1
    return table


def push(ranks: Ranks, rank: int, x: Tensor, table: Tensor, side: list[int], **how: int) -> None:
    local, back, waves, ctas = how["local"], bool(how["back"]), how["waves"], how["ctas"]
    config = PUSH.PushConfig(2 * ranks.D, ranks.R, table.shape[1], back)
    memory = [simt.Pointer(m) for m in (words(x), table.flatten().tolist(), side)]
    shared = ranks.buffers(rank, ranks.rows, ranks.side, ranks.flags)
    block = len(side) // 4 // (ranks.R if back else 1)
    sizes = (len(x), ranks.T, local, rank, block, LIMIT, ctas, waves)
    PUSH.PushKernel(config)(*memory, *shared, *sizes, None)


SHAPES = [
    (1, 5, 8, 2, 4, 1, False),
    (2, 42, 24, 4, 6, 3, False),
    (3, 9, 264, 3, 5, 8, False),
    (2, 40, 16, 2, 3, 1, True),
    (3, 7, 520, 4, 2, 1, True),
    (3, 1, 8, 1, 1, 1, False),  # as of an exchange for side data alone
]
DEFAULT = [(0, 1), (2, 1), (3, 2), (5, 2)]
"""Numbers of shapes and of blocks: of each direction, several waves, of more than one chunk."""


@pytest.mark.parametrize(
    ("R", "T", "D", "K", "local", "waves", "back", "ctas"),
    [
        pytest.param(*shape, ctas, marks=() if (number, ctas) in DEFAULT else pytest.mark.slow)
        for number, shape in enumerate(SHAPES)
        for ctas in (1, 2)
    ],
)
def test_every_row_lands_where_it_should_and_no_other(
    R: int, T: int, D: int, K: int, local: int, waves: int, back: bool, ctas: int
) -> None:
    ranks = Ranks(R, T, D, side=4)
    how = dict(local=local, back=back, waves=waves, ctas=ctas)
    for epoch in (1, 2):
        g = torch.Generator().manual_seed(epoch)
        for received in ranks.rows:
            received[:] = ranks.canary * (R * T)
        wanted: list[dict[int, list[int]]] = [{} for _ in range(R)]
        sides = []
        for rank in range(R):
            N = R * T if back else T
            x = torch.randn(N, D, generator=g).to(BF16)
            table = routing(N, K, R * local, 0.3, seed=7 * epoch + rank)
            sides.append([100 * rank + i for i in range(4 * R if back else 4)])
            push(ranks, rank, x, table, sides[-1], **how)
            owners = table.div(local, rounding_mode="floor")  # -1 stays -1
            for n in range(N):
                of = set(owners[n].tolist()) - {-1}
                targets = ({n // T} if rank in of else set()) if back else of
                for r in targets:
                    wanted[r][rank * T + n % T] = words(x[n : n + 1])
        for rank in range(R):
            ranks.check(rank, wanted[rank])
            for source in range(R):
                block = sides[source][4 * rank : 4 * rank + 4] if back else sides[source]
                assert ranks.side[rank][4 * source : 4 * source + 4] == block
            assert ranks.state[rank][0] == epoch and not any(ranks.state[rank][2:])
            allowed = ranks.flags[rank][ALLOWED:][:R]
            assert allowed == [epoch + 1] * R
            for part in range(waves + 1):
                assert ranks.flags[rank][part * MAX_RANKS :][:R] == [epoch] * R


@pytest.mark.parametrize(("R", "T"), [(1, 3), (2, 40), (8, 21)])
def test_on_the_way_back_ranks_write_to_different_ranks_at_a_time(R: int, T: int) -> None:
    chunk = 8
    chunks = R * -(-T // chunk)
    rows = [[PUSH.block_rows(n, T, rank, R, chunk) for n in range(chunks)] for rank in range(R)]
    for of in rows:
        covered = [n for first, end in of for n in range(first, min(first + chunk, end))]
        assert sorted(covered) == list(range(R * T))
    for at_a_time in zip(*rows, strict=True):
        assert len({first // T for first, _ in at_a_time}) == R


def test_nobody_pushes_before_all_ranks_allow_it() -> None:
    ranks = Ranks(2, 4, 8, side=4)
    given = (torch.zeros(4, 8, dtype=BF16), routing(4, 2, 4, 0.0, seed=1), [0] * 4)
    how = dict(local=2, back=0, waves=1, ctas=1)
    push(ranks, 0, *given, **how)
    with pytest.raises(AssertionError, match="waits for 2 of rank 1, but finds 1"):
        push(ranks, 0, *given, **how)


@pytest.mark.parametrize("R", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 5, 8, 803])
def test_sums_of_a_wave_leave_for_different_ranks_at_a_time(count: int, R: int) -> None:
    chunks = [[SUMS.rotated(n, count, rank, R) for n in range(count)] for rank in range(R)]
    assert all(sorted(of) == list(range(count)) for of in chunks)
    for at_a_time in zip(*chunks, strict=True):  # of an expert, whose rows are in order of ranks
        targets = [chunk * R // count for chunk in at_a_time]
        assert max(map(targets.count, targets)) <= max(2, -(-R // count))


class Sums:
    """The way back from one of two ranks, whose experts' rows are there."""

    T, D, K, tile_rows, counts = 13, 264, 3, 8, 3
    begin, rest = 1, 2
    """CTAs of the two launches."""

    def __init__(self, local: int, bits: int, waves: int) -> None:
        self.local, self.bits, self.waves = local, bits, waves
        self.ranks = Ranks(2, self.T, self.D, side=4)
        self.table = routing(2 * self.T, self.K, 2 * self.local, 0.3, seed=3)
        prob = torch.ones(self.table.shape)
        where = dict(first_expert=self.local, local_experts=self.local, backend="torch")
        self.plan = self.planned(make_plan(self.table, prob, rows=self.table.numel(), **where))
        g = torch.Generator().manual_seed(4)
        self.y = torch.randn(self.table.numel(), self.D, generator=g).to(BF16)
        self.y[int(self.plan.offsets[-1]) :] = float("nan")
        self.progress = [0] * SUMS.PROGRESS
        self.wave_S = [
            wave
            for expert, rows in enumerate(self.plan.offsets.diff().tolist())
            for wave in self._finish(expert, rows)
        ]

    def planned(self, plan: ExpertPlan) -> ExpertPlan:
        """Which of the rows go as sums: all."""
        return plan

    def _finish(self, expert: int, rows: int) -> list[int]:
        """Count the tiles of an expert, in slices of as many. Returns the wave of each row."""
        tiles = -(-rows // self.tile_rows)
        height = -(-tiles // (1 << self.bits))
        waves = []
        for row in range(rows):
            sliced = (expert << self.bits) + row // self.tile_rows // height
            left = (self.local << self.bits) - 1 - sliced
            waves.append(self.waves - 1 - wave_of(left, self.local << self.bits, self.waves))
            if row % self.tile_rows == 0:
                self.progress[SUMS.COUNTS + waves[-1]] += self.counts
        return waves

    def launch(self, ctas: int, unreduced_rows: Sequence[Any] = ()) -> None:
        made = (self.waves, self.tile_rows, self.counts, self.bits)
        self._launch(made, [], (self.begin + self.rest, 0, ctas), unreduced_rows)

    def launch_once(self, side: list[int], unreduced_rows: Sequence[Any] = ()) -> None:
        """All is there, and side data go along."""
        self._launch((1, 1, 0, 0), side, (self.begin, 1, self.begin), unreduced_rows)

    def _launch(
        self,
        made: tuple[int, ...],
        side: list[int],
        how: tuple[int, ...],
        unreduced_rows: Sequence[Any],
    ) -> None:
        plan = (self.plan.row_index_S, self.plan.inverse_NK, self.plan.offsets)
        memory = [words(self.y), *(t.flatten().tolist() for t in plan), side]
        shared = self.ranks.buffers(1, self.ranks.rows, self.ranks.side, self.ranks.flags)
        pointers = [*map(simt.Pointer, memory), *shared, simt.Pointer(self.progress)]
        sent = dict(side=bool(side), unreduced_rows=bool(unreduced_rows))
        kernel = SUMS.CombinePushKernel(SUMS.CombinePushConfig(self.K, 2, **sent))
        pointers += unreduced_rows or [None] * 4
        kernel(*pointers, self.T, self.D // 8, self.local, 1, LIMIT, *made, *how, None)

    def wanted(self, target: int, before: int) -> dict[int, list[int]]:
        """Rows that a rank receives when the waves before `before` have been sent."""
        sums, inverse_NK = Grouped().combine(self.y, self.plan.inverse_NK), self.plan.inverse_NK
        of = range(target * self.T, (target + 1) * self.T)
        last = {n: int(inverse_NK[n].max()) for n in of}
        there = [n for n in of if last[n] >= 0 and self.wave_S[last[n]] < before]
        return {self.T + n % self.T: words(sums[n : n + 1]) for n in there}


class SumsOfOwn(Sums):
    """The last two places are replicas', whose rows, like others, go by themselves and not here."""

    def planned(self, plan: ExpertPlan) -> ExpertPlan:
        self.local -= 2
        self.inverse_NK = plan.inverse_NK
        offsets, inverse_NK = plan.offsets[: self.local + 1], plan.inverse_NK
        assert inverse_NK is not None and plan.offsets[-1] > offsets[-1]
        alone_NK = (inverse_NK >= offsets[-1]) | (inverse_NK % 5 == 2)
        assert (alone_NK & (inverse_NK < offsets[-1])).any()
        return plan._replace(offsets=offsets, inverse_NK=inverse_NK.masked_fill(alone_NK, -1))


WAYS = [(37, 0, 4), (2, 3, 7), (3, 1, 5)]
"""Arguments of `Sums`."""


@mostly_slow("given", WAYS, (3, 1, 5))
def test_sums_are_those_of_combine_where_their_tokens_are(given: tuple[int, int, int]) -> None:
    way, waves = Sums(*given), given[-1]
    way.launch(way.begin)
    assert way.ranks.state[1][0] == 0  # the rest is still to come, though it has nothing to do
    way.launch(way.rest)
    for target in range(2):
        way.ranks.check(target, way.wanted(target, waves))
        assert way.ranks.flags[target][1] == way.ranks.flags[target][MAX_RANKS + 1] == 1
    assert way.ranks.state[1][0] == 1 and not any(way.progress)


@pytest.mark.parametrize("once", [False, True])
def test_rows_that_are_in_no_sum_go_by_themselves(once: bool) -> None:
    way = SumsOfOwn(9, 0, 4)
    T, K, size = way.T, way.K, way.D // 2
    every_NK, sums_NK = way.inverse_NK, way.plan.inverse_NK
    alone = ((every_NK >= 0) & (sums_NK < 0)).flatten().nonzero().flatten()
    pairs = alone[torch.randperm(len(alone))].tolist()
    memory = [way.ranks.canary * (K * T) for _ in range(2)]
    given = [*pairs, *[-1] * 5], [len(pairs)], every_NK.flatten().tolist()
    where = [simt.Pointer(m).toint() for m in memory]
    unreduced_rows = [*map(simt.Pointer, given), simt.Pointer(where)]
    if once:
        way.progress = [0] * SUMS.PROGRESS
        way.launch_once(list(range(8)), unreduced_rows)
    else:
        way.launch(way.begin)
        way.launch(way.rest, unreduced_rows)
    wanted: list[dict[int, list[int]]] = [{}, {}]
    for pair in pairs:
        row = int(every_NK.flatten()[pair])
        n, k = divmod(pair, K)
        wanted[n // T][k * T + n % T] = words(way.y[row : row + 1])
    for target in range(2):
        way.ranks.check(target, way.wanted(target, 4))
        for at in range(K * T):
            got = memory[target][at * size : (at + 1) * size]
            assert got == wanted[target].get(at, way.ranks.canary), (target, at)
    assert way.ranks.state[1][0] == 1 and not any(way.progress)
    assert len(pairs) > 2 * SUMS.WARPS * way.rest, "some warps have several"


@mostly_slow("given", WAYS, (37, 0, 4))
def test_gradients_take_side_data_along_and_wait_for_nothing(given: tuple[int, int, int]) -> None:
    way, waves = Sums(*given), given[-1]
    way.progress = [0] * SUMS.PROGRESS
    way.launch_once(side := list(range(8)))
    for target in range(2):
        way.ranks.check(target, way.wanted(target, waves))
        assert way.ranks.side[target][4:] == side[4 * target : 4 * target + 4]
        assert way.ranks.flags[target][1] == way.ranks.flags[target][MAX_RANKS + 1] == 1
    assert way.ranks.state[1] == [1, *[0] * (STATE - 1)] and not any(way.progress)


@mostly_slow("given", WAYS, (3, 1, 5))
def test_sums_wait_for_every_tile_of_their_experts(given: tuple[int, int, int]) -> None:
    for wave in range(given[-1]):
        way = Sums(*given)
        if way.progress[SUMS.COUNTS + wave]:
            way.progress[SUMS.COUNTS + wave] -= 1
            with pytest.raises(AssertionError, match="of rank 1, but finds"):
                way.launch(way.begin)
            for target in range(2):
                sent, size = way.wanted(target, wave), way.D // 2
                for row in set(range(2 * way.T)) - set(sent):
                    got = way.ranks.rows[target][row * size : (row + 1) * size]
                    assert got == way.ranks.canary, (target, row)
