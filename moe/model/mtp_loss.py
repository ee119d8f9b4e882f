"""Losses of multi-token prediction: for each token ahead, the mean over the labels that count.

Replaces Megatron-Core's `process_mtp_loss`, which divides by the labels of a micro-batch of a rank,
so that few labels weigh as much as many, and counts correct predictions by a pass over all logits.

Legend: B sequences, S tokens of this rank, K tokens ahead.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor

from phalanx.moe.model.loss import LossContext

Shift = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Shift of [B, S] by one token within sequences and documents; with it, the sum of the result."""


def keep_predictions(hidden_states: Tensor, **_: Any) -> Tensor:
    """Hidden states as they are, in place of `process_mtp_loss`, which would add the losses.

    The model adds them itself, where it has their `LossContext`.
    """
    return hidden_states


def token_shift(cp_group: Any, packed_seq_params: Any) -> Shift:
    """Megatron-Core's shift of tokens, labels and masks for one call of a model."""
    return lambda x: roll_tensor(x, cp_group=cp_group, packed_seq_params=packed_seq_params)


def add_losses_ahead(
    hidden_states: list[Tensor],
    labels: Tensor,
    loss_mask: Tensor | None,
    context: LossContext,
    *,
    token_loss: Callable[[Tensor, Tensor], Tensor],
    shift: Shift,
    config: Any,
) -> Tensor:
    """Hidden states that predict the next token; their gradient includes that of the losses ahead.

    Args:
        hidden_states: [S, B, D] each, which predict the next token and each token ahead.
        labels: [B, S], of the next token.
        loss_mask: bool [B, S]: labels that count; None counts all.
        context: receives the losses ahead.
        token_loss: losses [B, S] from hidden states and labels.
        shift: see `Shift`.
        config: TransformerConfig with the factor of the losses.
    """
    next_SBD, *ahead = hidden_states
    mask = torch.ones_like(labels, dtype=torch.bool) if loss_mask is None else loss_mask
    for k, hidden_SBD in enumerate(ahead):
        labels, _ = shift(labels)
        mask, number = shift(mask)
        if context.labels_ahead_K is None:
            number = number.clamp(min=1)
        else:
            number = context.labels_ahead_K[k]
        loss_BS = mask * token_loss(hidden_SBD, labels)
        if context.labels_ahead_K is not None:
            context.losses_ahead.append(loss_BS.detach().sum() / number)
        scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        next_SBD = MTPLossAutoScaler.apply(next_SBD, scale * loss_BS / number)
    return next_SBD
