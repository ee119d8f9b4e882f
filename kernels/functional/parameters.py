"""Weights of experts as the parameters of a module.

Legend: E experts, D hidden, F expert width, H = 2F for gated activations and F for others.
"""

from typing import Any

import torch
from torch import nn

from phalanx.kernels.expert_mlp.activation import Activation


class ExpertParameters(nn.Module):
    """Base of modules with experts: w1 [E, H, D], w2 [E, D, F], and b1 [E, H], b2 [E, D] or None.

    Args:
        experts, hidden, ffn: E, D and F.
        activation: of the experts.
        bias: biases in both layers.
        where: device and dtype.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        ffn: int,
        activation: Activation,
        *,
        bias: bool,
        where: dict[str, Any],
    ) -> None:
        super().__init__()
        width = activation.width(ffn)
        self.w1 = nn.Parameter(torch.empty(experts, width, hidden, **where))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, ffn, **where))
        self.b1 = nn.Parameter(torch.empty(experts, width, **where)) if bias else None
        self.b2 = nn.Parameter(torch.empty(experts, hidden, **where)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's layers as `torch.nn.Linear` draws them: uniform within fan_in^-1/2."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)
