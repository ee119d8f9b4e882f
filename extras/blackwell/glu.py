"""Activations as cuDNN's gated epilogues, with their constants.

Its `geglu` is the gate times a sigmoid of alpha times the gate, after clamps and with an offset of
the up channels: with alpha 1 and clamps that are never reached it is SwiGLU. In bf16 the forward
kernel has its constants compiled in; block-scaled kernels, and all backward ones, take them.
"""

from typing import Any, NamedTuple

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.limits import Refusal

BUILT_IN = dict(alpha=1.702, limit=7.0)  # constants of the forward kernel in bf16
_NEVER = 3.0e38  # a clamp that no value reaches: clamps must be finite


class Epilogue(NamedTuple):
    """Keyword arguments of cuDNN's wrappers for an activation."""

    forward: dict[str, Any]  # arguments of the forward wrapper
    backward: dict[str, Any]  # of the backward wrapper, which also recomputes the activations


def unsupported(act: Activation, *, block_scaled: bool) -> Refusal:
    """Reason why an activation has no epilogue, or None."""
    if act.kind not in ("swiglu", "quick_geglu"):
        return f"has no epilogue of {act.kind}"
    if block_scaled or (act.kind == "swiglu" and not act.limit and not act.offset):
        return None
    if act.kind == "quick_geglu" and (act.alpha, act.limit) == tuple(BUILT_IN.values()):
        return None
    return (
        "has in bf16 epilogues of swiglu without clamp and offset, and of quick_geglu with "
        f"model.moe.activation_alpha={BUILT_IN['alpha']} and "
        f"model.moe.activation_limit={BUILT_IN['limit']}"
    )


def epilogue(act: Activation, *, block_scaled: bool) -> Epilogue:
    """The epilogue of an activation, or a ValueError."""
    if why := unsupported(act, block_scaled=block_scaled):
        raise ValueError(f"kernels=cudnn {why}: set model.moe.activation, or kernels=torch")
    limit = act.limit or _NEVER
    constants = dict(
        linear_offset=act.offset,
        geglu_alpha=act.alpha if act.kind == "quick_geglu" else 1.0,
        glu_clamp_max=limit,
        glu_clamp_min=-limit,
    )
    backward = dict(act_func="dgeglu", **constants)
    if act.kind == "swiglu" and not act.limit and not act.offset:
        return Epilogue(dict(act_func="swiglu"), backward)
    if not block_scaled:  # the wrapper takes these in bf16 only where they are its defaults
        return Epilogue(dict(act_func="geglu", linear_offset=act.offset), backward)
    return Epilogue(dict(act_func="geglu", **constants), backward)
