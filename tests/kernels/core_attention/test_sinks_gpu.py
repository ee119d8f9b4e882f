"""Attention with sinks by cuDNN against fp64, beside what FlexAttention makes of its inputs."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention import sinks
from phalanx.kernels.core_attention.core import attention

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine")


def drawn(S: int, B: int, H: int, G: int, d: int) -> tuple[Tensor, ...]:
    g = torch.Generator("cuda").manual_seed(S)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16().requires_grad_()

    q, k, v, dout = random(S, B, H, d), random(S, B, G, d), random(S, B, G, d), random(S, B, H, d)
    return q, k, v, (2 * random(H)).detach().requires_grad_(), dout.detach()


def passes(call, q, k, v, s, dout) -> list[Tensor]:
    out = call(q, k, v, s)
    return [out, *torch.autograd.grad(out, (q, k, v, s), dout)]


def stated(backend: str, window: int, scale: float):
    def call(q, k, v, s):
        heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        how = dict(scale=scale, window=window, sinks_H=s, backend=backend)
        return attention(*heads, **how).permute(2, 0, 1, 3)

    return call


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("S", "B", "H", "G", "d"), [(640, 2, 8, 2, 64), (1024, 1, 16, 16, 128)])
def test_as_exact_as_flex(S, B, H, G, d, window):
    given = drawn(S, B, H, G, d)
    scale = d**-0.5
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = passes(stated("reference", window, scale), *wide)
    flex = passes(stated("flex", window, scale), *given)
    ours = passes(lambda *a: sinks.attention(*a, scale=scale, window=window), *given)
    for name, want, peer, got in zip(("o", "dq", "dk", "dv", "ds"), exact, flex, ours, strict=True):
        error = (got.double() - want).norm() / want.norm()
        allowed = 2 * (peer.double() - want).norm() / want.norm()
        assert error <= allowed, (name, float(error), float(allowed))


def test_captured():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(
        stream
    ):  # also what the graph reads: autograd asks where leaves are from
        given = drawn(512, 2, 8, 8, 64)
        call = lambda *a: sinks.attention(*a, scale=0.125, window=128)  # noqa: E731
        want = passes(call, *given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = passes(call, *given)
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
