"""Rates of the kernels of other stacks: measured on one H200, and scaled to the machine.

Sources: grouped products of Transformer Engine 2.20.2 with the activation between them, forward
and backward, of three local shapes; `configs.arithmetic.core_attention`.
"""

from dataclasses import replace

from phalanx.configs.arithmetic.core_attention import core_tflops
from phalanx.configs.arithmetic.expert_rates import by_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES, Machine

_GROUPED: tuple[tuple[int, int, int, float], ...] = (
    (65536, 2048, 768, 1.918 + 2.553),  # Qwen3-30B-A3B on eight ranks
    (32768, 2880, 2880, 2.708 + 6.273),  # GPT-OSS-20B on eight ranks
    (65536, 7168, 2048, 9.159 + 19.560),  # DeepSeek-V3 on eight ranks
)
"""Rows, hidden size, width of an expert, and milliseconds forward and backward, smallest first."""


ELEMENTWISE_PASSES = 5.7
"""Reads and writes of a saved tensor by elementwise work without fusion, forward and backward."""


def peer_machine(cfg: Config, machine: Machine, attention: str) -> Machine:
    """The machine with the rates that others reach for the experts and attention of a model.

    Args:
        cfg: model and length of sequences.
        machine: rates of our kernels, whose ratio to those on an H200 scales the measurements.
        attention: library, a key of the measurements.
    """
    h200 = MACHINES["h200"]
    return replace(
        machine,
        expert_tflops=_grouped(cfg) * machine.expert_tflops / h200.expert_tflops,
        attention_tflops=core_tflops(cfg.model, cfg.data.sequence_length, attention, machine),
    )


def _grouped(cfg: Config) -> float:
    """TFLOP/s of a model's experts, between measured ones by the size of a matrix."""
    return by_size(
        cfg.model,
        [(d * f, 18e-9 * rows * d * f / ms) for rows, d, f, ms in _GROUPED],
    )
