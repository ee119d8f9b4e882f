"""Every kernel of the package once or a few times, at small sizes, for tools that watch a GPU.

    compute-sanitizer --report-api-errors no --tool memcheck python tests/kernels/sm90/sanitize.py
    compute-sanitizer --report-api-errors no --tool racecheck python tests/kernels/sm90/sanitize.py

Operands and what is expected come from the host, so that little else than these kernels runs. Every
tensor is an allocation of its own: an access beyond one is an error. Results are checked; exit code
1 if one is wrong. Arguments select cases by parts of their names.

Legend: N tokens, K slots or channels in, S expert rows, D hidden, F expert width, H channels of h,
L experts.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.routing.topk_scores import choose
from phalanx.kernels.sm90.experts.bias_grad import bias_grad
from phalanx.kernels.sm90.experts.combine import combine
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import dprob as add_dprob
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.routing.plan import plan, plan_backward
from phalanx.kernels.sm90.routing.topk import topk, topk_backward
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from tests.kernels.problems import formula

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
COUNTS = [70, 0, 1, 129, 16]
USED, L = sum(COUNTS), len(COUNTS)
S, N, D, F = USED + 5, 90, 128, 192
LOOPS = {"pp128": (128, True), "pp192": (192, True), "co256": (256, False)}
ACTS = {"swiglu": Activation("swiglu"), "squared_relu": Activation("squared_relu")}
Case = Callable[[], None]
_generator = torch.Generator().manual_seed(0)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=_generator) * scale).to(BF16)


OFFSETS = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32)
INDEX = torch.randint(0, N, (S,), generator=_generator, dtype=torch.int32)
INDEX[USED:] = 2**31 - 1
SCALE = torch.rand(S, generator=_generator) + 0.5
SCALE[USED:] = float("nan")


def on_gpu(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.cuda() for t in tensors]


def close(name: str, made: Tensor, want: Tensor, bound: float = 6e-3) -> None:
    """Relative error in the 2-norm."""
    error = (made.cpu().double() - want.double()).norm() / (want.double().norm() + 1e-30)
    if not error <= bound:
        raise AssertionError(f"{name}: relative error {error:.1e}")


def same(name: str, made: Tensor, want: Tensor) -> None:
    if not torch.equal(made.cpu(), want):
        raise AssertionError(f"{name} differs")


def source(gather: bool, columns: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows that a kernel reads, its index, and the experts' rows in fp64."""
    if gather:
        table = draw(N, columns)
        return table, INDEX, table[INDEX[:USED].long()].double()
    given = draw(S, columns)
    given[USED:] = float("nan")
    return given, None, given[:USED].double()


def product(dense: Tensor, w_LNK: Tensor) -> Tensor:
    parts = zip(dense.split(COUNTS), w_LNK.double(), strict=True)
    return torch.cat([part @ w.T for part, w in parts])


def rows_case(loop: Mainloop) -> Case:
    def case() -> None:
        a, _, dense = source(False, D)
        w = draw(L, D, F, scale=D**-0.5).mT if loop.b_transposed else draw(L, F, D, scale=D**-0.5)
        bias = draw(L, F)
        want = product(dense, w)
        want += bias.double().repeat_interleave(OFFSETS.diff(), 0) * SCALE[:USED, None]
        stored = w.mT.cuda().mT if loop.b_transposed else w.cuda()
        a, offsets, bias, scale = on_gpu(a, OFFSETS, bias, SCALE)
        given = dict(bias_LN=bias, scale_S=scale, loop=loop)
        close("y", grouped_gemm(a, stored, offsets, **given)[:USED], want)

    return case


def fc1_case(loop: Mainloop, act: Activation) -> Case:
    def case() -> None:
        x, index, dense = source(loop.gather, D)
        w, bias = draw(L, act.width(F), D, scale=D**-0.5), draw(L, act.width(F))
        h = product(dense, w) + bias.double().repeat_interleave(OFFSETS.diff(), 0)
        x, w, offsets, index, prob, bias = on_gpu(x, w, OFFSETS, INDEX, SCALE, bias)
        given = dict(index_S=index if loop.gather else None, prob_S=prob, bias_LH=bias, loop=loop)
        made = fc1_act(x, w, offsets, act, **given)
        close("h", made[0][:USED], h)
        close("a", made[1][:USED], formula(h, act) * SCALE[:USED, None], 1e-2)

    return case


