"""Suites `wire`, `exchange` and `plan`: what an expert-parallel layer does beside its experts.

`wire` is the push of a dispatch alone, with few SMs and with all, also beside a grouped GEMM that
leaves it these SMs; `exchange` is dispatch and combine of each transport, and their backwards;
`plan` makes the routing plan of received routing.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.routing.plan import make_plan
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions, exchange_of
from phalanx.parallel.dispatcher.transport import refuse
from phalanx.scripts.bench.ends import PLAN_NAMES, ROOM, TIMEOUT, Ends, inputs, transports
from phalanx.scripts.bench.measure import Company
from phalanx.scripts.bench.models import (
    DEEPSEEK,
    GPUS,
    PLAN_ASKED,
    PLAN_RANKS,
    TOKENS,
    WIRE_ASKED,
    WIRE_SMS,
    Model,
)
from phalanx.scripts.bench.problems import BF16, random
from phalanx.scripts.bench.ranks import RankBench, RankSides, differing
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.routing import KINDS, OF_EIGHT, bytes_sent, probabilities, routed

_LASTING = 3.0
"""The GEMM beside a push lasts this many times as long as the push alone."""


def _gemms(model: Model, tokens: int, sms: int, ms: float) -> Company:
    from phalanx.scripts.bench.gemms import Gemms

    return Gemms(model, tokens, sms, ms)


def wire(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    shape, device = model.shape(tokens), bench.clock.device
    against = refuse("symm", dist.group.WORLD, BF16)
    if against:
        return [Record("wire", shape, "push", "-", bench.mode, note=against)]
    made: list[Record] = []
    kinds = KINDS if bench.ranks >= GPUS else (OF_EIGHT, *KINDS)
    for kind in kinds:
        where = dict(rank=bench.rank, device=device)
        idx = routed(kind, tokens, model.experts, model.top_k, **where)
        sizes = dict(experts=model.experts, rank=bench.rank, ranks=bench.ranks)
        sent = bench.gather(bytes_sent(idx, model.hidden, **sizes))
        x = random(tokens, model.hidden, device=device)
        side = torch.zeros(-(-8 * idx.numel() // 16) * 4, dtype=torch.int32, device=device)

        check = functools.partial(_arrived, bench, model, *_everywhere(x, idx))
        sides = bench.sides("wire", shape)
        ways = {}
        for sms in WIRE_SMS:
            way = Way(_push(bench, model, x, idx, side, sms), sms or None, check)
            ways[f"{sms or 'all'} SMs"] = way
        for name, way in ways.items():
            sides.take(name, kind, way.call, way.check)
        sides.run()
        judged = model == DEEPSEEK and tokens == TOKENS and kind == kinds[0]
        for name in ways:
            made += _rate(sides, name, kind, sent, judged)
        made += sides.lost
        made += _beside(sides, model, kind, sent, ways, judged)
    return made


class Way(NamedTuple):
    """How rows get to the other ranks."""

    call: Callable[[], Tensor]
    sms: int | None
    """That it takes; None: all."""
    check: Callable[[Tensor], str]
    """Why what it returns is wrong; empty if it is not."""


def _push(
    bench: RankBench, model: Model, x: Tensor, idx: Tensor, side: Tensor, sms: int
) -> Callable[[], Tensor]:
    """A call that dispatches tokens and `side` from a number of SMs, and waits for all ranks'.

    It returns where rows arrive.
    """
    options, local = SymmOptions(comm_sms=sms, timeout=TIMEOUT), model.experts // bench.ranks
    exchange = exchange_of(dist.group.WORLD, len(x), model.hidden, model.top_k, options)

    def call() -> Tensor:
        transfer = exchange.start(x, idx, side, local)
        exchange.wait(transfer)
        return exchange.rows(transfer)

    return call


def _everywhere(x: Tensor, idx: Tensor) -> list[Tensor]:
    """Tokens and their experts of all ranks."""
    found = [t.new_empty(dist.get_world_size() * len(t), *t.shape[1:]) for t in (x, idx)]
    for all_ranks, own in zip(found, (x, idx), strict=True):
        dist.all_gather_into_tensor(all_ranks, own)
    return found


def _arrived(bench: RankBench, model: Model, x_ND: Tensor, idx_NK: Tensor, rows_ND: Tensor) -> str:
    """Why the rows for this rank's experts are not those that were sent; empty if they are."""
    read_N = (idx_NK // (model.experts // bench.ranks) == bench.rank).any(1)
    return differing([rows_ND[read_N]], [x_ND[read_N]], ["rows"])


def _rate(sides: RankSides, side: str, kind: str, sent: list[int], judged: bool) -> list[Record]:
    """The record of a push: the rate of the rank with the lowest."""
    times = sides.medians(side, kind)
    if not times:
        return []
    rate = min(size / time.ms * 1e-6 for size, time in zip(sent, times, strict=True))
    asked = WIRE_ASKED.get(side) if judged else None
    slowest = max(time.ms for time in times)
    other = None if asked is None else slowest * rate / asked
    bars = None if asked is None else (1.0, None)
    note = "" if asked is None else f"asked {asked} GB/s"
    found = sides.record(side, kind, other=other, bars=bars, note=note)
    return [replace(record, gbs=rate) for record in found]


def _beside(
    alone: RankSides,
    model: Model,
    kind: str,
    sent: list[int],
    ways: dict[str, Way],
    judged: bool,
) -> list[Record]:
    """With a GEMM on all other SMs, if there are any."""
    bench, tokens = alone.bench, alone.shape[0]
    sides, made, company = bench.sides("wire", alone.shape), [], {}
    for name, way in ways.items():
        time = alone.time(name, kind)
        if way.sms is not None and time is not None:
            side = f"{name}, beside a GEMM"
            company[side] = _gemms(model, tokens, way.sms, _LASTING * time.ms)
            sides.take(side, kind, way.call, way.check, company=company[side])
    sides.run()
    for side, beside in company.items():
        if not sides.medians(side, kind):  # lost on some rank
            continue
        if min(bench.gather(beside.shortest_lead())) < 0:
            sides.lose(side, kind, bench.mode, "the GEMM ended before the push", failed=True)
        else:
            made += _rate(sides, side, kind, sent, judged)
    return made + sides.lost


def exchange(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    shape = model.shape(tokens)
    if bench.ranks == 1:
        return [Record("exchange", shape, "-", "-", bench.mode, note="needs several ranks")]
    sides, taking = bench.sides("exchange", shape), []
    for kind in KINDS:
        where = dict(rank=bench.rank, device=bench.clock.device)
        idx = routed(kind, tokens, model.experts, model.top_k, **where)
        given = inputs(bench, model, idx)
        ends = Ends(sides, model, given, dist.group.WORLD)
        for name, transport in transports(sides, model, given, dist.group.WORLD, kind).items():
            ends.take_part(f"{name}, {kind}", transport)
            taking.append(f"{name}, {kind}")
    sides.run()
    made = []
    for side in taking:
        for what in ("dispatch", "dispatch backward", "combine", "combine backward"):
            made += sides.record(side, what)
    return made + sides.lost


def plan(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    device, made = bench.clock.device, []
    for ranks in sorted({PLAN_RANKS, bench.ranks} - {1}):
        sides = bench.sides("plan", model.shape(tokens))
        received, local = ranks * tokens, model.experts // ranks
        rows = Budget(ROOM, device).rows(tokens, model.top_k, ranks, local)
        for kind in KINDS:
            idx = routed(kind, received, model.experts, model.top_k, rank=0, device=device)
            prob = probabilities(received, model.top_k, rank=0, device=device)
            size = dict(first_expert=bench.rank % ranks * local, local_experts=local, rows=rows)

            def call(
                idx: Any = idx, prob: Any = prob, size: Any = size, by: str = bench.backend
            ) -> Any:
                return make_plan(idx, prob, **size, backend=by)

            exact = call(by="reference")[:5]
            sides.take(
                f"EP {ranks}, {kind}",
                "plan",
                call,
                lambda p, exact=exact: differing(p[:5], exact, PLAN_NAMES),
            )
        sides.run()
        for kind in KINDS:
            judged = dict(other=PLAN_ASKED, bars=(1.0, None), note=f"asked {PLAN_ASKED} ms")
            asked = judged if tokens == TOKENS else {}
            made += sides.record(f"EP {ranks}, {kind}", "plan", **asked)
        made += sides.lost
    return made
