"""Kernels that quantise, interpreted on a CPU: the bits of the definition, and what is refused."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.quantize import blocks as definition
from phalanx.kernels.quantize import quantize
from phalanx.kernels.quantize.blocks import Quantized, QuantizedColumns, QuantizedWeights
from tests.kernels.interpreter import interpret
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, COUNTS, FP32, WIDTHS, expert_rows, offsets_of
from tests.kernels.quantize.same import assert_same, codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")


def dirty(*tensors: Tensor) -> None:
    """What no kernel may leave there."""
    for t in tensors:
        t.view(torch.uint8).fill_(0x55)


def check_rows(x: Tensor, parts: int = 1, dtype: torch.dtype = E4M3) -> None:
    from phalanx.kernels.quantize import rows_triton

    got = quantize.empty_rows(*x.shape, parts, dtype=dtype, device=CPU)
    dirty(*got)
    rows_triton.quantize(x, got, parts)
    want = definition.quantize_rows(x, parts, dtype)
    same(got, want)
    back = torch.full_like(x, -7.0)
    rows_triton.dequantize(got, back, parts)
    assert_same_numbers(back, definition.dequantize_rows(want, parts).to(x.dtype))


def check_weights(w: Tensor, parts: int = 1) -> None:
    from phalanx.kernels.quantize import weights_triton

    got = quantize.empty_weights(*w.shape, parts, device=CPU)
    dirty(*got)
    weights_triton.quantize(w, got, parts)
    same(got, definition.quantize_weights(w, parts))


def check_columns(
    x: Tensor, counts: list[int], kind: str, parts: int = 1, dtype: torch.dtype = E4M3
) -> None:
    from phalanx.kernels.quantize import columns_triton

    offsets = offsets_of(counts)
    made = (*x.shape, len(counts), parts)
    got = quantize.empty_columns(*made, blocks=kind, dtype=dtype, device=CPU)
    dirty(*got[:2])
    columns_triton.quantize(x, None, None, offsets, got, parts)
    same(got, definition.quantize_columns(x, offsets, kind, parts, dtype))


def check_transpose(
    q: Quantized, counts: list[int], kind: str, parts: int = 1, index: Tensor | None = None
) -> QuantizedColumns:
    from phalanx.kernels.quantize import columns_triton

    offsets = offsets_of(counts)
    S = len(q.data) if index is None else len(index)
    made = (S, q.data.shape[1], len(counts), parts)
    got = quantize.empty_columns(*made, blocks=kind, dtype=q.data.dtype, device=CPU)
    dirty(*got[:2])
    columns_triton.quantize(*q, index, offsets, got, parts)
    same(got, definition.transpose_rows(q, offsets, kind, index_S=index, parts=parts))
    return got


def assert_same_numbers(got: Tensor, want: Tensor) -> None:
    """Bits, but for those of a NaN."""
    bits = torch.int16 if got.dtype == BF16 else torch.int32
    assert got.dtype == want.dtype and got.shape == want.shape
    assert bool(((got.view(bits) == want.view(bits)) | (got.isnan() & want.isnan())).all())


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        if isinstance(a, Tensor):
            assert_same(a, b)
        else:
            assert a == b


def poisoned(q: Quantized, used: int) -> Quantized:
    """NaN in all rows that no expert has."""
    q.data.view(torch.uint8)[used:] = 0x7F
    q.scale[used:] = problems.NAN
    return q


def interpreted() -> None:
    for dtype in (E4M3, E5M2):
        check_rows(problems.boundaries(BF16 if dtype == E5M2 else FP32)[:, None], dtype=dtype)
        check_rows(problems.patterns().view(-1, 128), dtype=dtype)
        check_rows(problems.below(464.0)[:: 1 if dtype == E4M3 else 5], dtype=dtype)
        check_rows(problems.special(), dtype=dtype)
    for channels, parts in WIDTHS.values():
        for rows in (0, 1, 3):
            check_rows(problems.spread(rows, channels + 8)[:, :channels], parts)
    check_weights(problems.special()[None, :, :70].contiguous())
    for O, I, parts in ((130, 127, 1), (258, 1, 2), (4, 129, 2)):  # noqa: E741
        for kind in (BF16, FP32):
            w = torch.stack([problems.spread(O, I, kind, seed=e) for e in range(2)])
            check_weights(w, parts)
    for kind in ("square", "vector"):
        _columns(kind)
        _transposes(kind)


def _columns(kind: str) -> None:
    from phalanx.kernels.quantize import columns_triton

    for name, counts in COUNTS.items():
        offsets = offsets_of(counts)
        starts = torch.full_like(offsets, -1)
        columns_triton.starts(offsets, starts)
        assert torch.equal(starts, definition.column_offsets(offsets))
        wide = name == "ones"
        if name == "one has all":  # as for transposes
            continue
        check_columns(expert_rows(counts, 130 if wide else 20), counts, kind, 1 + wide)
    check_columns(expert_rows([3, 2], 20).float(), [3, 2], kind, 1, E5M2)
    check_columns(problems.special(), [3, 4], kind)
    check_columns(torch.zeros(0, 20), [0, 0], kind)


def _transposes(kind: str) -> None:
    for name, counts in COUNTS.items():
        wide, S = name == "edges", sum(counts) + 5
        parts, dtype = 1 + wide, E5M2 if name == "ones" else E4M3
        q = definition.quantize_rows(expert_rows(counts, 130 if wide else 20), parts, dtype)
        check_transpose(poisoned(q, sum(counts)), counts, kind, parts)
        if name in ("one has all", "one expert"):
            continue
        # Of a table, in any order; what no expert has names no row.
        g = torch.Generator().manual_seed(S)
        index = torch.randint(0, S, (S,), generator=g, dtype=torch.int32)
        index[sum(counts) :] = 2**31 - 1
        table = definition.quantize_rows(problems.spread(S, 20), dtype=dtype)
        check_transpose(table, counts, kind, index=index)
    special = definition.quantize_rows(problems.special())
    made = check_transpose(special, [3, 4], kind)
    # Row 3 has an infinity: NaN in all of its channels, but finite scales.
    assert bool((codes(made.data_CT)[:, 128] == 0x7F).all()) and bool(made.scale.isfinite().all())
    anything = torch.randint(0, 256, (9, 40), dtype=torch.uint8, generator=torch.manual_seed(1))
    anything[anything & 0x7F == 0x7F] = 0
    anything[4] = 0
    scale = torch.exp2(torch.arange(9.0)[:, None] * 8 - 64)  # of the zeros, any
    for factor in (1.0, 2.0**-64):
        scale = scale * factor
        scale[4] = 2.0**120
        check_transpose(Quantized(anything.view(E4M3), scale), [9], kind)
    # Scales that lie block by block.
    q = definition.quantize_rows(expert_rows([3, 2], 260))
    check_transpose(Quantized(q.data, q.scale.T.contiguous().T), [3, 2], kind)
    # The largest numbers, which are infinite when they are given back, and denormal ones.
    ends = torch.cat([problems.below(3.38e38)[:3], problems.below(2.0**-126)[:3]])
    check_transpose(definition.quantize_rows(ends), [3, 3], kind)


def test_kernels_interpreted() -> None:
    interpret(__name__)


def test_on_a_cpu_it_is_the_definition() -> None:
    x, counts = expert_rows([3, 2], 300), [3, 2]
    same(quantize.quantize_rows(x, 2, E5M2), definition.quantize_rows(x, 2, E5M2))
    w = torch.stack([x, -x])
    made = quantize.quantize_weights(w)
    assert isinstance(made, QuantizedWeights)
    same(made, definition.quantize_weights(w))
    offsets = offsets_of(counts)
    assert torch.equal(quantize.column_offsets(offsets), definition.column_offsets(offsets))
    want = definition.quantize_columns(x, offsets, "vector", 2, E5M2)
    same(quantize.quantize_columns(x, offsets, "vector", 2, E5M2), want)
    q = definition.quantize_rows(x, 2)
    for kind in (BF16, FP32):
        want = definition.dequantize_rows(q, 2).to(kind)
        assert_same_numbers(quantize.dequantize_rows(q, 2, kind), want)
    want = definition.quantize_columns(definition.dequantize_rows(q, 2), offsets, "square", parts=2)
    same(quantize.transpose_rows(q, offsets, "square", parts=2), want)


def test_rows_of_a_table_transposed() -> None:
    """An index is applied first, and need not name rows where no expert has any."""
    q = definition.quantize_rows(problems.spread(7, 200))
    index = torch.tensor([6, 0, 3, 3, 99, -5], dtype=torch.int32)
    got = quantize.transpose_rows(q, offsets_of([3, 1]), "square", index_S=index)
    picked = Quantized(*(t[[6, 0, 3, 3, 0, 0]] for t in q))
    same(got, quantize.transpose_rows(picked, offsets_of([3, 1]), "square"))
    nothing = quantize.empty_rows(0, 200, device=CPU)
    got = quantize.transpose_rows(nothing, offsets_of([0, 0]), "square", index_S=index)
    assert got.data_CT.shape == (200, 256) and not codes(got.data_CT).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize.quantize_rows(torch.zeros(3, 4, 5)), r"must be \[rows, channels\]"),
        (lambda: quantize.quantize_rows(torch.zeros(3, 4).half()), "of bfloat16 or float32"),
        (lambda: quantize.quantize_rows(torch.zeros(3, 4).T), "contiguous channels"),
        (lambda: quantize.quantize_rows(torch.zeros(3, 5), 2), "5 channels are not 2 equal"),
        (lambda: quantize.quantize_weights(torch.zeros(3, 4)), r"contiguous \[L, O, I\]"),
        (lambda: quantize.quantize_weights(torch.zeros(1, 3, 4), 2), "3 channels out"),
        (
            lambda: quantize.transpose_rows(
                Quantized(torch.zeros(3, 200).to(E4M3), torch.ones(3, 1)), offsets_of([3]), "square"
            ),
            r"scales must be fp32 \[3, 2\], not float32 \[3, 1\]",
        ),
        (
            lambda: quantize.dequantize_rows(quantize.empty_rows(1, 2, device=CPU), 1, E4M3),
            "rows become bfloat16 or float32",
        ),
    ],
)
def test_what_does_not_fit(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
