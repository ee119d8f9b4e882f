"""Rates of the products of experts by the size of their matrices."""

import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx.configs.schema import ModelConfig
from phalanx.configs.tables.machines import Machine

_DEEPSEEK, _MIXTRAL = 7168 * 2048, 4096 * 14336
_GAINS = [(_DEEPSEEK, 1.0), (_MIXTRAL, 1.06)]
_FP8_GAINS = [(_DEEPSEEK, 1.0), (_MIXTRAL, 1.27)]
"""Rates over those of a machine, by elements of a matrix: of experts up to DeepSeek-V3's, and of
Mixtral-8x7B's, two on a rank with 4,096 rows each, on four H200s
(docs/measured/training/four_h200s.md)."""


def by_size(model: ModelConfig, measured: Sequence[tuple[int, float]]) -> float:
    """Value for the experts of a model, between measured ones by the logarithm of their sizes.

    Args:
        model: with experts.
        measured: elements of a matrix and value, smallest first; sizes beyond take those at the
            ends.
    """
    size = model.hidden * model.moe.ffn
    below = max((m for m in measured if m[0] <= size), default=measured[0])
    above = min((m for m in measured if m[0] >= size), default=measured[-1])
    if above[0] == below[0]:
        return below[1]
    share = math.log(size / below[0]) / math.log(above[0] / below[0])
    return below[1] + share * (above[1] - below[1])


def with_wide_experts(model: ModelConfig, machine: Machine) -> Machine:
    """The machine with the rates of our kernels for experts of this model's size."""
    return replace(
        machine,
        expert_tflops=by_size(model, _GAINS) * machine.expert_tflops,
        expert_fp8_tflops=by_size(model, _FP8_GAINS) * machine.expert_fp8_tflops,
    )
