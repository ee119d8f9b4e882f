"""Rows and weights by interpreted kernels: the bits of the definition; what functions refuse."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.quantize import blocks as definition
from phalanx.kernels.quantize import quantize
from phalanx.kernels.quantize.blocks import Quantized, QuantizedWeights
from phalanx.kernels.quantize.quantize import row_bytes, unpack_rows
from tests.kernels.interpreter import interpret
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, FP32, WIDTHS, expert_rows, offsets_of
from tests.kernels.quantize.same import assert_same, codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")


def dirty(*tensors: Tensor) -> None:
    """Fill with bytes that no kernel may leave there."""
    for t in tensors:
        t.view(torch.uint8).fill_(0x55)


def check_rows(x: Tensor, parts: int = 1, dtype: torch.dtype = E4M3) -> None:
    from phalanx.kernels.quantize import blocks_triton

    got = quantize.empty_rows(*x.shape, parts, dtype=dtype, device=CPU)
    dirty(*got)
    blocks_triton.write_rows(x, got, parts)
    want = definition.quantize_rows(x, parts, dtype)
    same(got, want)
    back = torch.full_like(x, -7.0)
    blocks_triton.dequantize(got, back, parts)
    assert_same_numbers(back, definition.dequantize_rows(want, parts).to(x.dtype))


def check_packed(x: Tensor) -> None:
    """Into rows of bytes that have scales behind them."""
    from phalanx.kernels.quantize import blocks_triton

    (R, C), want = x.shape, definition.quantize_rows(x)
    packed = torch.full((R, row_bytes(C)), 0x55, dtype=torch.uint8)
    got = unpack_rows(packed, C, E4M3)
    blocks_triton.write_rows(x, got, 1)
    same(got, want)
    first = got.scale.storage_offset() * 4
    assert bool((packed[:, C:first] == 0x55).all())
    assert bool((packed[:, first + 4 * want.scale.shape[1] :] == 0x55).all())


def check_weights(w: Tensor, parts: int = 1) -> None:
    from phalanx.kernels.quantize import blocks_triton

    want = definition.quantize_weights(w, parts)
    for written in [(0, 1, 2), (0, 2), (1, 2)]:  # both layouts, one
        got = quantize.empty_weights(*w.shape, parts, device=CPU)
        dirty(*got)
        layouts = (got[i] if i in written else None for i in range(2))
        blocks_triton.write_weights(w, *layouts, got.scale, parts)
        same([got[i] for i in written], [want[i] for i in written])


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


def interpreted() -> None:
    for dtype in (E4M3, E5M2):
        check_rows(problems.boundaries(BF16 if dtype == E5M2 else FP32)[:, None], dtype=dtype)
        check_rows(problems.patterns().view(-1, 128), dtype=dtype)
        check_rows(problems.below(464.0)[:: 1 if dtype == E4M3 else 5], dtype=dtype)
        check_rows(problems.special(), dtype=dtype)
    for channels, parts in WIDTHS.values():
        for rows in (0, 1, 3):
            check_rows(problems.spread(rows, channels + 8)[:, :channels], parts)
        check_packed(problems.spread(3, channels))
    check_weights(problems.special()[None, :, :70].contiguous())
    for O, I, parts in ((130, 127, 1), (258, 1, 2), (4, 129, 2)):  # noqa: E741
        for kind in (BF16, FP32):
            w = torch.stack([problems.spread(O, I, kind, seed=e) for e in range(2)])
            check_weights(w, parts)


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
    want = definition.quantize_columns(x, offsets, 2, E5M2)
    same(quantize.quantize_columns(x, offsets, 2, E5M2), want)
    q = definition.quantize_rows(x, 2)
    for kind in (BF16, FP32):
        want = definition.dequantize_rows(q, 2).to(kind)
        assert_same_numbers(quantize.dequantize_rows(q, 2, kind), want)
    want = definition.quantize_columns(definition.dequantize_rows(q, 2), offsets, parts=2)
    same(quantize.transpose_rows(q, offsets, parts=2), want)


def test_rows_of_a_table_transposed() -> None:
    """An index is applied first, and need not name rows where no expert has any."""
    q = definition.quantize_rows(problems.spread(7, 200))
    index = torch.tensor([6, 0, 3, 3, 99, -5], dtype=torch.int32)
    got = quantize.transpose_rows(q, offsets_of([3, 1]), index_S=index)
    picked = Quantized(*(t[[6, 0, 3, 3, 0, 0]] for t in q))
    same(got, quantize.transpose_rows(picked, offsets_of([3, 1])))
    nothing = quantize.empty_rows(0, 200, device=CPU)
    got = quantize.transpose_rows(nothing, offsets_of([0, 0]), index_S=index)
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
                Quantized(torch.zeros(3, 200).to(E4M3), torch.ones(3, 1)), offsets_of([3])
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
