"""RMSNorm of every place that normalises: block inputs, final, query-key heads, MLA latents, MTP.

Takes Megatron-Core's norm constructor arguments and works under sequence parallelism, which
Megatron-Core's own torch norm refuses. Statistics and the product with the weight are fp32 inside;
input and output share the model's dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        config: gives the dtype of the weight and whether the input is split along the sequence.
        hidden_size: channels normalised together.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each tensor parallel rank sees a part of the tokens: Megatron-Core sums marked gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden_size]; shape and dtype stay."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm_class(backend: str) -> Any:
    """The norm that a layer spec is built with.

    Args:
        backend: `torch` (RMSNorm above) or `te` (Transformer Engine's, through Megatron-Core).

    Raises:
        ValueError: unknown backend.
    """
    if backend == "torch":
        return RMSNorm
    if backend == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    raise ValueError(f"unknown norm backend {backend!r}: set kernels.norm=torch or te")
