"""The activations of `configs.tables.activations` on registers, forward and backward, in fp32."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from phalanx.kernels.expert_mlp.activation import Activation, function
from phalanx.kernels.sm90.jit import ptx

_LOG2E = math.log2(math.e)
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; absolute error 1.5e-7.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def forward(act: Activation, gate: Float32, up: Float32) -> Float32:
    """act(h) of one channel; `up` is used only if the activation is gated."""
    gate, up, _, _ = _clamp(act, gate, up)
    value, _ = _activate(act, gate)
    return value * up if act.gated else value


def backward(
    act: Activation, gate: Float32, up: Float32, da: Float32
) -> tuple[Float32, Float32, Float32]:
    """Gradients of gate and up from that of act(h), and act(h)."""
    gate, up, gate_inside, up_inside = _clamp(act, gate, up)
    value, slope = _activate(act, gate)
    d_gate, d_up, out = da * slope, da * value, value
    if act.gated:
        d_gate, out = d_gate * up, value * up
    if act.limit:
        d_gate = cutlass.select_(gate_inside, d_gate, Float32(0))
        d_up = cutlass.select_(up_inside, d_up, Float32(0))
    return d_gate, d_up, out


def _clamp(act: Activation, gate: Float32, up: Float32) -> tuple:
    inside, up_inside = None, None
    if act.limit:
        limit = Float32(act.limit)
        inside, gate = gate <= limit, cute.arch.fmin(gate, limit, nan=True)
        if act.gated:
            up_inside = (up <= limit) & (up >= -limit)
            up = cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), -limit, nan=True)
        else:
            up_inside = inside
    if act.offset and act.gated:
        up = up + act.offset
    return gate, up, inside, up_inside


def _activate(act: Activation, x: Float32) -> tuple[Float32, Float32]:
    if not act.facts.cute:
        raise ValueError(
            f"activation {act.kind!r} has no `cute` function in phalanx.configs.tables.activations"
        )
    value, slope = function(act.facts.cute)(x, act)
    return value, slope


def silu(x: Float32, act: Activation) -> tuple[Float32, Float32]:
    """x * sigmoid(x), and its derivative."""
    return _sigmoid_linear(x, 1.0)


def quick_gelu(x: Float32, act: Activation) -> tuple[Float32, Float32]:
    """x * sigmoid(alpha * x), and its derivative."""
    return _sigmoid_linear(x, act.alpha)


def gelu(x: Float32, act: Activation) -> tuple[Float32, Float32]:
    """x * Phi(x), and its derivative."""
    cdf, density = _normal(x)
    return x * cdf, cdf + x * density


def squared_relu(x: Float32, act: Activation) -> tuple[Float32, Float32]:
    """max(x, 0)^2, and its derivative."""
    positive = cute.arch.fmax(x, Float32(0), nan=True)
    return positive * positive, positive + positive


def _sigmoid_linear(x: Float32, alpha: float) -> tuple[Float32, Float32]:
    s = cute.arch.rcp_approx(1.0 + ptx.exp2(x * Float32(-alpha * _LOG2E)))
    value = x * s
    return value, s + alpha * (value - value * s)


def _normal(x: Float32) -> tuple[Float32, Float32]:
    bell = ptx.exp2(x * x * Float32(-0.5 * _LOG2E))
    magnitude = cute.arch.fmax(x, -x)
    t = cute.arch.rcp_approx(1.0 + Float32(0.3275911 * math.sqrt(0.5)) * magnitude)
    tail = Float32(_ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        tail = tail * t + coefficient
    tail = 0.5 * tail * t * bell
    cdf = cutlass.select_(x < 0.0, tail, 1.0 - tail)
    return cdf, bell * Float32(math.sqrt(0.5 / math.pi))
