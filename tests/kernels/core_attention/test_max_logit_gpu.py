"""The largest logit of each head by the kernel on a GPU: against fp64, in a graph, and its time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention.core import attention, visible_ST
from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.max_logit import MaxLogit, raise_max_logits

pytestmark = pytest.mark.gpu

SHAPES = [
    # B, H, G, S, T, d, window
    (2, 16, 16, 2048, 2048, 192, 0),  # Moonlight
    (1, 64, 8, 4096, 4096, 64, 128),  # GPT-OSS
    (1, 32, 4, 1000, 1000, 128, 0),
    (1, 8, 8, 640, 1900, 256, 0),  # a chunk of a context parallel rank
    (2, 4, 1, 300, 300, 80, 33),
    (1, 2, 2, 1, 1, 16, 0),
]


def drawn(case: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, H, S, d] as layers have them, [S, B, H, d] in memory."""
    B, H, G, S, T, d, _ = case
    g = torch.Generator("cuda").manual_seed(S + d)

    def heads(length: int, number: int) -> Tensor:
        return torch.randn(length, B, number, d, generator=g, device="cuda").to(dtype)

    return heads(S, H).permute(1, 2, 0, 3), heads(T, G).permute(1, 2, 0, 3)


def stated(q: Tensor, k: Tensor, scale: float, window: int, documents: Any = None) -> Tensor:
    """[H], fp64."""
    seen = visible_ST(q.size(2), k.size(2), window, "cuda", documents)
    most = []
    for h in range(q.size(1)):
        keys = k[:, h * k.size(1) // q.size(1)].double()
        logits = scale * q[:, h].double() @ keys.transpose(-1, -2)
        most.append(logits.masked_fill(~seen, float("-inf")).amax())
    return torch.stack(most)


def fresh(H: int) -> MaxLogit:
    most_H = torch.full((H,), float("-inf"), device="cuda")
    return MaxLogit(most_H, torch.ones((), dtype=torch.int32, device="cuda"))


def bound(q: Tensor, k: Tensor, scale: float) -> float:
    """Error bound of sums of d products in fp32, in any order."""
    longest = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    return q.size(-1) * 2.0**-24 * scale * float(longest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", SHAPES)
def test_against_fp64(case: Any, dtype: torch.dtype) -> None:
    (q, k), scale, window = drawn(case, dtype), case[5] ** -0.5, case[6]
    top = fresh(q.size(1))
    raise_max_logits(top, q, k, scale=scale, window=window)
    want = stated(q, k, scale, window)
    assert (top.most_H.double() - want).abs().max() <= bound(q, k, scale)
    again = fresh(q.size(1))
    raise_max_logits(again, q, k, scale=scale, window=window)
    assert torch.equal(again.most_H, top.most_H)


@pytest.mark.parametrize("window", [0, 100])
def test_documents(window: int) -> None:
    q, k = drawn((1, 8, 4, 2000, 2000, 128, window))
    lengths = (1, 700, 127, 128, 3, 1041)
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])
    documents, top = Documents(positions, places=0, longest=2000), fresh(8)
    raise_max_logits(top, q, k, scale=0.1, window=window, documents=documents)
    want = stated(q, k, 0.1, window, documents)
    assert (top.most_H.double() - want).abs().max() <= bound(q, k, 0.1)


@pytest.mark.parametrize("backend", ["flex", "fa4"])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_takes_note(backend: str, sinks: bool) -> None:
    """Raised over two micro-batches, the second with logits that are far lower or far higher."""
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute")
    q, k = drawn((1, 16, 2, 1024, 1024, 64, 128))
    extra = 20 * torch.ones(16, device="cuda", dtype=q.dtype) if sinks else None
    how = dict(scale=0.125, window=128, sinks_H=extra, backend=backend)
    for factor in (0.25, 4.0):
        top = fresh(16)
        for queries in (q, factor * q):
            out = attention(queries, k, k, top=top, **how)
            assert torch.equal(out, attention(queries, k, k, **how))
        want = torch.maximum(stated(q, k, 0.125, 128), stated(factor * q, k, 0.125, 128))
        assert (top.most_H.double() - want).abs().max() <= bound(max(1.0, factor) * q, k, 0.125)


def test_a_graph_is_replayed_with_other_inputs_and_when_it_is_not_due() -> None:
    q, k = drawn((1, 8, 8, 512, 512, 128, 0))
    top = fresh(8)
    raise_max_logits(top, q, k, scale=0.1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top.most_H.fill_(float("-inf"))
        raise_max_logits(top, q, k, scale=0.1)
    for factor in (1.0, 0.5):
        q.mul_(factor)
        graph.replay()
        assert (top.most_H.double() - stated(q, k, 0.1, 0)).abs().max() <= bound(q, k, 0.1)
    top.due.zero_()
    graph.replay()
    assert (top.most_H == float("-inf")).all()


@pytest.mark.parametrize(
    ("model", "case", "v"),
    [
        ("Moonlight", (2, 16, 16, 8192, 8192, 192, 0), 128),
        ("Qwen3", (2, 32, 4, 8192, 8192, 128, 0), 128),
        ("GPT-OSS, window", (2, 64, 8, 8192, 8192, 64, 128), 64),
    ],
)
def test_it_takes_less_than_the_forward_pass(model: str, case: Any, v: int) -> None:
    """Time is below flash-attn-4's, which has the products with values too, and lower with outliers
    than without."""
    pytest.importorskip("flash_attn.cute")
    q, k = drawn(case)
    top, how = fresh(case[1]), dict(scale=case[5] ** -0.5, window=case[6])
    whole = _milliseconds(lambda: attention(q, k, k[..., :v], **how, backend="fa4"))
    taken = []
    for factor in (1.0, 30.0):
        queries = factor * q

        def both(queries: Tensor = queries) -> None:
            top.most_H.fill_(float("-inf"))  # as in the first micro-batch of a step
            attention(queries, k, k[..., :v], **how, top=top, backend="fa4")

        taken.append(_milliseconds(both) - whole)
    top.due.zero_()
    taken.append(_milliseconds(lambda: raise_max_logits(top, q, k, **how)))
    flat, peaked, off = taken
    print(f"{model}: forward {whole:.3f} ms, logits {flat:.3f}, large {peaked:.3f}, off {off:.3f}")
    assert max(off, peaked, flat) < whole
    assert case[6] or off < peaked < flat


def _milliseconds(call: Any) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 10
