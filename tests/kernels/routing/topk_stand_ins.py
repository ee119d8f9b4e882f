"""The router's kernels of `kernels.sm90.routing.topk` in PyTorch, for tests on a CPU."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.routing.topk_scores import choice_scores, choose, probabilities


def topk(
    logits_TE: Tensor,
    *,
    top_k: int,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    **weights: Any,
) -> tuple[Tensor, Tensor]:
    """`kernels.sm90.routing.topk.topk` in torch."""
    options: Any = SimpleNamespace(**weights)
    score_TE = choice_scores(logits_TE, options, bias_E, groups[1] < groups[0])
    idx_TK = choose(score_TE, top_k, *groups)
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
