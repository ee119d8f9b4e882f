"""Scales of the auxiliary losses' gradients, which Megatron-Core keeps as attributes of classes."""

from typing import Any

import torch


def scalers() -> tuple[Any, ...]:
    """Classes with a `main_loss_backward_scale`; Megatron-Core must be importable."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    return MoEAuxLossAutoScaler, MTPLossAutoScaler


def reset() -> None:
    """Set the scales of a new process, which an earlier test in this one may have changed."""
    for scaler in scalers():
        scaler.main_loss_backward_scale = torch.tensor([1.0])
