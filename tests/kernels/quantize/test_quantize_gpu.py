"""Kernels that quantise on a GPU: the bits of the definition, large and small, and in a graph."""

from functools import partial

import pytest
import torch
from torch import Tensor

from phalanx.kernels.quantize import blocks as definition
from phalanx.kernels.quantize import quantize
from phalanx.kernels.quantize.blocks import Quantized, column_rows
from tests.kernels.capture import check_replay
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, COUNTS, FP32, NAN, WIDTHS
from tests.kernels.quantize.same import assert_same
from tests.kernels.quantize.test_quantize import E4M3, E5M2, assert_same_numbers, same

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
ROUTINGS = COUNTS | {
    "many": [(37 * e) % 600 for e in range(70)],
    "large": [5000, 0, 1, 3072, 129, 127, 2500, 7],
}


def unread(call):
    """Run with an error for whatever waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spread(rows: int, channels: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random on the GPU, with rows and runs of channels of very different sizes."""
    g = torch.Generator("cuda").manual_seed(rows + channels)
    x = torch.randn(rows, channels, device="cuda", generator=g)
    x *= torch.exp2(torch.randint(-12, 12, (rows, 1), device="cuda", generator=g))
    x *= torch.exp2(torch.arange(channels, device="cuda") // 96 % 9)
    return x.to(dtype)


def check_rows(x: Tensor, parts: int = 1, dtype: torch.dtype = E4M3) -> None:
    got = unread(lambda: quantize.quantize_rows(x, parts, dtype))
    same(got, definition.quantize_rows(x, parts, dtype))
    for kind in (BF16, FP32):
        back = unread(lambda kind=kind: quantize.dequantize_rows(got, parts, kind))
        assert_same_numbers(back, definition.dequantize_rows(got, parts).to(kind))


@FORMATS
def test_definition_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    for x in (problems.patterns()[:, None], problems.special(), problems.boundaries(FP32)[:, None]):
        for a, b in zip(
            definition.quantize_rows(x.cuda(), 1, dtype),
            definition.quantize_rows(x, 1, dtype),
            strict=True,
        ):
            assert_same(a.cpu(), b)


@FORMATS
def test_rows_of_every_bf16_and_every_boundary(dtype: torch.dtype) -> None:
    check_rows(problems.patterns().cuda()[:, None], dtype=dtype)
    check_rows(problems.patterns().cuda().view(-1, 128), dtype=dtype)
    for kind in (BF16, FP32):
        check_rows(problems.boundaries(kind).cuda()[:, None], dtype=dtype)
    for amax in (1.75 * 2.0**-126, 1.0, 448.0, 464.0, 1.75 * 2.0**120, 3.38e38):
        check_rows(problems.below(amax).cuda(), dtype=dtype)
    check_rows(problems.special().cuda(), dtype=dtype)


@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 5000])
@pytest.mark.parametrize("width", [*WIDTHS, "7168", "5760 in two", "2048", "768"])
def test_rows(width: str, rows: int, kind: torch.dtype) -> None:
    known = WIDTHS | {"7168": (7168, 1), "5760 in two": (5760, 2), "2048": (2048, 1)}
    channels, parts = (known | {"768": (768, 1)})[width]
    check_rows(spread(rows, channels, kind), parts)
    check_rows(spread(rows, channels + 24, kind)[:, 8 : channels + 8], parts)


@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("O", "I", "parts"), [(4096, 7168, 2), (5760, 2880, 2), (2880, 2880, 1), (129, 127, 1)]
)
def test_weights(O: int, I: int, parts: int, kind: torch.dtype) -> None:  # noqa: E741
    O -= O % parts  # noqa: E741
    w = spread(3 * O, I, kind).view(3, O, I)
    w[1, :200, :200] = 0
    w[2, 5, 5], w[2, 6, 6] = NAN, problems.INF
    want = definition.quantize_weights(w, parts)
    same(unread(lambda: quantize.quantize_weights(w, parts)), want)
    for transposed, one in ((False, want.forward), (True, want.transposed)):
        got = unread(partial(quantize.quantize_layout, w, parts, transposed=transposed))
        same(got, one)


