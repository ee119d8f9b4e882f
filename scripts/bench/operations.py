"""Suites `margins`, `skew` and `gather`: single kernels, and the expert MLP under uneven routing.

`margins` leaves SMs free, first idle and then occupied by a copy kernel; `skew` gives some
experts most rows; `gather` compares rows gathered by an index with contiguous rows.
"""

from collections.abc import Callable

import torch

from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.experts.wgrad import wgrad
from phalanx.kernels.sm90.jit.launch import sms
from phalanx.scripts.bench import mlp
from phalanx.scripts.bench.measure import BackgroundLoad, Bench, Sides
from phalanx.scripts.bench.problems import (
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
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.shapes import (
    GATHER_BAR,
    MARGINS,
    SKEW_BAR,
    ZIPF,
    Shape,
    margin_bar,
    occupied_bars,
)

MakeBackgroundLoad = Callable[[int, float], BackgroundLoad]
_LASTING = 2.5
"""Duration of the copies over that of the kernel on the remaining SMs."""


def with_margin(p: Experts) -> dict[str, tuple[Callable[[int], object], float]]:
    """Each kernel as a function of the SMs that it leaves free, and its FLOP."""
    device, sizes = p.device, (p.offsets, SWIGLU)
    h, a = (random(p.S, width, device=device) for width in (2 * p.F, p.F))
    y, dw1 = torch.empty_like(p.x_SD), torch.empty_like(p.w1)
    flops_FD = 2 * p.S * p.D * p.F
    return {
        "rows": (lambda m: grouped_gemm(a, p.w2, p.offsets, out_SN=y, sm_margin=m), flops_FD),
        "fc1_act": (
            lambda m: fc1_act(p.x_SD, p.w1, *sizes, prob_S=p.prob_S, sm_margin=m),
            2 * flops_FD,
        ),
        "fc2_dgrad_dact": (
            lambda m: fc2_dgrad_dact(p.dy_SD, p.w2, h, *sizes, prob_S=p.prob_S, sm_margin=m),
            flops_FD,
        ),
        "wgrad": (
            lambda m: wgrad(h, p.x_SD, p.offsets, out_LOI=dw1, order_L=p.order_L, sm_margin=m),
            2 * flops_FD,
        ),
    }


def copying(programs: int, ms: float) -> BackgroundLoad:
    from phalanx.scripts.bench.background_load import Copying

    return Copying(programs, ms)


def margins(
    bench: Bench, shape: Shape, background_load: MakeBackgroundLoad = copying
) -> list[Record]:
    p = experts(shape, dirichlet(shape[0], shape[3]), bench.clock.device)
    records: list[Record] = []
    for name, (call, flops) in with_margin(p).items():
        sides = bench.sides("margins", shape)
        records += _free(sides, name, call, flops)
        records += _occupied(sides, name, call, flops, background_load)
        records += sides.skipped
        bench.clock.free()
    return records


def _free(sides: Sides, name: str, call: Callable[[int], object], flops: float) -> list[Record]:
    for m in MARGINS:
        sides.add(f"{m} free", name, lambda m=m: call(m))
    sides.run()
    full, total, records = sides.time("0 free", name), sms(sides.bench.clock.device), []
    for m in MARGINS:
        bars = (margin_bar(m, total), None) if m and full else None
        other = full.ms if m and full else None
        records += sides.record(f"{m} free", name, flops=flops, other=other, bars=bars)
    return records


def _occupied(
    free: Sides,
    name: str,
    call: Callable[[int], object],
    flops: float,
    background_load: MakeBackgroundLoad,
) -> list[Record]:
    """Time kernels with copies on the margin's SMs, interleaved with the full rate."""
    bench, total = free.bench, sms(free.bench.clock.device)
    sides = bench.sides("margins", free.shape)
    full = free.time("0 free", name)
    if full is None:
        return []
    loads: dict[int, BackgroundLoad] = {}
    sides.add("0 occupied", name, lambda: call(0))
    for m in MARGINS[1:]:
        loads[m] = background_load(m, _LASTING * full.ms * total / (total - m) + 0.2)
        sides.add(f"{m} occupied", name, lambda m=m: call(m), background_load=loads[m])
    sides.run()
    alone, records = sides.time("0 occupied", name), []
    for m, copies in loads.items():
        lead = copies.shortest_lead()
        results = sides.record(
            f"{m} occupied",
            name,
            flops=flops,
            other=None if alone is None else alone.ms,
            bars=occupied_bars(m, total),
            note=f"copies {copies.gigabytes_per_second:.0f} GB/s, {lead:.2f} ms longer",
        )
        if lead < 0:
            sides.skip(f"{m} occupied", name, "graph", "the copies ended too early", failed=True)
            results = []
        records += results
    return records + sides.skipped


def skew(bench: Bench, shape: Shape) -> list[Record]:
    S, _, _, L = shape
    sides, routings = (
        bench.sides("skew", shape),
        {
            "balanced": balanced(S, L),
            "drawn evenly": drawn(S, L, 0.0),
            "zipf": drawn(S, L, ZIPF),
        },
    )
    p = experts(shape, routings["balanced"], bench.clock.device)
    for leaf in (p.x_SD, p.w1, p.w2):
        leaf.requires_grad_()
    routed = {routing: p.routed(counts) for routing, counts in routings.items()}
    for routing, q in routed.items():  # `routed` outlives the graphs, which read its tensors
        forward = mlp.ours(q, bench.backend)
        both = mlp.with_backward(forward, [p.x_SD, p.w1, p.w2], p.dy_SD)
        sides.add(routing, "forward", forward)
        sides.add(routing, "both", both)
    sides.run()
    records = []
    for pass_name, flops in (("forward", p.forward_flops), ("backward", 2 * p.forward_flops)):
        base = sides.time("balanced", pass_name)
        for routing, counts in routings.items():
            other = None if base is None or routing == "balanced" else base.ms
            most = f"most rows {max(counts) * L / S:.2f} of the mean"
            bars = (SKEW_BAR, None) if routing == "zipf" else None
            records += sides.record(
                routing, pass_name, flops=flops, other=other, bars=bars, note=most
            )
    return [*records, *sides.skipped]


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
    flops_FD, probs, order = 2 * S * D * F, dict(prob_S=p.prob_S), dict(order_L=p.order_L)
    cases = {
        "fc1_act": (
            2 * flops_FD,
            lambda s, **at: fc1_act(s, p.w1, *ends, **at, **probs),
            x,
            p.x_SD,
        ),
        "fc2_dgrad_dact": (
            flops_FD,
            lambda s, **at: fc2_dgrad_dact(s, p.w2, h, *ends, **at, **probs),
            dy,
            p.dy_SD,
        ),
        "wgrad of w1": (
            2 * flops_FD,
            lambda s, index_S=None: wgrad(h, s, p.offsets, v_index_S=index_S, out_LOI=dw1, **order),
            x,
            p.x_SD,
        ),
        "wgrad of w2": (
            flops_FD,
            lambda s, index_S=None: wgrad(s, a, p.offsets, d_index_S=index_S, out_LOI=dw2, **order),
            dy,
            p.dy_SD,
        ),
    }
    sides, records = bench.sides("gather", shape), []
    for name, (_, call, picked, side_by_side) in cases.items():
        sides.add("contiguous", name, lambda c=call, s=side_by_side: c(s))
        sides.add("gathered", name, lambda c=call, s=picked: c(s, index_S=index))
    sides.run()
    for name, (flops, *_) in cases.items():
        base = sides.time("contiguous", name)
        other = None if base is None else base.ms
        records += sides.record("contiguous", name, flops=flops)
        bars = (GATHER_BAR, None)
        records += sides.record("gathered", name, flops=flops, other=other, bars=bars)
    return [*records, *sides.skipped]