def dgrad_case(loop: Mainloop, act: Activation) -> Case:
    def case() -> None:
        dy, index, dense = source(loop.gather, D)
        w, h = draw(L, D, F, scale=D**-0.5), draw(S, act.width(F))
        h[USED:] = float("nan")
        leaves = (h[:USED].double().requires_grad_(), SCALE[:USED].double().requires_grad_())
        a = formula(leaves[0], act) * leaves[1][:, None]
        dh, dprob = torch.autograd.grad(a, leaves, product(dense, w.mT))
        dy, w, h, offsets, index, prob = on_gpu(dy, w, h, OFFSETS, index, SCALE)
        made = fc2_dgrad_dact(dy, w.mT, h, offsets, act, index_S=index, prob_S=prob, loop=loop)
        close("dh", made[0][:USED], dh)
        close("a", made[1][:USED], a.detach())
        close("dprob", made[2].cpu().sum(0)[:USED], dprob, 1e-4)

    return case


def wgrad_case(dtype: torch.dtype, accumulate: bool, gathered: str | None, tile: int) -> Case:
    def case() -> None:
        d, d_index, dense_d = source(gathered == "d", D)
        v, v_index, dense_v = source(gathered == "v", F)
        start = torch.ones(L, D, F, dtype=dtype)
        parts = zip(dense_d.split(COUNTS), dense_v.split(COUNTS), strict=True)
        want = torch.stack([p.T @ q for p, q in parts]) + (1 if accumulate else 0)
        order = OFFSETS.diff().argsort(descending=True).int()
        d, v, offsets, d_index, v_index, out, order = on_gpu(
            d, v, OFFSETS, d_index, v_index, start, order
        )
        index = v_index if d_index is None else d_index
        given = dict(index_S=index, order_L=order, tile=tile, accumulate=accumulate)
        operands = Operand(d, gather=gathered == "d"), Operand(v, gather=gathered == "v")
        made = wgrad(*operands, offsets, out_LOI=out, **given)
        close("dw", made, want, 6e-3 if dtype == BF16 else 1e-5)

    return case


def bias_grad_case(indexed: bool) -> Case:
    def case() -> None:
        d, index, dense = source(indexed, F)
        parts = (dense * SCALE[:USED, None].double()).split(COUNTS)
        want = torch.stack([part.sum(0) for part in parts]) + 1
        d, offsets, scale, index, out = on_gpu(d, OFFSETS, SCALE, index, torch.ones(L, F))
        given = dict(scale_S=scale, index_S=index, out_LO=out)
        close("db", bias_grad(d, offsets, **given, accumulate=True), want, 1e-5)

    return case


def dprob_case(gather: bool) -> Case:
    def case() -> None:
        parts = torch.randn(3, S, generator=_generator)
        parts[:, USED:] = float("nan")
        table = torch.randn(N if gather else S, L, generator=_generator)
        row = INDEX[:USED].long() if gather else torch.arange(USED)
        want = torch.zeros(S)
        expert = torch.arange(L).repeat_interleave(OFFSETS.diff())
        want[:USED] = parts[:, :USED].sum(0) + table[row, expert]
        index = INDEX if gather else None
        partial, offsets, table, index = on_gpu(parts, OFFSETS, table, index)
        close("dprob", add_dprob(partial, offsets, table_NL=table, index_S=index), want, 1e-6)

    return case


def routing_case(experts: int, local: int, K: int) -> Case:
    """`plan`, `plan_backward` and `combine` of one routing; fewer rows are kept than are needed."""

    def case() -> None:
        prob, idx = torch.rand(700, experts, generator=_generator).topk(K)
        kept = 700 * K * local // experts - 5
        size = dict(first_expert=experts - local, local_experts=local, rows=kept)
        want = make_plan(idx.int(), prob, **size)
        made = plan(*on_gpu(idx.int(), prob), **size)
        for name in ("row_index_S", "row_prob_S", "offsets", "inverse_NK", "needed"):
            same(name, getattr(made, name), getattr(want, name))
        order = want.offsets.diff().neg().sort(stable=True).indices
        same("order_L", made.order_L, order.int())
        inverse, present = want.inverse_NK.long(), want.inverse_NK >= 0
        dprob, y = torch.rand(kept, generator=_generator), draw(kept, 264)
        back = plan_backward(dprob.cuda(), made.inverse_NK)
        same("dprob", back, torch.where(present, dprob[inverse.clamp(min=0)], 0.0))
        out = torch.zeros(700, 264)
        for k in range(K):
            out += torch.where(present[:, k, None], y[inverse[:, k].clamp(min=0)].float(), 0.0)
        same("out", combine(y.cuda(), made.inverse_NK), out.to(BF16))

    return case


