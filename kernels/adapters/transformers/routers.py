"""Routers of transformers in the kernel of `router_topk`.

transformers chooses experts by some six operations. A router is known by its values: a copy with
random weights routes random tokens, and the options of `router_topk` that give the same experts and
weights are taken. Which module it is, its parameters and its results stay as they are.

Legend: N tokens, E experts, K experts per token, D hidden.
"""

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from phalanx.kernels.api import RouterOptions, router_topk

_TOKENS = 64
_GROUPS, _CHOSEN = ("num_group", "n_group"), ("topk_group",)
_SCALES = ("routed_scaling_factor",)


class RouterFacts(NamedTuple):
    """Options of `router_topk` and casts that give the results of a router."""

    options: RouterOptions
    correction: str | None  # parameter or buffer [E] that is added to the scores in the choice
    wide: bool  # logits are computed in fp32
    rounded: bool  # weights have the dtype of the logits, and are not fp32


def fuse_routers(model: nn.Module) -> tuple[int, list[str]]:
    """Have routers choose by `router_topk`; how many, and classes of those that stay as they are.

    Routers are modules with a weight [E, D] and `top_k` that return logits, weights and experts.
    """
    fused, left = 0, set()
    for module in model.modules():
        if not _is_router(module):
            continue
        if (facts := module.__dict__.get("_phalanx") or _facts(module)) is None:
            left.add(type(module).__name__)
            continue
        module.__dict__["_phalanx"] = facts
        module.forward = partial(_forward, module)
        fused += 1
    return fused, sorted(left)


def _is_router(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.ndim == 2
        and isinstance(getattr(module, "top_k", None), int)
        and not any(True for _ in module.children())
    )


def _forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, E], weights [N, K] and experts [N, K], as the module's own forward pass."""
    options, correction, wide, rounded = router._phalanx
    weight, bias = router.weight, getattr(router, "bias", None)
    x_ND = hidden_states.reshape(-1, weight.shape[1])
    if wide:
        x_ND, weight = x_ND.float(), weight.float()
    logits_NE = linear(x_ND, weight, bias)
    added = None if correction is None else getattr(router, correction)
    idx_NK, prob_NK = router_topk(logits_NE, router.top_k, added, **options)
    return logits_NE, prob_NK.to(logits_NE.dtype) if rounded else prob_NK, idx_NK.long()


@torch.no_grad()
def _facts(router: Any) -> RouterFacts | None:
    """Facts about this router, or None if `router_topk` does not compute it."""
    E, D = router.weight.shape
    others = [*router.named_parameters(recurse=False), *router.named_buffers(recurse=False)]
    corrections = [name for name, t in others if t.shape == (E,) and name != "bias"]
    if len(others) > 1 + len(corrections) + (getattr(router, "bias", None) is not None):
        return None
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(router).to_empty(device="cpu").float().train()
    for _, tensor in [*probe.named_parameters(), *probe.named_buffers()]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    x_ND = torch.randn(_TOKENS, D, generator=generator)
    try:
        logits_NE, want_NE = _dense(probe(x_ND.clone()), E)
        low = copy.deepcopy(probe).bfloat16()(x_ND.bfloat16())
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    wide = low[0].dtype == torch.float32
    if not torch.allclose(logits_NE, linear(x_ND, probe.weight, probe._parameters.get("bias"))):
        return None
    rounded = not wide and low[1].dtype == low[0].dtype
    for options, correction in _candidates(router, corrections):
        added = None if correction is None else getattr(probe, correction)
        idx, prob = router_topk(logits_NE, router.top_k, added, **options, backend="torch")
        if torch.allclose(_dense((logits_NE, prob, idx), E)[1], want_NE, atol=1e-6):
            return RouterFacts(options, correction, wide, rounded)
    return None


def _dense(routed: Any, experts: int) -> tuple[Tensor, Tensor]:
    """Logits, and weights [N, E] of the chosen experts, which have no order."""
    logits_NE, prob_NK, idx_NK = routed
    if prob_NK.shape != idx_NK.shape or logits_NE.shape != (_TOKENS, experts):
        raise ValueError
    return logits_NE, torch.zeros(_TOKENS, experts).scatter_(1, idx_NK.long(), prob_NK.float())


def _candidates(router: Any, corrections: list[str]) -> Iterator[tuple[Any, str | None]]:
    def numbers(names: tuple[str, ...]) -> list[Any]:
        values = {getattr(router, name, None) for name in names}
        return [v for v in values if isinstance(v, (int, float)) and v and v != 1]

    scores: list[dict[str, Any]] = [
        dict(score="softmax"),
        dict(score="softmax", softmax_over="topk"),
        dict(score="sigmoid"),
    ]
    grouped: list[dict[str, Any]] = [
        dict(groups=groups, group_topk=getattr(router, name))
        for groups in numbers(_GROUPS)
        for name in _CHOSEN
        if isinstance(getattr(router, name, None), int)
    ]
    scales = [1.0, *map(float, numbers(_SCALES))]
    for score, normalize, scale, groups in itertools.product(
        scores, (False, True), scales, [*grouped, {}]
    ):
        chosen = dict(score, normalize=normalize, scale=scale, **groups)
        for correction in [*corrections, None] if score["score"] == "sigmoid" else [None]:
            if _exists(router, chosen):
                yield chosen, correction


def _exists(router: Any, options: dict[str, Any]) -> bool:
    try:
        router_topk(torch.zeros(1, len(router.weight)), router.top_k, **options, backend="torch")
    except ValueError:  # groups that do not fit
        return False
    return True
