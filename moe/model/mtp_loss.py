"""Losses of multi-token prediction: for each token ahead, the mean over the labels that count.

Replaces Megatron-Core's `process_mtp_loss`, which divides by the labels of a micro-batch of a rank,
so that few labels weigh as much as many, and counts correct predictions by a pass over all logits.

Legend: B sequences, S tokens of this rank, K tokens ahead.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor


class _Weights(NamedTuple):
    labels_K: Tensor
    losses: list[Tensor]


_WEIGHTS: ContextVar[_Weights | None] = ContextVar("labels_ahead", default=None)


@contextlib.contextmanager
def labels_ahead(labels_K: Tensor) -> Iterator[list[Tensor]]:
    """Divide losses of tokens ahead by these numbers, and append them to the list.

    Outside of this context they are divided by the labels that the model was called with.
    """
    weights = _Weights(labels_K, [])
    token = _WEIGHTS.set(weights)
    try:
        yield weights.losses
    finally:
        _WEIGHTS.reset(token)


def mtp_loss(
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Callable[..., Any],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    **_: Any,
) -> Tensor:
    """Hidden states that predict the next token; their gradient includes that of the losses.

    Arguments are those of `process_mtp_loss`. `hidden_states` is the concatenation, along its first
    dimension, of the states that predict the next token and each token ahead.
    """
    next_SBD, *ahead = hidden_states.chunk(1 + config.mtp_num_layers)
    if labels is None or not is_training:
        return next_SBD
    mask = torch.ones_like(labels, dtype=torch.bool) if loss_mask is None else loss_mask
    weights, shift = _WEIGHTS.get(), {"cp_group": cp_group, "packed_seq_params": packed_seq_params}
    for k, hidden_SBD in enumerate(ahead):
        logits, _ = output_layer(
            hidden_SBD, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        labels, _ = roll_tensor(labels, **shift)
        mask, number = roll_tensor(mask, **shift)
        number = number.clamp(min=1) if weights is None else weights.labels_K[k]
        loss_BS = mask * compute_language_model_loss(labels, logits)
        if weights is not None:
            weights.losses.append(loss_BS.detach().sum() / number)
        scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        next_SBD = MTPLossAutoScaler.apply(next_SBD, scale * loss_BS / number)
    return next_SBD
