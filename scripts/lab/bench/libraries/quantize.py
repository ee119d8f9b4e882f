"""Quantisation kernels, against a copy that reads and writes as many bytes.

The note has the bytes moved per second, including scales, index and a transpose's padding.

Legend: S rows, C channels, L experts, O and I channels out and in.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.quantize import quantize
from phalanx.scripts.lab.bench.libraries.compared import Row, row
from phalanx.scripts.lab.bench.libraries.libraries import Sizes, drawn
from phalanx.scripts.lab.bench.problems import dirichlet
from phalanx.scripts.lab.bench.timing import Bench, Case

ROWS = {"DeepSeek-V3": (65536, 7168, 32), "GPT-OSS": (32768, 2880, 4), "Qwen3": (65536, 2048, 16)}
"""S, C, L."""
WEIGHTS = {"DeepSeek-V3 W1": (32, 4096, 7168)}  # L, O, I


def quantizing(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Time every kernel on every shape."""
    device = bench.clock.device
    for model, (S, C, L) in ROWS.items():
        label = f"{model}, {S} x {C}"
        x, offsets = drawn(S, C, device=device), torch.tensor([0, *dirichlet(S, L, 1)])
        offsets = offsets.cumsum(0).to(device, torch.int32)
        index = torch.randperm(S, device=device).to(torch.int32)
        q = quantize.quantize_rows(x)
        rows = partial(quantize.quantize_rows, x)
        yield [_measured(bench, f"quantize rows, {label}", rows, [x])]
        back = lambda q=q: (quantize.dequantize_rows(q),)  # noqa: E731
        yield [_measured(bench, f"dequantize rows, {label}", back, [*q])]
        transpose = partial(quantize.transpose_rows, q, offsets, index_S=index)
        yield [_measured(bench, f"transpose rows, {label}", transpose, [*q, index])]
        columns = partial(quantize.quantize_columns, x, offsets)
        yield [_measured(bench, f"quantize columns, {label}", columns, [x])]
        del x, q, index, rows, back, transpose, columns
        bench.clock.free()
    for model, (L, O, I) in WEIGHTS.items():  # noqa: E741
        w = drawn(L, O, I, device=device)
        weights = partial(quantize.quantize_weights, w)
        yield [_measured(bench, f"quantize weights, {model}, {L} x {O} x {I}", weights, [w])]
        del w, weights
        bench.clock.free()


def _measured(
    bench: Bench, operation: str, call: Callable[[], tuple[Any, ...]], read: list[Tensor]
) -> Row:
    written = [t for t in call() if isinstance(t, Tensor)]
    moved = sum(t.numel() * t.itemsize for t in (*read, *written))
    del written
    half = torch.empty(moved // 2, dtype=torch.uint8, device=bench.clock.device)
    target = torch.empty_like(half)
    timings = bench.timings(operation, ())
    timings.add(Case("ours", "all", call))
    timings.add(Case("copy", "all", lambda: target.copy_(half), ours=False))
    timings.run()
    result = row(timings, "copy", "all")
    rates = [f"{moved / ms * 1e-9:.3g}" for ms in (result.ours, result.theirs) if ms]
    note = "; ".join(filter(None, [f"{', '.join(rates)} TB/s", result.note]))
    return replace(result, note=note)
