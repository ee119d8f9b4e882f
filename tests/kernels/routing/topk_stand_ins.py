"""The router's kernels of `kernels.sm90.routing.topk` in PyTorch, for tests on a CPU."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.routing.topk.scores import choose, probabilities


def topk(
    logits_TE: Tensor,
    *,
    top_k: int,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    **weights: Any,
) -> tuple[Tensor, Tensor]:
    """`kernels.sm90.routing.topk.topk` in torch."""
    grouped = groups[1] < groups[0]
    score_TE = logits_TE if bias_E is None and not grouped else logits_TE.sigmoid()
    score_TE = score_TE if bias_E is None else score_TE + bias_E
    idx_TK = choose(score_TE, top_k, *groups)
    options: Any = SimpleNamespace(**weights)
    return idx_TK.to(torch.int32), probabilities(logits_TE, idx_TK, options)


def topk_backward(
    dprob_TK: Tensor, idx_TK: Tensor, prob_TK: Tensor, logits_TE: Tensor, **weights: Any
) -> Tensor:
    """`kernels.sm90.routing.topk.topk_backward` in torch."""
    options: Any = SimpleNamespace(**weights)
    assert dprob_TK.is_contiguous()
    weights = functools.partial(probabilities, idx_TK=idx_TK.long(), options=options)
    again_TK, backward = torch.func.vjp(weights, logits_TE)
    assert torch.equal(again_TK, prob_TK)
    return backward(dprob_TK)[0]
