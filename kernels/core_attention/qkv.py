"""From a fused projection to the queries, keys and values of grouped-query attention.

On a GPU one pass over the projection (`kernels.core_attention.qkv_triton`): its bias, norms of
query and key heads (arXiv 2302.05442), rotary embedding (arXiv 2104.09864) and the split into three
tensors; and one pass back, which also sums the gradients of the bias and of the norms' weights, in
an order that depends only on shapes. All of it is fp32 and rounded once. Elsewhere torch's norm and
`kernels.core_attention.rope`.

Transformer Engine and Megatron-Core rotate a fused projection (`apply_fused_qkv_rotary_pos_emb`)
without norms and bias. Transformer Engine's norms and rotation, one after the other, take more than
four times as long forward and twice as long backward (docs/measured/kernels/libraries.md).

Legend: S positions, B batch, H query heads, G key-value heads, d channels; N = H / G + 2, the heads
of a group in a fused projection: its queries, its key, its value.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.core_attention.rope import check_angles, dense, rope


class HeadNorms(NamedTuple):
    """RMSNorm of every query head and of every key head (arXiv 1910.07467)."""

    query_d: Tensor  # weight of the queries' norm, bf16 or fp32
    key_d: Tensor  # weight of the keys' norm, in the same dtype
    eps: float  # added to the mean square of a head's channels


def queries_keys_values(
    qkv_SBGNd: Tensor,
    bias_GNd: Tensor | None,
    freqs_S11F: Tensor,
    *,
    mscale: float = 1.0,
    norms: HeadNorms | None = None,
    view: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of a fused projection plus its bias, normed and rotated, and its values.

    Args:
        qkv_SBGNd: any strides with contiguous channels, bf16 or fp32.
        bias_GNd: in the dtype of qkv, contiguous.
        freqs_S11F: fp32 angles in radians; both halves of F are the same. The kernel rotates all
            channels, F = d; with fewer the composition runs.
        mscale: factor on queries and keys (YaRN, arXiv 2309.00071).
        norms: norms of the heads, before the rotation.
        view: with norms, whose gradient needs the projection anyway, and without a bias, values may
            be a view of it, for a core attention that reads them in place.

    Returns:
        [S, B, H, d], [S, B, G, d] and [S, B, G, d] in the dtype of qkv; on CUDA contiguous, except
        for values that are a view.

    Raises:
        ValueError: angles that do not fit.
    """
    check_angles(qkv_SBGNd.shape[0], qkv_SBGNd.shape[-1], freqs_S11F)
    if qkv_SBGNd.is_cuda and freqs_S11F.shape[-1] == qkv_SBGNd.shape[-1]:
        args = QkvArgs(mscale, 0.0 if norms is None else norms.eps, view)
        weights = (None, None) if norms is None else norms[:2]
        return QueriesKeysValues.apply(qkv_SBGNd, bias_GNd, *weights, freqs_S11F, args)  # type: ignore[no-any-return]
    if bias_GNd is not None:
        qkv_SBGNd = qkv_SBGNd + bias_GNd
    q_SBGRd, k_SBG1d, v_SBG1d = qkv_SBGNd.split([qkv_SBGNd.shape[-2] - 2, 1, 1], -2)
    q_SBHd, k_SBGd = q_SBGRd.flatten(2, 3), k_SBG1d.squeeze(-2)
    if norms is not None:
        q_SBHd = F.rms_norm(q_SBHd, norms.query_d.shape, norms.query_d, norms.eps)
        k_SBGd = F.rms_norm(k_SBGd, norms.key_d.shape, norms.key_d, norms.eps)
    rotated = (rope(x, freqs_S11F, mscale=mscale) for x in (q_SBHd, k_SBGd))
    return *rotated, v_SBG1d.squeeze(-2)  # type: ignore[return-value]


class QkvArgs(NamedTuple):
    """Arguments of the kernels that are not tensors."""

    mscale: float
    eps: float
    view: bool


class QueriesKeysValues(torch.autograd.Function):
    """`queries_keys_values` by the kernels; saves the projection only with norms.

    Values may be a view, which results of a torch custom operator must not be.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBGNd: Tensor,
        bias_GNd: Tensor | None,
        query_d: Tensor | None,
        key_d: Tensor | None,
        freqs_S11F: Tensor,
        args: QkvArgs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from phalanx.kernels.core_attention.qkv_triton import part

        normed = query_d is not None
        ctx.save_for_backward(
            qkv_SBGNd if normed else None, bias_GNd if normed else None, query_d, key_d, freqs_S11F
        )
        ctx.args = args
        ctx.biased = None if bias_GNd is None else bias_GNd.dtype
        S, B, G, N, d = qkv_SBGNd.shape
        q_SBHd, k_SBGd = (qkv_SBGNd.new_empty(S, B, heads, d) for heads in (G * (N - 2), G))
        view = args.view and normed and bias_GNd is None
        v_SBGd = None if view else torch.empty_like(k_SBGd)
        part(
            dense(qkv_SBGNd),
            (q_SBHd, k_SBGd, v_SBGd),
            freqs_S11F[:, 0, 0],
            bias_GNd=bias_GNd,
            weights=(query_d, key_d),
            eps=args.eps,
            mscale=args.mscale,
        )
        return q_SBHd, k_SBGd, qkv_SBGNd[..., N - 1, :] if v_SBGd is None else v_SBGd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from phalanx.kernels.core_attention.qkv_triton import join

        qkv_SBGNd, bias_GNd, query_d, key_d, freqs_S11F = ctx.saved_tensors
        dq_SBHd, dk_SBGd, dv_SBGd = (dense(x) for x in gradients)
        S, B, G, d = dk_SBGd.shape
        dqkv_SBGNd = dk_SBGd.new_empty(S, B, G, dq_SBHd.shape[2] // G + 2, d)
        dbias_GNd, dweights_2d = join(
            (dq_SBHd, dk_SBGd, dv_SBGd),
            dqkv_SBGNd,
            freqs_S11F[:, 0, 0],
            qkv_SBGNd=None if qkv_SBGNd is None else dense(qkv_SBGNd),
            bias_GNd=bias_GNd,
            bias_dtype=ctx.biased,
            weights=(query_d, key_d),
            eps=ctx.args.eps,
            mscale=ctx.args.mscale,
        )
        dquery_d, dkey_d = (None, None) if dweights_2d is None else dweights_2d
        return dqkv_SBGNd, dbias_GNd, dquery_d, dkey_d, None, None
