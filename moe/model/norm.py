"""RMSNorm modules for block inputs, the final norm, query-key heads, MLA latents and MTP.

They take the arguments of Megatron-Core's norms and support sequence parallelism, which its torch
norm does not. Statistics and the product with the weight are fp32 inside.
"""

from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.configs.tables.backends import NORM_BACKENDS
from phalanx.kernels.rms_norm.rms_norm import fork, rms_norm


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        config: dtype of the weight, whether the input is split along the sequence, and whether
            gradients of weights are added directly to Megatron-Core's buffers. Weights are stored
            less 1 with `layernorm_zero_centered_gamma`.
        hidden_size: number of channels normalised together.
        eps: added to the mean square.
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
        # Each tensor parallel rank has some of the tokens: Megatron-Core sums marked gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        """Normalised [..., hidden_size], in the shape and dtype of the input."""
        return rms_norm(x, self.weight, self.eps, **self._options())

    def _options(self) -> dict[str, Any]:
        return dict(backend=self.backend, accumulate=self._accumulate, centered=self.centered)


class ResidualNorm(RMSNorm):
    """Norm in front of attention or MLP that also adds the residual, and returns both.

    Megatron-Core's layer accepts such a pair (Transformer Engine's `fused_residual_rmsnorm`,
    which adds the gradients but not the residual); `moe.model.transformer_layer` also passes the
    residual.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum) of x and residual, all [..., hidden_size]."""
        return fork(x, residual, self.weight, self.eps, **self._options())


def norm_class(backend: str, *, residual: bool = False) -> Any:
    """Norm class of a layer spec; with `residual` ResidualNorm, if the norm is ours."""
    if backend not in NORM_BACKENDS:
        known = " or ".join(NORM_BACKENDS)
        raise ValueError(f"unknown norm backend {backend!r}: set kernels.norm={known}")
    if path := NORM_BACKENDS[backend].layer:
        return resolve_name(path)()
    return partial(ResidualNorm if residual else RMSNorm, backend=backend)
