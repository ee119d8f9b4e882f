"""Grouped-query attention, with norms and rotary embedding by kernels.core_attention.qkv.

Megatron-Core 0.19.2 copies the queries out of the mixed projection, normalises and rotates queries
and keys by separate kernels, and concatenates three gradients. Here one kernel computes the inputs
of core attention from the projection, to which its bias has not been added, and one the gradients.
Norms over all heads together (OLMoE, MiniMax-M2) and norms with weights less 1 (Qwen3-Next) are
separate steps. With an output gate the projection has a gate of each query head, behind the queries
of its group; Megatron-Core multiplies the output by its sigmoid.

Shape legend: S positions, B batch, H query heads, G key-value heads, d channels; N = H / G + 2, or
with a gate 2 H / G + 2. Output projection: T tokens, I channels of all heads, D hidden.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.core_attention.qkv import HeadNorms, queries_keys_values
from phalanx.kernels.core_attention.rope import rope
from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.dense_mlp import dense_linear
from phalanx.moe.model.attention import CoreAttention
from phalanx.parallel.megatron.param_gather import gathered
from phalanx.parallel.megatron.recipe_linear import computes_by
from phalanx.parallel.megatron.weight_grad import accumulate


def over_heads(norm: Any, heads: int, *, hidden_size: int, **kwargs: Any) -> Any:
    """A norm over `heads` heads of `hidden_size` channels together, not one of each."""
    return norm(hidden_size=heads * hidden_size, **kwargs)


class GroupedAttention(SelfAttention):
    """Megatron-Core's SelfAttention for training on whole sequences; parameters are the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mixed = self.config.num_query_groups >= self.world_size
        """Each tensor rank has whole groups, so that the projection can be read as it is."""
        self.linear_qkv.skip_bias_add = self._mixed
        self._reads_views = isinstance(self.core_attention, CoreAttention)
        norm = self.q_layernorm
        self._over_heads = norm is not None and norm.weight.numel() > self.config.kv_channels
        """The norms are those of `over_heads`; all heads are then on this rank."""
        centered = norm is not None and self.config.layernorm_zero_centered_gamma
        self._separate_norms = self._over_heads or centered  # steps before the rotary embedding

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Mixed projection [S, B, G, N, d], bias [G, N, d], None, and gates [S, B, H, d] if any.

        `_adjust_key_value_for_inference` splits the projection. If tensor ranks share groups,
        queries, keys, values and gates as Megatron-Core returns them.
        """
        if not self._mixed:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, bias = self.linear_qkv(hidden_states)
        shape = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        mixed = mixed.view(*mixed.shape[:2], *shape)
        bias = None if bias is None else bias.view(shape)
        if not self.config.attention_output_gate:
            return mixed, bias, None
        if bias is not None:
            mixed = mixed + bias
        R = mixed.shape[-2] // 2 - 1
        return mixed, None, None, mixed[..., R : 2 * R, :].flatten(2, 3)

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotary_pos_emb: tuple[Tensor, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Queries, keys and values after the rotary embedding, and no rotary angles.

        The one hook of Megatron-Core between projections and rotary embedding that has both.
        """
        assert inference_context is None
        (freqs, _), mscale = rotary_pos_emb, self._yarn_concentration_factor
        if self._mixed and self._separate_norms:
            query, key, value = self._normed_separately(query, key, freqs, mscale)
        elif self._mixed:
            query, key, value = queries_keys_values(
                self._ungated(query),
                key,
                freqs,
                mscale=mscale,
                norms=self._norms(),
                view=self._reads_views,
            )
        else:
            assert key is not None
            query, key = (rope(x, freqs, mscale=mscale) for x in (query, key))
        return query, key, value, None, self.attn_mask_type, None

    def _ungated(self, mixed_SBGNd: Tensor) -> Tensor:
        """Queries, key and value of each group; a copy if gates lie between them."""
        if not self.config.attention_output_gate:
            return mixed_SBGNd
        R = mixed_SBGNd.shape[-2] // 2 - 1
        return torch.cat([mixed_SBGNd[..., :R, :], mixed_SBGNd[..., 2 * R :, :]], -2)

    def _normed_separately(
        self, mixed_SBGNd: Tensor, bias_GNd: Tensor | None, freqs: Tensor, mscale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised by head or over all channels and rotated, and values.

        Values are a copy, so that autograd does not save the projection for a part of it.
        """
        if bias_GNd is not None:
            mixed_SBGNd = mixed_SBGNd + bias_GNd
        N, d = mixed_SBGNd.shape[3:]
        R = N // 2 - 1 if self.config.attention_output_gate else N - 2
        q, k = mixed_SBGNd[..., :R, :].flatten(2, 3), mixed_SBGNd[..., -2, :]
        if self._over_heads:
            q, k = q.flatten(2), k.flatten(2)
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        q_SBHd, k_SBGd = (
            rope(x.reshape(*x.shape[:2], -1, d), freqs, mscale=mscale) for x in (q, k)
        )
        return q_SBHd, k_SBGd, mixed_SBGNd[..., -1, :].contiguous()

    def _norms(self) -> HeadNorms | None:
        if self.q_layernorm is None:
            return None
        query, key = (gathered(norm).weight for norm in (self.q_layernorm, self.k_layernorm))
        return HeadNorms(query, key, self.config.layernorm_epsilon)


class OutputProjection(RowParallelLinear):
    """The projection after attention, whose GEMM adds the bias if there is one (GPT-OSS).

    Megatron-Core 0.19.2 adds the bias in a separate operation, which reads and writes all tokens
    once more. cuBLASLt adds it while it writes the product (torch.addmm), rounding once. On a CPU
    this has Megatron-Core's bits; several tensor parallel ranks add the bias to their sum.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output [s, B, D] of [s, B, I], and the bias if it has yet to be added."""
        if self.bias is None or not input_.is_cuda or self.tp_group.size() > 1:
            out, bias = super().forward(input_)
            return out, bias
        x_TI, spec = input_.flatten(0, -2), computes_by(self)
        if spec is not None:
            out_TD = dense_linear(x_TI, self.weight, self.bias, spec)
        else:
            fuses = self.gradient_accumulation_fusion
            out_TD = _Biased.apply(x_TI, self.weight, self.bias, fuses)
        return out_TD.view(*input_.shape[:-1], -1), None


class _Biased(torch.autograd.Function):
    """x @ w^T + b; the gradient of w is added to its buffer, if there is one."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, w_DI: Tensor, b_D: Tensor, accumulate: bool) -> Tensor:
        ctx.save_for_backward(x_TI, w_DI)
        ctx.accumulated = w_DI if accumulate and main_grad.takes(w_DI) else None
        return torch.addmm(b_D, x_TI, w_DI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, w_DI = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx_TI = d_TD @ w_DI if need_x else None
        dw_DI = _weight_grad(ctx.accumulated, d_TD, x_TI) if need_w else None
        return dx_TI, dw_DI, d_TD.sum(0) if need_b else None, None


def _weight_grad(accumulated: Tensor | None, d_TD: Tensor, x_TI: Tensor) -> Tensor | None:
    if accumulated is None:
        return d_TD.t() @ x_TI

    def compute(buffer: main_grad.Buffer) -> None:
        if not buffer.add:
            buffer.out.zero_()
        accumulate(x_TI, d_TD, buffer.out)

    return main_grad.write(accumulated, compute)
