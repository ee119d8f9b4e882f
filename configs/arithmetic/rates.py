"""Rates of core attention by library and shape of heads, and of experts by size of matrices.

Those of attention are from times of kernels on one H200, of sequences of 4,096 tokens
(docs/measured/kernels/libraries.md).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx.configs.arithmetic.accounting import core_flops, core_layers
from phalanx.configs.arithmetic.attention import head_dims
from phalanx.configs.arithmetic.layers import expert_hidden, has_window
from phalanx.configs.schema import AttentionConfig, ModelConfig
from phalanx.configs.tables.machines import MACHINES, Machine

_LENGTH, _WINDOW, _TILE = 4096, 128, 128
_HEAD_US: dict[str, dict[tuple[int, int], float]] = {
    "fa4": {
        (64, 64): (558.0 + 1435.2) / (2 * 64),
        (128, 128): (429.3 + 1258.5) / (2 * 32),
        (192, 128): (1035.4 + 4119.2) / 128,
    },
    "cudnn": {
        (64, 64): (602.6 + 1884.2) / (2 * 64),
        (128, 128): (472.0 + 1455.6) / (2 * 32),
        (192, 128): (1240.0 + 4420.8) / 128,
    },
    "flex": {
        (64, 64): (820.6 + 2974.0) / (2 * 64),
        (128, 128): (743.2 + 2633.8) / (2 * 32),
        (192, 128): (2337.6 + 12561.5) / 128,
    },
}
"""Microseconds of a query head, forward and backward, by library and channels of key and value."""
_WINDOWED_US = {
    "fa4": (151.7 + 446.8) / (2 * 64),
    "cudnn": (147.7 + 578.9) / (2 * 64),
    "flex": (210.1 + 653.5) / (2 * 64),
}
"""The same of heads of 64 channels with a sliding window of `_WINDOW`."""


def core_tflops(model: ModelConfig, length: int, library: str, machine: Machine) -> float:
    """TFLOP/s of the kernels alone over all layers with core attention, by our count of FLOPs.

    `library` is `fa4`, `cudnn` (in Transformer Engine) or `flex`. Shapes that were not measured
    take those of the nearest key; times scale by the machine's `attention_tflops`.
    """
    a, layers = model.attention, core_layers(model)
    us = sum(_head_us(a, length, library, windowed=has_window(a, layer)) for layer in layers)
    on_h200 = core_flops(model, length) * length / (a.heads * us) / 1e6
    return on_h200 * machine.attention_tflops / MACHINES["h200"].attention_tflops


def _head_us(a: AttentionConfig, length: int, library: str, *, windowed: bool) -> float:
    dims, measured, times = head_dims(a), _HEAD_US[library], length / _LENGTH
    known = min(measured, key=lambda shape: abs(shape[0] - dims[0]))
    us = measured[known] * sum(dims) / sum(known)
    if not windowed or a.window >= length:
        return us * times**2
    # Tiles on the diagonal and on the edge of the window are computed whole.
    wider = (a.window + _TILE) / (_WINDOW + _TILE)
    return us * times * wider * _WINDOWED_US[library] / measured[64, 64]


_DEEPSEEK, _MIXTRAL = 7168 * 2048, 4096 * 14336
_GAINS = [(_DEEPSEEK, 1.0), (_MIXTRAL, 1.06)]
_FP8_GAINS = [(_DEEPSEEK, 1.0), (_MIXTRAL, 1.27)]
"""Rates over those of a machine: of experts up to DeepSeek-V3's, and of Mixtral-8x7B's, two on a
rank with 4,096 rows each, on four H200s (docs/measured/training/four_h200s.md)."""


def by_size(model: ModelConfig, measured: Sequence[tuple[int, float]]) -> float:
    """Value for the experts of a model, between measured ones by the logarithm of their sizes.

    `measured` are elements of a matrix and value, smallest first; the ends hold beyond them.
    """
    size = expert_hidden(model) * model.moe.ffn
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
