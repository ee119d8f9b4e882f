"""Choice and weights of a router in one kernel, and their gradient in another, on a Hopper GPU.

Used with the fused expert backend, if `kernels.sm90.routing.topk` supports the router's options;
equivalent to `choose` and `probabilities` of `kernels.routing.topk_scores`.

Transformer Engine's `fused_topk_with_score_function` returns probabilities [T, E] that are 0 where
an expert was not chosen, saves scores of that size, and takes a gradient of that size. The
dispatcher needs the K experts of a token, best first, and their probabilities [T, K]. On an H200
Transformer Engine's takes 1.5 to 3.8 times as long forward, and 0.9 to 3.7 times backward
(docs/measured/kernels/libraries.md).

Legend: T tokens, E experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.limits import Refusal
from phalanx.kernels.routing.topk_scores import topk_refusal


def unsupported(options: RouterConfig, *, experts: int, top_k: int) -> Refusal:
    """Reason for which the kernel cannot route by these options; None if it can."""
    if options.rounding != "none":
        return f"token rounding (rounding={options.rounding}) is not supported"
    groups = (1, 1) if forces_choice(options) else (options.groups, options.group_topk)
    return topk_refusal(options, experts=experts, top_k=top_k, groups=groups)


def forces_choice(options: RouterConfig) -> bool:
    """True if a table chooses in place of the router."""
    return options.force_balance or bool(options.replay)


def topk(
    logits_TE: Tensor, bias_E: Tensor | None, options: RouterConfig, top_k: int
) -> tuple[Tensor, Tensor]:
    """Experts of every token, best first and ties to the lower, and their weights.

    Args:
        logits_TE: fp32, contiguous, on a Hopper GPU.
        bias_E: fp32, added to the sigmoids in the choice alone; None for no bias.
        options: supported options (see `unsupported`).

    Returns:
        idx_TK int32 and prob_TK fp32, through which gradients reach the logits.
    """
    idx_TK, prob_TK = _Topk.apply(logits_TE, bias_E, options, top_k)
    return idx_TK, prob_TK


def forced(
    logits_TE: Tensor, table: Tensor, first: int, options: RouterConfig
) -> tuple[Tensor, Tensor]:
    """Experts of `ForcedBalance` or `Replay`, whose `table` it is, and their weights, as `topk`.

    `first` is the number of the first token in its expert-parallel group.
    """
    idx_TK, prob_TK = _Forced.apply(logits_TE, table, first, options)
    return idx_TK, prob_TK


@torch.no_grad()
def best(logits_TE: Tensor, top_k: int) -> Tensor:
    """Experts of the K largest logits of every token, as `topk` orders them: int32 [T, K]."""
    from phalanx.kernels.sm90.routing import topk as kernel

    weights = dict(score="softmax", normalize=True, softmax_over="topk", scale=1.0)
    return kernel.topk(logits_TE, top_k=top_k, **weights)[0]  # type: ignore[arg-type]


class _Topk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: RouterConfig, top_k: int
    ) -> tuple[Tensor, Tensor]:
        from phalanx.kernels.sm90.routing import topk as kernel

        choice: Any = dict(bias_E=bias_E, groups=(options.groups, options.group_topk))
        weights = _weights(options)
        idx_TK, prob_TK = kernel.topk(logits_TE, top_k=top_k, **choice, **weights)
        return _save(ctx, logits_TE, idx_TK, prob_TK, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dprob_TK: Tensor) -> tuple[Tensor, None, None, None]:
        return _logits_grad(ctx, dprob_TK), None, None, None


class _Forced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, table: Tensor, first: int, options: RouterConfig
    ) -> tuple[Tensor, Tensor]:
        from phalanx.kernels.routing.forced_triton import forced

        idx_TK, prob_TK = forced(
            logits_TE,
            table,
            first,
            groups=options.groups,
            weights=_kind(options, table.shape[1]),
            scale=options.scale,
        )
        return _save(ctx, logits_TE, idx_TK, prob_TK, _weights(options))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dprob_TK: Tensor) -> tuple[Tensor, None, None, None]:
        return _logits_grad(ctx, dprob_TK), None, None, None


def _weights(options: RouterConfig) -> dict[str, Any]:
    """Options that turn logits into probabilities, for `kernels.sm90.routing.topk`."""
    names = ("score", "normalize", "softmax_over", "scale")
    return {name: getattr(options, name) for name in names}


def _kind(options: RouterConfig, top_k: int) -> str:
    """Name of the function from logits to probabilities, for `kernels.routing.forced_triton`."""
    normalize = options.normalize and top_k > 1
    if options.score == "sigmoid":
        return "sigmoid_sum" if normalize else "sigmoid"
    return "softmax" if normalize or options.softmax_over == "topk" else "softmax_all"


def _save(
    ctx: Any, logits_TE: Tensor, idx_TK: Tensor, prob_TK: Tensor, weights: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    ctx.weights = weights
    ctx.save_for_backward(idx_TK, prob_TK, logits_TE)
    ctx.mark_non_differentiable(idx_TK)
    return idx_TK, prob_TK


def _logits_grad(ctx: Any, dprob_TK: Tensor) -> Tensor:
    from phalanx.kernels.sm90.routing import topk as kernel

    return kernel.topk_backward(dprob_TK.contiguous(), *ctx.saved_tensors, **ctx.weights)
