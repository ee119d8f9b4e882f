"""Suites `wire`, `exchange` and `plan`: the parts of an expert-parallel layer around its experts.

`wire` is the push of a dispatch, with few SMs and with all, alone and next to a grouped GEMM that
leaves these SMs free; `exchange` is dispatch and combine of each transport, and their backwards;
`plan` is the routing plan of received routing.
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
from phalanx.scripts.bench.ends import (
    CAPACITY_FACTOR,
    PLAN_NAMES,
    TIMEOUT,
    ExchangeEnds,
    inputs,
    transports,
)
from phalanx.scripts.bench.measure import BackgroundLoad
from phalanx.scripts.bench.models import (
    DEEPSEEK,
    GPUS,
    PLAN_RANKS,
    PLAN_TARGET,
    TOKENS,
    WIRE_SMS,
    WIRE_TARGETS,
    Model,
)
from phalanx.scripts.bench.problems import BF16, random
from phalanx.scripts.bench.ranks import RankBench, RankSides, differing
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.routing import KINDS, OF_EIGHT, bytes_sent, probabilities, routed

_LASTING = 3.0
"""Duration of the GEMM that overlaps a push, over that of the push alone."""


def _gemms(model: Model, tokens: int, sms: int, ms: float) -> BackgroundLoad:
    from phalanx.scripts.bench.gemms import Gemms

    return Gemms(model, tokens, sms, ms)


def wire(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    shape, device = model.shape(tokens), bench.clock.device
    against = refuse("symm", dist.group.WORLD, BF16)
    if against:
        return [Record("wire", shape, "push", "-", bench.mode, note=against)]
    records: list[Record] = []
    kinds = KINDS if bench.ranks >= GPUS else (OF_EIGHT, *KINDS)
    for kind in kinds:
        rank_device = dict(rank=bench.rank, device=device)
        idx = routed(kind, tokens, model.experts, model.top_k, **rank_device)
        sizes = dict(experts=model.experts, rank=bench.rank, ranks=bench.ranks)
        sent = bench.gather(bytes_sent(idx, model.hidden, **sizes))
        x = random(tokens, model.hidden, device=device)
        side = torch.zeros(-(-8 * idx.numel() // 16) * 4, dtype=torch.int32, device=device)

        check = functools.partial(_arrived, bench, model, *_everywhere(x, idx))
        sides = bench.sides("wire", shape)
        variants = {}
        for sms in WIRE_SMS:
            variant = Way(_push(bench, model, x, idx, side, sms), sms or None, check)
            variants[f"{sms or 'all'} SMs"] = variant
        for name, variant in variants.items():
            sides.take(name, kind, variant.call, variant.check)
        sides.run()
        judged = model == DEEPSEEK and tokens == TOKENS and kind == kinds[0]
        for name in variants:
            records += _rate(sides, name, kind, sent, judged)
        records += sides.skipped
        records += _beside(sides, model, kind, sent, variants, judged)
    return records


class Way(NamedTuple):
    """A way to send rows to the other ranks."""

    call: Callable[[], Tensor]
    sms: int | None
    """SMs that it uses; None: all."""
    check: Callable[[Tensor], str]
    """Returns why the received rows are wrong; empty if they are right."""


def _push(
    bench: RankBench, model: Model, x: Tensor, idx: Tensor, side: Tensor, sms: int
) -> Callable[[], Tensor]:
    """A call that sends tokens and `side` from a number of SMs and waits for those of all ranks.

    It returns the buffer that rows arrive in.
    """
    options, local = SymmOptions(comm_sms=sms, timeout=TIMEOUT), model.experts // bench.ranks
    exchange = exchange_of(dist.group.WORLD, len(x), model.hidden, model.top_k, options)

    def call() -> Tensor:
        transfer = exchange.start(x, idx, side, local)
        exchange.wait(transfer)
        return exchange.rows(transfer)

    return call


def _everywhere(x: Tensor, idx: Tensor) -> list[Tensor]:
    """Tokens of all ranks, and their experts."""
    gathered = [t.new_empty(dist.get_world_size() * len(t), *t.shape[1:]) for t in (x, idx)]
    for all_ranks, local_part in zip(gathered, (x, idx), strict=True):
        dist.all_gather_into_tensor(all_ranks, local_part)
    return gathered


def _arrived(bench: RankBench, model: Model, x_ND: Tensor, idx_NK: Tensor, rows_ND: Tensor) -> str:
    """Why the rows for this rank's experts are not those that were sent; empty if they are."""
    read_N = (idx_NK // (model.experts // bench.ranks) == bench.rank).any(1)
    return differing([rows_ND[read_N]], [x_ND[read_N]], ["rows"])


def _rate(sides: RankSides, side: str, kind: str, sent: list[int], judged: bool) -> list[Record]:
    """Record of a push, with the rate of the slowest rank."""
    times = sides.medians(side, kind)
    if not times:
        return []
    rate = min(size / time.ms * 1e-6 for size, time in zip(sent, times, strict=True))
    asked = WIRE_TARGETS.get(side) if judged else None
    slowest = max(time.ms for time in times)
    other = None if asked is None else slowest * rate / asked
    bars = None if asked is None else (1.0, None)
    note = "" if asked is None else f"asked {asked} GB/s"
    timed = sides.record(side, kind, other=other, bars=bars, note=note)
    return [replace(record, gbs=rate) for record in timed]


def _beside(
    alone: RankSides,
    model: Model,
    kind: str,
    sent: list[int],
    variants: dict[str, Way],
    judged: bool,
) -> list[Record]:
    """Time the pushes that leave SMs free again, with a GEMM on those."""
    bench, tokens = alone.bench, alone.shape[0]
    sides, records, background_load = bench.sides("wire", alone.shape), [], {}
    for name, variant in variants.items():
        time = alone.time(name, kind)
        if variant.sms is not None and time is not None:
            side = f"{name}, beside a GEMM"
            background_load[side] = _gemms(model, tokens, variant.sms, _LASTING * time.ms)
            sides.take(
                side, kind, variant.call, variant.check, background_load=background_load[side]
            )
    sides.run()
    for side, load in background_load.items():
        if not sides.medians(side, kind):  # lost on some rank
            continue
        if min(bench.gather(load.shortest_lead())) < 0:
            sides.skip(side, kind, bench.mode, "the GEMM ended before the push", failed=True)
        else:
            records += _rate(sides, side, kind, sent, judged)
    return records + sides.skipped


def exchange(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    shape = model.shape(tokens)
    if bench.ranks == 1:
        return [Record("exchange", shape, "-", "-", bench.mode, note="needs several ranks")]
    sides, timed_sides = bench.sides("exchange", shape), []
    for kind in KINDS:
        rank_device = dict(rank=bench.rank, device=bench.clock.device)
        idx = routed(kind, tokens, model.experts, model.top_k, **rank_device)
        batch = inputs(bench, model, idx)
        ends = ExchangeEnds(sides, model, batch, dist.group.WORLD)
        for name, transport in transports(sides, model, batch, dist.group.WORLD, kind).items():
            ends.add_sides(f"{name}, {kind}", transport)
            timed_sides.append(f"{name}, {kind}")
    sides.run()
    records = []
    for side in timed_sides:
        for pass_name in ("dispatch", "dispatch backward", "combine", "combine backward"):
            records += sides.record(side, pass_name)
    return records + sides.skipped


def plan(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    device, records = bench.clock.device, []
    for ranks in sorted({PLAN_RANKS, bench.ranks} - {1}):
        sides = bench.sides("plan", model.shape(tokens))
        received, local = ranks * tokens, model.experts // ranks
        rows = Budget(CAPACITY_FACTOR, device).rows(tokens, model.top_k, ranks, local)
        for kind in KINDS:
            idx = routed(kind, received, model.experts, model.top_k, rank=0, device=device)
            prob = probabilities(received, model.top_k, rank=0, device=device)
            size = dict(first_expert=bench.rank % ranks * local, local_experts=local, rows=rows)

            def call(
                idx: Any = idx, prob: Any = prob, size: Any = size, by: str = bench.backend
            ) -> Any:
                return make_plan(idx, prob, **size, backend=by)

            expected = call(by="reference")[:5]
            sides.take(
                f"EP {ranks}, {kind}",
                "plan",
                call,
                lambda p, expected=expected: differing(p[:5], expected, PLAN_NAMES),
            )
        sides.run()
        for kind in KINDS:
            judged = dict(other=PLAN_TARGET, bars=(1.0, None), note=f"asked {PLAN_TARGET} ms")
            asked = judged if tokens == TOKENS else {}
            records += sides.record(f"EP {ranks}, {kind}", "plan", **asked)
        records += sides.skipped
    return records
