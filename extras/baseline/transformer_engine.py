"""Core attention and norm of Transformer Engine for layer specs."""

import functools
import math
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from phalanx.kernels.core_attention import sinks
from phalanx.kernels.core_attention.max_logit import raise_max_logits
from phalanx.moe.model.attention import (
    CoreAttention,
    attend_in_context,
    window_of,
)
from phalanx.moe.model.max_logits import active_max_logit


class SinkAttention(CoreAttention):
    """Core attention with sinks by Transformer Engine's cuDNN kernels, on whole sequences."""

    def _attend(
        self, q_SBHd: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any = None
    ) -> torch.Tensor:
        assert self.softmax_offset is not None and documents is None
        record_max_logit(self, q_SBHd, k)
        q, k, v = (x.contiguous() for x in (q_SBHd, k, v))
        window = self.window if self.window < q.size(0) else 0
        return sinks.attention(
            q, k, v, self.softmax_offset, scale=self.scale, window=window
        ).flatten(2)


def attention(whole_with_sinks: bool) -> Any:
    """Transformer Engine's core attention as a layer spec takes it."""
    if whole_with_sinks:
        return ModuleSpec(module=SinkAttention, params={"backend": "te"})
    return core_attention()


@functools.cache
def core_attention() -> Any:
    """Transformer Engine's attention under our memory plan; our kernel records largest logits."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class TEAttention(TEDotProductAttention):  # type: ignore[misc]
        def __init__(self, config: TransformerConfig, layer_number: int, **kwargs: Any) -> None:
            super().__init__(config=config, layer_number=layer_number, **kwargs)
            channels = kwargs.get("k_channels") or config.kv_channels
            self.scale = kwargs.get("softmax_scale") or 1 / math.sqrt(channels)
            self.window, self.top = window_of(config, layer_number), None

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            def attend(*qkv: torch.Tensor) -> Any:
                return super(TEAttention, self).forward(*qkv, *args, **kwargs)

            record_max_logit(self, query, key)
            return attend_in_context(attend, query, key, value)

    return TEAttention


def record_max_logit(core: Any, q_SBHd: torch.Tensor, k_SBGd: torch.Tensor) -> None:
    """Record the largest logits of whole sequences, which the library's kernels do not return."""
    if (top := active_max_logit(core)) is not None:
        q, k = (x.permute(1, 2, 0, 3) for x in (q_SBHd, k_SBGd))
        raise_max_logits(top, q, k, scale=core.scale, window=core.window)


def norm() -> Any:
    """Transformer Engine's norm, through Megatron-Core."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
