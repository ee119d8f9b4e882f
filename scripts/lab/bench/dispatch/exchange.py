"""Suites `wire`, `exchange` and `plan`: the parts of an expert-parallel layer around its experts.

`wire` is the push of a dispatch, with few SMs and with all, alone and next to a grouped GEMM on the
others; `exchange` is dispatch and combine of each transport, and their backwards; `plan` is the
routing plan of received routing.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.routing.plan import make_plan
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions, exchange_of
from phalanx.parallel.dispatcher.transport import refuse
from phalanx.scripts.lab.bench.dispatch.ends import (
    CAPACITY_FACTOR,
    PLAN_NAMES,
    TIMEOUT,
    ExchangeEnds,
    all_ranks,
    inputs,
    transports,
)
from phalanx.scripts.lab.bench.loads import BackgroundLoad, Gemms
from phalanx.scripts.lab.bench.models import (
    DEEPSEEK,
    GPUS,
    PLAN_RANKS,
    PLAN_TARGET,
    TOKENS,
    WIRE_SMS,
    WIRE_TARGETS,
    Model,
)
from phalanx.scripts.lab.bench.problems import BF16, random
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.routing import KINDS, OF_EIGHT, bytes_sent, probabilities, routed
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, differing

_LASTING = 3.0  # duration of the GEMM that overlaps a push, over that of the push alone


def wire(bench: Bench, model: Model, tokens: int) -> list[Record]:
    shape, device = model.shape(tokens), bench.clock.device
    if why := refuse("symm", all_ranks(), BF16):
        return [Record("wire", shape, "push", "-", bench.mode, note=why)]
    records: list[Record] = []
    kinds = KINDS if bench.ranks >= GPUS else (OF_EIGHT, *KINDS)
    for kind in kinds:
        rank_device: dict[str, Any] = dict(rank=bench.rank, device=device)
        idx = routed(kind, tokens, model.experts, model.top_k, **rank_device)
        sizes: dict[str, Any] = dict(experts=model.experts, rank=bench.rank, ranks=bench.ranks)
        sent = bench.gather(bytes_sent(idx, model.hidden, **sizes))
        x = random(tokens, model.hidden, device=device)
        side = torch.zeros(-(-8 * idx.numel() // 16) * 4, dtype=torch.int32, device=device)
        check = functools.partial(_arrived, bench, model, *_everywhere(x, idx))
        pushes = {
            f"{sms or 'all'} SMs": (sms, _push(bench, model, x, idx, side, sms)) for sms in WIRE_SMS
        }
        judged = model == DEEPSEEK and tokens == TOKENS and kind == kinds[0]
        alone = bench.timings("wire", shape)
        for name, (_, push) in pushes.items():
            alone.add(Case(name, kind, push, check=check))
        alone.run()
        for name in pushes:
            records += _rate(alone, name, kind, sent, judged)
        records += alone.skipped
        overlapped, loads = bench.timings("wire", shape), {}
        for name, (sms, push) in pushes.items():
            time = alone.time(name, kind)
            if sms and time is not None:
                name = f"{name}, beside a GEMM"
                loads[name] = _gemms(model, tokens, sms, _LASTING * time.ms)
                overlapped.add(Case(name, kind, push, check=check, load=loads[name]))
        overlapped.run()
        for name, load in loads.items():
            if not overlapped.medians(name, kind):  # skipped on all ranks
                continue
            if min(bench.gather(load.shortest_lead())) < 0:
                why = "the GEMM ended before the push"
                overlapped.skip(name, kind, bench.mode, why, failed=True)
            else:
                records += _rate(overlapped, name, kind, sent, judged)
        records += overlapped.skipped
    return records


def _gemms(model: Model, tokens: int, sms: int, ms: float) -> BackgroundLoad:
    return Gemms(model, tokens, sms, ms)


def _push(
    bench: Bench, model: Model, x: Tensor, idx: Tensor, side: Tensor, sms: int
) -> Callable[[], Tensor]:
    """Send tokens and `side` from `sms` SMs and wait for all ranks'; returns the receive buffer."""
    options, local = SymmOptions(sms, TIMEOUT), model.experts // bench.ranks
    exchange = exchange_of(
        bench.connections, all_ranks(), len(x), model.hidden, model.top_k, options
    )

    def call() -> Tensor:
        transfer = exchange.start(x, idx, side, local)
        exchange.wait(transfer)
        return exchange.rows(transfer)

    return call


