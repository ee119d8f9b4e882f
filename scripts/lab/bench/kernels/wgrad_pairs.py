"""Suite `wgrad_pairs`: weight gradients of two micro-batches in one pass over fp32 sums, or in two.

Each micro-batch has S rows with a routing of its own. In bf16 one operand is gathered, in FP8 both
were transposed outside the timed region.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.quantize.quantize import column_offsets, quantize_columns
from phalanx.kernels.sm90.wgrad.wgrad import wgrad, wgrad_pair
from phalanx.scripts.lab.bench.problems import drawn, index_of, offsets_of, order_of, random
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import WGRAD_PAIRS, Shape
from phalanx.scripts.lab.bench.timing import Bench, Case

_TOP_K = 4  # experts of a token, for the number of tokens that rows are gathered from


def suite(bench: Bench, shape: Shape) -> list[Record]:
    """Time both formats for each weight; the ratio is the time of two passes over that of one."""
    S, D, F, L = shape
    device, bars, cases = bench.clock.device, WGRAD_PAIRS.get(shape), list[Case]()
    routing = drawn(S, L, 0.0)
    counts, order = (routing, routing[::-1]), order_of(routing, device)
    for weight, O, I, parts in (("w1", 2 * F, D, 2), ("w2", D, F, 1)):  # noqa: E741
        sums = torch.zeros(L, O, I, device=device)
        kinds = {
            "": [_in_bf16(c, O, I, device, gather_d=weight == "w2") for c in counts],
            "fp8, ": [_in_fp8(c, O, I, device, parts) for c in counts],
        }
        name, flops = f"wgrad of {weight}", 2 * 2 * S * O * I
        how: dict[str, Any] = dict(accumulate=True, order_L=order)
        for kind, (first, second) in kinds.items():
            twice = f"{kind}two passes"
            apart = partial(_apart, (first, second), sums, **how)
            once = partial(wgrad_pair, first, second, sums, **how)
            cases.append(Case(twice, name, apart, flops))
            cases.append(Case(f"{kind}one pass", name, once, flops, against=twice, bars=bars))
    return bench.timings("wgrad_pairs", shape).measure(cases)


def _apart(rows: Sequence[ExpertRows], sums: Tensor, **how: Any) -> None:
    for d, v, offsets, index_S in rows:
        wgrad(d, v, offsets, index_S=index_S, out_LOI=sums, **how)


def _in_bf16(
    counts: list[int],
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    device: torch.device,
    *,
    gather_d: bool,
) -> ExpertRows:
    S = sum(counts)
    T = max(S // _TOP_K, *counts)
    d = random(T if gather_d else S, O, device=device)
    v = random(S if gather_d else T, I, device=device)
    operands = Operand(d, gather=gather_d), Operand(v, gather=not gather_d)
    return ExpertRows(*operands, offsets_of(counts, device), index_of(counts, T, device))


def _in_fp8(
    counts: list[int],
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    device: torch.device,
    parts: int,
) -> ExpertRows:
    S, offsets = sum(counts), offsets_of(counts, device)
    d, v = (
        Operand(quantize_columns(random(S, n, device=device), offsets, p), parts=p)
        for n, p in ((O, parts), (I, 1))
    )
    return ExpertRows(d, v, column_offsets(offsets))
