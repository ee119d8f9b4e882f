"""Keys and values of multi-head latent attention (arXiv 2405.04434), one pass over them on a GPU.

A key is a part per head, from the up-projection that has the values too, and a rotary part that all
heads share. On CUDA `kernels.core_attention.latent_triton` rotates the shared part and writes both,
and the values; its backward pass writes the gradient of the up-projection, and sums that of the
shared part over heads in fp32 before it is rotated back and rounded. Elsewhere it is
Megatron-Core's composition on `kernels.core_attention.rope`.

Megatron-Core's Triton kernels for the same, `fusions.fused_mla_yarn_rope_apply`, support only YaRN,
need widths that are powers of two, take cosines and sines in bf16, and round the sum over heads
before it is rotated. On an H200 they take 0.87 to 0.96 of the time of these in the backward pass;
forward they took 1.4 to 1.6 times as long when these left out the values, which Megatron-Core's
attention then copied (docs/measured/kernels/libraries.md).

Legend: S positions, B batch, H heads, n channels of a key's part per head, F shared and rotated, d
= n + F, v channels of a value, m = n + v.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.core_attention.rope import check_angles, dense, rope


def keys_values(
    kv_SBHm: Tensor, shared_SBF: Tensor, freqs_S11F: Tensor, *, nope: int, mscale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Keys whose shared part is rotated, and values: k_SBHd and v_SBHv, on CUDA contiguous.

    Args:
        kv_SBHm: up-projection, any strides with contiguous channels, bf16 or fp32.
        shared_SBF: in the dtype of kv, any strides; channels 2i and 2i + 1 form a pair, which
            becomes n + i and n + i + F / 2 of the keys.
        freqs_S11F: fp32 angles in radians for all F channels; both halves are the same.
        mscale: factor on the rotated channels (YaRN, arXiv 2309.00071).

    Raises:
        ValueError: shapes, dtypes or angles that do not fit.
    """
    S, B, H, m = kv_SBHm.shape
    F = shared_SBF.shape[-1]
    check_angles(S, F, freqs_S11F)
    if shared_SBF.shape != (S, B, F) or freqs_S11F.shape[-1] != F or not 0 < nope < m:
        raise ValueError(
            f"a shared rotary part {list(shared_SBF.shape)} and angles {list(freqs_S11F.shape)} "
            f"do not fit heads {list(kv_SBHm.shape)} with {nope} channels of keys"
        )
    if shared_SBF.dtype != kv_SBHm.dtype:
        raise ValueError(f"a shared rotary part in {shared_SBF.dtype}, heads in {kv_SBHm.dtype}")
    if kv_SBHm.is_cuda:
        return KeysValues.apply(kv_SBHm, shared_SBF, freqs_S11F, nope, mscale)
    rotated_SB1F = rope(shared_SBF.unsqueeze(2), freqs_S11F, mscale=mscale, interleaved=True)
    k_SBHn, v_SBHv = kv_SBHm.split([nope, m - nope], -1)
    return torch.cat([k_SBHn, rotated_SB1F.expand(S, B, H, F)], -1), v_SBHv


class KeysValues(torch.autograd.Function):
    """`keys_values` by the kernels."""

    @staticmethod
    def forward(
        ctx: Any, kv_SBHm: Tensor, shared_SBF: Tensor, freqs_S11F: Tensor, nope: int, mscale: float
    ) -> tuple[Tensor, Tensor]:
        from phalanx.kernels.core_attention.latent_triton import join

        ctx.save_for_backward(freqs_S11F)
        ctx.mscale = mscale
        S, B, H, m = kv_SBHm.shape
        k_SBHd = kv_SBHm.new_empty(S, B, H, nope + shared_SBF.shape[-1])
        v_SBHv = kv_SBHm.new_empty(S, B, H, m - nope)
        freqs_SF = freqs_S11F[:, 0, 0]
        join(dense(kv_SBHm), dense(shared_SBF), freqs_SF, k_SBHd, v_SBHv, mscale=mscale)
        return k_SBHd, v_SBHv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_SBHd: Tensor, dv_SBHv: Tensor) -> tuple[Tensor | None, ...]:
        from phalanx.kernels.core_attention.latent_triton import part

        (freqs_S11F,) = ctx.saved_tensors
        (S, B, H, d), F = dk_SBHd.shape, freqs_S11F.shape[-1]
        dkv_SBHm = dk_SBHd.new_empty(S, B, H, d - F + dv_SBHv.shape[-1])
        dshared_SBF = dk_SBHd.new_empty(S, B, F)
        part(
            dense(dk_SBHd),
            dense(dv_SBHv),
            freqs_S11F[:, 0, 0],
            dkv_SBHm,
            dshared_SBF,
            mscale=ctx.mscale,
        )
        return dkv_SBHm, dshared_SBF, None, None, None
