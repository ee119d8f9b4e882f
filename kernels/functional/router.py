"""The choice of experts and their weights as a function of a router's logits.

Legend: T tokens, E experts, K experts per token.
"""

import functools
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from phalanx.kernels.availability import hopper_kernels
from phalanx.kernels.functional.custom_ops import constant, decoded
from phalanx.kernels.functional.options import (
    check_bool,
    check_devices,
    check_floats,
    check_sizes,
    filled,
)
from phalanx.kernels.limits import impossible_groups
from phalanx.kernels.registry import Facts, KernelUnavailable
from phalanx.kernels.routing import topk_ops
from phalanx.kernels.routing.topk_scores import choice_scores, choose, probabilities, topk_refusal
from phalanx.kernels.tracing import constant_in_graphs


class _Backend(NamedTuple):
    kernel: bool  # the kernel routes where it can
    forced: bool = False  # it is an error where it cannot


_BACKENDS = {
    "auto": _Backend(kernel=True),
    "fused": _Backend(kernel=True, forced=True),
    "torch": _Backend(kernel=False),
}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)  # of logits
_SCORES, _SOFTMAXES = ("softmax", "sigmoid"), ("all", "topk")


class RouterOptions(TypedDict, total=False):
    """Keyword arguments of `router_topk`."""

    score: str
    """`softmax` (default) or `sigmoid` of the logits."""
    softmax_over: str
    """Logits of the softmax: `all` (default), or those of the chosen experts (`topk`)."""
    normalize: bool
    """Divide the weights of a token by their sum; false by default. One expert per token is never
    normalised: its weight would be 1, and the router would not learn."""
    scale: float
    """Factor of the weights; 1 by default."""
    groups: int
    """Number of groups of E / groups experts; 1 by default."""
    group_topk: int
    """Number of groups that a token chooses from; all by default. The score of a group is the sum
    of its K // group_topk best experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    backend: str
    """`fused`, `torch`, or `auto`: the kernel where it can run."""


class _Weights(NamedTuple):
    """A `kernels.routing.topk_scores.Weighting`."""

    score: str
    normalize: bool
    softmax_over: str
    scale: float


_DEFAULTS: dict[str, Any] = dict(
    score="softmax",
    softmax_over="all",
    normalize=False,
    scale=1.0,
    groups=1,
    group_topk=None,
    backend="auto",
)


def router_topk(
    logits: Tensor, top_k: int, bias: Tensor | None = None, **options: Unpack[RouterOptions]
) -> tuple[Tensor, Tensor]:
    """The K best experts of each token, best first and ties to the lower, and their weights.

    Differentiable, once, in the logits. Nothing is read on the host.

    >>> import torch
    >>> from phalanx.kernels.api import router_topk
    >>> idx, prob = router_topk(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2, normalize=True)
    >>> idx.tolist(), prob.tolist()
    ([[1, 3]], [[0.5, 0.5]])

    Args:
        logits: [..., E] fp32, bf16, fp16 or fp64, used in fp32. T may be 0.
        top_k: K, from 1 to E.
        bias: [E], with `score="sigmoid"`: added to the scores in the choice alone, as to balance
            experts without a loss (arXiv 2408.15664). It has no gradient.
        options: `RouterOptions`.

    Returns:
        Experts [..., K] int32 and weights [..., K] fp32, as `grouped_experts` takes them.

    Raises:
        TypeError: an option that does not exist.
        ValueError: shapes, dtypes, devices or options that do not fit, or a backend that cannot run
            here.
    """
    chosen = filled(options, _DEFAULTS, "router_topk")
    if chosen["group_topk"] is None:
        chosen["group_topk"] = chosen["groups"]
    _check(logits, top_k, bias, chosen)
    logits_TE = logits.reshape(-1, logits.shape[-1]).contiguous()
    if logits.dtype not in _KERNEL_DTYPES:
        logits_TE = logits_TE.float()
    backend = _BACKENDS[chosen.pop("backend")]
    groups = chosen.pop("groups"), chosen.pop("group_topk")
    weights = _Weights(**chosen)
    sizes = (constant(logits_TE.shape[1]), constant(top_k), *groups)
    fused = _is_fused(*backend, logits.device, sizes, *map(constant, weights))
    if bias is not None:
        bias = bias.detach().float().contiguous()
    if fused:
        idx_TK, prob_TK = topk_ops.differentiable_topk(logits_TE, bias, top_k, groups, *weights)
    else:
        logits_TE = logits_TE.float()
        scores_TE = choice_scores(logits_TE.detach(), weights, bias, groups[1] < groups[0])
        chosen_TK = choose(scores_TE, top_k, *groups)
        idx_TK, prob_TK = chosen_TK.int(), probabilities(logits_TE, chosen_TK, weights)
    shape = (*logits.shape[:-1], top_k)
    return idx_TK.view(shape), prob_TK.view(shape)


def _check(logits: Tensor, top_k: int, bias: Tensor | None, options: dict[str, Any]) -> None:
    check_floats("logits", logits, channels=True)
    E = logits.shape[-1]
    groups, chosen = options["groups"], options["group_topk"]
    check_sizes(top_k=top_k, groups=groups, group_topk=chosen)
    if isinstance(options["scale"], bool) or not isinstance(options["scale"], (int, float)):
        raise ValueError(f"scale must be a number, not {options['scale']!r}")
    check_bool("normalize", options["normalize"])
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k={top_k} must be from 1 to {E}, the number of experts")
    for name, known in (("score", _SCORES), ("softmax_over", _SOFTMAXES), ("backend", _BACKENDS)):
        if options[name] not in tuple(known):  # it may have no hash
            raise ValueError(f"{name}={options[name]} is unknown: use {', '.join(known)}")
    if why := impossible_groups(groups, chosen, experts=E, top_k=top_k):
        raise ValueError(f"groups={groups}, group_topk={chosen}: {why}")
    if bias is None:
        return
    if options["score"] != "sigmoid":
        raise ValueError("bias is for score=sigmoid: leave it out")
    check_floats("bias", bias)
    if bias.shape != (E,):
        raise ValueError(f"bias must be [{E}] as logits are [..., {E}], not {list(bias.shape)}")
    check_devices(logits, bias=bias)


@constant_in_graphs
def _is_fused(*problem: Any) -> bool:
    """`_fused`, which Dynamo would trace through its cache."""
    return _fused(*problem)


@functools.cache
def _fused(
    kernel: bool, forced: bool, device: torch.device, sizes: tuple[int, ...], *weights: Any
) -> bool:
    """True if the kernel routes `sizes` E, K, groups, group_topk.

    KernelUnavailable if it is asked for and cannot.
    """
    if not kernel:
        return False
    experts, top_k, groups, chosen = sizes
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    facts = Facts(device=device.type, capability=capability, dtype=torch.float32)
    why = hopper_kernels(facts) or topk_refusal(
        _Weights(*map(decoded, weights)), experts=experts, top_k=top_k, groups=(groups, chosen)
    )
    if why and forced:
        raise KernelUnavailable(f"backend=fused cannot run: {why}; use backend=auto")
    return why is None
