"""Rates of the kernels of other stacks: measured on one H200, and scaled to the machine.

Sources: grouped products of Transformer Engine 2.20.2 with the activation between them, forward
and backward, of three local shapes; docs/measured/kernels/libraries.md for core attention.
"""

import math
from dataclasses import replace

from phalanx.configs.schema import AttentionConfig, Config
from phalanx.configs.tables.machines import MACHINES, Machine
from phalanx.moe.estimate.work import flops

_GROUPED: tuple[tuple[int, int, int, float], ...] = (
    (65536, 2048, 768, 1.918 + 2.553),  # Qwen3-30B-A3B on eight ranks
    (32768, 2880, 2880, 2.708 + 6.273),  # GPT-OSS-20B on eight ranks
    (65536, 7168, 2048, 9.159 + 19.560),  # DeepSeek-V3 on eight ranks
)
"""Rows, hidden size, width of an expert, and milliseconds forward and backward, smallest first."""

_ATTENTION: dict[str, dict[tuple[int, int, bool], float]] = {
    "cudnn": {
        (128, 128, False): (472.0 + 1455.6) / (2 * 32),
        (64, 64, False): (602.6 + 1884.2) / (2 * 64),
        (64, 64, True): (147.7 + 578.9) / (2 * 64),
        (192, 128, False): (1240.0 + 4420.8) / 128,
    },
    "flex": {
        (128, 128, False): (743.2 + 2633.8) / (2 * 32),
        (64, 64, False): (820.6 + 2974.0) / (2 * 64),
        (64, 64, True): (210.1 + 653.5) / (2 * 64),
        (192, 128, False): (2337.6 + 12561.5) / 128,
    },
}
"""Microseconds of a query head over `_LENGTH` tokens, forward and backward, by library and by
channels of a key, of a value, and a sliding window of 128."""
_LENGTH = 4096


def peer_machine(cfg: Config, machine: Machine, attention: str) -> Machine:
    """The machine with the rates that others reach for the experts and attention of a model.

    Args:
        cfg: model, and 4,096 tokens a sequence.
        machine: rates of our kernels, whose ratio to those on an H200 scales the measurements.
        attention: library, a key of the measurements.
    """
    h200 = MACHINES["h200"]
    return replace(
        machine,
        expert_tflops=_grouped(cfg) * machine.expert_tflops / h200.expert_tflops,
        attention_tflops=_core(cfg, attention) * machine.attention_tflops / h200.attention_tflops,
    )


def _grouped(cfg: Config) -> float:
    """TFLOP/s of a model's experts, between measured ones by the size of a matrix."""
    measured = []
    for rows, hidden, ffn, ms in _GROUPED:
        measured.append((math.log(hidden * ffn), 18e-9 * rows * hidden * ffn / ms))
    size = math.log(cfg.model.hidden * cfg.model.moe.ffn)
    below = max((m for m in measured if m[0] <= size), default=measured[0])
    above = min((m for m in measured if m[0] >= size), default=measured[-1])
    share = (size - below[0]) / (above[0] - below[0]) if above > below else 0.0
    return below[1] + share * (above[1] - below[1])


def _core(cfg: Config, library: str) -> float:
    """TFLOP/s of core attention over all layers, the causal half of its products counted."""
    a = cfg.model.attention
    kinds = [False] if not a.window else [False, True]
    us = [_ATTENTION[library][(*_channels(a), windowed)] for windowed in kinds]
    return flops(cfg).core * _LENGTH * len(us) / (a.heads * sum(us)) / 1e6


def _channels(a: AttentionConfig) -> tuple[int, int]:
    if a.kind == "gqa":
        return a.head_dim, a.head_dim
    return a.qk_nope_dim + a.qk_rope_dim, a.v_dim
