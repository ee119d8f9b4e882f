"""`experts`, over which all other faces are thin: they have its bits; and what it refuses.

Through these faces test_experts compares it with fp64.
"""

from typing import Any

import pytest
import torch

from phalanx.kernels.api import (
    Activation,
    ExpertOptions,
    GroupedMLP,
    SortedRows,
    TopK,
    experts,
    grouped_experts,
    grouped_experts_sorted,
)
from tests.kernels.functional.test_experts import COUNTS, GPT_OSS, D, E, routed, weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [GPT_OSS, Activation("squared_relu")], ids=str)
def test_the_other_faces_have_its_bits(act: Activation, bias: bool) -> None:
    w, (x, idx, prob) = weights(act, bias), routed(9)
    ws, options = tuple(w.values()), ExpertOptions(activation=act)
    module = GroupedMLP(E, D, w["w2"].shape[-1], idx.shape[-1], act, bias)
    module.load_state_dict(w)
    want = experts(x, TopK(idx, prob), ws, options)
    assert torch.equal(grouped_experts(x, idx, prob, *ws, **options), want)
    assert torch.equal(module(x, idx, prob), want)
    rows = torch.randn(sum(COUNTS) + 2, D)
    want = experts(rows, SortedRows(COUNTS), ws, options)
    assert torch.equal(grouped_experts_sorted(rows, COUNTS, None, *ws, **options), want)


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
