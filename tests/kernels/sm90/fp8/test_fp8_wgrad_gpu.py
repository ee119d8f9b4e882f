"""Kernel `wgrad` in FP8 on a Hopper GPU: exact integers, error, ragged experts, determinism."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.quantize.blocks import (
    QuantizedColumns,
    column_offsets,
    dequantize_columns,
    quantize_columns,
)
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from tests.kernels.sm90.fp8.fp8_problems import EDGES, Fp8Problem
from tests.kernels.sm90.gemm.gemm_problems import BF16, FP32, FP64

pytestmark = pytest.mark.gpu

TILES = [128, 192, 256]
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MODES = {"bf16": (BF16, False), "fp32": (FP32, False), "fp32 +=": (FP32, True)}
GUARD = 64
"""Elements before and after the result that must not be written."""
tiles = pytest.mark.parametrize("tile", TILES)


class WgradProblem(Fp8Problem):
    """Operands by columns; tokens after the last expert's are NaN, bytes and scales."""

    def __init__(
        self,
        counts: list[int],
        O: int,  # noqa: E741
        I: int,  # noqa: E741
        *,
        parts: int = 1,
        dtype: torch.dtype = torch.float8_e4m3fn,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.shape, self.parts = (O, I), parts
        self.ends_T = column_offsets(self.offsets)
        self.d, self.dense_d = self._columns(O, parts, dtype)
        self.v, self.dense_v = self._columns(I, 1, torch.float8_e4m3fn)

    def _columns(
        self, channels: int, parts: int, dtype: torch.dtype
    ) -> tuple[QuantizedColumns, Tensor]:
        x = self.draw(self.S, channels)
        if self.integers:  # an expert's token blocks have powers of two of their own
            row = torch.arange(self.S, dtype=torch.int32, device="cuda")
            expert = torch.searchsorted(self.offsets[1:], row, right=True).clamp(max=self.L - 1)
            block = (self.ends_T[expert] + row - self.offsets[expert]) // 128
            powers = self.spread_blocks(torch.ones(int(block.max()) + 1, channels).cuda(), parts)
            x = x * powers[block].to(BF16)
        q = quantize_columns(x, self.offsets, parts, dtype)
        dense = dequantize_columns(q, self.offsets, self.S, parts)
        used = int(self.ends_T[-1])
        q.data_CT.view(torch.uint8)[:, used:] = 0x7F
        q.scale[used // 128 :] = float("nan")
        return q, dense

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return Operand(self.d, parts=self.parts), Operand(self.v)

    def start(self) -> Tensor:
        g = torch.Generator("cuda").manual_seed(1)
        drawn = torch.randint(-50, 51, (self.L, *self.shape), generator=g, device="cuda")
        return drawn.to(FP32)

    def ours(self, mode: str = "fp32", **options) -> Tensor:
        """dw; nothing around it is written."""
        dtype, add = MODES[mode]
        count = self.L * self.shape[0] * self.shape[1]
        room = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype, device="cuda")
        out = room[GUARD : GUARD + count].view(self.L, *self.shape)
        out.copy_(self.start() if add else torch.full_like(out, float("nan")))
        given = dict(out_LOI=out, accumulate=add, **options)
        assert wgrad(*self.operands, self.ends_T, **given) is out
        assert (room[:GUARD] == 7).all() and (room[GUARD + count :] == 7).all()
        return out

    def exact(self, mode: str = "fp32") -> Tensor:
        begins = [0, *self.ends[:-1]]
        dw = torch.stack(
            [
                self.dense_d[b:e].double().T @ self.dense_v[b:e].double()
                for b, e in zip(begins, self.ends, strict=True)
            ]
        )
        return dw + self.start().to(FP64) if MODES[mode][1] else dw


def _check_exact(p: WgradProblem, mode: str, **options) -> None:
    made = p.ours(mode, **options)
    assert torch.equal(made, p.exact(mode).to(FP32).to(made.dtype))


def test_experts_without_rows_may_be_left_alone():
    p = WgradProblem([130, 0, 64, 0], 192, 320)
    want = p.ours()
    got = torch.full_like(want, 3)
    wgrad(*p.operands, p.ends_T, out_LOI=got, zeros=False)
    assert torch.equal(got[::2], want[::2]) and (got[1::2] == 3).all()


@tiles
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", EDGES)
def test_integers_are_exact(counts, mode, tile):
    _check_exact(WgradProblem(EDGES[counts], 192, 320, integers=True), mode, tile=tile)


@tiles
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("each", "parts"), [(192, 1), (192, 2), (64, 2), (320, 2), (64, 1)])
def test_blocks_that_start_anew_in_the_linear_half(each, parts, name, tile):
    given = dict(parts=parts, dtype=FORMATS[name], integers=True)
    _check_exact(WgradProblem(EDGES["edges"], parts * each, 448, **given), "fp32 +=", tile=tile)


