"""Suite `fp8_gemms`: grouped GEMMs in FP8 against those in bf16, on operands quantised beforehand.

In bf16, weights are read transposed and weight gradients gather, as in training; in FP8, operands
were transposed outside the timed region.
"""

from typing import Any

import torch

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.quantize import (
    column_offsets,
    quantize_columns,
    quantize_rows,
    quantize_weights,
)
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from phalanx.scripts.lab.bench.clocks import Call
from phalanx.scripts.lab.bench.problems import SWIGLU, dirichlet, experts, index_of, random
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import FP8_GEMMS, Shape
from phalanx.scripts.lab.bench.timing import Bench, Case


def suite(bench: Bench, shape: Shape) -> list[Record]:
    """Time both formats of each GEMM; the ratio is bf16 time over FP8 time."""
    S, D, F, L = shape
    device, counts = bench.clock.device, dirichlet(S, L)
    T = max(S // min(8, L), *counts)
    p = experts(shape, counts, device)
    index, args = index_of(counts, T, device), (p.offsets, SWIGLU)
    x, dy = (random(T, D, device=device, scale=0.2) for _ in range(2))
    h, dh, a = (random(S, width, device=device) for width in (2 * F, 2 * F, F))
    y, dx = (torch.empty_like(p.x_SD) for _ in range(2))
    dw1, dw2 = (torch.zeros_like(w, dtype=torch.float32) for w in (p.w1, p.w2))
    row_args: dict[str, Any] = dict(index_S=index, prob_S=p.prob_S)
    wgrad_args: dict[str, Any] = dict(accumulate=True, order_L=p.order_L)

    x8, dy8, a8, dh8 = (quantize_rows(t, parts) for t, parts in ((x, 1), (dy, 1), (a, 1), (dh, 2)))
    w1, w2 = quantize_weights(p.w1, 2), quantize_weights(p.w2)
    w1_back, w2_back = (Quantized(w.data_LIO, w.scale.mT) for w in (w1, w2))
    ends_T = column_offsets(p.offsets)
    x_T, dy_T, a_T, dh_T = (
        quantize_columns(t, p.offsets, parts)
        for t, parts in ((p.x_SD, 1), (p.dy_SD, 1), (a, 1), (dh, 2))
    )

    flops_FD = 2 * S * D * F
    calls: dict[str, tuple[float, Call, Call]] = {
        "fc1_act": (
            2 * flops_FD,
            lambda: fc1_act(x, p.w1, *args, **row_args),
            lambda: fc1_act(x8, w1.forward, *args, **row_args),
        ),
        "rows of fc2": (
            flops_FD,
            lambda: grouped_gemm(a, p.w2, p.offsets, out_SN=y),
            lambda: grouped_gemm(a8, w2.forward, p.offsets, out_SN=y),
        ),
        "fc2_dgrad_dact": (
            flops_FD,
            lambda: fc2_dgrad_dact(dy, p.w2.mT, h, *args, **row_args),
            lambda: fc2_dgrad_dact(dy8, w2_back, h, *args, **row_args),
        ),
        "rows of the gradient of fc1": (
            2 * flops_FD,
            lambda: grouped_gemm(dh, p.w1.mT, p.offsets, out_SN=dx),
            lambda: grouped_gemm(dh8, w1_back, p.offsets, parts=2, out_SN=dx),
        ),
        "wgrad of w1": (
            2 * flops_FD,
            lambda: wgrad(
                *(Operand(dh), Operand(x, gather=True), p.offsets),
                **dict(index_S=index, out_LOI=dw1, **wgrad_args),
            ),
            lambda: wgrad(
                *(Operand(dh_T, parts=2), Operand(x_T), ends_T), **dict(out_LOI=dw1, **wgrad_args)
            ),
        ),
        "wgrad of w2": (
            flops_FD,
            lambda: wgrad(
                *(Operand(dy, gather=True), Operand(a), p.offsets),
                **dict(index_S=index, out_LOI=dw2, **wgrad_args),
            ),
            lambda: wgrad(
                *(Operand(dy_T), Operand(a_T), ends_T), **dict(out_LOI=dw2, **wgrad_args)
            ),
        ),
    }
    bars, cases = FP8_GEMMS.get(shape, {}), []
    for name, (flops, call, fp8_call) in calls.items():
        cases.append(Case("bf16", name, call, flops))
        cases.append(Case("fp8", name, fp8_call, flops, against="bf16", bars=bars.get(name)))
    return bench.timings("fp8_gemms", shape).measure(cases)
