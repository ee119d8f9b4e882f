"""Facts on a parameter, in one typed record next to the attributes of Megatron-Core's protocol.

Attributes that Megatron-Core reads or writes stay on the parameter itself: `allreduce`,
`sequence_parallel`, `tensor_model_parallel`, `partition_dim`, `no_weight_decay`, `main_grad`,
`grad_added_to_main_grad`, `zero_out_wgrad`. Everything else that one part of Phalanx notes for
another is a field here.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_ATTRIBUTE = "phalanx_facts"


@dataclass
class ParameterFacts:
    """Facts on one parameter, or on the tensor that its optimizer updates in place of it."""

    gated_run: int = 0
    """Channels of a run of gates or ups in weights with a `ChannelOrder`; 0 for the order
    [gate; up]. Set by `moe.experts`."""
    adds_to_main_grad: bool = False
    """Every gradient is added to `main_grad` by the backward pass. Set by `moe.experts`."""
    replaces_main_grad: bool = False
    """The next gradient replaces the contents of `main_grad`. Set and cleared by
    `kernels.expert_mlp.main_grad`."""
    fp8_copies: Any = None
    """Cached FP8 copies (`kernels.expert_mlp.fp8.copies`), until the next update of the
    parameter."""
    matrices: Any = None  # shapes of its matrices, for an optimizer that updates each as a whole


def facts_of(parameter: Tensor) -> ParameterFacts:
    """Facts on a parameter; a record of defaults is attached to it at the first call."""
    facts: ParameterFacts | None = getattr(parameter, _ATTRIBUTE, None)
    if facts is None:
        facts = ParameterFacts()
        setattr(parameter, _ATTRIBUTE, facts)
    return facts
