"""The operations of `grouped_mlp` in plain JAX, for any device and dtype: the definition.

Sums and activations are in fp32, in fp64 for operands in fp64. Rows of the padding are 0.

Legend: S rows, E experts, D hidden, F expert width, H = 2F with a gate and F without, K and N
channels in and out.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers

from phalanx.kernels.expert_mlp.activation import Activation

# Rows of both operands are summed over, by expert: [S, N] and [S, K] to [E, N, K].
_OVER_ROWS = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


def fc1_act(
    x_SD: Any, w1_EHD: Any, offsets: Any, prob_S: Any, act: Activation, keep_h: bool
) -> tuple[Any, Any]:
    """h[s] = x[s] @ w1[e]^T (None without `keep_h`), and a[s] = act(h[s]) * prob[s]."""
    h_SH = _rows(x_SD, w1_EHD.mT, offsets)
    return h_SH if keep_h else None, _activate(h_SH, prob_S, act).astype(x_SD.dtype)


def fc2(a_SF: Any, w2_EDF: Any, offsets: Any) -> Any:
    """y[s] = a[s] @ w2[e]^T."""
    return _rows(a_SF, w2_EDF.mT, offsets)


def fc2_dgrad_dact(
    dy_SD: Any, w2_EDF: Any, h_SH: Any, offsets: Any, prob_S: Any, act: Activation
) -> tuple[Any, Any, Any]:
    """Gradient of h, the activations again, and the gradient of prob (None without prob)."""
    da_SF = _grouped(dy_SD, w2_EDF, offsets)
    a_SF, gradients = jax.vjp(lambda h, prob: _activate(h, prob, act), h_SH, prob_S)
    dh_SH, dprob_S = gradients(da_SF)
    return dh_SH, a_SF.astype(h_SH.dtype), dprob_S


def fc1_dgrad(dh_SH: Any, w1_EHD: Any, offsets: Any) -> Any:
    """dx[s] = dh[s] @ w1[e]."""
    return _rows(dh_SH, w1_EHD, offsets)


def wgrad(d_SN: Any, v_SK: Any, offsets: Any) -> Any:
    """dw[e] = sum over the rows s of expert e of outer(d[s], v[s]): [E, N, K]."""
    # What the padding holds must not count, not even NaN times 0.
    d_SN, v_SK = (jnp.where(_is_row(x, offsets), x, 0) for x in (d_SN, v_SK))
    dw_ENK = jax.lax.ragged_dot_general(
        *(d_SN, v_SK, jnp.diff(offsets), _OVER_ROWS), preferred_element_type=_sums(d_SN)
    )
    return dw_ENK.astype(d_SN.dtype)


def _rows(a_SK: Any, w_EKN: Any, offsets: Any) -> Any:
    return _grouped(a_SK, w_EKN, offsets).astype(a_SK.dtype)


def _grouped(a_SK: Any, w_EKN: Any, offsets: Any) -> Any:
    """a[s] @ w[e], not rounded."""
    a_SK = jnp.where(_is_row(a_SK, offsets), a_SK, 0)
    product = jax.lax.ragged_dot(a_SK, w_EKN, jnp.diff(offsets), preferred_element_type=_sums(a_SK))
    return jnp.where(_is_row(product, offsets), product, 0)


def _activate(h_SH: Any, prob_S: Any, act: Activation) -> Any:
    """act(h) * prob, not rounded."""
    gate = h_SH.astype(_sums(h_SH))
    up: Any = None
    if act.gated:
        gate, up = jnp.split(gate, 2, axis=-1)
    if act.limit:  # where() passes the gradient up to and with the limit, as the kernels do
        gate = jnp.where(gate > act.limit, act.limit, gate)
        if act.gated:
            up = jnp.where(up > act.limit, act.limit, up)
            up = jnp.where(up < -act.limit, -act.limit, up)
    value = _VALUES[act.kind](gate, act)
    if act.gated:
        value = value * (up + act.offset)
    return value if prob_S is None else value * prob_S[:, None]


def _is_row(x: Any, offsets: Any) -> Any:
    return jnp.arange(x.shape[0])[:, None] < offsets[-1]


def _sums(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


_VALUES = {
    "swiglu": lambda x, act: jax.nn.silu(x),
    "geglu": lambda x, act: jax.nn.gelu(x, approximate=False),
    "quick_geglu": lambda x, act: x * jax.nn.sigmoid(act.alpha * x),
    "squared_relu": lambda x, act: jnp.square(jax.nn.relu(x)),
}
