"""ReLU on registers, as an activation outside of the package has it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from phalanx.kernels.expert_mlp.activation import Activation


def relu(x: Float32, act: Activation) -> tuple[Float32, Float32]:
    """Value and derivative."""
    slope = cutlass.select_(x > 0.0, Float32(1), Float32(0))
    return cute.arch.fmax(x, Float32(0), nan=True), slope
