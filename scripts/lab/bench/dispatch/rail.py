"""Suite `rail`: dispatch and combine between nodes, their parts, and what the cost model expects.

Tokens go to the nodes of their experts and come back, as in `hier` without its transport inside a
node. Blocks have the rows that a run gives them, after reruns if the routing needs more. Expected
times are those of the bytes that blocks bring to other nodes, at the rate of the network: of
PHALANX_WIRE, or of the table of machines.

Legend: T tokens of a rank, D hidden, K experts of a token, M nodes, C rows of a block, B = M * C
rows of all blocks.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.schema import ParallelConfig
from phalanx.configs.tables.machines import MACHINES, machine_of
from phalanx.extras.between_nodes.rail_blocks import RailBlocks, pack_rows, plan_blocks, sum_rows
from phalanx.extras.between_nodes.rows import CollectiveRail, send_routing, swap
from phalanx.extras.overlap.paced import Wire, wire
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.collectives import Collectives
from phalanx.parallel.dispatcher.costs import TopKSampling, owner_probabilities
from phalanx.parallel.dispatcher.nodes import Nodes
from phalanx.scripts.lab.bench.dispatch.ends import all_ranks, hier_of_nodes
from phalanx.scripts.lab.bench.models import (
    DEEPSEEK,
    PACK_TARGETS,
    PACK_WIRE,
    TOKENS,
    Model,
)
from phalanx.scripts.lab.bench.problems import random
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.routing import OVER_NODES, half_of, over_nodes, probabilities
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, differing

_PARTS = ("plan", "pack", "exchange", "unpack")
"""Parts of dispatch and combine: the exchange of rows alone is in both."""


def rail(bench: Bench, model: Model, tokens: int) -> list[Record]:
    shape = model.shape(tokens)
    transport = hier_of_nodes(bench)
    if isinstance(transport, str):
        return [Record("rail", shape, "-", "-", bench.mode, note=transport)]
    group = transport.nodes
    assert group is not None
    if model.experts % group.count:
        why = f"{model.experts} experts do not divide over {group.count} nodes"
        return [Record("rail", shape, "-", "-", bench.mode, note=why)]
    timings = bench.timings("rail", shape)
    problems = {kind: _Problem(bench, model, tokens, group, kind) for kind in OVER_NODES}
    cases = [(problem, case) for problem in problems.values() for case in problem.cases()]
    for _, case in cases:
        timings.add(case)
    timings.run()
    records = [record for problem, case in cases for record in problem.records(timings, case)]
    judged = bench.clock.device.type == "cuda" and model == DEEPSEEK and tokens == TOKENS
    for kind, problem in problems.items():
        records += problem.share(timings, kind, judged=judged)
    return [*records, *timings.skipped]


class _Load(NamedTuple):
    """Rows of a token that cross to other nodes, on average over all ranks."""

    exact: float  # rows that tokens need
    sent: float  # rows of the blocks, full or not
    expected: float  # rows of tokens that choose uniformly, by the cost model

    def __str__(self) -> str:
        rows = f"{self.exact:.2f} rows a token (expected {self.expected:.2f})"
        return f"{rows}, {self.sent:.2f} in blocks"


class _Problem:
    """Tokens of a rank with one kind of routing, and their blocks."""

    def __init__(self, bench: Bench, model: Model, tokens: int, group: Nodes, kind: str) -> None:
        self._bench, self._kind = bench, kind
        self._rail = CollectiveRail(Collectives(lambda: group.rail))
        self._nodes = group.count
        self._experts = model.experts // group.count
        rank_device: dict[str, Any] = dict(rank=bench.rank, device=bench.clock.device)
        sizes = tokens, model.experts, model.top_k
        self._idx_TK = over_nodes(kind, *sizes, nodes=group.count, **rank_device)
        self._prob_TK = probabilities(tokens, model.top_k, **rank_device)
        torch.manual_seed(1 + bench.rank)
        self._x_TD = random(tokens, model.hidden, device=bench.clock.device)
        self._blocks, self._rows = self._fitting(self._sampling(model))
        row_TM = self._blocks.row_TM
        others = (row_TM >= 0).sum() - (row_TM[:, group.index] >= 0).sum()
        share = owner_probabilities(self._sampling(model), [self._experts] * group.count)
        self._load = _Load(
            exact=sum(bench.gather(int(others))) / (bench.ranks * tokens),
            sent=(group.count - 1) * self._rows / tokens,
            expected=sum(share) * (1 - 1 / group.count),
        )
        self._group = group.rail
        self._sent = send_routing(self._rail, self._blocks)
        packed_BD = pack_rows(self._x_TD, self._blocks.token_B)
        self._rows_BD = swap(self._rail, packed_BD)

    def cases(self) -> list[Case]:
        row_TM, token_B = self._blocks.row_TM, self._blocks.token_B
        packed_BD = pack_rows(self._x_TD, token_B)
        side, crossed = self._kind, self._crossing(self._x_TD)
        routing = self._crossing(self._blocks.routing_B2K[:1].flatten(1))
        there, back = self._expected(routing, crossed), self._expected(crossed)
        used_B, expected_BD = self._arriving()
        sums_TD = sum_rows(packed_BD, row_TM)  # rows return as they were sent

        def dispatch() -> Tensor:
            sent = send_routing(self._rail, self._plan(self._rows))
            return swap(self._rail, pack_rows(self._x_TD, sent.token_B))

        def combine() -> Tensor:
            return sum_rows(swap(self._rail, self._rows_BD), row_TM)

        def arrived(rows_BD: Tensor) -> str:
            return differing([rows_BD[used_B]], [expected_BD], ["rows"])

        def summed(out_TD: Tensor) -> str:
            return differing([out_TD], [sums_TD], ["sums"])

        calls = (
            lambda: self._plan(self._rows),
            lambda: pack_rows(self._x_TD, token_B),
            lambda: swap(self._rail, packed_BD),
            lambda: sum_rows(packed_BD, row_TM),
        )
        parts = [Case(side, *part) for part in zip(_PARTS, calls, strict=True)]
        exchange = replace(parts[2], check=arrived)
        return [
            _expecting(Case(side, "dispatch", dispatch, check=arrived), there, str(self._load)),
            _expecting(Case(side, "combine", combine, check=summed), back),
            *parts[:2],
            _expecting(exchange, back, f"{crossed / 1e6:.4g} MB of a GPU cross"),
            *parts[3:],
        ]

    def records(self, timings: Timings, case: Case) -> list[Record]:
        """Record of a timed case; that of the exchange has the rate at which bytes cross."""
        records = timings.record(case)
        if case.pass_name != "exchange":
            return records
        crossed = 1e-6 * self._crossing(self._x_TD)
        return [replace(r, gbs=crossed / r.ms if r.ms else None) for r in records]

    def share(self, timings: Timings, kind: str, *, judged: bool) -> list[Record]:
        """Record of pack and unpack together, as a share of two exchanges at 50 GB/s."""
        pack, unpack = timings.time(kind, "pack"), timings.time(kind, "unpack")
        crossed = self._crossing(self._x_TD)
        if pack is None or unpack is None or not crossed:
            return []
        ms = pack.ms + unpack.ms
        of_wire = ms / (2e3 * crossed / PACK_WIRE)
        head = ("rail", timings.shape, kind, "pack and unpack", timings.bench.mode)
        note = f"{100 * of_wire:.1f} % of both exchanges at {PACK_WIRE / 1e9:.0f} GB/s"
        if not judged:
            return [Record(*head, ms, note=note)]
        must, goal = PACK_TARGETS
        return [Record(*head, ms, ratio=must / of_wire, bar=1.0, goal=must / goal, note=note)]

    def _sampling(self, model: Model) -> TopKSampling:
        limited = self._kind == "half of the nodes"
        groups = (self._nodes, half_of(self._nodes)) if limited else (1, 1)
        return TopKSampling(model.experts, model.top_k, *groups)

    def _plan(self, rows: int) -> RailBlocks:
        return plan_blocks(
            self._idx_TK, self._prob_TK, nodes=self._nodes, experts=self._experts, rows=rows
        )

    def _fitting(self, sampling: TopKSampling) -> tuple[RailBlocks, int]:
        """Blocks that hold all rows of all ranks, and their C."""
        tokens, device = len(self._idx_TK), self._bench.clock.device
        budget = Budget(ParallelConfig().capacity_factor, device)
        share = max(owner_probabilities(sampling, [self._experts] * self._nodes))
        while True:
            rows = budget.block_rows(tokens, share)
            blocks = self._plan(rows)
            budget.blocks.observe(blocks.needed, rows)
            if not budget.exceeded(budget.record(all_ranks()).tolist()):
                return blocks, rows
            budget.grow()

    def _arriving(self) -> tuple[Tensor, Tensor]:
        """Rows of blocks that hold a token, as a mask [B], and the rows that they are to have."""
        x_TD, count = self._x_TD, self._nodes
        everywhere = x_TD.new_empty(count * len(x_TD), x_TD.shape[1])
        dist.all_gather_into_tensor(everywhere, x_TD, group=self._group)
        token_MC = swap(self._rail, self._blocks.token_B).view(count, -1)
        first_M = len(x_TD) * torch.arange(count, device=x_TD.device)
        used_B = (token_MC >= 0).flatten()
        return used_B, everywhere[(token_MC + first_M[:, None]).flatten()[used_B]]

    def _crossing(self, rows: Tensor) -> int:
        """Bytes of a rank's blocks of such rows that cross to other nodes."""
        size = rows.element_size() * rows.shape[1]
        return (self._nodes - 1) * self._rows * size

    def _expected(self, *exchanges: int) -> float | None:
        network = _network(self._bench.clock.device)
        return None if network is None else 1e3 * sum(map(network.seconds, exchanges))


def _expecting(case: Case, ms: float | None, *notes: str) -> Case:
    expected = [] if ms is None else [f"expected {ms:.3f} ms"]
    return replace(case, against=ms, note=", ".join([*notes, *expected]))


def _network(device: torch.device) -> Wire | None:
    """The network that exchanges are compared with; None on a CPU without PHALANX_WIRE."""
    if (paced := wire()) is not None:
        return paced
    if device.type != "cuda":
        return None
    machine = MACHINES[machine_of(torch.cuda.get_device_name(device), "h100")]
    return Wire(1e9 * machine.network_gbs, 0.0)