def _everywhere(x: Tensor, idx: Tensor) -> list[Tensor]:
    gathered = [t.new_empty(dist.get_world_size() * len(t), *t.shape[1:]) for t in (x, idx)]
    for everywhere, local_part in zip(gathered, (x, idx), strict=True):
        dist.all_gather_into_tensor(everywhere, local_part)
    return gathered


def _arrived(bench: Bench, model: Model, x_ND: Tensor, idx_NK: Tensor, rows_ND: Tensor) -> str:
    """Why the rows for this rank's experts are not those that were sent; empty if they are."""
    read_N = (idx_NK // (model.experts // bench.ranks) == bench.rank).any(1)
    return differing([rows_ND[read_N]], [x_ND[read_N]], ["rows"])


def _rate(timings: Timings, side: str, kind: str, sent: list[int], judged: bool) -> list[Record]:
    """Record of a push, with the rate of the slowest rank."""
    times = timings.medians(side, kind)
    if not times:
        return []
    rate = min(size / time.ms * 1e-6 for size, time in zip(sent, times, strict=True))
    case = Case(side, kind)
    if judged and (target := WIRE_TARGETS.get(side)):
        slowest = max(time.ms for time in times)
        note = f"asked {target} GB/s"
        case = Case(side, kind, against=slowest * rate / target, bars=(1.0, None), note=note)
    return [replace(record, gbs=rate) for record in timings.record(case)]


def exchange(bench: Bench, model: Model, tokens: int) -> list[Record]:
    shape, world = model.shape(tokens), all_ranks()
    if bench.ranks == 1:
        return [Record("exchange", shape, "-", "-", bench.mode, note="needs several ranks")]
    timings, cases = bench.timings("exchange", shape), list[Case]()
    for kind in KINDS:
        rank_device: dict[str, Any] = dict(rank=bench.rank, device=bench.clock.device)
        idx = routed(kind, tokens, model.experts, model.top_k, **rank_device)
        batch = inputs(bench, model, idx)
        ends = ExchangeEnds(timings, model, batch, world)
        for name, transport in transports(timings, model, batch, world, kind).items():
            cases += ends.cases(f"{name}, {kind}", transport)
    return timings.measure(cases)


def plan(bench: Bench, model: Model, tokens: int) -> list[Record]:
    device, records = bench.clock.device, []
    asked: dict[str, Any] = {}
    if tokens == TOKENS:
        asked = dict(against=PLAN_TARGET, bars=(1.0, None), note=f"asked {PLAN_TARGET} ms")
    for ranks in sorted({PLAN_RANKS, bench.ranks} - {1}):
        received, local = ranks * tokens, model.experts // ranks
        rows = Budget(CAPACITY_FACTOR, device).rows(tokens, model.top_k, ranks, local)
        size: dict[str, Any] = dict(
            first_expert=bench.rank % ranks * local, local_experts=local, rows=rows
        )
        cases = []
        for kind in KINDS:
            idx = routed(kind, received, model.experts, model.top_k, rank=0, device=device)
            prob = probabilities(received, model.top_k, rank=0, device=device)
            call = functools.partial(make_plan, idx, prob, **size)
            expected = call(backend="reference")[:5]
            timed = functools.partial(call, backend=bench.backend)
            check = lambda p, e=expected: differing(p[:5], e, PLAN_NAMES)  # noqa: E731
            cases.append(Case(f"EP {ranks}, {kind}", "plan", timed, check=check, **asked))
        records += bench.timings("plan", model.shape(tokens)).measure(cases)
    return records
