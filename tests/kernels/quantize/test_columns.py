"""Transposed expert rows by interpreted kernels: the bits of the definition."""

import torch
from torch import Tensor

from phalanx.kernels.quantize import blocks as definition
from phalanx.kernels.quantize import quantize
from phalanx.kernels.quantize.blocks import Quantized, QuantizedColumns
from tests.kernels.interpreter import interpret
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import COUNTS, expert_rows, offsets_of
from tests.kernels.quantize.same import codes
from tests.kernels.quantize.test_quantize import CPU, E4M3, E5M2, dirty, same


def check_columns(x: Tensor, counts: list[int], parts: int = 1, dtype: torch.dtype = E4M3) -> None:
    from phalanx.kernels.quantize import blocks_triton

    offsets = offsets_of(counts)
    made = (*x.shape, len(counts), parts)
    got = quantize.empty_columns(*made, dtype=dtype, device=CPU)
    dirty(*got)
    blocks_triton.write_columns(x, None, None, offsets, got, parts)
    same(got, definition.quantize_columns(x, offsets, parts, dtype))


def check_transpose(
    q: Quantized, counts: list[int], parts: int = 1, index: Tensor | None = None
) -> QuantizedColumns:
    from phalanx.kernels.quantize import blocks_triton

    offsets = offsets_of(counts)
    S = len(q.data) if index is None else len(index)
    made = (S, q.data.shape[1], len(counts), parts)
    got = quantize.empty_columns(*made, dtype=q.data.dtype, device=CPU)
    dirty(*got)
    blocks_triton.write_columns(*q, index, offsets, got, parts)
    same(got, definition.transpose_rows(q, offsets, index_S=index, parts=parts))
    return got


def poisoned(q: Quantized, used: int) -> Quantized:
    """NaN in all rows that no expert has."""
    q.data.view(torch.uint8)[used:] = 0x7F
    q.scale[used:] = problems.NAN
    return q


def interpreted() -> None:
    _columns()
    _transposes()


def _columns() -> None:
    from phalanx.kernels.quantize import blocks_triton

    for name, counts in COUNTS.items():
        offsets = offsets_of(counts)
        starts = torch.full_like(offsets, -1)
        blocks_triton.starts(offsets, starts)
        assert torch.equal(starts, definition.column_offsets(offsets))
        wide = name == "ones"
        if name == "one has all":  # as for transposes
            continue
        check_columns(expert_rows(counts, 130 if wide else 20), counts, 1 + wide)
    check_columns(expert_rows([3, 2], 20).float(), [3, 2], 1, E5M2)
    check_columns(problems.special(), [3, 4])
    check_columns(torch.zeros(0, 20), [0, 0])


def _transposes() -> None:
    for name, counts in COUNTS.items():
        wide, S = name == "edges", sum(counts) + 5
        parts, dtype = 1 + wide, E5M2 if name == "ones" else E4M3
        q = definition.quantize_rows(expert_rows(counts, 130 if wide else 20), parts, dtype)
        check_transpose(poisoned(q, sum(counts)), counts, parts)
        if name in ("one has all", "one expert"):
            continue
        # Of a table, in any order; what no expert has names no row.
        g = torch.Generator().manual_seed(S)
        index = torch.randint(0, S, (S,), generator=g, dtype=torch.int32)
        index[sum(counts) :] = 2**31 - 1
        table = definition.quantize_rows(problems.spread(S, 20), dtype=dtype)
        check_transpose(table, counts, index=index)
    special = definition.quantize_rows(problems.special())
    made = check_transpose(special, [3, 4])
    # Row 3 has an infinity: NaN in all of its channels, but finite scales.
    assert bool((codes(made.data_CT)[:, 128] == 0x7F).all()) and bool(made.scale.isfinite().all())
    anything = torch.randint(0, 256, (9, 40), dtype=torch.uint8, generator=torch.manual_seed(1))
    anything[anything & 0x7F == 0x7F] = 0
    anything[4] = 0
    scale = torch.exp2(torch.arange(9.0)[:, None] * 8 - 64)  # of the zeros, any
    for factor in (1.0, 2.0**-64):
        scale = scale * factor
        scale[4] = 2.0**120
        check_transpose(Quantized(anything.view(E4M3), scale), [9])
    # Rows far below the largest of their block: the last bits that are left of them, and none.
    for dtype in (E4M3, E5M2):
        wide = torch.exp2(-torch.arange(40.0))[:, None] * problems.spread(1, 40).float().abs()
        check_transpose(definition.quantize_rows(wide, dtype=dtype), [40])
    # Scales that lie block by block.
    q = definition.quantize_rows(expert_rows([3, 2], 260))
    check_transpose(Quantized(q.data, q.scale.T.contiguous().T), [3, 2])
    # The largest numbers, which are infinite when they are given back, and denormal ones.
    ends = torch.cat([problems.below(3.38e38)[:3], problems.below(2.0**-126)[:3]])
    check_transpose(definition.quantize_rows(ends), [3, 3])


def test_kernels_interpreted() -> None:
    interpret(__name__)
