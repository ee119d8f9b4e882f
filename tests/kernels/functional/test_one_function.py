"""`experts`, over which all other faces are thin: both routings in fp64, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.api import (
    ExpertOptions,
    GroupedMLP,
    SortedRows,
    TopK,
    experts,
    grouped_experts,
    grouped_experts_sorted,
)
from tests.kernels.functional.test_experts import (
    COUNTS,
    GPT_OSS,
    D,
    E,
    check,
    one_expert,
    routed,
    statement,
    weights,
)

OPTIONS = ExpertOptions(activation=GPT_OSS)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_tokens_have_the_weighted_sum_of_their_experts(backend: str, bias: bool) -> None:
    w, (x, idx, prob) = weights(GPT_OSS, bias), routed(2, 5)
    idx[0, 1, 0], idx[1, 2, 0] = -1, E
    options = OPTIONS | {"backend": backend}

    def exact(x: Tensor, prob: Tensor, *ws: Tensor) -> Tensor:
        return statement(x, idx, prob, dict(zip(w, ws, strict=True)), GPT_OSS)

    check(
        lambda x, prob, *ws: experts(x, TopK(idx, prob), ws, options),
        exact,
        [x, prob, *w.values()],
    )


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_sorted_rows_have_their_own_expert(backend: str) -> None:
    w, used = weights(GPT_OSS), sum(COUNTS)
    x, prob = torch.randn(used + 3, D), torch.rand(used + 3)
    options = OPTIONS | {"backend": backend}

    def exact(x: Tensor, prob: Tensor, *ws: Tensor) -> Tensor:
        named = dict(zip(w, ws, strict=True))
        parts = enumerate(x[:used].split(COUNTS))
        out = torch.cat([one_expert(part, named, GPT_OSS, e) for e, part in parts])
        return F.pad(out * prob[:used, None], (0, 0, 0, 3))

    check(
        lambda x, prob, *ws: experts(x, SortedRows(COUNTS, prob), ws, options),
        exact,
        [x, prob, *w.values()],
    )


def test_the_other_faces_have_its_bits() -> None:
    w, (x, idx, prob) = weights(GPT_OSS), routed(9)
    ws = tuple(w.values())
    module = GroupedMLP(E, D, w["w2"].shape[-1], idx.shape[-1], GPT_OSS, bias=True)
    module.load_state_dict(w)
    want = experts(x, TopK(idx, prob), ws, OPTIONS)
    assert torch.equal(grouped_experts(x, idx, prob, *ws, **OPTIONS), want)
    assert torch.equal(module(x, idx, prob), want)
    rows = torch.randn(sum(COUNTS) + 2, D)
    want = experts(rows, SortedRows(COUNTS), ws, OPTIONS)
    assert torch.equal(grouped_experts_sorted(rows, COUNTS, None, *ws, **OPTIONS), want)


def test_an_option_is_checked_in_every_call() -> None:
    """Also one that equals another that was right, as 1 equals True."""
    w, (x, idx, prob) = weights(GPT_OSS), routed(9)
    for value in (False, True):
        experts(x, TopK(idx, prob), tuple(w.values()), {"accumulate": value})
    for value in (0, 1, [True]):
        with pytest.raises(ValueError, match="^accumulate must be True or False, not"):
            experts(x, TopK(idx, prob), tuple(w.values()), {"accumulate": value})


def test_refusals_are_one_line() -> None:
    ws, (x, idx, prob) = tuple(weights(GPT_OSS).values()), routed(9)
    group: Any = object()  # refused before it is asked
    with pytest.raises(ValueError, match="^routing must be a TopK or SortedRows, not tuple$"):
        experts(x, (idx, prob), ws)
    with pytest.raises(ValueError, match="^group: ranks exchange tokens with their experts: giv"):
        experts(x, SortedRows([9, 0, 0, 0, 0, 0]), ws, group=group)
    with pytest.raises(ValueError, match="^weights must be w1, w2, b1 and b2, or w1 and w2, n"):
        experts(x, TopK(idx, prob), ws[:1])