@FORMATS
@pytest.mark.parametrize("counts", ROUTINGS)
@pytest.mark.parametrize(("channels", "parts"), [(2880, 1), (5760, 2), (640, 1), (130, 1)])
def test_columns(channels: int, parts: int, counts: str, dtype: torch.dtype) -> None:
    rows = ROUTINGS[counts]
    used, offsets = sum(rows), problems.offsets_of(rows).cuda()
    x = spread(used + 77, channels)
    x[used:] = NAN
    starts = unread(lambda: quantize.column_offsets(offsets))
    assert torch.equal(starts, definition.column_offsets(offsets))
    got = unread(lambda: quantize.quantize_columns(x, offsets, parts, dtype))
    same(got, definition.quantize_columns(x, offsets, parts, dtype))


@FORMATS
@pytest.mark.parametrize("counts", ROUTINGS)
@pytest.mark.parametrize(("channels", "parts"), [(2880, 1), (5760, 2), (640, 1), (130, 1)])
@pytest.mark.parametrize("indexed", [False, True], ids=["in place", "indexed"])
def test_transpose(
    indexed: bool, channels: int, parts: int, counts: str, dtype: torch.dtype
) -> None:
    rows = ROUTINGS[counts]
    used, offsets = sum(rows), problems.offsets_of(rows).cuda()
    S, index = used + 77, None
    q = definition.quantize_rows(spread(S, channels), parts, dtype)
    if indexed:
        index = torch.randint(0, S, (S,), device="cuda", dtype=torch.int32)
        index[used:] = 2**31 - 1
    else:
        q.data.view(torch.uint8)[used:], q.scale[used:] = 0x7F, NAN
    how = dict(index_S=index, parts=parts)
    got = unread(lambda: quantize.transpose_rows(q, offsets, **how))
    same(got, definition.transpose_rows(q, offsets, **how))


def test_special_numbers_transposed() -> None:
    offsets = problems.offsets_of([3, 4]).cuda()
    ends = torch.cat([problems.below(3.38e38)[:4], problems.below(2.0**-126)[:3]])
    for x in (problems.special().cuda(), ends.cuda()):
        same(
            quantize.quantize_columns(x, offsets),
            definition.quantize_columns(x, offsets),
        )
        q = definition.quantize_rows(x)
        same(quantize.transpose_rows(q, offsets), definition.transpose_rows(q, offsets))


def test_more_than_two_to_the_31_elements() -> None:
    """The last rows, columns and expert; 12 GB."""
    R, C = 300_032, 7168
    x = torch.zeros(R, C, device="cuda", dtype=BF16)
    x[-200:] = spread(200, C)
    got = quantize.quantize_rows(x)
    same([t[-200:] for t in got], definition.quantize_rows(x[-200:]))
    del x
    index = torch.arange(R - 200, R, device="cuda", dtype=torch.int32)
    offsets = problems.offsets_of([150, 50]).cuda()
    tail = Quantized(*(t[-200:].clone() for t in got))
    made = quantize.transpose_rows(got, offsets, index_S=index)
    same(made, definition.transpose_rows(tail, offsets))
    offsets = problems.offsets_of([R - 200, 200]).cuda()
    made = quantize.transpose_rows(got, offsets)
    want = definition.transpose_rows(tail, problems.offsets_of([200]).cuda())
    first = column_rows(R - 200, 1)
    assert_same(made.data_CT[:, first : first + 256], want.data_CT[:, :256])
    assert_same(made.scale[first // 128 :][:2], want.scale[:2])
    del made, got
    w = torch.zeros(75, 4096, 7168, device="cuda", dtype=BF16)
    w[-1] = spread(4096, 7168)
    whole, want_w = quantize.quantize_weights(w), definition.quantize_weights(w[-1:])
    same([t[-1:] for t in whole], list(want_w))


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    x, used = spread(9000, 2880), 8000
    index = torch.randint(0, 9000, (used,), device="cuda", dtype=torch.int32)
    offsets = problems.offsets_of([2000, 0, 1, 5000, 999]).cuda()
    w = spread(2048, 2880).view(2, 1024, 2880)

    def step() -> list[Tensor]:
        q = quantize.quantize_rows(x)
        rows = quantize.transpose_rows(q, offsets, index_S=index)
        columns = quantize.quantize_columns(x, offsets)
        made = (*q, *rows, *columns, *quantize.quantize_weights(w))
        return [t.view(torch.uint8) for t in made]

    first = step()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
    # Replayed for another routing.
    check_replay(step, offsets, problems.offsets_of([0, 4097, 3, 0, 128]).cuda())