def topk_case(
    experts: int, K: int, score: str, dtype: torch.dtype, groups: tuple[int, int] = (1, 1)
) -> Case:
    def case() -> None:
        logits = torch.randn(301, experts, generator=_generator).to(dtype)
        bias = torch.randn(experts, generator=_generator) if score == "sigmoid" else None
        options = dict(score=score, normalize=True, softmax_over="all", scale=2.0)
        x = logits.double().requires_grad_()
        weights = x.sigmoid() if score == "sigmoid" else x.exp()
        choice = weights.detach() if bias is None else weights.detach() + bias
        on = logits.cuda()
        bias = None if bias is None else bias.cuda()
        idx, prob = topk(on, top_k=K, **options, bias_E=bias, groups=groups)
        found, best = idx.cpu().long(), choose(choice, K, *groups)
        close("choice", choice.gather(1, found), choice.gather(1, best), 1e-6)
        some = weights.gather(1, found)
        want = 2 * some / some.sum(1, keepdim=True)
        close("prob", prob, want.detach(), 1e-5)
        dprob = torch.randn(301, K, generator=_generator)
        dx = torch.autograd.grad(want, x, dprob.double())[0]
        made = topk_backward(dprob.cuda(), idx, prob, on, **options)
        close("dlogits", made, dx, 1e-4 if dtype == FP32 else 6e-3)

    return case


def tokens_case(waves: bool) -> Case:
    """`push` and `arrive` between two ranks of this process."""

    def case() -> None:
        from tests.kernels.sm90.exchange.test_push_gpu import (
            test_every_row_lands_where_it_should_and_no_other as check,
        )

        check(2, 33, 264, 2, 2, 2, 0.3, "tokens in waves" if waves else "sums")

    return case


def sums_case(bits: int) -> Case:
    """`combine_push` beside `rows` and after it, between two ranks of this process."""

    def case() -> None:
        from tests.kernels.sm90.exchange.test_combine_push_gpu import PINGPONG, Way

        way = Way(2, 300, 448, 4, 320, 6, 5, bits)
        way.draw(0.3, 12)
        way.send(PINGPONG, bias=False)
        way.check(PINGPONG, bias=False)

    return case


def cases() -> dict[str, Case]:
    """Cases by name."""
    made: dict[str, Case] = {}
    for tile, shape in LOOPS.items():
        for gather in (False, True):
            how = f"{tile}, gathered" if gather else tile
            plain, other = (Mainloop(*shape, gather=gather, b_transposed=t) for t in (False, True))
            if not gather:
                made[f"rows {how}"] = rows_case(plain)
                made[f"rows transposed, {how}"] = rows_case(other)
            made[f"fc1_act {how}"] = fc1_case(plain, ACTS["swiglu"])
            if tile != "pp192":
                made[f"fc2_dgrad_dact {how}"] = dgrad_case(other, ACTS["swiglu"])
    made["fc1_act squared_relu"] = fc1_case(Mainloop(192, True), ACTS["squared_relu"])
    squared = Mainloop(128, True, b_transposed=True)
    made["fc2_dgrad_dact squared_relu"] = dgrad_case(squared, ACTS["squared_relu"])
    for name, dtype, accumulate in (("bf16", BF16, False), ("fp32 add", FP32, True)):
        for gathered in (None, "d", "v"):
            given = (dtype, accumulate, gathered)
            made[f"wgrad {name}, gathered {gathered}"] = wgrad_case(*given, 256)
    made["wgrad 192"] = wgrad_case(BF16, False, None, 192)
    made["bias_grad"], made["bias_grad indexed"] = bias_grad_case(False), bias_grad_case(True)
    made["dprob"], made["dprob gathered"] = dprob_case(False), dprob_case(True)
    made["plan, combine 64"] = routing_case(64, 16, 6)
    made["plan, combine 300"] = routing_case(400, 300, 10)
    made["push sums"], made["push in waves"] = tokens_case(False), tokens_case(True)
    made["combine_push"], made["combine_push in slices"] = sums_case(0), sums_case(2)
    made["topk softmax"] = topk_case(128, 8, "softmax", FP32)
    made["topk softmax bf16"] = topk_case(32, 4, "softmax", BF16)
    made["topk sigmoid"] = topk_case(256, 8, "sigmoid", FP32)
    made["topk of groups"] = topk_case(256, 8, "sigmoid", FP32, groups=(8, 4))
    return made


def main(parts: list[str]) -> int:
    """Run the cases whose name has one of `parts` in it, or all; how many have failed."""
    failed = 0
    for name, case in cases().items():
        if parts and not any(part in name for part in parts):
            continue
        try:
            case()
            torch.cuda.synchronize()
            print(f"ok     {name}", flush=True)
        except (AssertionError, RuntimeError, ValueError) as error:
            failed += 1
            print(f"FAILED {name}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
