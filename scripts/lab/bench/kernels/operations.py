"""Suites `margins`, `skew` and `gather`: single kernels, and the expert MLP under uneven routing.

`margins` leaves SMs free, first idle and then occupied by a copy kernel; `skew` gives some
experts most rows; `gather` compares rows gathered by an index with contiguous rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.jit.launch import sms
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from phalanx.scripts.lab.bench.kernels import mlp
from phalanx.scripts.lab.bench.loads import BackgroundLoad, Copies
from phalanx.scripts.lab.bench.problems import (
    BF16,
    SWIGLU,
    Experts,
    balanced,
    dirichlet,
    drawn,
    experts,
    index_of,
    random,
)
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import (
    GATHER_BAR,
    MARGINS,
    SKEW_BAR,
    ZIPF,
    Bars,
    Shape,
    margin_bar,
    occupied_bars,
)
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, passes

MakeLoad = Callable[[int, float], BackgroundLoad]
Launch = Callable[[LaunchOptions], object]
_LASTING = 2.5  # duration of the copies over that of the kernel on the remaining SMs


def with_margin(p: Experts) -> dict[str, tuple[Launch, float]]:
    """Each kernel as a function of its options, and its FLOP."""
    device, sizes = p.device, (p.offsets, SWIGLU)
    h, a = (random(p.S, width, device=device) for width in (2 * p.F, p.F))
    y, dw1 = torch.empty_like(p.x_SD), torch.empty_like(p.w1)
    operands = Operand(h), Operand(p.x_SD)
    flops_FD = 2 * p.S * p.D * p.F
    return {
        "rows": (lambda o: grouped_gemm(a, p.w2, p.offsets, out_SN=y, options=o), flops_FD),
        "fc1_act": (
            lambda o: fc1_act(p.x_SD, p.w1, *sizes, prob_S=p.prob_S, options=o),
            2 * flops_FD,
        ),
        "fc2_dgrad_dact": (
            lambda o: fc2_dgrad_dact(p.dy_SD, p.w2.mT, h, *sizes, prob_S=p.prob_S, options=o),
            flops_FD,
        ),
        "wgrad": (
            lambda o: wgrad(*operands, p.offsets, out_LOI=dw1, order_L=p.order_L, options=o),
            2 * flops_FD,
        ),
    }


def margins(bench: Bench, shape: Shape, make_load: MakeLoad = Copies) -> list[Record]:
    p = experts(shape, dirichlet(shape[0], shape[3]), bench.clock.device)
    records: list[Record] = []
    for name, (call, flops) in with_margin(p).items():
        timings = bench.timings("margins", shape)
        records += timings.measure(_free(name, call, flops, sms(bench.clock.device)))
        if full := timings.time("0 free", name):
            records += _occupied(
                bench.timings("margins", shape), name, call, flops, full.ms, make_load
            )
        bench.clock.free()
    return records


def _free(name: str, call: Launch, flops: float, total: int) -> Iterator[Case]:
    for m in MARGINS:
        judged: dict[str, Any] = {}
        if m:
            judged = dict(against="0 free", bars=(margin_bar(m, total), None))
        yield Case(f"{m} free", name, partial(call, LaunchOptions(m)), flops, **judged)


def _occupied(
    timings: Timings,
    name: str,
    call: Launch,
    flops: float,
    full_ms: float,
    make_load: MakeLoad,
) -> list[Record]:
    """Time kernels with copies on the margin's SMs, interleaved with the full rate."""
    total = sms(timings.bench.clock.device)
    timings.add(Case("0 occupied", name, lambda: call(DEFAULT)))
    cases = []
    for m in MARGINS[1:]:
        load = make_load(m, _LASTING * full_ms * total / (total - m) + 0.2)
        judged: dict[str, Any] = dict(against="0 occupied", bars=occupied_bars(m, total), load=load)
        cases.append(Case(f"{m} occupied", name, partial(call, LaunchOptions(m)), flops, **judged))
        timings.add(cases[-1])
    timings.run()
    records = []
    for case in cases:
        assert case.load is not None
        lead, rate = case.load.shortest_lead(), case.load.gigabytes_per_second
        if lead < 0:
            why = "the copies ended too early"
            timings.skip(case.side, name, timings.bench.mode, why, failed=True)
        else:
            note = f"copies {rate:.0f} GB/s, {lead:.2f} ms longer"
            records += timings.record(replace(case, note=note))
    return records + timings.skipped


