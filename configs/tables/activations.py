"""The activations: one entry each, from which everything else derives what it knows of them.

An entry names its functions by import path, `module:function`, so that reading it imports neither
torch nor the compiler of the GPU kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ActivationFacts:
    """Properties of an activation that need no computation.

    The functions are of one channel x of h, or of the gate's half of h, after its clamp. Clamps,
    offset, product with the linear half and probability are done around them
    (`kernels.expert_mlp.activation.Activation`, which they get as `act` for its constants).
    """

    gated: bool  # a linear half of h multiplies the activated one
    meaning: str  # the formula and its source, in Markdown, for the documentation
    value: str  # value(x: Tensor, act: Activation) -> Tensor in plain torch, elementwise
    slope: str  # its derivative, slope(x: Tensor, act: Activation) -> Tensor
    torch: str = ""
    """`torch.nn.functional.NAME` with the backward `torch.ops.aten.NAME_backward`: faster without
    compiling, and recognised by Megatron-Core; empty if torch has none."""
    cute: str = ""
    """(value, derivative) on registers, function(x: Float32, act: Activation); empty: the fused
    kernels refuse this activation."""

    @property
    def halves(self) -> int:
        """Rows of W1 over the width of the MLP: 2 with a linear half, else 1."""
        return 2 if self.gated else 1


ACTIVATIONS: dict[str, ActivationFacts] = {
    "swiglu": ActivationFacts(
        gated=True,
        meaning="gate * sigmoid(gate) * up (arXiv 2002.05202)",
        value="phalanx.kernels.expert_mlp.activation:silu",
        slope="phalanx.kernels.expert_mlp.activation:silu_slope",
        torch="silu",
        cute="phalanx.kernels.sm90.gemm.activate:silu",
    ),
    "geglu": ActivationFacts(
        gated=True,
        meaning=(
            "gate * Phi(gate) * up with the exact normal distribution function (arXiv 2002.05202)"
        ),
        value="phalanx.kernels.expert_mlp.activation:gelu",
        slope="phalanx.kernels.expert_mlp.activation:gelu_slope",
        torch="gelu",
        cute="phalanx.kernels.sm90.gemm.activate:gelu",
    ),
    "quick_geglu": ActivationFacts(
        gated=True,
        meaning="gate * sigmoid(activation_alpha * gate) * up (GPT-OSS, arXiv 2508.10925)",
        value="phalanx.kernels.expert_mlp.activation:quick_gelu",
        slope="phalanx.kernels.expert_mlp.activation:quick_gelu_slope",
        cute="phalanx.kernels.sm90.gemm.activate:quick_gelu",
    ),
    "squared_relu": ActivationFacts(
        gated=False,
        meaning="max(h, 0)^2, not gated (arXiv 2109.08668)",
        value="phalanx.kernels.expert_mlp.activation:squared_relu",
        slope="phalanx.kernels.expert_mlp.activation:squared_relu_slope",
        cute="phalanx.kernels.sm90.gemm.activate:squared_relu",
    ),
}
"""Facts of each activation, keyed by the value of `model.moe.activation`."""
