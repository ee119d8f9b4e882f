"""RMSNorm of every place that normalises: block inputs, final, query-key heads, MLA latents, MTP.

Modules over `kernels.norm`, which take Megatron-Core's norm constructor arguments and work under
sequence parallelism, which Megatron-Core's own torch norm refuses. Statistics and the product with
the weight are fp32 inside; input and output share the model's dtype.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.kernels.rms_norm.rms_norm import fork, rms_norm


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        config: gives the dtype of the weight, whether the input is split along the sequence, and
            whether gradients of weights are added to Megatron-Core's buffers as they are made.
            Weights are stored less 1 with `layernorm_zero_centered_gamma`.
        hidden_size: channels normalised together.
        eps: added to the mean square.
        backend: of `kernels.norm`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        self.eps, self.backend = eps, backend
        self.centered = config.layernorm_zero_centered_gamma
        self._accumulate = config.gradient_accumulation_fusion
        make = torch.zeros if self.centered else torch.ones
        self.weight = torch.nn.Parameter(
            make(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each tensor parallel rank sees a part of the tokens: Megatron-Core sums marked gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        """Normalise [..., hidden_size]; shape and dtype stay."""
        return rms_norm(x, self.weight, self.eps, **self._how())

    def _how(self) -> dict[str, Any]:
        return dict(backend=self.backend, accumulate=self._accumulate, centered=self.centered)


class ResidualNorm(RMSNorm):
    """In front of attention or MLP: what these read, and what is going to be added to it.

    Megatron-Core's layer takes such a pair from a norm (it has one in Transformer Engine,
    `fused_residual_rmsnorm`, which adds the gradients but not the residual);
    `moe.model.transformer_layer` also gives it the residual to add.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum) of x and residual, all [..., hidden_size]."""
        return fork(x, residual, self.weight, self.eps, **self._how())


def norm_class(backend: str, *, residual: bool = False) -> Any:
    """The norm that a layer spec is built with.

    Args:
        backend: `torch` or `quack` (of `kernels.norm`), or `te` (Transformer Engine's, through
            Megatron-Core).
        residual: ResidualNorm; of `te` there is none.

    Raises:
        ValueError: unknown backend.
    """
    if backend in ("torch", "quack"):
        return partial(ResidualNorm if residual else RMSNorm, backend=backend)
    if backend == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    raise ValueError(f"unknown norm backend {backend!r}: set kernels.norm=torch, quack or te")