def skew(bench: Bench, shape: Shape) -> list[Record]:
    S, _, _, L = shape
    routings = {
        "balanced": balanced(S, L),
        "drawn evenly": drawn(S, L, 0.0),
        "zipf": drawn(S, L, ZIPF),
    }
    p = experts(shape, routings["balanced"], bench.clock.device)
    for leaf in (p.x_SD, p.w1, p.w2):
        leaf.requires_grad_()
    bars, cases = Bars((SKEW_BAR, SKEW_BAR), (None, None)), list[Case]()
    for routing, counts in routings.items():
        forward = mlp.ours(p.routed(counts), bench.backend)
        both = mlp.with_backward(forward, [p.x_SD, p.w1, p.w2], p.dy_SD)
        against = None if routing == "balanced" else "balanced"
        judged = bars if routing == "zipf" else None
        note = f"most rows {max(counts) * L / S:.2f} of the mean"
        options: dict[str, Any] = dict(against=against, note=note)
        cases += passes(routing, forward, both, p.forward_flops, judged, **options)
    return bench.timings("skew", shape).measure(cases)


def gather(bench: Bench, shape: Shape) -> list[Record]:
    device = bench.clock.device
    if len(shape) == 5:  # a layer: K rows of every token, nearly balanced
        T, D, F, L, K = shape
        S = T * K
        counts = drawn(S, L, 0.0)
    else:
        S, D, F, L = shape
        counts = dirichlet(S, L)
        T = max(S // min(8, L), *counts)
    p = experts((S, D, F, L), counts, device)
    index, ends = index_of(counts, T, device), (p.offsets, SWIGLU)
    x, dy = (random(T, D, device=device, scale=0.2) for _ in range(2))
    h, a = (random(S, width, device=device) for width in (2 * F, F))
    dw1, dw2 = (torch.empty_like(w, dtype=BF16) for w in (p.w1, p.w2))
    order = p.order_L
    flops_FD, probs = 2 * S * D * F, p.prob_S
    cases: dict[str, tuple[float, Callable[..., object], Tensor, Tensor]] = {
        "fc1_act": (
            2 * flops_FD,
            lambda s, at=None: fc1_act(s, p.w1, *ends, index_S=at, prob_S=probs),
            x,
            p.x_SD,
        ),
        "fc2_dgrad_dact": (
            flops_FD,
            lambda s, at=None: fc2_dgrad_dact(s, p.w2.mT, h, *ends, index_S=at, prob_S=probs),
            dy,
            p.dy_SD,
        ),
        "wgrad of w1": (
            2 * flops_FD,
            lambda s, at=None: wgrad(
                *(Operand(h), Operand(s, at is not None), p.offsets),
                **dict(index_S=at, out_LOI=dw1, order_L=order),
            ),
            x,
            p.x_SD,
        ),
        "wgrad of w2": (
            flops_FD,
            lambda s, at=None: wgrad(
                *(Operand(s, at is not None), Operand(a), p.offsets),
                **dict(index_S=at, out_LOI=dw2, order_L=order),
            ),
            dy,
            p.dy_SD,
        ),
    }
    timed = []
    for name, (flops, call, picked, contiguous) in cases.items():
        timed.append(Case("contiguous", name, partial(call, contiguous), flops))
        judged: dict[str, Any] = dict(against="contiguous", bars=(GATHER_BAR, None))
        timed.append(Case("gathered", name, partial(call, picked, index), flops, **judged))
    return bench.timings("gather", shape).measure(timed)
