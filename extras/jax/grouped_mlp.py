"""`grouped_mlp`: the experts' MLP of rows that are sorted by expert, and its gradients.

Saved for the backward pass are the arguments and h, the output of fc1; activations are recomputed
from it. Both backends compute the same operations and save the same, so which of them runs is left
to the platform that a computation is lowered for.

Legend: S rows, E experts, D hidden, F expert width, H = 2F for gated activations and F for others.
"""

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.jax import reference
from phalanx.jax.varying import vary_alike
from phalanx.kernels.expert_mlp.activation import Activation

BACKENDS = ("auto", "fused", "reference")
_MULTIPLE = 64  # of channels, for the fused kernels


class Choice(NamedTuple):
    """Choices that are compiled in."""

    act: Activation
    backend: str


def grouped_mlp(
    x_SD: jax.Array,
    counts_E: jax.Array,
    w1_EHD: jax.Array,
    w2_EDF: jax.Array,
    prob_S: jax.Array | None = None,
    activation: str | Activation = "swiglu",
    *,
    backend: str = "auto",
) -> jax.Array:
    """out[s] = prob[s] * act(x[s] @ w1[e]^T) @ w2[e]^T for the expert e of row s.

    Products are summed in fp32, and h, the activations, out and the gradients are rounded once.
    Differentiable, once, in x, w1, w2 and prob. All shapes are static, and counts stay on the
    device.

    >>> import jax.numpy as jnp
    >>> from phalanx.jax import grouped_mlp
    >>> x, w1, w2 = jnp.ones((10, 64)), jnp.ones((3, 2 * 128, 64)), jnp.ones((3, 64, 128))
    >>> out = grouped_mlp(x, jnp.array([4, 0, 5]), w1, w2)
    >>> out.shape, float(abs(out[9]).sum())
    ((10, 64), 0.0)

    Args:
        x_SD: rows of the experts, one expert after the other; of bf16, fp16, fp32 or fp64.
        counts_E: integers, the rows of each expert. Rows behind the last expert's are padding,
            whose content has no effect and whose outputs and gradients are 0.
        w1_EHD, w2_EDF: weights in x's dtype; with a gate w1 has F gate rows, then F up rows.
        prob_S: weights of the rows, of floats, used in fp32; None: 1.
        activation: a key of `configs.tables.activations`, or with constants an `Activation`.
        backend: `fused` (the kernels: Hopper, bf16, D and F multiples of 64), `reference`
            (`lax.ragged_dot`, anywhere), or `auto`: `fused` where it can run, by the platform that
            the computation is lowered for.

    Returns:
        [S, D] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown activation or backend, or `fused`
            for what it cannot compute.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    act = activation if isinstance(activation, Activation) else Activation(activation)
    x_SD, counts_E, w1_EHD, w2_EDF = map(jnp.asarray, (x_SD, counts_E, w1_EHD, w2_EDF))
    prob_S = None if prob_S is None else jnp.asarray(prob_S)
    _check(x_SD, counts_E, w1_EHD, w2_EDF, prob_S, act)
    why = _refuse(x_SD, w2_EDF, act)
    if backend == "fused" and why:
        raise ValueError(f"backend='fused' {why}: use backend='reference'")
    if backend == "auto" and why:
        backend = "reference"
        if jax.default_backend() == "gpu":
            warnings.warn(f"grouped_mlp runs its reference: fused {why}", stacklevel=2)
    prob_S = None if prob_S is None else prob_S.astype(jnp.float32)
    ends = jnp.minimum(jnp.cumsum(counts_E.astype(jnp.int32)), x_SD.shape[0])
    offsets = jnp.pad(ends, (1, 0)).astype(jnp.int32)
    return _mlp(Choice(act, backend), *vary_alike((x_SD, offsets, w1_EHD, w2_EDF, prob_S)))


def _check(x: Any, counts: Any, w1: Any, w2: Any, prob: Any, act: Activation) -> None:
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be rows [S, D] of floats, not {x.dtype} {list(x.shape)}")
    (S, D), E, F = x.shape, *(w2.shape[i] if w2.ndim == 3 else 0 for i in (0, 2))
    wanted: dict[str, tuple[Any, tuple[int, ...], str]] = {
        "w2": (w2, (E or 1, D, F or 1), "E, D, F"),
        "w1": (w1, (E, act.width(F), D), f"E, {act.facts.halves} F, D"),
        "counts": (counts, (E,), "E"),
    }
    if prob is not None:
        wanted["prob"] = prob, (S,), "S"
    for name, (array, shape, letters) in wanted.items():
        if array.shape != shape:
            sizes = list(shape)
            raise ValueError(f"{name} must be [{letters}], here {sizes}, not {list(array.shape)}")
    for name, array in (("w1", w1), ("w2", w2)):
        if array.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} as x, not {array.dtype}")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"counts must be integers, not {counts.dtype}")


def _refuse(x: Any, w2: Any, act: Activation) -> str | None:
    """Reason why the fused kernels cannot compute this, or None."""
    _, D, F = w2.shape
    if x.dtype != jnp.bfloat16:
        return f"needs bfloat16, not {x.dtype}"
    if D % _MULTIPLE or F % _MULTIPLE or not x.shape[0]:
        sizes = f"{x.shape[0]} rows, D={D}, F={F}"
        return f"needs rows, and D and F that are multiples of {_MULTIPLE}, not {sizes}"
    if not ACTIVATIONS[act.kind].cute:
        return f"has no activation {act.kind}"
    if find_spec("cutlass") is None or find_spec("cutlass.jax") is None:
        return "needs CuTe DSL, which pip install 'phalanx-moe[compile]' installs"
    try:
        kinds = {device.compute_capability for device in jax.local_devices(backend="cuda")}
    except RuntimeError:  # none here, but it may be lowered for one
        return None
    return None if kinds == {"9.0"} else f"needs Hopper, not GPUs of capability {', '.join(kinds)}"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(choice: Choice, x: Any, offsets: Any, w1: Any, w2: Any, prob: Any) -> Any:
    y, _ = _forward(choice, False, x, offsets, w1, w2, prob)
    return y


def _mlp_forward(choice: Choice, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    y, h = _forward(choice, True, *args)
    return y, (h, *args)


def _mlp_backward(choice: Choice, saved: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    dx, dw1, dw2, dprob = _backward(choice, dy, *saved)
    return dx, None, dw1, dw2, dprob


_mlp.defvjp(_mlp_forward, _mlp_backward)


# Compiled once for all calls outside of a jax.jit: a call of a kernel has no cache of its own.
@partial(jax.jit, static_argnums=(0, 1))
def _forward(choice: Choice, keep_h: bool, *args: Any) -> tuple[Any, Any]:
    """y and h, or None without `keep_h`."""

    def forward(ops: Any, x: Any, offsets: Any, w1: Any, w2: Any, prob: Any) -> tuple[Any, Any]:
        h, a = ops.fc1_act(x, w1, offsets, prob, choice.act, keep_h)
        return ops.fc2(a, w2, offsets), h

    return _on_platform(choice.backend, forward, args)


@partial(jax.jit, static_argnums=0)
def _backward(choice: Choice, *args: Any) -> tuple[Any, ...]:
    """Gradients of x, w1, w2 and prob."""

    def backward(
        ops: Any, dy: Any, h: Any, x: Any, offsets: Any, w1: Any, w2: Any, prob: Any
    ) -> tuple[Any, ...]:
        dh, a, dprob = ops.fc2_dgrad_dact(dy, w2, h, offsets, prob, choice.act)
        dx = ops.fc1_dgrad(dh, w1, offsets)
        return dx, ops.wgrad(dh, x, offsets), ops.wgrad(dy, a, offsets), dprob

    return _on_platform(choice.backend, backward, args)


def _on_platform(backend: str, compute: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    def fused(*args: Any) -> Any:
        from phalanx.jax.kernels import Kernels

        return compute(Kernels(), *args)

    if backend == "fused":
        return fused(*args)
    if backend == "reference":
        return compute(reference, *args)
    return jax.lax.platform_dependent(*args, cuda=fused, default=partial(compute, reference))
