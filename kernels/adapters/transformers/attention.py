"""flash-attn-4 as an implementation of attention of transformers: `phalanx_fa4`.

transformers' own implementation calls the library's autograd function. This one has outputs
and gradients in the layout of the layers around it, kernels in the project's cache on disk, and a
gradient of GPT-OSS's sinks; it reads nothing on the host, so that a CUDA graph captures it. Causal
attention over whole sequences runs in it, with windows and sinks. All else is left to SDPA or, with
sinks, to the eager function of the model's file: steps of generation, padding, packed sequences,
dropout, other dtypes, and tensors on a CPU.

Legend: B batch, H query heads, G key-value heads, S queries, T keys, d channels.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from phalanx.kernels.availability import fa4
from phalanx.kernels.core_attention.core import visible_ST
from phalanx.kernels.limits import unsupported_heads
from phalanx.kernels.registry import Facts

FA4 = "phalanx_fa4"  # value of `attn_implementation`


def fa4_refusal(model: Any) -> str | None:
    """Reason why a model's attention cannot run in flash-attn-4 here, or None."""
    cuda = torch.cuda.is_available()
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    value = getattr(config, "v_head_dim", None) or width
    if getattr(config, "qk_nope_head_dim", None):
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
    if getattr(config, "attention_dropout", 0):
        return "flash-attn-4 has no dropout"
    if getattr(config, "attn_logit_softcapping", None):
        return "its logits have a soft cap"
    facts = Facts(
        device="cuda" if cuda else "cpu",
        capability=torch.cuda.get_device_capability() if cuda else None,
        dtype=torch.bfloat16,
        head_dim=width,
        v_dim=value,
    )
    if why := fa4(facts):
        return f"flash-attn-4 {why}"
    grouped = getattr(config, "num_key_value_heads", heads) != heads
    return unsupported_heads(width, value, grouped=grouped and value == width)


def mask(
    *args: Any,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | None:
    """None for causal attention over whole sequences, whatever its window, or a mask of SDPA."""
    whole = q_length == kv_length
    given = dict(options, q_length=q_length, kv_length=kv_length)
    made: Tensor | None = sdpa_mask(*args, local_size=None if whole else local_size, **given)
    return made


def forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, S, H, v], as transformers' registry calls an implementation.

    Args:
        query: [B, H, S, d]; key and value: [B, G, T, .].
        attention_mask: as `mask` makes it.
        s_aux: logits [H] of sinks.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as it does for SDPA
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    if attention_mask is None and _fits(module, query, key, value, dropout, options):
        from phalanx.kernels.core_attention import fa4 as library

        q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = sliding_window or 0
        window = 0 if window >= key.shape[2] else window
        out_SBHv = library.attention(q, k, v, s_aux, scale=scale, window=window, batch_first=True)
        return out_SBHv.transpose(0, 1), None
    S, T = query.shape[2], key.shape[2]
    if attention_mask is None and S > 1 and (s_aux is not None or (sliding_window or T) < T):
        attention_mask = visible_ST(S, T, sliding_window or 0, query.device)[None, None]
    if s_aux is None:
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )[0]
        return out, None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = query.new_zeros(()).where(attention_mask, lowest)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out = eager(module, query, key, value, attention_mask, scaling, dropout, **options)[0]
    return out, None


def _fits(
    module: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float, options: dict[str, Any]
) -> bool:
    if not q.is_cuda or any(x.dtype != torch.bfloat16 for x in (q, k, v)):
        return False
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if dropout or not causal or q.shape[2] != k.shape[2] or options.get("softcap"):
        return False
    if options.get("cu_seq_lens_q") is not None or torch.compiler.is_compiling():
        return False
    grouped = q.shape[1] != v.shape[1]
    if unsupported_heads(q.shape[-1], v.shape[-1], grouped=grouped):
        return False
    return torch.cuda.get_device_capability(q.device) == (9, 0)


ALL_ATTENTION_FUNCTIONS.register(FA4, forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(FA4, mask)
