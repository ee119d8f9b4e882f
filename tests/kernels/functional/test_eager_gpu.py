"""Eager calls, whose launches are repeated from a tape, against the custom ops, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.api import Activation, SortedRows, TopK, experts
from phalanx.kernels.functional import eager
from phalanx.kernels.tape import Tape

pytestmark = pytest.mark.gpu
E, D, WIDTH, K, T = 8, 256, 192, 3, 300
GPT_OSS = Activation("quick_geglu", limit=7.0, offset=1.0)
CASES = {
    "swiglu": dict(activation="swiglu"),
    "fp8": dict(activation="swiglu", recipe="fp8_block"),
    "biases": dict(activation=GPT_OSS),
    "biases in fp8": dict(activation=GPT_OSS, recipe="fp8_block"),
    "transposed": dict(activation=GPT_OSS, layout="transposed_interleaved"),
    "squared_relu": dict(activation="squared_relu"),
}


def draw(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16().requires_grad_()


def problem(case: str, *, tokens: int = T, by_rows: bool = False) -> tuple[Any, ...]:
    options = CASES[case]
    act = options["activation"]
    act = act if isinstance(act, Activation) else Activation(act)
    H = act.width(WIDTH)
    weights = [draw(E, H, D), draw(E, D, WIDTH)]
    if "layout" in options:
        weights = [w.detach().mT.contiguous().requires_grad_() for w in weights]
    if act is GPT_OSS:
        weights += [draw(E, H), draw(E, D)]
    x = torch.randn(tokens, D, device="cuda").bfloat16().requires_grad_()
    if by_rows:
        counts = torch.randint(tokens // E, (E,), device="cuda")
        prob = torch.rand(tokens, device="cuda").requires_grad_()
        return x, SortedRows(counts, prob), weights, [x, prob, *weights]
    prob, idx = torch.rand(tokens, E, device="cuda").topk(K)
    return x, TopK(idx, prob.requires_grad_()), weights, [x, prob, *weights]


def results(case: str, given: tuple[Any, ...], dout: Tensor) -> list[Tensor]:
    x, routing, weights, leaves = given
    out = experts(x, routing, weights, CASES[case])
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for tapes in (eager._FORWARD, eager._BACKWARD):
        monkeypatch.setattr(tapes, "_tapes", {})


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_the_ops(case: str, by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for seed in range(5):
        torch.manual_seed(seed)
        given, dout = problem(case, by_rows=by_rows), torch.randn(T, D, device="cuda").bfloat16()
        got = results(case, given, dout)
        with monkeypatch.context() as patch:
            patch.setattr(eager, "takes", lambda *_: False)
            want = results(case, given, dout)
        kept.append((got, want))
    for got, want in kept:  # after all: no call changed the results of another
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(got)
    for tapes in (eager._FORWARD, eager._BACKWARD):
        assert [type(tape) for tape in tapes._tapes.values()] == [Tape]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("case", ["swiglu", "fp8"])
def test_memory_is_that_of_the_ops(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, peaks = problem(case, tokens=65536), []
    dout = torch.randn(65536, D, device="cuda").bfloat16()
    for taped in (True, False):
        monkeypatch.setattr(eager, "takes", eager.takes if taped else lambda *_: False)
        for _ in range(3):
            results(case, given, dout)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results(case, given, dout)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.01 * peaks[1]


@pytest.mark.usefixtures("fresh")
def test_other_streams() -> None:
    given, dout = problem("fp8"), torch.randn(T, D, device="cuda").bfloat16()
    want = results("fp8", given, dout)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        with torch.cuda.stream(side):
            got = results("fp8", given, dout)
        torch.cuda.current_stream().wait_stream(side)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("fresh")
def test_second_derivatives_are_refused_and_flops_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, routing, weights, _ = problem("swiglu")
    for _ in range(3):
        out = experts(x, routing, weights)
        (dx,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.float().square().sum().backward()
    from phalanx.kernels.api import register_flops

    register_flops()
    with FlopCounterMode(display=False) as counter:
        experts(x, routing, weights)
    assert counter.get_total_flops() == 6 * T * K * D * WIDTH
