"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): n residual streams, mixed.

A connection is the residual around one sublayer F, with n streams x_1 .. x_n in place of one:

    x'_i = sum_j M_ij x_j + w_i F(sum_j r_j x_j)

r (n numbers in 0 .. 1), w (n in 0 .. 2) and M (n x n) are functions of a token's streams. M is made
doubly stochastic, so that products of many of them neither grow nor vanish; hyper-connections
without that limit are those of arXiv 2409.19606.

The logits are scale * (phi x / rms(x)) + offset, of all n * D channels x of a token. In the
beginning offsets have r = 1 / n, w = 1 and M near the identity, and streams are equal: the model is
that with one residual but for what phi adds, times a scale of 0.01 (the report gives the scale, and
no offsets).

Legend: T tokens, n streams, D hidden, C = n * D, P = n * (n + 2) logits.
"""

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.moe.router.logits import gate

ITERATIONS = 20  # of Sinkhorn-Knopp, as in the report
_SCALE = 0.01  # of the mappings that depend on the token, in the beginning
_APART = -4.0  # logit between two streams in the beginning, where a stream's own has 0
_LEAST = -60.0  # logit below the largest of its matrix at which exp is still far above 0 in fp32


class Sinkhorn(torch.autograd.Function):
    """`sinkhorn`; it saves its argument alone, and iterates again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_Tnn: Tensor, iterations: int) -> Tensor:
        """Doubly stochastic matrices."""
        ctx.save_for_backward(logits_Tnn)
        ctx.iterations = iterations
        matrix_Tnn = _start(logits_Tnn)
        for _ in range(iterations):
            matrix_Tnn = matrix_Tnn / matrix_Tnn.sum(-2, keepdim=True)
            matrix_Tnn = matrix_Tnn / matrix_Tnn.sum(-1, keepdim=True)
        return matrix_Tnn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Tnn: Tensor) -> tuple[Tensor, None]:
        """Gradient of the logits."""
        (logits_Tnn,) = ctx.saved_tensors
        matrix_Tnn = first_Tnn = _start(logits_Tnn)
        steps = []
        for dim in (-2, -1) * ctx.iterations:
            total = matrix_Tnn.sum(dim, keepdim=True)
            matrix_Tnn = matrix_Tnn / total
            steps.append((dim, total, matrix_Tnn))
        for dim, total, normed_Tnn in reversed(steps):
            grad_Tnn = (grad_Tnn - (grad_Tnn * normed_Tnn).sum(dim, keepdim=True)) / total
        # The largest logit is taken off all of them, which changes no result and no gradient.
        return grad_Tnn * first_Tnn, None


def sinkhorn(logits_Tnn: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """exp(logits) [T, n, n], its columns and then its rows divided by their sums, repeatedly.

    Rows of the result sum to 1, columns nearly.
    """
    result: Tensor = Sinkhorn.apply(logits_Tnn, iterations)
    return result


def _start(logits_Tnn: Tensor) -> Tensor:
    return (logits_Tnn - logits_Tnn.amax((-2, -1), keepdim=True)).clamp(min=_LEAST).exp()


class HyperConnection(torch.nn.Module):
    """The connection around one sublayer.

    Parameters in `config.params_dtype`: phi [P, C], offset [P] less its beginning, scale [3] for
    reading, writing and mixing. Logits and what they become are fp32 (of fp64 parameters fp64).

    Args:
        config: Megatron-Core's config of the model.
        streams: n.
    """

    def __init__(self, config: TransformerConfig, streams: int) -> None:
        super().__init__()
        self.streams, self.eps = streams, config.layernorm_epsilon
        device, dtype = torch.cuda.current_device(), config.params_dtype
        n, channels = streams, streams * config.hidden_size
        phi_PC = torch.empty(n * (n + 2), channels, dtype=dtype, device=device)
        if config.perform_initialization:
            config.init_method(phi_PC)
        self.phi = torch.nn.Parameter(phi_PC)
        self.scale = torch.nn.Parameter(torch.full((3,), _SCALE, dtype=dtype, device=device))
        self.offset = torch.nn.Parameter(torch.zeros(n * (n + 2), dtype=dtype, device=device))

    def forward(self, x_TnD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input of the sublayer [T, D], and for `write` the mixing [T, n, n] and weights [T, n]."""
        read_Tn, write_Tn, mix_Tnn = self.mappings(x_TnD.flatten(1))
        read_T1n = read_Tn.to(x_TnD.dtype)[:, None]
        return torch.bmm(read_T1n, x_TnD).squeeze(1), mix_Tnn, write_Tn

    def mappings(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients: to read [T, n], to write [T, n], to mix [T, n, n]."""
        n = self.streams
        logits_TP = gate(x_TC, self.phi, None)
        # The norm comes after the product: x is read once, and no normalised copy is saved.
        norm_T1 = torch.linalg.vector_norm(x_TC, dim=-1, keepdim=True, dtype=logits_TP.dtype)
        logits_TP = logits_TP * (norm_T1.square() / x_TC.size(1) + self.eps).rsqrt()
        scales = zip(self.scale.to(logits_TP.dtype), (n, n, n * n), strict=True)
        scale_P = torch.cat([scale.expand(count) for scale, count in scales])
        logits_TP = torch.addcmul(self.offset.to(logits_TP.dtype), logits_TP, scale_P)
        read_Tn, write_Tn, mix_TM = logits_TP.split((n, n, n * n), dim=1)
        mix_Tnn = mix_TM.unflatten(1, (n, n)) + self._apart(mix_TM)
        return (read_Tn - math.log(n - 1)).sigmoid(), 2 * write_Tn.sigmoid(), sinkhorn(mix_Tnn)

    def _apart(self, like: Tensor) -> Tensor:
        eye_nn = torch.eye(self.streams, dtype=like.dtype, device=like.device)
        return _APART * (1 - eye_nn)


def write(x_TnD: Tensor, out_TD: Tensor, mix_Tnn: Tensor, write_Tn: Tensor) -> Tensor:
    """Streams after the sublayer [T, n, D], of its output `out_TD` and coefficients."""
    mixed_TnD = torch.bmm(mix_Tnn.to(x_TnD.dtype), x_TnD)
    return torch.addcmul(mixed_TnD, write_Tn.to(x_TnD.dtype)[:, :, None], out_TD[:, None])