@tiles
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("O", "I", "parts"), [(5760, 2880, 2), (2880, 2880, 1), (2048, 768, 1)])
def test_error_at_the_sizes_of_models(O, I, parts, mode, tile):  # noqa: E741
    p = WgradProblem(EDGES["ragged"], O, I, parts=parts)
    exact, made = p.exact(mode), p.ours(mode, tile=tile).double()
    rounding = exact.to(MODES[mode][0]).double() - exact
    assert made.isfinite().all()
    assert (made - exact).norm() <= rounding.norm() + 3e-4 * exact.norm()


def test_many_tokens():
    p = WgradProblem([4096, 3000], 256, 256)
    made, exact = p.ours().double(), p.exact()
    assert (made - exact).norm() <= 3e-4 * exact.norm()


def test_default_output():
    p = WgradProblem(EDGES["ragged"], 192, 320, integers=True)
    made = wgrad(*p.operands, p.ends_T)
    assert made.dtype == BF16 and torch.equal(made, p.exact().to(FP32).to(BF16))


@tiles
@pytest.mark.parametrize("mode", MODES)
def test_bits_do_not_depend_on_who_computes(mode, tile):
    p = WgradProblem(EDGES["many"], 448, 320)
    first = p.ours(mode, tile=tile)
    order = torch.randperm(p.L, device="cuda", dtype=torch.int32)
    for change in (
        *({"options": LaunchOptions(margin)} for margin in (4, 16, 131)),
        {"order_L": order},
        {},
    ):
        assert torch.equal(p.ours(mode, tile=tile, **change), first)


def test_the_order_of_tokens_in_a_block_does_not_matter_to_integers():
    """Whoever transposes may permute an expert's 128 tokens, if it does so for both operands."""
    p = WgradProblem(EDGES["edges"], 192, 320, integers=True)
    first = p.ours()
    by = torch.randperm(128, device="cuda")
    for q in (p.d, p.v):
        q.data_CT.copy_(
            q.data_CT.view(torch.uint8)
            .unflatten(1, (-1, 128))[..., by]
            .flatten(1)
            .view(torch.float8_e4m3fn)
        )
    assert torch.equal(p.ours(), first)


def test_scales_of_any_strides():
    p = WgradProblem(EDGES["ragged"], 384, 320, parts=2, integers=True)
    clean = p.ours()
    p.d = p.d._replace(scale=p.d.scale.T.contiguous().T)
    p.v = p.v._replace(scale=p.v.scale.T.contiguous().T)
    assert torch.equal(p.ours(), clean)


def test_counter_is_left_at_zero():
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for margin in (0, 100, 131):
        p = WgradProblem(EDGES["ragged"], 192, 320, integers=True)
        _check_exact(p, "fp32 +=", counter=counter, options=LaunchOptions(margin))
        assert counter.item() == 0


def test_a_graph_serves_every_routing():
    p = WgradProblem([300, 200, 100, 400], 192, 320, padding=0)
    out = wgrad(*p.operands, p.ends_T, dtype=FP32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wgrad(*p.operands, p.ends_T, out_LOI=out)
    for ends in ([128, 128, 512, 1024], [0, 0, 1024, 1024], [0, 0, 0, 0]):
        p.ends_T[1:].copy_(torch.tensor(ends))
        graph.replay()
        assert torch.equal(out, wgrad(*p.operands, p.ends_T, dtype=FP32))


def test_host_never_waits():
    p = WgradProblem(EDGES["ragged"], 192, 320)
    expected = p.ours("fp32")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = wgrad(*p.operands, p.ends_T, dtype=FP32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(ours, expected)
