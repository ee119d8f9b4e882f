"""flash-attn-4 and FlexAttention within packed documents against the reference, on Hopper."""

from functools import partial

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention.core import attention
from phalanx.kernels.core_attention.documents import Documents
from tests.kernels.capture import check_replay
from tests.kernels.core_attention.test_fa4_gpu import BF16, NAMES, Case, drawn, errors, upstream

pytestmark = pytest.mark.gpu
pytest.importorskip("flash_attn.cute")

TOKENS, PLACES = 1000, 24
LENGTHS = (
    (1000,),
    (1, 300, 128, 1, 70, 500),
    (128, 256, 616),
    (999, 1),
    (10,) * 20 + (800,),
)
CASES = {
    "qwen3": Case(TOKENS, TOKENS, 16, 2, 128, 128, B=1),
    "gpt_oss": Case(TOKENS, TOKENS, 16, 2, 64, 64, sinks=BF16, B=1),
    "gpt_oss_window": Case(TOKENS, TOKENS, 16, 2, 64, 64, window=100, sinks=BF16, B=1),
    "mla": Case(TOKENS, TOKENS, 8, 8, 192, 128, B=1),
    "window": Case(TOKENS, TOKENS, 4, 4, 64, 64, window=1, B=1),
}


def places_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n, device="cuda") for n in lengths])


def passes(
    case: Case,
    tensors: list[Tensor],
    backend: str,
    position_T: Tensor,
    dout: Tensor,
    start: int = 0,
) -> list[Tensor]:
    """Output and gradients; of the queries from `start` on, with all keys."""
    q, k, v, *sinks = tensors
    q, position_T, dout = q[start:], position_T[start:], dout[start:]
    places = 0 if start else PLACES
    o_BHSv = attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
        scale=case.d**-0.5,
        window=case.window,
        sinks_H=sinks[0] if sinks else None,
        documents=Documents(position_T, places=places, longest=TOKENS, before=start),
        backend=backend,
    )
    out = o_BHSv.permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]


@pytest.mark.parametrize("backend", ["fa4", "flex"])
@pytest.mark.parametrize("name", CASES)
def test_documents_equal_the_reference(name: str, backend: str) -> None:
    case = CASES[name]
    given, dout = drawn(case), upstream(case)
    for lengths in LENGTHS:
        position_T = places_of(lengths)
        wide = [t.detach().double().requires_grad_() for t in given]
        exact = passes(case, wide, "reference", position_T, dout)
        found = errors(passes(case, given, backend, position_T, dout), exact)
        for what, error in zip(NAMES, found, strict=False):
            print(f"{name:14} {backend:5} {len(lengths):3} documents {what:6} {error:.2e}")
            assert error < 2**-7, (lengths, what, error)


@pytest.mark.parametrize("name", CASES)
def test_the_last_queries_alone(name: str) -> None:
    """Queries of a context-parallel rank."""
    case = CASES[name]
    given, dout, position_T = drawn(case), upstream(case), places_of(LENGTHS[1])
    wide = [t.detach().double().requires_grad_() for t in given]
    for start in (128, 500, 777):
        exact = passes(case, wide, "reference", position_T, dout, start)
        found = errors(passes(case, given, "flex", position_T, dout, start), exact)
        assert max(found) < 2**-7, (start, found)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss_window", "mla"])
def test_one_graph_serves_other_documents(name: str) -> None:
    case = CASES[name]
    given, position_T = drawn(case), places_of(LENGTHS[1])
    torch.use_deterministic_algorithms(True)
    try:
        step = partial(passes, case, given, "fa4", position_T, upstream(case))
        check_replay(step, position_T, places_of(LENGTHS[4]))
    finally:
        torch.use_deterministic_algorithms(False)


def test_places_that_are_not_used_change_nothing() -> None:
    case = CASES["gpt_oss"]
    q, k, v, sinks = drawn(case)
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    outs = [
        attention(
            *heads,
            scale=0.125,
            sinks_H=sinks,
            documents=Documents(places_of(LENGTHS[1]), places=places, longest=TOKENS),
            backend="fa4",
        )
        for places in (6, 24, 300)
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
